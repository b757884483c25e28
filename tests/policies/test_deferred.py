"""The paper's worked examples as timelines, and what `Deferred` adds to the paper."""

from __future__ import annotations

import math

import pytest

from ray_slo.core import (
    BatchOutcome,
    BatchStatus,
    Cluster,
    DispatchDelay,
    DropReason,
    LatencyProfile,
    Model,
    Request,
    Variant,
    Worker,
)
from ray_slo.policies.deferred import Deferred
from ray_slo.policies.shared.lanes import Flight, Times
from ray_slo.simulation.arrivals import Burst, Gamma, Mmpp
from ray_slo.simulation.arrivals import Times as TimesOfArrival
from ray_slo.simulation.simulator import simulate
from ray_slo.simulation.workloads import Workload
from tests.policies.harness import Host, one_model

# Symphony §3.3: 3 GPUs, ℓ(b) = b + 5, SLO 12, a request every 0.75. The units are seconds here.
PAPER = one_model(LatencyProfile.linear(1.0, 5.0, 12), 12.0, 3)
MISSING = {13, 14, 15}


def paper_requests(count: int, missing: set[int] = frozenset()) -> list[Request]:
    """R1 … Rcount, R_i at 0.75 · (i − 1)."""
    arrivals = {i: 0.75 * (i - 1) for i in range(1, count + 1) if i not in missing}
    return [Request(i, "m", t, t + 12.0) for i, t in arrivals.items()]


def requests(*deadlines: float, arrival: float = 0.0, model: str = "m") -> list[Request]:
    return [Request(i, model, arrival, d) for i, d in enumerate(deadlines, start=1)]


def linear(workers: int, *, delay: DispatchDelay | None = None, max_batch: int = 12) -> Cluster:
    return one_model(LatencyProfile.linear(1.0, 5.0, max_batch), 12.0, workers, delay)


def consolidate(**kwargs):
    return lambda: Deferred("consolidate", **kwargs)


# Figure 4: batches of 4 every 3 time units, over the workers in turn.
STAGGERED = [(2.25 + 3 * k, f"w{k % 3}", list(range(4 * k + 1, 4 * k + 5))) for k in range(12)]


class TestWorkedExample:
    def test_responsive_falls_into_the_pattern(self):
        """The rate is just what the workers sustain: once it is measured, wait for frontrun."""
        host = Host(Deferred, PAPER)
        host.run(paper_requests(48))
        assert host.timeline()[0] == (0.0, "w0", [1])
        batches = [ids for _, _, ids in host.timeline()]
        assert batches[-4:] == [ids for _, _, ids in STAGGERED[-4:]]
        assert max(host.dropped, default=0) <= 4  # of the start, before there was a measurement

    @pytest.mark.parametrize("gathering", ["drop_head", "prefix"])
    def test_missing_requests_are_got_over(self, gathering):
        """Figure 5b: after R13–R15 fail to come, nothing is dropped and the pattern is regained."""
        host = Host(consolidate(gathering=gathering), PAPER)
        host.run(paper_requests(91, MISSING))
        assert host.dropped == {}
        assert host.timeline()[:5] == [
            (2.25, "w0", [1, 2, 3, 4]),
            (5.25, "w1", [5, 6, 7, 8]),
            (8.25, "w2", [9, 10, 11, 12]),
            (13.5, "w0", [16, 17, 18, 19]),
            (16.5, "w1", [20, 21, 22, 23]),
        ]
        sizes = [len(ids) for _, _, ids in host.timeline()]
        assert sizes == [4] * 22


