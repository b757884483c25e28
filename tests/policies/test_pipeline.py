"""`pipeline`: rules for late requests by hand, routes, reassignment, loss, what it learns."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.loki import terms as loki
from ray_slo.core import (
    Assigned,
    BatchStatus,
    Cluster,
    Dispatch,
    DispatchDelay,
    DropReason,
    LatencyProfile,
    Model,
    Request,
    Upstream,
    Variant,
    Worker,
)
from ray_slo.policies import make_policy
from ray_slo.policies.pipeline import Pipeline
from ray_slo.simulation import Poisson, Workload, simulate_application
from tests.policies.harness import Host

SLO = 0.1
PARENTS = {"detect": None, "name": "detect"}
FOUND = {"d": {"name": 4.0}}
RULES = ("slack", "opportunistic", "per_task", "last_task", "none")


def flat(ms: float, sizes: int = 2) -> LatencyProfile:
    """Batches of any size take as long."""
    return LatencyProfile([ms / 1e3] * sizes)


def models(large: LatencyProfile | None = None) -> list[Model]:
    """The module's example: ℓ = 20 ms; 20 and 10 ms."""
    return [
        Model("detect", SLO, (Variant("d", {"x": flat(20)}, 90.0),)),
        Model(
            "name",
            SLO,
            (
                Variant("small", {"x": flat(10)}, 80.0),
                Variant("large", {"x": large or flat(20)}, 90.0),
            ),
        ),
    ]


def worker(id: str, variant: str, size: int = 2, load: float | None = None) -> Worker:
    return Worker(id, "x", frozenset({variant}), (Assigned(variant, size, load),))


# 10 frames and 40 names per second: the large one has room for all, the small one is the backup.
EASY = [worker("D", "d", load=10), worker("L", "large"), worker("S", "small")]


def host(
    workers: list[Worker] | None = None,
    *,
    models: list[Model] | None = None,
    delay: DispatchDelay | None = None,
    **kwargs: Any,
) -> Host:
    kwargs = {"parents": PARENTS, "factors": FOUND, "queues": "worker", **kwargs}
    cluster = Cluster.of(models or MODELS, EASY if workers is None else workers, delay)
    return Host(lambda: Pipeline(**kwargs), cluster, strict=False)


MODELS = models()


def frame(id: int, at: float = 0.0, slo: float = SLO) -> Request:
    return Request(id, "detect", at, at + slo)


def name(id: int, at: float, spent: float, deadline: float = SLO, by: str = "D") -> Request:
    return Request(id, "name", at, deadline, upstream=Upstream(by, "d", spent))


# -- what becomes of late requests -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("drop", "went"),
    [
        # Budget of "d": 2 · 20 ms. Spent 40: in time. 45: late by 5, y − x = 15: the small one.
        # 50: late by 10, y − x = 10: just the small one. 51: nobody is that fast.
        ("opportunistic", ["L", "S", "S", None]),
        ("per_task", ["L", None, None, None]),
        ("last_task", ["L", "L", "L", "L"]),
        ("none", ["L", "L", "L", "L"]),
        ("slack", ["L", "L", "L", "L"]),  # 51 + 20 ms are within 100
    ],
)
def test_what_becomes_of_requests_that_are_late_at_the_task_before(
    drop: str, went: list[str | None]
) -> None:
    for spent, to in zip((0.040, 0.045, 0.050, 0.051), went, strict=True):
        h = host(drop=drop)
        h.run([name(0, spent, spent)])
        assert h.timeline() == ([(spent, to, [0])] if to else []), spent
        if to is None:
            assert h.dropped == {0: (spent, DropReason.WOULD_MISS)}


def test_opportunistic_needs_capacity_left() -> None:
    # 75 frames make 300 names per second: as many as both can take.
    busy = [worker("D", "d", load=75), *EASY[1:]]
    h = host(busy, drop="opportunistic")
    h.run([name(0, 0.045, 0.045)])
    assert h.dropped == {0: (0.045, DropReason.WOULD_MISS)}


