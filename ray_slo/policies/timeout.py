"""Timeout-based and eager batching (Symphony §2.2 and §3.4): what model servers do by default.

A batch is due a constant time after its earliest request arrived: exec = max(now, arrival + k).
With k = 0 this is *eager* scheduling: an idle worker takes whatever is there. A full batch is due
at once. As in the paper's comparison, the batch is the longest one that meets the head's deadline,
and a request that would be late even alone is refused at once. Our addition: if all workers are
idle and no other request waits, a request starts before the timeout would make it late.

Worked example (§3.3, Figure 5a): 3 workers, ℓ(b) = b + 5, SLO 12, a request every 0.75, all
workers staggered by batches of 4; R13–R15 do not come. At 11.25 R16 arrives and starts alone,
because a worker is idle. So does R25 at 18. At 23.25 a worker becomes free and R26–R32 wait, but
the deadline of R26 is 30.75, so the batch has only 2. From then on heads are late, batches stay
small, and R35, R37, R38, … are dropped, although the workers could sustain the rate.
"""

from __future__ import annotations

from typing import Any

from ray_slo.core.arguments import Count, NonNegative, checked
from ray_slo.policies.batching import LIVE_MARGIN, BatchingPolicy
from ray_slo.policies.shared.lanes import Lane


class Timeout(BatchingPolicy):
    """Send a batch `timeout_ms` after its earliest request arrived, or when it is full.

    Args:
        timeout_ms: `batch_wait_timeout_s` of `@serve.batch`, `max_queue_delay` of Triton.
        max_batch_size: upper bound beside the profile's.
        margin_ms: kept between a batch's predicted finish and its tightest deadline.

    Raises:
        ValueError: an argument out of its range.
    """

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """Arguments for a live host: batches are as large as deadlines allow, and late as a
        whole."""
        return {"margin_ms": LIVE_MARGIN * shortest_slo_ms}

    @checked
    def __init__(
        self,
        timeout_ms: NonNegative,
        *,
        max_batch_size: Count | None = None,
        margin_ms: NonNegative = 0.0,
    ) -> None:
        super().__init__(max_batch_size=max_batch_size, margin_ms=margin_ms)
        self._timeout_s = timeout_ms / 1e3

    def _send_at(self, lane: Lane, first: int, size: int, now: float) -> float:
        queue = lane.model.queue
        due_at = queue[first].arrival + self._timeout_s
        if due_at > now:  # deadlines may differ: the head need not be the oldest
            oldest = min(queue[i].arrival for i in range(first, first + lane.count))
            due_at = oldest + self._timeout_s
        latest = queue[first].deadline - lane.reach[size - 1]
        if lane.count == 1 and due_at > latest and self._is_idle():
            return max(latest, now)
        return due_at

    def _is_idle(self) -> bool:
        """Whether one request waits, and nothing else waits or runs."""
        waiting = sum(len(model.queue) for model in self._models.values())
        return waiting == 1 and not any(w.flights for w in self._workers.values())


class Eager(Timeout):
    """Send whatever is there as soon as a worker is idle: a timeout of 0."""

    serves_tasks = True  # because no request waits for its deadline

    def __init__(
        self, *, max_batch_size: Count | None = None, margin_ms: NonNegative = 0.0
    ) -> None:
        super().__init__(0.0, max_batch_size=max_batch_size, margin_ms=margin_ms)
