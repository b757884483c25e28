import math

import pytest

from ray_slo.core import (
    Cluster,
    Decision,
    Dispatch,
    DispatchDelay,
    LatencyProfile,
    Model,
    Preempt,
    Variant,
    Worker,
)
from ray_slo.simulation import (
    Constant,
    PolicyError,
    Times,
    WorkerEvent,
    Workload,
    simulate,
)


def at(*times):
    return Workload(arrivals=Times(times_s=list(times)))


def batches(report):
    """(worker, size, start, finish) of every batch."""
    frame = report.batches
    columns = (frame.worker, frame["size"], frame.started_s, frame.finished_s)
    return list(zip(*columns, strict=True))


def test_timeline(greedy, make_cluster):
    policy = greedy()
    report = simulate(policy, make_cluster(), at(0, 1, 2, 6, 6))
    assert policy.log == [
        (0, "workers", ["w0"]),
        (0, "arrived", [0]),
        (1, "arrived", [1]),
        (2, "arrived", [2]),
        # At one instant: the end of a batch first, then arrivals (in one bunch), then a decision.
        (6, "finished", [0]),
        (6, "arrived", [3, 4]),
        (13, "finished", [1, 2]),
    ]
    # R1 has until 13, so it takes R2 along (ℓ(2) = 7); R3 and R4 are then too late even alone.
    assert batches(report) == [("w0", 1, 0, 6), ("w0", 2, 6, 13)]
    assert report.requests.outcome.tolist() == ["good"] * 3 + ["dropped"] * 2
    assert report.requests.drop_reason.tolist()[3:] == ["would_miss"] * 2
    assert report.requests.dropped_s.tolist()[3:] == [13, 13]


def test_same_seed_same_run_and_noise_leaves_arrivals_alone(greedy, make_cluster):
    def run(**kwargs):
        report = simulate(
            greedy(), make_cluster(3), Workload.poisson(0.6), duration_s=200, **kwargs
        )
        return report.requests

    noisy = run(seed=1, latency_noise=0.2)
    assert noisy.equals(run(seed=1, latency_noise=0.2))
    assert not noisy.arrival_s.equals(run(seed=2, latency_noise=0.2).arrival_s)
    exact = run(seed=1)
    assert noisy.arrival_s.equals(exact.arrival_s)
    assert not noisy.finished_s.equals(exact.finished_s)
    assert set(exact.outcome) <= {"good", "dropped"}
    assert "late" in set(noisy.outcome)


def test_noise_has_median_one(greedy, make_cluster):
    report = simulate(
        greedy(),
        make_cluster(4),
        Workload(arrivals=Constant(rate=0.3)),
        duration_s=3000,
        latency_noise=0.1,
    )
    frame = report.batches
    ratio = (frame.finished_s - frame.started_s) / (frame["size"] + 5.0)
    assert ratio.median() == pytest.approx(1, abs=0.02)
    assert ratio.std() == pytest.approx(0.1, rel=0.1)


def test_dispatch_delay_moves_the_start(greedy, make_cluster):
    cluster = make_cluster(delay=DispatchDelay(control_s=0.5, per_request_s=0.25))
    report = simulate(greedy(), cluster, at(0))
    assert batches(report) == [("w0", 1, 0.75, 6.75)]
    assert report.batches.predicted_finish_s.tolist() == [6.75]
    assert report.batches.dispatched_s.tolist() == [0]


def test_the_truth_may_differ_from_what_the_policy_is_told(greedy, make_cluster):
    told = make_cluster()
    slow = Variant("m", {"default": LatencyProfile.linear(1.0, 7.0, 64)})
    truth = Cluster.of(
        [Model("m", 12.0, (slow,))], told.workers.values(), DispatchDelay(control_s=3)
    )
    report = simulate(greedy(), told, at(0), truth=truth)
    assert batches(report) == [("w0", 1, 3, 11)]
    assert report.batches.predicted_finish_s.tolist() == [6]


def test_the_policy_hears_of_an_end_later(greedy, make_cluster):
    policy = greedy()
    simulate(policy, make_cluster(), at(0), report_delay_s=0.5)
    assert policy.log[-1] == (6.5, "finished", [0])