class TestDeferral:
    def test_full_batch_leaves_at_once(self):
        host = Host(consolidate(max_batch_size=2), linear(1))
        host.arrive(requests(12.0, 12.0))
        assert host.timeline() == [(0.0, "w0", [1, 2])]

    def test_profile_limits_the_batch(self):
        host = Host(consolidate(), linear(2, max_batch=3))
        host.arrive(requests(40.0, 40.0, 40.0, 40.0))
        assert host.timeline() == [(0.0, "w0", [1, 2, 3])]

    def test_jitter_and_margin(self):
        host = Host(consolidate(jitter_ms=500.0, margin_ms=250.0), linear(1), margin_s=0.25)
        host.run(requests(12.0))
        assert host.timeline() == [(5.0 - 0.75, "w0", [1])]

    def test_consolidate_keeps_to_the_first_workers(self):
        host = Host(consolidate(), linear(3))
        host.run([Request(i, "m", 20.0 * i, 20.0 * i + 12.0) for i in range(5)])
        assert {worker for _, worker, _ in host.timeline()} == {"w0"}

    def test_cancelled_head_moves_frontrun(self):
        host = Host(consolidate(), linear(1))
        a, b = requests(12.0, 14.0)
        host.arrive([a, b])
        assert host.wake_at == 12.0 - 8
        host.cancel([a])
        host.advance(30.0)
        assert host.timeline() == [(14.0 - 7, "w0", [2])]


class TestEarlyDrop:
    def test_refused_as_soon_as_no_worker_can_be_free_in_time(self):
        """Not when the running batch ends, at 12, nor at the last call, 15 − ℓ(1) = 9."""
        host = Host(consolidate(max_batch_size=1), linear(1))
        first, second, third = requests(8.0, 15.0, 18.0)
        host.arrive([first])
        host.advance(1.0)
        host.arrive([third])  # done by 12
        assert host.dropped == {}
        host.arrive([second])  # takes precedence over the third, which still could be done by 18
        assert host.dropped == {}
        host.advance(6.0)
        assert host.timeline() == [(0.0, "w0", [1]), (6.0, "w0", [2])]
        host.advance(30.0)
        assert host.timeline()[2:] == [(12.0, "w0", [3])]

        host = Host(consolidate(max_batch_size=1), linear(1))
        host.arrive([first])
        host.advance(1.0)
        host.arrive(requests(11.5))
        assert host.dropped[1] == (1.0, DropReason.WOULD_MISS)

    def test_refused_when_another_model_takes_the_worker(self):
        models = [Model(m, 20.0, (Variant(m, {"default": LatencyProfile([6.0])}),)) for m in "ab"]
        host = Host(consolidate(), Cluster.uniform(models, 1))
        host.arrive([Request(1, "a", 0.0, 10.0), Request(2, "b", 0.0, 11.0)])
        assert host.timeline() == [(0.0, "w0", [1])]
        assert host.dropped == {2: (0.0, DropReason.WOULD_MISS)}

    def test_overdue_worker_might_be_free_at_any_moment(self):
        """Nothing is sent to it, and what waits is kept to the last moment, and no longer."""
        host = Host(consolidate(max_batch_size=1), linear(1))
        host.arrive(requests(12.0))
        host.advance(7.0, ends=False)  # predicted to end at 6
        host.arrive([Request(2, "m", 7.0, 14.0)])
        assert host.dropped == {}
        host.advance(7.9, ends=False)
        host.finish("w0")
        assert host.timeline()[1:] == [(7.9, "w0", [2])]
        host.advance(15.0, ends=False)
        host.arrive([Request(3, "m", 15.0, 23.0)])
        host.advance(20.0, ends=False)
        at, reason = host.dropped[3]
        assert at == pytest.approx(23.0 - 6.0, abs=1e-5)
        assert reason is DropReason.WOULD_MISS

    def test_late_host_drops_as_expired(self):
        host = Host(consolidate(), linear(1))
        host.arrive(requests(12.0))
        host.now = 13.0
        host.decide()
        assert host.dropped == {1: (13.0, DropReason.EXPIRED)}

    def test_no_worker(self):
        """Requests wait for a worker until their deadline."""
        empty = linear(0)
        host = Host(consolidate(), empty)
        host.arrive(requests(12.0, 30.0))
        host.advance(13.0)
        at, reason = host.dropped[1]
        assert at == pytest.approx(12.0, abs=1e-5)
        assert reason is DropReason.NO_WORKER
        host.change(linear(1))
        host.advance(50.0)
        assert host.timeline() == [(30.0 - 7, "w0", [2])]


