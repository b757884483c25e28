"""Sub-cluster partitioning: models → sub-clusters of equal load and memory (Symphony §4.4, App. A).

Every worker of a sub-cluster holds all its models and one dispatcher thread drives it, so rate and
memory are bounded and should be even:

    minimise ΔR + w·ΔS                                       (3)
    Σ_i r_i x_ij ≤ R_max,  Σ_i s_i x_ij + max_i d_i x_ij ≤ S_max    (4, 5)
    |Σ_i r_i x_ij − R̄| ≤ ΔR,  |Σ_i s_i x_ij − S̄| ≤ ΔS        (6, 7)
    Σ_j x_ij = 1,  x binary                                  (8, 9)
    Σ_ij c_ij |x_ij − x'_ij| ≤ C_max                         (10)

Worked example: rates 5, 4, 3, 2 and equal memory over two sub-clusters: {5, 2} and {4, 3}.

    >>> models = [Model(n, rate=r, static_mb=10) for n, r in zip("abcd", [5, 4, 3, 2])]
    >>> p = plan(Problem(tuple(models), sub_clusters=2))
    >>> sorted(s.models for s in p.sub_clusters), p.rate_spread, p.gap
    ([('a', 'd'), ('b', 'c')], 0.0, 0.0)

How it is solved. A start (the current assignment, else longest processing time first) is improved
by moves and swaps of models, all of one sub-cluster evaluated at once, on a smooth stand-in for the
objective; where that ends further from the bound than `tolerance`, the MILP (`program`) is solved
for at most `time_limit_s` and the better of both is taken. Hundreds of models are even to a
fraction of a percent by the search alone; few and large ones are what the MILP is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.planning.milp import Backend, Indices, Milp
from ray_slo.planning.result import Infeasible

Array = NDArray[Any]
_EPS = 1e-9
_PENALTY = 1e6  # of a broken limit, beside squared deviations
_KICKS = 12  # restarts of the search from a disturbed best
_STEPS = 4000  # of one descent, at most


@dataclass(frozen=True)
class Model:
    """`rate` in requests per second, memory of its weights and of its execution in MB."""

    name: str
    rate: float
    static_mb: float
    dynamic_mb: float = 0.0


@dataclass(frozen=True)
class Problem:
    """What is to be partitioned.

    Args:
        models: m models.
        sub_clusters: l.
        max_rate: R_max, requests per second that one dispatcher can handle.
        max_memory_mb: S_max, memory of a worker.
        memory_weight: w, requests per second that a MB of ΔS counts as; R̄ / S̄ when None, where both
            spreads count as shares of their averages.
        current: (m,) sub-cluster of each model now, −1 for a new one; None at the start.
        change_cost: c, cost of loading or unloading a model: (m,), or (m, l) rows; 1 when None.
        max_change_cost: C_max.
        tolerance: spread, as a share of the averages, below which the search is good enough.
        time_limit_s: for the MILP; 0 leaves it out.

    Raises:
        ValueError: naming the field.
    """

    models: tuple[Model, ...]
    sub_clusters: int
    max_rate: float = math.inf
    max_memory_mb: float = math.inf
    memory_weight: float | None = None
    current: tuple[int, ...] | None = None
    change_cost: tuple[float, ...] | tuple[tuple[float, ...], ...] | None = None
    max_change_cost: float = math.inf
    tolerance: float = 1e-3
    time_limit_s: float = 10.0
    backend: Backend = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        count, parts = len(self.models), self.sub_clusters
        if not count:
            raise ValueError("models must not be empty")
        if len({m.name for m in self.models}) < count:
            raise ValueError("models must have names of their own")
        if parts < 1:
            raise ValueError(f"sub_clusters must be at least 1, got {parts}")
        for m in self.models:
            for field in ("rate", "static_mb", "dynamic_mb"):
                if not 0 <= getattr(m, field) < math.inf:
                    raise ValueError(
                        f"{field} of model {m.name!r} must be at least 0, got {getattr(m, field)}"
                    )
        for field in ("max_rate", "max_memory_mb", "max_change_cost", "tolerance", "time_limit_s"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} must be at least 0, got {getattr(self, field)}")
        if self.memory_weight is not None and not 0 <= self.memory_weight < math.inf:
            raise ValueError(f"memory_weight must be at least 0, got {self.memory_weight}")
        if self.current is not None:
            if len(self.current) != count:
                raise ValueError(f"current has {len(self.current)} entries for {count} models")
            if bad := [j for j in self.current if not -1 <= j < parts]:
                raise ValueError(
                    f"current: no sub-cluster {bad[0]} among {parts} (−1 is a new model)"
                )
        if self.change_cost is not None:
            cost = np.asarray(self.change_cost, float)
            if cost.shape not in ((count,), (count, parts)) or not (cost >= 0).all():
                raise ValueError(
                    f"change_cost must be at least 0 and of shape ({count},) or "
                    f"({count}, {parts}), got shape {cost.shape}"
                )


@dataclass(frozen=True)
class SubCluster:
    """`memory_mb`: static memory of all models and the largest dynamic one."""

    models: tuple[str, ...]
    rate: float
    static_mb: float
    memory_mb: float


@dataclass(frozen=True)
class Plan:
    """`rate_spread` and `memory_spread` are ΔR and ΔS, `objective` is ΔR + w·ΔS, and no partition
    has one below `bound`. `gap` is their distance as a share of R̄ + w·S̄. `moved`: models that are
    loaded elsewhere than now."""

    sub_clusters: tuple[SubCluster, ...]
    rate_spread: float
    memory_spread: float
    objective: float
    bound: float
    gap: float
    moved: tuple[str, ...]
    change_cost: float
    unplaced: tuple[str, ...]
    explanation: str

    @property
    def load_imbalance(self) -> float:
        """(max − min) / average of the rates (Figure 16)."""
        return _imbalance([s.rate for s in self.sub_clusters])

    @property
    def memory_imbalance(self) -> float:
        """(max − min) / average of the static memory (Figure 16)."""
        return _imbalance([s.static_mb for s in self.sub_clusters])


def _imbalance(values: list[float]) -> float:
    average = sum(values) / len(values)
    return (max(values) - min(values)) / average if average else 0.0


def plan(problem: Problem) -> Plan | Infeasible[Plan]:
    """The partition with the least objective, or as near to it as its `gap` says."""
    search = _Search(problem)
    bound, scale = search.bound(), search.scale
    why = search.impossible()
    best = None if why else search.run()
    how = "moves and swaps"
    status = "infeasible" if why else "unknown"
    good = best is not None and search.objective(best) - bound <= problem.tolerance * scale
    if not why and not good and problem.time_limit_s > 0:
        milp, x = program(problem)
        solution = milp.solve(problem.backend, problem.time_limit_s, seed=problem.seed)
        status = solution.status
        if math.isfinite(solution.bound):
            bound = max(bound, solution.bound)
        if solution.found:
            exact = solution[x].argmax(axis=1)
            if best is None or search.objective(exact) < search.objective(best):
                best, how = exact, "the MILP"
        if status == "infeasible":
            limits = ("(4) rate limit", "(5) memory limit", "(10) change cost")
            clash = milp.conflicts(problem.backend, problem.time_limit_s / 3, among=limits)
            why = "the MILP has no solution" + f" because of {' and '.join(clash)}" * bool(clash)
    if best is not None:
        return search.to_plan(best, bound, how)
    return _infeasible(problem, search, why, proven=status == "infeasible")


def program(problem: Problem) -> tuple[Milp, Indices]:
    """The MILP of Symphony Appendix A, and x (models, sub-clusters)."""
    search = _Search(problem)
    rate, static, dynamic = search.rate, search.static, search.dynamic
    count, parts = len(rate), problem.sub_clusters
    m = Milp("min")
    x = m.variables("x: model in sub-cluster", (count, parts), upper=1, integer=True)  # (9)
    spread = m.variables("ΔR, ΔS", 2)
    largest = m.variables("max d", parts)
    m.objective((1, spread[:1]), (search.weight, spread[1:]))
    m.block("(4) rate limit", (rate, x.T), upper=problem.max_rate)
    m.block("(5) memory limit", (static, x.T), (1, largest[:, None]), upper=problem.max_memory_mb)
    m.block(
        "(5) largest dynamic memory",
        (dynamic[:, None, None], x[..., None]),
        (-1, largest[:, None]),
        upper=0,
    )
    for name, amount, k in (("(6) rate balance", rate, 0), ("(7) memory balance", static, 1)):
        of_part = np.broadcast_to(spread[k], (parts, 1))
        average = float(amount.sum()) / parts
        m.block(f"{name}: above", (amount, x.T), (-1, of_part), upper=average)
        m.block(f"{name}: below", (amount, x.T), (1, of_part), lower=average)
    m.block("(8) one sub-cluster", (1, x), lower=1, upper=1)
    if search.budget < math.inf:
        now = np.zeros((count, parts))
        known = np.flatnonzero(search.current >= 0)
        now[known, search.current[known]] = 1
        y = m.variables("y: change", (count, parts), upper=1)
        m.block("(10) change: load", (1, y[..., None]), (-1, x[..., None]), lower=-now)
        m.block("(10) change: unload", (1, y[..., None]), (1, x[..., None]), lower=now)
        m.block("(10) change cost", (search.cost.ravel(), y.ravel()), upper=search.budget)
    else:  # sub-clusters are interchangeable: model i goes to one of the first i + 1
        i, j = np.triu_indices(count, 1, parts)
        if len(i):
            m.block("sub-clusters in order", (1, x[i, j][:, None]), upper=0)
    return m, x


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem, models = problem, problem.models
        self.parts = problem.sub_clusters
        self.rate = np.array([m.rate for m in models], float)
        self.static = np.array([m.static_mb for m in models], float)
        self.dynamic = np.array([m.dynamic_mb for m in models], float)
        self.mean_rate = float(self.rate.sum()) / self.parts
        self.mean_static = float(self.static.sum()) / self.parts
        weight = problem.memory_weight
        if weight is None:
            weight = self.mean_rate / self.mean_static if self.mean_static else 0.0
            weight = weight or 1.0  # no rate at all: memory is all there is to balance
        self.weight = weight
        self.scale = self.mean_rate + weight * self.mean_static or 1.0
        count = len(models)
        self.current = np.array(problem.current or [-1] * count, int)
        given = np.asarray(1.0 if problem.change_cost is None else problem.change_cost, float)
        self.cost = np.broadcast_to(
            given[:, None] if given.ndim == 1 else given, (count, self.parts)
        )
        self.budget = problem.max_change_cost if problem.current is not None else math.inf
        # What it costs to have model i in sub-cluster j: load there, unload where it is now.
        known = np.flatnonzero(self.current >= 0)
        self.change = self.cost.copy()
        self.change[known] += self.cost[known, self.current[known]][:, None]
        self.change[known, self.current[known]] = 0.0

    def bound(self) -> float:
        """What no partition can do better: the largest model in a sub-cluster of its own, and an
        empty sub-cluster where there are fewer models than those."""
        few = len(self.rate) < self.parts
        rate = max(float(self.rate.max()) - self.mean_rate, self.mean_rate if few else 0.0)
        static = max(float(self.static.max()) - self.mean_static, self.mean_static if few else 0.0)
        return max(rate, 0.0) + self.weight * max(static, 0.0)

    def impossible(self) -> str:
        """Why no partition keeps the limits, or "" where counting does not rule it out."""
        problem = self.problem
        for m in problem.models:
            if m.rate > problem.max_rate:
                return (
                    f"model {m.name!r} has {m.rate:g} requests/s, max_rate is {problem.max_rate:g}"
                )
            if m.static_mb + m.dynamic_mb > problem.max_memory_mb:
                return (
                    f"model {m.name!r} needs {m.static_mb + m.dynamic_mb:g} MB, max_memory_mb is "
                    f"{problem.max_memory_mb:g}"
                )
        for what, total, limit in (
            ("requests/s", float(self.rate.sum()), problem.max_rate),
            ("MB", float(self.static.sum()), problem.max_memory_mb),
        ):
            if total > limit * self.parts * (1 + _EPS):
                return (
                    f"the models have {total:g} {what}, {self.parts} sub-clusters take "
                    f"{limit * self.parts:g}"
                )
        return ""

    def totals(self, group: Array) -> tuple[Array, Array, Array]:
        """Rate, static and largest dynamic memory of every sub-cluster."""
        placed = group >= 0
        dynamic = np.zeros(self.parts)
        np.maximum.at(dynamic, group[placed], self.dynamic[placed])
        rate, static = (
            np.bincount(group[placed], values[placed], self.parts)
            for values in (self.rate, self.static)
        )
        return rate, static, dynamic

    def spreads(self, group: Array) -> tuple[float, float]:
        rate, static, _ = self.totals(group)
        return (
            float(np.abs(rate - self.mean_rate).max()),
            float(np.abs(static - self.mean_static).max()),
        )

    def objective(self, group: Array) -> float:
        rate, static = self.spreads(group)
        return rate + self.weight * static

    def changed(self, group: Array) -> float:
        """Cost of the change (10); models in no sub-cluster cost what unloading them costs."""
        placed = np.flatnonzero(group >= 0)
        gone = np.flatnonzero((group < 0) & (self.current >= 0))
        return float(
            self.change[placed, group[placed]].sum() + self.cost[gone, self.current[gone]].sum()
        )

    def excess(self, rate: Array, static: Array, dynamic: Array) -> Array:
        """By how much limits are broken, as a share of them; 0 where they are kept."""
        over = np.zeros(np.broadcast(rate, static).shape)
        for amount, limit in (
            (rate, self.problem.max_rate),
            (static + dynamic, self.problem.max_memory_mb),
        ):
            if 0 < limit < math.inf:
                over = over + np.maximum(amount / limit - 1 - _EPS, 0.0)
            elif limit == 0:
                over = over + amount
        return over

    def run(self) -> Array | None:
        """The best assignment found that keeps every limit, or None."""
        rng = np.random.default_rng(self.problem.seed)
        good = self.bound() + self.problem.tolerance * self.scale
        best: Array | None = None
        least = math.inf
        start = self.start()
        for kick in range(_KICKS + 1):
            group = start if best is None else best
            if kick:
                group = group.copy()
                chosen = rng.choice(len(group), max(2, len(group) // 20), replace=True)
                group[chosen] = rng.permutation(group[chosen])
                group[chosen[0]] = rng.integers(self.parts)
                if self.changed(group) > self.budget + _EPS:
                    continue
            for power in (2, 8):  # 8: nearly the largest deviation
                group = self.descend(group, power)
                keeps = not self.excess(*self.totals(group)).any()
                keeps = keeps and self.changed(group) <= self.budget + _EPS
                if keeps and self.objective(group) < least:
                    best, least = group, self.objective(group)
            if least <= good:
                break
        return best

    def start(self, *, partly: bool = False) -> Array:
        """Largest first into the sub-cluster that it leaves most even; with `partly`, models that
        fit nowhere stay out (−1)."""
        group = np.full(len(self.rate), -1) if partly else self.current.copy()
        rate, static, dynamic = self.totals(group)
        share = self.rate / (self.mean_rate or 1) + self.static / (self.mean_static or 1)
        for i in np.argsort(-share, kind="stable"):
            if group[i] >= 0:
                continue
            after = (rate + self.rate[i], static + self.static[i])
            over = self.excess(*after, np.maximum(dynamic, self.dynamic[i]))
            even = rate * self.rate[i] / (self.mean_rate**2 or 1)
            even = even + static * self.static[i] / (self.mean_static**2 or 1)
            j = int((even + _PENALTY * over).argmin())
            if partly and over[j] > 0:
                continue
            group[i] = j
            rate[j] += self.rate[i]
            static[j] += self.static[i]
            dynamic[j] = max(dynamic[j], self.dynamic[i])
        return group

    def descend(self, group: Array, power: int) -> Array:
        """Best moves and swaps of the worst sub-cluster that has one, until none has."""
        group = group.copy()
        spread = max(self.objective(group), _EPS * self.scale)

        def penalty(rate: Array, static: Array, dynamic: Array) -> Array:
            uneven = np.abs((rate - self.mean_rate) / spread) ** power
            uneven = uneven + np.abs(self.weight * (static - self.mean_static) / spread) ** power
            return np.asarray(uneven + _PENALTY * self.excess(rate, static, dynamic))

        bounded = self.budget < math.inf
        spent = self.changed(group)
        # Moving a model alone is swapping it with nothing: one such "model" per sub-cluster.
        nothing = np.zeros(self.parts)
        rates, statics, dynamics = (
            np.concatenate([a, nothing]) for a in (self.rate, self.static, self.dynamic)
        )
        for _ in range(_STEPS):
            rate, static, dynamic = self.totals(group)
            now = penalty(rate, static, dynamic)
            where = np.concatenate([group, np.arange(self.parts)])
            rest = np.concatenate([self.dynamic_of_others(group), dynamic])
            for a in np.argsort(-now, kind="stable"):
                mine = np.flatnonzero(group == a)[:, None]
                others = np.flatnonzero(where != a)[None, :]
                b = where[others]
                d_rate, d_static = rates[others] - rates[mine], statics[others] - statics[mine]
                gain = (now[a] + now[b]) - (
                    penalty(
                        rate[a] + d_rate,
                        static[a] + d_static,
                        np.maximum(rest[mine], dynamics[others]),
                    )
                    + penalty(
                        rate[b] - d_rate,
                        static[b] - d_static,
                        np.maximum(rest[others], dynamics[mine]),
                    )
                )
                if not gain.size:
                    continue
                if bounded:
                    change = np.vstack([self.change, np.zeros((self.parts, self.parts))])
                    more = change[mine, b] - change[mine, a] + change[others, a] - change[others, b]
                    gain = np.where(spent + more <= self.budget + _EPS, gain, -math.inf)
                i, k = np.unravel_index(int(gain.argmax()), gain.shape)
                if gain[i, k] > 1e-7 * now[a]:
                    model, other = int(mine[i, 0]), int(others[0, k])
                    group[model] = where[other]
                    if other < len(group):
                        group[other] = a
                    spent = self.changed(group)
                    break
            else:
                break
        return group

    def dynamic_of_others(self, group: Array) -> Array:
        """Largest dynamic memory in each model's sub-cluster without the model itself."""
        if not self.dynamic.any():
            return np.zeros(len(group))
        order = np.lexsort((-self.dynamic, group))
        first = np.r_[True, np.diff(group[order]) > 0]
        largest = order[first]
        second = np.zeros(self.parts)
        follows = np.r_[False, first[:-1]] & ~first
        second[group[order[follows]]] = self.dynamic[order[follows]]
        top = np.zeros(self.parts)
        top[group[largest]] = self.dynamic[largest]
        rest = top[group]
        rest[largest] = second[group[largest]]
        return np.asarray(rest)

    def to_plan(self, group: Array, bound: float, how: str) -> Plan:
        models = self.problem.models
        rate, static, dynamic = self.totals(group)
        parts = tuple(
            SubCluster(
                tuple(models[i].name for i in np.flatnonzero(group == j)),
                float(rate[j]),
                float(static[j]),
                float(static[j] + dynamic[j]),
            )
            for j in range(self.parts)
        )
        rate_spread, static_spread = self.spreads(group)
        objective = rate_spread + self.weight * static_spread
        bound = min(bound, objective)
        moved = np.flatnonzero((self.current >= 0) & (group != self.current))
        gap = (objective - bound) / self.scale
        unplaced = tuple(models[i].name for i in np.flatnonzero(group < 0))
        said = [
            f"{len(models) - len(unplaced)} models in {self.parts} sub-clusters, by {how}: rates "
            f"within {_share(rate_spread, self.mean_rate)} and memory within "
            f"{_share(static_spread, self.mean_static)} of the average",
            "proven best." if gap <= 1e-6 else f"at most {gap:.2%} of the averages from the best.",
        ]
        if self.problem.current is not None:
            said.append(f"{len(moved)} models move, at a cost of {self.changed(group):g}.")
        if unplaced:
            said.append(f"In none: {', '.join(unplaced[:5])}{', …' * (len(unplaced) > 5)}.")
        return Plan(
            parts,
            rate_spread,
            static_spread,
            objective,
            bound,
            gap,
            tuple(models[i].name for i in moved),
            self.changed(group) if self.problem.current is not None else 0.0,
            unplaced,
            f"{said[0]}, {' '.join(said[1:])}",
        )


def _share(spread: float, average: float) -> str:
    return f"{spread / average:.2%}" if average else "0%"


def _infeasible(problem: Problem, search: _Search, why: str, proven: bool) -> Infeasible[Plan]:
    if search.budget < math.inf:
        free = plan(replace(problem, max_change_cost=math.inf))
        if isinstance(free, Plan):
            reason = (
                f"max_change_cost {problem.max_change_cost:g} is too small: the best partition "
                f"without it costs {free.change_cost:g}"
            )
            return Infeasible(reason, free, proven)
        return free
    group = search.start(partly=True)
    effort = search.to_plan(group, 0.0, "largest first, as many as fit")
    return Infeasible(why or "no partition that keeps the limits was found", effort, proven)
