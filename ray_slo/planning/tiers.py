"""One plan for hardware and accuracy: instances, variants and batches within a cost budget.

    problem = Problem(types, variants, demand=200.0, latency_slo_s=0.35, sizes=recent_sizes,
                      budget_per_hour=2.5)
    chosen = plan(problem)                       # all at once
    second = plan(problem, counts={"gpu": 3})    # variants for hardware that is there already

Kairos rents instances for one network. Loki chooses among networks on given hardware. The
combination gains more: on cheap instances, a smaller variant is fast enough for larger requests. So
the best pool for a mix of variants differs from that for the most accurate variant. The steps are
those of Loki (`ray_slo.planning.loki`):

1. *hardware*: the cheapest pool that serves the demand with the most accurate variant;
2. *accuracy*: if that is above the budget, the highest mean accuracy at the demand;
3. *share*: if no variants are fast enough, the largest share of it, with the highest accuracy.

Each step is a mixed-integer linear program. n(k, v) is the number of instances of type k that run
variant v. f(k, v, c) is the share of the requests that are of size class c and go to them:

    Σ_kv f(k, v, c) = share of c,   demand · Σ_c f(k, v, c)·t(k, v, c) ≤ load · n(k, v),
    Σ price_k · n(k, v) ≤ budget,   maximise Σ accuracy_v · f(k, v, c)

t is the time per request: ℓ(b·s) / b for size s in batches of b. For each type, variant and size,
the best b is the one with the least time of those that are fast enough. So batches need no
variables. In a batch of several requests, the waiting time counts as long as the execution (as in
Loki), and the requests must be in time.

*The Kairos bound as a cut.* Requests larger than size s need a type and variant that are fast
enough for them. Equation 12 with the fastest of those gives the least number of instances.
Instances are whole, so it may be rounded up:

    Σ n(k, v) over those that serve more than s  ≥  ⌈demand · E[min t; size > s] / load⌉

for every s at which one of them ends. The linear relaxation contains only the unrounded bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ray_slo.core.arguments import Above0, Share, check_fields
from ray_slo.core.cluster import Variant
from ray_slo.core.profiles import LatencyProfile
from ray_slo.planning.catalogue import InstanceType
from ray_slo.planning.kairos import Configuration
from ray_slo.planning.milp import Backend, Floats, Milp, Solution
from ray_slo.planning.result import Infeasible

Step = Literal["hardware", "accuracy", "share"]

_EPS = 1e-6
_CLASSES = 24
"""Number of size classes, in addition to those that begin where an instance is too slow."""

_PER_BUDGET = 1e-3
"""Points of accuracy that may be given up to save the whole budget. So of equally accurate plans,
the cheaper one is chosen."""


@dataclass(frozen=True)
class Problem:
    """The problem: requests, variants, instance types and a budget.

    Attributes:
        types: instance types to choose from.
        variants: variants, each with its accuracy and its profiles ℓ(items) by name of type. A type
            without a profile cannot run the variant.
        demand: requests per second.
        latency_slo_s: SLO of every request, in seconds.
        sizes: sizes of recent requests, shape (n,).
        budget_per_hour: upper limit of the cost.
        xi: share of the SLO that may be used, as in the policy.
        load: share of an instance's time that may be planned. Requests come at random, so no policy
            uses all of the time. The policy `kairos` reaches 0.92 of its bound with one variant.
        batch_sizes: requests per batch that the policy may form.
        waiting_factor: time of a batch of several requests including the wait, as a multiple of ℓ.
        backend, time_limit_s, relative_gap, seed: arguments of the solver, for each step.
    """

    types: Sequence[InstanceType]
    variants: Sequence[Variant]
    demand: Above0
    latency_slo_s: Above0
    sizes: Sequence[int] | NDArray[Any]
    budget_per_hour: Above0
    xi: Share = 0.98
    load: Share = 0.9
    batch_sizes: Sequence[int] = (1,)
    waiting_factor: Annotated[float, Field(ge=1)] = 2.0
    backend: Backend = "auto"
    time_limit_s: Above0 = 10.0
    relative_gap: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        for field, names in (
            ("types", [t.name for t in self.types]),
            ("variants", [v.name for v in self.variants]),
        ):
            if not names or len(set(names)) < len(names):
                raise ValueError(f"{field} must be different and at least one, got {names}")
        for variant in self.variants:
            if variant.accuracy is None:
                raise ValueError(f"variants: {variant.name!r} has no accuracy")
        check_fields(self)
        sizes = np.asarray(self.sizes)
        if sizes.ndim != 1 or len(sizes) == 0 or sizes.min() < 1:
            raise ValueError("sizes must be a non-empty list of sizes of at least 1")
        if 1 not in self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must have 1 and be positive, got {self.batch_sizes}")


@dataclass(frozen=True)
class Assignment:
    """Instances of one type that run one variant, and the requests per second that they serve."""

    type: str
    variant: str
    instances: int
    load: float
    accuracy: float


@dataclass(frozen=True)
class Plan:
    """What to rent, what to load on it, and why.

    Attributes:
        step: the step that found the plan.
        assignments: the rented instances.
        cost_per_hour: total cost.
        accuracy: mean accuracy over the served requests, in percent.
        shed_share: share of the demand that is not planned for.
        gap: relative gap of the objective. 0 means that the plan is proven optimal.
        explanation: the choice in words.
    """

    step: Step
    assignments: tuple[Assignment, ...]
    cost_per_hour: float
    accuracy: float
    shed_share: float
    gap: float
    explanation: str

    @property
    def counts(self) -> Configuration:
        """Number of instances by type."""
        made: dict[str, int] = {}
        for a in self.assignments:
            made[a.type] = made.get(a.type, 0) + a.instances
        return made


def plan(problem: Problem, counts: Mapping[str, int] | None = None) -> Plan | Infeasible[Plan]:
    """Return the instances and their variants with the highest accuracy within the budget.

    Args:
        counts: number of instances by type, if they are given. The budget is then ignored.

    Returns:
        The plan. `Infeasible` if the demand is too large, or if no variant is fast enough for some
        size. Its best effort serves the largest share of the demand.

    Raises:
        ValueError: `counts` has a type that the problem does not have.
    """
    names = [t.name for t in problem.types]
    if counts is not None and (unknown := set(counts) - set(names)):
        raise ValueError(f"counts must be of {', '.join(names)}, got {sorted(unknown)}")
    top = max(v.accuracy or 0.0 for v in problem.variants)
    best = _Program(replace(problem, variants=[v for v in problem.variants if v.accuracy == top]))
    if (solution := best.solve("hardware", counts)).found:
        return best.plan("hardware", solution)
    every = _Program(problem)
    solution = every.solve("accuracy", counts)
    if solution.found:
        return every.plan("accuracy", solution)
    proven = solution.status == "infeasible"
    most = every.solve("share", counts)
    served = min(float(most[every.served].sum()), 1.0) if most.found else 0.0
    made = every.plan("share", most)
    if served > _EPS:
        again = every.solve("accuracy", counts, served * (1 - _EPS))
        if again.found:
            made = every.plan("share", again)
    if not proven:
        return Infeasible("the solver stopped at its time limit without a plan", made, False)
    reason = f"{problem.demand:.5g} req/s at most {problem.budget_per_hour:g} per hour"
    if counts is not None:
        reason = f"{problem.demand:.5g} req/s on the instances given"
    return Infeasible(f"{reason}: {100 * made.shed_share:.3g} % cannot be served", made)


class _Program:
    """The program of one problem: kinds (k, v), size classes and times of requests."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kinds = [
            (k, v) for k in problem.types for v in problem.variants if k.name in v.profiles
        ]
        values, count = np.unique(np.asarray(problem.sizes, dtype=np.int64), return_counts=True)
        share = count / count.sum()
        times = np.array([self._times(v.profiles[k.name], values) for k, v in self.kinds])
        times = times.reshape(len(self.kinds), len(values))
        reach = np.isfinite(times).sum(axis=1)  # profiles are monotone
        # A size class ends at the largest size that an instance can serve in time.
        steps = np.searchsorted(np.cumsum(share), np.arange(_CLASSES) / _CLASSES, "right")
        edges = np.union1d(steps, np.append(reach, 0))
        edges = edges[edges < len(values)]
        self.share: Floats = np.add.reduceat(share, edges)
        self.times: Floats = np.add.reduceat(times * share, edges, axis=1) / self.share
        self.reach = np.searchsorted(edges, reach)

    def _times(self, profile: LatencyProfile, sizes: NDArray[np.int64]) -> Floats:
        """Return the seconds per request at the best batch size, shape (sizes,). It is `inf` for
        sizes that would be late."""
        problem = self.problem
        room = problem.xi * problem.latency_slo_s
        table, made = profile.table, np.full(len(sizes), np.inf)
        for b in problem.batch_sizes:
            items = b * sizes
            known = items <= len(table)
            latency = np.where(known, np.asarray(table)[np.minimum(items, len(table)) - 1], np.inf)
            late = latency * (problem.waiting_factor if b > 1 else 1.0) > room
            made = np.minimum(made, np.where(late, np.inf, latency / b))
        return made

    def solve(self, step: Step, counts: Mapping[str, int] | None, served: float = 1.0) -> Solution:
        """Solve one step. In the step "accuracy", the share `served` of the demand is served."""
        m = self.program(step, counts, served)
        p = self.problem
        return m.solve(p.backend, p.time_limit_s, p.relative_gap, p.seed)

    def program(self, step: Step, counts: Mapping[str, int] | None, served: float = 1.0) -> Milp:
        p = self.problem
        m = Milp("min" if step == "hardware" else "max")
        shape = self.times.shape
        self.n = m.variables("n: instances", shape[0], integer=True)
        fits = np.isfinite(self.times)
        self.f = m.variables("f: shares", shape, upper=np.where(fits, 1.0, 0.0))
        self.served = m.variables("served", shape[1], upper=self.share)
        m.block("every class", (1, self.f.T), (-1, self.served[:, None]), lower=0, upper=0)
        if step != "share":
            m.block("demand", (1, self.served), lower=served * (1 - 1e-9))
        time = np.where(fits, self.times, 0.0) * p.demand
        m.block("time", (time, self.f), (-p.load, self.n[:, None]), upper=0)
        price = np.array([k.price_per_hour for k, _ in self.kinds])
        if counts is None:
            m.block("budget", (price, self.n), upper=p.budget_per_hour)
        else:
            of = np.array([[k is t for k, _ in self.kinds] for t in p.types], float)
            most = [counts.get(t.name, 0) for t in p.types]
            m.block("hardware", (of, np.broadcast_to(self.n, of.shape)), upper=most)
        if step != "share" and served == 1:
            self._cut(m)
        accuracy = np.array([v.accuracy or 0.0 for _, v in self.kinds])
        if step == "hardware":
            m.objective((price, self.n))
        elif step == "accuracy":
            saved = -_PER_BUDGET * price / p.budget_per_hour
            m.objective((accuracy[:, None] / served, self.f), (saved, self.n))
        else:
            m.objective((1, self.served))
        return m

    def _cut(self, m: Milp) -> None:
        """Add Equation 12, rounded up, for the sizes that each type and variant cannot serve."""
        p = self.problem
        least = np.where(np.isfinite(fast := self.times.min(axis=0, initial=np.inf)), fast, 0.0)
        for r in sorted({0, *self.reach.tolist()}):
            able = self.reach > r
            needed = p.demand * float(self.share[r:] @ least[r:]) / p.load
            if able.any() and needed > _EPS:
                lower = math.ceil(needed - 1e-6)
                m.block(f"(12) beyond class {r}", (1, self.n[able]), lower=lower)

    def plan(self, step: Step, solution: Solution) -> Plan:
        """Return the plan of a solution, without unused instances."""
        p = self.problem
        f, n = np.zeros(self.times.shape), np.zeros(len(self.kinds), int)
        if solution.found:
            n = solution[self.n].round().astype(int)
            f = np.maximum(solution[self.f], 0.0) * (n > 0)[:, None]
        share = f.sum(axis=1)
        assignments = tuple(
            Assignment(k.name, v.name, i, p.demand * s, v.accuracy or 0.0)
            for (k, v), i, s in zip(self.kinds, n.tolist(), share.tolist(), strict=True)
            if i and s > _EPS
        )
        served = float(share.sum())
        accuracy = sum(a.load * a.accuracy for a in assignments) / max(p.demand * served, _EPS)
        price = {k.name: k.price_per_hour for k in p.types}
        cost = sum(price[a.type] * a.instances for a in assignments)
        gap = abs(solution.bound - solution.objective) / max(abs(solution.objective), 1e-9)
        shed = 1 - served if step == "share" and served < 1 - _EPS else 0.0
        made = Plan(
            step, assignments, cost, accuracy, shed, gap if math.isfinite(gap) else math.inf, ""
        )
        return replace(made, explanation=_explain(p, made))


def _explain(problem: Problem, made: Plan) -> str:
    said = {
        "hardware": "The most accurate variant suffices; the cheapest instances for it.",
        "accuracy": "The most accurate variant alone does not suffice.",
        "share": f"Not all demand can be served: {100 * made.shed_share:.3g} % is shed.",
    }[made.step]
    rented = ", ".join(f"{a.instances} {a.type} with {a.variant}" for a in made.assignments)
    return (
        f"{said} {problem.demand:.5g} req/s at {made.cost_per_hour:.4g} per hour, accuracy "
        f"{made.accuracy:.4g} %: {rented or 'nothing'}."
    )