class TestGathering:
    # A worker that is busy until 6 while R2 … wait: R2's slack then allows only one request.
    def late_head(self, policy) -> Host:
        host = Host(policy, linear(1))
        host.arrive([Request(1, "m", 0.0, 6.0)])
        host.arrive([Request(2, "m", 0.0, 12.5), *requests(*[16.0] * 5)[2:]])
        host.advance(6.0)
        return host

    def test_prefix_takes_what_the_head_allows(self):
        host = self.late_head(consolidate(gathering="prefix"))
        assert host.timeline()[1] == (6.0, "w0", [2])

    def test_drop_head_keeps_the_target(self):
        host = self.late_head(consolidate(target_batch_size=3))
        assert host.timeline()[1] == (6.0, "w0", [3, 4, 5])
        assert host.dropped == {2: (6.0, DropReason.SHED)}

    def test_drop_head_grows_past_the_target_while_the_head_allows(self):
        host = self.late_head(consolidate(target_batch_size=1))
        assert host.timeline()[1] == (6.0, "w0", [2])
        host = Host(consolidate(target_batch_size=2), linear(1))
        host.arrive(requests(9.0, 9.0, 9.0, 9.0))
        assert host.timeline() == [(0.0, "w0", [1, 2, 3, 4])]

    def test_nothing_is_shed_while_two_workers_idle(self):
        late = [Request(1, "m", 0.0, 6.5), *requests(*[12.0] * 5)[1:]]
        host = Host(consolidate(target_batch_size=4), linear(2))
        host.arrive(late)
        host.advance(20.0)
        assert [ids for _, _, ids in host.timeline()] == [[1], [2, 3, 4, 5]]
        host = Host(consolidate(target_batch_size=4), linear(1))
        host.arrive(late)
        assert host.dropped == {1: (0.0, DropReason.SHED)}

    def test_default_target_follows_the_load(self):
        """§3.3's cluster: staggered batch 4. Batches of 1 sustain 3 / ℓ(1) = 0.5 requests/s. In
        overload 5 come in a unit of time, and ℓ(5) = 10 of the 12 are left for them."""
        for rate, target in [(0.4, 1), (0.8, 2), (1.3, 4), (4.0, 5)]:
            policy = Deferred("consolidate")
            host = Host(lambda p=policy: p, PAPER)
            for i in range(int(200 * rate)):
                host.advance(i / rate)
                host.arrive([Request(i, "m", host.now, host.now + 12.0)])
            (lane,) = policy._pools[0].lanes
            assert lane.target == target, rate


class TestResponsive:
    def test_batch_grows_with_the_load(self):
        """Smallest b with 3·b/ℓ(b)·0.8 ≥ rate: 2 at 0.6/s, 3 at 0.85/s; waits beyond 1.07/s."""
        for rate, size in [(0.3, 1), (0.6, 2), (0.85, 3)]:
            host = Host(Deferred, linear(3))
            host.run([Request(i, "m", i / rate, i / rate + 12.0) for i in range(200)])
            assert [len(ids) for _, _, ids in host.timeline()[-20:-1]] == [size] * 19
            assert host.dropped == {}

    def test_load_is_shared_by_the_models(self):
        """Together they need 0.79 of the workers; each aims at what its half can gather.

        The first may wait 12 − ℓ(b), in which 0.425 · (7 − b) more come: b = 2.79 on average.
        """
        profile = LatencyProfile.linear(1.0, 5.0, 12)
        models = [Model(m, 12.0, (Variant(m, {"default": profile}),)) for m in "ab"]
        policy = Deferred()
        host = Host(lambda: policy, Cluster.uniform(models, 3))
        for i in range(200):
            host.advance(i / 0.85)
            host.arrive([Request(i, "ab"[i % 2], host.now, host.now + 12.0)])
        assert {lane.go_size for lane in policy._pools[0].lanes} == {2}
        assert policy._pools[0].load == pytest.approx(0.85 / (2.79 / 7.79) / 3, rel=0.02)

    def test_idle_time_lowers_the_measured_load(self):
        policy = Deferred()
        host = Host(lambda: policy, linear(3))
        host.run([Request(i, "m", i / 0.85, i / 0.85 + 12.0) for i in range(100)])
        host.now += 1000.0
        host.arrive([Request(1000, "m", host.now, host.now + 12.0)])
        assert host.timeline()[-1] == (host.now, "w0", [1000])


