"""Workers and lanes of policies that batch by deadlines. The terms:

* **pool**: workers with equal hardware and loaded variants, so that one profile is right for all;
* **lane**: a model on a pool, through the first variant in the model's order that the pool runs.
  A lane holds the model's candidate there: its size, when it is due, the latest time to send it;
* **reach(b)** = delay(b) + ℓ(b) + margin: sent to an idle worker now, a batch of b meets a deadline
  at least reach(b) away.

Requests may have sizes; b counts their items. Usually all have size 1. Then items are requests, and
a batch is found by bisection; otherwise by a loop over its requests.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from ray_slo.core.cluster import DispatchDelay, Kind
from ray_slo.core.decisions import Drop, DropReason
from ray_slo.core.policy import InFlight
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import BatchOutcome, WorkerId
from ray_slo.policies.shared.refusals import TOLERANCE_S

_KEPT = 0.98  # of what a pool learned from its batches, after one more batch
_PACE_MOST = 2.0  # a cold start, or a batch that hangs, says little about the others


class Flight(NamedTuple):
    """A batch that was sent and is not yet reported."""

    batch_id: int
    here_at: float  # time when its payload is at the worker
    latency_s: float
    end_at: float  # predicted


@dataclass(eq=False, repr=False, slots=True)
class Worker:
    """`free_at`: predicted end of its last batch; `overdue`: whether that has passed."""

    id: WorkerId
    rank: int = 0
    pool: Pool = field(init=False)
    flights: list[Flight] = field(default_factory=list)  # the running batch, then one sent ahead
    free_at: float = -math.inf
    overdue: bool = False

    def take_over(self, batch: InFlight) -> None:
        """Add a batch that another policy sent."""
        number = batch.dispatch.batch_id
        self.flights.append(Flight(number, batch.here_at, batch.latency_s, batch.end_at))
        self.free_at = batch.end_at


@dataclass(eq=False, repr=False, slots=True)
class Times:
    """Measured times of recent batches, compared with those that profiles predict.

    Attributes:
        early_s: the longest time by which a batch ended earlier than predicted.
        pace: total measured time over total predicted time. A live profile holds for almost every
            batch, so the mean batch takes less. Deadlines need the profile, and loads the mean.
    """

    early_s: float = 0.0
    pace: float = 1.0
    _took_s: float = 0.0
    _predicted_s: float = 0.0

    def add(self, flight: Flight, outcome: BatchOutcome) -> None:
        """Learn from the first batch of a worker, which has finished."""
        self.early_s = max(flight.end_at - outcome.finished_at, _KEPT * self.early_s)
        predicted_s = flight.latency_s
        took_s = min(outcome.finished_at - outcome.started_at, _PACE_MOST * predicted_s)
        self._took_s = _KEPT * self._took_s + took_s
        self._predicted_s = _KEPT * self._predicted_s + predicted_s
        # Three digits: the rounding of clocks is no difference.
        self.pace = round(self._took_s / self._predicted_s, 3)


@dataclass(eq=False, repr=False, slots=True)
class Pool:
    """Workers with equal hardware and loaded variants.

    Attributes:
        kind: their hardware and loaded variants.
        size: number of workers.
        lanes: lanes of the models that it serves; models: number of these models.
        load: share of the workers that the measured rates keep busy (`Deferred` measures it).
        round_s: time in which the workers serve every model once; 0 if they do not serve models in
            turn (`Deferred` sets it).
        wait_s: time that a due batch may have to wait for a worker (`Deferred` learns it).
        times: what its recent batches tell about the profiles.
        first: due lanes that go before the others in overload, the best one last; `look_in`:
            number of dispatches until they are determined again (`Deferred` does).
    """

    order: int
    kind: Kind
    wait_s: float = 0.0
    times: Times = field(default_factory=Times)
    size: int = 0
    load: float = 0.0
    round_s: float = 0.0
    first: list[Lane] = field(default_factory=list)
    look_in: int = 0
    lanes: list[Lane] = field(default_factory=list)
    models: int = 0
    idle: list[tuple[int, Worker]] = field(default_factory=list)  # heap by rank
    # Busy workers by predicted end: one batch in flight, and one running + one sent ahead.
    _single: list[tuple[float, int, Worker]] = field(default_factory=list)
    _sent_ahead: list[tuple[float, int, Worker]] = field(default_factory=list)
    overdue: int = 0  # workers past their predicted end
    ready: list[tuple[float, int, Lane]] = field(default_factory=list)  # due, by `latest`
    timer_at: float = math.inf  # time when a batch may be sent ahead
    _free_from: float = -math.inf  # cached until a worker is filed again, or is overdue

    def place(self, worker: Worker) -> None:
        """(Re)file a worker whose batches in flight changed."""
        self._free_from = -math.inf
        if worker.overdue:
            worker.overdue = False
            self.overdue -= 1
        if not worker.flights:
            heappush(self.idle, (worker.rank, worker))
        else:
            flights = len(worker.flights)
            heap = self._single if flights == 1 else self._sent_ahead
            # While workers idle, no code reads the heap, and stale entries would pile up.
            while heap and (heap[0][2].free_at != heap[0][0] or len(heap[0][2].flights) != flights):
                heappop(heap)
            heappush(heap, (worker.free_at, worker.rank, worker))

    def next_free(self, now: float) -> Worker | None:
        """The busy worker with the nearest predicted end after now that has nothing sent ahead."""
        return self._first(self._single, 1, now)

    def free_from(self, now: float) -> float:
        """The earliest time when a worker may be free; an overdue one may become free at once."""
        if now < self._free_from:
            return self._free_from
        if self.idle:
            return now
        first, second = self._first(self._single, 1, now), self._first(self._sent_ahead, 2, now)
        if self.overdue:
            return now
        self._free_from = min((w.free_at for w in (first, second) if w), default=now)
        return self._free_from

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


@dataclass(eq=False, repr=False, slots=True)
class Lane:
    """A model on a pool, and the model's candidate batch there.

    Attributes:
        max_batch_size: limit of the profile and the policy; one request may exceed the policy's.
        need: need[b − 1] = ℓ(b) + margin, seconds.
        reach: reach[b − 1] = delay(b) + ℓ(b) + margin, seconds.
        rush: the reach from which `latest` follows: `reach`, or that of a faster lane in reserve.
        target: heads are dropped for batches up to this size; 1 for "take the deadline prefix".
        go_size: queue length at which the candidate is due at once (`Deferred` sets it).
        latest, size: of the candidate: latest time to send it (seconds), and its items.
        count: number of requests in the candidate.
        ready: whether the candidate is due; if not, it is due at `timer_at`.
        due_since: time since which a candidate has been due, seconds.
    """

    order: int
    model: ModelState
    pool: Pool
    variant: str
    profile: LatencyProfile
    max_batch_size: int = field(init=False)
    delay: DispatchDelay = field(init=False)
    need: list[float] = field(init=False)
    reach: list[float] = field(init=False)
    rush: list[float] = field(init=False)
    target: int = 1
    go_size: float = math.inf
    due_since: float = math.inf
    timer_at: float = math.inf
    latest: float = math.inf
    size: int = 0
    count: int = 0
    ready: bool = False

    def set_times(
        self,
        delay: DispatchDelay,
        margin_s: float,
        max_batch_size: int | None,
        factor: float = 1.0,
    ) -> None:
        """Set all times that follow from the profile, with its latencies times `factor`."""
        table = self.profile.table
        self.max_batch_size = min(len(table), max_batch_size or len(table))
        self.delay = delay
        self.need = [factor * t + margin_s for t in table]
        self.reach = self.rush = [t + delay(b) for b, t in enumerate(self.need, start=1)]

    def clear(self) -> None:
        """Remove the candidate."""
        self.timer_at = self.latest = math.inf
        self.size = 0
        self.ready = False

    def gather(self, now: float, free_at: float, target: int) -> tuple[int, int]:
        """GETBATCH: (first, size) of the batch `queue[first : first + size]` for a worker that is
        free at that time.

        The largest batch whose tightest deadline holds, after passing over heads whose slack
        allows fewer than min(target, requests from there on). Size 0: nothing can be served.
        """
        queue = self.model.queue
        if self.model.sized:
            return self._gather_items(now, free_at, target)
        length = len(queue)
        need = min(target, length, self.max_batch_size)
        size = self.fit(queue[0].deadline, now, free_at, length)
        if size >= need:
            return 0, size
        # The least deadline for `need` requests; near the tail, fewer are needed.
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

    # Requests with sizes ---------------------------------------------------------------------

    def may_give_up(self) -> bool:
        """Whether heads may be dropped for this lane's batch: no other lane could take larger
        ones."""
        return not self.model.sized or len(self.model.lanes) == 1

    def _gather_items(self, now: float, free_at: float, target: int) -> tuple[int, int]:
        for first in range(len(self.model.queue)):
            count, items = self.fit_items(first, now, free_at)
            enough = items >= self.waiting(first, min(target, self.max_batch_size))
            if count and (enough or self.is_full(first + count, items)):
                return first, count
        return len(self.model.queue), 0

    def fit_items(self, first: int, now: float, free_at: float) -> tuple[int, int]:
        """(requests, items) of the largest batch that begins with `queue[first]` and meets its
        deadline. O(requests)."""
        queue, count, items = self.model.queue, 0, 0
        deadline = queue[first].deadline + TOLERANCE_S
        for i in range(first, len(queue)):
            more = items + queue[i].size
            if more > (self.max_batch_size if count else len(self.need)):
                break
            if max(now + self.delay(count + 1), free_at) + self.need[more - 1] > deadline:
                break
            count, items = count + 1, more
        return count, items

    def is_full(self, after: int, items: int) -> bool:
        """Whether the batch is full: not even `queue[after]` fits, if there is one."""
        if items >= self.max_batch_size:
            return True
        queue = self.model.queue
        return after < len(queue) and items + queue[after].size > self.max_batch_size

    def waiting(self, first: int, enough: int) -> int:
        """Number of items that wait from `queue[first]` on, counted up to `enough`."""
        queue, items = self.model.queue, 0
        for i in range(first, len(queue)):
            items += queue[i].size
            if items >= enough:
                return enough
        return items


@dataclass(eq=False, repr=False, slots=True)
class ModelState:
    """A model's queue, its lanes (the fastest first), and the pools of these lanes.

    Attributes:
        sized: a request of another size than 1 has come.
        arrived: items since the load was last measured.
        rate: measured arrivals, items per second (`Deferred` keeps it).
        timer_at: time when the head can no longer be served, seconds.
    """

    order: int
    queue: DeadlineQueue = field(default_factory=DeadlineQueue)
    lanes: list[Lane] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    slo_s: float = math.inf
    sized: bool = False
    arrived: int = 0
    rate: float = 0.0
    reach_1: float = 0.0  # shortest time in which one request can be served
    timer_at: float = math.inf

    def alone_s(self, size: int) -> float:
        """Shortest time in which a request of this size can be served."""
        lanes = self.lanes
        times = (lane.need[size - 1] + lane.delay(1) for lane in lanes if size <= len(lane.need))
        return min(times, default=math.inf if lanes else 0.0)

    def items(self, first: int, count: int) -> int:
        """Number of items in `queue[first : first + count]`."""
        if not self.sized:
            return count
        return sum(self.queue[i].size for i in range(first, first + count))

    def soonest(self, now: float) -> float:
        """Requests with an earlier deadline cannot be served even alone, and not even if a worker
        becomes free as early before its predicted time as one recently did."""
        soonest = math.inf
        for lane in self.lanes:
            pool = lane.pool
            at = max(now + lane.reach[0], pool.free_from(now) - pool.times.early_s + lane.need[0])
            if at < soonest:
                soonest = at
        return soonest if self.lanes else now

    def hopeless(self, now: float) -> list[Drop]:
        """Remove heads that no worker could serve in time, considering their sizes."""
        queue, gone = self.queue, []
        while queue and self.lanes:
            alone_s = self.alone_s(queue[0].size)
            if queue[0].deadline + TOLERANCE_S >= now + alone_s:
                break
            finish_at = now + alone_s if alone_s < math.inf else math.nan
            reason = DropReason.EXPIRED if queue[0].deadline <= now else DropReason.WOULD_MISS
            gone.append(Drop(queue.take(1), reason, finish_at))
        return gone
