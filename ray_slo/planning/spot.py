"""Spot and on-demand instances: the best mix to rent if spot instances may be interrupted.

    types = [InstanceType(name="gpu", price_per_hour=0.5, spot_price_per_hour=0.2,
                          interruptions_per_hour=0.5), …]
    chosen = plan(Problem(types, profiles, latency_slo_s, sizes, budget_per_hour=2.5))
    chosen.on_demand, chosen.spot, chosen.bound

A spot instance is interrupted ρ times an hour, and is replaced after `replacement_s`. So it is
present for the share a = 1 / (1 + ρ·replacement_s / 3600) of the time. With n on-demand and m spot
instances, and B the bound of `ray_slo.planning.kairos` on what instances can serve, a throughput λ
may be planned only if

* B(n + m) ≥ λ, and B(n + a·m) ≥ λ: the expected number of instances is enough;
* E[(1 − B(n + K) / λ)⁺] ≤ `loss`: with K of the m present (independently, so K is binomial), at
  least the share in brackets is late or dropped. On average this is at most `loss`. With few large
  instances this needs spare ones, which the mean alone does not show;
* `large_load`·n_base·Q_b^{s+} ≥ λ·(1 − f): Equation 12 with the on-demand instances alone. The
  requests that none of the rented auxiliary types can serve in time survive the loss of all spot
  instances, if the policy prefers them (`pick="scarce"`). `large_load` leaves room for random
  arrivals.

The first two hold for any policy, so `bound`, the largest λ, is an upper bound.

Worked example: 2 spot instances are present 90 % of the time and serve 10 requests/s each. 1 % of
the requests may be lost. The expected number of present instances is 1.8. But both are absent 1 %
of the time, so 1 % is already lost at λ = 10. So the bound is λ = 10, not 18.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from scipy.stats import binom

from ray_slo.planning import kairos
from ray_slo.planning.kairos.bounds import Floats, Ints, Tables, by_name, fluid_bounds_of, text_of
from ray_slo.planning.kairos.problem import Configuration, Problem
from ray_slo.planning.result import Infeasible

Limit = Literal["capacity", "interruptions", "large requests"]

_MOST = 1_000_000
"""Largest number of configurations with every type both on demand and as spot instances."""

_AT_ONCE, _LOOKED_AT = 128, 4096
"""Number of configurations whose interruptions are computed at once, and in total. Those with the
highest expected bound come first."""

_RARE = 1e-5
"""Numbers of instances with a smaller probability are ignored. This can only raise a bound."""


@dataclass(frozen=True)
class SpotPlan:
    """What to rent and why.

    Attributes:
        on_demand, spot: number of rented instances by type.
        cost_per_hour: total cost if none is interrupted.
        bound: upper bound on the throughput, requests per second.
        large_size: requests larger than this are served even if all spot instances are gone.
        limit: the condition that limits `bound`.
        considered: number of configurations with a bound.
        explanation: the choice in words.
    """

    on_demand: Configuration
    spot: Configuration
    cost_per_hour: float
    bound: float
    large_size: int
    limit: Limit
    considered: int
    explanation: str

    @property
    def counts(self) -> Configuration:
        """Number of instances by type, on-demand and spot together."""
        names = dict.fromkeys([*self.on_demand, *self.spot])
        return {n: self.on_demand.get(n, 0) + self.spot.get(n, 0) for n in names}


def plan(
    problem: Problem,
    *,
    replacement_s: float = 180.0,
    loss: float = 0.01,
    large_size: int | None = None,
    large_load: float = 0.3,
) -> SpotPlan | Infeasible[SpotPlan]:
    """Return the on-demand and spot instances with the highest bound within the budget.

    Any type may be rented in both ways. If this gives more than a million configurations, each
    auxiliary type is rented only in the way that costs less per second of presence.

    Args:
        problem: its types have the prices and the interruptions of spot instances.
        replacement_s: time from an interruption until another instance is ready, in seconds.
        loss: share of the requests that may be late or dropped on average. It is above 0.
        large_size: requests larger than this must be served even if all spot instances are gone. By
            default, these are the requests that the rented auxiliary types cannot serve in time.
        large_load: share of the on-demand base instances' time that these requests may take. At 1,
            the instances are just enough for evenly spaced requests.

    Returns:
        The plan. `Infeasible` if no type meets the SLO at every size, or if the budget does not pay
        for one such on-demand instance. Its best effort has only on-demand instances.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not (math.isfinite(replacement_s) and replacement_s >= 0):
        raise ValueError(f"replacement_s must be at least 0, got {replacement_s}")
    if not 0 < loss < 1:
        raise ValueError(f"loss must be above 0 and less than 1, got {loss}")
    if large_size is not None and large_size < 0:
        raise ValueError(f"large_size must be at least 0, got {large_size}")
    if not 0 < large_load <= 1:
        raise ValueError(f"large_load must be above 0 and at most 1, got {large_load}")
    t = Tables(problem)
    if t.base is None or t.prices[t.base] > problem.budget_per_hour:
        none = kairos.plan(problem)
        assert isinstance(none, Infeasible)
        best = none.best_effort
        made = SpotPlan(
            best.counts, {}, best.cost_per_hour, best.bound, 0, "capacity", 0, best.explanation
        )
        return Infeasible(none.reason, made)
    there = np.array([k.availability(replacement_s) for k in problem.types])
    firm, spot = _configurations(problem, t.base, there)
    reach = _reach(t, firm + spot, large_size)
    large = large_load * _large_bounds(t, t.base, firm, reach)
    expected = np.minimum(fluid_bounds_of(t, firm + there * spot), large)
    cost = firm @ t.prices + spot @ np.nan_to_num(_spot_prices(problem), posinf=0.0)
    order = np.lexsort((cost, -expected))
    best_bound, chosen, limit = 0.0, int(order[0]), _LIMITS[0]
    # Interruptions only lower the expected bound. So the search ends when the next expected bound
    # is no better than the best bound.
    for start in range(0, min(len(order), _LOOKED_AT), _AT_ONCE):
        at = order[start : start + _AT_ONCE]
        if expected[at[0]] <= best_bound:
            break
        whole, interrupted = _with_interruptions(t, firm[at], spot[at], there, loss)
        limits = np.stack([large[at], interrupted, np.minimum(whole, expected[at])])
        bounds = limits.min(axis=0)
        if bounds.max() > best_bound:
            k = int(np.lexsort((cost[at], -bounds))[0])
            best_bound, chosen = float(bounds[k]), int(at[k])
            limit = _LIMITS[int((limits[:, k] <= best_bound * (1 + 1e-9)).argmax())]
    return _make_plan(
        problem, t, firm[chosen], spot[chosen], best_bound, int(reach[chosen]), limit, len(firm)
    )