class TestDelays:
    # Appendix D: delay(b) = 0.5 + 0.25·b.
    delay = DispatchDelay(0.5, 0.25)

    def test_sent_ahead_of_frontrun(self):
        """Due when a second request would not make it: 12 − ℓ(2) − delay(2)."""
        host = Host(consolidate(), linear(1, delay=self.delay))
        host.run(requests(12.0))
        assert host.timeline() == [(4.0, "w0", [1])]
        assert host.sent[0].finish_at == 4.0 + 0.75 + 6.0

    def test_batch_sent_ahead_starts_when_the_first_ends(self):
        """Late by 1: the third is sent 0.75 before the second's end as it is known then."""
        host = Host(consolidate(max_batch_size=1), linear(1, delay=self.delay))
        host.arrive(requests(7.0, 20.0, 30.0))
        host.advance(7.75, ends=False)
        host.finish("w0")
        host.advance(30.0)
        assert host.timeline()[2] == (7.75 + 6.0 - 0.75, "w0", [3])

    def test_lost_batch_ahead_makes_room(self):
        host = Host(consolidate(max_batch_size=1), linear(1, delay=self.delay))
        host.arrive(requests(7.0, 20.0))
        host.advance(6.0)
        host.finish("w0", BatchStatus.LOST, index=1, again=True)
        assert host.timeline()[1:] == [(6.0, "w0", [2]), (6.0, "w0", [2])]


