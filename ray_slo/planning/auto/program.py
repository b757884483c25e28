"""The program that chooses the number of workers of each kind, their variants and batch sizes.

It is a mixed-integer linear program: that of Loki §4, with kinds, memory and prices. Its variables:

* c(s, p): share of stream s on path p of variants; σ(s): share of it that is served;
* w(s, t, g): workers of configuration g's kind that task t of stream s keeps busy;
* x(v, k): workers of kind k that host variant v; n(k): workers of kind k;
* z: binaries that choose the time budgets of tasks (`graph.py`).

Its rows, where λ is a stream's rate, m(p) the requests that reach a path's end per request at the
root, and q the throughput of a configuration:

    root       Σ c(s, p) = σ(s)                  over paths of the root alone
    paths      c(s, p) = Σ c(s, p')              p' continues p to a child; for every child
    work       Σ w(s, t, g)·q(g) = λ(s) Σ m(p)·c(s, p)      for every node and variant
    in time    Σ w(s, t, g)·q(g) ≤ λ(s)·max m · Σ z         g slower than a budget, z of longer ones
    workers    Σ w(s, t, g) ≤ ρ·x(v, k) − r      one variant on a worker: Σ x(v, k) ≤ n(k)
               Σ w(s, t, g) ≤ ρ·n(k) − r         several on a worker
    memory     Σ x(v, k)·memory(v, k) ≤ n(k)·memory(k)      where not all variants fit on a worker
    budget     Σ price(k)·n(k) ≤ budget

ρ and r keep room for bursts (`headroom.py`). A binary makes r count only if a variant is used.

If a model has only one node, the solution uses only one batch size of a variant on a kind, because
a larger batch in time makes less work. For a model that several nodes use, binaries enforce this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from ray_slo.planning.auto.graph import NO_TIME, Graph, Path
from ray_slo.planning.auto.limits import Limits, Room
from ray_slo.planning.auto.problem import Problem
from ray_slo.planning.auto.rows import add_alone, add_batch_sizes, add_room, add_swaps
from ray_slo.planning.milp import Floats, Indices, Milp, Solution

EPS = 1e-6
"""Tolerance of the solvers, in workers and in shares."""

SAVED = 1e-3
"""Points of accuracy that may be given up to save all cost. So of equally accurate plans, the
cheaper one is chosen."""

Objective = Literal["cost", "accuracy", "share", "value"]
"""What a program optimises: the least cost; the highest accuracy; the largest share of the demand,
first for the stream with the smallest share; or the most points of accuracy per second, for any
streams."""

_PARTS = 4
"""Cuts for packing are about variants that need more than 1/2, 1/3, … of a worker's memory."""