_LIMITS: tuple[Limit, ...] = ("large requests", "interruptions", "capacity")


def _spot_prices(problem: Problem) -> Floats:
    """Return the spot prices, shape (types,). They are `inf` for types without spot instances."""
    return np.array([t.spot_price_per_hour or math.inf for t in problem.types])


def _configurations(problem: Problem, base: int, there: Floats) -> tuple[Ints, Ints]:
    """Return the numbers of on-demand and of spot instances, shape (n, types) each. The rest of the
    budget is always spent on the cheapest instances, because fewer instances serve less."""
    prices = np.array([t.price_per_hour for t in problem.types])
    spot = _spot_prices(problem)
    either = [(prices[k], k, False) for k in range(len(prices))]
    either += [(spot[k], k, True) for k in range(len(prices)) if spot[k] < math.inf]
    cheaper = [
        offer
        for offer in either
        if offer[1] == base or offer[2] == bool(spot[offer[1]] < prices[offer[1]] * there[offer[1]])
    ]
    budget = problem.budget_per_hour
    for offers in (sorted(either, reverse=True), sorted(cheaper, reverse=True)):
        price = np.array([offer[0] for offer in offers])
        try:
            counts = kairos.configurations(price[:-1], budget, _MOST)
            break
        except ValueError:
            if len(offers) == len(cheaper):
                raise
    left = budget * (1 + 1e-12) - counts @ price[:-1]
    counts = np.column_stack([counts, np.floor(left / price[-1]).astype(np.int64)])
    made = np.zeros((2, len(counts), len(prices)), dtype=np.int64)
    for column, (_, k, interruptible) in enumerate(offers):
        made[int(interruptible), :, k] = counts[:, column]
    return made[0], made[1]


