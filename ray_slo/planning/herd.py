"""HERD: streams → model-streams → serving groups (SHEPHERD §3.1, §4).

Single streams cannot be predicted, groups of hundreds can; one scheduler cannot drive thousands of
workers, but it can drive a group. HERD shares workers and models out to groups such that the model
that is worst off can still grow the most: it maximises the least *burst tolerance*

    bt(k) = workers of k's group / n_k,    n_k = workers that k's average load needs

subject to (a) the cluster's size, (b) the workers one scheduler can drive, (c) the memory of a
worker, which holds every model of its group, (d) one group per model, and (e) only similar models
(by the affinity K of §5.2, Eq. 3) in one group.

Worked example: loads of 4, 1 and 1 workers, 12 workers, at most 8 in a group, memory for two
models. The big model gets 8 workers (bt 2), the small ones share 4 (bt 4 each): bt = 2, and every
group has twice the workers that its average load needs.

    >>> models = [ModelStream(n, load, memory_mb=1) for n, load in [("a", 4), ("b", 1), ("c", 1)]]
    >>> p = plan(Problem(tuple(models), workers=12, group_worker_limit=8, memory_mb=2))
    >>> p.burst_tolerance, p.gap, [(g.workers, g.models) for g in p.groups]
    (2.0, 0.0, [(8, ('a',)), (4, ('b', 'c'))])

How it is solved. For a given tolerance t, model k needs a group of at least ⌈t·n_k⌉ workers: what
is left is bin packing where a bin costs its largest need. Best-fit packing gives plans, counting
how much memory needs groups of each size gives a bound, and bisection over the finitely many t that
matter closes in from both sides. Where they do not meet and the instance is small, the ILP itself
(`program`) decides; else the gap is stated. The published ILP says nothing about the *sum* of the
loads in a group, so a second bisection makes the least headroom (workers / load of a group) as
large as the search finds at that tolerance; `min_headroom` makes it a constraint. Workers that are
still spare when all groups are at their limits make new groups, which relieve those with the least
headroom. A model has one group: streams that need more than Ḡ workers take several model-streams.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_slo.planning.milp import Backend, Indices, Milp
from ray_slo.planning.result import Infeasible

Array = NDArray[Any]
_EPS = 1e-9  # rounding of t·n and of sums of memory


@dataclass(frozen=True)
class ModelStream:
    """All streams of one model. `load`: workers that its average load needs, Σ rate_i / T_i."""

    name: str
    load: float
    memory_mb: float
    affinity_set: int = 0


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Args:
        models: the model-streams (`aggregate` makes their loads from streams).
        workers: N, workers in the cluster.
        group_worker_limit: Ḡ, workers that one scheduler can drive.
        memory_mb: a worker's memory for models.
        max_groups: at most so many groups; as many as there are workers when None.
        min_headroom: every group has at least so many workers per worker of average load. 0 is the
            published ILP, which allows groups that cannot sustain even their average.
        exact_cells: where bound and plan do not meet, solve the ILP if models × groups is at most
            this, for at most `time_limit_s`, with `backend` and `seed`.

    Raises:
        ValueError: naming the field.
    """

    models: tuple[ModelStream, ...]
    workers: int
    group_worker_limit: int
    memory_mb: float
    max_groups: int | None = None
    min_headroom: float = 0.0
    exact_cells: int = 150
    time_limit_s: float = 10.0
    backend: Backend = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models must not be empty")
        if len({m.name for m in self.models}) < len(self.models):
            raise ValueError("models must have names of their own")
        for field in ("workers", "group_worker_limit"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.max_groups is not None and self.max_groups < 1:
            raise ValueError(f"max_groups must be at least 1, got {self.max_groups}")
        for field in ("min_headroom", "time_limit_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} must be at least 0, got {getattr(self, field)}")
        if not self.memory_mb > 0:
            raise ValueError(f"memory_mb must be positive, got {self.memory_mb}")
        for m in self.models:
            if not 0 <= m.load < math.inf:
                raise ValueError(f"load of model {m.name!r} must be at least 0, got {m.load}")
            if not 0 <= m.memory_mb < math.inf:
                raise ValueError(
                    f"memory_mb of model {m.name!r} must be at least 0, got {m.memory_mb}"
                )

    @property
    def groups(self) -> int:
        most = min(self.workers, len(self.models))
        return most if self.max_groups is None else min(self.max_groups, most)


@dataclass(frozen=True)
class Group:
    """`load`: workers that the average load of all its models needs."""

    workers: int
    models: tuple[str, ...]
    affinity_set: int
    memory_mb: float
    load: float

    @property
    def headroom(self) -> float:
        """Workers per worker of average load: below 1 the group is overloaded on average."""
        return self.workers / self.load if self.load else math.inf


@dataclass(frozen=True)
class Plan:
    """`bound`: no plan has a larger least burst tolerance. `unplaced`: models in no group (only
    in the best effort of an infeasible problem)."""

    groups: tuple[Group, ...]
    burst_tolerance: float
    bound: float
    spare_workers: int
    unplaced: tuple[str, ...]
    explanation: str

    @property
    def gap(self) -> float:
        """Share by which the best plan may be better; 0 is proven optimal."""
        if self.bound <= self.burst_tolerance:
            return 0.0
        return self.bound / self.burst_tolerance - 1 if self.burst_tolerance else math.inf

    @property
    def headroom(self) -> float:
        return min((g.headroom for g in self.groups), default=math.inf)


def aggregate(model_of_stream: ArrayLike, rates: ArrayLike, throughput: ArrayLike) -> Array:
    """Loads n_k of the model-streams, in workers (SHEPHERD §4, first step).

    Args:
        model_of_stream: (streams,) index of the model that a stream asks for.
        rates: (streams,) average requests per second.
        throughput: T_i, largest goodput on one worker, requests per second: (streams,) or, where
            it depends on the model alone, (models,).

    Returns:
        (models,) Σ rate_i / T_i over the streams of each model. The burst tolerance of a
        model-stream is a lower bound of that of every stream in it.
    """
    model, rate = np.asarray(model_of_stream), np.asarray(rates, float)
    limit = np.asarray(throughput, float)
    if model.shape != rate.shape or model.ndim != 1:
        raise ValueError(f"rates: {rate.shape} rates for {model.shape} streams")
    if limit.min(initial=math.inf) <= 0:
        raise ValueError(f"throughput must be positive, got {limit.min()}")
    if limit.shape == model.shape:
        return np.bincount(model, rate / limit)
    return np.asarray(np.bincount(model, rate, len(limit)) / limit)


def affinity(alpha: ArrayLike, beta: ArrayLike) -> Array:
    """A(m_i, m_j) for ℓ(b) = α·b + β, (models, models) (SHEPHERD §5.2, Eq. 3)."""
    a, b = np.asarray(alpha, float), np.asarray(beta, float)
    if a.min() <= 0 or b.min() < 0:
        raise ValueError("alpha must be positive and beta at least 0")
    single = (a + b)[:, None] / a
    rest = a + b - b[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        paired = np.minimum(single, np.maximum(a[:, None] / rest, a[:, None] / a))
    return np.asarray(np.where(rest <= 0, single, paired))


def affinity_sets(alpha: ArrayLike, beta: ArrayLike, k: float) -> list[int]:
    """A set per model such that any two models of a set have an affinity of at most `k` ≥ 1, both
    ways (complete linkage; the fewest sets would be NP-hard)."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    matrix = affinity(alpha, beta)
    if len(matrix) == 1:
        return [0]
    from scipy.cluster.hierarchy import fcluster, linkage  # every replica imports this module
    from scipy.spatial.distance import squareform

    distance = squareform(np.maximum(matrix, matrix.T), checks=False)  # drops the diagonal
    labels: Array = fcluster(linkage(distance, "complete"), k, "distance")
    return [int(label) - 1 for label in labels]


def plan(problem: Problem) -> Plan | Infeasible[Plan]:
    """The plan with the largest least burst tolerance, or as near to it as its `gap` says."""
    search = _Search(problem)
    found = _best(search)
    if isinstance(found, str):
        return _infeasible(problem, search, found)
    bins, bound, how = found
    return search.to_plan(bins, bound, how)


@dataclass
class _Bins:
    """A packing: sizes in workers and the group of each model (−1: unplaced)."""

    size: Array
    group: Array


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.load = np.array([m.load for m in problem.models], float)
        self.memory = np.array([m.memory_mb for m in problem.models], float)
        self.set = np.unique([m.affinity_set for m in problem.models], return_inverse=True)[1]
        self.limit = min(problem.group_worker_limit, problem.workers)
        self.room = problem.memory_mb * (1 + _EPS)

    def tolerances(self) -> Array:
        """The values that the least burst tolerance can take: workers / load, ascending."""
        loads = np.unique(self.load[self.load > 0])
        if not loads.size:
            return np.array([math.inf])
        values = np.unique(np.arange(1, self.limit + 1)[:, None] / loads)
        return np.asarray(values[values <= self.limit / loads.max() * (1 + _EPS)])

    def need(self, t: float) -> Array:
        """Least workers of each model's group at tolerance t."""
        if math.isinf(t):  # no load at all
            return np.ones(len(self.load), int)
        return np.asarray(np.maximum(np.ceil(t * self.load - _EPS * 10).astype(int), 1))

    def possible(self, t: float, headroom: float) -> str:
        """Why no packing can reach t and headroom, or "" where counting does not rule it out.

        A group of s workers or more is needed for the memory of all models that need s, so the
        workers are at least Σ_s (groups of at least s).
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
            least = max(int(of_size[0]), math.ceil(load / self.limit - _EPS))
            groups += least
            workers += max(int(of_size.sum()), math.ceil(load - _EPS), least)
        if groups > self.problem.groups:
            what = "memory needs" if by_memory > self.problem.groups else "memory and load need"
            return f"{what} {groups} groups, at most {self.problem.groups} are allowed"
        if workers > self.problem.workers:
            return f"groups need {workers} workers, there are {self.problem.workers}"
        return ""

    def _fewest(self, mine: Array) -> int:
        """Groups that the memory of these models takes at the least. Models above half of the
        memory never share."""
        memory = self.memory[mine]
        total = math.ceil(float(memory.sum()) / self.problem.memory_mb - _EPS)
        return max(total, int((memory > self.room / 2).sum()), int(mine.any()))

    def pack(self, t: float, headroom: float, *, partly: bool = False) -> _Bins | None:
        """Groups for every model, or None; with `partly`, for as many as fit, by load per MB."""
        need = self.need(t)
        if partly:
            density = self.load / np.maximum(self.memory, _EPS)
            return self._pack(np.argsort(-density, kind="stable"), need, headroom, True)
        for order in (
            np.lexsort((-self.memory, -need)),
            np.lexsort((-need, -self.memory)),
            np.lexsort((-self.memory, -self.load)),
        ):
            if bins := self._pack(order, need, headroom, False):
                return bins
        return None

    def _pack(self, order: Array, need: Array, headroom: float, partly: bool) -> _Bins | None:
        """Best fit: the group that grows least, then the one with the least memory left."""
        most, limit, room = self.problem.groups, self.limit, self.room
        size = np.zeros(most, int)
        kind = np.full(most, -1)
        memory, load = np.zeros(most), np.zeros(most)
        group = np.full(len(order), -1)
        opened = used = 0
        for k in order.tolist():
            wanted = np.ceil(headroom * (load[:opened] + self.load[k]) - _EPS * 10)
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
                new = max(int(need[k]), math.ceil(headroom * self.load[k] - _EPS * 10))
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
        return _Bins(size[:opened], group)

    def of_group(self, bins: _Bins, values: Array) -> Array:
        placed = bins.group >= 0
        return np.bincount(bins.group[placed], values[placed], len(bins.size))

    def tolerance(self, bins: _Bins) -> float:
        placed = (bins.group >= 0) & (self.load > 0)
        if not placed.any():
            return math.inf
        return float((bins.size[bins.group[placed]] / self.load[placed]).min())

    def headroom(self, bins: _Bins) -> float:
        load = self.of_group(bins, self.load)
        return float((bins.size[load > 0] / load[load > 0]).min(initial=math.inf))

    def spend(self, bins: _Bins) -> _Bins:
        """Spare workers, one by one, to the group with the least headroom."""
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
        return _Bins(size, bins.group)

    def level(self, bins: _Bins, t: float) -> _Bins:
        """The same groups, their models dealt again by largest load to the least loaded group."""
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
        dealt = _Bins(bins.size, group)
        return dealt if self.headroom(dealt) > self.headroom(bins) else bins

    def split(self, bins: _Bins, t: float) -> _Bins:
        """Workers that are spare when every group is at its limit, to new groups: each takes models
        off the group with the least headroom that can be helped. No burst tolerance falls, as no
        group shrinks; the ILP is indifferent."""
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
        return self.spend(_Bins(np.array(size), group))

    def balanced(self, bins: _Bins, t: float) -> _Bins:
        """Groups with a tolerance of at least t and as much headroom as the search finds."""
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

    def to_plan(self, bins: _Bins, bound: float, how: str) -> Plan:
        models = self.problem.models
        memory, load = self.of_group(bins, self.memory), self.of_group(bins, self.load)
        members = [np.flatnonzero(bins.group == j) for j in range(len(bins.size))]
        order = sorted(
            (j for j in range(len(members)) if len(members[j])),
            key=lambda j: (-int(bins.size[j]), int(members[j][0])),
        )
        groups = tuple(
            Group(
                int(bins.size[j]),
                tuple(models[k].name for k in members[j]),
                models[members[j][0]].affinity_set,
                float(memory[j]),
                float(load[j]),
            )
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


def _best(search: _Search) -> tuple[_Bins, float, str] | str:
    """Groups, a bound of the tolerance, and how it is known; or why there are none."""
    problem, headroom = search.problem, search.problem.min_headroom
    values = search.tolerances()
    if why := search.possible(float(values[0]), headroom):
        return why
    low, high = 0, len(values) - 1  # the largest value that counting allows
    while low < high:
        middle = (low + high + 1) // 2
        if search.possible(float(values[middle]), headroom):
            high = middle - 1
        else:
            low = middle
    bound = top = low
    bins, reached = search.pack(float(values[top]), headroom), top
    if bins is None:
        low, high = -1, top - 1
        while low < high:
            middle = (low + high + 1) // 2
            if packed := search.pack(float(values[middle]), headroom):
                bins, low = packed, middle
            else:
                high = middle - 1
        reached = low
    limit = float(values[bound])
    how = "proven best"
    if reached < bound:
        how = "best found"
        if len(problem.models) * problem.groups <= problem.exact_cells:
            exact, limit, proven = _exact(search, limit)
            if exact is None and bins is None and proven:
                return "the ILP has no solution"
            if exact is not None and (
                bins is None or search.tolerance(exact) > search.tolerance(bins) * (1 + _EPS)
            ):
                bins = exact
            if proven and bins is not None:
                how = "proven best by the ILP"
                limit = search.tolerance(bins)
    if bins is None:
        return ""
    return search.balanced(bins, min(search.tolerance(bins), limit)), limit, how


def program(problem: Problem) -> tuple[Milp, Indices, Indices]:
    """The linearised ILP of SHEPHERD §4 (Eq. 2), with x (models, groups) and size (groups,).

    w_ij = x_ij·size_j turns the product into a sum; t is the max–min term. A group without models
    takes no workers. The groups are interchangeable, so they come by falling size.
    """
    loads = np.array([m.load for m in problem.models], float)
    memory = np.array([m.memory_mb for m in problem.models], float)
    kinds, kind = np.unique([m.affinity_set for m in problem.models], return_inverse=True)
    count, groups = len(loads), problem.groups
    limit = min(problem.group_worker_limit, problem.workers)
    busy = loads > 0
    m = Milp("max")
    x = m.variables("x: stream in group", (count, groups), upper=1, integer=True)
    y = m.variables("y: affinity set of group", (len(kinds), groups), upper=1, integer=True)
    z = m.variables("z: model in group", (count, groups), upper=1, integer=True)
    size = m.variables("size: workers", groups, integer=True, upper=problem.workers)
    w = m.variables("w: workers of a stream", (count, groups))
    t = m.variables("t", upper=limit / loads.max() if busy.any() else 1.0)
    m.block("(a) cluster-size limit", (1, size), upper=problem.workers)
    m.block("(b) group-worker limit", (1, size[:, None]), upper=problem.group_worker_limit)
    m.block("(c) memory limit", (memory, z.T), upper=problem.memory_mb)
    m.block("(d) group surjectivity: streams", (1, x), lower=1, upper=1)
    m.block("(d) group surjectivity: models", (1, x[..., None]), (-1, z[..., None]), upper=0)
    m.block("(e) affinity-set surjectivity: groups", (1, y.T), lower=1, upper=1)
    m.block(
        "(e) affinity-set surjectivity: models",
        (1, z[..., None]),
        (-1, y[kind][..., None]),
        upper=0,
    )
    m.block("used groups have a worker", (1, z[..., None]), (-1, size[:, None]), upper=0)
    m.block("w at most size", (1, w[..., None]), (-1, size[:, None]), upper=0)
    m.block("w only where x", (1, w[..., None]), (-limit, x[..., None]), upper=0)
    if busy.any():
        m.block(
            "t is the least burst tolerance",
            (loads[busy][:, None], np.broadcast_to(t, (int(busy.sum()), 1))),
            (-1, w[busy]),
            upper=0,
        )
    if problem.min_headroom:
        m.block(
            "headroom of groups", (problem.min_headroom * loads, x.T), (-1, size[:, None]), upper=0
        )
    if groups > 1:
        m.block("groups by falling size", (1, size[1:, None]), (-1, size[:-1, None]), upper=0)
    m.objective((1, t))
    return m, x, size


def _exact(search: _Search, bound: float) -> tuple[_Bins | None, float, bool]:
    """The ILP: groups (None without a solution), the bound, and whether that is the last word."""
    problem = search.problem
    m, x, size = program(problem)
    solution = m.solve(problem.backend, problem.time_limit_s, seed=problem.seed)
    proven = solution.status in ("optimal", "infeasible")
    if not solution.found:
        return None, bound, proven
    limit = bound if math.isinf(bound) else min(bound, solution.bound)
    return (
        _Bins(solution[size].round().astype(int), solution[x].argmax(axis=1)),
        limit,
        proven,
    )


def _infeasible(problem: Problem, search: _Search, why: str) -> Infeasible[Plan]:
    too_big = [m for m in problem.models if m.memory_mb > search.room]
    if too_big:
        why = (
            f"model {too_big[0].name!r} takes {too_big[0].memory_mb:g} MB, a worker has "
            f"{problem.memory_mb:g} MB"
        )
    elif problem.min_headroom and not isinstance(_best(relaxed := _without(problem)), str):
        largest = search.load.argmax()
        if (load := search.load[largest] * problem.min_headroom) > search.limit:
            why = (
                f"model {problem.models[largest].name!r} alone needs {math.ceil(load)} workers at "
                f"a headroom of {problem.min_headroom:g}, a group has at most {search.limit}: "
                f"split its streams over two model-streams"
            )
        reason = f"min_headroom {problem.min_headroom:g} is out of reach: "
        best = plan(relaxed.problem)
        assert isinstance(best, Plan)
        return Infeasible(
            reason + (why or f"the best packing found has {best.headroom:.3g}"),
            best,
            proven=bool(why),
        )
    bins = search.pack(0.0, 0.0, partly=True)
    assert bins is not None  # partly: models that do not fit stay out
    if not len(bins.size):
        effort = search.to_plan(bins, 0.0, "as no model fits")
    else:
        effort = search.to_plan(search.spend(bins), math.inf, "by load per MB, as many as fit")
    return Infeasible(why or "no packing of every model was found", effort, proven=bool(why))


def _without(problem: Problem) -> _Search:
    return _Search(replace(problem, min_headroom=0.0))
