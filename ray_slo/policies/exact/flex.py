"""SHEPHERD's Algorithms 1 and 2 as they are printed: `flex`, `exact`.

A batch has a queue's requests in the order of deadlines, until one more would make it late. So a
head with an early deadline keeps it small. A worker that becomes free takes the largest batch of
all queues. When requests come, the workers are checked in their order. For each one, its running
batch is compared with the largest batch that it could run instead, of its own model and of the
models that got requests. The first worker whose batch is at most 1/λ of that is preempted. Three
additions of `Flex` are not here: larger batches behind such a head, preemption of the smallest
batch, and new batches when a request is dropped.

The paper leaves some points open. Here requests that come at one instant are one arrival, and idle
workers take them before any worker is preempted. "Requests passing their deadlines" (Algorithm 2,
line 4) are those that would be late even alone, because one at the head would stop every batch
(line 13). Among equally large batches the fastest goes first, as its value density is the highest
(§5.2). The requests that a preempted worker will run next wait for it. Its stopped requests arrive
again when it has stopped, and only then the search continues (line 19). So one worker is preempted
at a time. If a preemption takes no time, this equals the printed algorithm.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ray_slo.core.cluster import Cluster, Kind
from ray_slo.core.decisions import Decision, Dispatch, Preempt
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import BatchOutcome, Request, WorkerId
from ray_slo.policies.flex import Shepherd
from ray_slo.policies.shared.refusals import TOLERANCE_S, drops
from ray_slo.policies.shared.timers import Timers

_deadline = attrgetter("deadline")


@dataclass(eq=False, repr=False, slots=True)
class _Model:
    order: int
    queue: DeadlineQueue = field(default_factory=DeadlineQueue)
    lanes: dict[Kind, _Lane] = field(default_factory=dict)
    reach_1: float = 0.0  # shortest time in which one request can be served
    timer_at: float = math.inf  # time when its head can no longer be served


@dataclass(eq=False, repr=False, slots=True)
class _Lane:
    """A model on a kind of worker; reach[b − 1] = delay(b) + ℓ(b) + margin, seconds."""

    variant: str
    profile: LatencyProfile
    reach: list[float]


@dataclass(eq=False, repr=False, slots=True)
class _Worker:
    """`next`: the model that it was preempted for, and the requests that wait."""

    id: WorkerId
    kind: Kind
    batch_id: int = 0  # 0 when idle
    model: _Model | None = None
    requests: Sequence[Request] = ()  # in order of deadlines
    end_at: float = -math.inf  # predicted
    next: tuple[_Model, list[Request]] | None = None
    is_deaf: bool = False  # its batch was preempted and still runs


class ExactFlex(Shepherd):
    """Algorithms 1 and 2 (SHEPHERD §5.2, Appendix C). The arguments are those of `Flex`."""

    counts_requests = True

    def _begin(self) -> None:
        self._models: dict[str, _Model] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._new: dict[_Model, None] = {}  # got requests since the last preemption was ruled out
        self._search = False  # for a worker to preempt
        self._drops = Timers[_Model]()

    # Events ----------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            model = self._model(request.model)
            model.queue.push(request)
            self._new[model] = None
        self._search = True

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            model = self._models.get(request.model)
            if model is None or model.queue.remove(request):
                continue
            for worker in self._workers.values():
                if worker.next and request in worker.next[1]:
                    worker.next[1].remove(request)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        state = self._workers.get(worker)
        if state is not None and state.batch_id == outcome.batch_id:
            state.batch_id, state.model, state.requests = 0, None, ()
            self._search |= state.next is not None

    def preempt_failed(self, now: float, worker: WorkerId, batch_id: int) -> None:
        """The batch still runs: requests that wait for its end may go to another worker."""
        state = self._workers.get(worker)
        if state is not None and state.batch_id == batch_id and state.next is not None:
            self._let_go(state)
            state.is_deaf = self._search = True

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        own_ms = self._preempt_delay_ms
        self._preempt_delay_s = cluster.preempt_delay_s if own_ms is None else own_ms / 1e3
        known, self._workers = self._workers, {}
        for spec in cluster.workers.values():
            worker = known.pop(spec.id, None) or _Worker(spec.id, spec.kind)
            worker.kind = spec.kind
            self._workers[spec.id] = worker
        for lost in known.values():
            self._let_go(lost)
        kinds = dict.fromkeys(worker.kind for worker in self._workers.values())
        for name in cluster.models:
            self._model(name)
        for name, model in list(self._models.items()):
            model.lanes = {}
            if name in cluster.models:
                for kind in kinds:
                    self._add_lane(model, name, kind)
            elif not model.queue:
                del self._models[name]
            model.reach_1 = min((lane.reach[0] for lane in model.lanes.values()), default=0.0)
            model.timer_at = math.inf
        self._drops = Timers()

    def _add_lane(self, model: _Model, name: str, kind: Kind) -> None:
        """Add the lane of the first variant that the workers run, if there is one."""
        for variant, profile in self._cluster.models[name].runnable(*kind):
            delay, table = self._cluster.delay, profile.table[: self._max_batch_size]
            reach = [t + delay(b) + self._margin_s for b, t in enumerate(table, 1)]
            model.lanes[kind] = _Lane(variant.name, profile, reach)
            return

    def _model(self, name: str) -> _Model:
        if (model := self._models.get(name)) is None:
            self._serial += 1
            model = self._models[name] = _Model(self._serial)
        return model

    def _let_go(self, worker: _Worker) -> None:
        """Requests that waited for a preemption may go to any worker again."""
        if worker.next is not None:
            model, requests = worker.next
            model.queue.extend(requests)
            worker.next = None

    # Decisions -------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        self._actions = []
        freed = [w for w in self._workers.values() if not w.batch_id]
        for worker in freed:
            if worker.next is not None:
                model = worker.next[0]
                self._let_go(worker)
                self._run_largest(worker, [model], now)
        idle: set[Kind] = set()  # kinds with a worker that found no batch
        for worker in freed:
            if not worker.batch_id and worker.kind not in idle:
                self._run_largest(worker, self._models.values(), now)
                if not worker.batch_id:
                    idle.add(worker.kind)
        if self._search:
            self._search = False
            if not self.preempts or not self._preempt(now):
                self._new = {}
        for model in self._models.values():
            self._refuse_late(model, now)
        return Decision(self._actions, self._drops.next_at())

    def _run_largest(self, worker: _Worker, models: Collection[_Model], now: float) -> None:
        """Algorithm 1, lines 5 and 6."""
        model, size = self._generate(worker, models, now)
        if model is None:
            return
        lane = model.lanes[worker.kind]
        first = model.queue.position(now - TOLERANCE_S + lane.reach[0])
        requests = model.queue.take(size, first)
        start_at = now + self._cluster.delay(size)
        self._batch_id += 1
        worker.batch_id, worker.model, worker.requests = self._batch_id, model, requests
        worker.end_at, worker.is_deaf = start_at + lane.profile.latency(size), False
        self._actions.append(
            Dispatch(self._batch_id, worker.id, lane.variant, requests, start_at, worker.end_at)
        )

    def _generate(
        self, worker: _Worker, models: Collection[_Model], now: float
    ) -> tuple[_Model | None, int]:
        """BATCHGEN (Algorithm 2): the model with the largest batch, and its size."""
        found, largest, takes_s = None, 0, math.inf
        for model in models:
            if (lane := model.lanes.get(worker.kind)) is None:
                continue
            running = worker.requests if worker.model is model else ()
            if len(model.queue) + len(running) < largest:
                continue
            size = _prefix(model.queue, running, lane.reach, now - TOLERANCE_S)
            if size and (size, -lane.reach[size - 1]) > (largest, -takes_s):
                found, largest, takes_s = model, size, lane.reach[size - 1]
        return found, largest

    def _preempt(self, now: float) -> bool:
        """Algorithm 1, lines 11 to 19: whether a worker is preempted."""
        new = sorted(self._new, key=attrgetter("order"))
        later = now + self._preempt_delay_s
        for worker in self._workers.values():
            if not worker.batch_id or worker.next or worker.is_deaf or worker.end_at <= now:
                continue
            own, running = worker.model, len(worker.requests)
            models = new if own is None or own in self._new else [*new, own]
            model, size = self._generate(worker, models, later)
            if model is None or size < self._lambda * running:
                continue
            lane = model.lanes[worker.kind]
            first = model.queue.position(later - TOLERANCE_S + lane.reach[0])
            waiting = model.queue.take(len(model.queue), first)
            both = sorted([*waiting, *(worker.requests if own is model else ())], key=_deadline)
            chosen = {id(r) for r in both[:size]}
            model.queue.extend(r for r in waiting if id(r) not in chosen)
            worker.next = model, [r for r in waiting if id(r) in chosen]
            reason = f"{size} of {lane.variant!r} against {running} running"
            self._actions.append(Preempt(worker.id, reason, lane.variant, size - running))
            return True
        return False

    def _refuse_late(self, model: _Model, now: float) -> None:
        """Algorithm 2, line 4: drop late requests; set the time of the next check."""
        queue = model.queue
        soonest = now + model.reach_1
        if queue and queue[0].deadline + TOLERANCE_S < soonest:
            late = queue.take(queue.position(soonest - TOLERANCE_S))
            self._actions += drops(late, now, soonest if model.lanes else None, self._margin_s)
        drop_at = queue[0].deadline - model.reach_1 + 2 * TOLERANCE_S if queue else math.inf
        self._drops.set(model, drop_at, model.order)


def _prefix(
    queue: DeadlineQueue, running: Sequence[Request], reach: list[float], start: float
) -> int:
    """Lines 5 to 13 of Algorithm 2: how many requests, in the order of deadlines, fit a batch.

    Args:
        running: requests of the model that run on the worker, in order of deadlines.
    """
    first = queue.position(start + reach[0])
    i = bisect_left(running, start + reach[0], key=_deadline)
    there = len(queue) - first + len(running) - i
    if not there:
        return 0
    heads = ([queue[first]] if first < len(queue) else []) + list(running[i : i + 1])
    slack = min(head.deadline for head in heads) - start
    return bisect_right(reach, slack, hi=min(there, len(reach)))
