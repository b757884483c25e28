"""Plans where Loki's program serves nothing, and room for all requests that one request makes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_slo.core import Assigned, Cluster, LatencyProfile, Model, Request, Upstream, Worker
from ray_slo.core import Variant as CoreVariant
from ray_slo.planning import best_effort, loki
from ray_slo.planning.loki import Plan, Problem, Task, Variant
from ray_slo.planning.result import Infeasible
from ray_slo.policies.pipeline import Pipeline
from tests.policies.harness import Host


def linear(each_ms: float, fixed_ms: float, largest: int = 16) -> LatencyProfile:
    return LatencyProfile.linear(each_ms / 1e3, fixed_ms / 1e3, largest)


def best(made: Plan | Infeasible[Plan]) -> Plan:
    return made.best_effort if isinstance(made, Infeasible) else made


def host_of(problem: Problem, plan: Plan) -> Host:
    """Workers as planned, under the policy `pipeline`."""
    variants = {v.name: v for t in problem.tasks for v in t.variants}
    models = [
        Model(
            t.name,
            problem.slo_s,
            tuple(CoreVariant(v.name, {"x": v.profile}, v.accuracy) for v in t.variants),
        )
        for t in problem.order
    ]
    if plan.shared:
        loaded = frozenset(a.variant for a in plan.assignments)
        workers = [Worker(f"w{i}", "x", loaded) for i in range(plan.workers)]
    else:
        one = [
            Assigned(a.variant, a.batch_size) for a in plan.assignments for _ in range(a.workers)
        ]
        workers = [Worker(f"w{i}", "x", frozenset({a.variant}), (a,)) for i, a in enumerate(one)]
    parents = {t.name: t.parent for t in problem.order}
    factors = {name: dict(v.factors) for name, v in variants.items()}

    def policy() -> Pipeline:
        return Pipeline(parents=parents, factors=factors)

    return Host(policy, Cluster.of(models, workers), strict=False)


def serve_one(problem: Problem, plan: Plan) -> Host:
    """A lone request and all that it makes: every batch ends when it was predicted to."""
    host = host_of(problem, plan)
    factors = {v.name: (t, v.factors) for t in problem.tasks for v in t.variants}
    host.arrive([Request(0, problem.order[0].name, 0.0, problem.slo_s)])
    entered, count = {0: 0.0}, 1
    while host.now < 10 * problem.slo_s and any(host.flights.values()):
        end_at = min(f[0].end_at for f in host.flights.values() if f)
        host.advance(math.nextafter(end_at, -math.inf))
        host.now = end_at
        born = []
        for worker, flights in list(host.flights.items()):
            if not flights or flights[0].end_at > end_at:
                continue
            sent = flights[0].dispatch
            host.finish(worker, decide=False)
            task, made = factors[sent.variant]
            for r in sent.requests:
                upstream = Upstream(worker, sent.variant, host.now - entered[r.id])
                for child in problem.children(task):
                    for _ in range(int(made.get(child.name, 1))):
                        born.append(
                            Request(count, child.name, host.now, r.deadline, upstream=upstream)
                        )
                        entered[count] = host.now
                        count += 1
        if born:
            host.arrive(born, decide=False)
        host.decide()
    return host


times = st.tuples(st.floats(1, 40), st.floats(0, 40))  # ms per request and per batch
accuracy = st.floats(50, 100)


@st.composite
def problems(draw) -> Problem:
    parents = draw(
        st.sampled_from(
            [
                {"a": None},
                {"a": None, "b": "a"},
                {"a": None, "b": "a", "c": "a"},
                {"a": None, "b": "a", "c": "b"},
            ]
        )
    )
    tasks = []
    for name, parent in parents.items():
        children = [c for c, p in parents.items() if p == name]
        variants = tuple(
            Variant(
                f"{name}{i}",
                draw(accuracy),
                linear(*draw(times)),
                {c: float(draw(st.integers(1, 6))) for c in children},
            )
            for i in range(draw(st.integers(1, 2)))
        )
        tasks.append(Task(name, variants, parent))
    return Problem(
        tuple(tasks),
        demand=draw(st.floats(0.1, 50)),
        workers=draw(st.integers(1, 6)),
        slo_s=draw(st.floats(0.05, 3.0)),
        batch_sizes=(1, 4, 16),
        headroom_quantile=draw(st.sampled_from([None, 0.95])),
    )


@settings(max_examples=30)
@given(problems())
def test_a_plan_has_room_for_a_lone_request_and_all_that_it_makes(problem: Problem) -> None:
    made = loki.plan(problem)
    assume(best(made).shed_share < 1)
    host = serve_one(problem, best(made))
    assert not host.dropped
    assert not host.waiting
    assert max(s.finish_at for s in host.sent) <= problem.slo_s + 1e-6


@pytest.mark.slow
@settings(max_examples=30)
@given(problems())
def test_the_best_effort_serves_a_lone_request_wherever_that_is_possible(problem: Problem) -> None:
    made = best_effort.plan(problem)
    plan = best(made)
    assert {a.task for a in plan.assignments} == {t.name for t in problem.tasks} or not plan.shared
    if isinstance(made, Infeasible):
        assert made.reason
    alone = replace(problem, waiting_factor=1.0, fits_alone=False)
    if plan.shed_share >= 1:
        assert loki.fastest(alone) > problem.slo_s  # not even so
        return
    one_each = tuple(
        replace(t, variants=tuple(replace(v, factors={}) for v in t.variants))
        for t in problem.tasks
    )
    one_by_one_s = sum(min(v.profile(1) for v in t.variants) for t in problem.tasks)
    assume(one_by_one_s <= problem.slo_s)  # else siblings may need two workers at a time
    alone = replace(problem, tasks=one_each)
    made = best_effort.plan(alone)
    host = serve_one(alone, best(made))
    assert not host.dropped
    assert max(s.finish_at for s in host.sent) <= problem.slo_s + 1e-6


def chain(workers: int, slo_s: float = 0.2, demand: float = 20.0) -> Problem:
    names = (Variant("large", 90.0, linear(50, 10)), Variant("small", 80.0, linear(5, 5)))
    tasks = (
        Task("detect", (Variant("d", 90.0, linear(10, 10), {"name": 1.0}),)),
        Task("name", names, "detect"),
        Task("last", (Variant("z", 100.0, linear(2, 2)),), "name"),
    )
    return Problem(tasks, demand=demand, workers=workers, slo_s=slo_s)


def test_fewer_workers_than_tasks_serve_all_of_them():
    made = best_effort.plan(chain(2))
    assert isinstance(made, Infeasible)
    assert made.reason == "2 workers for 3 tasks: each serves all of them"
    plan = made.best_effort
    assert plan.shared and plan.workers == 2
    assert [a.variant for a in plan.assignments] == ["d", "large", "z"]
    assert plan.shed_share == 0
    # At a higher demand there is time for the small one only.
    made = best_effort.plan(chain(2, demand=60))
    assert [a.variant for a in best(made).assignments] == ["d", "small", "z"]
    # At a high one, batches; and what cannot be served is said.
    much = best_effort.plan(chain(1, 0.2, 500.0))
    assert "% of the demand can be served" in much.reason
    assert 0 < much.best_effort.shed_share < 1
    assert max(a.batch_size for a in much.best_effort.assignments) > 1


def test_no_time_to_wait_and_no_time_at_all_are_said():
    made = best_effort.plan(chain(4, slo_s=0.05))
    assert isinstance(made, Infeasible)
    assert made.reason == (
        "the SLO leaves no time to wait: 50 ms, and the fastest path takes 34 ms in execution alone"
    )
    assert made.best_effort.shed_share < 1
    made = best_effort.plan(chain(4, slo_s=0.02))
    assert isinstance(made, Infeasible)
    assert made.reason.startswith("no variants are fast enough: the fastest path takes 34 ms")
    plan = made.best_effort
    assert {a.variant for a in plan.assignments} == {"d", "small", "z"}
    assert plan.workers == 4
    assert plan.shed_share == 1


def test_what_one_request_makes_at_once_asks_for_larger_batches_or_more_workers():
    def problem(sizes, **options):
        detect = Task("detect", (Variant("d", 90.0, linear(2, 2), {"name": 10.0}),))
        name = Task("name", (Variant("n", 90.0, linear(10, 0)),), "detect")
        return Problem((detect, name), 1.0, 6, 0.06, batch_sizes=sizes, **options)

    def of_name(made):
        assert isinstance(made, Plan)
        return {a.batch_size: a.workers for a in made.assignments if a.task == "name"}

    # 10 names of 10 ms, and half of the SLO is left for them: 3 for a worker.
    assert of_name(loki.plan(problem((1,)))) == {1: 4}
    assert sum(b * n for b, n in of_name(loki.plan(problem((1, 2)))).items()) >= 4
    assert of_name(loki.plan(problem((1,), fits_alone=False))) == {1: 1}
    # Too few workers for that: the best that there is, and why.
    few = replace(problem((1,)), workers=3)
    made = best_effort.plan(few)
    assert isinstance(made, Infeasible)
    assert "more than 3 workers take in the time" in made.reason
    assert made.best_effort.shed_share == 0


def test_a_floor_of_accuracy_is_kept():
    asked = replace(chain(4), accuracy_floor=95.0)
    made = best_effort.plan(asked)
    assert isinstance(made, Infeasible)
    assert made.best_effort.shed_share == pytest.approx(1)