def test_opportunistic_takes_the_most_accurate_backup_and_of_two_the_less_loaded() -> None:
    workers = [*EASY, worker("S2", "small"), worker("tiny", "tiny")]
    tiny = Variant("tiny", {"x": flat(5)}, 70.0)
    detect, names = models()
    zoo = [detect, replace(names, variants=(*names.variants, tiny))]
    h = host(workers, models=zoo, drop="opportunistic")
    h.arrive([name(i, 0.0, 0.045) for i in range(3)])
    h.arrive([name(3, 0.0, 0.051)])  # late by 11, y − x = 9
    h.advance(1.0)
    assert [(w, ids) for _, w, ids in h.timeline()] == [
        ("S", [0, 1]),  # one batch
        ("S2", [2]),
        ("tiny", [3]),
    ]


def test_the_budget_includes_the_wait_that_the_planner_allows() -> None:
    for arrived, dropped in ((0.039, {}), (0.041, {0: (0.041, DropReason.WOULD_MISS)})):
        h = host(drop="per_task")
        h.run([name(0, arrived, arrived)])  # budget 40 ms
        assert h.dropped == dropped


def test_a_budget_is_remembered_when_its_worker_is_gone() -> None:
    h = host(drop="per_task")
    h.change(Cluster.of(MODELS, EASY[1:]))
    h.run([name(0, 0.045, 0.045), name(1, 0.045, 0.040)])
    assert h.timeline() == [(0.045, "S", [1])]  # no table is left: who is done first
    assert list(h.dropped) == [0]


def test_last_task_drops_what_has_less_left_than_an_execution() -> None:
    h = host(drop="last_task")
    h.run([name(0, 0.079, 0.0), name(1, 0.0801, 0.0)])
    assert h.timeline() == [(0.079, "L", [0])]
    assert h.dropped == {1: (0.0801, DropReason.WOULD_MISS)}


def test_last_task_serves_late_what_is_not_at_a_last_task() -> None:
    h = host(drop="last_task")
    h.run([frame(0, slo=0.01), name(1, 0.0, 0.0, deadline=0.01)])
    assert h.timeline() == [(0.0, "D", [0])]
    assert list(h.dropped) == [1]


def test_none_serves_everything_in_the_order_of_deadlines() -> None:
    h = host(drop="none")
    h.run([frame(i, slo=0.03 - i / 1e3) for i in range(5)], at=dict.fromkeys(range(5), 0.0))
    # All at once: 4 and 3 have the earliest deadlines; then 2 and 1 until 40 ms, late.
    assert h.timeline() == [(0.0, "D", [4, 3]), (0.02, "D", [2, 1]), (0.04, "D", [0])]
    assert not h.dropped


@pytest.mark.parametrize("drop", ["opportunistic", "per_task"])
def test_what_would_miss_its_deadline_if_it_ran_now_is_dropped(drop: str) -> None:
    h = host(drop=drop)
    h.run([frame(i, slo=0.039) for i in range(3)])
    # 0 and 1 run until 20 ms; 2 would end at 40. It is given up at 19, when no idle worker helps.
    assert h.timeline() == [(0.0, "D", [0, 1])]
    assert h.dropped == {2: (pytest.approx(0.019, abs=1e-6), DropReason.WOULD_MISS)}


# -- by slack --------------------------------------------------------------------------------------


def test_slack_leaves_the_rest_of_the_path_its_planned_time() -> None:
    """Two detectors. The plan leaves the names 2 · 20 of 100 ms, so a frame should be found by 60.
    Slow ones take 30 ms: one waits for them, the next would be ready at 90 and goes to the fast."""
    detect = Model(
        "detect",
        SLO,
        (Variant("slow", {"x": flat(30, 1)}, 90.0), Variant("fast", {"x": flat(10, 1)}, 70.0)),
    )
    workers = [worker("A", "slow", 1, 10), worker("B", "fast", 1, 0.0), worker("L", "large")]
    h = host(workers, models=[detect, MODELS[1]], factors={}, drop="slack")
    h.run([frame(i) for i in range(4)])
    assert h.timeline() == [
        (0.0, "A", [0]),
        (0.0, "B", [2]),
        (0.01, "B", [3]),
        (0.03, "A", [1]),
    ]


