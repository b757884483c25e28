"""Base of the peers: workers, queues that drop what cannot be served, timers.

A peer sends a batch when a worker is idle, never before the running one has ended. So compare peers
at equal delays. (Without delays, sending ahead gains nothing.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import ClassVar

from ray_slo.core import (
    Action,
    BatchOutcome,
    Cluster,
    Decision,
    Dispatch,
    DispatchDelay,
    Drop,
    DropReason,
    LatencyProfile,
    Request,
    WorkerId,
)
from ray_slo.core.queues import DeadlineQueue

TOLERANCE_S = 5e-7

Kind = tuple[str, frozenset[str]]
"""Hardware and loaded variants: workers that agree in both are of the same kind."""


class PeerWorker:
    """A worker and the batch that runs on it."""

    __slots__ = ("free_at", "id", "kind", "rank", "running")

    def __init__(self, id: WorkerId) -> None:
        self.id = id
        self.rank = 0
        self.kind: Kind = ("", frozenset())
        self.running: int | None = None  # batch id
        self.free_at = -math.inf  # predicted end of its batch


class Served:
    """A model on workers of one kind: its variant, and reach[b − 1] = delay(b) + ℓ(b)."""

    __slots__ = ("profile", "reach", "variant")

    def __init__(self, variant: str, profile: LatencyProfile, delay: DispatchDelay) -> None:
        self.variant = variant
        self.profile = profile
        self.reach = [t + delay(b) for b, t in enumerate(profile.table, start=1)]


class PeerQueue:
    """Waiting requests of one model in one place.

    Attributes:
        reach_1: shortest time in which one request can be served, in seconds.
        drop_at: time for which its timer is set.
    """

    __slots__ = ("drop_at", "model", "order", "queue", "reach_1", "served")

    def __init__(self, model: str, order: int, reach_1: float, served: bool) -> None:
        self.model = model
        self.order = order
        self.reach_1 = reach_1
        self.served = served
        self.queue = DeadlineQueue()
        self.drop_at = math.inf


class Peer(ABC):
    """A policy with at most one batch per worker, which drops requests that cannot be in time."""

    serves_late: ClassVar[bool] = False

    def __init__(self) -> None:
        self._delay = DispatchDelay()
        self._workers: dict[WorkerId, PeerWorker] = {}
        self._served: dict[Kind, dict[str, Served]] = {}
        self._timers: list[tuple[float, int, PeerQueue]] = []
        self._actions: list[Action] = []
        self._batch_id = 0
        self._serial = 0

    @abstractmethod
    def _enqueue(self, now: float, request: Request) -> None:
        """A request arrived."""

    @abstractmethod
    def _cancel(self, request: Request) -> None:
        """Forget a request, if it is known."""

    @abstractmethod
    def _freed(self, worker: PeerWorker) -> None:
        """A worker's batch has ended."""

    @abstractmethod
    def _changed(self, now: float, cluster: Cluster) -> None:
        """Workers, kinds and profiles are new: put the waiting requests into new queues."""

    @abstractmethod
    def _act(self, now: float) -> float:
        """Append to `_actions`; return the time of the next call."""

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            self._enqueue(now, request)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            self._cancel(request)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        state = self._workers.get(worker)
        if state is not None and state.running == outcome.batch_id:
            state.running, state.free_at = None, now
            self._freed(state)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._delay = cluster.delay
        known, self._workers, self._served = self._workers, {}, {}
        for rank, worker in enumerate(cluster.workers.values()):
            state = self._workers[worker.id] = known.get(worker.id) or PeerWorker(worker.id)
            state.rank, state.kind = rank, (worker.hardware, worker.loaded)
            if state.kind not in self._served:
                self._served[state.kind] = {
                    model.name: Served(v.name, v.profiles[worker.hardware], cluster.delay)
                    for model in cluster.models.values()
                    for v in reversed(model.variants)  # the first loaded variant wins
                    if v.name in worker.loaded and worker.hardware in v.profiles
                }
        self._timers = []
        self._changed(now, cluster)

    def decide(self, now: float) -> Decision:
        self._actions = []
        timers = self._timers
        while timers and timers[0][0] <= now:
            at, _, queue = heappop(timers)
            if queue.drop_at == at:
                queue.drop_at = math.inf
                hopeless = queue.queue.position(now + queue.reach_1 - TOLERANCE_S)
                self._drop(queue.queue.take(hopeless), now, queue.served)
                self._arm(queue)
        wake_at = self._act(now)
        while timers and timers[0][2].drop_at != timers[0][0]:
            heappop(timers)
        return Decision(self._actions, min(wake_at, timers[0][0] if timers else math.inf))

    # Methods for subclasses --------------------------------------------------------------------

    def _queue(self, model: str, kinds: Sequence[Kind]) -> PeerQueue:
        """Make a queue for a model that workers of `kinds` serve."""
        self._serial += 1
        reach_1 = [self._served[k][model].reach[0] for k in kinds if model in self._served[k]]
        return PeerQueue(model, self._serial, min(reach_1, default=0.0), bool(reach_1))

    def _push(self, queue: PeerQueue, request: Request) -> None:
        queue.queue.push(request)
        if queue.queue.head is request:
            self._arm(queue)

    def _arm(self, queue: PeerQueue) -> None:
        """Set the timer for when the head can no longer be served, or earlier."""
        if queue.queue:
            at = queue.queue.head.deadline - queue.reach_1 + 2 * TOLERANCE_S
            if at < queue.drop_at:
                queue.drop_at = at
                heappush(self._timers, (at, queue.order, queue))

    def _drop(self, requests: Sequence[Request], now: float, served: bool = True) -> None:
        by_reason: dict[DropReason, list[Request]] = {}
        for request in requests:
            if not served:
                reason = DropReason.NO_WORKER
            elif request.deadline <= now:
                reason = DropReason.EXPIRED
            else:
                reason = DropReason.WOULD_MISS
            by_reason.setdefault(reason, []).append(request)
        self._actions.extend(Drop(rs, reason) for reason, rs in by_reason.items())

    def _dispatch(
        self, worker: PeerWorker, served: Served, requests: Sequence[Request], now: float
    ) -> None:
        self._batch_id += 1
        size = len(requests)
        start_at = now + self._delay(size)
        finish_at = start_at + served.profile.latency(size)
        self._actions.append(
            Dispatch(self._batch_id, worker.id, served.variant, requests, start_at, finish_at)
        )
        worker.running, worker.free_at = self._batch_id, finish_at
