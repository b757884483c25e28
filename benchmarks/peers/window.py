"""Eager with window drop: the eager system of Symphony's public artifact.

A free worker takes at once the model whose head has the earliest deadline. The batch is gathered
towards a *target*: the largest b with ℓ(b)·(1 + 1/n) ≤ SLO, where n workers are needed at the
measured rate. Requests are taken from the head of the queue. One joins if a batch of the target
would serve it in time. If fewer are left, a batch of these counts. Otherwise it is dropped, even if
a smaller batch would serve it in time. Then the batch grows past the target while its head allows.

`eager` never drops what it can serve. It falls to small batches instead.

Worked example: ℓ(b) = b + 5, SLO 24, one worker: the target is 7, because 2·12 ≤ 24. Seven requests
wait, and the first one has 11 left, the others 20. A batch of 7 takes 12: the first one is dropped.
The other six take 11, and go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks.peers.base import TOLERANCE_S, Kind, Peer, PeerQueue, PeerWorker
from ray_slo.core import Cluster, Request
from ray_slo.core.load import LoadMonitor

_PERIOD_S = 0.5  # seconds between new targets


class WindowEager(Peer):
    """Eager with window drop; see the module's docstring.

    Args:
        window_s: window in which rates are measured. Until then, n is the number of workers.
    """

    def __init__(self, *, window_s: float = 5.0) -> None:
        super().__init__()
        self._window_s = window_s
        self._queues: dict[str, PeerQueue] = {}
        self._monitors: dict[str, LoadMonitor] = {}
        self._targets: dict[tuple[Kind, str], int] = {}
        self._slos: Mapping[str, float] = {}
        self._started = self._targets_at = -math.inf
        self._idle: dict[PeerWorker, None] = {}

    def _enqueue(self, now: float, request: Request) -> None:
        if math.isinf(self._started):
            self._started = now
        self._push(self._queue_of(request.model), request)
        self._monitors.setdefault(request.model, LoadMonitor("mean", self._window_s)).arrived(now)

    def _queue_of(self, model: str) -> PeerQueue:
        if (queue := self._queues.get(model)) is None:
            queue = self._queues[model] = self._queue(model, list(self._served))
        return queue

    def _cancel(self, request: Request) -> None:
        self._queue_of(request.model).queue.remove(request)

    def _freed(self, worker: PeerWorker) -> None:
        self._idle[worker] = None

    def _changed(self, now: float, cluster: Cluster) -> None:
        self._slos = {name: model.latency_slo_s for name, model in cluster.models.items()}
        before, self._queues = self._queues, {}
        for queue in before.values():
            for request in queue.queue:
                self._push(self._queue_of(request.model), request)
        self._idle = {w: None for w in self._workers.values() if w.running is None}
        self._targets_at = -math.inf

    def _act(self, now: float) -> float:
        if now >= self._targets_at + _PERIOD_S:
            self._set_targets(now)
        for worker in list(self._idle):
            if not any(q.queue for q in self._queues.values()):
                break
            self._run(worker, now)
        return math.inf

    def _set_targets(self, now: float) -> None:
        self._targets_at = now
        measured = now >= self._started + self._window_s
        for kind, models in self._served.items():
            for name, served in models.items():
                rate = math.inf
                if measured and name in self._monitors:
                    rate = self._monitors[name].rate(now)
                self._targets[kind, name] = target(
                    served.reach, self._slos[name], rate, len(self._workers)
                )

    def _run(self, worker: PeerWorker, now: float) -> None:
        """Send a batch of the model with the earliest deadline among those that have a batch."""
        served = self._served[worker.kind]
        waiting = [(q.queue.head.deadline, q.order, q) for q in self._queues.values() if q.queue]
        for _, _, queue in sorted(waiting, key=lambda entry: entry[:2]):
            if (part := served.get(queue.model)) is None:
                continue
            most = self._targets[worker.kind, queue.model]
            if requests := self._gather(queue, part.reach, most, now):
                del self._idle[worker]
                self._dispatch(worker, part, requests, now)
                return

    def _gather(self, queue: PeerQueue, reach: list[float], most: int, now: float) -> list[Request]:
        taken: list[Request] = []
        dropped: list[Request] = []
        waiting = queue.queue
        while waiting and len(taken) < (size := min(most, len(taken) + len(waiting))):
            request = waiting.pop()
            in_time = request.deadline + TOLERANCE_S >= now + reach[size - 1]
            (taken if in_time else dropped).append(request)
        while taken and waiting and len(taken) < len(reach):
            if taken[0].deadline + TOLERANCE_S < now + reach[len(taken)]:
                break
            taken.append(waiting.pop())
        self._drop(dropped, now)
        return taken


def target(reach: list[float], slo_s: float, rate: float, workers: int) -> int:
    """Return the largest b with ℓ(b)·(1 + 1/n) ≤ SLO; 1 if there is none.

    Args:
        reach: reach[b − 1] = ℓ(b), including the delay, in seconds.
        rate: requests per second, which n workers can serve in batches of b.
        workers: upper limit of n.
    """
    for size in range(len(reach), 1, -1):
        latency_s = reach[size - 1]
        needed = min(max(rate * latency_s / size, 1.0), workers)
        if latency_s * (1 + 1 / math.ceil(needed)) <= slo_s + TOLERANCE_S:
            return size
    return 1
