"""What OpenTelemetry spans cost per request: off, not sampled, sampled.

A frontend with its scheduler and a worker run in one process, without Ray and Serve. A fixed number
of requests is in flight: each is sent again when it is answered. The model does nothing. Spans go
to an exporter that drops them. The rows have the CPU time of the process per request. Tracing is
off, or on without sampling the caller, or on with every request sampled. The cost of Serve's own
spans is not included. *Hooks*: the functions that a request calls when tracing is off, measured
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.harness.rows import Row

SOURCE = "ray-slo"


class Nothing:
    def __call__(self, items: list[Any]) -> list[Any]:
        return items


class _Silent:
    """A replacement for metrics, which need Ray."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def run(quick: bool, seed: int) -> list[Row]:
    rows = []
    count, repeats = (200, 1) if quick else (3000, 5)
    for at_a_time in (1, 32):
        seen: dict[str, list[tuple[float, float]]] = {"off": [], "unsampled": [], "sampled": []}
        for _ in range(repeats):
            for how, figures in seen.items():
                figures.append(asyncio.run(_serve(how, at_a_time, count)))
        cpu_us = {how: float(np.median([f[0] for f in figures])) for how, figures in seen.items()}
        # The spread between runs without tracing, because it is as large as the differences.
        noise_us = float(np.ptp([f[0] for f in seen["off"]]))
        case = f"{at_a_time} at a time"
        rows += [
            Row(case, "batch size", "", float(np.mean([f[1] for f in seen["off"]]))),
            Row(case, "off", "µs", cpu_us["off"]),
            Row(case, "off, largest less smallest", "µs", noise_us),
            Row(case, "hooks where it is off", "µs", _hooks_us(count)),
            Row(case, "added where not sampled", "µs", cpu_us["unsampled"] - cpu_us["off"]),
            Row(case, "added where sampled", "µs", cpu_us["sampled"] - cpu_us["off"]),
        ]
    return rows


async def _serve(how: str, at_a_time: int, count: int) -> tuple[float, float]:
    """Return the CPU time per request in microseconds, and the mean batch size."""
    from opentelemetry import trace

    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if how == "sampled" else 0)
    caller = trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=True, trace_flags=flags))
    async with _app(how != "off") as front:
        left = iter(range(count))

        async def ask() -> list[int]:
            with trace.use_span(caller) if how != "off" else contextlib.nullcontext():
                return [(await front(i, response_metadata=True)).batch_size for i in left]

        await front(0)
        gc.collect()
        begin = time.process_time()
        sizes = await asyncio.gather(*(ask() for _ in range(at_a_time)))
        cpu_s = time.process_time() - begin
    batches = sum(1 / size for some in sizes for size in some)
    return 1e6 * cpu_s / count, count / batches


@contextlib.asynccontextmanager
async def _app(traced: bool) -> AsyncIterator[Any]:
    """Start a frontend that reaches its worker by a plain call."""
    from ray_slo.serve.config.resolve import parse_spec
    from ray_slo.serve.frontend.frontend import Frontend
    from ray_slo.serve.frontend.surroundings import Surroundings
    from ray_slo.serve.worker import batches, registration, worker

    model = {"callable": Nothing, "latency_slo_ms": 60_000, "max_batch_size": 32}
    spec = parse_spec({"models": {"m": model}, "policy": "eager", "name": "m"})
    link = SimpleNamespace(
        report=lambda report: None, heartbeat=lambda beat: asyncio.sleep(0), close=lambda: None
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_tracing(traced))
        context = SimpleNamespace(app_name="app", deployment="m-worker", replica_tag="w", rank=0)
        serve = SimpleNamespace(get_replica_context=lambda: context)
        stack.enter_context(mock.patch.object(worker, "serve", serve))
        stack.enter_context(mock.patch.object(batches, "WorkerMetrics", _Silent))
        stack.enter_context(mock.patch.object(registration, "WorkerLink", lambda *args: link))
        one: Any = worker.Worker.__new__(worker.Worker)
        await one.__init__(spec, "default", "m")
        handle = SimpleNamespace(
            deployment_name="m-worker",
            execute=SimpleNamespace(remote=one.execute),
            introduce=SimpleNamespace(remote=one.introduce),
        )
        metrics: Any = _Silent()
        of_serve: Any = {"states": lambda *_: {}, "details": dict}
        around = Surroundings("app", "m", "front", metrics, **of_serve)
        front: Any = Frontend.__new__(Frontend)
        await front.__init__(spec, {"default": handle}, around)
        try:
            yield front
        finally:
            front.__del__()
            one.__del__()


@contextlib.contextmanager
def _tracing(on: bool) -> Iterator[None]:
    """Set tracing up as Serve does, with an exporter that drops everything."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    from ray.serve._private import tracing_utils

    class Drop(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(1.0), shutdown_on_exit=False)
    if on:
        provider.add_span_processor(BatchSpanProcessor(Drop()))
    tracer = provider.get_tracer("ray_slo")
    with (
        mock.patch.object(tracing_utils, "is_tracing_enabled", lambda: on),
        mock.patch.object(trace, "get_tracer", lambda *_: tracer),
    ):
        yield
    provider.shutdown()


def _hooks_us(count: int) -> float:
    """Return the time per request of the tracing functions when tracing is off, in microseconds.

    These are the functions that frontend and worker call for a request in a batch of its own. The
    figure is the shortest of several measurements.
    """
    from contextlib import nullcontext

    from ray_slo.core import BatchStatus
    from ray_slo.serve.watch import tracing

    answer: Any = None  # not used when the request is not traced
    status, scope = BatchStatus.FINISHED, nullcontext()
    best_s = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        for i in range(count):
            request = tracing.request("m", 0.0, 1.0, None)
            with request.inside():
                request.submitted(i, 1.0)
            request.granted(answer, "eager")
            traces = [request]
            tracing.contexts(traces)
            with tracing.call_of(traces):
                pass
            tracing.BATCH_NOT_TRACED.around(scope)
            tracing.BATCH_NOT_TRACED.ended(status, 0.0)
            request.ran("")
            request.answered(answer)
        best_s = min(best_s, time.perf_counter() - begin)
    return 1e6 * best_s / count
