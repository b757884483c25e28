"""What became of preemptions: who was stopped for whom, the gain that was predicted, how long it
took. Kept by the scheduler, shown by `ray-slo status --json`."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ray_slo.core import BatchStatus, Dispatch, Preempt

Outcome = Literal["asked", "preempted", "finished", "failed", "lost"]


@dataclass(slots=True)
class Preemption:
    """One decision to stop a batch.

    Attributes:
        asked_at: the scheduler's clock, seconds.
        victim, victim_size: variant that ran, and requests in its batch.
        by: variant that is to run instead.
        gain: predicted, in requests (`core.Preempt.gain`).
        outcome: "asked" while the batch runs on; "finished": it was past its last exit point, or
            has none.
        delay_s: from the decision until the scheduler heard that the worker is free.
        unix_time: of the decision.
    """

    asked_at: float
    worker: str
    victim: str
    victim_size: int
    by: str
    gain: float
    reason: str
    outcome: Outcome = "asked"
    delay_s: float | None = None
    unix_time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, preempt: Preempt, running: Dispatch, now: float) -> Preemption:
        return cls(
            asked_at=now,
            worker=preempt.worker,
            victim=running.variant,
            victim_size=len(running.requests),
            by=preempt.variant,
            gain=preempt.gain,
            reason=preempt.reason,
        )

    def ended(self, status: BatchStatus, now: float) -> None:
        """The worker is free, or gone."""
        self.outcome = status.value
        self.delay_s = now - self.asked_at

    def to_json(self) -> dict[str, Any]:
        body = asdict(self)
        del body["asked_at"], body["delay_s"]
        body["gain"] = self.gain if math.isfinite(self.gain) else None
        body["delay_ms"] = None if self.delay_s is None else 1e3 * self.delay_s
        return body
