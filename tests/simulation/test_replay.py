"""Recorded runs: the same policy decides the same again, and other policies are simulated."""

import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core import (
    BatchOutcome,
    Cluster,
    Decision,
    Dispatch,
    DispatchDelay,
    LatencyProfile,
    Model,
    Request,
    Variant,
)
from ray_slo.papers import ramsis
from ray_slo.policies import make_policy
from ray_slo.policies.registry import COMPOSE
from ray_slo.record.decode import read
from ray_slo.record.encode import Lines
from ray_slo.record.rows import Recording, Round, Start
from ray_slo.simulation import WorkerEvent, simulate
from ray_slo.simulation.replay import recorded, replay, tape, what_if
from ray_slo.simulation.replay.simulated import Nearest, fit, truth_of
from ray_slo.simulation.workloads import Workload
from tests.policies import tables
from tests.policies.contract import (
    CASES,
    Script,
    id_of,
    make_cluster,
    operation,
    recipe,
    worker_kind,
)
from tests.policies.harness import Host

VARIANTS = (
    Variant("v", {"default": LatencyProfile.linear(0.002, 0.01, 32)}, 70.0),
    Variant("w", {"default": LatencyProfile.linear(0.004, 0.02, 32)}, 80.0),
)
CLUSTER = Cluster.uniform([Model("m", 0.1, VARIANTS)], 3, delay=DispatchDelay(0.001))
RULE = "tests.policies.tables:solve"


def record(folder, policy, kwargs, rate=200, duration_s=1.5, **options):
    lines = Lines(folder, policy, Start.of(policy, kwargs))
    report = simulate(
        Recording(make_policy(policy, kwargs), lines),
        CLUSTER,
        Workload.poisson(rate),
        duration_s=duration_s,
        **options,
    )
    (life,) = read(lines.close())
    return life, report


@pytest.mark.parametrize(
    ("policy", "kwargs"),
    [
        ("deferred", {"objective": "consolidate", "gathering": "prefix"}),
        ("flex", {"lambda_": 1.5}),
        ("kairos", {"learn": True}),
    ],
    ids=str,
)
def test_the_same_policy_decides_the_same(tmp_path, policy, kwargs):
    life, report = record(
        *(tmp_path, policy, kwargs),
        latency_noise=0.1,
        preempt_delay_s=0.003,
        worker_events=[WorkerEvent(0.7, "w1", "leave"), WorkerEvent(1.2, "w1", "join")],
    )
    replayed = replay(life)
    assert replayed.identical, replayed.difference
    assert replayed.actions >= len(report.batches)
    # What the log says of the run is what the simulator said.
    told = recorded(life)
    for outcome in ("good", "late", "dropped"):
        assert told.count(outcome) == report.count(outcome)
    assert told.accuracy == pytest.approx(report.accuracy)
    assert np.sort(told.latencies_s()) == pytest.approx(np.sort(report.latencies_s()))
    assert len(told.batches) == len(report.batches)


def test_another_policy_is_told_where_it_differs(tmp_path):
    life, _ = record(tmp_path, "eager", {})
    found = replay(life, lambda: make_policy("timeout", {"timeout_ms": 20.0})).difference
    assert found is not None
    assert found.recorded.startswith("dispatch batch 1 of v to w0: requests [0]")
    assert found.replayed == "nothing"


def test_what_if_without_noise_is_what_was(tmp_path):
    for policy in ("deferred", "eager"):
        life, report = record(tmp_path, policy, {}, rate=400)
        again = what_if(life, policy)
        assert again.count("good") == report.count("good")
        assert again.latency_s(99) == pytest.approx(report.latency_s(99), rel=1e-6)
        assert again.meta["policy"] == policy


