"""OpenTelemetry spans of requests and batches, if Serve's tracing is on.

A frontend makes `slo.request` under Serve's own span of the call (in a pipeline `slo.task` for each
request of a task below it), and under that `slo.queue`, from a submission to the decision on it. A
scheduler actor makes `slo.schedule` under that, without the time to it and back. A worker makes one
`slo.batch` per batch. A span has one parent, so it is below that of the first traced request, and
is linked to all of them. Each request's span is also linked to it.

Requests that are not sampled have no spans, and no context of them is sent. Attributes contain
names, numbers and times. They never contain an item, a result, or the text of an error, which may
quote these.

The first request after Serve has set up its tracing imports OpenTelemetry. So it need not be
installed if tracing is off. Only this module and `spans` use it; `ray_private.tracing` knows how
Serve traces.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ray_slo.core import BatchStatus
from ray_slo.serve.errors import error_of
from ray_slo.serve.messages import Cancel, Grant, Refusal, Submit
from ray_slo.serve.ray_private import tracing as serve_tracing
from ray_slo.serve.watch import spans

if TYPE_CHECKING:
    from ray_slo.serve.frontend.answer import Answer
    from ray_slo.serve.messages import Event, Message

logger = logging.getLogger(__name__)

_KEPT = 1000  # decisions, until tracing is set up


class RequestTrace:
    """The trace of a request, or of a request of a task, in a frontend. This one is not traced."""

    __slots__ = ()
    context = ""  # value for the header `traceparent`
    waiting = ""  # context of its wait for a decision

    def task(self, task: str) -> RequestTrace:
        """The trace of a request at a task of the pipeline."""
        return self

    def submitted(self, request_id: int, budget_s: float) -> None:
        """It was sent to the scheduler, and its result must be back in `budget_s` seconds."""

    def granted(self, grant: Grant, policy: str) -> None:
        """The scheduler decided on its batch."""

    def ran(self, batch: str) -> None:
        """That batch is over; `batch` is the context of its span, empty without one."""

    def requeued(self, reason: str) -> None:
        """It was granted, and is sent to the scheduler again."""

    def answered(self, answer: Answer) -> None:
        """It has ended with an answer."""

    def unanswered(self, outcome: str, reason: str, error: BaseException | None = None) -> None:
        """It has ended without an answer."""

    def inside(self) -> AbstractContextManager[None]:
        """Spans that are made inside become its children."""
        return nullcontext()


class Decisions:
    """Spans of a scheduler actor's decisions. Idle until a frontend sends a traced request. Call it
    from one event loop.

    Args:
        name: of the actor, for Serve's exporter.
        policy: what spans call it.
    """

    def __init__(self, name: str, policy: str) -> None:
        self._name = name
        self._policy = policy
        self._arrived: dict[tuple[str, int], tuple[str, int]] = {}  # (context, when, in ns)
        self._setting_up: asyncio.Task[None] | None = None
        self._made: deque[tuple[str, int, int, dict[str, Any]]] = deque(maxlen=_KEPT)

    def heard(self, client: str, event: Event) -> None:
        """A request arrived, or was withdrawn."""
        if isinstance(event, Submit) and event.trace:
            self._arrived.setdefault((client, event.request_id), (event.trace, time.time_ns()))
            if self._setting_up is None:
                self._setting_up = asyncio.get_running_loop().create_task(self._set_up())
        elif isinstance(event, Cancel) and self._arrived:
            self._decided(client, event.request_id, _CANCELLED)

    def told(self, client: str, messages: Iterable[Message]) -> None:
        """The scheduler decided on some of the client's requests."""
        if not self._arrived:
            return
        for message in messages:
            if isinstance(message, Grant):
                about = {"slo.policy": self._policy, **_about(message)}
                ids = message.request_ids
            elif isinstance(message, Refusal):
                outcome = error_of(message.reason).outcome
                about = {"slo.outcome": outcome, "slo.reason": message.reason}
                ids = message.request_ids
            else:
                continue
            for request_id in ids:
                self._decided(client, request_id, about)

    def gone(self, client: str) -> None:
        """A frontend left, and its requests with it."""
        for owner, request_id in list(self._arrived):
            if owner == client:
                self._decided(client, request_id, _CANCELLED)

    def flush(self) -> None:
        """Export the spans that are not exported yet. May block for a second."""
        if self._setting_up is not None and self._setting_up.done():
            from opentelemetry import trace

            flush = getattr(trace.get_tracer_provider(), "force_flush", None)
            if flush is not None:
                flush(1000)

    def _decided(self, client: str, request_id: int, about: dict[str, Any]) -> None:
        context, since = self._arrived.pop((client, request_id), ("", 0))
        if context:
            self._made.append((context, since, time.time_ns(), about))
            if self._setting_up is not None and self._setting_up.done():
                self._export()

    def _export(self) -> None:
        made, self._made = self._made, deque(maxlen=_KEPT)
        if not serve_tracing.is_set_up():
            return
        from opentelemetry import trace

        for context, since, until, about in made:
            above = trace.set_span_in_context(trace.NonRecordingSpan(spans.remote(context)))
            span = spans.tracer().start_span("slo.schedule", above, start_time=since)
            outcome, reason = about.get("slo.outcome", ""), about.get("slo.reason", "")
            spans.end(span, about, outcome, reason, until)

    async def _set_up(self) -> None:
        """Set up tracing as Serve does in a replica; in this actor Serve does not."""
        if not serve_tracing.is_set_up():
            loop = asyncio.get_running_loop()
            try:  # it imports the exporter, and opens files
                await loop.run_in_executor(None, serve_tracing.set_up, self._name)
            except Exception:
                logger.exception("no traces from %s", self._name)
        self._export()


