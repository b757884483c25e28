import doctest
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.loki import terms as loki
from benchmarks.loki.terms.plans import workers_of
from ray_slo.core.profiles import LatencyProfile
from ray_slo.papers import routing
from ray_slo.papers.routing import Backup, Entry, Worker, most_accurate_first

CHAIN = {"a": None, "b": "a"}
TREE = {"a": None, "b": "a", "c": "a", "d": "b"}


def algorithm_1(parents, workers, demand):
    """The paper's pseudo-code, line by line; the frontend is the worker of a task above the root.
    Returns ({(worker, child): {child's worker: probability}}, capacities left, incoming)."""
    left = {w.id: w.capacity for w in workers}
    incoming = {w.id: 0.0 for w in workers}
    tables = {}
    above = [("frontend", demand, None)]
    for task in [None, *parents]:
        members = [w for w in workers if w.task == task]
        members.sort(key=lambda w: -w.accuracy)
        senders = above if task is None else [(w.id, incoming[w.id], w) for w in members]
        for name, arriving, worker in senders:
            for child in (c for c, p in parents.items() if p == task):
                outgoing = arriving * (worker.factors.get(child, 1.0) if worker else 1.0)
                total = outgoing
                table = {}
                for to in sorted(
                    (w for w in workers if w.task == child), key=lambda w: -w.accuracy
                ):
                    if left[to.id] > 0 and outgoing > 0:
                        routed = min(outgoing, left[to.id])
                        table[to.id] = routed / total
                        outgoing -= routed
                        left[to.id] -= routed
                        incoming[to.id] += routed
                tables[name, child] = table
    return tables, left, incoming


@st.composite
def cases(draw):
    workers = []
    for task in TREE:
        for i in range(draw(st.integers(0 if task != "a" else 1, 4))):
            children = [c for c, p in TREE.items() if p == task]
            workers.append(
                Worker(
                    (task, i),
                    task,
                    draw(st.sampled_from([70.0, 80.0, 90.0])),
                    draw(st.integers(1, 50)) * 10.0,
                    0.01,
                    {c: draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])) for c in children},
                )
            )
    return workers, draw(st.sampled_from([0.0, 5.0, 100.0, 450.0, 2000.0]))


@given(cases())
@settings(max_examples=100)
def test_as_algorithm_1(case):
    workers, demand = case
    made = most_accurate_first(TREE, workers, demand)
    tables, left, incoming = algorithm_1(TREE, workers, demand)
    ours = {("frontend", "a"): dict(made.frontend)}
    for worker, by_child in made.tables.items():
        ours |= {(worker, child): dict(entries) for child, entries in by_child.items()}
    for key, table in tables.items():
        significant = {w: p for w, p in table.items() if p > 1e-8}
        assert ours.get(key, {}) == pytest.approx(significant)
    assert made.incoming == pytest.approx(incoming, abs=1e-6)
    spare = {b.worker: b.leftover for backups in made.backup.values() for b in backups}
    assert spare == pytest.approx({w: x for w, x in left.items() if x > 1e-6}, abs=1e-6)
    for task in TREE:
        assert sum(made.incoming[w.id] for w in workers if w.task == task) + made.unrouted[
            task
        ] == pytest.approx(
            demand
            if task == "a"
            else sum(
                made.incoming[w.id] * w.factors[task] for w in workers if w.task == TREE[task]
            ),
            abs=1e-6,
        )


def test_doctest():
    assert doctest.testmod(routing).failed == 0


def test_accurate_upstream_workers_choose_first():
    """Both detectors send on; the accurate one's requests take the accurate recogniser."""
    workers = [
        Worker("poor", "a", 70.0, 100.0, 0.01),
        Worker("good", "a", 90.0, 60.0, 0.02),
        Worker("small", "b", 80.0, 500.0, 0.01),
        Worker("large", "b", 95.0, 80.0, 0.03),
    ]
    made = most_accurate_first(CHAIN, workers, 100.0)
    assert made.frontend == (Entry("good", 0.6), Entry("poor", 0.4))
    assert made.tables["good"] == {"b": (Entry("large", 1.0),)}
    assert made.tables["poor"]["b"] == (Entry("large", 0.5), Entry("small", 0.5))
    assert made.backup == {
        "a": (Backup("poor", 70.0, 0.01, 60.0),),
        "b": (Backup("small", 80.0, 0.01, 480.0),),
    }
    assert made.unrouted == {"a": 0.0, "b": 0.0}


