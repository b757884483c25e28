"""FLEX: Figure 4 as timelines, the λ-rule at its limits, and the requests of preempted batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
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
)
from ray_slo.policies import make_policy
from ray_slo.policies.flex import Flex
from ray_slo.simulation import Times, Workload, simulate
from tests.policies.harness import Host


def make_host(cluster: Cluster, **kwargs: Any) -> Host:
    return Host(lambda: Flex(**kwargs), cluster, strict=False)


def models(workers: int = 1, delay: DispatchDelay | None = None, **profiles: LatencyProfile):
    made = [Model(m, 100.0, (Variant(m, {"default": p}),)) for m, p in profiles.items()]
    return Cluster.uniform(made, workers, delay=delay)


def some(
    count: int, deadline: float, at: float = 0.0, model: str = "m", start: int = 0
) -> list[Request]:
    return [Request(start + i, model, at, deadline) for i in range(count)]


# The λ-rule

UNIT = LatencyProfile.linear(1.0, 10.0)


@pytest.mark.parametrize(("waiting", "preempts"), [(9, False), (10, True)])
def test_three_times_as_large_is_not_enough_for_3_03(waiting, preempts):
    host = make_host(models(a=UNIT, b=UNIT))
    host.arrive(some(3, 100.0, model="a"))
    host.now = 1.0
    host.arrive(some(waiting, 100.0, model="b", start=10))
    assert len(host.sent) == (2 if preempts else 1)


def test_the_running_requests_of_the_same_model_count_in_the_candidate():
    host = make_host(models(a=UNIT))
    host.arrive(some(1, 100.0, model="a"))
    host.now = 1.0
    host.arrive(some(2, 100.0, model="a", start=10))
    assert len(host.sent) == 1
    host.arrive(some(1, 100.0, model="a", start=20))
    assert host.timeline()[1:] == [(1.0, "w0", [10, 11, 20, 0])]


def test_a_running_request_that_would_be_late_does_not_count():
    host = make_host(models(a=UNIT))
    host.arrive(some(1, 12.0, model="a"))
    host.now = 2.0
    host.arrive(some(3, 100.0, model="a", start=10))
    assert len(host.sent) == 1  # 3 < 3.03
    host.arrive(some(1, 100.0, model="a", start=20))
    assert host.timeline()[1:] == [(2.0, "w0", [10, 11, 12, 20])]
    assert host.dropped == {0: (2.0, DropReason.WOULD_MISS)}


def test_preempted_requests_that_can_still_be_served_are():
    host = make_host(models(a=UNIT, b=UNIT))
    host.run(some(1, 100.0, model="a") + some(4, 100.0, at=1.0, model="b", start=1))
    assert host.timeline() == [
        (0.0, "w0", [0]),
        (1.0, "w0", [1, 2, 3, 4]),
        (15.0, "w0", [0]),
    ]
    assert not host.dropped


def test_the_smallest_running_batch_is_preempted():
    host = make_host(models(workers=3, a=UNIT, b=UNIT, c=UNIT))
    host.arrive(some(3, 100.0, model="a"))
    host.arrive(some(1, 100.0, model="b", start=10))
    host.arrive(some(2, 100.0, model="c", start=20))
    host.now = 1.0
    host.arrive(some(30, 100.0, model="a", start=30))
    assert host.timeline()[3][:2] == (1.0, "w1")
    # b's request is less than any that runs; c's and a's are not preempted by what is left.
    assert len(host.sent) == 4


def test_a_batch_that_was_too_large_to_preempt_is_asked_again():
    host = make_host(models(a=UNIT, b=UNIT))
    host.arrive(some(2, 100.0, model="a"))
    host.now = 1.0
    host.arrive(some(6, 100.0, model="b", start=10))
    assert len(host.sent) == 1
    host.arrive(some(1, 100.0, model="b", start=20))
    assert len(host.sent[1].ids) == 7


def test_what_runs_can_be_preempted_after_the_cluster_changed():
    host = make_host(models(a=UNIT, b=UNIT))
    host.arrive(some(1, 100.0, model="a"))
    host.change(models(workers=2, a=UNIT, b=UNIT))
    host.arrive(some(1, 100.0, model="a", start=5))
    host.now = 1.0
    host.arrive(some(4, 100.0, model="b", start=10))
    assert [s.worker for s in host.sent] == ["w0", "w1", "w0"]


def test_workers_are_preempted_for_different_requests():
    cluster = models(workers=3, a=UNIT, b=LatencyProfile.linear(1.0, 10.0, 8))
    policy = Flex()
    policy.cluster_changed(0.0, cluster)
    for i in range(3):
        policy.requests_arrived(0.0, some(1, 100.0, model="a", start=i))
        policy.decide(0.0)
    policy.requests_arrived(1.0, some(12, 100.0, model="b", start=10))
    actions = policy.decide(1.0).actions
    assert [a.worker for a in actions] == ["w0", "w1"]  # for 8 and for 4; nothing for the third
    policy.requests_arrived(1.0, some(3, 100.0, model="b", start=30))
    assert not policy.decide(1.0).actions  # 3 < 3.03
    policy.requests_arrived(1.0, some(1, 100.0, model="b", start=40))
    assert [a.worker for a in policy.decide(1.0).actions] == ["w2"]


def test_a_lost_worker_frees_what_waited_for_it():
    cluster = models(workers=2, a=UNIT, b=UNIT)
    policy = Flex()
    policy.cluster_changed(0.0, cluster)
    policy.requests_arrived(0.0, some(1, 100.0, model="a"))
    policy.decide(0.0)
    policy.requests_arrived(0.0, some(6, 100.0, model="a", start=1))
    policy.decide(0.0)
    policy.requests_arrived(1.0, some(4, 100.0, model="b", start=10))
    (preempt,) = policy.decide(1.0).actions
    assert preempt.worker == "w0"
    policy.cluster_changed(2.0, Cluster(cluster.models, {"w1": cluster.workers["w1"]}))
    assert not policy.decide(2.0).actions
    assert [len(model.queue) - model.claimed for model in policy._models.values()] == [0, 4]


def test_a_batch_that_does_not_stop_frees_what_waited_for_it():
    cluster = models(workers=2, a=UNIT, b=UNIT)
    policy = Flex()
    policy.cluster_changed(0.0, cluster)
    policy.requests_arrived(0.0, some(1, 100.0, model="a"))
    (deaf,) = policy.decide(0.0).actions
    policy.requests_arrived(0.0, some(6, 100.0, model="a", start=1))
    (other,) = policy.decide(0.0).actions
    policy.requests_arrived(1.0, some(4, 100.0, model="b", start=10))
    (preempt,) = policy.decide(1.0).actions
    assert (preempt.worker, preempt.variant, preempt.gain) == ("w0", "b", 3)
    policy.preempt_failed(2.0, "w0", deaf.batch_id + 7)  # of another batch: not meant
    policy.batch_finished(2.0, "w1", BatchOutcome(other.batch_id, other.requests, 0.0, 2.0))
    assert not policy.decide(2.0).actions  # they wait for w0
    policy.preempt_failed(3.0, "w0", deaf.batch_id)
    (dispatch,) = policy.decide(3.0).actions
    assert (dispatch.worker, len(dispatch.requests)) == ("w1", 4)
    # It is not preempted a second time, but what runs next on that worker may be.
    policy.cluster_changed(4.0, cluster)
    policy.requests_arrived(4.0, some(6, 100.0, model="b", start=20))
    assert not policy.decide(4.0).actions
    policy.batch_finished(5.0, "w0", BatchOutcome(deaf.batch_id, deaf.requests, 0.0, 5.0))
    assert len(policy.decide(5.0).actions) == 1
    policy.requests_arrived(6.0, some(110, 100.0, model="a", start=30))
    assert [a.worker for a in policy.decide(6.0).actions] == ["w1", "w0"]


@pytest.mark.parametrize(("slo_s", "delay_s", "served"), [(14, 0, 4), (14, 1, 0), (15, 1, 4)])
@pytest.mark.parametrize("told", [False, True])
def test_a_batch_that_the_delay_would_make_too_small_does_not_preempt(slo_s, delay_s, served, told):
    slow, quick = models(a=UNIT, b=UNIT).models.values()
    cluster = Cluster.uniform([slow, Model("b", slo_s, quick.variants)], 1)
    if told:
        cluster = replace(cluster, preempt_delay_s=delay_s)
    report = simulate(
        Flex() if told else Flex(preempt_delay_ms=1e3 * delay_s),
        cluster,
        Workload(arrivals={"a": Times(times_s=[0.0]), "b": Times(times_s=[1.0] * 4)}),
        preempt_delay_s=delay_s,
    )
    assert (report.count("good", "a"), report.count("good", "b")) == (1, served)
    assert (report.batches.status == "preempted").sum() == (1 if served else 0)


# The largest feasible batch


def test_the_largest_batch_goes_first_and_ties_go_to_the_first_model():
    host = make_host(models(a=UNIT, b=UNIT, c=UNIT))
    host.arrive(some(1, 100.0, model="a"))
    host.arrive(some(2, 90.0, model="c", start=10))
    host.arrive(some(2, 95.0, model="b", start=20))
    host.advance(200.0)
    assert [ids for _, _, ids in host.timeline()] == [[0], [20, 21], [10, 11]]


def test_a_tight_head_does_not_keep_the_batch_small():
    host = make_host(models(a=UNIT))
    host.arrive(some(1, 12.5, model="a") + some(5, 20.0, model="a", start=1))
    assert host.timeline() == [(0.0, "w0", [1, 2, 3, 4, 5])]


def test_batches_are_at_most_128():
    host = make_host(models(a=LatencyProfile.linear(0.01, 1.0, 200)))
    host.arrive(some(300, 100.0, model="a"))
    assert len(host.sent[0].ids) == 128


def test_the_dispatch_delay_counts():
    cluster = models(a=UNIT, delay=DispatchDelay(0.5, 0.25))
    host = make_host(cluster)
    host.arrive(some(4, 15.5, model="a"))
    assert [(s.ids, s.finish_at) for s in host.sent] == [([0, 1, 2, 3], 15.5)]
    host = make_host(cluster)
    host.arrive(some(4, 15.4, model="a"))
    assert [len(s.ids) for s in host.sent] == [3]


def test_a_batch_that_fails_frees_the_worker():
    host = make_host(models(a=UNIT))
    host.arrive(some(1, 100.0, model="a"))
    host.arrive(some(1, 100.0, model="a", start=1))
    host.finish("w0", BatchStatus.FAILED)
    assert [ids for _, _, ids in host.timeline()] == [[0], [1]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lambda_": 1.0}, "lambda_ must be above 1, got 1.0"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, got 0"),
        ({"preempt_delay_ms": -1.0}, "preempt_delay_ms must be at least 0, got -1.0"),
    ],
)
def test_mistakes(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_policy("flex", kwargs)


def bursty(workers: int) -> list[Request]:
    """Every few seconds a bunch of the slow or the quick model, with more or less time."""
    rng = np.random.default_rng(workers)
    requests, now = [], 0.0
    while len(requests) < 300:
        now += float(rng.exponential(4.0 / workers))
        model = ("slow", "quick")[rng.integers(2)]
        count = int(rng.integers(1, 3)) if model == "slow" else int(rng.integers(1, 30))
        deadline = now + float(rng.uniform(20, 60) if model == "slow" else rng.uniform(8, 30))
        requests += some(count, deadline, now, model, len(requests))
    return requests


@pytest.mark.parametrize("policy", ["flex", "deferred_flex"])
@pytest.mark.parametrize("workers", [1, 3])
def test_under_many_preemptions_the_contract_holds(policy, workers):
    profiles = {
        "slow": LatencyProfile.linear(1.0, 15.0, 16),
        "quick": LatencyProfile.linear(0.2, 2.0, 16),
    }
    cluster = models(workers=workers, delay=DispatchDelay(0.1, 0.01), **profiles)
    host = Host(lambda: make_policy(policy), cluster, strict=policy == "deferred_flex")
    requests = bursty(workers)
    host.run(requests)
    sent = [i for batch in host.sent for i in batch.ids]
    assert set(sent) | set(host.dropped) == set(range(len(requests)))
    assert set(sent) & set(host.dropped)  # preempted, and then too late
    assert len(sent) > len(set(sent))  # preempted, and sent again
    host.check_replay()


def test_of_equally_large_batches_the_fastest_goes_first():
    host = make_host(
        models(slow=LatencyProfile.linear(2.0, 9.0, 4), fast=LatencyProfile.linear(1.0, 9.0, 4))
    )
    host.run(
        [
            *some(1, 100.0, model="slow"),
            *some(6, 100.0, at=1.0, model="slow", start=10),
            *some(4, 100.0, at=1.0, model="fast", start=20),
        ]
    )
    assert [ids[0] for _, _, ids in host.timeline() if len(ids) == 4] == [20, 10]
