"""Shared code of deadline-aware batching policies: queues, workers, matching, lazy timers.

`BatchingPolicy` is Symphony's Algorithm 1 with the delays of Appendix D. A policy defines when a
candidate batch is due (`_send_at`), and for which batch size the head may be dropped
(`Lane.target`). For pools, lanes and the other terms, see `shared.lanes`.

Every arrival makes its model dirty. `decide` updates the candidates of a dirty model once, for any
number of arrivals. Times at which something must happen are in heaps; stale entries are removed
when they reach the top. So an arrival costs O(log M + log G) for M models and G pools' workers,
whatever the queue's length.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import ClassVar

from ray_slo.core.arguments import Count, NonNegative, checked
from ray_slo.core.cluster import Cluster, DispatchDelay, Kind, Model
from ray_slo.core.decisions import Action, Decision, Dispatch
from ray_slo.core.policy import Abilities, InFlight, Policy
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, WorkerId
from ray_slo.policies.shared.lanes import Flight, Lane, ModelState, Pool, Worker
from ray_slo.policies.shared.refusals import TOLERANCE_S, drops
from ray_slo.policies.shared.timers import Timers, earliest

LIVE_JITTER = 0.05
"""Share of the shortest SLO by which a live deferred batch starts before its latest time."""

LIVE_MARGIN = 0.02
"""Share of the shortest SLO by which a live batch that is as large as its deadlines allow ends
before them."""


class BatchingPolicy(Abilities, ABC):
    """Algorithm 1; a subclass defines when a candidate is due (`_send_at`).

    Args:
        max_batch_size: upper bound, in addition to the profile's; a full batch is due at once.
        margin_ms: time kept between a batch's predicted end and its earliest deadline.

    Raises:
        ValueError: an argument out of its range.
    """

    serves_late: ClassVar[bool] = False
    chooses_variants = False
    serves_tasks = False

    @checked
    def __init__(
        self, *, max_batch_size: Count | None = None, margin_ms: NonNegative = 0.0
    ) -> None:
        self._max_batch_size = max_batch_size
        self._margin_s = margin_ms / 1e3
        self._delay = DispatchDelay()
        self._ahead = False  # batches are sent to busy workers, ahead of their ends
        self._models: dict[str, ModelState] = {}
        self._workers: dict[WorkerId, Worker] = {}
        self._pools: list[Pool] = []
        self._dirty: dict[ModelState, None] = {}  # dicts, because sets have no stable order
        self._active: dict[Pool, None] = {}
        self._due, self._wakes = Timers[Lane](), Timers[Pool]()
        self._drops = Timers[ModelState]()
        self._heaps = self._due.heap, self._wakes.heap, self._drops.heap
        self._wake_at = math.inf  # the first of them
        self._serial = 0
        self._batch_id = 0
        self._paid: float | None = None  # price of the next dispatch, if the policy has one
        self._taken = False  # workers will be free later than predicted before
        self._actions: list[Action] = []

    # What a policy decides -------------------------------------------------------------------

    @abstractmethod
    def _send_at(self, lane: Lane, first: int, size: int, now: float) -> float:
        """When the candidate, not a full one, is due, seconds. It is `lane.count` requests of the
        queue from `first` on, with `size` items."""

    def _waited(self, pool: Pool, wait_s: float) -> None:
        """A batch was sent `wait_s` after it was due."""

    def _measure(self, now: float) -> None:
        """Called first in `decide`: adapt the lanes' targets to the measured load."""

    def _target_of(self, lane: Lane, now: float) -> int:
        """Batch size up to which heads are dropped that would keep the batch smaller."""
        return lane.target

    # Events ----------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        models, dirty = self._models, self._dirty
        for request in requests:
            model = models.get(request.model) or self._model(request.model)
            queue = model.queue
            items = queue.items
            if len(items) > queue.start and items[-1].deadline > request.deadline:
                queue.push(request)
            else:  # the usual case
                items.append(request)
            if request.size == 1:
                model.arrived += 1
            else:
                model.arrived += request.size
                model.sized = True
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
                if i == 0 and outcome.status is BatchStatus.FINISHED:
                    state.pool.times.add(flight, outcome)
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
        self._ahead = cluster.delay(1) > 0
        learned = {pool.kind: (pool.wait_s, pool.times) for pool in self._pools}
        pools: dict[Kind, Pool] = {}
        known, self._workers = self._workers, {}
        for rank, worker in enumerate(cluster.workers.values()):
            if (pool := pools.get(kind := worker.kind)) is None:
                pool = pools[kind] = Pool(self._next_serial(), kind, *learned.get(kind, ()))
            state = self._workers[worker.id] = known.get(worker.id) or Worker(worker.id)
            state.rank, state.pool, state.overdue = rank, pool, False
            pool.size += 1
            pool.place(state)
        self._pools = list(pools.values())

        for name in cluster.models:
            self._model(name)
        for name, model in list(self._models.items()):
            if (spec := cluster.models.get(name)) is not None:
                model.slo_s = spec.latency_slo_s
                lanes = [lane for pool in self._pools for lane in self._lanes(model, spec, pool)]
                model.lanes = sorted(lanes, key=lambda lane: lane.reach[0])
            elif model.queue:  # its requests wait until their deadline: the model may come back
                model.lanes = []
            else:
                del self._models[name]
            model.reach_1 = model.lanes[0].reach[0] if model.lanes else 0.0
            model.timer_at = math.inf
            model.pools = list({lane.pool: None for lane in model.lanes})
        self._dirty = dict.fromkeys(self._models.values())
        self._active = {}
        for heap in self._heaps:
            heap.clear()

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over from another policy, before the first event."""
        self._batch_id = batch_id
        for flight in flights:
            worker = flight.dispatch.worker
            self._workers.setdefault(worker, Worker(worker)).take_over(flight)
        if isinstance(former, BatchingPolicy):  # take over what it has learned about waits
            self._pools = former._pools

    def _model(self, name: str) -> ModelState:
        if (model := self._models.get(name)) is None:
            model = self._models[name] = ModelState(self._next_serial())
        return model

    def _lanes(self, model: ModelState, spec: Model, pool: Pool) -> Sequence[Lane]:
        """One lane, for the first variant that the pool runs; none if there is no variant."""
        for variant, profile in spec.runnable(*pool.kind):
            lane = Lane(self._next_serial(), model, pool, variant.name, profile)
            lane.set_times(self._delay, self._margin_s, self._max_batch_size)
            pool.lanes.append(lane)
            return [lane]
        return ()

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    # Decisions -------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        self._actions = []
        self._measure(now)
        if now >= self._wake_at:
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
        self._wake_at = wake_at = earliest(self._heaps)
        return Decision(self._actions, wake_at)

    def _fire_timers(self, now: float) -> None:
        for lane in self._due.due(now):
            self._make_ready(lane, now)
        for pool in self._wakes.due(now):
            self._active[pool] = None
        for model in self._drops.due(now):
            self._dirty[model] = None

    def _update(self, model: ModelState, now: float) -> None:
        """UPDATECANDIDATE on every lane of a model; drops requests that cannot be served."""
        queue, lanes = model.queue, model.lanes
        if model.sized:
            self._actions += model.hopeless(now)
        elif len(lanes) == 1 and (length := len(queue.items) - queue.start):
            # Short cut for the usual case: one lane, and the head is neither late nor dropped.
            lane, deadline = lanes[0], queue.items[queue.start].deadline
            size = min(length, lane.max_batch_size)
            idle, enough = len(lane.pool.idle), 1
            if lane.reach[size - 1] > (slack := deadline - now + TOLERANCE_S):
                size = bisect_right(lane.reach, slack, hi=size)
                enough = self._target_of(lane, now) if idle < 2 else 1
            if size >= enough and (idle or deadline + TOLERANCE_S >= self._soonest(model, now)):
                self._file(lane, 0, size, size, now)
                drop_at = deadline - model.reach_1 + 2 * TOLERANCE_S
                if drop_at != model.timer_at:
                    self._drops.set(model, drop_at, model.order)
                return
        if queue:
            soonest = self._soonest(model, now)
            if queue[0].deadline + TOLERANCE_S < soonest:
                self._refuse(model, queue.take(queue.position(soonest - TOLERANCE_S)), now)
        idle = sum([len(pool.idle) for pool in model.pools])
        for lane in lanes:
            size = 0
            if queue:
                # While a second worker idles, dropping a head gains nothing.
                first, size = lane.gather(now, now, self._target_of(lane, now) if idle < 2 else 1)
                if first and lane is lanes[0] and lane.may_give_up():
                    self._refuse(model, queue.take(first), now)
                    first = 0
            if not size:
                lane.clear()
                continue
            self._file(lane, first, size, model.items(first, size), now)
        drop_at = math.inf
        if queue:
            alone_s = model.alone_s(queue[0].size) if model.sized else model.reach_1
            drop_at = queue[0].deadline - alone_s + 2 * TOLERANCE_S
            if model.sized and drop_at < now + TOLERANCE_S:  # it has just become the head
                self._dirty[model] = None
        self._drops.set(model, drop_at, model.order)

    def _file(self, lane: Lane, first: int, count: int, size: int, now: float) -> None:
        """Set the lane's candidate: `queue[first : first + count]`, with `size` items."""
        lane.count = count
        full = size >= lane.max_batch_size
        if lane.model.sized:
            full = lane.is_full(first + count, size)
        send_at = now if full else self._send_at(lane, first, size, now)
        lane.size = size
        queue = lane.model.queue
        latest = queue.items[queue.start + first].deadline - lane.rush[size - 1]
        if send_at > now:
            if send_at != lane.timer_at:
                self._due.set(lane, send_at, lane.order)
            lane.latest, lane.ready = latest, False
        elif not lane.ready or lane.latest != latest:
            lane.timer_at, lane.latest = math.inf, latest
            self._make_ready(lane, now)
        else:
            self._active[lane.pool] = None

    def _make_ready(self, lane: Lane, now: float) -> None:
        if not lane.ready:
            lane.ready = True
            lane.due_since = now
        heappush(lane.pool.ready, (lane.latest, lane.order, lane))
        self._active[lane.pool] = None

    def _match(self, pool: Pool, now: float) -> None:
        """Give the pool's due candidates to its workers, the nearest `latest` first."""
        if not (pool.idle or self._ahead):
            return
        ready = pool.ready
        passed_over = []
        while ready:
            latest, _, lane = ready[0]
            if not lane.ready or lane.latest != latest:
                heappop(ready)
                continue
            target = 1 if len(pool.idle) > 1 else self._target_of(lane, now)
            if pool.idle:
                free_at, worker = now, pool.idle[0][1]
            else:
                ahead = self._delay(lane.count)
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
        """Whether a batch that is sent ahead must wait; if so, set the wake-up for it."""
        if send_at <= now + TOLERANCE_S:
            return False
        if send_at < pool.timer_at:
            self._wakes.set(pool, send_at, pool.order)
        return True

    def _dispatch(
        self, lane: Lane, worker: Worker, first: int, count: int, free_at: float, now: float
    ) -> None:
        model, pool = lane.model, lane.pool
        size = model.items(first, count)
        # A slower lane leaves them to a faster one.
        if first and lane is model.lanes[0] and lane.may_give_up():
            self._refuse(model, model.queue.take(first), now)
            first = 0
        self._waited(pool, now - lane.due_since)
        lane.ready = False
        requests = model.queue.take(count, first)
        here_at = now + self._delay(count)
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
        worker.flights.append(Flight(self._batch_id, here_at, latency_s, worker.free_at))
        pool.place(worker)
        self._taken = True
        self._update(model, now)

    def _soonest(self, model: ModelState, now: float) -> float:
        """Requests with an earlier deadline cannot be served, even alone."""
        return model.soonest(now)

    def _find_hopeless(self, now: float) -> bool:
        """After workers were taken: whether no worker can serve the nearest head in time any
        more."""
        model = self._drops.first()
        if model is not None and model.queue[0].deadline + TOLERANCE_S < self._soonest(model, now):
            self._dirty[model] = None
            return True
        return False

    def _refuse(self, model: ModelState, requests: Sequence[Request], now: float) -> None:
        soonest = self._soonest(model, now) if model.lanes else None
        self._actions += drops(requests, now, soonest, self._margin_s)


def succeed(policy: BatchingPolicy, before: BatchingPolicy) -> None:
    """Pass the queued and running requests of one policy to another, and what it has learned about
    its pools. A `cluster_changed` must follow."""
    policy._models, policy._workers = before._models, before._workers
    policy._pools = before._pools
    policy._serial, policy._batch_id = before._serial, before._batch_id


def pace_of(policy: BatchingPolicy) -> float:
    """Measured over predicted time of batches (`Times.pace`): the mean of all workers."""
    size = sum(pool.size for pool in policy._pools)
    return sum(pool.size * pool.times.pace for pool in policy._pools) / size if size else 1.0
