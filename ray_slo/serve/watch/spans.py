"""Spans of OpenTelemetry: begin, end, nest and name them.

The first call imports OpenTelemetry, so it need not be installed if tracing is off.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ray_slo.serve.errors import FAULTS
from ray_slo.serve.ray_private import tracing as serve_tracing


@functools.cache
def tracer() -> Any:
    """OpenTelemetry's tracer for ray-slo."""
    from opentelemetry import trace

    return trace.get_tracer("ray_slo")


def begin(name: str, since_s: float, parent: Any) -> Any:
    """A span that began `since_s` seconds ago."""
    from opentelemetry import trace

    start_time = time.time_ns() - int(1e9 * since_s)
    return tracer().start_span(name, trace.set_span_in_context(parent), start_time=start_time)


def is_sampled(context: Any) -> bool:
    """Whether the span of an OpenTelemetry context is recorded."""
    from opentelemetry import trace

    return bool(trace.get_current_span(context).get_span_context().trace_flags.sampled)


def inside(span: Any) -> AbstractContextManager[None]:
    """Spans that are made inside become children of this span."""
    from opentelemetry import trace

    return within(trace.set_span_in_context(span))


@contextmanager
def within(new: Any) -> Iterator[None]:
    """Inside, this OpenTelemetry context is the current one."""
    from opentelemetry import context

    token = context.attach(new)
    try:
        with serve_tracing.own_stack():
            yield
    finally:
        context.detach(token)


def end(span: Any, about: dict[str, Any], outcome: str, reason: str, at: int | None = None) -> None:
    """End a span, now or `at` this time in nanoseconds."""
    span.set_attributes(about)
    if outcome in FAULTS:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, f"{outcome}: {reason}" if reason else outcome))
    span.end(at)


def traceparent(span: Any) -> str:
    """The value of the header `traceparent` for a span."""
    ids = span.get_span_context()
    return f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"


def remote(traceparent: str) -> Any:
    """The span context that `traceparent` names."""
    from opentelemetry.trace import SpanContext, TraceFlags

    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )


def named_by(traceparent: str) -> Any:
    """The span that the header names, or an invalid one."""
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    found = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, context.Context())
    return trace.get_current_span(found)
