"""The search by moves and swaps of models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.papers.partition.problem import Plan, Problem, SubCluster

Array = NDArray[Any]
_EPS = 1e-9
_PENALTY = 1e6  # weight of a broken limit, relative to squared deviations
_KICKS = 12  # number of restarts of the search from the disturbed best assignment
_STEPS = 4000  # largest number of steps of one descent


class Search:
    """Assignments of one problem's models to sub-clusters."""

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
            weight = weight or 1.0  # without any rate, only the memory is balanced
        self.weight = weight
        self.scale = self.mean_rate + weight * self.mean_static or 1.0
        count = len(models)
        self.current = np.array(problem.current or [-1] * count, int)
        cost = problem.change_cost or [1.0] * count
        self.cost = np.repeat(np.array(cost, float)[:, None], self.parts, axis=1)
        self.budget = problem.max_change_cost if problem.current is not None else math.inf
        # Cost of having model i in sub-cluster j: loading it there, and unloading it where it is.
        known = np.flatnonzero(self.current >= 0)
        self.change = self.cost.copy()
        self.change[known] += self.cost[known, self.current[known]][:, None]
        self.change[known, self.current[known]] = 0.0

    def bound(self) -> float:
        """Return a lower bound of the objective. It follows from the largest model, which has at
        best a separate sub-cluster. If there are fewer models than sub-clusters, it also follows
        from an empty sub-cluster."""
        few = len(self.rate) < self.parts
        rate = max(float(self.rate.max()) - self.mean_rate, self.mean_rate if few else 0.0)
        static = max(float(self.static.max()) - self.mean_static, self.mean_static if few else 0.0)
        return max(rate, 0.0) + self.weight * max(static, 0.0)

    def impossible(self) -> str:
        """Return the reason why no partition keeps the limits. It is "" if counting does not
        exclude one."""
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
        """Return the rate, the static memory and the largest dynamic memory of every
        sub-cluster."""
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
        """Return the cost of the change (10). Models in no sub-cluster have the cost of unloading
        them."""
        placed = np.flatnonzero(group >= 0)
        gone = np.flatnonzero((group < 0) & (self.current >= 0))
        return float(
            self.change[placed, group[placed]].sum() + self.cost[gone, self.current[gone]].sum()
        )

    def excess(self, rate: Array, static: Array, dynamic: Array) -> Array:
        """Return the excess over the limits, as a share of them. It is 0 if they are kept."""
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
        """Return the best assignment that keeps every limit, or None if none was found."""
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
            for power in (2, 8):  # with 8, nearly only the largest deviation counts
                group = self.descend(group, power)
                keeps = not self.excess(*self.totals(group)).any()
                keeps = keeps and self.changed(group) <= self.budget + _EPS
                if keeps and self.objective(group) < least:
                    best, least = group, self.objective(group)
            if least <= good:
                break
        return best

    def start(self, *, partly: bool = False) -> Array:
        """Return a first assignment. Each model, the largest first, goes to the sub-cluster where
        the result is most even. With `partly`, models that fit nowhere are left out (−1)."""
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
        """Make the best move or swap of the worst sub-cluster that has an improving one, until none
        has."""
        group = group.copy()
        spread = max(self.objective(group), _EPS * self.scale)

        def penalty(rate: Array, static: Array, dynamic: Array) -> Array:
            uneven = np.abs((rate - self.mean_rate) / spread) ** power
            uneven = uneven + np.abs(self.weight * (static - self.mean_static) / spread) ** power
            return np.asarray(uneven + _PENALTY * self.excess(rate, static, dynamic))

        bounded = self.budget < math.inf
        spent = self.changed(group)
        # A move is a swap with an empty model. There is one empty model per sub-cluster.
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
        """Return the largest dynamic memory of the other models in each model's sub-cluster, shape
        (models,)."""
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
        rate, static, _ = self.totals(group)
        parts = tuple(
            SubCluster(
                tuple(models[i].name for i in np.flatnonzero(group == j)),
                float(rate[j]),
                float(static[j]),
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
