"""`auto` finds what the planners of the papers find on their own problems, and the best of all
pools within a budget."""

import os
from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.loki import published
from benchmarks.loki import terms as loki
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree
from ray_slo.planning import auto
from ray_slo.planning.result import Infeasible

LIMIT_S = 200.0  # of a program: a busy machine must not end a search early


def random_loki(seed):
    """A chain or a tree of two or three tasks, with a demand between little and too much."""
    rng = np.random.default_rng(seed)
    shapes = [{"a": None}, {"a": None, "b": "a"}, {"a": None, "b": "a", "c": "a"}]
    shapes.append({"a": None, "b": "a", "c": "b"})
    tasks = []
    shape = shapes[rng.integers(len(shapes))]
    for task, parent in shape.items():
        children = [t for t, p in shape.items() if p == task]
        variants = []
        for i in range(rng.integers(1, 4)):
            profile = LatencyProfile.linear(rng.uniform(1, 6) / 1e3, rng.uniform(0, 8) / 1e3, 16)
            factors = {child: float(rng.uniform(0.5, 3)) for child in children}
            accuracy = float(np.round(rng.uniform(60, 99), 2))
            variants.append(loki.Variant(f"{task}{i}", accuracy, profile, factors))
        tasks.append(loki.Task(task, tuple(variants), parent))
    return loki.Problem(
        tuple(tasks),
        demand=float(rng.uniform(20, 900)),
        workers=int(rng.integers(3, 9)),
        slo_s=float(rng.uniform(0.05, 0.25)),
        batch_sizes=(1, 2, 4, 8, 16),
        communication_s=float(rng.choice([0.0, 0.002])),
        accuracy_floor=float(rng.choice([0.0, 65.0])),
        fits_alone=bool(seed % 2),
        relative_gap=1e-6,
        time_limit_s=LIMIT_S,
        backend="highs",
    )


def best(made):
    return made.best_effort if isinstance(made, Infeasible) else made


@pytest.mark.parametrize("seed", range(int(os.environ.get("RAY_SLO_SEQUENCES", 60))))
def test_loki(seed):
    """The same step; then as few workers, or the same accuracy, or the same share served."""
    problem = random_loki(seed)
    (theirs, serves_all), ours = published.plan(problem), loki.plan(problem)
    assert isinstance(ours, Infeasible) != serves_all
    ours = best(ours)
    assert ours.step == theirs.step
    assert ours.shed_share == pytest.approx(theirs.shed_share, abs=1e-4)
    if theirs.step == "hardware":
        assert ours.workers == theirs.workers
    if ours.step == "share":  # the largest share leaves ties: ours may be more accurate
        assert ours.accuracy >= theirs.accuracy * (1 - 1e-4)
    else:
        assert ours.accuracy == pytest.approx(theirs.accuracy, rel=1e-4)


def random_budgeted(seed, sizes):
    """Two variants on two kinds of workers, and a budget for a few of them."""
    rng = np.random.default_rng(seed)
    variants = tuple(
        auto.Variant(
            name,
            accuracy,
            {
                kind: LatencyProfile.linear(
                    part * rng.uniform(4, 20) / 1e3, rng.uniform(1, 9) / 1e3, 8 * max(sizes)
                )
                for kind in "xy"
            },
        )
        for name, accuracy, part in (("large", 90.0, 1.0), ("small", 80.0, 0.3))
    )
    each = [(size, sizes.count(size) / len(sizes)) for size in sorted(set(sizes))]
    classes = tuple(auto.Size(size, float(size), share) for size, share in each)
    return auto.Problem(
        (auto.Model("m", variants, sizes=classes),),
        (Tree.of_model("m", {"": float(rng.uniform(0.05, 0.2)) * max(sizes) ** 0.5}),),
        {"m": auto.Demand(float(rng.uniform(150, 700)))},
        tuple(auto.Kind(kind, 0, 9, float(rng.uniform(0.4, 1))) for kind in "xy"),
        budget_per_hour=3.0,
        sharing=False,
        headroom=False,
        waiting_factor=1.0,
        batch_sizes=(1, 2, 4, 8),
        relative_gap=1e-6,
        backend="highs",
    )


def best_of_all(problem):
    """(accuracy, -cost) of the best of all pools within the budget, None if none serves the
    demand. For each pool, a linear program finds the best shares."""
    (model,), (tree,) = problem.models, problem.trees
    pairs = [(kind, variant) for kind in problem.kinds for variant in model.variants]
    cost, busy, limits = [], [], []
    for i, (kind, variant) in enumerate(pairs):
        for size in model.sizes:
            every = [(b, variant.profiles[kind.name](b * size.largest)) for b in (1, 2, 4, 8)]
            fits = [latency / b for b, latency in every if latency <= tree.slos_s[""]]
            busy.append(np.eye(len(pairs))[i] * min(fits, default=0) * problem.demand["m"].rate)
            cost.append(-variant.accuracy)
            limits.append((0, 1 if fits else 0))
    classes = np.tile(np.eye(len(model.sizes)), len(pairs))
    shares = [size.share for size in model.sizes]
    prices = np.array([kind.price_per_hour for kind, _ in pairs])
    best = None
    for pool in product(*(range(int(problem.budget_per_hour / price) + 1) for price in prices)):
        if pool @ prices <= problem.budget_per_hour:
            found = linprog(cost, np.array(busy).T, pool, classes, shares, limits)
            if found.status == 0:
                best = max(best or (0, 0), (round(-found.fun, 6), -float(pool @ prices)))
    return best


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1, 1, 1, 2, 2, 3, 3, 8)], ids=["one", "several"])
@pytest.mark.parametrize("seed", range(8))
def test_the_best_of_all_pools_within_a_budget(seed, sizes):
    problem = random_budgeted(seed, sizes)
    best, made = best_of_all(problem), auto.plan(problem)
    assert isinstance(made, Infeasible) == (best is None)
    if best is not None:
        assert made.accuracy == pytest.approx(best[0], abs=0.01)
        assert made.cost_per_hour <= problem.budget_per_hour
        if made.step == "hardware":
            assert made.cost_per_hour == pytest.approx(-best[1], rel=2e-3)