class TestSeveralModels:
    def test_only_loaded_variants_in_the_order_of_the_model(self):
        variants = tuple(
            Variant(n, {"default": LatencyProfile.linear(1.0, 5.0, 4)}) for n in ("large", "small")
        )
        workers = [
            Worker("w0", "default", frozenset({"small"})),
            Worker("w1", "default", frozenset({"small", "large"})),
            Worker("w2", "default", frozenset()),
        ]
        host = Host(Deferred, Cluster.of([Model("m", 12.0, variants)], workers))
        for r in requests(12.0, 12.0, 12.0):
            host.arrive([r])
        dispatches = [a for d in host.decisions for a in d.actions]
        assert [(d.worker, d.variant) for d in dispatches] == [("w0", "small"), ("w1", "large")]

    def test_unlike_hardware(self):
        """A slow worker takes only what it can serve, and leaves the head to the fast one."""
        profiles = {"fast": LatencyProfile.linear(1, 1, 8), "slow": LatencyProfile.linear(2, 8, 8)}
        workers = [Worker("slow", "slow", frozenset("v")), Worker("fast", "fast", frozenset("v"))]
        cluster = Cluster.of([Model("m", 20.0, (Variant("v", profiles),))], workers)
        host = Host(Deferred, cluster)
        host.arrive(requests(5.0))
        assert host.timeline() == [(0.0, "fast", [1])]
        host.arrive([Request(2, "m", 0.0, 6.0), Request(3, "m", 0.0, 30.0)])
        assert host.timeline()[1:] == [(0.0, "slow", [3])]
        host.advance(30.0)
        assert host.timeline()[2:] == [(2.0, "fast", [2])]
        assert host.dropped == {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"objective": "fast"}, "objective must be one of responsive, consolidate, got 'fast'"),
        ({"gathering": "x"}, "gathering must be one of drop_head, prefix, got 'x'"),
        ({"target_batch_size": 0}, "target_batch_size must be at least 1, got 0"),
        ({"target_batch_size": 2, "gathering": "prefix"}, "'drop_head' only"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, got 0"),
        ({"margin_ms": -1.0}, "margin_ms must be at least 0, got -1.0"),
        ({"jitter_ms": float("nan")}, "jitter_ms must be a finite number, got nan"),
        ({"headroom": 0.0}, "headroom must be above 0 and at most 1, got 0.0"),
        ({"rate_window_s": 0.0}, "rate_window_s must be positive, got 0.0"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Deferred(**kwargs)


def test_a_straggler_after_a_burst_does_not_wait_for_company():
    """Responsive: the measured rate is still high, but what the batch lacks does not come."""
    model = Model("m", 5.0, (Variant("m", {"default": LatencyProfile.linear(0.004, 0.02, 64)}),))
    burst = tuple(0.01 * i for i in range(200))
    report = simulate(
        Deferred(),
        Cluster.uniform([model], 2),
        Workload(arrivals=TimesOfArrival(times_s=(*burst, 2.2))),
        duration_s=10,
        seed=1,
    )
    straggler = report.requests.iloc[-1]
    assert straggler.arrival_s == 2.2
    assert straggler.queueing_s < 0.1  # frontrun is seconds away


def two_models(workers: int, latency: LatencyProfile | None = None) -> Cluster:
    profile = latency or LatencyProfile.linear(1.0, 5.0, 12)
    models = [Model(m, 12.0, (Variant(m, {"default": profile}),)) for m in "ab"]
    return Cluster.uniform(models, workers)


class TestSharedPool:
    @staticmethod
    def run(policy: Deferred, cluster: Cluster, gap: float, count: int = 300) -> Host:
        host = Host(lambda: policy, cluster)
        for i in range(count):
            host.advance(gap * i)
            host.arrive([Request(i, "ab"[i % 2], host.now, host.now + 12.0)])
        return host

    def test_goes_round_at_a_low_load(self):
        """Two workers, a request every 4: one is free, or will be, when the next model comes."""
        policy = Deferred()
        host = self.run(policy, two_models(2), 4.0)
        assert {lane.go_size for lane in policy._pools[0].lanes} == {1}
        assert [sent.at for sent in host.sent[-100:]] == [4.0 * i for i in range(200, 300)]
        assert host.dropped == {}

    def test_does_not_go_round_when_rounds_do_not_fit(self):
        """A request every 1.6: no two workers serve both models often enough; batches form."""
        policy = Deferred()
        host = self.run(policy, two_models(2), 1.6)
        assert {lane.go_size for lane in policy._pools[0].lanes} == {2}
        assert [len(sent.ids) for sent in host.sent[-10:]] != [1] * 10

    def test_batches_are_due_earlier_by_the_wait_for_a_worker(self):
        """b comes 1 after a and would be due 1 after it, while the only worker runs a's batch."""
        policy = Deferred("consolidate")
        host = Host(lambda: policy, two_models(1))
        sent = 0
        for i in range(200):
            host.advance(40.0 * i)
            host.arrive([Request(2 * i, "a", host.now, host.now + 12.0)])
            host.advance(40.0 * i + 1)
            host.arrive([Request(2 * i + 1, "b", host.now, host.now + 20.0)])
            host.advance(40.0 * i + 39)
            sent = len(host.sent)
        # a is due at 12 − ℓ(2) = 5 and runs until 11; b at 21 − 7 = 14 needs no worker before.
        assert sent == 400
        assert policy._pools[0].wait_s == 0.0
        for i in range(200, 400):
            host.advance(40.0 * i)
            host.arrive([Request(2 * i, "a", host.now, host.now + 12.0)])
            host.arrive([Request(2 * i + 1, "b", host.now, host.now + 17.0)])
            host.advance(40.0 * i + 39)
        # Now b is due at 17 − 7 = 10, in the middle of a's batch, and waits until 11.
        learned = policy._pools[0].wait_s
        assert learned > 0.0
        policy.cluster_changed(host.now, two_models(1))
        assert policy._pools[0].wait_s == learned


def test_stale_ends_of_busy_workers_do_not_pile_up():
    """With idle workers nobody asks when a busy one will be free; its entries must still go."""
    policy = Deferred("consolidate")
    host = Host(lambda: policy, linear(3))
    for i in range(500):
        host.advance(20.0 * i)
        host.arrive([Request(i, "m", host.now, host.now + 12.0)])
    assert len(policy._pools[0]._single) <= 3


@pytest.mark.parametrize("objective", ["responsive", "consolidate"])
@pytest.mark.parametrize("share", [0.68, 0.76])
def test_a_shared_pool_does_not_fall_into_small_batches(objective, share):
    """Due earlier, batches are smaller; they keep workers from others, which wait longer."""
    profile = LatencyProfile.linear(0.001, 0.015, 64)
    models = [Model(f"m{i}", 0.046, (Variant(f"v{i}", {"default": profile}),)) for i in range(10)]
    report = simulate(
        Deferred(objective),
        Cluster.uniform(models, 32),
        Workload.poisson(share * 32 * 31 / 0.046),
        duration_s=1.6,
        warmup_s=0.8,
        seed=14,
    )
    assert report.bad_rate() < 0.005


def test_in_overload_full_batches_go_first():
    """Twenty models alike on one worker: in the order of deadlines batches stay small."""
    profile = LatencyProfile.linear(0.001, 0.004, 64)
    models = [Model(f"m{i}", 0.03, (Variant(f"v{i}", {"default": profile}),)) for i in range(20)]
    bad = {
        policy: simulate(
            policy,
            Cluster.uniform(models, 1),
            Workload.poisson(500),
            duration_s=4,
            warmup_s=1,
            seed=2,
        ).bad_rate()
        for policy in ("deferred", "eager", "flex")
    }
    assert bad["deferred"] < bad["eager"] - 0.05
    assert bad["deferred"] < bad["flex"] + 0.01


@pytest.mark.parametrize("load", [1.6, 2.3, 2.6])
def test_overload_of_one_model_is_served_at_the_staggered_bound(load):
    """With targets that come in time only on average, workers idled: 97 % of it at load 2.3."""
    cluster = one_model(LatencyProfile.linear(0.001, 0.005, 64), 0.028, 4)
    bound = 4 * 17 / 0.022  # (1 + 1/4) · ℓ(17) = 27.5 ms
    report = simulate(
        "deferred", cluster, Workload.poisson(load * bound), duration_s=4, warmup_s=1, seed=3
    )
    assert report.goodput > 0.995 * bound


@pytest.mark.parametrize("seed", [1, 2])
def test_a_burst_gets_batches_for_its_own_rate(seed):
    """The measured load is moderate; by that, heads kept batches small until the burst was over."""
    cluster = one_model(LatencyProfile.linear(0.0004, 0.0025, 64), 0.011, 1)
    workload = Workload(arrivals=Mmpp(rate=500, burst=Burst(peak=4.0, burst_s=0.05, calm_s=0.15)))
    ours, largest = (
        simulate(policy, cluster, workload, duration_s=5, warmup_s=1, seed=seed).bad_rate()
        for policy in ("deferred", "flex")
    )
    assert ours < 1.5 * largest  # 0.49 against 0.22 by the measured load


@pytest.mark.parametrize("load", [0.35, 0.45])
def test_no_head_is_dropped_for_a_burst_that_can_be_served(load):
    """Requests that come together have a high rate, but the workers have half an SLO for them."""
    cluster = one_model(LatencyProfile.linear(0.001, 0.005, 64), 0.025, 8)
    arrivals = Gamma(rate=load * 4600, shape=0.1)
    bad = {
        objective: simulate(
            Deferred(objective), cluster, Workload(arrivals=arrivals), duration_s=8, seed=1
        ).bad_rate()
        for objective in ("responsive", "consolidate")
    }
    assert bad["responsive"] <= bad["consolidate"] + 0.001  # 0.02 to 0.03 by the rate of the burst


@pytest.mark.parametrize(("took_s", "kept"), [(6.0, False), (3.6, True)])
def test_requests_wait_for_a_worker_that_may_end_early(took_s, kept):
    """ℓ(1) = 6 and SLO 10: behind a batch that was sent a moment before, a request is late, unless
    that batch ends early, as the one before it did."""
    host = Host(Deferred, one_model(LatencyProfile.linear(1.0, 5.0, 1), 10.0, 1))
    host.arrive([Request(1, "m", 0.0, 10.0)])
    host.advance(took_s, ends=False)
    host.finish("w0")
    host.advance(20.0)
    host.arrive([Request(2, "m", 20.0, 30.0)])
    host.advance(21.0, ends=False)
    host.arrive([Request(3, "m", 21.0, 31.0)])
    assert (3 in host.waiting) == kept
    assert host.dropped == ({} if kept else {3: (21.0, DropReason.WOULD_MISS)})
    host.advance(20.0 + took_s, ends=False)
    host.finish("w0")
    assert [s.ids for s in host.sent] == [[1], [2], *([[3]] if kept else [])]


SCATTER = 0.2  # standard deviation of the logarithm of times
ALMOST_ALL = math.exp(1.645 * SCATTER)  # 95th percentile over the median


@pytest.mark.parametrize(
    ("alpha_s", "beta_s", "slo_s", "workers"),
    [(0.005, 0.005, 0.1, 1), (0.010, 0.010, 0.3, 2), (0.001, 0.020, 0.1, 4)],
)
def test_the_load_follows_the_mean_time_if_times_scatter(alpha_s, beta_s, slo_s, workers):
    """Profiles are 95th percentiles. By them, a load of 0.7 seems to be 0.95, and requests wait for
    batches that are not needed: the bad rates were 1.3 %, 0.3 % and 2.0 %."""
    real = LatencyProfile.linear(alpha_s, beta_s, 64)
    most = max(b for b in range(1, 65) if (1 + 1 / workers) * real.latency(b) <= slo_s)
    mean_s = real.latency(most) * math.exp(SCATTER**2 / 2)
    report = simulate(
        "deferred",
        one_model(real.scaled(ALMOST_ALL), slo_s, workers),
        Workload.poisson(0.7 * workers * most / mean_s),
        duration_s=300 * slo_s,
        warmup_s=20 * slo_s,
        seed=5,
        latency_noise=SCATTER,
        truth=one_model(real, slo_s, workers),
    )
    assert report.bad_rate() < 0.007


def test_the_pace_of_a_pool():
    """2 s of 4 predicted, then 9 s of 6: the older batch counts a little less."""

    def ended(took_s: float, predicted_s: float) -> tuple[Flight, BatchOutcome]:
        outcome = BatchOutcome(1, [], 10.0, 10.0 + took_s)
        return Flight(1, 10.0, predicted_s, 10.0 + predicted_s), outcome

    times = Times()
    assert (times.pace, times.early_s) == (1.0, 0.0)
    times.add(*ended(2.0, 4.0))
    assert (times.pace, times.early_s) == (0.5, 2.0)
    times.add(*ended(9.0, 6.0))
    assert times.pace == pytest.approx((0.98 * 2 + 9) / (0.98 * 4 + 6), abs=0.0005)
    assert times.early_s == pytest.approx(0.98 * 2)
    hung = Times()
    hung.add(*ended(3600.0, 1.0))
    assert hung.pace == 2.0


@pytest.mark.parametrize("pace", [0.5, 1.0, 1.25])
def test_a_pace_changes_the_measured_load(pace):
    """Batches take a multiple of what the profile says; requests come at half the workers' rate."""
    told = LatencyProfile.linear(0.004, 0.020, 25)
    policy = Deferred()
    rate = 0.5 * 2 * 25 / told.latency(25)
    simulate(
        policy,
        one_model(told, 0.25, 2),
        Workload.poisson(rate),
        duration_s=20,
        seed=1,
        truth=one_model(told.scaled(pace), 0.25, 2),
    )
    (pool,) = policy._pools
    assert pool.times.pace == pytest.approx(pace, abs=0.001)
    (lane,) = pool.lanes
    best = policy._efficiency[lane].best
    assert pool.load == pytest.approx(pace * lane.model.rate / best / 2, rel=1e-6)
