"""Workers and lanes of policies that batch by deadlines. Words used here:

* **pool**: workers alike in hardware and loaded variants, so one profile serves them all;
* **lane**: a model on a pool, through the first variant in the model's order that the pool runs.
  A lane holds the model's candidate there: its size, when it is due, the latest time to send it;
* **reach(b)** = delay(b) + ℓ(b) + margin: sent to an idle worker now, a batch of b meets a deadline
  at least reach(b) away.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from heapq import heappop, heappush
from typing import NamedTuple

from ray_slo.core.cluster import DispatchDelay, Kind
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import WorkerId
from ray_slo.policies.shared.refusals import TOLERANCE_S


class Flight(NamedTuple):
    """A batch that was sent and is not yet reported."""

    batch_id: int
    here_at: float  # when its payload is at the worker
    latency_s: float
    end_at: float  # predicted


class Worker:
    """`free_at`: predicted end of its last batch; `overdue`: whether that has passed."""

    __slots__ = ("flights", "free_at", "id", "overdue", "pool", "rank")

    def __init__(self, id: WorkerId) -> None:
        self.id = id
        self.rank = 0
        self.pool: Pool
        self.flights: list[Flight] = []  # the running batch, then one sent ahead
        self.free_at = -math.inf
        self.overdue = False


class Pool:
    """Workers alike in hardware and loaded variants.

    Attributes:
        kind: their hardware and loaded variants.
        size: how many workers.
        lanes: the models that it serves.
        load: share of the workers that the measured rates keep busy (`Deferred` measures it).
        wait_s: how long a due batch may have to wait for a worker (`Deferred` learns it).
    """

    __slots__ = (
        "_sent_ahead",
        "_single",
        "idle",
        "kind",
        "lanes",
        "load",
        "order",
        "overdue",
        "ready",
        "size",
        "timer_at",
        "wait_s",
    )

    def __init__(self, order: int, kind: Kind, wait_s: float = 0.0) -> None:
        self.order = order
        self.kind = kind
        self.size = 0
        self.load = 0.0
        self.wait_s = wait_s
        self.lanes: list[Lane] = []
        self.idle: list[tuple[int, Worker]] = []  # heap by rank
        # Busy workers by predicted end: one batch in flight, and one running + one sent ahead.
        self._single: list[tuple[float, int, Worker]] = []
        self._sent_ahead: list[tuple[float, int, Worker]] = []
        self.overdue = 0  # workers past their predicted end
        self.ready: list[tuple[float, int, Lane]] = []  # heap of due candidates by latest
        self.timer_at = math.inf  # a batch may be sent ahead then

    def place(self, worker: Worker) -> None:
        """(Re)file a worker whose batches in flight changed."""
        if worker.overdue:
            worker.overdue = False
            self.overdue -= 1
        if not worker.flights:
            heappush(self.idle, (worker.rank, worker))
        else:
            flights = len(worker.flights)
            heap = self._single if flights == 1 else self._sent_ahead
            # Nobody asks for ends while workers idle: without this, stale ones would pile up.
            while heap and (heap[0][2].free_at != heap[0][0] or len(heap[0][2].flights) != flights):
                heappop(heap)
            heappush(heap, (worker.free_at, worker.rank, worker))

    def next_free(self, now: float) -> Worker | None:
        """The busy worker with the nearest predicted end after now that has nothing sent ahead."""
        return self._first(self._single, 1, now)

    def free_from(self, now: float) -> float:
        """The earliest time a worker may be free. An overdue one may be at any moment."""
        if self.idle:
            return now
        first, second = self._first(self._single, 1, now), self._first(self._sent_ahead, 2, now)
        if self.overdue:
            return now
        return min((w.free_at for w in (first, second) if w), default=now)

    def _first(
        self, heap: list[tuple[float, int, Worker]], flights: int, now: float
    ) -> Worker | None:
        while heap:
            free_at, _, worker = heap[0]
            if worker.free_at == free_at and len(worker.flights) == flights:
                if free_at > now:
                    return worker
                if not worker.overdue:
                    worker.overdue = True
                    self.overdue += 1
            heappop(heap)
        return None


class Lane:
    """A model on a pool, and the model's candidate batch there.

    Attributes:
        max_batch_size: of the profile and the policy.
        need: need[b − 1] = ℓ(b) + margin, seconds.
        reach: reach[b − 1] = delay(b) + ℓ(b) + margin, seconds.
        target: heads are dropped for batches up to this size; 1 for "take the deadline prefix".
        go_size: queue length at which the candidate is due at once (`Deferred` sets it).
        latest, size: of the candidate: to be sent until (seconds), requests in it.
        ready: it is due; else `timer_at` says from when on.
        due_since: since when there has been a candidate that is due, seconds.
    """

    __slots__ = (
        "due_since",
        "go_size",
        "latest",
        "max_batch_size",
        "model",
        "need",
        "order",
        "pool",
        "profile",
        "reach",
        "ready",
        "size",
        "target",
        "timer_at",
        "variant",
    )

    def __init__(
        self,
        order: int,
        model: ModelState,
        pool: Pool,
        variant: str,
        profile: LatencyProfile,
    ) -> None:
        self.order = order
        self.model = model
        self.pool = pool
        self.variant = variant
        self.profile = profile
        self.target = 1
        self.go_size: float = math.inf
        self.due_since = self.timer_at = math.inf
        self.clear()

    def set_times(self, delay: DispatchDelay, margin_s: float, max_batch_size: int | None) -> None:
        table = self.profile.table[:max_batch_size]
        self.max_batch_size = len(table)
        self.need = [t + margin_s for t in table]
        self.reach = [t + delay(b) for b, t in enumerate(self.need, start=1)]

    def clear(self) -> None:
        """No candidate."""
        self.timer_at = self.latest = math.inf
        self.size = 0
        self.ready = False

    def gather(self, now: float, free_at: float, target: int) -> tuple[int, int]:
        """GETBATCH: (first, size), the batch `queue[first : first + size]` for a worker free then.

        The largest batch whose tightest deadline holds, after passing over heads whose slack
        allows fewer than min(target, requests from there on). Size 0: nothing can be served.
        """
        queue = self.model.queue
        length = len(queue)
        need = min(target, length, self.max_batch_size)
        size = self.fit(queue[0].deadline, now, free_at, length)
        if size >= need:
            return 0, size
        # What the deadline must be for `need` requests; nearer the tail fewer are asked for.
        slack = max(now + self.reach[need - 1], free_at + self.need[need - 1]) - TOLERANCE_S
        first = min(queue.position(slack), length - need)
        for i in range(first, length):
            size = self.fit(queue[i].deadline, now, free_at, length - i)
            if size >= min(need, length - i):
                return i, size
        return length, 0

    def fit(self, deadline: float, now: float, free_at: float, length: int) -> int:
        """The largest batch of at most `length` that meets `deadline`. O(log max_batch_size)."""
        size = min(length, self.max_batch_size)
        slack = deadline - now + TOLERANCE_S
        if self.reach[size - 1] > slack:
            size = bisect_right(self.reach, slack, hi=size)
        if free_at > now:
            size = min(size, bisect_right(self.need, deadline - free_at + TOLERANCE_S, hi=size))
        return size


class ModelState:
    """A model's queue and lanes (the quickest lane first).

    Attributes:
        arrived: requests since the load was last measured.
        rate: measured arrivals per second (`Deferred` keeps it).
        timer_at: when the head can be served no more, seconds.
    """

    __slots__ = ("arrived", "lanes", "order", "queue", "rate", "reach_1", "slo_s", "timer_at")

    def __init__(self, order: int) -> None:
        self.order = order
        self.queue = DeadlineQueue()
        self.lanes: list[Lane] = []
        self.slo_s = math.inf
        self.arrived = 0
        self.rate = 0.0
        self.reach_1 = 0.0  # shortest time in which one request can be served
        self.timer_at = math.inf
