"""What deadline-aware batching policies share: queues, workers, matchmaking, lazy timers.

`BatchingPolicy` is Symphony's Algorithm 1 with the delays of Appendix D; a policy says when a
candidate batch is due (`_send_at`) and how large a batch is worth dropping the head for
(`Lane.target`). Words used here:

* **pool**: workers alike in hardware and loaded variants, so one profile serves them all;
* **lane**: a model on a pool, through the first variant in the model's order that the pool runs.
  A lane holds the model's candidate there: its size, when it is due, the latest time to send it;
* **reach(b)** = delay(b) + ℓ(b) + margin: sent to an idle worker now, a batch of b meets a deadline
  at least reach(b) away.

Every arrival makes its model dirty; `decide` updates a dirty model's candidates once, however
many requests came. Times at which something must happen lie in heaps whose stale entries are
thrown away when they surface. So an arrival costs O(log M + log G) for M models and G pools'
workers, whatever the queue's length.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

from ray_slo.core.cluster import Cluster, DispatchDelay, Model
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import BatchOutcome, Request, WorkerId

TOLERANCE_S = 5e-7
"""A deadline may be missed by this much: clocks and sums of floats are no better."""


LIVE_JITTER = 0.05
"""Of the shortest SLO: how much earlier than it must a live deferred batch goes."""

LIVE_MARGIN = 0.02
"""Of the shortest SLO: how much earlier than it must a live batch ends that is as large as its
deadlines allow."""

Kind = tuple[str, frozenset[str]]


class _Flight(NamedTuple):
    """A batch that was sent and is not yet reported."""

    batch_id: int
    here_at: float  # when its payload is at the worker
    latency_s: float
    end_at: float  # predicted


class _Worker:
    __slots__ = ("flights", "free_at", "id", "overdue", "pool", "rank")

    def __init__(self, id: WorkerId) -> None:
        self.id = id
        self.rank = 0
        self.pool: Pool
        self.flights: list[_Flight] = []  # the running batch, then one sent ahead
        self.free_at = -math.inf  # predicted end of the last of them
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
        "wait_s",
        "wake_at",
    )

    def __init__(self, order: int, kind: Kind, wait_s: float = 0.0) -> None:
        self.order = order
        self.kind = kind
        self.size = 0
        self.load = 0.0
        self.wait_s = wait_s
        self.lanes: list[Lane] = []
        self.idle: list[tuple[int, _Worker]] = []  # heap by rank
        # Busy workers by predicted end: one batch in flight, and one running + one sent ahead.
        self._single: list[tuple[float, int, _Worker]] = []
        self._sent_ahead: list[tuple[float, int, _Worker]] = []
        self.overdue = 0  # workers past their predicted end
        self.ready: list[tuple[float, int, Lane]] = []  # heap of due candidates by latest
        self.wake_at = math.inf

    def place(self, worker: _Worker) -> None:
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

    def next_free(self, now: float) -> _Worker | None:
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
        self, heap: list[tuple[float, int, _Worker]], flights: int, now: float
    ) -> _Worker | None:
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
        send_at, latest, size: the candidate: due from, to be sent until (seconds), requests in it.
        ready: it is due.
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
        "send_at",
        "size",
        "target",
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
        self.due_since = math.inf
        self.clear()

    def set_times(self, delay: DispatchDelay, margin_s: float, max_batch_size: int | None) -> None:
        table = self.profile.table[:max_batch_size]
        self.max_batch_size = len(table)
        self.need = [t + margin_s for t in table]
        self.reach = [t + delay(b) for b, t in enumerate(self.need, start=1)]

    def clear(self) -> None:
        """No candidate."""
        self.send_at = self.latest = math.inf
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
        size = self._fit(queue[0].deadline, now, free_at, length)
        if size >= need:
            return 0, size
        # What the deadline must be for `need` requests; nearer the tail fewer are asked for.
        slack = max(now + self.reach[need - 1], free_at + self.need[need - 1]) - TOLERANCE_S
        first = min(queue.position(slack), length - need)
        for i in range(first, length):
            size = self._fit(queue[i].deadline, now, free_at, length - i)
            if size >= min(need, length - i):
                return i, size
        return length, 0

    def _fit(self, deadline: float, now: float, free_at: float, length: int) -> int:
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
        drop_at: when the head can be served no more, seconds.
    """

    __slots__ = ("arrived", "drop_at", "lanes", "order", "queue", "rate", "reach_1", "slo_s")

    def __init__(self, order: int) -> None:
        self.order = order
        self.queue = DeadlineQueue()
        self.lanes: list[Lane] = []
        self.slo_s = math.inf
        self.arrived = 0
        self.rate = 0.0
        self.reach_1 = 0.0  # shortest time in which one request can be served
        self.drop_at = math.inf