@pytest.mark.slow
def test_what_if_predicts_another_policy(tmp_path):
    # Batches take 10 % less than what the policy is told, and the way to a worker longer.
    truly = Cluster.uniform(
        [
            Model(
                "m",
                0.1,
                tuple(
                    Variant(v.name, {"default": v.profiles["default"].scaled(0.9)}, v.accuracy)
                    for v in VARIANTS
                ),
            )
        ],
        *(3, "default", DispatchDelay(0.002)),
    )
    options = {"truth": truly, "latency_noise": 0.05, "report_delay_s": 0.002, "rate": 1300}
    options["duration_s"] = 3.0
    eager, seen = record(tmp_path / "eager", "eager", {}, **options)
    deferred, _ = record(tmp_path / "deferred", "deferred", {}, **options)
    said = what_if(deferred, "eager")
    assert said.goodput == pytest.approx(seen.goodput, rel=0.1)
    assert recorded(deferred).goodput > 1.3 * seen.goodput  # or there were nothing to say
    truth = truth_of(tape(deferred))
    believed = CLUSTER.variants["v"].profiles["default"]
    assert truth.profiles["v", "default"](8) == pytest.approx(0.9 * believed(8), rel=0.05)
    assert truth.report_s == pytest.approx(0.002)
    assert truth.dispatch(1.0, 0.0) == pytest.approx(0.002)
    assert what_if(eager, "deferred").goodput == pytest.approx(recorded(deferred).goodput, rel=0.05)


def test_workers_come_and_go_as_they_did(tmp_path):
    events = [WorkerEvent(0.5, "w0", "leave"), WorkerEvent(1.0, "w0", "join")]
    life, report = record(tmp_path, "eager", {}, worker_events=events)
    said = what_if(life, "deferred")
    batches = said.batches
    used = batches["started_s"][batches["worker"] == "w0"]
    zero = tape(life).zero
    assert not ((used + zero > 0.5) & (used + zero < 1.0)).any()
    assert (used + zero > 1.0).any()
    assert recorded(life).utilisation()["w0"] == pytest.approx(report.utilisation()["w0"], abs=0.01)


def test_a_dispatch_has_the_price_it_was_sent_at(tmp_path):
    life, _ = record(tmp_path, "price", {})
    prices = [a.price for r in life.rounds() for a in r.decision.actions if isinstance(a, Dispatch)]
    assert len(prices) > 100
    assert all(p > 0 for p in prices)
    assert len(set(prices)) > 1
    assert make_policy("price").explain is False


class Held(Request):
    """A request of a live client, under its own number."""

    def __init__(self, number, client_id, arrival):
        super().__init__(number, "m", arrival, arrival + 1.0)
        self.client, self.client_id = "c", client_id


def test_tries_count_once_and_cancels_hold(tmp_path):
    lines = Lines(tmp_path, "live", Start.of("eager", {}))
    policy = Recording(make_policy("eager"), lines)
    policy.cluster_changed(10.0, CLUSTER)
    busy = [Held(i, 100 + i, 10.0 + i / 1e4) for i in range(4)]
    for r in busy:  # three workers, a batch each; the fourth waits
        policy.requests_arrived(r.arrival, [r])
        policy.decide(r.arrival)
    policy.requests_cancelled(10.002, [busy[3]])
    policy.decide(10.002)
    gone = Cluster.of(CLUSTER.models.values(), list(CLUSTER.workers.values())[1:], CLUSTER.delay)
    policy.cluster_changed(10.005, gone)
    policy.requests_arrived(10.006, [Held(9, 100, 10.006)])  # its worker died
    policy.decide(10.006)
    (life,) = read(lines.close())
    assert replay(life).identical
    report = recorded(life)
    assert report.count() == 4
    assert report.batches["status"].tolist() == ["lost"] * 3
    assert tape(life).first_of[9] == 0
    said = what_if(life, "eager")
    # w0 left with the first request, which went elsewhere; the cancelled one never ran.
    assert said.requests["outcome"].tolist() == ["good", "good", "good", "pending"]
    assert said.batches["status"].tolist()[:1] == ["lost"]


