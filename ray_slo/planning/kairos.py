"""Which instances to rent: the most requests per second in time, under a budget (Kairos §5.2).

    problem = Problem(types, profiles, latency_slo_s=0.025, sizes=recent_sizes, budget_per_hour=2.5)
    chosen = plan(problem)                         # `kairos`: from upper bounds alone
    found = search(problem, evaluate)              # `kairos_plus`: Algorithm 1

A *configuration* is a number of instances of each type. The *base* type is the one that meets the
SLO at every size; *auxiliary* types do up to some size s. Every configuration under the budget is
scored by an upper bound on its throughput, all of them at once:

* `paper_bounds` (Equations 9–15): all auxiliary instances serve the requests up to the largest s,
  the base serves the rest, and what base time is left serves the mix;
* `fluid_bounds` (ours): for any prices y of a second of each type, λ ≤ n·y / E[min_k y_k ℓ_k(S)],
  the minimum over the types that can serve size S in time. This is LP duality for the fluid limit,
  so every price vector gives a true bound, and a few thousand of them come close to the best.

Equation 15 is no true bound: in the slack term it lets the base serve the mix, though it could
serve the large requests and leave the small ones to auxiliary instances, which are relatively
better at them. It is also loose where auxiliary types differ in s, as all are given the largest.

`plan` takes the configuration with the highest bound if the top three agree on the number of base
instances, else the one of the top ten that is nearest to the others (least squared distance). With
"fluid", only configurations that use up the budget take part: others are a part of one that does.

Worked example (as Figure 7, scenario 2): Q_b = 60/s for the mix, Q_b^{s+} = 40/s beyond s, Q_a =
50/s up to s, of which there are f = 80 %. The auxiliary one is the bottleneck, as 50·0.2/0.8 = 12.5
is less than 40: the bound is 50/0.8 + (40 − 12.5)/40·60 = 103.75/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.profiles import LatencyProfile
from ray_slo.planning.catalogue import InstanceType
from ray_slo.planning.result import Infeasible

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Bound = Literal["paper", "fluid"]
Configuration = dict[str, int]
"""Number of instances by name of type; types left out are not rented."""

_MAX_CONFIGURATIONS = 20_000_000


@dataclass(frozen=True)
class Problem:
    """What to serve, on what, for how much.

    Attributes:
        types: to choose from.
        profiles: ℓ(size) by name of type, one request of that size at a time.
        latency_slo_s: every request's.
        sizes: of recent requests, shape (n,); the distribution that is planned for.
        budget_per_hour: not to be exceeded.
        xi: share of the SLO that may be used, as in the policy.
        base: name of the base type; by default the one of those that meet the SLO at every size
            that serves the mix at the least cost.
    """

    types: Sequence[InstanceType]
    profiles: Mapping[str, LatencyProfile]
    latency_slo_s: float
    sizes: Sequence[int] | NDArray[Any]
    budget_per_hour: float
    xi: float = 0.98
    base: str | None = None

    def __post_init__(self) -> None:
        names = [t.name for t in self.types]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"types must be different and at least one, got {names}")
        if missing := [n for n in names if n not in self.profiles]:
            raise ValueError(f"profiles has none for {', '.join(missing)}")
        if self.base is not None and self.base not in names:
            raise ValueError(f"base must be one of {', '.join(names)}, got {self.base!r}")
        for name, value in (
            ("latency_slo_s", self.latency_slo_s),
            ("budget_per_hour", self.budget_per_hour),
        ):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, got {value}")
        if not 0 < self.xi <= 1:
            raise ValueError(f"xi must be above 0 and at most 1, got {self.xi}")
        sizes = np.asarray(self.sizes)
        if sizes.ndim != 1 or len(sizes) == 0 or sizes.min() < 1:
            raise ValueError("sizes must be a non-empty list of sizes of at least 1")


@dataclass(frozen=True)
class Plan:
    """A configuration and why.

    Attributes:
        counts: instances by type, those that are rented.
        cost_per_hour: of them all.
        bound: upper bound on its throughput, requests per second.
        base: name of the base type.
        bottleneck: "base" where auxiliary instances wait for it, else "auxiliary".
        runner_up: the configuration that came next, None if there is only one.
        considered: configurations scored.
        explanation: the choice in words.
    """

    counts: Configuration
    cost_per_hour: float
    bound: float
    base: str
    bottleneck: Literal["base", "auxiliary"]
    runner_up: Configuration | None
    considered: int
    explanation: str


@dataclass(frozen=True)
class Found:
    """Result of a search by evaluation.

    Attributes:
        counts: the best configuration that was evaluated.
        throughput: what `evaluate` said of it.
        evaluated: configurations and their throughputs, in order of evaluation.
        space: size of the search space.
        pruned: configurations that needed no evaluation.
    """

    counts: Configuration
    throughput: float
    evaluated: tuple[tuple[Configuration, float], ...] = field(repr=False)
    space: int = 0
    pruned: int = 0

    @property
    def share(self) -> float:
        """Of the space that was evaluated."""
        return len(self.evaluated) / self.space


class _Tables:
    """The size distribution as weights, and what each type makes of it."""

    def __init__(self, problem: Problem) -> None:
        self.names = [t.name for t in problem.types]
        self.prices = np.array([t.price_per_hour for t in problem.types])
        values, counts = np.unique(np.asarray(problem.sizes, dtype=np.int64), return_counts=True)
        self.sizes, self.share = values, counts / counts.sum()
        budget = problem.xi * problem.latency_slo_s
        self.latency = np.array(
            [[problem.profiles[n].latency(int(s)) for s in values] for n in self.names]
        )
        # The largest size that each type serves in time (profiles are monotone), by index.
        self.reach = np.array([int(np.searchsorted(row, budget, "right")) for row in self.latency])
        self.whole = [k for k, r in enumerate(self.reach) if r == len(values)]
        self.base: int | None = None
        if problem.base is not None:
            chosen = self.names.index(problem.base)
            self.base = chosen if chosen in self.whole else None
        elif self.whole:
            cost = self.prices * (self.latency @ self.share)
            self.base = min(self.whole, key=lambda k: cost[k])

    def rate(self, kind: int, start: int, stop: int) -> float:
        """Requests per second of one instance on the sizes between two indices, as they come."""
        share = self.share[start:stop]
        if share.sum() <= 0:
            return math.inf
        return float(share.sum() / (share @ self.latency[kind, start:stop]))


def configurations(
    prices: Sequence[float] | Floats, budget: float, most: int = _MAX_CONFIGURATIONS
) -> Ints:
    """Every number of instances of each type that costs at most `budget`, shape (n, types).

    Raises:
        ValueError: there are more than `most`.
    """
    prices = np.asarray(prices, dtype=float)
    made: Ints = np.zeros((1, 0), dtype=np.int64)
    left = np.array([budget * (1 + 1e-12)])
    for price in prices:
        each = np.floor(left / price).astype(np.int64) + 1
        if each.sum() > most:
            raise ValueError(
                f"a budget of {budget:g} allows more than {most:,} configurations; "
                "plan for a part of it, or with fewer types"
            )
        row = np.repeat(np.arange(len(each)), each)
        count = np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)
        made = np.column_stack([made[row], count])
        left = left[row] - count * price
    return made


def paper_bounds(problem: Problem, counts: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    """Equation 15 for each row of `counts`: throughput, and whether the base is the bottleneck.

    Without a base instance the bound is 0: some sizes are served by nobody.
    """
    t = _Tables(problem)
    if t.base is None:
        raise ValueError("no type meets the SLO at every size, so there is no base")
    return _paper_bounds(t, t.base, counts)


def _paper_bounds(t: _Tables, base: int, counts: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    others = [k for k in range(len(t.names)) if k != base]
    whole = len(t.sizes)
    q_mix = t.rate(base, 0, whole)
    u = counts[:, base].astype(float)
    # s' and f' are those of the auxiliary type that reaches farthest among those rented.
    rented = counts[:, others] > 0
    reach = np.where(rented, t.reach[others], 0).max(axis=1, initial=0)
    bound, base_bound = np.zeros(len(counts)), np.ones(len(counts), dtype=bool)
    for r in np.unique(reach).tolist():
        at = reach == r
        f = float(t.share[:r].sum())
        if f <= 0:  # nothing for auxiliary instances to do
            bound[at] = u[at] * q_mix
            continue
        auxiliary = counts[at][:, others] @ np.array([t.rate(k, 0, r) for k in others])
        if 1 - f <= 1e-12:
            bound[at] = auxiliary / f + u[at] * q_mix
            base_bound[at] = False
            continue
        q_large = t.rate(base, r, whole)
        offloaded = auxiliary * (1 - f) / f
        slack = np.where(u[at] > 0, 1 - offloaded / np.maximum(u[at] * q_large, 1e-300), 0.0)
        limited = u[at] * q_large < offloaded
        mixed = auxiliary / f + slack * u[at] * q_mix
        bound[at] = np.where(limited, u[at] * q_large / (1 - f), mixed)
        base_bound[at] = limited
    base_bound[u == 0] = True
    bound[u == 0] = 0.0
    return bound, base_bound


def fluid_bounds(problem: Problem, counts: Ints | Floats, resolution: int = 8) -> Floats:
    """The least of many dual bounds for each row of `counts`, requests per second.

    A grid of prices, and then a finer one around the prices that gave the least bounds.

    Args:
        counts: instances of each type, shape (n, types); parts of one are there part of the time.
        resolution: steps of the first grid per type. Any value gives true upper bounds.
    """
    return _fluid_bounds(_Tables(problem), counts, resolution)


def _fluid_bounds(t: _Tables, counts: Ints | Floats, resolution: int = 8) -> Floats:
    bounds = np.zeros(len(counts))
    # Sizes that no rented type serves in time: no rate is sustained.
    able = np.where(counts > 0, t.reach, 0).max(axis=1, initial=0) == len(t.sizes)
    if not able.any():
        return bounds
    duals = _Duals(t)
    rows = counts[able].astype(float)
    # Which prices matter is seen on a sample; with fewer prices the bounds are still bounds.
    sample = rows[:: max(len(rows) // 256, 1)]
    first = np.geomspace(0.25, 4.0, resolution)
    # Nothing for types that idle, a fortune for those that are not rented.
    prices = duals.grid([np.concatenate([[0.0], first, [1e6]])] * len(t.names))
    prices = _least(sample, prices)
    step = (first[1] / first[0]) ** (1 / 3) if resolution > 1 else 1.2
    around = duals.grid([np.array([1 / step, 1.0, step])] * len(t.names), relative=True)
    finer = (prices[:, None, :] * around[None, :, :]).reshape(-1, prices.shape[1])
    prices = _least(sample, np.concatenate([prices, duals.normalised(finer)]))
    bounds[able] = np.concatenate(
        [(rows[i : i + 4096] @ prices.T).min(axis=1) for i in range(0, len(rows), 4096)]
    )
    return bounds


def _least(sample: Floats, prices: Floats) -> Floats:
    """Those of `prices` that give the least bound for a row of `sample`."""
    return np.asarray(prices[np.unique((sample @ prices.T).argmin(axis=1))])


class _Duals:
    """Prices y of a second of each type, scaled to E[min_k y_k ℓ_k(S)] = 1: then λ ≤ n·y."""

    def __init__(self, t: _Tables) -> None:
        # Sizes in about 256 classes, each at its smallest size's latency, so that a bound remains
        # one. Where a type's reach ends, a class ends.
        whole = len(t.sizes)
        edges = np.searchsorted(np.cumsum(t.share), np.arange(256) / 256, "right")
        edges = np.union1d(edges[edges < whole], np.append(t.reach[t.reach < whole], 0))
        self.share = np.add.reduceat(t.share, edges)
        self.latency = t.latency[:, edges]
        self.reach = np.searchsorted(edges, t.reach)
        self.speed = np.array([t.rate(k, 0, int(r)) if r else 0.0 for k, r in enumerate(t.reach)])
        self.reference = int(t.reach.argmax())

    def grid(self, steps: list[Floats], relative: bool = False) -> Floats:
        """All combinations of `steps` times what a second of the type serves, normalised; factors
        to multiply prices with where `relative`. The type of the largest reach costs 1."""
        axes = [
            np.ones(1)
            if k == self.reference
            else s * (1.0 if relative else self.speed[k] / self.speed[self.reference])
            for k, s in enumerate(steps)
        ]
        made = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
        return made if relative else self.normalised(made)

    def normalised(self, prices: Floats) -> Floats:
        """Without those under which the expectation is 0."""
        least = np.full((len(prices), len(self.share)), np.inf)
        for k, r in enumerate(self.reach.tolist()):
            part = least[:, :r]
            np.minimum(part, prices[:, k, None] * self.latency[k, :r], out=part)
        expected = least @ self.share
        fine = np.isfinite(expected) & (expected > 0)
        return np.asarray(prices[fine] / expected[fine, None])


def plan(problem: Problem, bound: Bound = "fluid") -> Plan | Infeasible[Plan]:
    """`kairos`: the configuration to rent, from upper bounds alone (§5.2).

    Args:
        bound: "fluid", or "paper" (Equation 15), whose choices sustain up to 3 % less
            (`kairos-bounds`).

    Returns:
        `Infeasible` where no type meets the SLO at every size, or the budget does not pay for one;
        its best effort serves the largest share of the sizes that can be served.
    """
    ranked = _ranked(problem, bound)
    if isinstance(ranked, Infeasible):
        return ranked
    t, base, counts, bounds, limited = ranked
    considered = len(counts)
    if bound == "fluid":
        full = counts @ t.prices + t.prices.min() > problem.budget_per_hour * (1 + 1e-12)
        counts, bounds, limited = counts[full], bounds[full], limited[full]
    top = counts[:3]
    if len(set(top[:, base].tolist())) == 1:
        chosen, rule = 0, "the highest upper bound; the top three have as many base instances"
    else:
        near = counts[:10].astype(float)
        distance = ((near[:, None] - near[None]) ** 2).sum(axis=(1, 2))
        chosen = int(distance.argmin())
        rule = "nearest to the other nine of the ten highest upper bounds"
    runner_up = 1 if chosen == 0 else 0
    return _make_plan(
        t,
        base,
        counts,
        bounds,
        limited,
        chosen,
        runner_up if len(counts) > 1 else None,
        rule,
        considered,
    )


def _ranked(
    problem: Problem, bound: Bound
) -> tuple[_Tables, int, Ints, Floats, NDArray[np.bool_]] | Infeasible[Plan]:
    """Configurations by falling upper bound (ties: cheaper first), or why there is none."""
    if bound not in ("paper", "fluid"):
        raise ValueError(f"bound must be one of paper, fluid, got {bound!r}")
    t = _Tables(problem)
    if t.base is None:
        return _best_effort(problem, t, "no type meets the SLO at every size")
    if t.prices[t.base] > problem.budget_per_hour:
        return _best_effort(
            problem,
            t,
            f"one {t.names[t.base]} costs {t.prices[t.base]:g} per hour, the budget is "
            f"{problem.budget_per_hour:g}",
        )
    counts = configurations(t.prices, problem.budget_per_hour)
    counts = counts[counts.sum(axis=1) > 0]
    bounds, limited = _paper_bounds(t, t.base, counts)
    if bound == "fluid":
        bounds = _fluid_bounds(t, counts)
    served = bounds > 0
    counts, bounds, limited = counts[served], bounds[served], limited[served]
    order = np.lexsort((counts @ t.prices, -bounds))
    return t, t.base, counts[order], bounds[order], limited[order]


def _make_plan(
    t: _Tables,
    base: int,
    counts: Ints,
    bounds: Floats,
    limited: NDArray[np.bool_],
    chosen: int,
    runner_up: int | None,
    rule: str,
    considered: int,
) -> Plan:
    mine = _named(t, counts[chosen])
    other = None if runner_up is None else _named(t, counts[runner_up])
    bottleneck: Literal["base", "auxiliary"] = "base" if limited[chosen] else "auxiliary"
    if len(mine) == 1:
        limit = "it serves all sizes alone"
    elif limited[chosen]:
        limit = f"{t.names[base]} is the bottleneck: what only it can serve in time fills it"
    else:
        limit = f"{t.names[base]} has time left beside what only it can serve in time"
    text = f"{_text(mine)}, at most {bounds[chosen]:.4g} requests/s: {rule}; {limit}."
    if other is not None and runner_up is not None:
        text += f" Runner-up: {_text(other)}, at most {bounds[runner_up]:.4g}/s."
    return Plan(
        mine,
        float(counts[chosen] @ t.prices),
        float(bounds[chosen]),
        t.names[base],
        bottleneck,
        other,
        considered,
        text,
    )


def _best_effort(problem: Problem, t: _Tables, reason: str) -> Infeasible[Plan]:
    """The largest sizes are given up until what is left can be served under the budget."""
    affordable = np.flatnonzero(t.prices <= problem.budget_per_hour).tolist()
    reach = t.reach[affordable].max(initial=0)
    if reach == 0:
        nothing = Plan({}, 0.0, 0.0, "", "base", None, 0, "nothing can be served")
        return Infeasible(f"{reason}; no type within the budget meets the SLO at any size", nothing)
    largest = int(t.sizes[reach - 1])
    sizes = np.asarray(problem.sizes)
    smaller = Problem(
        [problem.types[k] for k in affordable],
        problem.profiles,
        problem.latency_slo_s,
        sizes[sizes <= largest],
        problem.budget_per_hour,
        problem.xi,
    )
    best = plan(smaller)
    assert isinstance(best, Plan)
    share = float(np.mean(sizes <= largest))
    return Infeasible(f"{reason}; best effort serves sizes up to {largest}, {share:.1%}", best)


def search(
    problem: Problem,
    evaluate: Callable[[Configuration], float],
    *,
    bound: Bound = "fluid",
    parallel: int = 1,
    map_: Callable[..., Any] = map,
    margin: float | None = None,
    max_evaluations: int | None = None,
) -> Found | Infeasible[Plan]:
    """`kairos_plus`: the best configuration, evaluating as few as possible (Algorithm 1).

    Configurations are evaluated by falling upper bound. One is passed over when its bound is not
    above the best throughput so far, or when it is a sub-configuration of one that was evaluated
    (fewer instances cannot serve more). With a true bound and exact evaluations the result is the
    optimum. That proof costs evaluations: a good policy attains, say, 93 % of the best bound, and
    all bounds between have to be tried. With a `margin` m they are not: a bound is taken times the
    largest share of a bound that any evaluation attained, plus m.

    Args:
        evaluate: throughput of a configuration, requests per second.
        bound: "fluid", a true bound, or "paper" (Equation 15), which may prune the optimum.
        parallel: evaluate this many at once, through
        map_: a `map`, such as `ProcessPoolExecutor.map`.
        margin: 0.01 or so to trust that shares of bounds differ by no more; None for certainty.
        max_evaluations: stop then.
    """
    if parallel < 1:
        raise ValueError(f"parallel must be at least 1, got {parallel}")
    ranked = _ranked(problem, bound)
    if isinstance(ranked, Infeasible):
        return ranked
    t, _, counts, bounds, _ = ranked
    live = np.ones(len(counts), dtype=bool)
    evaluated: list[tuple[Configuration, float]] = []
    best, best_throughput, attained = 0, -math.inf, 0.0
    while live.any() and (max_evaluations is None or len(evaluated) < max_evaluations):
        batch = np.flatnonzero(live)[:parallel].tolist()
        named = [_named(t, counts[i]) for i in batch]
        for i, configuration, value in zip(batch, named, map_(evaluate, named), strict=True):
            evaluated.append((configuration, float(value)))
            if value > best_throughput:
                best, best_throughput = i, float(value)
            attained = max(attained, float(value) / float(bounds[i]))
            live &= ~(counts <= counts[i]).all(axis=1)
        scale = 1.0 if margin is None else attained + margin
        live &= bounds * scale > best_throughput
    return Found(
        _named(t, counts[best]),
        best_throughput,
        tuple(evaluated),
        len(counts),
        len(counts) - len(evaluated),
    )


def _named(t: _Tables, row: Ints) -> Configuration:
    return {n: int(c) for n, c in zip(t.names, row, strict=True) if c}


def _text(counts: Configuration) -> str:
    return " + ".join(f"{c} {n}" for n, c in counts.items())
