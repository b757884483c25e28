"""The requests of a frontend that are not answered yet.

The ledger submits them to the scheduler, sends the payloads of a granted batch to its worker, and
records the outcome. A request leaves the ledger once: with a result, with a typed error, or because
its caller left. It is pure asyncio without Ray: all outside calls are injected.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ray_slo.core.decisions import DropReason
from ray_slo.core.quantile import FEW_SAMPLES, Quantile
from ray_slo.core.requests import Upstream
from ray_slo.core.seldom import Seldom
from ray_slo.core.trees import stream_of
from ray_slo.serve.channels.owed import Owed, Silent
from ray_slo.serve.config.spec import AppSpec, VariantRef
from ray_slo.serve.errors import Expired, RefusedEarly, WorkerLost, predicted
from ray_slo.serve.frontend.tree import Outputs, Visit
from ray_slo.serve.messages import Grant, Message, PieceResult, Refusal, Stop, Submit
from ray_slo.serve.user_code import as_exception
from ray_slo.serve.watch.tracing import NOT_TRACED, RequestTrace, name_of

if TYPE_CHECKING:
    from ray_slo.serve.channels.channel import Channel
    from ray_slo.serve.frontend.workers import Workers
    from ray_slo.serve.watch.metrics import FrontendMetrics

logger = logging.getLogger(__name__)
logger.addFilter(Seldom(10))

# A caller gets an answer at most one second after its deadline. The request waits this long here,
# and the rest of the second is for the transfer.
GRACE_S = 0.75
_SPARE = 2  # this many workers must be up before requests of one that ended itself are sent again
_START_S = 2.0  # a worker's start takes longer than this, in seconds
_AGAIN_S = 0.2  # time between two checks whether workers are up, in seconds
_WAY_BACK = 0.25  # largest share of an SLO that is reserved for sending the answer back


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request for a model or a pipeline. Times in seconds of the frontend's clock."""

    model: str
    arrival: float
    slo_s: float
    traceparent: str | None = None
    slo_class: str = ""
    takes_errors: bool = False  # as values, where a batch method returns them as results
    way_s: float = 0.0  # from the door in Serve's proxy and back

    @property
    def deadline(self) -> float:
        return self.arrival + self.slo_s

    @property
    def stream(self) -> str:
        """The stream of demand that the request belongs to."""
        return stream_of(self.model, self.slo_class)