def test_slack_keeps_the_time_for_a_fast_batch_below() -> None:
    h = host(drop="slack")
    # Names need at least 10 ms: a frame has to be found by 90 ms, that is to start by 70.
    h.run([frame(i) for i in range(3)], at={0: 0.07, 1: 0.0702, 2: 0.0702})
    assert h.timeline() == [(0.07, "D", [0])]
    assert [h.dropped[i][1] for i in (1, 2)] == [DropReason.WOULD_MISS] * 2


def test_slack_drops_at_the_root_what_finds_no_room_below() -> None:
    """One recogniser, 100 names per second; a frame makes 4 of them."""
    workers = [worker("D", "d", 1), worker("L", "large")]
    h = host(workers, drop="slack")
    h.arrive([name(i, 0.0, 0.0, deadline=1.0) for i in range(12)])
    # 2 run, 10 wait: 100 ms of work. A frame that ends at 20 ms finds 80 of them, and makes two
    # batches, 40 ms: 140 ms from now.
    h.arrive([frame(100, slo=0.141)])
    h.advance(0.02)
    # Now 8 wait and the frame has made none: 80 − 20 + 40 after its end at 40, at 140 again.
    h.arrive([frame(101, 0.02, slo=0.119)])
    assert [(w, ids) for _, w, ids in h.timeline()] == [
        ("L", [0, 1]),
        ("D", [100]),
        ("L", [2, 3]),
    ]
    assert h.dropped == {101: (0.02, DropReason.SHED)}


def test_slack_counts_what_running_batches_will_make() -> None:
    workers = [worker("D", "d", 1), worker("E", "d", 1), worker("L", "large")]
    h = host(workers, drop="slack", queues="variant")
    # 0 makes 4 names, 40 ms of work, of which 20 are over when 1 ends; so do its own: 20 + 20 + 40.
    h.arrive([frame(0, slo=0.2)])
    h.arrive([frame(1, slo=0.0799)])
    assert h.dropped == {1: (0.0, DropReason.SHED)}
    h.arrive([frame(2, slo=0.0801)])
    assert [(w, ids) for _, w, ids in h.timeline()] == [("D", [0]), ("E", [2])]


def test_a_head_that_costs_too_much_is_dropped_another_shrinks_the_batch() -> None:
    steps = LatencyProfile([0.01, 0.02, 0.03, 0.04])
    zoo = models(steps)
    workers = [EASY[0], worker("L", "large", 4)]
    for left, sent, dropped in (
        (0.0351, [9, 0, 1], []),  # 3 of 4: near enough
        (0.0251, [0, 1, 2], [9]),
    ):
        h = host(workers, models=zoo, drop="slack")
        h.arrive([name(7, 0.0, 0.0, deadline=0.5)])  # runs until 10 ms
        late = name(9, 0.0, 0.0, deadline=0.01 + left)
        h.arrive([late, *(name(i, 0.0, 0.0, deadline=0.5) for i in range(3))])
        h.advance(0.011)
        assert h.sent[1].ids[:3] == sent
        assert list(h.dropped) == dropped


def slow_child(batch_size: int) -> tuple[list[Model], list[Worker]]:
    """A quick detector, and a child that takes 3 s for a batch of 16, under an SLO of 3 s."""
    find = Variant("d", {"x": LatencyProfile.linear(0.05, 0.05, 8)}, 90.0)
    look = Variant("slow", {"x": LatencyProfile.linear(0.175, 0.2, 16)}, 90.0)
    both = [Model("detect", 3.0, (find,)), Model("name", 3.0, (look,))]
    return both, [worker("D", "d", 8), worker("L", "slow", batch_size)]


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_a_lone_frame_is_not_refused_for_a_full_batch_below(batch_size: int) -> None:
    """It makes four requests there, which need no batch of 16."""
    zoo, workers = slow_child(batch_size)
    h = host(workers, models=zoo, drop="slack")
    h.arrive([frame(0, slo=3.0)])
    h.advance(0.1)
    h.arrive([name(i, 0.1, 0.1, deadline=3.0) for i in range(1, 5)])
    h.advance(3.0)
    assert not h.dropped
    assert sorted(i for s in h.sent for i in s.ids) == [0, 1, 2, 3, 4]
    # Where the child is busy for longer than there is time, frames are still refused at the root.
    h.arrive([name(i, 3.0, 0.1, deadline=30.0) for i in range(10, 60)])
    h.arrive([frame(5, 3.0, slo=3.0)])
    assert h.dropped == {5: (3.0, DropReason.SHED)}


