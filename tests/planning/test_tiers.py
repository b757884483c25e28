"""One plan for hardware and accuracy: against brute force, the cut, the steps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog

from ray_slo.core import Variant
from ray_slo.planning import Infeasible
from ray_slo.planning.tiers import Plan, _Program, plan
from tests.planning.examples.tiers import problem


def best_routes(p, n):
    """Highest accuracy at which all demand is served by instances n (kind by kind), or None."""
    sizes = np.asarray(p.sizes)
    kinds = [(t, v) for t in p.types for v in p.variants]
    room = p.xi * p.latency_slo_s
    cost, time, limits = [], [], []
    for k, (t, v) in enumerate(kinds):
        for s in sizes:
            options = [
                v.profiles[t.name](b * s) / b
                for b in p.batch_sizes
                if b * s <= 20 and v.profiles[t.name](b * s) * (2 if b > 1 else 1) <= room
            ]
            cost.append(-v.accuracy / len(sizes))
            time.append((k, min(options, default=0.0) * p.demand / len(sizes)))
            limits.append((0, 1 if options else 0))
    busy = np.zeros((len(kinds), len(time)))
    for column, (k, seconds) in enumerate(time):
        busy[k, column] = seconds
    every = np.tile(np.eye(len(sizes)), len(kinds))
    solved = linprog(cost, busy, p.load * np.array(n), every, np.ones(len(sizes)), limits)
    return -solved.fun if solved.status == 0 else None


def brute_force(p):
    """(accuracy, cost): the best accuracy under the budget, and what it costs at the least."""
    price = np.repeat([t.price_per_hour for t in p.types], len(p.variants))
    ranges = [range(int(p.budget_per_hour / x + 1e-9) + 1) for x in price]
    found = []
    for n in product(*ranges):
        if np.dot(n, price) <= p.budget_per_hour + 1e-9:
            accuracy = best_routes(p, n)
            if accuracy is not None:
                found.append((round(accuracy, 6), -float(np.dot(n, price))))
    return max(found, default=None)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batches", [(1,), (1, 2, 4)])
def test_agrees_with_brute_force(seed, batches):
    # Two variants on two types within 2.2: a few hundred pools, each with its best routes.
    p = problem(seed, budget_per_hour=2.2, batch_sizes=batches)
    p = problem(seed, budget_per_hour=2.2, batch_sizes=batches, variants=p.variants[::2])
    best = brute_force(p)
    found = plan(p)
    if best is None:
        assert isinstance(found, Infeasible)
        return
    assert isinstance(found, Plan)
    # Cheaper is preferred at a thousandth of a point.
    assert found.accuracy == pytest.approx(best[0], abs=2e-3)
    assert found.cost_per_hour <= 2.2 + 1e-9
    if found.step == "hardware":
        assert found.accuracy == pytest.approx(80)
        assert found.cost_per_hour == pytest.approx(-best[1])


@pytest.mark.parametrize("seed", range(6))
def test_the_cut_changes_nothing_but_the_relaxation(seed):
    p = problem(seed)
    program = _Program(p)
    model = program.program("accuracy", None)
    cuts = {name for name in model.blocks if name.startswith("(12)")}
    assert cuts
    with_cuts, without = model.solve("highs"), model.solve("highs", without=cuts)
    assert with_cuts.status == without.status
    if with_cuts.found:
        assert with_cuts.objective == pytest.approx(without.objective, rel=1e-6)


def test_the_cut_rounds_up():
    # Instances come whole, which the relaxation does not know.
    program = _Program(problem(0, demand=1.0))
    model = program.program("hardware", None)
    lower = [float(low.max()) for name, (_, low, _) in model.blocks.items() if "(12)" in name]
    assert all(x == round(x) >= 1 for x in lower)


def test_steps_by_demand():
    low, high = plan(problem(demand=2.0)), plan(problem(demand=12.0))
    assert (low.step, high.step) == ("hardware", "accuracy")
    assert low.accuracy == 80
    assert low.cost_per_hour < high.cost_per_hour <= 3.0
    assert 70 < high.accuracy < 80
    assert sum(a.load for a in high.assignments) == pytest.approx(12)
    assert sum(high.counts.values()) == sum(a.instances for a in high.assignments)
    assert "The most accurate variant alone does not suffice. 12 req/s" in high.explanation
    most = plan(problem(demand=1000.0))
    assert isinstance(most, Infeasible)
    assert "1000 req/s at most 3 per hour" in most.reason
    assert most.best_effort.step == "share"
    served = 1000 * (1 - most.best_effort.shed_share)
    assert sum(a.load for a in most.best_effort.assignments) == pytest.approx(served, rel=1e-3)
    assert served > 12


def test_together_is_at_least_as_good_as_hardware_first():
    for demand in (6.0, 9.0, 12.0):
        p = problem(2, demand=demand)
        together, second = plan(p), plan(p, counts={"gpu": 3})
        assert isinstance(together, Plan)
        if isinstance(second, Plan):
            assert set(second.counts) <= {"gpu"}
            assert second.counts["gpu"] <= 3
            assert together.accuracy >= second.accuracy - 2e-3


def test_no_variant_is_fast_enough():
    none = plan(problem(latency_slo_s=0.01))
    assert isinstance(none, Infeasible)
    assert none.best_effort.assignments == ()
    assert none.best_effort.shed_share == pytest.approx(1)


def test_a_type_without_a_profile_cannot_run_a_variant():
    p = problem(demand=12.0)
    only_gpu = [Variant("l", {"gpu": p.variants[0].profiles["gpu"]}, 80.0), *p.variants[1:]]
    found = plan(problem(demand=12.0, variants=only_gpu))
    assert isinstance(found, Plan)
    assert not [a for a in found.assignments if (a.type, a.variant) == ("cpu", "l")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"types": []}, "types must be different and at least one"),
        ({"variants": []}, "variants must be different and at least one"),
        ({"variants": [Variant("x", {}, None)]}, "variants: 'x' has no accuracy"),
        ({"demand": 0.0}, "demand must be positive, got 0.0"),
        ({"load": 1.5}, "load must be above 0 and at most 1, got 1.5"),
        ({"sizes": []}, "sizes must be a non-empty list"),
        ({"batch_sizes": (2,)}, "batch_sizes must have 1"),
        ({"waiting_factor": 0.5}, "waiting_factor must be at least 1, got 0.5"),
    ],
)
def test_bad_problems(changes, message):
    with pytest.raises(ValueError, match=message):
        problem(**changes)
    with pytest.raises(ValueError, match="counts must be of gpu, cpu, got \\['tpu'\\]"):
        plan(problem(), counts={"tpu": 1})
