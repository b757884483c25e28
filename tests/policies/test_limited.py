"""The limit at the roots of pipelines: what it refuses, and that it counts right."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ray_slo.core import BatchStatus, Cluster, DropReason, LatencyProfile, Model, Request, Variant
from ray_slo.core.policy import InFlight, wrapper
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.policies.limited import Limited, _Tree
from ray_slo.policies.registry import policy_for
from ray_slo.simulation import Workload
from ray_slo.simulation.application import simulate_application
from tests.policies.harness import Host

TREE = Tree(
    "a", (TreeTask("a", "a", None, {"a.0": {"b": 2.0}}), TreeTask("b", "b", "a")), {"": 0.5}
)
A_S, B_S = 0.02, 0.04  # of an item; the profiles have no batching effect


def cluster(workers):
    return Cluster.uniform(
        [
            Model(
                name, 0.25, (Variant(f"{name}.0", {"default": LatencyProfile.linear(s, 0.0, 8)}),)
            )
            for name, s in (("a", A_S), ("b", B_S))
        ],
        workers,
    )


def made(**composing):
    return policy_for("flex", {"preemption": False}, (TREE,), {"a": 1, "b": 1}, **composing)


def host(workers=1, **composing):
    return Host(lambda: made(**composing), cluster(workers), strict=False)


def request(i, at, task="a", slo_s=0.5):
    return Request(i, task, at, at + slo_s, task=task)


def learn(h):
    """Run both tasks until their work is known."""
    for i in range(60):
        for k, task in enumerate("ab"):
            h.arrive([request(2 * i + k, h.now, task)])
            h.advance(h.now + 0.1)
    return 1000


def busy(h):
    return next(worker for worker, flights in h.flights.items() if flights)


def shed(h):
    return [i for i, (_, reason) in h.dropped.items() if reason is DropReason.SHED]


def test_a_root_admits_the_work_that_can_be_done_by_the_deadline():
    h = host()
    first = learn(h)
    assert not shed(h)
    h.arrive([request(first + i, h.now) for i in range(20)])
    # 0.5 s of one worker are five times 20 + 2 · 40 ms.
    assert len(shed(h)) == 15
    # Only requests of clients are refused.
    h.arrive([request(first + 100 + i, h.now, "b") for i in range(5)])
    assert len(shed(h)) == 15


def test_without_a_limit_all_are_admitted():
    h = host(limited=False)
    h.arrive([request(learn(h) + i, h.now) for i in range(20)])
    assert wrapper(h.policy, Limited) is None
    assert not shed(h)


def test_work_with_later_deadlines_does_not_count():
    tree = Tree("a", TREE.tasks, {"": 0.5, "batch": 20.0})
    h = Host(
        lambda: policy_for("flex", {"preemption": False}, (tree,), {"a": 1, "b": 1}),
        cluster(1),
        strict=False,
    )
    first = learn(h)
    lenient = [request(first + i, h.now, slo_s=20.0) for i in range(100)]
    h.arrive(lenient)
    assert not shed(h)  # 10 s of work
    h.arrive([request(first + 200 + i, h.now) for i in range(20)])
    assert len(shed(h)) == 15
    assert not {r.id for r in lenient} & set(shed(h))


def test_a_request_alone_is_admitted_however_much_work_it_is():
    tree = Tree("a", TREE.tasks, {"": 0.09})
    h = Host(
        lambda: policy_for("flex", {"preemption": False}, (tree,), {"a": 1, "b": 1}),
        cluster(1),
        strict=False,
    )
    first = learn(h)
    h.arrive([request(first, h.now, slo_s=0.09)])
    assert not shed(h)
    h.arrive([request(first + 1, h.now, slo_s=0.09)])
    assert shed(h) == [first + 1]


def test_what_leaves_makes_room():
    h = host()
    first = learn(h)
    h.arrive([request(first, h.now)])
    h.arrive([request(first + i, h.now) for i in range(1, 6)])
    assert shed(h) == [first + 5]
    waiting = list(h.waiting.values())
    h.cancel(waiting[:1])
    h.arrive([request(first + 6, h.now)])
    assert shed(h) == [first + 5]
    h.advance(h.now + 0.3)
    assert not h.waiting
    h.arrive([request(first + 10 + i, h.now) for i in range(5)])
    assert shed(h) == [first + 5]


def test_a_request_of_a_lost_batch_comes_back_and_is_admitted():
    h = host()
    first = learn(h)
    one = request(first, h.now)
    h.arrive([one])
    h.finish(busy(h), BatchStatus.LOST)
    h.arrive([request(first + 1 + i, h.now) for i in range(6)])
    refused = shed(h)
    assert refused
    h.arrive([one])
    assert shed(h) == refused


def test_a_policy_that_takes_over_knows_the_work_and_refuses_nothing_that_waits():
    h = host()
    first = learn(h)
    h.arrive([request(first + i, h.now) for i in range(5)])
    former, after = h.policy, made()
    flights = [InFlight(f.dispatch, h.now, f.dispatch.finish_at) for f in h.flights[busy(h)]]
    after.adopt(h.now, flights, h.last_batch_id, former)
    after.cluster_changed(h.now, h.cluster)
    after.requests_arrived(h.now, list(h.waiting.values()))
    drops = [a for a in after.decide(h.now).actions if getattr(a, "reason", None)]
    assert not drops
    now = h.now + 0.001
    after.requests_arrived(now, [request(first + 50, now)])
    assert [a.reason for a in after.decide(now).actions] == [DropReason.SHED]


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "below", "finish", "lost", "cancel", "wait"]),
            st.integers(1, 6),
        ),
        max_size=60,
    )
)
def test_it_counts_what_is_present(steps):
    h = host(workers=2)
    number = 0
    for what, count in steps:
        if what in ("arrive", "below"):
            task = "a" if what == "arrive" else "b"
            h.arrive([request(number + i, h.now, task) for i in range(count)])
            number += count
        elif what == "cancel":
            h.cancel(list(h.waiting.values())[:count])
        elif what == "wait":
            h.advance(h.now + 0.05 * count)
        else:
            busy = [w for w, flights in h.flights.items() if flights]
            status = BatchStatus.LOST if what == "lost" else BatchStatus.FINISHED
            for worker in busy[:1]:
                h.finish(worker, status)
        limited = wrapper(h.policy, Limited)
        present = list(h.waiting.values())
        present += [
            r for flights in h.flights.values() for f in flights for r in f.dispatch.requests
        ]
        for task in "ab":
            counted = [due.items.get(task, 0) for due in limited._tree_of[task].due.values()]
            assert sum(counted) == sum(r.task == task for r in present)


def simulated(rate, limited):
    """Share of good requests of a quick root that makes three requests each."""
    tree = Tree(
        "a", (TreeTask("a", "a", None, {"a.0": {"b": 3.0}}), TreeTask("b", "b", "a")), {"": 0.6}
    )
    profiles = {
        "a": LatencyProfile.linear(0.01, 0.04, 16),
        "b": LatencyProfile.linear(0.008, 0.01, 16),
    }
    models = tuple(
        auto.Model(name, (auto.Variant(f"{name}.0", 80.0, {"default": profile}),))
        for name, profile in profiles.items()
    )
    report = simulate_application(
        auto.Problem(models, (tree,), {}, (auto.Kind("default", 8, 8),)),
        {"a": Workload.poisson(rate)},
        policy=policy_for("deferred", {}, (tree,), {"a": 1, "b": 1}, limited=limited),
        duration_s=12.0,
        seed=3,
    )
    return 1 - float(report.streams(4.0, 12.0).iloc[0]["bad_rate"])


@pytest.mark.slow
def test_in_overload_the_root_leaves_time_for_the_tasks_below():
    assert simulated(450.0, True) > 1.1 * simulated(450.0, False)


def test_below_capacity_nearly_all_are_admitted():
    assert simulated(150.0, True) > 0.995


def test_slower_batches_raise_the_work_only_slowly():
    """The least of the last measurements counts, so a measurement adds 2 % at most."""
    tree = _Tree(TREE)
    fifty = Request(0, "a", 0.0, 0.5, task="a", size=50)
    for each_s, own_s in ((0.02, 0.02), (0.08, 0.0204), (0.0206, 0.0206), (0.01, 0.01)):
        tree.ran(fifty, each_s)
        assert tree.tasks["a"].own_s == pytest.approx(own_s)


@pytest.mark.parametrize(
    ("slos_s", "part_s"),
    [({"": 0.5}, 0.0625), ({"": 0.5, "batch": 8.0}, 0.0625), ({"": 0.5, "batch": 20.0}, 0.078125)],
)
def test_deadlines_are_equal_in_an_eighth_of_the_slo_or_less_of_a_longer_one(slos_s, part_s):
    """A 256th of the longest SLO, so there are never more parts."""
    tree = _Tree(Tree("a", TREE.tasks, slos_s))
    for deadline in (7 * part_s, 7.9 * part_s, 8 * part_s):
        tree.add(Request(0, "a", 0.0, deadline, task="a"), 3)
    assert {part: due.items for part, due in tree.due.items()} == {7: {"a": 6}, 8: {"a": 3}}
    tree.add(Request(0, "a", 0.0, 8 * part_s, task="a"), -3)
    assert tree.due.keys() == {7}