def test_where_a_variant_has_fewer_workers_slack_routes_again() -> None:
    workers = [EASY[0], worker("L", "large", 1), worker("M", "large", 1), worker("S", "small", 1)]
    for drop, small in (("slack", {4, 5}), ("opportunistic", set())):
        h = host(workers, drop=drop, queues="variant")
        h.arrive([name(i, 0.0, 0.0, deadline=0.07) for i in range(6)])
        # Two at a time are done at 20, 40, 60 ms. With one worker, done at 20, 40, 60, 80, 100.
        assert [(w, ids) for _, w, ids in h.timeline()] == [("L", [0]), ("M", [1])]
        h.change(Cluster.of(MODELS, [workers[0], workers[1], workers[3]]))
        h.advance(0.07)
        assert {i for s in h.sent if s.worker == "S" for i in s.ids} == small
        assert set(h.dropped) == {2, 3, 4, 5} - {i for s in h.sent[2:] for i in s.ids}


# -- routes ----------------------------------------------------------------------------------------


def test_requests_follow_the_tables() -> None:
    """The example of `papers.routing`: 100 of 240 names go to the large one."""
    workers = [worker("D", "d", load=60), worker("L", "large"), worker("S", "small")]
    h = host(workers, drop="none")
    h.arrive([name(i, 0.0, 0.0) for i in range(240)])
    h.advance(100.0)
    count = Counter({w: sum(len(s.ids) for s in h.sent if s.worker == w) for w in "LS"})
    assert count["L"] == pytest.approx(100, abs=2)
    # Not only in the end: of any 24 in a row, 10 or so.
    large = sorted(i for s in h.sent if s.worker == "L" for i in s.ids)
    for first in range(0, 240, 24):
        assert sum(first <= i < first + 24 for i in large) == pytest.approx(10, abs=2)


def test_what_finds_no_capacity_goes_to_who_is_done_first() -> None:
    """150 frames for 100: a third finds no capacity in the table of the clients."""
    workers = [worker("D", "d", 1, 50), worker("E", "d", 1, 50), *EASY[1:]]
    h = host(workers, drop="none", rebalance_s=0.5)
    for i in range(300):
        h.advance(i / 150)
        h.arrive([frame(i, i / 150)])
    h.advance(100.0)
    sizes = Counter(s.worker for s in h.sent)
    assert sizes["D"] == pytest.approx(150, abs=3)
    assert sizes["D"] + sizes["E"] == 300


def test_names_of_an_unknown_worker_go_by_its_variant_or_to_who_is_done_first() -> None:
    h = host()
    h.run([name(0, 0.0, 0.01, by="gone")])
    assert h.timeline() == [(0.0, "L", [0])]
    for upstream in (None, Upstream("gone", "gone", 0.05)):
        for drop in RULES:
            h = host(drop=drop)
            h.run([Request(0, "name", 0.0, 1.0, upstream=upstream)])
            assert h.timeline() == [(0.0, "S", [0])]


def test_workers_of_a_variant_share_a_queue_or_have_their_own() -> None:
    workers = [EASY[0], worker("L", "large", 1), worker("M", "large", 1)]
    for queues, started in (("variant", 0.02), ("worker", 0.06)):
        h = host(workers, drop="none", queues=queues)
        h.arrive([name(i, 0.0, 0.0) for i in range(4)])
        # 40 per second of which the first can take 50: it gets all four.
        h.advance(1.0)
        last = max(s.at for s in h.sent)
        assert last == pytest.approx(started)


# -- the cluster changes ---------------------------------------------------------------------------


