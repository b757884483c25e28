import doctest
import itertools
import math
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.papers import partition
from ray_slo.papers.partition import Plan, Problem
from ray_slo.papers.partition.search import Search
from ray_slo.planning import Infeasible
from tests.planning.examples.partition import problem

GUROBI = find_spec("gurobipy") is not None


def assert_keeps_constraints(p: Problem, plan: Plan, budget: bool = True) -> None:
    by_name = {m.name: m for m in p.models}
    assert len(plan.sub_clusters) == p.sub_clusters
    placed = [name for s in plan.sub_clusters for name in s.models]
    assert sorted([*placed, *plan.unplaced]) == sorted(by_name)  # (8)
    for s in plan.sub_clusters:
        members = [by_name[name] for name in s.models]
        assert s.rate == pytest.approx(sum(m.rate for m in members))
        assert s.rate <= p.max_rate * (1 + 1e-6)  # (4)
        memory = sum(m.static_mb for m in members)
        memory += max((m.dynamic_mb for m in members), default=0)
        assert memory <= p.max_memory_mb * (1 + 1e-6)  # (5)
    if budget:
        assert plan.change_cost <= p.max_change_cost + 1e-6  # (10)


def cost_of_change(p: Problem, assignment) -> float:
    """Eq. 10 as it is written."""
    if p.current is None:
        return 0.0
    costs = p.change_cost or [1.0] * len(p.models)
    total = 0.0
    for i, j in itertools.product(range(len(p.models)), range(p.sub_clusters)):
        total += costs[i] * abs((assignment[i] == j) - (p.current[i] == j))
    return float(total)


def brute_force(p: Problem) -> float | None:
    rates = np.array([m.rate for m in p.models])
    static = np.array([m.static_mb for m in p.models])
    dynamic = np.array([m.dynamic_mb for m in p.models])
    mean_rate, mean_static = rates.sum() / p.sub_clusters, static.sum() / p.sub_clusters
    best = None
    for assignment in itertools.product(range(p.sub_clusters), repeat=len(rates)):
        member = np.array(assignment) == np.arange(p.sub_clusters)[:, None]
        rate, memory = member @ rates, member @ static
        if (
            (rate > p.max_rate).any()
            or (memory + (member * dynamic).max(axis=1) > p.max_memory_mb).any()
            or cost_of_change(p, assignment) > p.max_change_cost + 1e-9
        ):
            continue
        spread = (
            np.abs(rate - mean_rate).max() + p.memory_weight * np.abs(memory - mean_static).max()
        )
        best = spread if best is None else min(best, spread)
    return best


@st.composite
def small(draw):
    n, parts = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    return problem(
        draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
        draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)),
        draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)),
        sub_clusters=parts,
        memory_weight=draw(st.sampled_from([0.0, 0.5, 2.0])),
        max_rate=draw(st.sampled_from([math.inf, 20, 12])),
        max_memory_mb=draw(st.sampled_from([math.inf, 30, 18])),
        current=draw(
            st.none() | st.tuples(*[st.integers(-1, parts - 1)] * n),
        ),
        change_cost=draw(st.none() | st.tuples(*[st.sampled_from([1.0, 2.5])] * n)),
        max_change_cost=draw(st.sampled_from([math.inf, 6.0, 2.0])),
    )


@pytest.mark.slow
@given(small())
@settings(max_examples=40)
def test_agrees_with_brute_force(p):
    best, plan = brute_force(p), partition.plan(p)
    if best is None:
        assert isinstance(plan, Infeasible)
        assert plan.proven and plan.reason
        assert_keeps_constraints(p, plan.best_effort, budget=False)
    else:
        assert isinstance(plan, Plan)
        assert_keeps_constraints(p, plan)
        within = 1e-3 * Search(p).scale + 1e-6  # the default tolerance
        assert plan.bound - 1e-6 <= best <= plan.objective + 1e-6 <= best + within + 2e-6


@pytest.mark.slow
@given(small())
@settings(max_examples=30)
def test_the_search_alone_keeps_limits_and_claims_nothing(p):
    p = Problem(**{**p.__dict__, "time_limit_s": 0.0})
    best, plan = brute_force(p), partition.plan(p)
    if isinstance(plan, Plan):
        assert best is not None
        assert_keeps_constraints(p, plan)
        assert plan.bound - 1e-6 <= best <= plan.objective + 1e-6
        names = {
            m.name: j
            for j, s in enumerate(plan.sub_clusters)
            for m in p.models
            if m.name in s.models
        }
        assert plan.change_cost == pytest.approx(
            cost_of_change(p, [names[m.name] for m in p.models])
        )  # fmt: skip
    else:
        assert best is None or not plan.proven
        assert plan.reason


@pytest.mark.skipif(not GUROBI, reason="gurobipy is not installed: pip install 'ray-slo[gurobi]'")
@given(small())
@settings(max_examples=15)
def test_both_solvers_have_the_same_optimum(p):
    milp, _ = partition.program(p)
    highs, gurobi = milp.solve("highs"), milp.solve("gurobi")
    assert highs.status == gurobi.status
    if highs.found:
        assert highs.objective == pytest.approx(gurobi.objective, abs=1e-4)  # tolerances