class Hearing:
    """Notes the tasks of its requests, and serves nothing."""

    serves_late = True

    def __init__(self):
        self.heard = []

    def cluster_changed(self, now, cluster): ...
    def requests_cancelled(self, now, requests): ...
    def batch_finished(self, now, worker, outcome): ...
    def requests_arrived(self, now, requests):
        self.heard += [(r.model, r.task, r.size) for r in requests]

    def decide(self, now):
        return Decision()


def test_requests_keep_their_tasks(tmp_path):
    lines = Lines(tmp_path, "live", Start.of("eager", {}))
    policy = Recording(make_policy("eager"), lines)
    policy.cluster_changed(0.0, CLUSTER)
    tasks = ["find", None, "read"]
    requests = [Request(i, "m", i / 10, 1.0, 1 + i, task) for i, task in enumerate(tasks)]
    policy.requests_arrived(0.3, requests)
    policy.decide(0.3)
    (life,) = read(lines.close())
    policy = Hearing()
    what_if(life, policy)
    assert policy.heard == [("m", "find", 1), ("m", "m", 2), ("m", "read", 3)]


class Shaky:
    """Not a pure state machine: it remembers across its lives."""

    serves_late = True
    lives = 0

    def __init__(self):
        Shaky.lives += 1
        self.waiting = []

    def cluster_changed(self, now, cluster): ...
    def requests_cancelled(self, now, requests): ...
    def batch_finished(self, now, worker, outcome): ...
    def requests_arrived(self, now, requests):
        self.waiting += requests

    def decide(self, now):
        if now > 3.0:
            raise RuntimeError(f"in life {Shaky.lives}")
        taken, self.waiting = self.waiting, []
        if not taken:
            return Decision()
        return Decision([Dispatch(1, "w0", "v", taken, now, now + Shaky.lives)])


def test_errors_and_impure_policies(tmp_path):
    Shaky.lives = 0
    lines = Lines(tmp_path, "shaky", Start.of(Shaky, {}))
    policy = Recording(Shaky(), lines)
    policy.cluster_changed(0.0, CLUSTER)
    policy.decide(0.0)
    policy.requests_arrived(1.0, [Request(0, "m", 1.0, 2.0)])
    policy.decide(1.0)
    with pytest.raises(RuntimeError):
        policy.decide(4.0)
    (life,) = read(lines.close())
    found = replay(life)
    assert (found.rounds, found.difference.round) == (1, 1)
    assert "to 2.0" in found.difference.recorded
    assert "to 3.0" in found.difference.replayed

    def same():
        Shaky.lives = 0
        return Shaky()

    again = replay(life, same)
    assert again.identical
    assert again.error == "RuntimeError: in life 1"
    assert tape(life).errors == [(4.0, "RuntimeError: in life 1")]


def test_a_log_that_cannot_be_replayed_says_why(tmp_path):
    life, _ = record(tmp_path, "eager", {}, duration_s=0.2)
    for change, match in (
        ({"begins": False}, "the beginning is gone"),
        ({"lost": (12, -1)}, "12 rows were not kept and 1 files are missing"),
        ({"start": Start.of(make_policy("eager"), {})}, "ready-made object"),
        ({"start": Start.of("ramsis", {"solver": print})}, "arguments of policy 'ramsis'"),
        ({"start": Start.of("os:mkdir", {"path": str(tmp_path / "x")})}, "no class of a policy"),
        ({"start": Start.of("subprocess:Popen", {"args": "true"})}, "no class of a policy"),
        ({"start": Start.of(COMPOSE, {"policy": "os:getcwd"})}, "no class of a policy"),
    ):
        with pytest.raises(ValueError, match=match):
            replay(type(life)(**{**vars(life), **change}))
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=r"warmup_s must be .* less than the 0\.\d+ s"):
        recorded(life, warmup_s=3.0)
    lines = Lines(tmp_path / "idle", "idle", Start.of("eager", {}))
    lines(Round(0.0, [("cluster_changed", (0.0, CLUSTER))], Decision()))
    (idle,) = read(lines.close())
    with pytest.raises(ValueError, match="no request arrived"):
        tape(idle)