class Program:
    """The program of one problem.

    Args:
        problem: the planning problem.
        most_accurate: whether only the most accurate variants are used.
        limits: limits in addition to those of the problem.
    """

    def __init__(
        self, problem: Problem, most_accurate: bool = False, limits: Limits | None = None
    ) -> None:
        self.problem, self.limits = problem, limits or Limits()
        self.graph = Graph(problem, most_accurate, self.limits.longest_s)
        self.pairs = list(dict.fromkeys((c.variant, c.kind) for c in self.graph.configs))
        self.crowds = [
            node
            for node in self.graph.nodes
            if problem.fits_alone and self.graph.at_once(node) > problem.waiting_factor
        ]
        rates = [problem.rate(s) for s in self.graph.streams]
        self.total = sum(rates) or 1.0
        self.weight = cost_weights(problem)
        names = [kind.name for kind in problem.kinds]
        self.most = dict(zip(names, (most for _, most in self.bounds()), strict=True))

    def solve(self, objective: Objective, served: Mapping[str, float] | None = None) -> Solution:
        """Return the optimum. It serves the shares `served` of the demand, by default all."""
        problem = self.problem
        self.milp = self.program(objective, served)
        return self.milp.solve(
            problem.backend,
            problem.time_limit_s,
            problem.relative_gap,
            problem.seed,
            heuristics=False,
        )

    def program(self, objective: Objective, served: Mapping[str, float] | None) -> Milp:
        g = self.graph
        m = Milp("min" if objective == "cost" else "max")
        count = max(len(g.streams), 1)
        shares = [(served or {}).get(s, 1.0) for s in g.streams] or [0.0]
        free = objective in ("share", "value")
        least, most = (0.0, 1.0) if free else (np.array(shares), np.array(shares))
        self.share, self.asked = m.variables("share served", count, least, most), shares
        self.c = {s: m.variables(f"c: {s}", len(self._paths(s))) for s in g.streams}
        self.w = {
            node: m.variables(f"w: {'/'.join(node)}", len(of.configs))
            for node, of in g.nodes.items()
        }
        self.budgets: dict[tuple[str, str], tuple[Indices, list[float]]] = {}
        self._workers(m)
        for i, stream in enumerate(g.streams):
            self._flow(m, i, stream)
            self._work(m, stream)
            self._budgets(m, stream)
        self._capacity(m)
        add_batch_sizes(m, g, self.w)
        self._floor(m)
        self.swaps = add_swaps(m, self.problem, self.pairs, self.x, self.n, self.bounds())
        self._objective(m, objective)
        return m

    def _paths(self, stream: str) -> list[Path]:
        return self.graph.paths[self.problem.tree_of(stream).name]

    def _workers(self, m: Milp) -> None:
        problem, kinds = self.problem, self.problem.kinds
        lower, upper = zip(*self.bounds(), strict=True)
        self.n = m.variables("n: workers", len(kinds), lower, upper, integer=True)
        if problem.budget_per_hour is not None and problem.present is None:
            prices = np.array([kind.price_per_hour for kind in kinds])
            m.block("budget", (prices, self.n), upper=problem.budget_per_hour)

    def room(self, variant: str, kind: str) -> Room:
        """Return the room for bursts on the workers of a variant. If variants share workers, it is
        the room on all workers of the kind."""
        key = ("" if self.problem.sharing else variant), kind
        return self.limits.rooms.get(key, Room())

    def bounds(self) -> list[tuple[int, int]]:
        """Return the least and the largest number of workers of every kind."""
        problem = self.problem
        kinds, present = problem.kinds, problem.present
        if present is not None:
            return [(present.get(kind.name, 0),) * 2 for kind in kinds]
        least = self.limits.least
        return [(max(k.min_workers, least.get(k.name, 0)), problem.most(k)) for k in kinds]

    def _flow(self, m: Milp, i: int, stream: str) -> None:
        """Add rows: the served share enters at the root, and all of it continues to every child."""
        g, c = self.graph, self.c[stream]
        tree = self.problem.tree_of(stream)
        paths = g.paths[tree.name]
        root = [j for j, p in enumerate(paths) if p.parent < 0]
        m.block(f"root: {stream}", (1, c[root]), (-1, self.share[[i]]), lower=0, upper=0)
        for child in tree.order[1:]:
            above = [j for j, p in enumerate(paths) if p.task == child.parent]
            below = [j for j, p in enumerate(paths) if p.task == child.name]
            goes_on = np.array([[paths[j].parent == i for j in below] for i in above], float)
            m.block(
                f"paths: {stream}/{child.name}",
                (goes_on, np.broadcast_to(c[below], goes_on.shape)),
                (-1, c[above][:, None]),
                lower=0,
                upper=0,
            )

    def _work(self, m: Milp, stream: str) -> None:
        """Add rows: workers are busy with the requests on the paths of their variant."""
        g, c = self.graph, self.c[stream]
        rate = self.problem.rate(stream)
        paths = self._paths(stream)
        for task in self.problem.tree_of(stream).order:
            node = stream, task.name
            of = g.nodes[node]
            names = list(of.paths)
            of_variant = np.array(
                [[(g.configs[k].variant == name) for k in of.configs] for name in names], float
            ).reshape(len(names), len(of.configs))
            served = of_variant * g.throughput(node) / rate
            arriving = np.zeros((len(names), c.size))
            for row, name in enumerate(names):
                for j in of.paths[name]:
                    arriving[row, j] = -paths[j].arrivals
            m.block(
                f"work: {'/'.join(node)}",
                (served, np.broadcast_to(self.w[node], served.shape)),
                (arriving, np.broadcast_to(c, arriving.shape)),
                lower=0,
                upper=0,
            )

    def _budgets(self, m: Milp, stream: str) -> None:
        """Add rows: a node's configurations keep its budget, and the budgets on a path sum to at
        most the SLO."""
        g = self.graph
        tree, slo_s = self.problem.tree_of(stream), self.problem.slo_s(stream)
        if len(tree.tasks) == 1:
            return  # without children, each configuration is in time
        splits = g.splits[stream]
        if splits is not None:
            z = m.variables(f"z: {stream}", len(splits), upper=1, integer=True)
            m.block(f"one split: {stream}", (1, z), lower=1, upper=1)
            for task in tree.order:
                budgets = [split[task.name] for split in splits]
                self.budgets[stream, task.name] = z, budgets
                self._in_time(m, (stream, task.name), z, budgets)
            return
        for task in tree.order:
            times = g.times_s(stream, task.name)
            z = m.variables(f"z: {stream}/{task.name}", len(times), upper=1, integer=True)
            m.block(f"one budget: {stream}/{task.name}", (1, z), lower=1, upper=1)
            self._in_time(m, (stream, task.name), z, times)
            self.budgets[stream, task.name] = z, times
        for sink in g.sinks(tree):
            on_path = [self.budgets[stream, task] for task in tree.path(sink)]
            terms: list[Any] = [(np.array(times) / slo_s, z) for z, times in on_path]
            m.block(f"(7) SLO: {stream}/{sink}", *terms, upper=1 + NO_TIME / slo_s)

    def budget_s(self, node: tuple[str, str], solution: Solution) -> float:
        """Return the time that a solution gives a task, in seconds, with waiting and
        communication."""
        if node not in self.budgets:
            return self.problem.slo_s(node[0])
        z, budgets = self.budgets[node]
        return budgets[int(np.argmax(solution[z]))]

    def _in_time(self, m: Milp, node: tuple[str, str], z: Indices, budgets: list[float]) -> None:
        g = self.graph
        of = g.nodes[node]
        if not of.most or not of.configs:
            return
        times = np.array([g.configs[k].time_s for k in of.configs])
        steps = np.array([b for b in sorted(set(budgets)) if b + NO_TIME < times.max()])
        if not steps.size:
            return
        slower = times > steps[:, None] + NO_TIME
        longer = np.array(budgets) > steps[:, None]
        share = slower * g.throughput(node) / (self.problem.rate(node[0]) * of.most)
        m.block(
            f"in time: {'/'.join(node)}",
            (share, np.broadcast_to(self.w[node], share.shape)),
            (-longer.astype(float), np.broadcast_to(z, longer.shape)),
            upper=0,
        )

    def _capacity(self, m: Milp) -> None:
        """Add rows: the workers' time and memory are enough."""
        problem, kinds = self.problem, self.problem.kinds
        busy, all_w = self._busy()
        of_kind = np.array([[k == kind.name for _, k in self.pairs] for kind in kinds], float)
        of_kind = of_kind.reshape(len(kinds), len(self.pairs))
        self.hosting = [j for j, (_, k) in enumerate(self.pairs) if self._tells_hosts_apart(k)]
        upper = np.array([self._useful(pair) for pair in self.pairs] or [0.0])
        self.x = m.variables("x: hosts", len(upper), upper=upper, integer=True)
        if not self.pairs:
            return
        if self.hosting:
            rooms = [self.room(*self.pairs[j]) for j in self.hosting]
            if problem.sharing:
                rooms = [Room(self.limits.level(self.pairs[j][1])) for j in self.hosting]
            most = [self.most[self.pairs[j][1]] for j in self.hosting]
            add_room(m, "hosts", busy[self.hosting], all_w, self.x[self.hosting], rooms, most)
        if problem.sharing:
            rooms = [self.room("", kind.name) for kind in kinds]
            most = [self.most[kind.name] for kind in kinds]
            add_room(m, "workers", of_kind @ busy, all_w, self.n, rooms, most)
            self._memory(m, of_kind)
        else:
            m.block(
                "workers",
                (of_kind, np.broadcast_to(self.x, of_kind.shape)),
                (-1, self.n[:, None]),
                upper=0,
            )
        add_alone(m, self.graph, self.crowds, self.pairs, self.x, self.budgets)

    def _memory(self, m: Milp, of_kind: Floats) -> None:
        kinds = self.problem.kinds
        for i, kind in enumerate(kinds):
            if not self.crowded(kind.name):
                continue
            room_mb = kind.memory_mb * self.limits.memory.get(kind.name, 1.0)
            needs = np.array([self.needs_mb(pair) for pair in self.pairs]) * of_kind[i] / room_mb
            m.block(f"memory: {kind.name}", (needs, self.x), (-1, self.n[[i]]), upper=0)
            for parts in range(1, _PARTS + 1):
                large = (needs > 1 / (parts + 1) + EPS).astype(float)
                if large.any():
                    m.block(
                        f"memory: {parts} on {kind.name}",
                        (large, self.x),
                        (-parts, self.n[[i]]),
                        upper=0,
                    )
            each = np.flatnonzero(of_kind[i])
            m.block(f"hosts on {kind.name}", (1, self.x[each][:, None]), (-1, self.n[[i]]), upper=0)

    def crowded(self, kind: str) -> bool:
        """Return whether a worker of a kind has too little memory for all variants."""
        needs_mb = sum(self.needs_mb(pair) for pair in self.pairs if pair[1] == kind)
        return needs_mb > self.problem.kind[kind].memory_mb * self.limits.memory.get(kind, 1.0)

    def _tells_hosts_apart(self, kind: str) -> bool:
        here = any(hosted.kind == kind for hosted in self.problem.current)
        return not self.problem.sharing or self.crowded(kind) or here

    def needs_mb(self, pair: tuple[str, str]) -> float:
        """Return the memory of a variant on a kind, in MB."""
        variant, kind = pair
        return self.problem.variant[variant].memory_mb.get(kind, 0.0)

    def _useful(self, pair: tuple[str, str]) -> float:
        """Return the largest useful number of workers that host a variant: enough for all
        demand."""
        g, problem = self.graph, self.problem
        kind = pair[1]
        if any(pair[0] in g.nodes[node].paths for node in self.crowds):
            return self.most[kind]
        work = 0.0
        for node in g.nodes.values():
            slowest = min(
                (
                    g.configs[k].throughput
                    for k in node.configs
                    if (g.configs[k].variant, g.configs[k].kind) == pair
                ),
                default=math.inf,
            )
            work += problem.rate(node.stream) * node.most / slowest
        return min(self.room(*pair).workers(work), self.most[kind]) if work else 0.0

    def _busy(self) -> tuple[Floats, Indices]:
        """Return which of all w belong to which pair of variant and kind."""
        g = self.graph
        index = {pair: j for j, pair in enumerate(self.pairs)}
        columns = [
            (index[g.configs[k].variant, g.configs[k].kind], int(w))
            for node, of in g.nodes.items()
            for k, w in zip(of.configs, self.w[node], strict=True)
        ]
        busy = np.zeros((len(self.pairs), len(columns)))
        for i, (j, _) in enumerate(columns):
            busy[j, i] = 1.0
        return busy, np.array([w for _, w in columns], dtype=np.int64)

    def _floor(self, m: Milp) -> None:
        problem, g = self.problem, self.graph
        if not problem.accuracy_floor:
            return
        for tree in problem.trees:
            terms: list[Any] = []
            for i, stream in enumerate(g.streams):
                if problem.tree_of(stream).name == tree.name:
                    rate = problem.rate(stream) / self.total
                    terms.append((rate * self.accuracy(stream), self.c[stream]))
                    terms.append((-rate * problem.accuracy_floor, self.share[[i]]))
            if terms:
                m.block(f"accuracy floor: {tree.name}", *terms, lower=0)

    def _objective(self, m: Milp, objective: Objective) -> None:
        problem, g = self.problem, self.graph
        weights = self.weight
        all_cost = max(float(weights @ [most for _, most in self.bounds()]), EPS)
        rates = np.array([problem.rate(s) for s in g.streams]) / self.total
        accuracy: list[Any] = [
            (rate * self.accuracy(s), self.c[s]) for rate, s in zip(rates, g.streams, strict=True)
        ]
        if objective == "cost":
            least = float(min(weights, default=1.0)) / (
                1 + sum(k.max_workers for k in problem.kinds)
            )
            better = [(-least * SAVED * np.asarray(a), c) for a, c in accuracy]
            m.objective((weights, self.n), (least / 2, self.swaps), *better)
        elif objective == "accuracy":
            served = max(float(rates @ self.asked[: len(rates)]), EPS)
            m.objective(
                *((a / served, c) for a, c in accuracy),
                (-problem.swap_cost, self.swaps),
                (-SAVED * weights / all_cost, self.n),
            )
        elif objective == "value":
            m.objective(*((self.total * a, c) for a, c in accuracy))
        else:
            fair = m.variables("least share", 1, upper=1)
            if g.streams:
                m.block("fair", (1, self.share[:, None]), (-1, fair), lower=0)
            m.objective(
                (1, fair), (SAVED * rates, self.share[: len(rates)]), (-(SAVED**2), self.swaps)
            )

    def accuracy(self, stream: str) -> Floats:
        """Return the accuracy that each path's share contributes, in percent, shape (paths,)."""
        g, tree = self.graph, self.problem.tree_of(stream)
        sinks = g.sinks(tree)
        return np.array(
            [
                g.accuracy(tree, p) / len(sinks) if p.task in sinks else 0.0
                for p in self._paths(stream)
            ]
        )


def cost_weights(problem: Problem) -> Floats:
    """Return the weight of a worker in the cost, shape (kinds,): its price and a little more. It is
    1 if no kind has a price."""
    prices = np.array([kind.price_per_hour for kind in problem.kinds])
    if not prices.any():
        return np.ones(len(prices))
    return np.asarray(prices + SAVED * prices[prices > 0].min())