class BatchingPolicy(ABC):
    """Algorithm 1; a subclass says when a candidate is due (`_send_at`).

    Args:
        max_batch_size: upper bound beside the profile's; a full batch is due at once.
        margin_ms: kept between a batch's predicted finish and its tightest deadline.

    Raises:
        ValueError: an argument out of its range.
    """

    serves_late: ClassVar[bool] = False
    chooses_variants: ClassVar[bool] = False
    serves_tasks: ClassVar[bool] = False

    def __init__(self, *, max_batch_size: int | None = None, margin_ms: float = 0.0) -> None:
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self._max_batch_size = max_batch_size
        # First come, first served, a request at a time, may be asked of any requests.
        self.counts_requests = max_batch_size != 1
        self._margin_s = non_negative("margin_ms", margin_ms) / 1e3
        self._delay = DispatchDelay()
        self._models: dict[str, ModelState] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._pools: list[Pool] = []
        self._dirty: dict[ModelState, None] = {}  # dicts, as sets have no stable order
        self._active: dict[Pool, None] = {}
        self._due: list[tuple[float, int, Lane]] = []
        self._wakes: list[tuple[float, int, Pool]] = []
        self._drops: list[tuple[float, int, ModelState]] = []
        self._serial = 0
        self._batch_id = 0
        self._paid: float | None = None  # of the next dispatch, where a policy has one
        self._taken = False  # workers will be free later than they were going to be
        self._actions: list[Action] = []

    # What a policy decides -------------------------------------------------------------------

    @abstractmethod
    def _send_at(self, lane: Lane, first: int, size: int, now: float) -> float:
        """When the candidate `queue[first : first + size]` (not a full one) is due, seconds."""

    def _waited(self, pool: Pool, wait_s: float) -> None:  # noqa: B027 - a hook
        """A batch is sent that was due for so long."""

    def _measure(self, now: float) -> None:  # noqa: B027 - a hook
        """Called first in `decide`: adapt the lanes' targets to the measured load."""

    # Events ----------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        models, dirty = self._models, self._dirty
        for request in requests:
            model = models.get(request.model) or self._model(request.model)
            model.queue.push(request)
            model.arrived += 1
            dirty[model] = None

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            model = self._models.get(request.model)
            if model is not None and model.queue.remove(request):
                self._dirty[model] = None

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        state = self._workers.get(worker)
        if state is None:
            return
        flights = state.flights
        for i, flight in enumerate(flights):
            if flight.batch_id == outcome.batch_id:
                del flights[i]
                if flights:
                    if i == 0:  # the batch sent ahead starts now, not when it was predicted to
                        rest = flights[0]
                        start_at = max(outcome.finished_at, rest.here_at)
                        flights[0] = rest._replace(end_at=start_at + rest.latency_s)
                    state.free_at = flights[0].end_at
                    self._taken = True
                state.pool.place(state)
                self._active[state.pool] = None
                return

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._delay = cluster.delay
        waits = {pool.kind: pool.wait_s for pool in self._pools}
        pools: dict[Kind, Pool] = {}
        known, self._workers = self._workers, {}
        for rank, worker in enumerate(cluster.workers.values()):
            kind = (worker.hardware, worker.loaded)
            if (pool := pools.get(kind)) is None:
                pool = pools[kind] = Pool(self._next_serial(), kind, waits.get(kind, 0.0))
            state = self._workers[worker.id] = known.get(worker.id) or _Worker(worker.id)
            state.rank, state.pool, state.overdue = rank, pool, False
            pool.size += 1
            pool.place(state)
        self._pools = list(pools.values())

        for name in cluster.models:
            self._model(name)
        for name, model in list(self._models.items()):
            if (spec := cluster.models.get(name)) is not None:
                model.slo_s = spec.latency_slo_s
                lanes = [self._lane(model, spec, *kind, pool) for kind, pool in pools.items()]
                model.lanes = sorted(filter(None, lanes), key=lambda lane: lane.reach[0])
            elif model.queue:  # its requests wait until their deadline: the model may come back
                model.lanes = []
            else:
                del self._models[name]
            model.reach_1 = model.lanes[0].reach[0] if model.lanes else 0.0
            model.drop_at = math.inf
        self._dirty = dict.fromkeys(self._models.values())
        self._active = {}
        self._due, self._wakes, self._drops = [], [], []  # no timer of before is valid

    def _model(self, name: str) -> ModelState:
        if (model := self._models.get(name)) is None:
            model = self._models[name] = ModelState(self._next_serial())
        return model

    def _lane(
        self, model: ModelState, spec: Model, hardware: str, loaded: frozenset[str], pool: Pool
    ) -> Lane | None:
        """Through the first variant that is loaded and has a profile; None without one."""
        for variant in spec.variants:
            if variant.name in loaded and (profile := variant.profiles.get(hardware)):
                lane = Lane(self._next_serial(), model, pool, variant.name, profile)
                lane.set_times(self._delay, self._margin_s, self._max_batch_size)
                pool.lanes.append(lane)
                return lane
        return None

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    # Decisions -------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        self._actions = []
        self._measure(now)
        self._fire_timers(now)
        while self._dirty or self._active:
            if self._dirty:
                dirty, self._dirty = self._dirty, {}
                for model in dirty:
                    self._update(model, now)
            while self._active:
                active, self._active = self._active, {}
                for pool in active:
                    self._match(pool, now)
            if self._taken:
                self._taken = self._find_hopeless(now)
        return Decision(self._actions, self._wake_at())

    def _fire_timers(self, now: float) -> None:
        due, wakes, drops = self._due, self._wakes, self._drops
        while due and due[0][0] <= now:
            send_at, _, lane = heappop(due)
            if lane.send_at == send_at and not lane.ready:
                self._make_ready(lane, now)
        while wakes and wakes[0][0] <= now:
            wake_at, _, pool = heappop(wakes)
            if pool.wake_at == wake_at:
                pool.wake_at = math.inf
                self._active[pool] = None
        while drops and drops[0][0] <= now:
            drop_at, _, model = heappop(drops)
            if model.drop_at == drop_at:
                model.drop_at = math.inf
                self._dirty[model] = None

    def _wake_at(self) -> float:
        """The earliest timer that is still valid."""
        due, wakes, drops = self._due, self._wakes, self._drops
        while due and (due[0][2].send_at != due[0][0] or due[0][2].ready):
            heappop(due)
        while wakes and wakes[0][2].wake_at != wakes[0][0]:
            heappop(wakes)
        while drops and drops[0][2].drop_at != drops[0][0]:
            heappop(drops)
        wake_at = due[0][0] if due else math.inf
        if drops and drops[0][0] < wake_at:
            wake_at = drops[0][0]
        if wakes and wakes[0][0] < wake_at:
            wake_at = wakes[0][0]
        return wake_at

    def _update(self, model: ModelState, now: float) -> None:
        """UPDATECANDIDATE on every lane of a model; requests that cannot be served leave."""
        queue, lanes = model.queue, model.lanes
        if (length := len(queue)) and len(lanes) == 1 and lanes[0].pool.idle:
            # The usual case, cut short: one lane, an idle worker, and all that waits fits a batch.
            lane, deadline = lanes[0], queue[0].deadline
            size = min(length, lane.max_batch_size)
            if lane.reach[size - 1] <= deadline - now + TOLERANCE_S:
                self._file(lane, 0, size, now)
                self._set_drop_at(model, deadline - model.reach_1 + 2 * TOLERANCE_S)
                return
        if queue:
            soonest = self._soonest(model, now)
            if queue[0].deadline + TOLERANCE_S < soonest:
                self._refuse(model, queue.take(queue.position(soonest - TOLERANCE_S)), now)
        idle = 0
        for lane in lanes:
            idle += len(lane.pool.idle)
        for lane in lanes:
            size = 0
            if queue:
                # While a second worker idles, a head that is dropped wins nothing.
                first, size = lane.gather(now, now, lane.target if idle < 2 else 1)
                if first and lane is lanes[0]:
                    self._refuse(model, queue.take(first), now)
                    first = 0
            if not size:
                lane.clear()
                continue
            self._file(lane, first, size, now)
        drop_at = queue[0].deadline - model.reach_1 + 2 * TOLERANCE_S if queue else math.inf
        self._set_drop_at(model, drop_at)

    def _file(self, lane: Lane, first: int, size: int, now: float) -> None:
        """The lane's candidate is `queue[first : first + size]` from now on."""
        send_at = now if size == lane.max_batch_size else self._send_at(lane, first, size, now)
        lane.size = size
        latest = lane.model.queue[first].deadline - lane.reach[size - 1]
        if send_at > now:
            if send_at != lane.send_at:
                heappush(self._due, (send_at, lane.order, lane))
            lane.send_at, lane.latest, lane.ready = send_at, latest, False
        elif not lane.ready or lane.latest != latest:
            lane.send_at, lane.latest = send_at, latest
            self._make_ready(lane, now)
        else:
            self._active[lane.pool] = None

    def _set_drop_at(self, model: ModelState, drop_at: float) -> None:
        if drop_at != model.drop_at:
            model.drop_at = drop_at
            if drop_at < math.inf:
                heappush(self._drops, (drop_at, model.order, model))

    def _make_ready(self, lane: Lane, now: float) -> None:
        if not lane.ready:
            lane.ready = True
            lane.due_since = now
        heappush(lane.pool.ready, (lane.latest, lane.order, lane))
        self._active[lane.pool] = None

    def _match(self, pool: Pool, now: float) -> None:
        """Workers of a pool take its due candidates, the nearest `latest` first."""
        ready = pool.ready
        passed_over = []
        while ready:
            latest, _, lane = ready[0]
            if not lane.ready or lane.latest != latest:
                heappop(ready)
                continue
            target = lane.target
            if pool.idle:
                free_at, worker = now, pool.idle[0][1]
                if len(pool.idle) > 1:
                    target = 1
            else:
                ahead = self._delay(lane.size)
                busy = pool.next_free(now) if ahead else None
                if busy is None or self._too_soon(pool, busy.free_at - ahead, now):
                    break
                free_at, worker = busy.free_at, busy
            first, size = lane.gather(now, free_at, target)
            if not size:
                passed_over.append(heappop(ready))
                continue
            if not pool.idle and self._too_soon(pool, free_at - self._delay(size), now):
                break
            self._dispatch(lane, worker, first, size, free_at, now)
        for entry in passed_over:
            heappush(ready, entry)

    def _too_soon(self, pool: Pool, send_at: float, now: float) -> bool:
        """Whether a batch that is sent ahead must wait; if so, wake up for it."""
        if send_at <= now + TOLERANCE_S:
            return False
        if send_at < pool.wake_at:
            pool.wake_at = send_at
            heappush(self._wakes, (send_at, pool.order, pool))
        return True

    def _dispatch(
        self, lane: Lane, worker: _Worker, first: int, size: int, free_at: float, now: float
    ) -> None:
        model, pool = lane.model, lane.pool
        if first and lane is model.lanes[0]:  # a slower lane leaves them to a quicker one
            self._refuse(model, model.queue.take(first), now)
            first = 0
        self._waited(pool, now - lane.due_since)
        lane.ready = False
        requests = model.queue.take(size, first)
        here_at = now + self._delay(size)
        start_at = max(here_at, free_at)
        latency_s = lane.profile.latency(size)
        self._batch_id += 1
        self._actions.append(
            Dispatch(
                *(self._batch_id, worker.id, lane.variant, requests),
                *(start_at, start_at + latency_s, self._paid),
            )
        )
        if not worker.flights:
            heappop(pool.idle)
        worker.free_at = start_at + latency_s
        worker.flights.append(_Flight(self._batch_id, here_at, latency_s, worker.free_at))
        pool.place(worker)
        self._taken = True
        self._update(model, now)

    def _soonest(self, model: ModelState, now: float) -> float:
        """Requests with an earlier deadline cannot be served, even alone."""
        soonest = math.inf
        for lane in model.lanes:
            soonest = min(
                soonest, max(now + lane.reach[0], lane.pool.free_from(now) + lane.need[0])
            )
        return soonest if model.lanes else now

    def _find_hopeless(self, now: float) -> bool:
        """After workers were taken: the nearest head, if none can serve it in time any more."""
        drops = self._drops
        while drops and drops[0][2].drop_at != drops[0][0]:
            heappop(drops)
        if drops:
            model = drops[0][2]
            if model.queue[0].deadline + TOLERANCE_S < self._soonest(model, now):
                self._dirty[model] = None
                return True
        return False

    def _refuse(self, model: ModelState, requests: Sequence[Request], now: float) -> None:
        soonest = self._soonest(model, now)
        by_reason: dict[DropReason, list[Request]] = {}
        for request in requests:
            if not model.lanes:
                reason = DropReason.NO_WORKER
            elif request.deadline <= now:
                reason = DropReason.EXPIRED
            elif request.deadline + TOLERANCE_S < soonest:
                reason = DropReason.WOULD_MISS
            else:
                reason = DropReason.SHED
            by_reason.setdefault(reason, []).append(request)
        finish_at = soonest - self._margin_s if model.lanes else math.nan
        self._actions.extend(Drop(rs, reason, finish_at) for reason, rs in by_reason.items())


def non_negative(name: str, value: float) -> float:
    """`value`, or a ValueError that names it."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
    return value