def test_nearest():
    nearest = Nearest([(1.0, 10.0), (2.0, 20.0), (4.0, 40.0)])
    found = [nearest(at, 0.0) for at in (0, 1.4, 1.6, 2.9, 3.1, 9)]
    assert found == [10.0, 10.0, 20.0, 20.0, 40.0, 40.0]
    assert Nearest([])(3.0, 7.0) == 7.0


def with_tables(folder, solve):
    """A run of `ramsis` whose tables are solved aside."""
    lines = Lines(folder, "tables", Start.of("ramsis", {"solver": None}))
    policy = Recording(make_policy("ramsis", {"solver": None}), lines)
    policy.cluster_changed(0.0, CLUSTER)
    for i in range(30):
        now = i / 100
        policy.requests_arrived(now, [Request(i, "m", now, now + 0.1)])
        for action in policy.decide(now).actions:
            if isinstance(action, Dispatch):
                outcome = BatchOutcome(action.batch_id, action.requests, now, now)
                policy.batch_finished(now, action.worker, outcome)
        for problem in policy.wanted()[:1]:
            policy.solved(now, [solve(problem)])
    policy.decide(2.0)
    (life,) = read(lines.close())
    return life


@pytest.mark.slow
def test_solved_aside_are_recorded(tmp_path):
    life = with_tables(tmp_path / "real", ramsis.solve)
    assert replay(life).identical
    found = replay(life, lambda: Deaf(make_policy("ramsis", {"solver": None}))).difference
    assert found is not None  # the tables made a difference
    own = with_tables(tmp_path / "own", tables.solve)
    with pytest.raises(ValueError, match="answers of its own kind"):
        replay(own)


class Deaf:
    """Does not hear of tables."""

    def __init__(self, policy):
        self.policy = policy

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def solved(self, now, tables): ...


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"), {name: (name, kwargs) for name, kwargs in CASES}.values(), ids=id_of
)
@settings(max_examples=4)
@given(
    kinds=st.lists(worker_kind, max_size=3),
    operations=st.lists(operation, min_size=10, max_size=40),
)
def test_whatever_happens_is_recorded(name, arguments, kinds, operations):
    policy, kwargs = recipe(name, arguments)
    with tempfile.TemporaryDirectory() as folder:
        lines = Lines(folder, "random", Start.of(policy, kwargs), at=1000.0)
        host = Host(
            lambda: Recording(make_policy(policy, kwargs), lines),
            make_cluster(kinds, control_s=0.004),
            now=1000.0,
            strict=False,
        )
        script = Script(host)
        for op in operations:
            script.do(*op)
        (life,) = read(lines.close())
        replayed = replay(life)
        assert replayed.identical, replayed.difference
        assert replayed.rounds == len(host.decisions)


def test_times_and_delays_are_those_of_the_log(tmp_path):
    """The log's clock begins at 10; each batch has its own delays."""
    lines = Lines(tmp_path, "live", Start.of("eager", {}))
    policy = Recording(make_policy("eager"), lines)
    one = Cluster.uniform([Model("m", 1.0, VARIANTS[:1])], 1)
    policy.cluster_changed(9.0, one)
    usual_s = VARIANTS[0].profiles["default"](1)
    # Requests come every second. A batch starts after 1, 2 and 9 ms, takes 1, 1.1 and 0.9 of the
    # usual time, and is heard of after 4, 6 and 5 ms.
    told = ((0.001, 1.0, 0.004), (0.002, 1.1, 0.006), (0.009, 0.9, 0.005))
    for i, (delay_s, factor, report_s) in enumerate(told):
        at = 10.0 + i
        policy.requests_arrived(at, [Request(i, "m", at, at + 1.0)])
        (sent,) = policy.decide(at).actions
        start = at + delay_s
        outcome = BatchOutcome(sent.batch_id, sent.requests, start, start + factor * usual_s)
        policy.batch_finished(outcome.finished_at + report_s, "w0", outcome)
        policy.decide(outcome.finished_at + report_s)
    (life,) = read(lines.close())
    truth = truth_of(tape(life))
    assert [truth.dispatch(at, 0.0) for at in (0.4, 0.6, 1.4, 1.6)] == pytest.approx(
        [0.001, 0.002, 0.002, 0.009]
    )
    assert truth.report_s == pytest.approx(0.005)
    assert truth.profiles["v", "default"](1) == pytest.approx(usual_s)
    deviation = truth.deviations["v", "default"]
    assert [deviation(at, 0.0) for at in (0.4, 0.6, 1.4, 1.6)] == pytest.approx([1, 1.1, 1.1, 0.9])