@pytest.mark.parametrize("queues", ["variant", "worker"])
def test_the_queue_of_a_worker_that_is_reassigned_is_routed_again(queues: str) -> None:
    h = host(drop="none", queues=queues)
    h.arrive([name(i, 0.0, 0.0) for i in range(4)])
    assert h.timeline() == [(0.0, "L", [0, 1])]
    both = Worker("L", "x", frozenset({"large", "d"}), (Assigned("d", 2, 10),))
    h.change(Cluster.of(MODELS, [EASY[0], both, EASY[2]]))
    assert h.timeline()[1:] == [(0.0, "S", [2, 3])]
    h.advance(0.02)  # the batch of the large one ends as ever, and the worker detects
    h.arrive([frame(10, 0.02), frame(11, 0.02), frame(12, 0.02)])
    assert {w for _, w, _ in h.timeline()[2:]} == {"D", "L"}


def test_a_worker_may_be_assigned_variants_of_several_tasks() -> None:
    parts = (Assigned("d", 2, 10), Assigned("small", 2, 10), Assigned("large", 2, 0))
    every = Worker("L", "x", frozenset({"d", "small"}), parts)  # it has not loaded "large" yet
    h = host([every], drop="none")
    h.arrive([frame(0, 0.0), frame(1, 0.0), frame(2, 0.0)])
    h.arrive([name(i, 0.0, 0.0) for i in range(3, 7)])
    h.advance(1.0)
    sent = sorted((s.variant, len(s.ids)) for s in h.sent)
    assert sent == [("d", 1), ("d", 2), ("small", 2), ("small", 2)]


def test_the_queue_of_a_lost_worker_is_routed_again_and_so_is_its_batch() -> None:
    h = host(drop="none")
    h.arrive([name(i, 0.0, 0.0) for i in range(4)])
    lost = h.flights["L"][0].dispatch.requests
    h.change(Cluster.of(MODELS, [EASY[0], EASY[2]]))
    h.arrive(lost)
    h.advance(1.0)
    assert h.timeline() == [(0.0, "L", [0, 1]), (0.0, "S", [2, 3]), (0.01, "S", [0, 1])]


def test_without_workers_requests_wait_for_one_until_their_deadline() -> None:
    h = host([EASY[0]], drop="slack")
    h.arrive([name(0, 0.0, 0.0, deadline=0.05), name(1, 0.0, 0.0, deadline=0.2)])
    h.advance(0.1)
    assert h.dropped == {0: (0.05, DropReason.NO_WORKER)}
    h.change(Cluster.of(MODELS, EASY))
    assert h.timeline() == [(0.1, "L", [1])]


def used_by(h: Host) -> list[tuple[str, str]]:
    """(worker, variant) of every batch."""
    actions = [a for decision in h.decisions for a in decision.actions]
    return [(a.worker, a.variant) for a in actions if isinstance(a, Dispatch)]


def test_without_assignments_workers_serve_every_task_by_all_that_they_have_loaded() -> None:
    everything = frozenset({"d", "small", "large"})
    workers = [Worker("A", "x", everything), Worker("B", "x", frozenset({"small"}))]
    h = host(workers, drop="slack")
    h.arrive([frame(0)])
    assert used_by(h) == [("A", "d")]
    h.advance(0.02)
    h.arrive([name(1, 0.02, 0.02, by="A")])  # the most accurate one that is in time
    assert used_by(h)[1:] == [("A", "large")]
    h.advance(0.1)
    h.arrive([name(2, 0.1, 0.02, deadline=0.1101, by="A")])
    assert used_by(h)[2:] == [("A", "small")]
    h.advance(0.2)
    # Once somebody is assigned to a task, only those that are serve it.
    h.change(
        Cluster.of(MODELS, [workers[0], replace(workers[1], assigned=(Assigned("small", 1),))])
    )
    h.arrive([name(i, 0.2, 0.0, deadline=0.4) for i in range(3, 6)])
    h.advance(1.0)
    assert [(s.worker, s.ids) for s in h.sent if s.ids[0] > 2] == [
        ("B", [3]),
        ("B", [4]),
        ("B", [5]),
    ]


