"""The Kairos planners: bounds (by hand and against the LP), choices, pruning, the catalogue."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog

from ray_slo.core import LatencyProfile
from ray_slo.papers.kairos import (
    Market,
    configurations,
    fluid_bounds,
    paper_bounds,
    plan,
    search,
)
from ray_slo.papers.kairos.bounds import Tables
from ray_slo.planning import Infeasible
from ray_slo.planning.catalogue import CATALOGUE, load_catalogue
from tests.planning.examples.kairos import kind, random_problem


def figure_7(auxiliary_s=0.02, large_share=0.2, budget=2.0):
    """Q_b = 60, Q_b^{s+} = 40 and Q_a = 50 per second, f = 0.8, in the worked example."""
    large = 0.025
    small = (1 / 60 - 0.2 * large) / 0.8
    sizes = [1] * round(100 * (1 - large_share)) + [2] * round(100 * large_share)
    profiles = {
        "base": LatencyProfile([small, large]),
        "aux": LatencyProfile([auxiliary_s, 1.0]),
    }
    return Market([kind("base", 1.0), kind("aux", 0.3)], profiles, 0.1, sizes, budget)


def test_equation_11_auxiliary_is_the_bottleneck():
    bounds, base = paper_bounds(figure_7(), np.array([[1, 1], [1, 0], [0, 3], [2, 2]]))
    assert bounds == pytest.approx([103.75, 60, 0, 207.5])
    assert not base[0]


def test_equation_9_base_is_the_bottleneck():
    problem = figure_7(auxiliary_s=0.004)  # Q_a = 250: 62.5 per second for the base, which does 40
    bounds, base = paper_bounds(problem, np.array([[1, 1], [1, 5], [2, 2]]))
    assert bounds == pytest.approx([40 / 0.2, 40 / 0.2, 80 / 0.2])
    assert base.all()


def linear_program(problem, row):
    """The fluid limit itself: the largest rate at which the pool keeps up."""
    sizes, count = np.unique(problem.sizes, return_counts=True)
    share, m, n = count / count.sum(), len(sizes), len(row)
    latency = np.array([[problem.profiles[t.name](int(s)) for s in sizes] for t in problem.types])
    demand = np.zeros((m, n * m + 1))
    for s, k in product(range(m), range(n)):
        demand[s, k * m + s] = 1
    demand[:, -1] = -share
    time = np.zeros((n, n * m + 1))
    for k in range(n):
        time[k, k * m : (k + 1) * m] = latency[k]
    late = latency > problem.xi * problem.latency_slo_s
    limits = [(0, 0 if late[k, s] else None) for k in range(n) for s in range(m)] + [(0, None)]
    goal = np.zeros(n * m + 1)
    goal[-1] = -1
    solved = linprog(goal, time, row, demand, np.zeros(m), limits)
    return -solved.fun


@pytest.mark.parametrize("seed", range(4))
def test_fluid_bounds_are_bounds_and_tight(seed):
    problem = random_problem(seed)
    counts = configurations([t.price_per_hour for t in problem.types], problem.budget_per_hour)
    bounds = fluid_bounds(problem, counts)
    for i in np.random.default_rng(seed).choice(len(counts), 12):
        exact = linear_program(problem, counts[i])
        assert exact <= bounds[i] * (1 + 1e-9)
        assert bounds[i] <= exact * 1.04 + 1e-9
    coarse = fluid_bounds(problem, counts, resolution=2)
    assert (coarse >= bounds * (1 - 0.05)).all()


def test_equation_15_is_below_what_a_pool_can_do():
    # The base serves the mix in its slack, although it could leave all small requests to others.
    problem = random_problem(0)
    counts = configurations([t.price_per_hour for t in problem.types], problem.budget_per_hour)
    paper, _ = paper_bounds(problem, counts)
    below = [i for i in range(len(counts)) if counts[i, 0] and counts[i].sum() > counts[i, 0]]
    gaps = [linear_program(problem, counts[i]) / paper[i] for i in below[:30]]
    assert max(gaps) > 1.02


def test_all_configurations_and_no_more():
    prices = [0.526, 0.432, 0.149, 0.1664]
    made = configurations(prices, 1.3)
    every = [r for r in product(range(3), range(4), range(9), range(8)) if np.dot(r, prices) <= 1.3]
    assert sorted(map(tuple, made.tolist())) == sorted(every)
    assert configurations([0.1, 0.3], 0.3).tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0]]
    assert len(configurations([0.1, 0.3], 0.3, most=5)) == 5
    with pytest.raises(ValueError, match="allows more than 4 configurations"):
        configurations([0.1, 0.3], 0.3, most=4)
    with pytest.raises(ValueError, match="a budget of 1000 allows more than 20,000,000"):
        configurations([0.1, 0.1, 0.1, 0.1], 1000)


@pytest.mark.parametrize("bound", ["paper", "fluid"])
def test_plan_keeps_to_the_budget_and_says_why(bound):
    chosen = plan(figure_7(budget=2.95), bound)
    assert chosen.cost_per_hour <= 2.95
    assert (
        f"{chosen.counts['base']} base + {chosen.counts['aux']} aux, at most" in chosen.explanation
    )
    # The rule of ten alone takes (1, 3), a part of its runner-up (2, 3).
    assert chosen.counts["base"] == {"paper": 1, "fluid": 2}[bound]
    assert "Runner-up" in chosen.explanation


def test_the_rule_of_ten(monkeypatch):
    import ray_slo.papers.kairos as module

    problem = random_problem(1)
    t = Tables(problem)
    counts = np.array([[3, 5, 5], [1, 5, 5], [1, 5, 6], [1, 6, 5], [1, 5, 4]])
    bounds = np.array([10.0, 9, 8, 7, 6])
    limited = np.zeros(5, dtype=bool)
    monkeypatch.setattr(module, "_ranked", lambda *_: (t, 0, counts, bounds, limited))
    chosen = module.plan(problem)
    assert chosen.counts == {"t0": 1, "t1": 5, "t2": 5}  # amidst the others
    # The top three agree on the base: the highest bound.
    counts[0] = [1, 9, 9]
    assert module.plan(problem).counts == {"t0": 1, "t1": 9, "t2": 9}


def test_search_finds_the_optimum_in_few_evaluations():
    problem = random_problem(2)
    counts = configurations([t.price_per_hour for t in problem.types], problem.budget_per_hour)
    true = dict(zip(map(tuple, counts.tolist()), 0.9 * fluid_bounds(problem, counts), strict=True))
    asked = []

    def evaluate(configuration):
        asked.append(configuration)
        return true[tuple(configuration.get(t.name, 0) for t in problem.types)]

    found = search(problem, evaluate)
    assert found.throughput == pytest.approx(max(true.values()))
    assert len(asked) == len(found.evaluated) < 0.3 * found.space
    parallel = search(problem, evaluate, parallel=4)
    assert parallel.throughput == found.throughput
    assert len(search(problem, evaluate, max_evaluations=2).evaluated) == 2
    # Every configuration attains 90 % of its bound: with a margin, one evaluation is enough.
    trusting = search(problem, evaluate, margin=1e-6)
    assert trusting.counts == found.counts
    assert len(trusting.evaluated) == 1


@pytest.mark.parametrize(
    ("share", "margin", "evaluated"),
    [
        (1.0, None, [80]),  # as good as the other bounds, or better
        (0.99, None, [80, 80]),  # 79.2 is above 79
        (0.98, None, [80, 80, 79]),  # 78.4 is not
        (0.98, 0.0, [80]),
        (0.98, 0.01, [80, 80]),  # 0.99 · 79 is 78.21
    ],
)
def test_bounds_that_are_not_above_the_best_are_pruned(monkeypatch, share, margin, evaluated):
    """Every configuration reaches the same share of its bound."""
    counts, bounds = np.array([[2, 0], [0, 2], [1, 1]]), np.array([80.0, 80.0, 79.0])
    problem = figure_7()
    ranked = Tables(problem), 0, counts, bounds, np.zeros(3, dtype=bool)
    monkeypatch.setattr("ray_slo.papers.kairos._ranked", lambda problem, bound: ranked)

    def bound(configuration):
        return 79.0 if len(configuration) == 2 else 80.0

    found = search(problem, lambda c: share * bound(c), margin=margin)
    assert [bound(c) for c, _ in found.evaluated] == evaluated
    assert (found.counts, found.throughput) == (found.evaluated[0][0], share * 80)
    assert found.space == 3


def test_sub_configurations_are_pruned():
    # Whatever is evaluated is worth 1, so no bound prunes: only sub-configurations do.
    problem = figure_7()
    found = search(problem, lambda c: 1.0)
    for i, (one, _) in enumerate(found.evaluated):
        for other, _ in found.evaluated[:i]:
            assert any(one.get(k, 0) > other.get(k, 0) for k in one)


def test_infeasible_says_why_and_does_what_it_can():
    profiles = {"a": LatencyProfile.linear(0.01, 0, 100), "b": LatencyProfile.linear(0.02, 0, 100)}
    sizes = list(range(1, 101))
    kinds = [kind("a", 1.0), kind("b", 0.4)]
    late = plan(Market(kinds, profiles, 0.5, sizes, 2.0, xi=1.0))
    assert isinstance(late, Infeasible)
    assert "no type meets the SLO at every size; best effort serves sizes up to 50" in late.reason
    assert late.best_effort.counts
    poor = plan(Market(kinds, profiles, 1.0, sizes, 0.5, xi=1.0))
    assert isinstance(poor, Infeasible)
    assert "one a costs 1 per hour, the budget is 0.5; best effort" in poor.reason
    assert poor.best_effort.counts == {"b": 1}
    nothing = search(Market(kinds, profiles, 0.001, sizes, 2.0), lambda c: 1.0)
    assert isinstance(nothing, Infeasible)
    assert nothing.best_effort.counts == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"types": []}, "types must be different and at least one"),
        ({"profiles": {}}, "profiles has none for a"),
        ({"base": "c"}, "base must be one of a, got 'c'"),
        ({"budget_per_hour": 0.0}, "budget_per_hour must be positive, got 0.0"),
        ({"latency_slo_s": -1.0}, "latency_slo_s must be positive"),
        ({"xi": 2.0}, "xi must be above 0 and at most 1"),
        ({"sizes": []}, "sizes must be a non-empty list"),
    ],
)
def test_bad_problems(change, message):
    fields = {
        "types": [kind("a", 1.0)],
        "profiles": {"a": LatencyProfile([0.1])},
        "latency_slo_s": 1.0,
        "sizes": [1],
        "budget_per_hour": 2.0,
    }
    with pytest.raises(ValueError, match=message):
        Market(**{**fields, **change})
    with pytest.raises(ValueError, match="bound must be one of paper, fluid, got 'best'"):
        plan(Market(**fields), "best")


def test_table_4_and_catalogues_of_ones_own(tmp_path):
    assert {n: t.price_per_hour for n, t in CATALOGUE.items()} == {
        "g4dn.xlarge": 0.526,
        "c5n.2xlarge": 0.432,
        "r5n.large": 0.149,
        "t3.xlarge": 0.1664,
    }
    assert CATALOGUE["g4dn.xlarge"].ray_actor_options == {
        "num_cpus": 4,
        "num_gpus": 1,
        "accelerator_type": "T4",
    }
    path = tmp_path / "mine.yaml"
    path.write_text("tpu: {price_per_hour: 4.2, resources: {num_cpus: 8, TPU: 4}}\n")
    mine = load_catalogue(path)["tpu"]
    assert mine.ray_actor_options == {"num_cpus": 8, "resources": {"TPU": 4}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must be a mapping from names to instance types"),
        ("a: {}", "a.price_per_hour: required; it must be a number above 0"),
        ("a: {price_per_hour: -1}", "a.price_per_hour: must be above 0 and at most 1000"),
        (
            "a: {price_per_hour: 1, prise: 2}",
            "a.prise: unknown key; valid keys are accelerator_type",
        ),
        ("a: [1", "not YAML"),
    ],
)
def test_bad_catalogues(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_catalogue(path)