@pytest.mark.parametrize("size", [1, 8])
def test_batches_of_one_size_scale_the_shape(size):
    """Of ten, seven take 1.1 times the usual time, and three 50 times: the median counts."""
    prior = LatencyProfile.linear(0.012, 0.1, 32)
    seconds = np.array([1.1] * 7 + [50.0] * 3) * prior(size)
    fitted = fit(prior, np.full(10, size), seconds)
    assert fitted.table == pytest.approx([1.1 * t for t in prior.table])


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_sizes_that_hardly_ran_are_told_by_those_that_did(noise):
    rng = np.random.default_rng(0)
    prior = LatencyProfile.linear(0.012, 0.1, 32)
    sizes = np.clip(rng.normal(13, 2, 400).round(), 1, 20).astype(int)
    sizes[:3] = 1, 2, 4
    seconds = 1.1 * np.array(prior.table)[sizes - 1] * np.exp(noise * rng.standard_normal(400))
    seconds[:2] *= 5.0  # hiccups
    fitted = fit(prior, sizes, seconds)
    for size in (1, 4, 13, 32):
        assert fitted(size) == pytest.approx(1.1 * prior(size), rel=0.02 + noise / 10)
    # A wrong shape is mended where it shows: batches wait 50 ms for the machine, of any size.
    sizes = rng.integers(1, 33, 400)
    seconds = (np.array(prior.table)[sizes - 1] + 0.05) * np.exp(noise * rng.standard_normal(400))
    fitted = fit(prior, sizes, seconds)
    for size in (2, 8, 24):
        assert fitted(size) == pytest.approx(prior(size) + 0.05, rel=0.05)
    assert fitted.table == sorted(fitted.table)


def test_an_octave_of_sizes_can_differ_from_the_shape():
    prior, rng = LatencyProfile.linear(0.012, 0.1, 32), np.random.default_rng(0)
    each = np.arange(1, 33)
    truth = np.array(prior.table) * np.where((each > 4) & (each <= 16), 1.0, 1.25)
    sizes = rng.integers(1, 33, 800)
    seconds = truth[sizes - 1] * np.exp(0.05 * rng.standard_normal(800))
    # Two standard errors are subtracted, so a part of the difference stays.
    assert np.abs(np.array(fit(prior, sizes, seconds).table) / truth - 1).max() < 0.12


def test_what_if_of_small_batches_from_a_log_of_large_ones_and_the_other_way(tmp_path):
    # Under load `eager` runs one or two at a time, `deferred` a dozen.
    variant = Variant("v", {"default": LatencyProfile.linear(0.012, 0.1, 32)})
    cluster = Cluster.uniform([Model("m", 0.45, (variant,))], 2, delay=DispatchDelay(0.004))
    lives, seen = {}, {}
    for policy in ("deferred", "eager"):
        lines = Lines(tmp_path / policy, policy, Start.of(policy, {}))
        recording = Recording(make_policy(policy), lines)
        options = {"duration_s": 20.0, "latency_noise": 0.1, "report_delay_s": 0.003}
        seen[policy] = simulate(recording, cluster, Workload.poisson(100), **options)
        (lives[policy],) = read(lines.close())
    assert seen["deferred"].goodput > 1.5 * seen["eager"].goodput
    for policy, other in (("deferred", "eager"), ("eager", "deferred")):
        off = what_if(lives[policy], other).goodput - seen[other].goodput
        assert abs(off) < 0.05 * seen[other].offered