class Scripted:
    """Decides what the script says, by time; wakes at the next entry."""

    serves_late = True

    def __init__(self, script):
        self.script = dict(script)
        self.held = {}
        self.log = []

    def requests_arrived(self, now, requests):
        self.log.append((now, "arrived", [r.id for r in requests]))
        self.held.update((r.id, r) for r in requests)

    def requests_cancelled(self, now, requests):
        raise AssertionError

    def batch_finished(self, now, worker, outcome):
        self.log.append((now, outcome.status.value, outcome.started_at, outcome.finished_at))

    def cluster_changed(self, now, cluster):
        self.log.append((now, "workers", list(cluster.workers)))

    def decide(self, now):
        actions = []
        for action in self.script.pop(now, []):
            if isinstance(action, tuple):
                batch_id, worker, ids = action
                action = Dispatch(batch_id, worker, "m", [self.held[i] for i in ids], now, now + 6)
            actions.append(action)
        return Decision(actions, min(self.script, default=math.inf))


def test_a_batch_sent_ahead_starts_when_the_running_one_ends(make_cluster):
    policy = Scripted({0: [(0, "w0", [0])], 5: [(1, "w0", [1, 2])]})
    report = simulate(policy, make_cluster(), at(0, 0, 0))
    assert batches(report) == [("w0", 1, 0, 6), ("w0", 2, 6, 13)]


def test_preempted_requests_arrive_again(make_cluster):
    policy = Scripted({0: [(0, "w0", [0])], 2: [Preempt("w0", "larger batch")]})
    policy.script[3] = [(1, "w0", [0, 1])]
    report = simulate(policy, make_cluster(), at(0, 1), preempt_delay_s=0.5)
    assert (2.5, "preempted", 0, 2.5) in policy.log
    assert policy.log[policy.log.index((2.5, "preempted", 0, 2.5)) + 1] == (2.5, "arrived", [0])
    assert batches(report) == [("w0", 1, 0, 2.5), ("w0", 2, 3, 10)]
    assert report.batches.status.tolist() == ["preempted", "finished"]
    assert report.requests.outcome.tolist() == ["good", "good"]


def test_a_worker_that_leaves_takes_its_batches_along(greedy, make_cluster):
    policy = greedy()
    events = [WorkerEvent(2, "w0", "leave"), WorkerEvent(4, "w0", "join")]
    report = simulate(policy, make_cluster(2), at(0, 0.5), worker_events=events)
    assert policy.log[3:] == [
        (2, "workers", ["w1"]),
        (2, "arrived", [0]),
        (4, "workers", ["w0", "w1"]),  # a worker that comes back has its old rank
        (6.5, "finished", [1]),
        (10, "finished", [0]),
    ]
    assert report.batches.status.tolist() == ["lost", "finished", "finished"]
    assert report.requests.outcome.tolist() == ["good", "good"]


def test_workers_that_join_later_are_absent_at_first(greedy, make_cluster):
    policy = greedy()
    cluster = make_cluster(2)
    new = Worker("new", "default", frozenset({"m"}))
    events = [WorkerEvent(3, new, "join"), WorkerEvent(1, "w1", "join")]
    report = simulate(policy, cluster, at(0, 0, 0, 0), worker_events=events)
    shown = [entry[2] for entry in policy.log if entry[1] == "workers"]
    assert shown == [["w0"], ["w0", "w1"], ["w0", "w1", "new"]]
    assert list(report.utilisation()) == ["w0", "w1", "new"]


def test_requests_that_no_one_answers_are_pending_and_bad(greedy, make_cluster):
    report = simulate(
        greedy(), make_cluster(), at(0), worker_events=[WorkerEvent(1, "w0", "leave")]
    )
    assert report.requests.outcome.tolist() == ["pending"]
    assert report.bad_rate() == 1