def test_an_assigned_variant_that_is_not_loaded_is_not_served_yet() -> None:
    early = Worker("L", "x", frozenset({"small"}), (Assigned("large", 2),))
    h = host([EASY[0], early], drop="none")
    h.arrive([name(0, 0.0, 0.0)])
    (sent,) = h.decisions[-2].actions
    assert (sent.worker, sent.variant) == ("L", "small")  # type: ignore[union-attr]


def test_batches_are_no_larger_than_assigned_nor_than_the_profile() -> None:
    for size, most in ((1, 1), (2, 2), (99, 2)):
        h = host([EASY[0], worker("L", "large", size)], drop="none")
        h.run([name(i, 0.0, 0.0) for i in range(7)])
        assert max(len(s.ids) for s in h.sent) == most


def test_a_size_beyond_the_measured_ones_is_tried_where_it_does_no_harm() -> None:
    """Plans are for measured sizes: somebody has to run a larger batch."""
    assumed = LatencyProfile.linear(0.02, 0.0, 16)
    for measured_to, slo, sizes in ((2, 1.0, [4, 4]), (2, 0.07, [2]), (16, 1.0, [2, 2, 2, 2])):
        profile = LatencyProfile(assumed.table, measured_to)
        h = host([EASY[0], worker("L", "large", 2)], models=models(profile), drop="slack")
        h.arrive([name(i, 0.0, 0.0, deadline=slo) for i in range(8)])
        h.advance(2.0)
        assert [len(s.ids) for s in h.sent][: len(sizes)] == sizes


def test_a_batch_is_sent_ahead_within_the_delay() -> None:
    h = host(drop="none", delay=DispatchDelay(0.004, 0.0))
    h.run([frame(i) for i in range(4)])
    # The first is there at 4 ms and ends at 24; the next goes at 20 and starts when it ends.
    assert h.timeline() == [(0.0, "D", [0, 1]), (pytest.approx(0.02), "D", [2, 3])]
    assert [s.finish_at for s in h.sent] == pytest.approx([0.024, 0.044])


def test_cancelled_requests_leave_their_queue() -> None:
    h = host(drop="none")
    requests = [frame(i) for i in range(5)]
    h.arrive(requests)
    h.cancel([requests[0], requests[2]])  # one runs, one waits
    h.advance(1.0)
    assert h.timeline() == [(0.0, "D", [0, 1]), (0.02, "D", [3, 4])]


def test_a_request_is_not_dropped_after_it_was_cancelled() -> None:
    h = host(drop="per_task")
    late = [name(i, 0.0, 0.045) for i in range(3)]
    h.arrive(late, decide=False)
    h.cancel(late[:2])
    assert list(h.dropped) == [2]


# -- what it learns --------------------------------------------------------------------------------


def test_it_measures_demand_and_factors() -> None:
    h = host(drop="none", rebalance_s=0.1)
    policy: Any = h.policy
    assert policy._routes.demand(0.0) == 0
    ids = iter(range(10**6))
    for i in range(500):  # 50 per second, each makes 2 names: half of what was thought
        at = i / 50
        h.advance(at)
        h.arrive([frame(next(ids), at)])
        h.arrive([name(next(ids), at, 0.02, deadline=at + 1) for _ in range(2)])
    assert policy._routes.demand(h.now) == pytest.approx(50, rel=0.1)
    prior, measured = 4.0 * 20, 2.0 * 500
    found = policy._routes.factors.of("d")["name"]
    assert found == pytest.approx((prior + measured) / 520, rel=0.02)
    # Only what finished counts, and what it made; other requests of the model are not learned from.
    h.arrive([Request(next(ids), "name", h.now, h.now + 1) for _ in range(100)])
    assert policy._routes.factors.of("d")["name"] < 2.4


def test_factors_survive_a_new_variant() -> None:
    h = host(drop="none", rebalance_s=0.01)
    policy: Any = h.policy
    for i in range(200):
        h.advance(i / 50)
        h.arrive([frame(i, i / 50)])
    learned = policy._routes.factors.of("d")["name"]
    assert learned < 2
    detect, names = models()
    more = replace(detect, variants=(*detect.variants, Variant("e", {"x": flat(5)}, 50.0)))
    h.change(Cluster.of([more, names], EASY))
    assert policy._routes.factors.of("d")["name"] == pytest.approx(learned)
    assert policy._routes.factors.of("e") == {"name": 1.0}


