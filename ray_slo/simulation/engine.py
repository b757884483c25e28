"""The discrete-event host of a policy: `Run`, the base of pipelines and replays.

Events are ordered by (time, `Event`, sequence), so a run depends only on its arguments. At one
instant, the policy first gets all events: ends of batches, workers that leave or join, then
arrivals. Then it decides once. For speed, arrivals are a sorted stream beside the heap of events,
and batches are columns. So a request costs little more than the policy's own work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any, Literal

import numpy as np

from ray_slo.core.cluster import Cluster, Worker
from ray_slo.core.decisions import Dispatch, Drop, Preempt
from ray_slo.core.policy import Policy
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, WorkerId
from ray_slo.simulation.books import REASON, STATUS, Books, PolicyError
from ray_slo.simulation.report import Report
from ray_slo.simulation.workloads import Requests

_CHUNK = 8192
ASK_EVERY_S = 0.1
"""Time after which a policy is asked again whether it wants a problem solved, in seconds. A live
scheduler asks at every tick (`serve/scheduler`, `_TICK_S`), which is less often."""
ANSWER_AFTER_S = 0.3
"""Time from the question until the policy has the answer, in seconds, as for a small live
problem."""


class Event(IntEnum):
    """Kinds of events, in their order within one instant."""

    END = 0  # a batch ends
    HEARD = 1  # the policy learns that a batch ended
    PREEMPT = 2
    WORKER = 3  # a worker leaves or joins
    MADE = 4  # requests arrive that a pipeline's requests made
    CANCEL = 5
    READY = 6  # a worker has loaded its variant
    LOOK = 7  # the planner looks at the demand
    APPLY = 8  # a plan takes effect
    CLUSTER = 9  # the policy gets the new cluster
    SOLVED = 10  # the policy gets the answer to its problem
    WITHDRAW = 11  # a client withdraws its request, as recorded


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """A worker leaves or joins. When it leaves, its batches are lost, and their requests arrive
    again.

    Attributes:
        at_s: time in seconds from the start.
        worker: ID of a worker of the cluster, or a new `Worker`. A worker whose first event is a
            join is absent at the start.
        action: "leave" or "join".
    """

    at_s: float
    worker: WorkerId | Worker
    action: Literal["leave", "join"]

    def __post_init__(self) -> None:
        if self.action not in ("leave", "join"):
            raise ValueError(f"action must be 'leave' or 'join', got {self.action!r}")
        if not self.at_s >= 0:
            raise ValueError(f"at_s must be at least 0, got {self.at_s}")

    @property
    def id(self) -> WorkerId:
        return self.worker.id if isinstance(self.worker, Worker) else self.worker


class Batch:
    """A dispatched batch on its worker."""

    __slots__ = ("dispatch", "finish", "index", "items", "ready", "start")

    def __init__(self, index: int, dispatch: Dispatch, items: int, ready: float) -> None:
        self.index = index
        self.dispatch = dispatch
        self.items = items  # number of items in all its requests
        self.ready = ready  # time when the worker has all payloads
        self.start = self.finish = math.inf


class Slot:
    """A worker with two batches: the one that it runs or waits for, and one sent ahead."""

    __slots__ = ("ahead", "current", "index", "worker")

    def __init__(self, worker: Worker, index: int) -> None:
        self.worker = worker
        self.index = index
        self.current: Batch | None = None
        self.ahead: Batch | None = None


def non_negative(name: str, value: float) -> None:
    """Check that an argument is at least 0 and finite.

    Raises:
        ValueError: it is not.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be at least 0, got {value}")


def noise_factors(sigma: float, rng: np.random.Generator) -> Iterator[float] | None:
    """Return random factors of the execution time, one per batch in order of their starts. None if
    all are 1."""
    non_negative("latency_noise", sigma)
    if sigma == 0:
        return None

    def draw() -> Iterator[float]:
        while True:
            yield from np.exp(sigma * rng.standard_normal(_CHUNK)).tolist()

    return draw()


def pace_factors(pace: Sequence[tuple[float, float]]) -> Callable[[float], float] | None:
    """Return the factor of execution times by time in seconds. None if it is always 1.

    Raises:
        ValueError: times that fall, or factors that are not positive.
    """
    if not pace:
        return None
    times, factors = zip(*pace, strict=True)
    if not (all(map(math.isfinite, times)) and list(times) == sorted(times)):
        raise ValueError(f"pace: times must rise, got {list(times)}")
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ValueError(f"pace: factors must be positive, got {list(factors)}")
    return lambda time: float(np.interp(time, times, factors))


