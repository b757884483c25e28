"""Model selection by load alone, from one queue: base of the systems that RAMSIS §7 compares with.

Each model has a central queue. An idle worker at once takes a batch from it, earliest deadline
first, up to a maximum size. A subclass chooses the variant and the size. A request is only dropped
if no worker can serve its model: as in the paper, a late answer is better than none.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import ClassVar

from ray_slo.core import (
    Action,
    BatchOutcome,
    Cluster,
    Decision,
    Dispatch,
    Drop,
    DropReason,
    LatencyProfile,
    Model,
    Request,
    WorkerId,
)
from ray_slo.core.load import LoadMonitor
from ray_slo.core.queues import DeadlineQueue

Choice = tuple[str, int]
"""A variant, and the largest batch that it may run."""


class Offered:
    """A model on workers of one kind: the variants that can serve it, the least accurate first.

    Attributes:
        workers: number of workers that serve the model, of all kinds.
    """

    __slots__ = ("accuracy", "model", "profiles", "slo_s", "workers")

    def __init__(self, model: Model, hardware: str, loaded: frozenset[str], workers: int) -> None:
        known = [v for v in model.variants if v.name in loaded and hardware in v.profiles]
        known.sort(key=lambda v: v.accuracy or 0.0)
        self.model = model.name
        self.slo_s = model.latency_slo_s
        self.workers = workers
        self.profiles: Mapping[str, LatencyProfile] = {v.name: v.profiles[hardware] for v in known}
        self.accuracy: Mapping[str, float] = {v.name: v.accuracy or 0.0 for v in known}

    @property
    def fastest(self) -> Choice:
        """The variant with the shortest ℓ(1), with its largest batch size."""
        name = min(self.profiles, key=lambda v: self.profiles[v].latency(1))
        return name, self.profiles[name].max_batch_size


class CentralQueue(ABC):
    """A queue per model. An idle worker takes the head of the most urgent one.

    Args:
        load: requests per second of each model, if known; else the load is measured.
        window_ms: window in which the load is measured.
    """

    serves_late: ClassVar[bool] = True

    def __init__(self, *, load: float | None = None, window_ms: float = 500.0) -> None:
        self._load = load
        self._window_s = window_ms / 1e3
        self._cluster = Cluster({}, {})
        self._queues: dict[str, DeadlineQueue] = {}
        self._monitors: dict[str, LoadMonitor] = {}
        self._offers: dict[WorkerId, dict[str, Offered]] = {}
        self._rank: dict[WorkerId, int] = {}
        self._running: dict[WorkerId, int] = {}
        self._idle: list[tuple[int, WorkerId]] = []
        self._batch_id = 0

    @abstractmethod
    def _choose(self, offered: Offered, load: float, waiting: int, slack_s: float) -> Choice:
        """Return what an idle worker runs. The first of `waiting` requests has `slack_s` left."""

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            self._queues.setdefault(request.model, DeadlineQueue()).push(request)
            if self._load is None:
                monitor = self._monitors.get(request.model)
                if monitor is None:
                    monitor = self._monitors[request.model] = LoadMonitor("mean", self._window_s)
                monitor.arrived(now)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.model in self._queues:
                self._queues[request.model].remove(request)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        if worker in self._rank and self._running.get(worker) == outcome.batch_id:
            del self._running[worker]
            heappush(self._idle, (self._rank[worker], worker))

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rank = {w: i for i, w in enumerate(cluster.workers)}
        self._running = {w: b for w, b in self._running.items() if w in self._rank}
        self._idle = [(i, w) for w, i in self._rank.items() if w not in self._running]
        able = {
            m.name: sum(
                1 for w in cluster.workers.values() if any(v.name in w.loaded for v in m.variants)
            )
            for m in cluster.models.values()
        }
        made: dict[tuple[str, frozenset[str]], dict[str, Offered]] = {}
        for w in cluster.workers.values():
            if (kind := (w.hardware, w.loaded)) not in made:
                offers = [Offered(m, *kind, able[m.name]) for m in cluster.models.values()]
                made[kind] = {o.model: o for o in offers if o.profiles}
        self._offers = {w.id: made[w.hardware, w.loaded] for w in cluster.workers.values()}

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        useless = []
        while self._idle and any(self._queues.values()):
            rank, worker = heappop(self._idle)
            offers = self._offers[worker]
            waiting = [(q.head.deadline, m) for m, q in self._queues.items() if q and m in offers]
            if not waiting:
                useless.append((rank, worker))
                continue
            deadline, model = min(waiting)
            actions.append(self._send(worker, offers[model], deadline, now))
        for entry in useless:
            heappush(self._idle, entry)
        served = {m for offers in self._offers.values() for m in offers}
        wake_at = math.inf
        for model, queue in self._queues.items():
            if model not in served and queue:
                if gone := queue.take(queue.position(math.nextafter(now, math.inf))):
                    actions.append(Drop(gone, DropReason.NO_WORKER))
                if queue:
                    wake_at = min(wake_at, queue.head.deadline)
        return Decision(actions, wake_at)

    def _send(self, worker: WorkerId, offered: Offered, deadline: float, now: float) -> Dispatch:
        queue = self._queues[offered.model]
        load = self._load
        if load is None:
            load = self._monitors[offered.model].rate(now)
        variant, most = self._choose(offered, load, len(queue), deadline - now)
        requests = queue.take(min(most, offered.profiles[variant].max_batch_size))
        start_at = now + self._cluster.delay(len(requests))
        finish_at = start_at + offered.profiles[variant].latency(len(requests))
        self._batch_id += 1
        self._running[worker] = self._batch_id
        return Dispatch(self._batch_id, worker, variant, requests, start_at, finish_at)
