"""Clockwork (Gujarati et al., OSDI 2020): earliest required start first, committed ahead.

This follows §5.3 of its paper, and its published scheduler ("INFER5") for what the papers that
compare with it leave open:

* A model has a queue per batch size b, with the requests that can still be served in a batch of b.
  Heads that cannot are dropped when a worker looks at the queue.
* A queue makes a *strategy*: a batch of b that must start by d − ℓ(b). Here d is the deadline of
  its head *at that time*. A worker takes the strategy with the earliest required start over all
  models. It runs the largest batch of that model that can be filled and meets its deadlines.
  Requests before that batch are given up. If the batch is smaller than the strategy's, the strategy
  is void. Then the model makes new ones, of the sizes that can be filled.
* A strategy keeps its required start, even when this is past. So a model whose head expires while
  others run comes first, and serves requests that have arrived since. No model starves.
* A worker is given work until its schedule ends `schedule_ahead_ms` after now. A committed batch
  neither grows nor moves. If it cannot start in its window, it is rejected.
* Batches must end `slo_buffer_ms` before the deadline.

The defaults are the published constants. With them, `symphony-table2` agrees with the paper.

Equal workers share their strategies here. In Clockwork, each worker has its own, of different age.

Worked example: one worker, ℓ(b) = b + 5, SLO 20, nothing ahead, no buffer. A arrives at 0, and runs
until 6. B, C and D arrive at 1, 2 and 3. At 6, a batch of three is the largest that can be filled
and ends in time, so all three run until 14. With 10 ahead, B would have been committed alone at 1,
to start at 6.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
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
        self.latest = latest  # latest start


class _Model:
    """A model on workers of one kind."""

    __slots__ = ("drained_at", "queue", "reach", "served", "sizes", "strategy")

    def __init__(
        self, queue: PeerQueue, served: Served, sizes: Sequence[int], buffer_s: float
    ) -> None:
        self.queue = queue
        self.served = served
        self.sizes = sizes
        self.reach = [served.reach[b - 1] + buffer_s for b in sizes]
        self.drained_at = -math.inf  # start of the batch for which heads were last dropped
        self.strategy: tuple[float, int] | None = None  # (required start, batch size)

    def fill(self, start_at: float) -> int:
        """Return the index of the largest batch size that fills in time from `start_at`, or −1."""
        queue = self.queue.queue

        def short(i: int) -> bool:
            in_time = len(queue) - queue.position(start_at + self.reach[i] - TOLERANCE_S)
            return in_time < self.sizes[i]

        return bisect_left(range(len(self.sizes)), True, key=short) - 1

    def propose(self, largest: int) -> tuple[float, int] | None:
        """Return the strategy with the earliest required start, up to `sizes[largest]`."""
        queue, reach = self.queue.queue, self.reach
        if not queue:
            return None
        best: tuple[float, int] | None = None
        # If queues have the same head, that of the largest size must start first.
        slack = queue[len(queue) - 1].deadline - self.drained_at + TOLERANCE_S
        i = min(largest, bisect_right(reach, slack) - 1)
        while i >= 0:
            head = queue.position(self.drained_at + reach[i] - TOLERANCE_S)
            start_by = queue[head].deadline - reach[i]
            if best is None or start_by < best[0]:
                best = start_by, self.sizes[i]
            if not head:
                break
            slack = queue[head - 1].deadline - self.drained_at + TOLERANCE_S
            i = min(i, bisect_right(reach, slack)) - 1
        return best


class Clockwork(Peer):
    """Earliest required start first, committed ahead.

    Args:
        schedule_ahead_ms: a worker is given work while its schedule ends sooner than this.
        batch_sizes: batch sizes of a model, among those of its profile; None for all. Clockwork's
            runtime compiled 1, 2, 4, 8 and 16; Symphony §5.1 added the others for its comparison.
        slo_buffer_ms: batches end this long before their deadlines, for the way back.
        max_execution_ms: batches that take longer are not made, except single requests.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        schedule_ahead_ms: float = 10.0,
        batch_sizes: Sequence[int] | None = None,
        slo_buffer_ms: float = 5.0,
        max_execution_ms: float = 250.0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("schedule_ahead_ms", schedule_ahead_ms),
            ("slo_buffer_ms", slo_buffer_ms),
            ("max_execution_ms", max_execution_ms),
        ):
            if not (value >= 0):
                raise ValueError(f"{name} must be at least 0, got {value}")
        if batch_sizes is not None and min(batch_sizes, default=0) != 1:
            raise ValueError(f"batch_sizes must begin with 1, got {list(batch_sizes)}")
        self._ahead_s = schedule_ahead_ms / 1e3
        self._batch_sizes = None if batch_sizes is None else sorted(set(batch_sizes))
        self._buffer_s = slo_buffer_ms / 1e3
        self._max_execution_s = max_execution_ms / 1e3
        self._queues: dict[str, PeerQueue] = {}
        self._models: dict[Kind, dict[str, _Model]] = {}
        # Heaps of (required start, batch size, order, model); stale if the model has another.
        self._strategies: dict[Kind, list[tuple[float, int, int, _Model]]] = {}
        self._plans: dict[PeerWorker, deque[_Committed]] = {}
        self._ends: dict[PeerWorker, float] = {}  # when each worker's schedule ends
        self._open: dict[Kind, list[tuple[float, int, PeerWorker]]] = {}  # heaps by end
        self._windows: list[tuple[float, int, _Committed]] = []
        self._idle: dict[PeerWorker, None] = {}

    def _enqueue(self, now: float, request: Request) -> None:
        name = request.model
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = self._queue(name, list(self._served))
            for kind, served_by in self._served.items():
                if (served := served_by.get(name)) is not None:
                    sizes = self._sizes(served)
                    self._models[kind][name] = _Model(queue, served, sizes, self._buffer_s)
        self._push(queue, request)
        for kind, models in self._models.items():
            if (model := models.get(name)) is not None and model.strategy is None:
                self._propose(kind, model, len(model.sizes) - 1)

    def _sizes(self, served: Served) -> Sequence[int]:
        sizes = self._batch_sizes or range(1, len(served.reach) + 1)
        latency = served.profile.table
        return [
            b
            for b in sizes
            if b == 1 or (b <= len(latency) and latency[b - 1] <= self._max_execution_s)
        ]

    def _propose(self, kind: Kind, model: _Model, largest: int) -> None:
        model.strategy = model.propose(largest)
        if model.strategy is not None:
            heappush(self._strategies[kind], (*model.strategy, model.queue.order, model))

    def _cancel(self, request: Request) -> None:
        queue = self._queues.get(request.model)
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
        waiting = [r for q in self._queues.values() for r in q.queue]
        waiting += [r for plan in self._plans.values() for c in plan for r in c.requests]
        self._queues, self._windows = {}, []
        self._models = {kind: {} for kind in self._served}
        self._strategies = {kind: [] for kind in self._served}
        self._plans = {w: deque() for w in self._workers.values()}
        self._ends = {}
        self._open = {kind: [] for kind in self._served}
        for worker in self._workers.values():
            self._reckon(worker, worker.free_at)
        self._idle = {w: None for w in self._workers.values() if w.running is None}
        for request in sorted(waiting, key=lambda r: (r.arrival, r.id)):
            self._enqueue(now, request)

    def _reckon(self, worker: PeerWorker, free_at: float) -> None:
        """Compute when the worker's schedule ends, if it is free at `free_at`."""
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
            if committed in plan:  # its worker is too late, so the batch is rejected
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
        """Let idle workers start their first committed batch."""
        for worker in self._idle:
            plan = self._plans[worker]
            while plan and worker.running is None:
                committed = plan.popleft()
                if not committed.requests:
                    continue  # all of its requests were cancelled
                if committed.latest < now:
                    self._drop(committed.requests, now)
                else:
                    self._dispatch(worker, committed.served, committed.requests, now)
                self._reckon(worker, worker.free_at)
        self._idle = {w: None for w in self._idle if w.running is None and self._plans[w]}

    def _fill(self, kind: Kind, now: float) -> float:
        """Commit batches to workers of a kind; return the time when one can take the next."""
        workers, strategies = self._open[kind], self._strategies[kind]
        while workers:
            end, _, worker = workers[0]
            if self._ends.get(worker) != end:
                heappop(workers)
                continue
            while strategies and strategies[0][3].strategy != strategies[0][:2]:
                heappop(strategies)
            if not strategies:
                return math.inf
            if end - self._ahead_s > now:
                return end - self._ahead_s
            if worker.running is not None and worker.free_at <= now:
                # Overdue, so its end is unknown. It gets no work until the batch has ended.
                heappop(workers)
                self._ends.pop(worker)
                continue
            _, strategy_size, _, model = heappop(strategies)
            start_at = model.drained_at = max(end, now)
            i = model.fill(start_at)
            if i >= 0 and model.sizes[i] >= strategy_size:
                self._commit(worker, model, i, start_at, now)
                heappop(workers)
                heappush(workers, (self._ends[worker], worker.rank, worker))
                i = len(model.sizes) - 1
            self._propose(kind, model, i)
        return math.inf

    def _commit(
        self, worker: PeerWorker, model: _Model, i: int, start_at: float, now: float
    ) -> None:
        """Append a batch of `model.sizes[i]` to the worker's schedule, at `start_at`."""
        size, queue = model.sizes[i], model.queue.queue
        self._drop(queue.take(queue.position(start_at + model.reach[i] - TOLERANCE_S)), now)
        requests = queue.take(size)
        latest = requests[0].deadline - model.served.reach[size - 1] + 2 * TOLERANCE_S
        committed = _Committed(worker, model.served, requests, latest)
        self._plans[worker].append(committed)
        self._serial += 1
        heappush(self._windows, (latest, self._serial, committed))
        self._ends[worker] = start_at + model.served.reach[size - 1]
        if worker.running is None:
            self._idle[worker] = None
