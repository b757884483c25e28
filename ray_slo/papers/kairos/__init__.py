"""Choice of the instances to rent: those that answer the most requests per second in time, within a
budget (Kairos §5.2).

    market = Market(types, profiles, latency_slo_s=0.025, sizes=recent_sizes, budget_per_hour=2.5)
    chosen = plan(market)                         # `kairos`: from upper bounds alone
    found = search(market, evaluate)              # `kairos_plus`: Algorithm 1

A *configuration* is a number of instances of each type. The *base* type meets the SLO at every
size. *Auxiliary* types meet it up to some size s. All configurations within the budget get an upper
bound on their throughput at once:

* `paper_bounds` (Equations 9–15): all auxiliary instances serve the requests up to the largest s.
  The base serves the rest, and the remaining base time serves the mix.
* `fluid_bounds` (ours): for any prices y of a second of each type, λ ≤ n·y / E[min_k y_k ℓ_k(S)].
  The minimum is over the types that can serve size S in time. This is LP duality for the fluid
  limit, so every price vector gives a true bound. With a few thousand of them, the best one is
  close to the optimum.

Equation 15 is not a true bound. In its slack term, the base serves the mix. But the base could
serve the large requests, and leave the small ones to auxiliary instances, which are relatively
better at them. The bound is also loose if auxiliary types differ in s, because all get the largest
s.

`plan` takes the configuration with the highest bound if the top three agree on the number of base
instances. Otherwise it takes the one of the top ten that is nearest to the others (least squared
distance). With "fluid", only configurations that use up the budget are considered, because each
other one is a part of one of these.

Worked example (as Figure 7, scenario 2): Q_b = 60/s for the mix, Q_b^{s+} = 40/s beyond s, and
Q_a = 50/s up to s. The share of requests up to s is f = 80 %. The auxiliary instance is the
bottleneck, because 50·0.2/0.8 = 12.5 is less than 40. The bound is
50/0.8 + (40 − 12.5)/40·60 = 103.75/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ray_slo.papers.kairos.bounds import (
    Floats,
    Ints,
    Tables,
    by_name,
    configurations,
    fluid_bounds,
    paper_bounds,
    text_of,
)
from ray_slo.papers.kairos.market import Configuration, Found, Market, Rented
from ray_slo.planning.result import Infeasible

__all__ = [
    "Bound",
    "Configuration",
    "Floats",
    "Found",
    "Ints",
    "Market",
    "Rented",
    "configurations",
    "fluid_bounds",
    "paper_bounds",
    "plan",
    "search",
    "text_of",
]


Bound = Literal["paper", "fluid"]


def plan(market: Market, bound: Bound = "fluid") -> Rented | Infeasible[Rented]:
    """Return the configuration to rent, from upper bounds alone (`kairos`, §5.2).

    Args:
        bound: "fluid", or "paper" (Equation 15), whose choices sustain up to 3 % less
            (`kairos-bounds`).

    Returns:
        The plan. `Infeasible` if no type meets the SLO at every size, or if the budget is too small
        for one. Its best effort serves the largest share of the sizes that can be served.
    """
    ranked = _ranked(market, bound)
    if isinstance(ranked, Infeasible):
        return ranked
    t, base, counts, bounds, limited = ranked
    if bound == "fluid":
        full = counts @ t.prices + t.prices.min() > market.budget_per_hour * (1 + 1e-12)
        counts, bounds, limited = counts[full], bounds[full], limited[full]
    top = counts[:3]
    if len(set(top[:, base].tolist())) == 1:
        chosen, rule = 0, "the highest upper bound; the top three have as many base instances"
    else:
        near = counts[:10].astype(float)
        distance = ((near[:, None] - near[None]) ** 2).sum(axis=(1, 2))
        chosen = int(distance.argmin())
        rule = "nearest to the other nine of the ten highest upper bounds"
    mine = by_name(t, counts[chosen])
    if len(mine) == 1:
        limit = "it serves all sizes alone"
    elif limited[chosen]:
        limit = f"{t.names[base]} is the bottleneck: what only it can serve in time fills it"
    else:
        limit = f"{t.names[base]} has time left beside what only it can serve in time"
    text = f"{text_of(mine)}, at most {bounds[chosen]:.4g} requests/s: {rule}; {limit}."
    if len(counts) > 1:
        runner_up = 1 if chosen == 0 else 0
        other = text_of(by_name(t, counts[runner_up]))
        text += f" Runner-up: {other}, at most {bounds[runner_up]:.4g}/s."
    return Rented(mine, float(counts[chosen] @ t.prices), float(bounds[chosen]), text)


def _ranked(
    market: Market, bound: Bound
) -> tuple[Tables, int, Ints, Floats, NDArray[np.bool_]] | Infeasible[Rented]:
    """Return the configurations by falling upper bound, or `Infeasible` if there is none. Of equal
    bounds, the cheaper one comes first."""
    if bound not in ("paper", "fluid"):
        raise ValueError(f"bound must be one of paper, fluid, got {bound!r}")
    t = Tables(market)
    if t.base is None:
        return _best_effort(market, t, "no type meets the SLO at every size")
    if t.prices[t.base] > market.budget_per_hour:
        return _best_effort(
            market,
            t,
            f"one {t.names[t.base]} costs {t.prices[t.base]:g} per hour, the budget is "
            f"{market.budget_per_hour:g}",
        )
    counts = configurations(t.prices, market.budget_per_hour)
    counts = counts[counts.sum(axis=1) > 0]
    bounds, limited = paper_bounds(t, counts)
    if bound == "fluid":
        bounds = fluid_bounds(t, counts)
    served = bounds > 0
    counts, bounds, limited = counts[served], bounds[served], limited[served]
    order = np.lexsort((counts @ t.prices, -bounds))
    return t, t.base, counts[order], bounds[order], limited[order]


def _best_effort(market: Market, t: Tables, reason: str) -> Infeasible[Rented]:
    """Return the answer that gives up the largest sizes, so that the rest can be served within the
    budget."""
    affordable = np.flatnonzero(t.prices <= market.budget_per_hour).tolist()
    reach = t.reach[affordable].max(initial=0)
    if reach == 0:
        nothing = Rented({}, 0.0, 0.0, "nothing can be served")
        return Infeasible(f"{reason}; no type within the budget meets the SLO at any size", nothing)
    largest = int(t.sizes[reach - 1])
    sizes = np.asarray(market.sizes)
    smaller = Market(
        [market.types[k] for k in affordable],
        market.profiles,
        market.latency_slo_s,
        sizes[sizes <= largest],
        market.budget_per_hour,
        market.xi,
    )
    best = plan(smaller)
    assert isinstance(best, Rented)
    share = float(np.mean(sizes <= largest))
    return Infeasible(f"{reason}; best effort serves sizes up to {largest}, {share:.1%}", best)


def search(
    market: Market,
    evaluate: Callable[[Configuration], float],
    *,
    bound: Bound = "fluid",
    parallel: int = 1,
    map_: Callable[..., Any] = map,
    margin: float | None = None,
    max_evaluations: int | None = None,
) -> Found | Infeasible[Rented]:
    """Find the best configuration with as few evaluations as possible (`kairos_plus`, Algorithm 1).

    Configurations are evaluated by falling upper bound. One is skipped if its bound is not above
    the best throughput so far, or if it is a part of an evaluated one (fewer instances cannot serve
    more). With a true bound and exact evaluations, the result is the optimum. This proof needs many
    evaluations: if a good policy reaches 93 % of the best bound, all bounds in between must be
    tried. With a `margin` m, they need not be: a bound is multiplied by the largest share of a
    bound that any evaluation reached, plus m.

    Args:
        evaluate: function that returns the throughput of a configuration, in requests per second.
        bound: "fluid", a true bound, or "paper" (Equation 15), which may exclude the optimum.
        parallel: number of evaluations at once, through `map_`.
        map_: a `map`, such as `ProcessPoolExecutor.map`.
        margin: assumed largest difference between shares of bounds, about 0.01. None for certainty.
        max_evaluations: largest number of evaluations.
    """
    if parallel < 1:
        raise ValueError(f"parallel must be at least 1, got {parallel}")
    ranked = _ranked(market, bound)
    if isinstance(ranked, Infeasible):
        return ranked
    t, _, counts, bounds, _ = ranked
    live = np.ones(len(counts), dtype=bool)
    evaluated: list[tuple[Configuration, float]] = []
    best, best_throughput, attained = 0, -math.inf, 0.0
    while live.any() and (max_evaluations is None or len(evaluated) < max_evaluations):
        batch = np.flatnonzero(live)[:parallel].tolist()
        named = [by_name(t, counts[i]) for i in batch]
        for i, configuration, value in zip(batch, named, map_(evaluate, named), strict=True):
            evaluated.append((configuration, float(value)))
            if value > best_throughput:
                best, best_throughput = i, float(value)
            attained = max(attained, float(value) / float(bounds[i]))
            live &= ~(counts <= counts[i]).all(axis=1)
        scale = 1.0 if margin is None else attained + margin
        live &= bounds * scale > best_throughput
    return Found(by_name(t, counts[best]), best_throughput, tuple(evaluated), len(counts))
