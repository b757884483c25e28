"""What the planner makes of the reports of workers and frontends."""

from __future__ import annotations

from ray_slo.core import LatencyProfile
from ray_slo.planning.brains.brain import Counts, FrontendSays, WorkerSays
from ray_slo.serve.planner.heard import Heard

PROFILE = LatencyProfile([0.01])


def says(worker, memory_mb, room_mb, kind="gpu"):
    loaded = frozenset(memory_mb)
    return WorkerSays(
        worker,
        kind,
        loaded,
        profiles=dict.fromkeys(loaded, PROFILE),
        memory_mb=memory_mb,
        room_mb=room_mb,
    )


def heard(*said):
    planner = Heard(0.0, gone_s=10.0, avoid_s=60.0)
    for worker in said:
        planner.worker(worker, 1.0, planned=True)
    planner.learn()
    return planner


def test_a_frontend_that_is_gone_has_left_its_requests_to_the_others():
    planner = heard()
    for client in ("a", "b"):
        planner.frontend(FrontendSays(client, Counts(), ""), 0.0)
    says = FrontendSays("a", Counts(), "")
    found = [planner.frontend(says._replace(at=at), at) for at in (0.5, 1.5, 2.0, 2.5)]
    assert [over_s for over_s, _ in found] == [0.25, 0.5, 0.5, 0.5]


def test_counts_stand_for_the_time_until_they_were_sent_rather_than_heard():
    planner = heard()
    said = [FrontendSays("a", Counts({"m": n}), "", at=at) for n, at in ((0, 100.0), (10, 105.0))]
    assert planner.frontend(said[0], 7.0) is None  # the planner was starting
    assert planner.frontend(said[1], 7.5) == (5.0, Counts({"m": 10}))


def test_the_median_of_what_workers_measured_and_the_least_room():
    planner = heard(
        says("w0", {"a": 100, "b": 50}, 1000),
        says("w1", {"a": 130}, 900),
        says("w2", {"a": 110}, None),
        says("w3", {"a": 70}, 500, kind="cpu"),
    )
    seen = planner.seen()
    assert seen.memory_mb == {("a", "gpu"): 110, ("b", "gpu"): 50, ("a", "cpu"): 70}
    assert seen.room_mb == {"gpu": 900, "cpu": 500}
    assert not seen.avoided and not planner.load_errors


def test_a_variant_that_does_not_fit_is_avoided_and_the_reason_said():
    planner = heard(says("w0", {"a": 100, "b": 1001}, 1000), says("w1", {"b": 999}, 1000, "cpu"))
    assert planner.seen().avoided == {("b", "gpu")}
    assert planner.load_errors == {
        ("b", "gpu"): "it takes 1001 MB, and a worker has room for 1000 MB"
    }


def test_memory_is_known_when_the_worker_is_gone_and_is_no_news_of_a_worker():
    planner = heard(says("w0", {"a": 100}, 1000))
    assert not planner.worker(says("w0", {"a": 120}, 990), 2.0, planned=True)
    planner.learn()
    planner.left("w0")
    assert planner.seen().memory_mb == {("a", "gpu"): 120}
    assert planner.seen().room_mb == {"gpu": 990}


def test_workers_come_in_the_order_in_which_they_were_ready():
    planner = Heard(0.0, gone_s=10.0, avoid_s=60.0)
    for name, age_s, ready_s in (("slow", 30.0, 20.0), ("quick", 25.0, 5.0), ("new", 40.0, None)):
        worker = WorkerSays(name, "cpu", age_s=age_s, ready=ready_s is not None, ready_s=ready_s)
        planner.worker(worker, 50.0, planned=True)
    assert list(planner.seen().workers) == ["quick", "slow", "new"]