def _reach(t: Tables, counts: Ints, large_size: int | None) -> Ints:
    """Return, for each configuration, the number of sizes that need not be served when all spot
    instances are gone."""
    if large_size is not None:
        return np.full(len(counts), int(np.searchsorted(t.sizes, large_size, "right")))
    auxiliary = np.where(t.reach < len(t.sizes), t.reach, 0)
    return np.asarray(np.where(counts > 0, auxiliary, 0).max(axis=1))


def _large_bounds(t: Tables, base: int, firm: Ints, reach: Ints) -> Floats:
    """Return the bounds of Equation 12 with only the on-demand instances of the base type."""
    bounds = np.full(len(firm), np.inf)
    for r in np.unique(reach).tolist():
        share = float(t.share[r:].sum())
        if share > 0:
            at = reach == r
            bounds[at] = firm[at, base] * t.rate(base, r, len(t.sizes)) / share
    return bounds


def _with_interruptions(
    t: Tables, firm: Ints, spot: Ints, there: Floats, loss: float
) -> tuple[Floats, Floats]:
    """Return B(n + m), and the λ at which E[(1 − B(n + K)/λ)⁺] = `loss`, for each configuration."""
    states, owners, chances = [], [], []
    for i in range(len(firm)):
        columns = [_present(int(m), float(a)) for m, a in zip(spot[i], there, strict=True)]
        for state in product(*columns):
            states.append([n for n, _ in state])
            chances.append(math.prod(p for _, p in state))
            owners.append(i)
    owner, chance = np.array(owners), np.array(chances)
    bounds = fluid_bounds_of(t, firm[owner] + np.array(states))
    # Sort the states by rising B. Let λ_j be the λ at which the sum over the first j states alone
    # is `loss`. Then λ is the least λ_j, because more or fewer states make the sum smaller.
    order = np.lexsort((bounds, owner))
    owner, chance, bounds = owner[order], chance[order], bounds[order]
    first = np.searchsorted(owner, np.arange(len(firm)))
    served, seen = np.cumsum(chance * bounds), np.cumsum(chance)
    before = np.concatenate([[0.0], served])[first], np.concatenate([[0.0], seen])[first]
    excess = seen - before[1][owner] - loss
    rate = np.full(len(owner), np.inf)
    np.divide(served - before[0][owner], excess, out=rate, where=excess > 1e-12)
    return np.maximum.reduceat(bounds, first), np.minimum.reduceat(rate, first)


def _present(instances: int, availability: float) -> list[tuple[int, float]]:
    """Return the possible numbers of present instances and their probabilities, without rare
    ones."""
    numbers = np.arange(instances + 1)
    chances = binom.pmf(numbers, instances, availability)
    return [(n, p) for n, p in zip(numbers.tolist(), chances.tolist(), strict=True) if p > _RARE]


def _make_plan(
    problem: Problem,
    t: Tables,
    firm: Ints,
    spot: Ints,
    bound: float,
    reach: int,
    limit: Limit,
    considered: int,
) -> SpotPlan:
    on_demand, interruptible = by_name(t, firm), by_name(t, spot)
    cost = float(firm @ t.prices) + sum(
        n * (kind.spot_price_per_hour or 0.0)
        for n, kind in zip(spot.tolist(), problem.types, strict=True)
    )
    large = int(t.sizes[reach - 1]) if reach else 0
    because = {
        "capacity": "all of them together serve no more",
        "interruptions": "more would be lost when instances are interrupted",
        "large requests": "on-demand instances alone serve no more of the large requests",
    }[limit]
    text = f"{text_of(on_demand)} on demand"
    if interruptible:
        text += f", {text_of(interruptible)} as spot instances"
    text += f", at most {bound:.4g} requests/s: {because}."
    if interruptible and reach < len(t.sizes):
        text += f" Requests larger than {large} do not need spot instances."
    return SpotPlan(on_demand, interruptible, cost, bound, large, limit, considered, text)
