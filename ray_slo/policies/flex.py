"""FLEX (SHEPHERD §5.2, Algorithms 1 and 2): the largest batch first, with preemption if needed.

A free worker takes the largest batch that meets its deadlines, over all models. A batch that became
possible and is at least λ times as large as a running one preempts it. The requests of the stopped
batch arrive again, and those that can no longer be served in time are refused. With λ = 3.03 it
serves at least 1 / (12.62·K) of the requests that the best schedule with knowledge of the future
serves. K measures how much the models differ (`affinity`, Eq. 4; Theorem 5.2). For one model on one
worker, λ = 2.38 gives 10.81 (Theorem B.1). Without preemption no bound exists.

Worked example (Figure 4): ℓ(b) = 9 + b ms, one worker. r arrives at 0 with deadline 10 and runs.
Scenario A: nothing else comes, r is served. Scenario B: at 5 come 20 requests with deadline 34. As
20 ≥ 3.03 · 1, they preempt r and are served at 34; r is refused. Without preemption r ends at 10,
when 15 of the 20 can still be served.

Two readings of "largest feasible batch":

* `largest`: the largest set of requests that can be served together. Heads whose deadlines are too
  early for it stay in the queue. The theorem needs this (any feasible batch of λ times the size
  preempts), and it holds in overload;
* `prefix`: Algorithm 2 to the letter: requests in the order of deadlines, until one more would make
  the batch late. A late head keeps batches small, and the goodput collapses in overload.

Among equally large batches, the fastest goes first. Algorithm 2 leaves this open. It is the choice
with the highest value density (§5.2), and matters if several models can fill the maximum.

Candidates are kept per lane (a model on a pool of equal workers) and recomputed when requests
arrive (Appendix C); they only shrink as time passes and requests leave, so a heap by their last
size finds the largest. An arrival costs O(log Q · log B), plus one look at every worker whose batch
is small enough to be preempted. Unlike `deferred`, nothing is sent ahead to a busy worker.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ray_slo.core.arguments import Count, NonNegative, checked
from ray_slo.core.cluster import Cluster, Kind, Model
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason, Preempt
from ray_slo.core.policy import Abilities, InFlight, Policy
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, WorkerId
from ray_slo.policies.batching import LIVE_MARGIN
from ray_slo.policies.shared.refusals import TOLERANCE_S, drops
from ray_slo.policies.shared.timers import Timers

_deadline = attrgetter("deadline")


@dataclass(eq=False, repr=False, slots=True)
class _Model:
    order: int
    queue: DeadlineQueue = field(default_factory=DeadlineQueue)
    lanes: list[_Lane] = field(default_factory=list)
    sized: bool = False  # a request of another size than 1 has come
    claimed: int = 0  # requests that wait for a preemption to be carried out
    reach_1: float = 0.0  # shortest time in which one request can be served
    timer_at: float = math.inf  # time when its head can no longer be served


@dataclass(eq=False, repr=False, slots=True)
class _Lane:
    """A model on a pool, through the first variant that the pool runs."""

    order: int
    model: _Model
    pool: _Pool
    variant: str
    profile: LatencyProfile
    reach: list[float]  # reach[b − 1] = delay(b) + ℓ(b) + margin, seconds
    most: int  # items of a batch; a single request may have more
    size: int = 0  # size of the candidate, or more


@dataclass(eq=False, repr=False, slots=True)
class _Pool:
    """Workers with the same hardware and loaded variants."""

    lanes: dict[_Model, _Lane] = field(default_factory=dict)
    idle: list[tuple[int, _Worker]] = field(default_factory=list)  # heap by rank
    # Heap of running batches by size; an entry is stale if its batch is over.
    running: list[tuple[int, int, int, _Worker]] = field(default_factory=list)
    # Heap of candidates, largest first, the fastest of a size; stale if the lane's size is another.
    candidates: list[tuple[int, float, int, _Lane]] = field(default_factory=list)

    def offer(self, lane: _Lane) -> None:
        """Enter the candidate of a lane."""
        size = lane.size
        heappush(self.candidates, (-size, lane.reach[size - 1], lane.order, lane))


@dataclass(eq=False, repr=False, slots=True)
class _Worker:
    id: WorkerId
    rank: int
    pool: _Pool
    batch_id: int = 0  # 0 when idle
    model: _Model | None = None
    requests: Sequence[Request] = ()  # in order of deadlines
    end_at: float = -math.inf  # predicted
    claim: tuple[_Model, int] | None = None  # preempted for this number of waiting requests
    is_deaf: bool = False  # its batch was preempted and still runs
    stopped_at: float = -math.inf  # time of its last preemption


class Shepherd(Abilities):
    """The arguments and the common state of `Flex` and `ExactFlex`; see `Flex`."""

    serves_late: ClassVar[bool] = False
    chooses_variants = False
    serves_tasks = False

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """Arguments for a live host: batches are as large as deadlines allow, and late as a
        whole."""
        return {"margin_ms": LIVE_MARGIN * shortest_slo_ms}

    @checked
    def __init__(
        self,
        lambda_: Annotated[float, Field(gt=1)] = 3.03,
        *,
        preemption: bool = True,
        max_batch_size: Count = 128,
        margin_ms: NonNegative = 0.0,
        preempt_delay_ms: NonNegative | None = None,
    ) -> None:
        self._lambda = lambda_ if preemption else math.inf
        self.preempts = preemption
        self._max_batch_size = max_batch_size
        self._margin_s = margin_ms / 1e3
        self._preempt_delay_ms = preempt_delay_ms
        self._preempt_delay_s = 0.0
        self._cluster = Cluster({}, {})
        self._serial = 0
        self._batch_id = 0
        self._actions: list[Action] = []
        self._begin()

    def _begin(self) -> None:
        """Set the state that is the algorithm's own."""
        raise NotImplementedError