def large(seed, models=200, parts=8, **kwargs):
    rng = np.random.default_rng(seed)
    return problem(
        rng.exponential(100, models).tolist(),
        rng.uniform(16, 550, models).tolist(),
        rng.uniform(50, 1500, models).tolist(),
        sub_clusters=parts,
        time_limit_s=0.0,
        **kwargs,
    )


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_models_are_even_without_a_solver(seed):
    p = large(seed)
    plan = partition.plan(p)
    assert isinstance(plan, Plan)
    assert_keeps_constraints(p, plan)
    assert plan.rate_spread < 0.01 * Search(p).mean_rate
    assert plan.memory_spread < 0.01 * Search(p).mean_static
    assert plan == partition.plan(p)  # reproducible


def test_a_tight_memory_limit_gathers_large_dynamic_memory():
    """Static memory alone fills 95 % of what is left beside the largest dynamic memory."""
    p = large(0)
    static = sum(m.static_mb for m in p.models) / p.sub_clusters
    p = Problem(**{**p.__dict__, "max_memory_mb": static / 0.95 + 1500})
    plan = partition.plan(p)
    assert isinstance(plan, Plan)
    assert_keeps_constraints(p, plan)


@pytest.mark.parametrize("budget", [0, 10, 60])
def test_disruption_is_bounded_and_a_larger_budget_is_not_worse(budget):
    rng = np.random.default_rng(1)
    current = tuple(rng.integers(0, 8, 200).tolist())
    p, more = (
        large(0, current=current, max_change_cost=b) for b in (float(budget), float(budget + 60))
    )
    plan, freer = partition.plan(p), partition.plan(more)
    assert isinstance(plan, Plan) and isinstance(freer, Plan)
    assert_keeps_constraints(p, plan)
    assert len(plan.moved) <= budget / 2  # unload here, load there
    assert freer.objective < plan.objective
    assert f"{len(plan.moved)} models move" in plan.explanation


def test_a_new_model_goes_where_there_is_room_and_nothing_else_moves():
    p = problem(
        [5.0, 5.0, 4.0, 3.0, 1.0], current=(0, 0, 1, 1, -1), max_change_cost=1.0, tolerance=0.0
    )
    plan = partition.plan(p)
    assert isinstance(plan, Plan)
    assert plan.moved == ()
    assert plan.change_cost == 1.0
    assert plan.sub_clusters[1].models == ("m2", "m3", "m4")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_rate": 4}, "model 'm0' has 5 requests/s, max_rate is 4"),
        ({"dynamic": [99, 0, 0], "max_memory_mb": 100}, "model 'm0' needs 109 MB"),
        ({"max_rate": 5, "rates": [5, 4, 3]}, "have 12 requests/s, 2 sub-clusters take 10"),
        ({"max_memory_mb": 14}, "have 30 MB, 2 sub-clusters take 28"),
        ({"max_memory_mb": 16}, "no solution because of \\(5\\) memory limit"),
    ],
)
def test_infeasible_problems_say_why_and_serve_what_they_can(change, says):
    args = {"rates": [5.0, 2.0, 2.0]} | change
    p = problem(**args)
    refused = partition.plan(p)
    assert isinstance(refused, Infeasible)
    assert refused.proven
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(refused.reason)
    assert_keeps_constraints(p, refused.best_effort)
    assert len(refused.best_effort.unplaced) == 1
    assert f"In none: {refused.best_effort.unplaced[0]}." in refused.best_effort.explanation


def test_too_small_a_change_budget_comes_with_the_price():
    p = problem([5.0, 4.0], current=(0, 0), max_rate=6, max_change_cost=1.0)
    refused = partition.plan(p)
    assert isinstance(refused, Infeasible)
    assert refused.proven
    assert refused.reason == (
        "max_change_cost 1 is too small: the best partition without it costs 2"
    )
    assert refused.best_effort.change_cost == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sub_clusters": 0}, "sub_clusters must be at least 1, got 0"),
        ({"rates": []}, "models must not be empty"),
        ({"rates": [-1.0]}, "rate of model 'm0' must be at least 0"),
        ({"max_rate": -1}, "max_rate must be at least 0"),
        ({"memory_weight": math.inf}, "memory_weight must be a finite number"),
        ({"current": (0, 0)}, "current has 2 entries for 1 models"),
        ({"current": (2,)}, "current: no sub-cluster 2 among 2"),
        ({"change_cost": (1.0, 1.0)}, "change_cost must be 1 numbers of at least 0"),
    ],
)
def test_mistakes_name_the_field(change, says):
    with pytest.raises(ValueError, match=says):
        problem(**({"rates": [1.0]} | change))


def test_the_worked_example_of_the_module():
    assert doctest.testmod(partition).failed == 0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_bound_is_never_above_the_best(count):
    p = problem([10.0] * count, memory_weight=1.0)
    assert Search(p).bound() <= brute_force(p) + 1e-9
