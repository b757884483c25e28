"""The planners `kairos` and `kairos_plus`: how many workers of each instance type to rent.

They are solvers under the brain of `auto` (`mix` has the form of `auto.plan`). The configuration of
a model with one variant and one SLO is chosen by its upper bound (Kairos §5.2). `kairos_plus` also
simulates the best ones with the policy (Algorithm 1). Both rent the highest throughput that the
budget pays for. With `follow_load` (ours) they rent the cheapest configuration that serves the
demand. A configuration serves it if its bound times `attained` is high enough. `attained` is the
share of the bound that the policy is known to attain. The configuration of the last plan stays if
it serves as well, and its cost or throughput is within `min_gain` of the best. So machines do not
start and stop for near ties.

With several models, variants or SLOs, the program of `auto` chooses, for batches of one request.

A type whose latency is unknown is not rented. So begin with one worker of each type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from ray_slo.core.documents import Strict
from ray_slo.papers import kairos
from ray_slo.papers.kairos import Configuration, Market
from ray_slo.planning import auto
from ray_slo.planning.auto import Demand, Plan, Prices, Problem, Slot
from ray_slo.planning.catalogue import InstanceType
from ray_slo.planning.result import Infeasible, best

_MOST_CONFIGURATIONS = 200_000
_SAMPLE = 500  # the number of sizes in a market
_NEAR_TIE = 0.9  # share of the highest bound
# The largest demand that the program can serve is sought to 2^20 times the present one, and found
# to 1/1000 of it.
_DOUBLINGS, _HALVES = 20, 10

# Requests per second that a configuration sustains: of a market, a configuration, the bound on it,
# and the number of requests to try it with.
Sustained = Callable[[Market, Configuration, float, int], float]


class Arguments(Strict):
    """`planner.kwargs`.

    Attributes:
        budget_per_hour: budget in the currency of the instance types' prices.
        xi: share of the SLO that may be used, as in the policy.
        base: kind of worker that is the base type; default: the cheapest for the mix of those that
            meet the SLO at every size.
        bound: see `ray_slo.papers.kairos.plan`.
        follow_load: rent only what the measured rate needs. False: rent the highest throughput that
            the budget pays for, as in the paper.
        attained: assumed share of the bound that the policy sustains (`kairos_plus` measures it).
        sizes: expected sizes and their weights, until requests have come.
        requests: number of requests in a simulation. Only for `kairos_plus`.
        max_evaluations: largest number of configurations that are simulated. Only for
            `kairos_plus`.
    """

    model_config = ConfigDict(frozen=True)

    budget_per_hour: PositiveFloat
    xi: float = Field(default=0.98, gt=0, le=1)
    base: str | None = None
    bound: Literal["fluid", "paper"] = "fluid"
    follow_load: bool = True
    attained: float = Field(default=0.75, gt=0, le=1)
    sizes: Annotated[dict[PositiveInt, PositiveFloat], Field(min_length=1)] | None = None
    requests: PositiveInt = 1000
    max_evaluations: PositiveInt = 12


def mix(
    problem: Problem,
    last: Plan | None,
    arguments: Arguments,
    min_gain: float = 0.1,
    sustained: Sustained | None = None,
) -> Plan | Infeasible[Plan]:
    """Return the plan: the workers of each type to rent, which serve all requests.

    Args:
        last: the last plan, which stays for small gains.
        min_gain: least gain of a plan that changes the configuration, as a share.
        sustained: function that simulates the policy. Only for `kairos_plus`.

    Raises:
        ValueError: the budget allows too many configurations.
    """
    if len(problem.variant) != 1 or len(problem.streams) != 1:
        return _by_program(problem, last, arguments, min_gain)
    if problem.present is not None:
        return _meanwhile(problem, arguments)
    limits = {kind.name: kind.max_workers for kind in problem.kinds}
    market = _market(problem, arguments)
    names = [t.name for t in market.types]
    prices = np.array([t.price_per_hour for t in market.types])
    counts = kairos.configurations(prices, market.budget_per_hour)
    counts = counts[(counts <= np.array([limits[n] for n in names])).all(axis=1)]
    counts = counts[counts.sum(axis=1) > 0]
    if len(counts) > _MOST_CONFIGURATIONS:
        raise ValueError(
            f"budget_per_hour {market.budget_per_hour:g} allows {len(counts):,} configurations, "
            f"more than {_MOST_CONFIGURATIONS:,}; set max_replicas of the kinds of workers"
        )
    bounds = kairos.fluid_bounds(market, counts) if len(counts) else np.zeros(0)
    now = _now(problem, last)
    if not len(bounds) or bounds.max() <= 0:
        return _best_effort(problem, market, arguments, limits, now)
    cost = counts @ prices
    chosen, why, attained = _most(market, arguments, counts, bounds, sustained)
    current = _index(counts, [now.get(n, 0) for n in names])
    shortfall = None
    if arguments.follow_load:
        rate = problem.rate(problem.streams[0])
        enough = bounds * attained >= rate
        if enough.any():
            at = np.flatnonzero(enough)
            chosen = int(at[np.lexsort((-bounds[at], cost[at]))[0]])
            why = "the cheapest that serves the load"
            near = (1 + min_gain) * cost[chosen]
            if current is not None and enough[current] and cost[current] <= near:
                chosen, why = current, "it serves the load, and no other is much cheaper"
        else:
            shortfall = (
                f"{rate:.4g} req/s is more than a budget of {market.budget_per_hour:g} per hour "
                f"sustains: about {attained * bounds[chosen]:.4g}"
            )
    if (
        (not arguments.follow_load or shortfall)
        and current is not None
        and bounds[current] >= (1 - min_gain) * bounds[chosen]
    ):
        chosen, why = current, f"no other serves much more; {why}"
    mine = dict(zip(names, counts[chosen].tolist(), strict=True))
    text = (
        f"{kairos.text_of(mine)} at {cost[chosen]:.4g} per hour, "
        f"of {market.budget_per_hour:g}: {why}. "
        f"At most {bounds[chosen]:.4g} req/s, {attained:.0%} of that is taken for sustained."
    )
    return _planned(problem, mine, attained * float(bounds[chosen]), text, shortfall)


def _meanwhile(problem: Problem, arguments: Arguments) -> Plan | Infeasible[Plan]:
    """Return the plan for the present workers, until the others are there."""
    market, there = _market(problem, arguments), problem.present
    assert there is not None
    row = np.array([[there.get(t.name, 0) for t in market.types]])
    most = arguments.attained * float(kairos.fluid_bounds(market, row)[0])
    return _planned(problem, there, most, f"{kairos.text_of(there)}, about {most:.4g} req/s.")


def _market(problem: Problem, arguments: Arguments) -> Market:
    (model,), (tree,), budget = problem.models, problem.trees, problem.budget_per_hour
    profiles = model.variants[0].profiles
    base = arguments.base if arguments.base in profiles else None
    assert budget is not None
    return Market(
        [
            InstanceType(name=kind.name, price_per_hour=kind.price_per_hour)
            for kind in problem.kinds
            if kind.name in profiles
        ],
        profiles,
        problem.slo_s(tree.name),
        _sizes(model),
        budget,
        arguments.xi,
        base,
    )


def _sizes(model: auto.Model) -> NDArray[np.int64]:
    """Return a sample of a model's sizes, shape (n,). Each class has its largest size and another
    one, in shares with which the mean is that of the class."""
    sample = []
    for size in model.sizes:
        low = max(2 * size.items - size.largest, 1.0)
        high = (size.items - low) / (size.largest - low) if size.largest > low else 1.0
        count = _SAMPLE * size.share
        most = max(round(high * count), 1)
        sample += [size.largest] * most + [round(low)] * (round(count) - most)
    return np.array(sample or [max(round(model.items), 1)], dtype=np.int64)


def _now(problem: Problem, last: Plan | None) -> Mapping[str, int]:
    """Return the number of workers of each kind that are rented now."""
    if last is not None:
        return last.workers
    return Counter(hosted.kind for hosted in problem.current)


def _planned(
    problem: Problem, counts: Mapping[str, int], most: float, why: str, shortfall: str | None = None
) -> Plan | Infeasible[Plan]:
    """Return the plan in which every worker serves all requests.

    Args:
        most: assumed throughput, in requests per second.
        shortfall: what the configuration cannot serve. None if it serves everything.
    """
    (variant,), (stream,) = problem.variant.values(), problem.streams
    workers = {kind.name: counts.get(kind.name, 0) for kind in problem.kinds}
    rate = problem.rate(stream)
    served = min(most / rate, 1.0) if rate > 0 else 1.0
    plan = Plan(
        workers,
        tuple(Slot(k, (), (variant.name,)) for k, n in workers.items() for _ in range(n)),
        variant.accuracy if served else 0.0,
        {stream: served},
        1 - served,
        sum(workers[kind.name] * kind.price_per_hour for kind in problem.kinds),
        Prices(),
        "share" if shortfall else "cost",
        why,
    )
    return plan if shortfall is None else Infeasible(shortfall, plan)


def _most(
    market: Market,
    arguments: Arguments,
    counts: NDArray[np.int64],
    bounds: NDArray[np.float64],
    sustained: Sustained | None,
) -> tuple[int, str, float]:
    """Return the configuration of the highest throughput: its index, the reason, and the share of
    its bound that it attains."""
    names = [t.name for t in market.types]

    def index(configuration: Configuration) -> int | None:
        return _index(counts, [configuration.get(n, 0) for n in names])

    def throughput(configuration: Configuration) -> float:
        """0 if the configuration is not allowed."""
        at = index(configuration)
        if at is None or bounds[at] <= 0 or sustained is None:
            return 0.0
        return sustained(market, configuration, float(bounds[at]), arguments.requests)

    if sustained is not None:
        found = kairos.search(
            market,
            throughput,
            bound=arguments.bound,
            margin=0.01,
            max_evaluations=arguments.max_evaluations,
        )
        if not isinstance(found, Infeasible) and found.throughput > 0:
            chosen = index(found.counts)
            if chosen is not None:
                why = f"{found.throughput:.4g} req/s in the simulator, the most of "
                why += f"{len(found.evaluated)} that were tried"
                return chosen, why, min(found.throughput / float(bounds[chosen]), 1.0)
    planned = kairos.plan(market, arguments.bound)
    if not isinstance(planned, Infeasible):
        chosen = index(planned.counts)
        # Kairos' rule may choose the one of the ten best that is most like the other nine, as if
        # the ten were near ties. With few configurations the ten differ, and that one may be bad.
        if chosen is not None and bounds[chosen] >= _NEAR_TIE * bounds.max():
            return chosen, planned.explanation.rstrip("."), arguments.attained
    return int(bounds.argmax()), "the highest upper bound", arguments.attained


def _best_effort(
    problem: Problem,
    market: Market,
    arguments: Arguments,
    limits: Mapping[str, int],
    now: Mapping[str, int],
) -> Plan | Infeasible[Plan]:
    """Return the answer for the case that no allowed configuration serves all sizes in time."""
    found = kairos.plan(market, arguments.bound)
    if not isinstance(found, Infeasible):
        return _planned(problem, {}, 0.0, "no workers", "the limits of workers allow none that do")
    rented = found.best_effort
    counts = {n: min(c, limits[n]) for n, c in rented.counts.items()}
    most = arguments.attained * rented.bound
    return _planned(problem, counts or now, most, rented.explanation, found.reason)


def _index(counts: NDArray[np.int64], row: list[int]) -> int | None:
    found = np.flatnonzero((counts == row).all(axis=1))
    return int(found[0]) if len(found) else None


# -- several models, variants or SLOs ------------------------------------------------------


def _by_program(
    problem: Problem, last: Plan | None, arguments: Arguments, min_gain: float
) -> Plan | Infeasible[Plan]:
    if problem.present is not None:
        return auto.plan(problem, last)
    asked = _times(problem, 1 / arguments.attained)
    made = auto.plan(asked, last)
    if not arguments.follow_load:
        made = _highest(asked, made)
    if last is None or isinstance(made, Infeasible):
        return made
    kept = auto.plan(replace(asked, present=last.workers), last)
    near = (1 + min_gain) * made.cost_per_hour
    same = arguments.follow_load and not isinstance(kept, Infeasible)
    return kept if same and best(kept).cost_per_hour <= near else made


def _highest(problem: Problem, made: Plan | Infeasible[Plan]) -> Plan | Infeasible[Plan]:
    """Return the plan for the largest multiple of the demand that the budget pays for. `made` is
    the plan for the demand."""
    low, high = 1.0, 2.0
    for _ in range(_DOUBLINGS):
        more = auto.plan(_times(problem, high), best(made))
        if isinstance(more, Infeasible):
            break
        made, low, high = more, high, 2 * high
    for _ in range(_HALVES if not isinstance(made, Infeasible) else 0):
        factor = (low + high) / 2
        more = auto.plan(_times(problem, factor), best(made))
        if isinstance(more, Infeasible):
            high = factor
        else:
            made, low = more, factor
    return made


def _times(problem: Problem, factor: float) -> Problem:
    demand = {s: Demand(factor * of.rate, of.dispersion) for s, of in problem.demand.items()}
    return replace(problem, demand=demand)
