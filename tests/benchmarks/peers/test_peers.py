"""Peers keep the contract of `ray_slo.core.policy`; their worked examples; Nexus' packing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers import Clockwork, Nexus, Session, WindowEager, squishy_bin_packing
from benchmarks.peers.nexus import plan
from benchmarks.peers.window import target
from ray_slo.core import Cluster, LatencyProfile, Model, Request, Variant
from ray_slo.policies import make_policy
from ray_slo.simulation import Workload, simulate
from tests.policies.contract import Script, make_cluster, operation, worker_kind
from tests.policies.harness import Host, one_model

PEERS: list[tuple[str, dict[str, Any]]] = [
    ("benchmarks.peers:Clockwork", {}),
    ("benchmarks.peers:Clockwork", {"schedule_ahead_ms": 0.0, "slo_buffer_ms": 0.0}),
    ("benchmarks.peers:Clockwork", {"batch_sizes": [1, 2, 4], "max_execution_ms": 20.0}),
    ("benchmarks.peers:Nexus", {"period_s": 0.03}),
    ("benchmarks.peers:Nexus", {"frontends": 8, "grow": False}),
    ("benchmarks.peers:WindowEager", {"window_s": 0.03}),
]
PROFILE = LatencyProfile.linear(1.0, 5.0, 16)


def arrivals(*times: float, slo: float) -> list[Request]:
    return [Request(i, "m", t, t + slo) for i, t in enumerate(times)]


@pytest.mark.parametrize(("name", "kwargs"), PEERS, ids=str)
@settings(max_examples=15)
@given(
    kinds=st.lists(worker_kind, max_size=3),
    control_s=st.sampled_from([0.0, 0.004]),
    operations=st.lists(operation, min_size=10, max_size=60),
    hung=st.booleans(),
)
def test_contract(
    name: str,
    kwargs: dict[str, Any],
    kinds: list[tuple[str, int]],
    control_s: float,
    operations: list[tuple[Any, ...]],
    hung: bool,
) -> None:
    cluster = make_cluster(kinds, control_s=control_s)
    host = Host(lambda: make_policy(name, kwargs), cluster, now=1000.0, strict=False)
    script = Script(host)
    for op in operations:
        script.do(*op)
    last = max((r.deadline for r in script.requests), default=0.0)
    host.advance(max(host.now, last + 1e-5), ends=not hung)
    assert not host.waiting
    host.check_replay()


def clockwork(ahead_s: float = 0.0, **kwargs: Any) -> Clockwork:
    """For examples in seconds."""
    limits = {"slo_buffer_ms": 0.0, "max_execution_ms": math.inf}
    return Clockwork(1e3 * ahead_s, **(limits | kwargs))


def test_clockwork_runs_the_largest_batch_that_can_be_filled_in_time():
    host = Host(clockwork, one_model(PROFILE, 20.0, 1), strict=False)
    host.run(arrivals(0.0, 1.0, 2.0, 3.0, slo=20.0))
    assert host.timeline() == [(0.0, "w0", [0]), (6.0, "w0", [1, 2, 3])]


def test_clockwork_commits_ahead_and_a_committed_batch_does_not_grow():
    host = Host(lambda: clockwork(10.0), one_model(PROFILE, 20.0, 1), strict=False)
    host.run(arrivals(0.0, 1.0, 2.0, 3.0, slo=20.0))
    # At 1 the schedule ends at 6 and at 2 at 12, so the next two are committed alone; the last
    # one finds it full until 18.
    assert host.timeline() == [(0.0, "w0", [0]), (6.0, "w0", [1]), (12.0, "w0", [2])]
    assert sorted(host.dropped) == [3]


def test_clockwork_fills_the_batch_sizes_that_it_has():
    host = Host(lambda: clockwork(batch_sizes=[1, 2, 4]), one_model(PROFILE, 20.0, 1), strict=False)
    host.run(arrivals(0.0, 1.0, 2.0, 3.0, slo=20.0))
    assert host.timeline() == [(0.0, "w0", [0]), (6.0, "w0", [1, 2]), (13.0, "w0", [3])]


def test_clockwork_gives_up_heads_that_are_too_tight_for_a_batch_that_can_be_filled():
    host = Host(clockwork, one_model(PROFILE, 20.0, 1), strict=False)
    # At 19, request 14 (deadline 25.5) could run alone, 15 and 16 together.
    host.run(arrivals(*[0.0] * 14, 5.5, 10.0, 10.0, slo=20.0))
    assert host.timeline() == [(0.0, "w0", list(range(14))), (19.0, "w0", [15, 16])]
    assert sorted(host.dropped) == [14]


def test_clockwork_ends_batches_a_buffer_before_their_deadlines():
    host = Host(lambda: clockwork(slo_buffer_ms=13e3), one_model(PROFILE, 20.0, 1), strict=False)
    host.run(arrivals(0.0, 0.0, 0.0, slo=20.0))
    assert host.timeline() == [(0.0, "w0", [0, 1])]  # in 20 − 13 = 7
    assert sorted(host.dropped) == [2]


def two_models(**slos: float) -> Cluster:
    return Cluster.uniform(
        [Model(name, slo, (Variant(name, {"default": PROFILE}),)) for name, slo in slos.items()], 1
    )


def test_clockwork_prefers_the_more_urgent_model():
    host = Host(clockwork, two_models(loose=60.0, tight=20.0), strict=False)
    host.run(
        [
            Request(0, "loose", 0.0, 60.0),
            *(Request(i, "loose", 1.0, 61.0) for i in range(1, 6)),
            Request(6, "tight", 2.0, 22.0),
        ]
    )
    assert [ids for _, _, ids in host.timeline()] == [[0], [6], [1, 2, 3, 4, 5]]


def test_clockwork_serves_a_model_whose_head_expired_while_others_ran():
    # "tight" has a more urgent request at any time. That of "loose" must start by 24.5; its turn
    # comes when it is lost, and goes to the next one.
    host = Host(clockwork, two_models(loose=30.0, tight=12.0), strict=False)
    host.run(
        [
            *(Request(i, "tight", float(i), i + 12.0) for i in range(60)),
            Request(100, "loose", 0.5, 30.5),
            Request(101, "loose", 20.0, 50.0),
        ]
    )
    served = {i for _, _, ids in host.timeline() for i in ids}
    assert 101 in served and 100 in host.dropped


def test_packing_saturates_workers_with_the_batch_that_fits_twice():
    nodes = squishy_bin_packing([Session("m", 3 * 7 / 12, 24.0, PROFILE)])
    assert [[(b, pytest.approx(7 / 12)) for _, b, _ in n.parts] for n in nodes] == [
        [(7, pytest.approx(7 / 12))]
    ] * 3


def test_packing_merges_what_is_left_and_keeps_every_slo():
    sessions = [
        Session("a", 0.1, 30.0, PROFILE),
        Session("b", 0.15, 40.0, PROFILE),
        Session("c", 0.02, 25.0, PROFILE),
    ]
    nodes = squishy_bin_packing(sessions)
    assert len(nodes) < len(sessions)
    for node in nodes:
        assert node.occupancy <= 1 + 1e-9
        for session, batch, _ in node.parts:
            assert node.cycle_s + session.profile(batch) <= session.slo_s + 1e-6
    for session in sessions:
        planned = sum(r for n in nodes for s, _, r in n.parts if s.model == session.model)
        assert planned == pytest.approx(session.rate)


@pytest.mark.parametrize(("models", "workers"), [(1, 8), (2, 1), (5, 3), (6, 2)])
def test_plan_uses_every_worker_and_serves_every_model(models, workers):
    sessions = [Session(f"m{i}", 1.0 + i, 30.0, PROFILE) for i in range(models)]
    nodes = plan(sessions, workers)
    assert len(nodes) == workers
    assert {s.model for n in nodes for s, _, _ in n.parts} == {s.model for s in sessions}


def test_nexus_deals_out_round_robin_and_drops_heads_for_the_planned_batch():
    cluster = one_model(PROFILE, 24.0, 2)  # planned batch: 7
    host = Host(lambda: Nexus(period_s=1e6, grow=False), cluster, strict=False)
    host.run([Request(i, "m", 0.1 * i, 0.1 * i + 24.0) for i in range(40)])
    # One each at first; then the others in turn, seven at a time.
    assert [(w, ids[:2], len(ids)) for _, w, ids in host.timeline()[:4]] == [
        ("w0", [0], 1),
        ("w1", [1], 1),
        ("w0", [2, 4], 7),
        ("w1", [3, 5], 7),
    ]
    assert max(len(ids) for _, _, ids in host.timeline()) == 7
    assert host.dropped  # 40 at once are too many


def test_nexus_grows_past_the_plan_as_far_as_the_head_allows():
    host = Host(lambda: Nexus(period_s=1e6), one_model(PROFILE, 24.0, 1), strict=False)
    host.run([Request(i, "m", 0.5 * i, 0.5 * i + 24.0) for i in range(20)])
    # At 6 twelve wait; R1 is due at 24.5, so 18.5 are left: ℓ(12) = 17. Planned are 7.
    assert [(at, len(ids)) for at, _, ids in host.timeline()[:2]] == [(0.0, 1), (6.0, 12)]


def test_window_drop_gives_up_heads_that_are_too_tight_for_the_target():
    """The worked example of the module: when the worker is free, the first one has 11 left."""
    host = Host(WindowEager, one_model(PROFILE, 24.0, 1), strict=False)
    tight = Request(1, "m", 6.0, 17.0)
    host.run([*arrivals(0.0, slo=24.0), tight, *(Request(i, "m", 6.0, 32.0) for i in range(2, 8))])
    assert host.timeline() == [(0.0, "w0", [0]), (6.0, "w0", [2, 3, 4, 5, 6, 7])]
    assert sorted(host.dropped) == [1]


def test_window_drop_grows_past_the_target_as_far_as_the_head_allows():
    host = Host(WindowEager, one_model(PROFILE, 24.0, 1), strict=False)
    # The target is 7. The head has 15 left when the worker is free, which is ℓ(10).
    host.run([*arrivals(0.0, slo=24.0), *(Request(i, "m", 5.0, 21.0) for i in range(1, 13))])
    assert host.timeline() == [(0.0, "w0", [0]), (6.0, "w0", list(range(1, 11)))]
    assert sorted(host.dropped) == [11, 12]


@pytest.mark.parametrize(
    ("rate", "workers", "size"), [(math.inf, 1, 7), (math.inf, 3, 13), (0.01, 3, 7), (1.2, 3, 11)]
)
def test_window_drops_target_is_the_batch_that_fits_with_its_wait(rate, workers, size):
    reach = [1.0 * b + 5.0 for b in range(1, 17)]
    assert target(reach, 24.0, rate, workers) == size


def test_overload_leaves_nexus_near_the_rate_without_coordination():
    """Symphony Table 2: batches of 7 without coordination, 4501/s on 8 workers."""
    cluster = one_model(LatencyProfile.linear(1.053e-3, 5.072e-3), 0.025, 8)
    report = simulate(
        Nexus(grow=False), cluster, Workload.poisson(8000), duration_s=2.0, warmup_s=0.5
    )
    assert report.goodput == pytest.approx(4501, rel=0.03)
    assert report.batch_sizes.max() == 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clockwork(-1.0), "schedule_ahead_ms must be at least 0"),
        (lambda: Clockwork(slo_buffer_ms=-1.0), "slo_buffer_ms must be at least 0"),
        (lambda: Clockwork(batch_sizes=[2, 4]), "batch_sizes must begin with 1"),
        (lambda: Nexus(0), "frontends must be at least 1"),
        (lambda: Nexus(period_s=0.0), "period_s must be positive"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
