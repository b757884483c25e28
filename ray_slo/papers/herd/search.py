"""The search for a packing of models into groups."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.papers.herd.problem import Group, Plan, Problem

Array = NDArray[Any]
EPS = 1e-9
"""Tolerance for rounding errors of t·n and of sums of memory."""


@dataclass
class Bins:
    """A packing: the number of workers of each group, and the group of each model (−1: none)."""

    size: Array
    group: Array


class Search:
    """Packings of one problem, and bounds on them by counting."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.load = np.array([m.load for m in problem.models], float)
        self.memory = np.array([m.memory_mb for m in problem.models], float)
        self.set = np.unique([m.affinity_set for m in problem.models], return_inverse=True)[1]
        self.limit = min(problem.group_worker_limit, problem.workers)
        self.room = problem.memory_mb * (1 + EPS)

    def tolerances(self) -> Array:
        """Return the possible values of the least burst tolerance (workers / load), ascending."""
        loads = np.unique(self.load[self.load > 0])
        if not loads.size:
            return np.array([math.inf])
        values = np.unique(np.arange(1, self.limit + 1)[:, None] / loads)
        return np.asarray(values[values <= self.limit / loads.max() * (1 + EPS)])

    def need(self, t: float) -> Array:
        """Return the least number of workers of each model's group at tolerance t, shape
        (models,)."""
        if math.isinf(t):  # there is no load
            return np.ones(len(self.load), int)
        return np.asarray(np.maximum(np.ceil(t * self.load - EPS * 10).astype(int), 1))

    def possible(self, t: float, headroom: float) -> str:
        """Return the reason why no packing can reach t and headroom. It is "" if counting does not
        exclude it.

        The memory of all models that need s workers needs a number of groups with at least s
        workers. So the number of workers is at least Σ_s (groups of at least s).
        """
        need = self.need(t)
        if need.max() > self.limit:
            k = int(need.argmax())
            return f"model {self.problem.models[k].name!r} needs a group of {need[k]} workers"
        groups = workers = by_memory = 0
        for s in range(int(self.set.max()) + 1):
            mine = self.set == s
            of_size = np.array([self._fewest(mine & (need >= n)) for n in range(1, need.max() + 1)])
            load = headroom * float(self.load[mine].sum())
            by_memory += int(of_size[0])
            least = max(int(of_size[0]), math.ceil(load / self.limit - EPS))
            groups += least
            workers += max(int(of_size.sum()), math.ceil(load - EPS), least)
        if groups > self.problem.groups:
            what = "memory needs" if by_memory > self.problem.groups else "memory and load need"
            return f"{what} {groups} groups, at most {self.problem.groups} are allowed"
        if workers > self.problem.workers:
            return f"groups need {workers} workers, there are {self.problem.workers}"
        return ""

    def _fewest(self, mine: Array) -> int:
        """Return the least number of groups that the memory of these models needs. Models with more
        than half of the memory never share a group."""
        memory = self.memory[mine]
        total = math.ceil(float(memory.sum()) / self.problem.memory_mb - EPS)
        return max(total, int((memory > self.room / 2).sum()), int(mine.any()))

    def pack(self, t: float, headroom: float, *, partly: bool = False) -> Bins | None:
        """Return groups for every model, or None. With `partly`, return groups for as many models
        as fit, in order of load per MB."""
        need = self.need(t)
        if partly:
            density = self.load / np.maximum(self.memory, EPS)
            return self._pack(np.argsort(-density, kind="stable"), need, headroom, True)
        for order in (
            np.lexsort((-self.memory, -need)),
            np.lexsort((-need, -self.memory)),
            np.lexsort((-self.memory, -self.load)),
        ):
            if bins := self._pack(order, need, headroom, False):
                return bins
        return None

    def _pack(self, order: Array, need: Array, headroom: float, partly: bool) -> Bins | None:
        """Pack by best fit: choose the group that grows least, then the one with the least memory
        left."""
        most, limit, room = self.problem.groups, self.limit, self.room
        size = np.zeros(most, int)
        kind = np.full(most, -1)
        memory, load = np.zeros(most), np.zeros(most)
        group = np.full(len(order), -1)
        opened = used = 0
        for k in order.tolist():
            wanted = np.ceil(headroom * (load[:opened] + self.load[k]) - EPS * 10)
            grown = np.maximum(np.maximum(size[:opened], need[k]), wanted)
            cost = grown - size[:opened]
            cost[
                (kind[:opened] != self.set[k])
                | (memory[:opened] + self.memory[k] > room)
                | (grown > limit)
                | (used + cost > self.problem.workers)
            ] = math.inf
            j = -1
            if opened:
                cheapest = cost.min()
                if cheapest < math.inf:
                    j = int(np.where(cost == cheapest, memory[:opened], -1).argmax())
            if j < 0:
                new = max(int(need[k]), math.ceil(headroom * self.load[k] - EPS * 10))
                fits = self.memory[k] <= room and new <= limit
                if opened == most or not fits or used + new > self.problem.workers:
                    if partly:
                        continue
                    return None
                j, opened = opened, opened + 1
                kind[j] = self.set[k]
                grown, cost = np.append(grown, new), np.append(cost, new)
            used += int(cost[j])
            size[j] = int(grown[j])
            memory[j] += self.memory[k]
            load[j] += self.load[k]
            group[k] = j
        return Bins(size[:opened], group)

    def of_group(self, bins: Bins, values: Array) -> Array:
        placed = bins.group >= 0
        return np.bincount(bins.group[placed], values[placed], len(bins.size))

    def tolerance(self, bins: Bins) -> float:
        placed = (bins.group >= 0) & (self.load > 0)
        if not placed.any():
            return math.inf
        return float((bins.size[bins.group[placed]] / self.load[placed]).min())

    def headroom(self, bins: Bins) -> float:
        load = self.of_group(bins, self.load)
        return float((bins.size[load > 0] / load[load > 0]).min(initial=math.inf))

    def spend(self, bins: Bins) -> Bins:
        """Add spare workers one by one to the group with the least headroom."""
        size, load = bins.size.copy(), self.of_group(bins, self.load)
        queue = [
            (size[j] / load[j] if load[j] else math.inf, j)
            for j in range(len(size))
            if size[j] < self.limit
        ]
        heapq.heapify(queue)
        for _ in range(self.problem.workers - int(size.sum())):
            if not queue:
                break
            _, j = heapq.heappop(queue)
            size[j] += 1
            if size[j] < self.limit:
                heapq.heappush(queue, (size[j] / load[j] if load[j] else math.inf, j))
        return Bins(size, bins.group)

    def level(self, bins: Bins, t: float) -> Bins:
        """Return the same groups with their models divided again: the model with the largest load
        goes to the least loaded group, and so on."""
        need, kind = self.need(t), np.zeros(len(bins.size), int)
        kind[bins.group] = self.set
        memory, load = np.zeros(len(kind)), np.zeros(len(kind))
        group = np.empty_like(bins.group)
        for k in np.lexsort((-self.load, -need)).tolist():
            share = (load + self.load[k]) / bins.size
            share[
                (kind != self.set[k])
                | (bins.size < need[k])
                | (memory + self.memory[k] > self.room)
            ] = math.inf
            j = int(share.argmin())
            if share[j] == math.inf:
                return bins
            group[k] = j
            memory[j] += self.memory[k]
            load[j] += self.load[k]
        dealt = Bins(bins.size, group)
        return dealt if self.headroom(dealt) > self.headroom(bins) else bins

    def split(self, bins: Bins, t: float) -> Bins:
        """If all groups are at their limits, put the spare workers into new groups. Each takes
        models from the group with the least headroom for which this is possible. No burst tolerance
        falls, because no group shrinks. For the ILP, this makes no difference."""
        need, load = self.need(t), self.of_group(bins, self.load)
        size, group = bins.size.tolist(), bins.group.copy()
        spare = self.problem.workers - sum(size)
        queue = [(size[j] / load[j], j) for j in range(len(size)) if load[j]]
        heapq.heapify(queue)
        while queue and spare and len(size) < self.problem.groups:
            headroom, j = heapq.heappop(queue)
            sizes, loads = (size[j], min(self.limit, spare)), [0.0, 0.0]
            moved: list[int] = []
            members = np.flatnonzero(group == j)
            for k in members[np.lexsort((-self.load[members], -need[members]))].tolist():
                shares = [(loads[i] + self.load[k]) / sizes[i] for i in (0, 1)]
                i = int(shares[1] < shares[0] and need[k] <= sizes[1])
                loads[i] += self.load[k]
                if i:
                    moved.append(k)
            kept, new = (sizes[i] / loads[i] if loads[i] else math.inf for i in (0, 1))
            if not moved or min(kept, new) <= headroom:
                continue
            group[moved] = len(size)
            heapq.heappush(queue, (kept, j))
            heapq.heappush(queue, (new, len(size)))
            size.append(sizes[1])
            spare -= sizes[1]
        return self.spend(Bins(np.array(size), group))

    def balanced(self, bins: Bins, t: float) -> Bins:
        """Return groups with a tolerance of at least t, and as much headroom as the search
        finds."""
        best = self.spend(bins)
        best = self.level(best, t)
        total = float(self.load.sum())
        low, high = self.headroom(best), self.problem.workers / total if total else math.inf
        if math.isinf(low):
            return best
        for _ in range(8):
            if high <= low * 1.005:
                break
            middle = (low + high) / 2
            other = self.pack(t, middle)
            if other is None:
                high = middle
                continue
            other = self.level(self.spend(other), t)
            reached = self.headroom(other)
            if reached > low:
                best, low = other, reached
            else:
                high = middle
        return self.split(best, t)

    def to_plan(self, bins: Bins, bound: float, how: str) -> Plan:
        models = self.problem.models
        load = self.of_group(bins, self.load)
        members = [np.flatnonzero(bins.group == j) for j in range(len(bins.size))]
        order = sorted(
            (j for j in range(len(members)) if len(members[j])),
            key=lambda j: (-int(bins.size[j]), int(members[j][0])),
        )
        groups = tuple(
            Group(int(bins.size[j]), tuple(models[k].name for k in members[j]), float(load[j]))
            for j in order
        )
        spare = self.problem.workers - sum(g.workers for g in groups)
        tolerance = self.tolerance(bins)
        unplaced = tuple(models[k].name for k in np.flatnonzero(bins.group < 0))
        return Plan(
            groups,
            tolerance,
            max(bound, tolerance),
            spare,
            unplaced,
            self._explain(groups, tolerance, max(bound, tolerance), spare, unplaced, how),
        )

    def _explain(
        self,
        groups: Sequence[Group],
        tolerance: float,
        bound: float,
        spare: int,
        unplaced: Sequence[str],
        how: str,
    ) -> str:
        by_name = {m.name: m for m in self.problem.models}
        said = [f"{len(self.load) - len(unplaced)} models in {len(groups)} groups, {how}."]
        pairs = [(g, by_name[name]) for g in groups for name in g.models if by_name[name].load]
        if pairs:
            group, worst = min(pairs, key=lambda p: p[0].workers / p[1].load)
            said.append(
                f"The least burst tolerance is {tolerance:.3g}: model {worst.name!r} needs "
                f"{worst.load:.3g} workers on average and its group has {group.workers} (limit "
                f"{self.problem.group_worker_limit})"
                + (f"; no plan exceeds {bound:.3g}." if bound > tolerance else ".")
            )
        short = [g for g in groups if g.headroom < 1]
        if short:
            worst_group = min(short, key=lambda g: g.headroom)
            said.append(
                f"{len(short)} of them have fewer workers than their average load needs; the worst "
                f"has {worst_group.workers} for {worst_group.load:.3g}."
            )
        if unplaced:
            said.append(f"In no group: {', '.join(unplaced[:5])}{', …' * (len(unplaced) > 5)}.")
        if spare:
            said.append(f"{spare} workers are spare: every group is at its limit of workers.")
        return " ".join(said)
