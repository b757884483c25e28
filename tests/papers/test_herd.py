import doctest
import itertools
import math
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.papers import herd
from ray_slo.papers.herd import ModelStream, Plan, Problem
from ray_slo.planning import Infeasible

GUROBI = find_spec("gurobipy") is not None


def problem(loads, memory=None, sets=None, **kwargs):
    memory = memory or [1.0] * len(loads)
    sets = sets or [0] * len(loads)
    models = tuple(
        ModelStream(f"m{k}", *row) for k, row in enumerate(zip(loads, memory, sets, strict=True))
    )
    return Problem(models, **({"memory_mb": 100.0} | kwargs))


def assert_keeps_constraints(p: Problem, plan: Plan) -> None:
    by_name = {m.name: m for m in p.models}
    assert sum(g.workers for g in plan.groups) + plan.spare_workers == p.workers  # (a)
    assert plan.spare_workers >= 0
    assert len(plan.groups) <= p.groups
    placed = [name for g in plan.groups for name in g.models]
    assert sorted([*placed, *plan.unplaced]) == sorted(by_name)  # (d)
    for g in plan.groups:
        members = [by_name[name] for name in g.models]
        assert 1 <= g.workers <= p.group_worker_limit  # (b)
        assert sum(m.memory_mb for m in members) <= p.memory_mb * (1 + 1e-6)  # (c)
        assert len({m.affinity_set for m in members}) == 1  # (e)
        assert g.load == pytest.approx(sum(m.load for m in members))
        assert all(
            g.workers / m.load >= plan.burst_tolerance * (1 - 1e-9) for m in members if m.load
        )


