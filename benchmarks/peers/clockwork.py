"""Clockwork (Gujarati et al., OSDI 2020), as Symphony §2.2 and SHEPHERD §7 describe it.

For every model and batch size there is a candidate: the earliest deadlines in the queue, to be
started by *latest* = d − ℓ(b). A worker takes the candidate whose latest start is the earliest
among those that can still make it; of one model that is its largest feasible batch. The scheduler
commits: it fills each worker's schedule `schedule_ahead_ms` beyond now, and what is in a committed
batch neither grows nor moves. A committed batch that cannot start in its window is rejected.
Neither paper prints how far ahead; the goodput depends on it strongly, so `symphony-table2` shows
two values.

Worked example: one worker, ℓ(b) = b + 5, SLO 20, nothing ahead. A comes at 0 and runs at once until
6. B, C and D come at 1, 2 and 3: at 6 the candidates are {B}, {B, C}, {B, C, D} with latest starts
15, 14 and 13; the last is the earliest, so all three run until 14. With 10 ahead, B would have been
committed alone at 1, to start at 6.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from heapq import heappop, heappush

from benchmarks.peers.base import (
    TOLERANCE_S,
    Kind,
    Peer,
    PeerQueue,
    PeerWorker,
    Served,
)
from ray_slo.core import Cluster, Request


class _Committed:
    """A batch in a worker's schedule."""

    __slots__ = ("latest", "requests", "served", "worker")

    def __init__(
        self, worker: PeerWorker, served: Served, requests: list[Request], latest: float
    ) -> None:
        self.worker = worker
        self.served = served
        self.requests = requests
        self.latest = latest  # to be sent until


class Clockwork(Peer):
    """Earliest latest-start first, committed ahead.

    Args:
        schedule_ahead_ms: a worker is given work while its schedule ends sooner than this.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(self, schedule_ahead_ms: float = 10.0) -> None:
        super().__init__()
        if not (math.isfinite(schedule_ahead_ms) and schedule_ahead_ms >= 0):
            raise ValueError(f"schedule_ahead_ms must be at least 0, got {schedule_ahead_ms}")
        self._ahead_s = schedule_ahead_ms / 1e3
        self._models: dict[str, PeerQueue] = {}
        self._plans: dict[PeerWorker, deque[_Committed]] = {}
        self._ends: dict[PeerWorker, float] = {}  # of each worker's schedule
        self._open: dict[Kind, list[tuple[float, int, PeerWorker]]] = {}  # heaps by end
        self._windows: list[tuple[float, int, _Committed]] = []
        self._idle: dict[PeerWorker, None] = {}

    def _enqueue(self, now: float, request: Request) -> None:
        queue = self._models.get(request.model)
        if queue is None:
            queue = self._models[request.model] = self._queue(request.model, list(self._served))
        self._push(queue, request)

    def _cancel(self, request: Request) -> None:
        queue = self._models.get(request.model)
        if queue is not None and queue.queue.remove(request):
            return
        for plan in self._plans.values():
            for committed in plan:
                if any(r is request for r in committed.requests):
                    committed.requests = [r for r in committed.requests if r is not request]
                    return

    def _freed(self, worker: PeerWorker) -> None:
        self._idle[worker] = None
        self._reckon(worker, worker.free_at)

    def _changed(self, now: float, cluster: Cluster) -> None:
        waiting = [r for q in self._models.values() for r in q.queue]
        waiting += [r for plan in self._plans.values() for c in plan for r in c.requests]
        self._models, self._windows = {}, []
        self._plans = {w: deque() for w in self._workers.values()}
        self._ends = {}
        self._open = {kind: [] for kind in self._served}
        for worker in self._workers.values():
            self._reckon(worker, worker.free_at)
        self._idle = {w: None for w in self._workers.values() if w.running is None}
        for request in sorted(waiting, key=lambda r: (r.arrival, r.id)):
            self._enqueue(now, request)

    def _reckon(self, worker: PeerWorker, free_at: float) -> None:
        """When the worker's schedule ends, if it is free at `free_at`."""
        end = free_at
        for committed in self._plans[worker]:
            end += committed.served.reach[max(len(committed.requests), 1) - 1]
        if self._ends.get(worker) != end:
            self._ends[worker] = end
            heappush(self._open[worker.kind], (end, worker.rank, worker))

    def _act(self, now: float) -> float:
        windows = self._windows
        while windows and windows[0][0] < now:
            _, _, committed = heappop(windows)
            plan = self._plans.get(committed.worker, ())
            if committed in plan:  # its worker is late: rejected
                plan.remove(committed)
                self._drop(committed.requests, now)
                self._reckon(committed.worker, max(committed.worker.free_at, now))
        self._start(now)
        wake_at = math.inf
        for kind in self._open:
            wake_at = min(wake_at, self._fill(kind, now))
        self._start(now)
        while windows and windows[0][2] not in self._plans.get(windows[0][2].worker, ()):
            heappop(windows)
        return min(wake_at, math.nextafter(windows[0][0], math.inf) if windows else math.inf)

    def _start(self, now: float) -> None:
        """Idle workers start what was committed to them first."""
        for worker in self._idle:
            plan = self._plans[worker]
            while plan and worker.running is None:
                committed = plan.popleft()
                if not committed.requests:
                    continue  # cancelled, all of them
                if committed.latest < now:
                    self._drop(committed.requests, now)
                else:
                    self._dispatch(worker, committed.served, committed.requests, now)
                self._reckon(worker, worker.free_at)
        self._idle = {w: None for w in self._idle if w.running is None and self._plans[w]}

    def _fill(self, kind: Kind, now: float) -> float:
        """Commit batches to workers of a kind; return when one of them takes the next."""
        heap, served_by = self._open[kind], self._served[kind]
        while heap:
            end, _, worker = heap[0]
            if self._ends.get(worker) != end:
                heappop(heap)
                continue
            if end - self._ahead_s > now:
                waits = any(q.queue for m, q in self._models.items() if m in served_by)
                return end - self._ahead_s if waits else math.inf
            start_at = max(end, now)
            if worker.running is not None and worker.free_at <= now:
                # Overdue: its end is not known. It gets nothing until it has ended.
                heappop(heap)
                self._ends.pop(worker)
                continue
            best: tuple[float, int, PeerQueue, int, int] | None = None
            for model, queue in self._models.items():
                if queue.queue and model in served_by:
                    reach = served_by[model].reach
                    first = queue.queue.position(start_at + reach[0] - TOLERANCE_S)
                    if first < len(queue.queue):
                        deadline = queue.queue[first].deadline
                        size = min(
                            bisect_right(reach, deadline - start_at + TOLERANCE_S),
                            len(queue.queue) - first,
                        )
                        if size and (best is None or deadline - reach[size - 1] < best[0]):
                            latest = deadline - reach[size - 1]
                            best = (latest, queue.order, queue, first, size)
            if best is None:
                return math.inf
            latest, _, queue, first, size = best
            served = served_by[queue.model]
            committed = _Committed(
                worker, served, queue.queue.take(size, first), latest + 2 * TOLERANCE_S
            )
            self._plans[worker].append(committed)
            self._serial += 1
            heappush(self._windows, (committed.latest, self._serial, committed))
            heappop(heap)
            self._ends[worker] = start_at + served.reach[size - 1]
            heappush(heap, (self._ends[worker], worker.rank, worker))
            if worker.running is None:
                self._idle[worker] = None
        return math.inf