class Flex(Shepherd):
    """SHEPHERD's online serving algorithm.

    Args:
        lambda_: a batch this many times as large preempts; above 1. 3.03 is proven for any
            number of GPUs and models, 2.38 for one of each.
        preemption: False for "SHEPHERD-NP" (§7.2).
        max_batch_size: upper bound, in addition to the profile's (§5.2: 128).
        margin_ms: time kept between a batch's predicted end and its earliest deadline.
        preempt_delay_ms: expected time from a preemption until the worker is free. A batch that
            would be late after it does not preempt. Default: the cluster's value.

    Raises:
        ValueError: an argument out of its range.
    """

    def _begin(self) -> None:
        self._models: dict[str, _Model] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._dirty: dict[_Model, None] = {}  # dicts, because sets have no stable order
        self._active: dict[_Pool, None] = {}
        self._drops = Timers[_Model]()

    # Events ----------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            model = self._model(request.model)
            model.queue.push(request)
            if request.size != 1:
                model.sized = True
            self._dirty[model] = None

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            if (model := self._models.get(request.model)) is not None:
                model.queue.remove(request)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        state = self._workers.get(worker)
        if state is not None and state.batch_id == outcome.batch_id:
            state.batch_id, state.model, state.requests = 0, None, ()
            if outcome.status is BatchStatus.PREEMPTED:
                state.stopped_at = now
            self._release(state)
            heappush(state.pool.idle, (state.rank, state))
            self._active[state.pool] = None

    def preempt_failed(self, now: float, worker: WorkerId, batch_id: int) -> None:
        """The batch still runs: requests that wait for its end may go to another worker."""
        state = self._workers.get(worker)
        if state is not None and state.batch_id == batch_id and state.claim is not None:
            self._release(state)
            state.is_deaf = True

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        own_ms = self._preempt_delay_ms
        self._preempt_delay_s = cluster.preempt_delay_s if own_ms is None else own_ms / 1e3
        pools: dict[Kind, _Pool] = {}
        known, self._workers = self._workers, {}
        for rank, spec in enumerate(cluster.workers.values()):
            pool = pools.setdefault(spec.kind, _Pool())
            worker = known.pop(spec.id, None) or _Worker(spec.id, rank, pool)
            worker.rank, worker.pool = rank, pool
            self._workers[spec.id] = worker
            if not worker.batch_id:
                heappush(pool.idle, (rank, worker))
            elif worker.claim is None and not worker.is_deaf:
                entry = (_items(worker.requests), rank, worker.batch_id, worker)
                heappush(pool.running, entry)
        for lost in known.values():
            self._release(lost)

        for name in cluster.models:
            self._model(name)
        for name, model in list(self._models.items()):
            model.lanes = []
            if (known_model := cluster.models.get(name)) is not None:
                for kind, pool in pools.items():
                    self._add_lane(model, known_model, kind, pool)
            elif not model.queue:
                del self._models[name]
            model.reach_1 = min((lane.reach[0] for lane in model.lanes), default=0.0)
            model.timer_at = math.inf
        self._dirty = dict.fromkeys(self._models.values())
        self._active = {}
        self._drops = Timers()

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over from another policy, before the first event."""
        self._batch_id = batch_id
        for flight in flights:
            d = flight.dispatch
            ahead = d.worker in self._workers  # sent by another policy; it cannot be stopped
            worker = self._workers.setdefault(d.worker, _Worker(d.worker, 0, _Pool()))
            worker.batch_id, worker.end_at = d.batch_id, flight.end_at
            worker.model = self._model(d.requests[0].model)
            worker.requests = sorted(d.requests, key=_deadline)
            worker.is_deaf = ahead or flight.stops

    def _add_lane(self, model: _Model, spec: Model, kind: Kind, pool: _Pool) -> None:
        """Add the lane of the first variant that the pool runs, if there is one."""
        for variant, profile in spec.runnable(*kind):
            table = profile.table
            most = min(self._max_batch_size, len(table))
            delay, margin_s = self._cluster.delay, self._margin_s
            reach = [t + delay(b) + margin_s for b, t in enumerate(table, 1)]
            lane = _Lane(self._next_serial(), model, pool, variant.name, profile, reach, most)
            pool.lanes[model] = lane
            model.lanes.append(lane)
            return

    def _model(self, name: str) -> _Model:
        if (model := self._models.get(name)) is None:
            model = self._models[name] = _Model(self._next_serial())
        return model

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _release(self, worker: _Worker) -> None:
        """Requests that waited for a preemption may go to any worker again."""
        if worker.claim is not None:
            model, count = worker.claim
            model.claimed -= count
            worker.claim = None
            self._dirty[model] = None

    # Decisions -------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        self._actions = []
        for model in self._drops.due(now):
            self._dirty[model] = None
        dirty, self._dirty = self._dirty, {}
        for model in dirty:
            self._update(model, now)
        active, self._active = self._active, {}
        for pool in active:
            self._serve(pool, now)
        return Decision(self._actions, self._drops.next_at())

    def _update(self, model: _Model, now: float) -> None:
        """Refuse requests that not even an idle worker could serve; recompute the candidates."""
        queue = model.queue
        soonest = now + model.reach_1
        if queue and queue[0].deadline + TOLERANCE_S < soonest:
            self._refuse(model, queue.take(queue.position(soonest - TOLERANCE_S)), now)
        while model.sized and queue and model.lanes:
            alone_s = _alone_s(model, queue[0])
            if queue[0].deadline + TOLERANCE_S >= now + alone_s:
                break
            late = queue[0].deadline <= now
            why = DropReason.EXPIRED if late else DropReason.WOULD_MISS
            finish_at = now + alone_s if alone_s < math.inf else math.nan
            self._actions.append(Drop(queue.take(1), why, finish_at))
        for lane in model.lanes:
            lane.size = self._gather(lane, now)[1]
            if lane.size:
                lane.pool.offer(lane)
                self._active[lane.pool] = None
        drop_at = math.inf
        if queue:
            alone_s = _alone_s(model, queue[0]) if model.sized else model.reach_1
            drop_at = queue[0].deadline - alone_s + 2 * TOLERANCE_S
        self._drops.set(model, drop_at, model.order)

    def _refuse(self, model: _Model, requests: Sequence[Request], now: float) -> None:
        soonest = now + model.reach_1 if model.lanes else None
        self._actions += drops(requests, now, soonest, self._margin_s)

    def _serve(self, pool: _Pool, now: float) -> None:
        while pool.idle and (best := self._best(pool, now)):
            self._dispatch(*best, heappop(pool.idle)[1], now)
        if not pool.idle:
            while self._preempt(pool, now):
                pass

    def _best(self, pool: _Pool, now: float) -> tuple[_Lane, int, int] | None:
        """(lane, first, items) of the pool's largest candidate, from `queue[first]` on."""
        candidates = pool.candidates
        while candidates:
            size, _, _, lane = candidates[0]
            if lane.size == -size:
                first, lane.size = self._gather(lane, now)
                if lane.size == -size:
                    return lane, first, lane.size
                if lane.size:
                    pool.offer(lane)
            heappop(candidates)
        return None

    def _gather(self, lane: _Lane, now: float, running: Sequence[Request] = ()) -> tuple[int, int]:
        """BATCHGEN for one lane: (first, items) of its largest batch, from `queue[first]` on.

        Args:
            running: requests of the model, in order of deadlines, that compete with those in the
                queue for a place in the batch (Algorithm 2, line 7); `size` counts them in.
        """
        queue, reach, claimed = lane.model.queue, lane.reach, lane.model.claimed
        start = now - TOLERANCE_S
        if lane.model.sized:
            return self._gather_items(lane, start)

        def count(size: int) -> int:
            """Number of requests that have enough time for a batch of `size`."""
            deadline = start + reach[size - 1]
            there = max(len(queue) - queue.position(deadline) - claimed, 0)
            return there + len(running) - bisect_left(running, deadline, key=_deadline)

        upper = min(count(1), lane.most)
        if not upper:
            return 0, 0
        size = upper
        if count(upper) < upper:  # the larger the batch, the fewer requests have time for it
            size = bisect_left(range(1, upper), True, key=lambda b: count(b) < b)
        return queue.position(start + reach[size - 1]) + claimed, size

    def _gather_items(self, lane: _Lane, start: float) -> tuple[int, int]:
        """The same for requests with sizes. Later heads have time for larger batches, but fewer
        items wait behind them. Running requests of the lane do not compete. O(queue)."""
        queue, reach = lane.model.queue, lane.reach
        behind = [0]  # items behind a position, the last first
        for i in range(len(queue) - 1, lane.model.claimed - 1, -1):
            behind.append(behind[-1] + queue[i].size)
        best = 0, 0
        for i in range(lane.model.claimed, len(queue)):
            slack = queue[i].deadline - start
            items = 0
            for j in range(i, len(queue)):
                more = items + queue[j].size
                if more > (lane.most if items else len(reach)) or reach[more - 1] > slack:
                    break
                items = more
            if items > best[1]:
                best = i, items
            if behind[len(queue) - i - 1] <= best[1] or best[1] >= lane.most:
                break  # later ones are not larger
        return best

    def _dispatch(self, lane: _Lane, first: int, size: int, worker: _Worker, now: float) -> None:
        count = _requests(lane.model, first, size)
        requests = lane.model.queue.take(count, first)
        start_at = now + self._cluster.delay(count)
        worker.end_at = start_at + lane.profile.latency(size)
        self._batch_id += 1
        worker.batch_id, worker.model, worker.requests = self._batch_id, lane.model, requests
        worker.is_deaf = False
        heappush(lane.pool.running, (size, worker.rank, self._batch_id, worker))
        self._actions.append(
            Dispatch(self._batch_id, worker.id, lane.variant, requests, start_at, worker.end_at)
        )

    def _preempt(self, pool: _Pool, now: float) -> bool:
        """Preempt the smallest running batch that the rule allows; False if there is none."""
        if (best := self._best(pool, now)) is None:
            return False
        top = best[0]
        later = now + self._preempt_delay_s
        passed_over: list[tuple[int, int, int, _Worker]] = []
        found = False
        # A candidate of the running batch's own model exceeds it at most by the waiting requests.
        # So a batch is not preempted if its size times (λ − 1) is more than the largest candidate.
        while pool.running and (self._lambda - 1) * pool.running[0][0] <= top.size:
            entry = heappop(pool.running)
            running, _, batch_id, worker = entry
            if worker.batch_id != batch_id or worker.end_at <= now:
                continue  # it is over, or its report is on the way
            # Otherwise returned requests could be sent and stopped forever.
            if worker.stopped_at == now:
                passed_over.append(entry)
                continue
            own = pool.lanes.get(worker.model) if worker.model else None
            lane, first, size = max(
                (
                    (lane, *self._gather(lane, later, worker.requests if lane is own else ()))
                    for lane in dict.fromkeys((top, own or top))
                ),
                key=lambda offer: offer[2],
            )
            if size >= self._lambda * running:
                worker.claim = lane.model, _requests(lane.model, first, size)
                lane.model.claimed += worker.claim[1]
                reason = f"{size} of {lane.variant!r} against {running} running"
                self._actions.append(Preempt(worker.id, reason, lane.variant, size - running))
                found = True
                break
            passed_over.append(entry)
        for entry in passed_over:
            heappush(pool.running, entry)
        return found


def _items(requests: Sequence[Request]) -> int:
    return sum(r.size for r in requests)


def _requests(model: _Model, first: int, items: int) -> int:
    """Number of requests from `queue[first]` on that have `items` items together, or all."""
    queue = model.queue
    if not model.sized:
        return min(items, len(queue) - first)
    count = 0
    while items > 0 and first + count < len(queue):
        items -= queue[first + count].size
        count += 1
    return count


def _alone_s(model: _Model, request: Request) -> float:
    """Shortest time in which a request can be served."""
    times = (
        lane.reach[request.size - 1] for lane in model.lanes if request.size <= len(lane.reach)
    )
    return min(times, default=math.inf if model.lanes else 0.0)
