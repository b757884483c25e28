"""The brain of the planners `kairos` and `kairos_plus`. It decides how many workers of each
instance type to rent. Its input is the measured rate and sizes of requests, the learned latencies
of the types, and a budget.

`kairos` scores every configuration within the budget by the fluid bound on its throughput, and
chooses by the rule of Kairos §5.2. `kairos_plus` also simulates the best configurations with the
policy (Kairos, Algorithm 1). Both rent the highest throughput that the budget pays for. With
`follow_load` (ours) they rent the cheapest configuration that serves the measured rate with
headroom. A configuration serves the rate if its bound times `attained` is high enough. `attained`
is the share of the bound that the policy is known to attain.

The brain plans again when

* the budget changes,
* the rate differs by more than chance explains,
* the distribution of sizes changes (`sizes.Sizes`),
* `interval_s` has passed, because latencies were learned meanwhile.

The current configuration stays if it serves as well, and its cost or throughput is within
`min_gain` of the best. So machines do not start and stop for near ties.

Every worker serves every model, so nothing is assigned. A type whose latency is unknown is not
rented. So begin with one worker of each type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from ray_slo.core.demand import HEADROOM_QUANTILE, Rate, poisson_rate
from ray_slo.core.documents import Strict
from ray_slo.planning import kairos
from ray_slo.planning.brains.brain import FIRST, Brain, Counts, NotYet, Seen, Verdict, Wanted
from ray_slo.planning.brains.sizes import Sizes
from ray_slo.planning.catalogue import InstanceType
from ray_slo.planning.kairos import Configuration
from ray_slo.planning.result import Infeasible

_LEAST_SIZES = 20  # requests before their sizes are used in a plan
_MOST_CONFIGURATIONS = 200_000
_SAMPLE = 500  # the number of sizes in a problem
_NEAR_TIE = 0.9  # share of the highest bound


class Arguments(Strict):
    """`planner.kwargs`.

    Attributes:
        budget_per_hour: budget in the currency of the instance types' prices.
        xi: share of the SLO that may be used, as in the policy.
        base: kind of worker that is the base type; default: the cheapest for the mix of those that
            meet the SLO at every size.
        bound: see `ray_slo.planning.kairos.plan`.
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
    sizes: dict[PositiveInt, PositiveFloat] | None = None
    requests: PositiveInt = 1000
    max_evaluations: PositiveInt = 12

    @field_validator("sizes")
    @classmethod
    def _some(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        if value is not None and not value:
            raise ValueError("name at least one size, or leave it out")
        return value


# Requests per second that a configuration sustains: of a problem, a configuration, the bound on it,
# and the number of requests to try it with.
Sustained = Callable[[kairos.Problem, Configuration, float, int], float]


@dataclass(frozen=True)
class KairosSetting:
    """The brain's settings for one application.

    Attributes:
        model: name of the model.
        variants: the variants that every worker loads.
        slo_s: the model's SLO without the time to send the answer back, in seconds.
        types: instance type by kind of worker.
        limits: largest number of workers, by kind.
        kwargs: the planner's arguments, as in `Arguments`.
        rate: expected requests per second, until the rate has been measured.
        demand: method that predicts the demand (`ray_slo.core.demand`).
        min_gain: least gain of a plan that changes the configuration, as a share (see the module).
        sustained: function at the top of a module that simulates the policy. Only for
            `kairos_plus`.
    """

    model: str
    variants: tuple[str, ...]
    slo_s: float
    types: Mapping[str, InstanceType]
    limits: Mapping[str, int]
    kwargs: Mapping[str, Any]
    rate: float = 1.0
    demand: Literal["ewma", "peak", "holt"] = "ewma"
    min_gain: float = 0.1
    sustained: Sustained | None = None


@dataclass(frozen=True)
class Job:
    """A problem to solve.

    Attributes:
        problem: types, profiles, SLO, recent sizes and the budget.
        args: the planner's arguments.
        rate: requests per second to serve, with headroom. None: the highest possible rate.
        planned_rate: the measured rate in requests per second, without headroom.
        limits: largest number of workers, by type.
        current: number of workers that are rented now, by type.
        min_gain, sustained: as in `KairosSetting`.
    """

    problem: kairos.Problem
    args: Arguments
    rate: float | None
    planned_rate: float
    limits: Mapping[str, int]
    current: Configuration
    min_gain: float
    sustained: Sustained | None = None


class Solved(NamedTuple):
    """The answer to a job: the configuration to rent.

    Attributes:
        bound: upper bound on its throughput, in requests per second.
        attained: assumed share of the bound that the policy sustains.
        shortfall: what the configuration cannot serve. None if it serves everything.
        evaluated: number of configurations that were simulated.
    """

    counts: Configuration
    cost_per_hour: float
    bound: float
    attained: float
    why: str
    shortfall: str | None
    evaluated: int


def solve(job: Job) -> Solved:
    """Return the configuration to rent. This runs as a Ray task.

    Raises:
        ValueError: the budget allows too many configurations.
    """
    problem = job.problem
    names = [t.name for t in problem.types]
    prices = np.array([t.price_per_hour for t in problem.types])
    counts = kairos.configurations(prices, problem.budget_per_hour)
    limits = np.array([job.limits[n] for n in names])
    counts = counts[(counts <= limits).all(axis=1) & (counts.sum(axis=1) > 0)]
    if len(counts) > _MOST_CONFIGURATIONS:
        raise ValueError(
            f"budget_per_hour {problem.budget_per_hour:g} allows {len(counts):,} configurations, "
            f"more than {_MOST_CONFIGURATIONS:,}; set max_replicas of the kinds of workers"
        )
    bounds = kairos.fluid_bounds(problem, counts) if len(counts) else np.zeros(0)
    if not len(bounds) or bounds.max() <= 0:
        return _best_effort(job)
    cost = counts @ prices
    chosen, why, attained, evaluated = _most(job, names, counts, bounds)
    current = _index(counts, [job.current.get(n, 0) for n in names])
    shortfall = None
    most = float(bounds[chosen])
    if job.rate is not None:
        enough = bounds * attained >= job.rate
        if enough.any():
            at = np.flatnonzero(enough)
            chosen = int(at[np.lexsort((-bounds[at], cost[at]))[0]])
            why = "the cheapest that serves the load"
            near = (1 + job.min_gain) * cost[chosen]
            if current is not None and enough[current] and cost[current] <= near:
                chosen, why = current, "it serves the load, and no other is much cheaper"
        else:
            shortfall = (
                f"{job.rate:.4g} req/s is more than a budget of {problem.budget_per_hour:g} per "
                f"hour sustains: about {attained * most:.4g}"
            )
    if (
        (job.rate is None or shortfall)
        and current is not None
        and bounds[current] >= (1 - job.min_gain) * most
    ):
        chosen, why = current, f"no other serves much more; {why}"
    mine = _named(names, counts[chosen])
    return Solved(
        mine,
        float(cost[chosen]),
        float(bounds[chosen]),
        attained,
        f"{_text(mine)} at {cost[chosen]:.4g} per hour, of {problem.budget_per_hour:g}: {why}. "
        f"At most {bounds[chosen]:.4g} req/s, {attained:.0%} of that is taken for sustained.",
        shortfall,
        evaluated,
    )


def _most(
    job: Job, names: list[str], counts: NDArray[np.int64], bounds: NDArray[np.float64]
) -> tuple[int, str, float, int]:
    """Return the configuration of the highest throughput: its index, the reason, the share of its
    bound that it attains, and the number of simulations."""
    if job.sustained is not None:
        found = kairos.search(
            job.problem,
            lambda configuration: _throughput(job, names, counts, bounds, configuration),
            bound=job.args.bound,
            margin=0.01,
            max_evaluations=job.args.max_evaluations,
        )
        if not isinstance(found, Infeasible) and found.throughput > 0:
            chosen = _index(counts, [found.counts.get(n, 0) for n in names])
            if chosen is not None:
                attained = min(found.throughput / float(bounds[chosen]), 1.0)
                why = f"{found.throughput:.4g} req/s in the simulator, the most of "
                why += f"{len(found.evaluated)} that were tried"
                return chosen, why, attained, len(found.evaluated)
    planned = kairos.plan(job.problem, job.args.bound)
    if not isinstance(planned, Infeasible):
        chosen = _index(counts, [planned.counts.get(n, 0) for n in names])
        # Kairos' rule may choose the one of the ten best that is most like the other nine, as if
        # the ten were near ties. With few configurations the ten differ, and that one may be bad.
        if chosen is not None and bounds[chosen] >= _NEAR_TIE * bounds.max():
            return chosen, planned.explanation.rstrip("."), job.args.attained, 0
    return int(bounds.argmax()), "the highest upper bound", job.args.attained, 0


def _throughput(
    job: Job,
    names: list[str],
    counts: NDArray[np.int64],
    bounds: NDArray[np.float64],
    configuration: Configuration,
) -> float:
    """Return the requests per second that a configuration sustains in the simulator. It is 0 if the
    configuration is not allowed."""
    at = _index(counts, [configuration.get(n, 0) for n in names])
    if at is None or bounds[at] <= 0:
        return 0.0
    assert job.sustained is not None
    return job.sustained(job.problem, configuration, float(bounds[at]), job.args.requests)


def _best_effort(job: Job) -> Solved:
    """Return the answer for the case that no allowed configuration serves all sizes in time."""
    found = kairos.plan(job.problem, job.args.bound)
    assert isinstance(found, Infeasible)
    best = found.best_effort
    counts = {n: min(c, job.limits[n]) for n, c in best.counts.items()}
    return Solved(
        counts or dict(job.current),
        best.cost_per_hour,
        best.bound,
        job.args.attained,
        f"Best effort: {best.explanation}",
        found.reason,
        0,
    )


def _index(counts: NDArray[np.int64], row: list[int]) -> int | None:
    found = np.flatnonzero((counts == row).all(axis=1))
    return int(found[0]) if len(found) else None


def _named(names: list[str], row: NDArray[np.int64]) -> Configuration:
    return {n: int(c) for n, c in zip(names, row, strict=True)}


def _text(counts: Configuration) -> str:
    return " + ".join(f"{c} {n}" for n, c in counts.items() if c)


class KairosBrain(Brain):
    """Plans how many workers of each instance type there are (see the module)."""

    def __init__(self, setting: KairosSetting) -> None:
        self._tuned: dict[str, Any] = {}
        self._limits: dict[str, int] = {}
        self.configure(setting)
        self._rate = Rate(setting.demand)
        self._sizes = Sizes()
        self._job: Job | None = None
        self._solved: Solved | None = None

    @property
    def solve(self) -> Callable[[Job], Solved]:
        return solve

    def configure(self, setting: KairosSetting) -> None:
        self._setting = setting
        self._args = Arguments(**{**setting.kwargs, **self._tuned})

    def tune(self, kwargs: Mapping[str, Any]) -> bool:
        if dict(kwargs) == self._tuned:
            return False
        self._args = Arguments(**{**self._setting.kwargs, **kwargs})
        self._tuned = dict(kwargs)
        return True

    # -- reports ---------------------------------------------------------------------

    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        self._rate.counted(now, over_s, counts.total)
        self._sizes.counted(counts.sizes.get(self._setting.model, {}))

    def rate(self, now: float) -> float:
        """Return the average requests per second to plan for."""
        if not self._rate.seen:
            return self._setting.rate
        return self._rate.value(now)

    # -- problem and plan ------------------------------------------------------------------

    def problem(self, now: float, seen: Seen) -> Job:
        known = {k: p for (_, k), p in seen.profiles.items()}
        profiles = {k: known[k] for k in self._setting.types if k in known}  # in their order
        new = {says.kind for says in seen.workers.values()} - profiles.keys()
        if self._solved is None and (new or not profiles):
            raise NotYet(f"{', '.join(sorted(new)) or 'no worker'} not measured yet")
        if len(self._sizes) >= _LEAST_SIZES:
            sizes = self._sizes.values()
        elif self._args.sizes is not None:
            sizes = _weighted(self._args.sizes)
        else:
            raise NotYet("no requests, and so no sizes, were seen yet")
        base = self._args.base if self._args.base in profiles else None
        rate = self.rate(now)
        return Job(
            kairos.Problem(
                [self._setting.types[k] for k in profiles],
                profiles,
                self._setting.slo_s,
                _thinned(sizes),
                self._args.budget_per_hour,
                self._args.xi,
                base,
            ),
            self._args,
            self._with_headroom(rate) if self._args.follow_load else None,
            rate,
            {k: self._limit(k) for k in profiles},
            self._rented(seen),
            self._setting.min_gain,
            self._setting.sustained,
        )

    def _with_headroom(self, rate: float) -> float:
        """Return a quantile of the arrivals in a second, if these are Poisson at `rate`."""
        return poisson_rate(rate, HEADROOM_QUANTILE, 1.0)

    def _limit(self, kind: str) -> int:
        paid = self._args.budget_per_hour / self._setting.types[kind].price_per_hour
        most = self._limits.get(kind, self._setting.limits[kind])
        return min(math.floor(paid + 1e-9), most)

    def _rented(self, seen: Seen) -> Configuration:
        if self._solved is not None:
            return dict(self._solved.counts)
        kinds = [says.kind for says in seen.workers.values()]
        return {k: kinds.count(k) for k in self._setting.types if k in kinds}

    def due(self, now: float, seen: Seen) -> str:
        if self._job is None:
            return FIRST
        if self._args != self._job.args:
            return "arguments changed"
        if any(self._limit(k) != most for k, most in self._job.limits.items()):
            return "limits changed"
        known = {k for _, k in seen.profiles if k in self._setting.types}
        if known != self._job.problem.profiles.keys():
            return "kinds of workers changed"
        if self._sizes.differ():
            return "sizes changed"
        if self._args.follow_load and self._rate.differs(now, self._job.planned_rate):
            return "demand changed"
        return ""

    def adopt(self, problem: Job, answer: Solved) -> Verdict:
        if len(self._sizes) >= _LEAST_SIZES:
            self._sizes.planned(np.asarray(problem.problem.sizes, dtype=np.int64))
        self._job, self._solved = problem, answer
        return Verdict(answer.why, answer.shortfall)

    # -- orders ----------------------------------------------------------------------

    def limit(self, kind: str, most: int) -> None:
        self._limits[kind] = most

    def target(self, kind: str) -> int | None:
        if self._solved is None or self._job is None:
            return None
        if kind not in self._job.problem.profiles:  # a type with unknown latency is not rented
            return None
        return self._solved.counts.get(kind, 0)

    def wanted(self, now: float, seen: Seen, hopeless: bool) -> dict[str, Wanted]:
        return dict.fromkeys(seen.workers, Wanted((), self._setting.variants))

    def inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "demand": self.rate(now),
            "budget_per_hour": self._args.budget_per_hour,
            "size_changes": self._sizes.changes,
        }
        if len(self._sizes):
            low, high = np.quantile(self._sizes.values(), (0.5, 0.95)).tolist()
            answer["sizes"] = {"seen": len(self._sizes), "p50": low, "p95": high}
        return answer

    def outcome(self) -> dict[str, Any]:
        if self._solved is None or self._job is None:
            return {}
        solved = self._solved._asdict()
        keys = ("counts", "cost_per_hour", "bound", "attained", "evaluated")
        return {
            "planned_budget_per_hour": self._job.args.budget_per_hour,
            **{key: solved[key] for key in keys},
        }


def _weighted(sizes: Mapping[int, float]) -> NDArray[np.int64]:
    """Return a sample of sizes, shape (n,), in which each size has about the share of its
    weight."""
    total = sum(sizes.values())
    counts = [max(round(_SAMPLE * weight / total), 1) for weight in sizes.values()]
    return np.repeat(np.array(list(sizes), dtype=np.int64), counts)


def _thinned(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return at most `_SAMPLE` quantiles of a sample of sizes. The largest size is one of them,
    because it must be served too."""
    if len(sizes) <= _SAMPLE:
        return sizes
    return np.quantile(sizes, np.linspace(0, 1, _SAMPLE), method="higher").astype(np.int64)