def test_only_batches_that_finished_are_learned_from() -> None:
    h = host(drop="none", rebalance_s=0.01)
    policy: Any = h.policy
    for i in range(50):
        h.arrive([frame(i, h.now)], decide=True)
        h.finish("D", BatchStatus.FAILED)
        h.now += 0.02
    h.arrive([frame(99, h.now)])
    assert policy._routes.factors.of("d")["name"] == 4.0


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"drop": "never"}, "drop must be one of slack, opportunistic"),
        ({"queues": "task"}, "queues must be one of variant, worker"),
        ({"rebalance_s": 0}, "rebalance_s must be positive, got 0"),
        ({"communication_s": -1}, "communication_s must be at least 0, got -1"),
        ({"parents": {"a": None, "b": None}}, "parents must be a tree"),
        ({"parents": {"b": "a", "a": None}}, "parents must be a tree"),
        ({"factors": {"d": {"name": -1.0}}}, "prior of 'd' must be at least 0"),
        ({"factors": {"d": {"nome": 1.0}}}, r"got {'nome': 1.0} for 'd', which has the children"),
        ({"factors": {"f": {"name": 1.0}}}, "for 'f', which has the children"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        policy = make_policy("pipeline", {"parents": PARENTS, **kwargs})
        policy.cluster_changed(0.0, Cluster.of(MODELS, EASY))


def test_a_cluster_with_another_task() -> None:
    policy = Pipeline(parents={"detect": None})
    with pytest.raises(ValueError, match=r"names the tasks detect; the cluster also has name"):
        policy.cluster_changed(0.0, Cluster.of(MODELS, EASY))


# -- properties ------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=16)
@given(
    drop=st.sampled_from(RULES),
    queues=st.sampled_from(["variant", "worker"]),
    demand=st.sampled_from([20.0, 60.0, 200.0]),
    workers=st.integers(3, 6),
    factors=st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=4, max_size=4),
    latencies=st.lists(st.integers(4, 25), min_size=6, max_size=6),
    shape=st.sampled_from([("a", "b"), ("a", "a"), ("b", "a")]),
    communication_s=st.sampled_from([0.0, 0.002]),
    seed=st.integers(0, 3),
)
def test_frames_of_a_simulated_pipeline_have_the_fate_that_the_rule_allows(
    drop: str,
    queues: str,
    demand: float,
    workers: int,
    factors: list[float],
    latencies: list[int],
    shape: tuple[str, str],
    communication_s: float,
    seed: int,
) -> None:
    """A root "a" with the children "b" and "c", or a chain; two variants each."""
    parents = {"a": None, "b": "a", "c": shape[0]}
    made = {"a": dict(zip("bc", factors[:2], strict=True)), "b": {"c": factors[2]}, "c": {}}
    tasks = tuple(
        loki.Task(
            task,
            tuple(
                loki.Variant(
                    f"{task}{k}",
                    90.0 - 20 * k,
                    LatencyProfile.linear(0.001, latencies[2 * i + k] / 1e3, 8),
                    {c: f for c, f in made[task].items() if parents[c] == task},
                )
                for k in range(2)
            ),
            parents[task],
        )
        for i, task in enumerate("abc")
    )
    problem = loki.Problem(
        tasks, demand, workers, 0.25, batch_sizes=(1, 4), communication_s=communication_s
    )
    report = simulate_application(
        loki.as_auto(problem),
        {"a": Workload(arrivals=Poisson(rate=demand))},
        policy="pipeline",
        duration_s=2.0,
        seed=seed,
        interval_s=1.0,
        policy_kwargs={"drop": drop, "queues": queues, "rebalance_s": 0.3},
    )
    fates = Counter(report.requests.outcome)
    assert fates["pending"] == 0
    if drop == "none":
        assert fates["dropped"] == 0
    elif drop != "last_task":  # latencies are as profiled: what is sent is in time
        assert fates["late"] == 0
    assert report.batches["size"].max() <= 4