class BatchTrace:
    """The trace of a batch in a worker. This one is not traced."""

    __slots__ = ()
    context = ""

    def around(self, scope: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """`scope`, and spans that are made inside are the batch's children."""
        return scope

    def ended(self, status: BatchStatus, exec_s: float) -> None:
        """It is over."""


_CANCELLED = {"slo.outcome": "cancelled", "slo.reason": "cancelled"}
NOT_TRACED = RequestTrace()
BATCH_NOT_TRACED = BatchTrace()


# -- what frontends and workers call ---------------------------------------------------------


def request(
    model: str, arrived_at: float, slo_s: float, traceparent: str | None = None
) -> RequestTrace:
    """A request that a frontend serves.

    Args:
        arrived_at: time of its arrival, `time.monotonic()` seconds.
        traceparent: the caller's header. If Serve's span is not in the caller's trace, the
            request's span is put there. Serve loses the header if its proxy does not trace, or if
            the header says "not sampled". `TracingConfig` does not make the proxy trace
            (https://github.com/ray-project/ray/pull/65437).
    """
    if not serve_tracing.is_enabled():
        return NOT_TRACED
    from opentelemetry import trace

    parent = trace.get_current_span()
    if traceparent is not None:
        caller = spans.named_by(traceparent)
        if caller.get_span_context().trace_id != parent.get_span_context().trace_id:
            parent = caller if caller.get_span_context().is_valid else parent
    if not parent.get_span_context().trace_flags.sampled:
        return NOT_TRACED
    span = spans.begin("slo.request", time.monotonic() - arrived_at, parent)
    if not span.is_recording():
        return NOT_TRACED
    return _RequestTrace(span, {"slo.model": model, "slo.latency_slo_ms": 1e3 * slo_s})


def name_of(policy: Any) -> str:
    """Name of a policy in spans; it may be an object."""
    return policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)


def contexts(requests: Iterable[RequestTrace]) -> tuple[str, ...]:
    """Contexts of the traced requests among these, for the worker."""
    return tuple(r.context for r in requests if r.context)


def call_of(requests: Iterable[RequestTrace]) -> AbstractContextManager[None]:
    """Inside, Serve's spans of a call for these requests are children of the first traced request's
    span. If none is traced, there are no spans."""
    if not serve_tracing.is_enabled():
        return nullcontext()
    return next((r for r in requests if r.context), _Unsampled()).inside()


def caller() -> Any:
    """The OpenTelemetry context of the current call; None if Serve's tracing is off."""
    if not serve_tracing.is_enabled():
        return None
    from opentelemetry import context

    return context.get_current()


def within(callers: Sequence[Any]) -> AbstractContextManager[None]:
    """Spans that are made inside become children of the first sampled caller."""
    if callers[0] is None:
        return nullcontext()
    return spans.within(next(filter(spans.is_sampled, callers), callers[0]))


def batch(requests: Sequence[str], caller: Any, about: dict[str, Any]) -> BatchTrace:
    """The trace of a batch that begins to run on a worker.

    Args:
        requests: `contexts` of all its pieces, at least one.
        caller: caller of the first piece.
        about: attributes of its span.
    """
    if not serve_tracing.is_enabled():
        return BATCH_NOT_TRACED
    from opentelemetry import trace

    links = [trace.Link(spans.remote(context)) for context in requests]
    if not spans.is_sampled(caller):
        caller = trace.set_span_in_context(trace.NonRecordingSpan(links[0].context))
    span = spans.tracer().start_span("slo.batch", caller, links=links)
    return _BatchTrace(span, about)


