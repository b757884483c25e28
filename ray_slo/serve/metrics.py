"""`serve_slo_*` metrics. Ray exports them to Prometheus with the prefix `ray_`.

Every one carries the tag `model`, and Serve's own deployment, replica and application.
"""

from __future__ import annotations

import time
from collections import deque

from ray.serve import metrics

_MS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000]
_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
_GOODPUT_WINDOW_S = 10.0


class FrontendMetrics:
    """What happened to requests."""

    def __init__(self) -> None:
        self._requests = metrics.Counter(
            "serve_slo_requests_total",
            description="Requests by outcome: ok, late, refused, expired, cancelled, failed, "
            "invalid; reason says more.",
            tag_keys=("model", "outcome", "reason"),
        )
        self._variants = metrics.Counter(
            "serve_slo_variant_total",
            description="Answers by variant (the variant mix).",
            tag_keys=("model", "variant"),
        )
        self._latency = metrics.Histogram(
            "serve_slo_latency_ms",
            description="From arrival at the frontend to the answer.",
            boundaries=_MS,
            tag_keys=("model",),
        )
        self._slack = metrics.Histogram(
            "serve_slo_slack_ms",
            description="Time left to the deadline when the answer was ready (0 when late).",
            boundaries=_MS,
            tag_keys=("model",),
        )
        self._queue = metrics.Histogram(
            "serve_slo_queueing_delay_ms",
            description="From arrival at the frontend to the start of execution.",
            boundaries=_MS,
            tag_keys=("model",),
        )
        self._error = metrics.Histogram(
            "serve_slo_prediction_error_ms",
            description="Absolute difference between predicted and actual finish of a batch.",
            boundaries=_MS,
            tag_keys=("model",),
        )
        self._goodput = metrics.Gauge(
            "serve_slo_goodput",
            description=f"Requests answered in time per second, last {_GOODPUT_WINDOW_S:.0f} s.",
            tag_keys=("model",),
        )
        self._accuracy = metrics.Gauge(
            "serve_slo_accuracy",
            description="Mean accuracy (percent) of the variants that answered in time, "
            f"last {_GOODPUT_WINDOW_S:.0f} s.",
            tag_keys=("model",),
        )
        self._pending = metrics.Gauge(
            "serve_slo_pending_requests",
            description="Requests that this frontend owns and has not answered.",
        )
        self._good: dict[str, deque[tuple[float, float | None]]] = {}

    def answered(
        self,
        model: str,
        variant: str,
        accuracy: float | None,
        latency_ms: float,
        slack_ms: float,
        queue_ms: float,
    ) -> None:
        """One request was answered."""
        tags = {"model": model}
        outcome = "ok" if slack_ms >= 0 else "late"
        self._requests.inc(1, {**tags, "outcome": outcome, "reason": ""})
        self._variants.inc(1, {**tags, "variant": variant})
        self._latency.observe(latency_ms, tags)
        self._slack.observe(max(slack_ms, 0.0), tags)
        self._queue.observe(max(queue_ms, 0.0), tags)
        if slack_ms >= 0:
            self._good.setdefault(model, deque()).append((time.monotonic(), accuracy))

    def unanswered(self, model: str, outcome: str, reason: str) -> None:
        """One request ended without an answer."""
        self._requests.inc(1, {"model": model, "outcome": outcome, "reason": reason})

    def predicted(self, model: str, error_ms: float) -> None:
        """A batch ended `error_ms` after (before, if negative) its predicted finish."""
        self._error.observe(abs(error_ms), {"model": model})

    def goodput(self) -> dict[str, float]:
        """Requests answered in time per second by model, over the last seconds."""
        since = time.monotonic() - _GOODPUT_WINDOW_S
        rates = {}
        for model, good in self._good.items():
            while good and good[0][0] < since:
                good.popleft()
            rates[model] = len(good) / _GOODPUT_WINDOW_S
        return rates

    def refresh(self, pending: int) -> None:
        """Set the gauges; called about once a second."""
        self._pending.set(pending)
        for model, rate in self.goodput().items():
            self._goodput.set(rate, {"model": model})
            known = [a for _, a in self._good[model] if a is not None]
            if known:
                self._accuracy.set(sum(known) / len(known), {"model": model})


class WorkerMetrics:
    """What a worker ran."""

    def __init__(self) -> None:
        self._size = metrics.Histogram(
            "serve_slo_batch_size",
            description="Requests per batch.",
            boundaries=_SIZES,
            tag_keys=("model",),
        )
        self._exec = metrics.Histogram(
            "serve_slo_execution_ms",
            description="Time of a batch on the worker.",
            boundaries=_MS,
            tag_keys=("model",),
        )

    def batch(self, model: str, size: int, seconds: float) -> None:
        """One batch ran."""
        self._size.observe(size, {"model": model})
        self._exec.observe(seconds * 1e3, {"model": model})
