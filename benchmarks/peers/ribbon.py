"""Ribbon's query distribution, as in Kairos §7: first come, first served, base instances first.

It ignores sizes and latencies. A waiting request goes to an idle instance, if possible of the base
type, however long it takes there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from ray_slo.core import BatchOutcome, Cluster, Decision, Dispatch, Drop, Request, WorkerId
from ray_slo.core.decisions import Action, DropReason


class SizedPeer:
    """Base of peers for requests with sizes: one request per batch, served even if late.

    Args:
        base: hardware kind of the base instances; by default that of the first worker.
    """

    serves_late: ClassVar[bool] = True

    def __init__(self, base: str | None = None) -> None:
        self._base = base
        self._batch_id = 0
        self._running: dict[WorkerId, int] = {}
        self._free_at: dict[WorkerId, float] = {}
        self._refused: list[Request] = []

    def _changed(self, now: float) -> None:
        """The workers have changed."""

    def _act(self, now: float) -> list[Action]:
        raise NotImplementedError

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        workers = list(cluster.workers.values())
        base = self._base or (workers[0].hardware if workers else "")
        # Base instances first, then in the cluster's order.
        workers.sort(key=lambda w: w.hardware != base)
        self._workers = [w.id for w in workers]
        self._bases = [w.id for w in workers if w.hardware == base]
        self._others = [w.id for w in workers if w.hardware != base]
        self._running = {w: b for w, b in self._running.items() if w in cluster.workers}
        self._free_at = {w: self._free_at.get(w, -math.inf) for w in self._workers}
        self._changed(now)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        if self._running.get(worker) == outcome.batch_id:
            del self._running[worker]

    def decide(self, now: float) -> Decision:
        actions = self._act(now)
        if self._refused:
            actions.append(Drop(self._refused, DropReason.NO_WORKER))
            self._refused = []
        return Decision(actions)

    def _latency(self, request: Request, worker: WorkerId) -> float:
        variant = self._cluster.models[request.model].variants[0].name
        return self._cluster.profile(variant, worker).latency(request.size)

    def _dispatch(self, now: float, request: Request, worker: WorkerId) -> Dispatch:
        self._batch_id += 1
        start = now + self._cluster.delay(1)
        finish = start + self._latency(request, worker)
        self._running[worker] = self._batch_id
        self._free_at[worker] = finish
        variant = self._cluster.models[request.model].variants[0].name
        return Dispatch(self._batch_id, worker, variant, [request], start, finish)


class Ribbon(SizedPeer):
    """First come, first served; base instances first."""

    def __init__(self, base: str | None = None) -> None:
        super().__init__(base)
        self._queue: deque[Request] = deque()

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._queue.extend(requests)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        gone = {r.id for r in requests}
        self._queue = deque(r for r in self._queue if r.id not in gone)

    def _act(self, now: float) -> list[Action]:
        idle = [w for w in self._workers if w not in self._running] if self._queue else []
        return [self._dispatch(now, self._queue.popleft(), w) for w in idle[: len(self._queue)]]
