"""Metrics of `@ray_slo.batch`: those of `@serve.batch`, with its names and buckets, so that
dashboards and alerts stay as they are."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge, Histogram

from ray_slo.serve.ray_private import context

_TAGS = ("function_name",)


class BatchMetrics:
    """Counts the batches of one method. Outside a replica, nobody exports metrics, and it does
    nothing.

    Args:
        name: the method's name.
    """

    def __init__(self, name: str) -> None:
        self._tags = {"function_name": name}
        self._in_replica = context.max_ongoing_requests() is not None
        if not self._in_replica:
            return
        times_ms, shares, sizes = context.batch_buckets()
        self._waited = Histogram(
            "serve_batch_wait_time_ms",
            "Time from the call of a batch's oldest request to the batch's start, milliseconds.",
            times_ms,
            _TAGS,
        )
        self._took = Histogram(
            "serve_batch_execution_time_ms",
            "Time to execute the batch function, milliseconds.",
            times_ms,
            _TAGS,
        )
        self._queue = Gauge(
            "serve_batch_queue_length", "Requests that wait for a batch to start.", _TAGS
        )
        self._filled = Histogram(
            "serve_batch_utilization_percent",
            "Batch size as a percentage of max_batch_size.",
            shares,
            _TAGS,
        )
        self._size = Histogram(
            "serve_actual_batch_size", "Number of requests in each batch.", sizes, _TAGS
        )
        self._batches = Counter("serve_batches_processed", "Number of executed batches.", _TAGS)

    def started(self, size: int, max_batch_size: int, waited_s: float, waiting: int) -> None:
        """Count a batch that starts.

        Args:
            waited_s: time that its oldest request has waited, seconds.
            waiting: number of requests that wait for another batch.
        """
        if self._in_replica:
            self._waited.observe(1e3 * waited_s, self._tags)
            self._filled.observe(100 * size / max_batch_size, self._tags)
            self._size.observe(size, self._tags)
            self._batches.inc(tags=self._tags)
            self._queue.set(waiting, self._tags)

    def ended(self, seconds: float, waiting: int) -> None:
        """Count the time of a batch that has ended."""
        if self._in_replica:
            self._took.observe(1e3 * seconds, self._tags)
            self._queue.set(waiting, self._tags)