class Run(Books):
    """A run of one policy with its workers and requests, until no event is left.

    Subclasses schedule further events (`at`), and override the steps of a batch: `dispatch`,
    `start`, `end`, `drop`.
    """

    def __init__(
        self,
        policy: Policy,
        cluster: Cluster,
        truth: Cluster,
        requests: Requests,
        noise: Iterator[float] | None,
        report_delay_s: float,
        preempt_delay_s: float,
        events: list[WorkerEvent],
        absent: Collection[WorkerId] = (),
        *,
        pace: Callable[[float], float] | None = None,
    ) -> None:
        self.policy = policy
        self.pace = pace
        self.truth = truth
        self.requests = requests
        self.noise = noise
        self.report_delay_s = report_delay_s
        self.preempt_delay_s = preempt_delay_s
        self.now = 0.0
        self.heap: list[tuple[float, Event, int, Callable[..., None], tuple[Any, ...]]] = []
        self.sequence = 0
        # All workers of the run, by id. `slots` contains the present ones.
        self.workers: dict[WorkerId, Worker] = dict(cluster.workers)
        absent = set(absent)
        seen: set[WorkerId] = set()
        for event in events:
            if isinstance(event.worker, Worker):
                self.workers.setdefault(event.id, event.worker)
            elif event.id not in self.workers:
                raise ValueError(
                    f"worker_events names {event.id!r}, which is no worker; the cluster has "
                    f"{', '.join(self.workers)}"
                )
            if event.action == "join" and event.id not in seen:
                absent.add(event.id)
            seen.add(event.id)
            change = self._join if event.action == "join" else self._leave
            self.at(event.at_s, Event.WORKER, change, event.id)
        self.index_of = {w: i for i, w in enumerate(self.workers)}
        self.cluster = cluster
        self.slots = {
            w.id: Slot(w, self.index_of[w.id])
            for w in cluster.workers.values()
            if w.id not in absent
        }
        self.variant_of = {v: i for i, v in enumerate(truth.variants)}
        Books.__init__(self)
        self.become(self.present())
        # The state of the loop.
        self._stream: Iterator[Request] | None = None
        self._upcoming: Request | None = None
        self._wake_at = 0.0  # the policy first decides at time 0
        self._ask_at = 0.0 if hasattr(policy, "wanted") else math.inf

    # -- events ------------------------------------------------------------------------------

    def at(self, time: float, event: Event, call: Callable[..., None], *args: Any) -> None:
        """Schedule `call(*args)` at a time."""
        self.sequence += 1
        heappush(self.heap, (time, event, self.sequence, call, args))

    def loop(self, until: float = math.inf) -> None:
        """Feed events in order, and ask the policy after each instant, until no event is left.

        Args:
            until: stop before later events; the next call continues.
        """
        heap, policy = self.heap, self.policy
        arrived, decide = policy.requests_arrived, policy.decide
        if self._stream is None:
            self._stream = self._requests()
            self._upcoming = next(self._stream, None)
        stream, upcoming, wake = self._stream, self._upcoming, self._wake_at
        arrival = upcoming.arrival if upcoming else math.inf
        stalls = 0
        while True:
            top = heap[0][0] if heap else math.inf
            now = min(arrival, top, wake)
            if now > until or now == math.inf:
                self._upcoming, self._wake_at = upcoming, wake
                return
            if now < self.now:  # the policy gave a wake-up time in the past
                now = self.now
            stalls = stalls + 1 if now == self.now else 0
            if stalls > 1000:
                raise PolicyError(
                    f"{type(policy).__name__}.decide asks for wake_at = {wake} at {now} for ever"
                )
            self.now = now
            while heap and heap[0][0] <= now:
                _, _, _, call, args = heappop(heap)
                call(*args)
            if arrival <= now:
                bunch = []
                while upcoming is not None and arrival <= now:
                    bunch.append(upcoming)
                    upcoming = next(stream, None)
                    arrival = upcoming.arrival if upcoming else math.inf
                arrived(now, bunch)
            decision = decide(now)
            for action in decision.actions:
                if type(action) is Dispatch:
                    self.dispatch(action)
                elif type(action) is Drop:
                    self.drop(action)
                elif type(action) is Preempt:
                    self._preempt(action)
                else:
                    raise PolicyError(f"{action!r} is no action")
            wake = decision.wake_at
            if now >= self._ask_at:
                self._solve_aside()

    def _solve_aside(self) -> None:
        """Solve the first problem that the policy wants solved. Only one is solved at a time."""
        self._ask_at = self.now + ASK_EVERY_S
        if problem := next(iter(self.policy.wanted()), None):  # type: ignore[attr-defined]
            from ray_slo.simulation.rehearsal import solve  # it imports this module

            self._ask_at = math.inf
            self.at(self.now + ANSWER_AFTER_S, Event.SOLVED, self._solved, solve(problem))

    def _solved(self, answer: Any) -> None:
        self._ask_at = self.now + ASK_EVERY_S
        self.policy.solved(self.now, [answer])  # type: ignore[attr-defined]

    def _requests(self) -> Iterator[Request]:
        requests, names = self.requests, self.requests.models
        size, task = requests.size, requests.task
        for start in range(0, len(requests), _CHUNK):
            piece = slice(start, start + _CHUNK)
            rows = zip(
                requests.model[piece].tolist(),
                requests.arrival[piece].tolist(),
                requests.deadline[piece].tolist(),
                strict=True,
            )
            if size is None and task is None:
                for id, (model, arrival, deadline) in enumerate(rows, start):
                    yield Request(id, names[model], arrival, deadline)
            else:
                sizes = itertools.repeat(1) if size is None else size[piece].tolist()
                numbers = itertools.repeat(None) if task is None else task[piece].tolist()
                told = zip(rows, sizes, numbers, strict=False)
                for id, ((model, arrival, deadline), items, number) in enumerate(told, start):
                    name = None if number is None else requests.tasks[number]
                    yield Request(id, names[model], arrival, deadline, items, name)

    def _ends(self, slot: Slot, batch: Batch, status: BatchStatus) -> None:
        if slot.current is batch:  # otherwise it was preempted or lost
            self.end(slot, status)

    def end(self, slot: Slot, status: BatchStatus) -> None:
        """End a worker's batch, and start the one sent ahead."""
        batch = slot.current
        assert batch is not None
        if status is BatchStatus.PREEMPTED:
            self.b_finish[batch.index] = batch.finish = self.now
            self.b_start[batch.index] = batch.start = min(batch.start, self.now)
        self.b_status[batch.index] = STATUS[status]
        slot.current, slot.ahead = slot.ahead, None
        if slot.current is not None:
            self.start(slot, slot.current)
        if self.report_delay_s:
            heard_at = self.now + self.report_delay_s
            self.at(heard_at, Event.HEARD, self._tell, slot, batch, status)
        else:
            self._tell(slot, batch, status)

    def _tell(self, slot: Slot, batch: Batch, status: BatchStatus) -> None:
        d, worker = batch.dispatch, slot.worker.id
        if self.slots.get(worker) is slot:  # otherwise the policy knows that the worker left
            outcome = BatchOutcome(d.batch_id, d.requests, batch.start, batch.finish, status)
            self.policy.batch_finished(self.now, worker, outcome)
        if status is not BatchStatus.FINISHED and (back := self.returned(d.requests)):
            self.policy.requests_arrived(self.now, back)

    def returned(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return those requests of an unfinished batch whose clients still wait."""
        return requests

    def _leave(self, worker: WorkerId) -> None:
        slot = self.slots.pop(worker, None)
        if slot is None:
            raise ValueError(f"worker_events: {worker!r} leaves at {self.now} but is not there")
        self.become(self.present(), self.lose(slot))

    def lose(self, *slots: Slot) -> list[Request]:
        """Lose the batches of workers that left. Return their requests, which arrive again."""
        lost: list[Request] = []
        for slot in slots:
            for batch in (slot.current, slot.ahead):
                if batch is not None:
                    self.b_status[batch.index] = STATUS[BatchStatus.LOST]
                    self.b_finish[batch.index] = self.now
                    self.b_start[batch.index] = min(batch.start, self.now)
                    lost.extend(batch.dispatch.requests)
            slot.current = slot.ahead = None
        lost.sort(key=lambda r: (r.arrival, r.id))
        return lost

    def _join(self, worker: WorkerId) -> None:
        if worker in self.slots:
            raise ValueError(f"worker_events: {worker!r} joins at {self.now} but is there already")
        self.slots[worker] = Slot(self.workers[worker], self.index_of[worker])
        self.become(self.present())

    def present(self) -> Cluster:
        """Return the cluster with the present workers, in the order of `workers`."""
        present = {w: self.slots[w].worker for w in self.workers if w in self.slots}
        return replace(self.cluster, workers=present)

    def become(self, cluster: Cluster, lost: Sequence[Request] = ()) -> None:
        """Give the policy a cluster, and requests that arrive again."""
        self.cluster = cluster
        self.policy.cluster_changed(self.now, cluster)
        if lost:
            self.policy.requests_arrived(self.now, lost)

    # -- actions -----------------------------------------------------------------------------

    def dispatch(self, d: Dispatch) -> None:
        """Send a batch to a worker.

        Raises:
            PolicyError: this is impossible.
        """
        slot, size = self.slots.get(d.worker), len(d.requests)
        if slot is None:
            raise PolicyError(f"batch {d.batch_id} goes to {d.worker!r}, which is not there")
        if d.variant not in slot.worker.loaded:
            raise PolicyError(
                f"batch {d.batch_id}: {d.worker!r} has not loaded {d.variant!r}; "
                f"it has {', '.join(sorted(slot.worker.loaded))}"
            )
        items = self.items(d.requests)
        profile = self.truth.variants[d.variant].profiles[slot.worker.hardware]
        if not 1 <= items <= profile.max_batch_size:
            raise PolicyError(
                f"batch {d.batch_id} has {size} requests of {items} items; {d.variant!r} takes "
                f"1 to {profile.max_batch_size}"
            )
        index = len(self.b_size)
        batch = Batch(index, d, items, self.now + self.truth.delay(size))
        self.b_worker.append(slot.index)
        self.b_variant.append(self.variant_of[d.variant])
        self.b_size.append(size)
        self.b_status.append(-1)
        self.b_dispatched.append(self.now)
        self.b_pred_start.append(d.start_at)
        self.b_pred_finish.append(d.finish_at)
        self.b_start.append(math.nan)
        self.b_finish.append(math.nan)
        self.b_requests.extend([r.id for r in d.requests])
        if slot.current is None:
            slot.current = batch
            self.start(slot, batch)
        elif slot.ahead is None:
            slot.ahead = batch
        else:
            raise PolicyError(
                f"batch {d.batch_id} goes to {d.worker!r} at {self.now}, which runs a batch and "
                "has one sent ahead"
            )

    def items(self, requests: Sequence[Request]) -> int:
        """Return the number of items in these requests."""
        return len(requests) if self.requests.size is None else sum([r.size for r in requests])

    def start(self, slot: Slot, batch: Batch) -> None:
        """Start a batch on its worker."""
        profile = self.truth.variants[batch.dispatch.variant].profiles[slot.worker.hardware]
        time = profile.latency(batch.items)
        if self.noise is not None:
            time *= next(self.noise)
        start = batch.ready if batch.ready > self.now else self.now
        if self.pace is not None:
            time *= self.pace(start)
        self.run(slot, batch, start, start + time)

    def run(self, slot: Slot, batch: Batch, start: float, finish: float) -> None:
        """Run a batch, unless it is stopped."""
        batch.start = self.b_start[batch.index] = start
        batch.finish = self.b_finish[batch.index] = finish
        self.at(finish, Event.END, self._ends, slot, batch, BatchStatus.FINISHED)

    def drop(self, drop: Drop) -> None:
        """Drop requests for the policy."""
        count = len(drop.requests)
        self.d_request.extend([r.id for r in drop.requests])
        self.d_reason.extend([REASON[drop.reason]] * count)
        self.d_time.extend([self.now] * count)

    def _preempt(self, preempt: Preempt) -> None:
        slot = self.slots.get(preempt.worker)
        if slot is None:
            raise PolicyError(f"{preempt.worker!r} is to be preempted but is not there")
        if slot.current is not None:  # otherwise the end of its batch is not known yet
            stops_at, stop = self.now + self.preempt_delay_s, BatchStatus.PREEMPTED
            self.at(stops_at, Event.PREEMPT, self._ends, slot, slot.current, stop)

    # -- results -----------------------------------------------------------------------------

    def report(self, meta: dict[str, Any]) -> Report:
        """Return the columns as a `Report`.

        Raises:
            PolicyError: a request was answered twice.
        """
        n = len(self.requests)
        return Report(
            {
                **meta,
                "policy": type(self.policy).__name__,
                "models": list(self.requests.models),
                "slo_s": {m.name: m.latency_slo_s for m in self.cluster.models.values()},
                **self.names(),
            },
            {
                "model": self.requests.model,
                "size": np.ones(n, np.int64) if self.requests.size is None else self.requests.size,
                "arrival_s": self.requests.arrival,
                "deadline_s": self.requests.deadline,
                **self.answers(n),
            },
            self.batches(),
        )

    def names(self) -> dict[str, Any]:
        """Return the meaning of the codes in the columns of batches."""
        return {
            "variants": list(self.variant_of),
            "accuracy": {v.name: v.accuracy for v in self.truth.variants.values()},
            "workers": list(self.workers),
        }
