"""Loki's routing tables in a policy, made from the measured demand and factors."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ray_slo.core.cluster import Cluster
from ray_slo.core.demand import Factors
from ray_slo.core.load import LoadMonitor
from ray_slo.core.requests import Request, WorkerId
from ray_slo.papers import routing
from ray_slo.policies.pipeline_groups import Group, Service, Tree

_GOLDEN = (math.sqrt(5) - 1) / 2


class Table(NamedTuple):
    """Groups by cumulative probability."""

    bounds: list[float]
    groups: list[Group]

    def at(self, u: float) -> Group | None:
        """The group at 0 ≤ u < 1; None if the table has no capacity left."""
        i = bisect_right(self.bounds, u)
        return self.groups[i] if i < len(self.groups) else None


class Routes:
    """Learns demand and factors, and makes routing tables from them (MostAccurateFirst).

    Args:
        given: requests made for each child task per request, by variant, if known.

    Attributes:
        factors: the learned factors.
        factors_of: factors by variant at the time of the last tables.
        backup: by task, the accuracy, execution time and group of those with capacity left.
    """

    def __init__(self, tree: Tree, given: Mapping[str, Mapping[str, float]]) -> None:
        self._tree = tree
        self._given = {v: dict(f) for v, f in given.items()}
        self.factors = Factors({})
        self.factors_of: dict[str, dict[str, float]] = {}
        self.backup: dict[str, list[tuple[float, float, Group]]] = {}
        self._variants: dict[str, str] = {}  # task by variant
        self._finished: dict[Hashable, int] = {}  # by variant, since the last tables
        self._made: dict[Hashable, dict[str, int]] = {}
        self._demand = LoadMonitor("ewma", 1.0)
        self._frontend: Table | None = None
        self._tables: dict[tuple[WorkerId, str], dict[str, Table]] = {}
        self._position: dict[str, float] = dict.fromkeys(tree.parents, 0.5)

    def demand(self, now: float) -> float:
        """Predicted requests per second at the root."""
        return self._demand.rate(now)

    def arrived(self, now: float, roots: int) -> None:
        """Requests arrived at the root."""
        if roots:
            self._demand.arrived(now, roots)

    def made(self, request: Request) -> None:
        """Another request made this one."""
        if (upstream := request.upstream) is not None:
            made = self._made.get(upstream.variant)
            if made is not None and request.model in made:
                made[request.model] += 1

    def finished(self, variant: str, requests: int) -> None:
        """A batch of a variant has finished."""
        if variant in self._finished:
            self._finished[variant] += requests

    def learn_anew(self, cluster: Cluster) -> None:
        """Set the given factors for new variants, and keep the learned ones of the others."""
        variants = {v.name: m.name for m in cluster.models.values() for v in m.variants}
        if variants == self._variants:
            return
        for variant, factors in self._given.items():
            children = self._tree.children.get(variants.get(variant, ""), [])
            if variant not in variants or set(factors) - set(children):
                raise ValueError(
                    f"factors must be by variant and child task; got {dict(factors)} for "
                    f"{variant!r}, which has the children {children}"
                )
        prior: dict[Hashable, dict[str, float]] = {}
        for variant, task in variants.items():
            known = self.factors.of(variant) if variant in self._variants else {}
            given = self._given.get(variant, {})
            prior[variant] = {c: known.get(c, given.get(c, 1.0)) for c in self._tree.children[task]}
        self._variants = variants
        self.factors = Factors(prior)
        self._finished = dict.fromkeys(variants, 0)
        self._made = {v: dict.fromkeys(f, 0) for v, f in prior.items()}

    def rebalance(self, now: float, services: Sequence[Service], groups: Iterable[Group]) -> None:
        """Learn factors, and make new tables."""
        for variant, made in self._made.items():
            if self._finished[variant] or any(made.values()):
                self.factors.observe(variant, self._finished[variant], made)
                self._finished[variant] = 0
                made.update(dict.fromkeys(made, 0))
        self.factors_of = {v: self.factors.of(v) for v in self._variants}
        tasks_of: dict[WorkerId, int] = {}
        for s in services:
            tasks_of[s.worker.id] = tasks_of.get(s.worker.id, 0) + 1
        workers = [
            routing.Worker(
                (s.worker.id, s.variant),
                s.task,
                s.accuracy,
                s.profile.throughput(s.batch_size) / tasks_of[s.worker.id],
                s.profile.latency(s.batch_size),
                self.factors_of[s.variant],
                s.load,
            )
            for s in services
        ]
        demand = self.demand(now) or self._planned_demand(workers)
        made_tables = routing.most_accurate_first(self._tree.parents, workers, demand)
        of_worker: dict[Hashable, Group] = {(w.id, g.variant): g for g in groups for w in g.members}

        def table(entries: Sequence[routing.Entry]) -> Table:
            bounds = list(accumulate(e.probability for e in entries))
            if bounds and bounds[-1] > 1 - 1e-9:
                bounds[-1] = math.inf
            return Table(bounds, [of_worker[e.worker] for e in entries])

        self._frontend = table(made_tables.frontend)
        self._tables = {}
        for s in services:
            tables = made_tables.tables[s.worker.id, s.variant]
            of_children = {child: table(entries) for child, entries in tables.items()}
            self._tables[s.worker.id, s.variant] = of_children
            self._tables["", s.variant] = of_children  # for a worker that is gone
        self.backup = {
            task: [(b.accuracy, b.execution_s, of_worker[b.worker]) for b in backups]
            for task, backups in made_tables.backup.items()
        }

    def _planned_demand(self, workers: Sequence[routing.Worker]) -> float:
        """The planned demand, for the time before anything was measured."""
        return sum(
            w.capacity if w.planned is None else w.planned
            for w in workers
            if w.task == self._tree.root
        )

    def group(self, request: Request) -> Group | None:
        """The group for a request, by a low-discrepancy sequence; None if no group has capacity."""
        task, upstream, table = request.model, request.upstream, None
        if task == self._tree.root:
            table = self._frontend
        elif upstream is not None:
            tables = self._tables.get((upstream.worker, upstream.variant))
            if tables is None:
                tables = self._tables.get(("", upstream.variant), {})
            table = tables.get(task)
        u = self._position[task] = (self._position[task] + _GOLDEN) % 1
        return table.at(u) if table is not None else None