def otlp() -> list[Any]:
    """For `RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH`: sends spans to an OpenTelemetry collector over
    HTTP, in groups and off the event loop. `OTEL_EXPORTER_OTLP_ENDPOINT` is its address.

    Raises:
        ImportError: says what to install.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError("traces are sent to a collector by ray-slo[tracing]") from error
    return [BatchSpanProcessor(OTLPSpanExporter())]


# -- inside ----------------------------------------------------------------------------------


class _RequestTrace(RequestTrace):
    # Attributes are collected and set at the end, because every call of OpenTelemetry costs time.
    __slots__ = (
        "_about",
        "_preemptions",
        "_queue",
        "_queue_about",
        "_retries",
        "_span",
        "context",
        "waiting",
    )

    def __init__(self, span: Any, about: dict[str, Any]) -> None:
        self._span = span
        self._about = about
        self._queue: Any = None
        self._queue_about: dict[str, Any] = {}
        self._retries = self._preemptions = 0
        self.context: str = spans.traceparent(span)
        self.waiting = ""

    def task(self, task: str) -> RequestTrace:
        return _RequestTrace(spans.begin("slo.task", 0.0, self._span), {"slo.task": task})

    def submitted(self, request_id: int, budget_s: float) -> None:
        budget = {"slo.budget_ms": 1e3 * budget_s}
        self._span.add_event("submitted", budget)
        if self._queue is None:  # otherwise the scheduler is new, and the request was sent again
            self._about["slo.request_id"] = request_id
            self._queue, self._queue_about = spans.begin("slo.queue", 0.0, self._span), budget
            self.waiting = spans.traceparent(self._queue)

    def granted(self, grant: Grant, policy: str) -> None:
        self._span.add_event("granted", {"slo.decision": grant.batch_id})
        self._queue_about |= {"slo.policy": policy, **_about(grant)}
        self._end_queue("", "")

    def ran(self, batch: str) -> None:
        if batch and self._span.is_recording():  # else its caller left, or was answered
            self._span.add_link(spans.remote(batch))

    def requeued(self, reason: str) -> None:
        self._span.add_event("requeued", {"slo.reason": reason})
        self._retries += 1
        self._preemptions += reason == "preempted"

    def answered(self, answer: Answer) -> None:
        self._about |= {
            "slo.variant": answer.variant,
            "slo.batch_size": answer.batch_size,
            "slo.queue_ms": answer.queue_ms,
            "slo.exec_ms": answer.exec_ms,
            "slo.latency_ms": answer.latency_ms,
        }
        self._end("ok" if answer.deadline_met else "late", "")

    def unanswered(self, outcome: str, reason: str, error: BaseException | None = None) -> None:
        if error is not None:
            self._about["error.type"] = type(error).__name__
        if outcome in ("refused", "expired"):
            self._span.add_event("refused", {"slo.reason": reason})
        self._end(outcome, reason)

    def inside(self) -> AbstractContextManager[None]:
        return spans.inside(self._span)

    def _end(self, outcome: str, reason: str) -> None:
        said = {"slo.outcome": outcome, "slo.reason": reason}
        self._queue_about |= said
        self._end_queue(outcome, reason)
        self._about |= {
            **said,
            "slo.retries": self._retries,
            "slo.preemptions": self._preemptions,
        }
        spans.end(self._span, self._about, outcome, reason)

    def _end_queue(self, outcome: str, reason: str) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            spans.end(queue, self._queue_about, outcome, reason)


class _BatchTrace(BatchTrace):
    __slots__ = ("_about", "_span", "context")

    def __init__(self, span: Any, about: dict[str, Any]) -> None:
        self._span = span
        self._about = about
        self.context: str = spans.traceparent(span)

    @contextmanager
    def around(self, scope: AbstractContextManager[None]) -> Iterator[None]:
        with spans.inside(self._span), scope:
            yield

    def ended(self, status: BatchStatus, exec_s: float) -> None:
        about = {
            **self._about,
            "slo.exec_ms": 1e3 * exec_s,
            "slo.status": status.value,
            "slo.preempted": status is BatchStatus.PREEMPTED,
        }
        spans.end(self._span, about, status.value, "")


class _Unsampled(RequestTrace):
    """Replaces a parent: Serve's sampler makes no spans below it."""

    __slots__ = ()

    def inside(self) -> AbstractContextManager[None]:
        from opentelemetry import trace

        ids = trace.SpanContext(1, 1, is_remote=False)  # valid, and its flags say "not sampled"
        return spans.inside(trace.NonRecordingSpan(ids))


def _about(grant: Grant) -> dict[str, Any]:
    return {
        "slo.decision": grant.batch_id,
        "slo.worker": grant.worker,
        "slo.variant": grant.variant,
        "slo.batch_size": grant.batch_size,
        "slo.predicted_ms": 1e3 * grant.finish_in_s,
        "slo.slack_ms": 1e3 * grant.slack_s,
    }
