"""Spot instances: bounds (by hand and against enumeration), and the load that must survive."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import comb

import numpy as np
import pytest

from ray_slo.core import LatencyProfile
from ray_slo.planning import Infeasible, kairos, spot
from ray_slo.planning.kairos import Problem
from ray_slo.planning.kairos.bounds import Tables
from tests.planning.examples.spot import kind, problem


def test_the_worked_example():
    t = Tables(Problem([kind("a", 1.0)], {"a": LatencyProfile([0.1])}, 1.0, [1], 1.0))
    whole, rate = spot._with_interruptions(
        t, np.array([[0]]), np.array([[2]]), np.array([0.9]), 0.01
    )
    assert whole == pytest.approx([20])
    assert rate == pytest.approx([10])


def test_availability():
    assert kind("a", 1.0, 0.3, 20 / 9).availability(180) == pytest.approx(0.9)
    assert kind("a", 1.0, 0.3).availability(180) == 1


def by_hand(p, firm, away, there=0.9, loss=0.01, large_load=0.3):
    """The bound of `firm` base and `away` auxiliary spot instances, by bisection."""

    def served(present):
        return min(10 * (firm + present), 10 * firm / 0.1)

    def lost(rate):
        return sum(
            comb(away, k) * there**k * (1 - there) ** (away - k) * max(1 - served(k) / rate, 0)
            for k in range(away + 1)
        )

    low, high = 0.0, 1000.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if lost(middle) <= loss else (low, middle)
    expected = min(10 * (firm + there * away), 10 * firm / 0.1)
    large = large_load * 10 * firm / (0.1 if away else 1.0)
    return min(low, served(away), expected, large)


@pytest.mark.parametrize("budget", [1.3, 2.0, 2.75])
def test_the_best_of_all_by_hand(budget):
    p = problem(budget=budget)
    chosen = spot.plan(p)
    assert isinstance(chosen, spot.SpotPlan)
    every = [
        (by_hand(p, n, m), n, m)
        for n, m in product(range(1, 3), range(20))
        if n + 0.1 * m <= budget + 1e-9
    ]
    best, firm, _ = max(every)
    assert chosen.bound == pytest.approx(best, rel=1e-3)
    assert chosen.on_demand["base"] == firm
    assert chosen.cost_per_hour <= budget + 1e-9
    assert chosen.large_size == 1


def test_limits_are_named():
    assert spot.plan(problem(), large_load=1.0).limit == "interruptions"
    limited = spot.plan(problem(budget=2.0), large_load=0.1)
    assert limited.limit == "large requests"
    assert "on-demand instances alone serve no more of the large requests" in limited.explanation
    assert "Requests larger than 1 do not need spot instances" in limited.explanation
    sure = spot.plan(problem(per_hour=0.0, budget=1.5), large_load=1.0)
    assert sure.limit == "capacity"
    assert sure.spot["aux"] == 5


def test_without_spot_instances_it_is_kairos():
    types = [kind("base", 1.0), kind("aux", 0.25)]
    p = replace(problem(), types=types)
    chosen = spot.plan(p, large_load=1.0)
    counts = kairos.configurations([1.0, 0.25], 2.0)
    assert chosen.spot == {}
    assert chosen.bound == pytest.approx(kairos.fluid_bounds(p, counts).max(), rel=1e-3)
    assert chosen.counts == chosen.on_demand


def test_more_interruptions_never_serve_more():
    bounds = [
        spot.plan(problem(per_hour=r), large_load=1.0).bound for r in (0.0, 0.5, 2.0, 10.0, 60.0)
    ]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > 1.2 * bounds[-1]


def test_what_must_survive_can_be_said():
    # The base has spot instances, too: those serve no request of which none may be lost.
    types = [kind("base", 1.0, 0.2), kind("aux", 0.25, 0.1)]
    p = replace(problem(), types=types)
    everything = spot.plan(p, large_size=0, large_load=1.0)
    assert everything.bound == pytest.approx(20, rel=1e-3)
    nothing = spot.plan(p, large_size=2)
    assert nothing.on_demand == {}
    assert nothing.bound > 100


def test_fewer_ways_to_rent_where_there_are_too_many(monkeypatch):
    types = [kind("base", 1.0, 0.2, 1.0), kind("aux", 0.25, 0.1, 1.0)]
    p = replace(problem(), types=types)
    every = spot.plan(p)
    monkeypatch.setattr(spot, "_MOST", 50)
    fewer = spot.plan(p)
    assert fewer.considered < every.considered
    assert "aux" not in fewer.on_demand
    assert fewer.bound == pytest.approx(every.bound, rel=0.05)
    monkeypatch.setattr(spot, "_MOST", 3)
    with pytest.raises(ValueError, match="a budget of 2 allows more than 3 configurations"):
        spot.plan(p)


def test_infeasible_is_all_on_demand():
    none = spot.plan(problem(budget=0.5))
    assert isinstance(none, Infeasible)
    assert "one base costs 1 per hour, the budget is 0.5" in none.reason
    assert none.best_effort.on_demand == {"aux": 2}
    assert none.best_effort.spot == {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"replacement_s": -1.0}, "replacement_s must be at least 0, got -1.0"),
        ({"loss": 0.0}, "loss must be above 0 and less than 1, got 0.0"),
        ({"large_size": -1}, "large_size must be at least 0, got -1"),
        ({"large_load": 0.0}, "large_load must be above 0 and at most 1, got 0.0"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        spot.plan(problem(), **kwargs)