def test_runs_a_named_policy_through_the_registry(make_cluster):
    with pytest.raises(ValueError, match="unknown; choose one of"):
        simulate("dferred", make_cluster(), at(0))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "duration_s is needed"),
        ({"duration_s": 1, "warmup_s": 1}, "warmup_s"),
        ({"duration_s": 1, "latency_noise": -0.1}, "latency_noise"),
        ({"duration_s": 1, "worker_events": [WorkerEvent(0, "w9", "leave")]}, "w9"),
    ],
)
def test_bad_arguments(greedy, make_cluster, kwargs, message):
    with pytest.raises(ValueError, match=message):
        simulate(greedy(), make_cluster(), Workload.poisson(1), **kwargs)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([WorkerEvent(0.5, "w0", "leave"), WorkerEvent(0.6, "w0", "leave")], "is not there"),
        (
            [
                WorkerEvent(0.4, "w0", "leave"),
                WorkerEvent(0.5, "w0", "join"),
                WorkerEvent(0.6, "w0", "join"),
            ],
            "is there already",
        ),
    ],
)
def test_impossible_worker_events(greedy, make_cluster, events, message):
    with pytest.raises(ValueError, match=message):
        simulate(greedy(), make_cluster(), Workload.poisson(1), duration_s=2, worker_events=events)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({0: [(0, "w7", [0])]}, "'w7', which is not there"),
        ({0: [(0, "w0", [0]), (1, "w0", [1]), (2, "w0", [2])]}, "one sent ahead"),
        ({0: [(0, "w0", [])]}, "has 0 requests"),
        ({0: [(0, "w0", [0]), (1, "w1", [0])]}, "answered twice"),
        ({0: ["run!"]}, "is no action"),
        ({0: [Preempt("w7", "why not")]}, "not there"),
    ],
)
def test_a_policy_that_breaks_the_contract_is_told_so(make_cluster, script, message):
    with pytest.raises(PolicyError, match=message):
        simulate(Scripted(script), make_cluster(2), at(0, 0, 0))


def test_a_variant_must_be_loaded(make_cluster):
    cluster = make_cluster()
    bare = Cluster(cluster.models, {"w0": Worker("w0", "default", frozenset())})
    with pytest.raises(PolicyError, match="has not loaded 'm'"):
        simulate(Scripted({0: [(0, "w0", [0])]}), bare, at(0))


def test_a_policy_that_never_lets_time_pass_is_stopped(make_cluster):
    class Stuck(Scripted):
        def decide(self, now):
            return Decision([], now)

    with pytest.raises(PolicyError, match="for ever"):
        simulate(Stuck({}), make_cluster(), at(0))


def test_a_batch_takes_the_latency_of_its_items(greedy, make_cluster):
    workload = Workload.poisson(0.05, sizes={"kind": "gaussian", "mean": 6, "std": 3})
    report = simulate(greedy(max_batch=1), make_cluster(slo_s=1e4), workload, duration_s=400)
    requests = report.requests
    assert requests["size"].nunique() > 3
    took = requests.finished_s - requests.started_s
    assert took.to_numpy() == pytest.approx(requests["size"].to_numpy() + 5.0)  # ℓ(b) = b + 5


def test_more_items_than_the_profile_has_is_the_policys_mistake(greedy, make_cluster):
    workload = Workload.poisson(9, sizes={"kind": "gaussian", "mean": 40, "std": 1})
    with pytest.raises(PolicyError, match=r"2 requests of \d+ items; 'm' takes 1 to 64"):
        simulate(greedy(max_batch=2), make_cluster(slo_s=1e4), workload, duration_s=10)


def test_a_request_that_no_worker_can_take_is_refused(greedy, make_cluster):
    workload = Workload.poisson(1, sizes={"kind": "gaussian", "mean": 90, "std": 1})
    with pytest.raises(
        ValueError, match=r"a request for 'm' has \d+ items, and its profiles end at"
    ):
        simulate(greedy(max_batch=1), make_cluster(slo_s=1e4), workload, duration_s=10)


@pytest.mark.parametrize("policy", ["ramsis"])
def test_policies_that_count_requests_are_refused_sizes(policy, make_cluster):
    workload = Workload.poisson(1, sizes={"kind": "gaussian", "mean": 3, "std": 1})
    says = f"policy '{policy}' counts requests, not the items in them"
    with pytest.raises(ValueError, match=says):
        simulate(policy, make_cluster(), workload, duration_s=1)


def test_policies_that_batch_serve_requests_with_sizes(make_cluster):
    workload = Workload.poisson(1, sizes={"kind": "gaussian", "mean": 3, "std": 1})
    for policy in ("deferred", "deferred_flex", "eager", "flex", "price"):
        for kwargs in ({}, {"max_batch_size": 1}):  # first come, first served
            simulate(policy, make_cluster(), workload, policy_kwargs=kwargs, duration_s=1)