def partitions(items):
    """Every way to share items out to groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for of_rest in partitions(rest):
        yield [[first], *of_rest]
        for i in range(len(of_rest)):
            yield [*of_rest[:i], [first, *of_rest[i]], *of_rest[i + 1 :]]


def brute_force(p: Problem) -> float | None:
    """The largest least burst tolerance over every grouping and every size of its groups."""
    best = None
    for groups in partitions(list(p.models)):
        if len(groups) > p.groups or any(
            sum(m.memory_mb for m in g) > p.memory_mb or len({m.affinity_set for m in g}) > 1
            for g in groups
        ):
            continue
        limit = min(p.group_worker_limit, p.workers)
        for sizes in itertools.product(range(1, limit + 1), repeat=len(groups)):
            pairs = list(zip(sizes, groups, strict=True))
            if sum(sizes) > p.workers or any(
                s < p.min_headroom * sum(m.load for m in g) - 1e-9 for s, g in pairs
            ):
                continue
            t = min((s / m.load for s, g in pairs for m in g if m.load), default=math.inf)
            best = t if best is None else max(best, t)
    return best


small = st.integers(1, 4).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "loads": st.lists(
                st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0, 1.5, 3.0]), min_size=n, max_size=n
            ),
            "memory": st.lists(st.integers(1, 6), min_size=n, max_size=n),
            "sets": st.lists(st.integers(0, 1), min_size=n, max_size=n),
            "workers": st.integers(1, 7),
            "group_worker_limit": st.integers(1, 4),
            "memory_mb": st.integers(3, 10),
            "max_groups": st.none() | st.integers(1, 3),
            "min_headroom": st.sampled_from([0.0, 0.0, 1.0]),
        }
    )
)


@pytest.mark.slow
@given(small)
@settings(max_examples=60)
def test_agrees_with_brute_force(args):
    p = problem(**args, backend="highs")
    best, plan = brute_force(p), herd.plan(p)
    if best is None:
        assert isinstance(plan, Infeasible)
        assert plan.proven and plan.reason
        assert_keeps_constraints(p, plan.best_effort)
    else:
        assert isinstance(plan, Plan)
        assert plan.burst_tolerance == pytest.approx(best)
        assert plan.gap == pytest.approx(0)
        assert_keeps_constraints(p, plan)
        assert plan.headroom >= p.min_headroom - 1e-9


@given(small)
@settings(max_examples=30)
def test_the_search_alone_stays_within_its_own_bound(args):
    p = problem(**args, exact_cells=0)
    best, plan = brute_force(p), herd.plan(p)
    if best is None:
        assert isinstance(plan, Infeasible)
    elif isinstance(plan, Plan):
        assert plan.burst_tolerance <= best * (1 + 1e-9)
        assert best <= plan.bound * (1 + 1e-9)
    else:
        assert not plan.proven  # it found none, and does not claim that there is none


def random_problem(seed, models, workers, limit, fill, **kwargs):
    rng = np.random.default_rng(seed)
    loads = rng.lognormal(0, 1, models)
    loads *= 0.7 * workers / loads.sum()
    memory = rng.uniform(16, 550, models)
    groups = kwargs["max_groups"]
    return problem(
        loads.tolist(),
        memory.tolist(),
        rng.integers(0, kwargs.pop("sets", 1), models).tolist(),
        workers=workers,
        group_worker_limit=limit,
        memory_mb=float(memory.sum()) / groups / fill,
        **kwargs,
    )


@pytest.mark.parametrize("backend", ["highs", "gurobi"])
@pytest.mark.parametrize("seed", range(4))
def test_the_ilp_and_the_search_agree(seed, backend):
    if backend == "gurobi" and not GUROBI:
        pytest.skip("gurobipy is not installed: pip install 'ray-slo[gurobi]'")
    p = random_problem(seed, 10, 20, 8, 0.85, max_groups=3)
    milp, x, size = herd.program(p)
    solution = milp.solve(backend)
    plan = herd.plan(p)
    assert isinstance(plan, Plan)
    assert solution.status == "optimal"
    assert plan.burst_tolerance == pytest.approx(solution.objective)
    assert solution[x].sum(axis=1) == pytest.approx(np.ones(10))
    assert solution[size].sum() <= 20 + 1e-6


def test_the_ilp_has_a_named_block_per_equation():
    milp, _, _ = herd.program(problem([1.0, 2.0], workers=4, group_worker_limit=2))
    assert {name[:3] for name in milp.blocks if name[0] == "("} == {
        "(a)",
        "(b)",
        "(c)",
        "(d)",
        "(e)",
    }


@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_large_instances_keep_constraints_and_a_small_gap(seed, sets):
    p = random_problem(seed, 300, 300, 30, 0.8, sets=sets, max_groups=15)
    plan = herd.plan(p)
    assert isinstance(plan, Plan)
    assert_keeps_constraints(p, plan)
    assert plan.gap < 0.05
    assert plan == herd.plan(p)  # reproducible


@pytest.mark.parametrize("counted", range(6))
@pytest.mark.parametrize("packed", range(-1, 6))
def test_the_search_finds_the_largest_tolerance_that_can_be_packed(counted, packed):
    """Six values, of which counting allows those up to one, and packing those up to another."""
    asked = problem([1.0, 1.0], workers=4, group_worker_limit=4, exact_cells=0)
    search = SimpleNamespace(
        problem=asked,
        tolerances=lambda: np.arange(1.0, 7.0),
        possible=lambda value, headroom: "" if value <= counted + 1 else "too much",
        pack=lambda value, headroom: value if value <= packed + 1 else None,
        tolerance=lambda bins: bins,
        balanced=lambda bins, tolerance: (bins, tolerance),
    )
    found = herd._best(search)
    if packed < 0:
        assert found == ""
    else:
        best = min(counted, packed) + 1.0
        how = "proven best" if packed >= counted else "best found"
        assert found == ((best, best), counted + 1.0, how)


def test_spare_workers_and_headroom_are_shared_by_load():
    plan = herd.plan(problem([3.0, 1.0, 1.0], workers=10, group_worker_limit=6))
    assert isinstance(plan, Plan)
    assert plan.burst_tolerance == 2.0  # six workers for a load of three
    assert [g.workers for g in plan.groups] == [6, 4]
    assert plan.headroom == 2.0


def test_spare_workers_make_new_groups_where_all_are_at_their_limit():
    # The big model keeps every plan at a tolerance of 2 / 10; the others are best off alone.
    p = problem([10.0, 3.0, 2.0, 1.0], workers=9, group_worker_limit=2)
    plan = herd.plan(p)
    assert isinstance(plan, Plan)
    assert_keeps_constraints(p, plan)
    assert plan.burst_tolerance == pytest.approx(0.2)
    assert [(g.workers, g.models) for g in plan.groups] == [(2, (f"m{k}",)) for k in range(4)]
    assert plan.spare_workers == 1 and "1 workers are spare" in plan.explanation
    two = herd.plan(problem([10.0, 3.0, 2.0, 1.0], workers=9, group_worker_limit=2, max_groups=2))
    assert isinstance(two, Plan) and len(two.groups) == 2


def test_an_overloaded_cluster_is_said_to_be_overloaded():
    p = problem([4.0, 4.0], workers=4, group_worker_limit=4)
    plan = herd.plan(p)
    assert isinstance(plan, Plan)  # the published ILP has no constraint on load
    assert "fewer workers than their average load needs" in plan.explanation
    refused = herd.plan(problem([4.0, 4.0], workers=4, group_worker_limit=4, min_headroom=1.0))
    assert isinstance(refused, Infeasible)
    assert "min_headroom 1 is out of reach" in refused.reason
    assert "8 workers, there are 4" in refused.reason
    assert refused.best_effort.headroom == 0.5


def test_a_model_larger_than_a_worker_is_named_and_left_out():
    refused = herd.plan(problem([1.0, 1.0], [1.0, 101.0], workers=4, group_worker_limit=4))
    assert isinstance(refused, Infeasible)
    assert refused.reason == "model 'm1' takes 101 MB, a worker has 100 MB"
    assert refused.best_effort.unplaced == ("m1",)
    assert refused.best_effort.groups[0].models == ("m0",)
    assert "In no group: m1." in refused.best_effort.explanation


def test_too_little_memory_leaves_the_smallest_loads_out():
    refused = herd.plan(problem([1.0, 3.0, 2.0], [60, 60, 60], workers=2, group_worker_limit=4))
    assert isinstance(refused, Infeasible)
    assert refused.reason == "memory needs 3 groups, at most 2 are allowed"
    assert refused.best_effort.unplaced == ("m0",)


def test_a_model_above_the_group_limit_is_to_be_split():
    refused = herd.plan(problem([5.0, 1.0], workers=20, group_worker_limit=4, min_headroom=1.0))
    assert isinstance(refused, Infeasible)
    assert "'m0' alone needs 5 workers" in refused.reason
    assert "split its streams" in refused.reason


def test_a_model_that_no_other_can_join_is_apart():
    """β_i ≥ α_j + β_j: the first case of Eq. 3."""
    assert herd.affinity([1.0, 1.0], [50.0, 1.0])[0, 1] == 51.0
    assert herd.affinity_sets([1.0, 1.0, 1.0], [50.0, 1.0, 1.0], k=10) in ([0, 1, 1], [1, 0, 0])


def test_no_load_at_all():
    plan = herd.plan(problem([0.0, 0.0], workers=3, group_worker_limit=2))
    assert isinstance(plan, Plan)
    assert plan.burst_tolerance == math.inf
    assert plan.gap == 0.0


@given(
    st.lists(st.tuples(st.floats(0.1, 40), st.floats(0, 80)), min_size=1, max_size=12),
    st.floats(1, 50),
)
@settings(max_examples=60)
def test_affinity_sets_keep_every_pair_within_k(pairs, k):
    alpha, beta = zip(*pairs, strict=True)
    matrix, sets = herd.affinity(alpha, beta), herd.affinity_sets(alpha, beta, k)
    np.testing.assert_allclose(np.diag(matrix), 1)
    for i, j in itertools.combinations(range(len(pairs)), 2):
        if sets[i] == sets[j]:
            assert max(matrix[i, j], matrix[j, i]) <= k * (1 + 1e-9)


def test_affinity_follows_equation_3():
    """ResNet34 and BERT (SHEPHERD Table 4), in ms."""
    matrix = herd.affinity([0.38, 40.98], [5.78, 5.67])
    # α_j + β_j − β_i = 40.98 + 5.67 − 5.78 = 40.87 > 0
    assert matrix[0, 1] == pytest.approx(
        min((0.38 + 5.78) / 40.98, max(0.38 / 40.87, 0.38 / 40.98))
    )
    # α_j + β_j − β_i = 0.38 + 5.78 − 5.67 = 0.49 > 0
    assert matrix[1, 0] == pytest.approx(
        min((40.98 + 5.67) / 0.38, max(40.98 / 0.49, 40.98 / 0.38))
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"group_worker_limit": 0}, "group_worker_limit must be at least 1"),
        ({"memory_mb": 0}, "memory_mb must be positive, got 0"),
        ({"max_groups": 0}, "max_groups must be at least 1"),
        ({"min_headroom": -1}, "min_headroom must be at least 0"),
        ({"loads": [-1.0]}, "load of model 'm0' must be at least 0"),
        ({"loads": []}, "models must not be empty"),
    ],
)
def test_mistakes_name_the_field(change, says):
    with pytest.raises(ValueError, match=says):
        problem(**({"loads": [1.0], "workers": 2, "group_worker_limit": 2} | change))


def test_the_worked_example_of_the_module():
    assert doctest.testmod(herd).failed == 0