def test_what_finds_no_capacity():
    workers = [Worker("x", "a", 90.0, 50.0, 0.01, {"b": 2.0}), Worker("y", "b", 90.0, 80.0, 0.01)]
    made = most_accurate_first(CHAIN, workers, 100.0)
    assert made.frontend == (Entry("x", 0.5),)
    assert made.tables["x"]["b"] == (Entry("y", 0.8),)
    assert made.unrouted == {"a": 50.0, "b": 20.0}
    assert made.backup == {"a": (), "b": ()}


def test_workers_are_filled_as_planned_first():
    """Algorithm 1 sends 80 to the good detector, whose 160 requests find 100 places. The plan has
    it at 20, so that 20 · 2 + 60 · 1 = 100."""
    workers = [
        Worker("good", "a", 90.0, 80.0, 0.02, {"b": 2.0}),
        Worker("poor", "a", 70.0, 100.0, 0.01, {"b": 1.0}),
        Worker("x", "b", 80.0, 100.0, 0.01),
    ]
    assert most_accurate_first(CHAIN, workers, 80.0).unrouted["b"] == pytest.approx(60)
    planned = [replace(workers[0], planned=20.0), replace(workers[1], planned=60.0), workers[2]]
    made = most_accurate_first(CHAIN, planned, 80.0)
    assert made.frontend == (Entry("good", 0.25), Entry("poor", 0.75))
    assert sum(made.unrouted.values()) == pytest.approx(0)
    assert made.backup["a"] == (Backup("good", 90.0, 0.02, 60.0), Backup("poor", 70.0, 0.01, 40.0))
    # Beyond the plan: what is left of the accurate one, then of the other.
    assert dict(most_accurate_first(CHAIN, planned, 150.0).frontend) == pytest.approx(
        {"good": 80 / 150, "poor": 70 / 150}
    )


def test_backups_that_are_as_accurate_come_fastest_first():
    workers = [Worker(i, "a", 90.0, 10.0, t) for i, t in enumerate([0.03, 0.01, 0.02])]
    made = most_accurate_first({"a": None}, workers, 0.0)
    assert made.frontend == ()
    assert [b.worker for b in made.backup["a"]] == [1, 2, 0]


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_the_tables_of_a_plan_serve_its_demand(share):
    """A chain in hardware scaling: every path is allowed, so the tables carry the whole demand."""
    large = LatencyProfile.linear(0.004, 0.01, 8)
    tasks = (
        loki.Task("a", (loki.Variant("va", 95.0, large, {"b": 3.0}),)),
        loki.Task("b", (loki.Variant("vb", 95.0, large.scaled(0.5)),), "a"),
    )
    problem = loki.Problem(tasks, 1.0, 10, 0.25, batch_sizes=(1, 2, 4, 8))
    problem = replace(problem, demand=share * loki.capacity(problem))
    plan = loki.plan(problem)
    assert isinstance(plan, loki.Plan)
    workers = workers_of(problem, plan)
    assert len(workers) == plan.workers == len({w.id for w in workers})
    made = most_accurate_first(CHAIN, workers, problem.demand)
    assert sum(made.unrouted.values()) < 1e-4 * problem.demand
    assert math.fsum(e.probability for e in made.frontend) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("parents", "workers", "demand", "message"),
    [
        ({"b": "a", "a": None}, [], 1.0, "parents must be a tree, root first"),
        ({"a": None, "b": None}, [], 1.0, "parents must be a tree"),
        (CHAIN, [], -1.0, "demand must be at least 0, got -1"),
        (CHAIN, [Worker("x", "z", 90.0, 1.0, 0.01)], 1.0, "task of worker 'x' must be one of"),
        (CHAIN, [Worker("x", t, 90.0, 1.0, 0.01) for t in "ab"], 1.0, "ids of their own"),
    ],
)
def test_bad_input(parents, workers, demand, message):
    with pytest.raises(ValueError, match=message):
        most_accurate_first(parents, workers, demand)