@dataclass(slots=True, eq=False)
class Entry:
    """A request that is not answered yet: the client's, or one of a task of a pipeline.

    Attributes:
        model: model that serves it.
        task: task of the tree that the client asked for. If empty, it has the model's name.
        entered: time when the request came to the task. The client's request came at
            `asked.arrival`.
        grant: grant of its batch. None while it waits for one.
    """

    id: int
    model: str
    asked: Asked
    item: Any
    entered: float
    upstream: Upstream | None = None
    trace: RequestTrace = NOT_TRACED
    size: int = 1
    task: str = ""
    grant: Grant | None = None
    sent_at: float = math.nan
    retries: int = 0
    preemptions: int = 0
    future: asyncio.Future[tuple[Any, Visit]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def context(self) -> dict[str, Any]:
        """Fields of the request for errors."""
        named = self.task or self.model
        task = named if named != self.asked.model else None
        slo_ms = self.asked.slo_s * 1e3
        return {"model": self.asked.model, "task": task, "latency_slo_ms": slo_ms}

    @property
    def stopped(self) -> str:
        """Text about its preemptions for errors."""
        times = "" if self.preemptions == 1 else f" {self.preemptions} times"
        text = f"; it was stopped{times} while it ran, for a larger batch"
        return text if self.preemptions else ""


class WorkerGone(Exception):
    """A worker, or its node, ended during a call.

    Args:
        own_end: the note that the worker wrote when it ended itself. Empty if there is none.
    """

    def __init__(self, said: str, own_end: str = "") -> None:
        super().__init__(f"it ended itself: {own_end}" if own_end else said)
        self.own_end = own_end


class Outcome(enum.Enum):
    """Outcome of sending a share of a batch."""

    UNWANTED = "no client waits for the batch any more"
    NOT_SENT = "the router knows no such worker"
    LOST = "the worker ended, or does not answer"
    ENDED_ITSELF = "the worker ended itself, and a request may be why"
    FAILED = "the call failed"
    LATE = "the batch had to start without the share"
    PREEMPTED = "the batch was stopped"
    DONE = "results came"


class Consequence(NamedTuple):
    """The consequences of an outcome.

    Attributes:
        worker_lost: whether to tell the scheduler that the worker is gone.
        withdrawn: whether to tell the scheduler that no process has the batch any more.
        costs_retry: whether to count one of `retries`, and fail requests that have none left.
        again: reason to submit the requests again. Empty: do not.
        when_safe: whether to submit them only when other workers are up.
    """

    worker_lost: bool = False
    withdrawn: bool = False
    costs_retry: bool = False
    again: str = ""
    when_safe: bool = False


_LOST = Consequence(worker_lost=True, costs_retry=True, again="worker_lost")
CONSEQUENCES = {
    Outcome.UNWANTED: Consequence(withdrawn=True),
    Outcome.NOT_SENT: Consequence(worker_lost=True, again="worker_not_there"),
    Outcome.LOST: _LOST,
    Outcome.ENDED_ITSELF: _LOST._replace(when_safe=True),
    Outcome.FAILED: Consequence(withdrawn=True),
    Outcome.LATE: Consequence(again="came_too_late"),
    Outcome.PREEMPTED: Consequence(again="preempted"),
    Outcome.DONE: Consequence(),
}


class Ledger:
    """Requests from their submission to their end.

    Args:
        spawn: function that runs a coroutine as a task.
        plan_says: function that returns what the plan cannot serve, and why; and the last measured
            time of a worker's start, in seconds.
    """

    def __init__(
        self,
        spec: AppSpec,
        scheduler: Channel,
        workers: Workers,
        metrics: FrontendMetrics,
        *,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], Any],
        plan_says: Callable[[], tuple[str | None, float | None]] = lambda: (None, None),
    ) -> None:
        self._spec = spec
        self._variants = spec.variants()
        groups = {kind: worker.group for kind, worker in spec.workers.items()}
        self._policies = {k: name_of(spec.policy_of(g).name) for k, g in groups.items()}
        self._scheduler = scheduler
        self._workers = workers
        self._metrics = metrics
        self._clock = clock
        self._spawn = spawn
        self._plan_says = plan_says
        self._entries: dict[int, Entry] = {}
        self._overhead = Quantile(0.95, prior=FEW_SAMPLES)
        self._owed = Owed(workers, clock=clock, spawn=spawn, overhead_s=lambda: self.overhead_s)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def overhead_s(self) -> float:
        """95th percentile of the time of a call to a worker without the batch, in seconds."""
        return self._overhead.value(default=0.0)

    def variant(self, model: str, key: str) -> VariantRef:
        """Return a variant of a model. A scheduler of a newer release may name one that this
        frontend does not know while it is draining."""
        return self._variants.get(key) or VariantRef(model, key, None)

    @contextlib.contextmanager
    def in_time(self, asked: Asked) -> Iterator[None]:
        """Inside, what is not served `GRACE_S` after the deadline of a client's request expires."""
        left_s = asked.deadline + GRACE_S - self._clock()
        timer = asyncio.get_running_loop().call_later(left_s, self._give_up, asked)
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, asked: Asked) -> None:
        for entry in [e for e in self._entries.values() if e.asked is asked]:
            self._scheduler.cancel(entry.id)
            where = f"on worker {entry.grant.worker}" if entry.grant else "in the queue"
            said = f"no answer {GRACE_S:g} s after the deadline; the request was {where}"
            _fail(entry, Expired(said, **entry.context))

    def serve(self, entry: Entry) -> asyncio.Future[tuple[Any, Visit]]:
        """Serve a request. Return a future of its result, and of how it was served. Who cancels the
        future gives the request up.

        The future raises:
            RefusedEarly, Expired, WorkerLost, BadInput: there is no result.
            Exception: the error that the user's method raised, or that is the result, if the client
                cannot get it as a value.
        """
        self._entries[entry.id] = entry
        entry.future.add_done_callback(functools.partial(self._ended, entry.id))
        self._submit(entry)
        return entry.future

    def _ended(self, request_id: int, future: asyncio.Future[tuple[Any, Visit]]) -> None:
        del self._entries[request_id]
        if future.cancelled():
            self._scheduler.cancel(request_id)

    def give_way(self, deadline: float, said: str) -> bool:
        """Refuse the waiting request with the latest deadline, if that is later than `deadline`.
        Return whether there was one.

        Args:
            said: message for its caller.
        """
        waiting = (e for e in self._entries.values() if e.grant is None and not e.future.done())
        last = max(waiting, key=lambda e: e.asked.deadline, default=None)
        if last is None or last.asked.deadline <= deadline:
            return False
        self._scheduler.cancel(last.id)
        said = f"{said}, and this one has the latest deadline"
        _fail(last, RefusedEarly(said, reason="queue_full", **last.context))
        return True

    # -- to the scheduler ------------------------------------------------------------------

    def resubmit(self, request_ids: Iterable[int] | None = None) -> None:
        """Submit the waiting requests among these (default: all) to a new scheduler."""
        for request_id in list(self._entries) if request_ids is None else request_ids:
            entry = self._entries.get(request_id)
            if entry is not None and entry.grant is None and not entry.future.done():
                self._submit(entry)

    def _submit(self, entry: Entry) -> None:
        """Submit a request for the first time or again. Its budget is the remaining time minus the
        time to send the answer back."""
        asked, now = entry.asked, self._clock()
        margin_s = self._margin_s(asked)
        budget_s = asked.deadline - margin_s - now
        if budget_s <= 0:
            gone_s = now - asked.arrival
            why = (
                f"no time is left for the work: of {asked.slo_s * 1e3:.4g} ms, {gone_s * 1e3:.4g} "
                f"ms are over, and {margin_s * 1e3:.4g} ms are kept for the way back"
            )
            _refuse(entry, why, None, (gone_s + margin_s) * 1e3)
            return
        entry.grant = None
        entry.trace.submitted(entry.id, budget_s)
        waiting = entry.trace.waiting
        self._scheduler.submit(
            Submit(
                *(entry.id, entry.model, budget_s, entry.size),
                *(entry.upstream, waiting, entry.task),
            )
        )

    def _margin_s(self, asked: Asked) -> float:
        """Return the time that is kept to send the answer back. It is at most a share of the SLO.
        Otherwise all requests could be refused, and a shorter time would never be measured."""
        way_back_s = min(0.5 * self.overhead_s + asked.way_s, _WAY_BACK * asked.slo_s)
        return self._spec.response_margin_ms / 1e3 + way_back_s

    # -- from the scheduler ----------------------------------------------------------------

    def heard(self, messages: Iterable[Message]) -> None:
        """Take messages of the scheduler."""
        for message in messages:
            if isinstance(message, Grant):
                self._spawn(self.send(message))
            elif isinstance(message, Stop):
                self._spawn(self._workers.preempt(message))
            else:
                self._refused(message)

    def _refused(self, refusal: Refusal) -> None:
        now = self._clock()
        shortfall, start_s = self._plan_says()
        for entry in filter(None, map(self._entries.get, refusal.request_ids)):
            if refusal.reason == DropReason.EXPIRED:
                slo_ms = entry.asked.slo_s * 1e3
                said = f"waited until its deadline of {slo_ms:.4g} ms was out of reach"
                _fail(entry, Expired(said, **entry.context))
                continue
            why = f"refused early: {DropReason(refusal.reason).why}"
            if shortfall:
                why += f"; the plan falls short: {shortfall}"
            finish_ms = (now + refusal.finish_in_s - entry.asked.arrival) * 1e3
            late_s = self._owed.late_s(entry.model, now)
            slo_ms, margin_ms = entry.asked.slo_s * 1e3, self._margin_s(entry.asked) * 1e3
            said, again_s = predicted(finish_ms, slo_ms, margin_ms, late_s)
            if refusal.reason == DropReason.WOULD_MISS:
                why += f"; {said}"
            elif refusal.reason == DropReason.NO_WORKER:
                again_s = start_s
            _refuse(entry, why, refusal.reason, finish_ms, again_s)

    # -- to a worker -----------------------------------------------------------------------

    async def send(self, grant: Grant) -> None:
        """Send this frontend's share of a batch, and carry out the consequences of the outcome."""
        found = [self._entries.get(i) for i in grant.request_ids]
        share = [e for e in found if e is not None and not e.future.done()]
        try:
            await self._send(grant, share)
        except Exception as error:  # whatever it is, nobody waits for it until the deadline
            logger.exception("batch %s failed inside the frontend", grant.batch_id)
            for entry in share:
                _fail(entry, error)

    async def _send(self, grant: Grant, share: list[Entry]) -> None:
        outcome, said = await self._call(grant, share)
        then = CONSEQUENCES[outcome]
        if then.worker_lost:
            self._scheduler.worker_lost(grant.worker)
        if then.withdrawn:
            self._scheduler.batch_withdrawn(grant.batch_id)
        if then.costs_retry:
            self._count_retry(share, grant.worker)
        if isinstance(said, PieceResult):
            self._take_down(grant, share, said)
        elif outcome is Outcome.FAILED:
            for entry in share:
                _fail(entry, said)
        if then.when_safe:
            await self._submit_when_safe(share, grant.worker, then.again)
        elif then.again:
            self._submit_again(share, then.again)

    async def _call(
        self, grant: Grant, share: list[Entry]
    ) -> tuple[Outcome, PieceResult | Exception]:
        if not share and grant.num_pieces == 1:
            return Outcome.UNWANTED, LookupError(grant.batch_id)
        # An empty share is sent too, because the other frontends' pieces wait for it.
        sent_at = self._clock()
        for entry in share:
            entry.grant, entry.sent_at = grant, sent_at
            entry.trace.granted(grant, self._policies.get(grant.kind, ""))
        try:
            with self._owed.owes(grant):
                result = await self._workers.execute(grant, share)
        except Silent as error:
            return Outcome.LOST, error
        except WorkerLost as error:
            logger.warning("%s", error)
            return Outcome.NOT_SENT, error
        except WorkerGone as error:
            logger.warning("worker %s is lost: %s", grant.worker, error)
            return Outcome.ENDED_ITSELF if error.own_end else Outcome.LOST, error
        except Exception as error:
            return Outcome.FAILED, error
        took_s = self._clock() - sent_at
        report = result.report
        if report is None:
            return Outcome.LATE, result
        self._overhead.add(max(took_s - report.held_s, 0.0))
        if result.results is None:
            return Outcome.PREEMPTED if result.preempted else Outcome.LATE, result
        if grant.piece == 0 and report.batch_size:  # once per batch that ran
            variant = self.variant(grant.model, grant.variant)
            self._metrics.predicted(variant, 1e3 * grant.finish_in_s, 1e3 * took_s)
        return Outcome.DONE, result

    def _take_down(self, grant: Grant, share: list[Entry], result: PieceResult) -> None:
        """Give the results of a share to its requests, if there are any."""
        now, report = self._clock(), result.report
        self._scheduler.report(report)
        for entry in share:
            entry.trace.ran(result.trace)
            entry.preemptions += result.preempted
        if result.results is None or report is None:
            return
        again = []
        for entry, (ok, value) in zip(share, result.results, strict=True):
            if ok is None:
                again.append(entry)
            elif not ok:
                _fail(entry, value)
            elif not entry.asked.takes_errors and (error := _error_in(value)) is not None:
                _fail(entry, as_exception(error))
            elif not entry.future.done():
                waited_s = max(entry.sent_at - entry.entered + result.wait_s, 0.0)
                batch = (grant.worker, grant.variant, report.batch_size)
                visit = Visit(*batch, waited_s, report.exec_s, now - entry.entered, now)
                entry.future.set_result((value, visit))
        self._submit_again(again, "out_of_memory")

    # -- again -----------------------------------------------------------------------------

    def _submit_again(self, share: list[Entry], why: str) -> None:
        for entry in share:
            if not entry.future.done():
                entry.trace.requeued(why)
                self._submit(entry)

    async def _submit_when_safe(self, share: list[Entry], lost: str, why: str) -> None:
        """Submit requests again when two workers are up. The lost worker ended itself. One of these
        requests may be the cause, and it must not end the last worker. If there was never more than
        one worker, submit them when that one is back."""
        gone = {lost}
        while share := [e for e in share if not e.future.done()]:
            is_safe = False
            with contextlib.suppress(Exception):  # the scheduler restarts
                up = await self._workers.up(share[0].model)
                is_safe = len(set(up.workers) - gone) >= min(_SPARE, up.most)
            if is_safe:
                self._submit_again(share, why)
                return
            for entry in share:
                if entry.asked.deadline - self._clock() < _START_S:
                    said = (
                        f"worker {lost} ended itself while it worked on the request, which may be "
                        f"why; it is tried again where {_SPARE} workers are up"
                    )
                    _fail(entry, WorkerLost(said, worker=lost, **entry.context))
            await asyncio.sleep(_AGAIN_S)
            gone = set()  # the scheduler has answered: workers that it lists are back

    def _count_retry(self, share: list[Entry], worker: str) -> None:
        """Count the loss of a worker for these requests. Fail those that have no retry left."""
        for entry in share:
            entry.retries += 1
            if entry.retries > self._spec.retries:
                before = f", and so were {entry.retries - 1} before" * (entry.retries > 1)
                said = f"worker {worker} was lost with the request{before}"
                _fail(entry, WorkerLost(said, worker=worker, **entry.context))


def _error_in(value: Any) -> BaseException | None:
    """Return the exception that a result is, if it is one."""
    result = value.result if isinstance(value, Outputs) else value
    return result if isinstance(result, BaseException) else None


def _fail(entry: Entry, error: BaseException) -> None:
    if not entry.future.done():
        entry.future.set_exception(error)


def _refuse(
    entry: Entry, why: str, reason: str | None, finish_ms: float, again_s: float | None = None
) -> None:
    """Refuse a request that is predicted to finish so many milliseconds after its arrival."""
    error = RefusedEarly(
        why + entry.stopped,
        reason="preempted" if entry.preemptions else reason,
        predicted_finish_ms=finish_ms,
        retry_after_s=again_s,
        **entry.context,
    )
    _fail(entry, error)
