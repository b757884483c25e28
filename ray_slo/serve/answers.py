"""What an answer carries beside the result, and how it looks over HTTP."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Answer:
    """A result and how it came about: what `handle.remote(x, response_metadata=True)` returns.

    Attributes:
        result: what the user's method (and `postprocess`) returned.
        variant, accuracy: the network that answered; accuracy in percent, None if unknown.
        batch_size: requests in its batch.
        queue_ms: from arrival at the frontend to the start of execution, without execution.
        exec_ms: of the batch.
        latency_ms: from arrival at the frontend to the answer.
        deadline_met: whether that was within the request's SLO.
    """

    result: Any
    model: str
    variant: str
    accuracy: float | None
    batch_size: int
    queue_ms: float
    exec_ms: float
    latency_ms: float
    latency_slo_ms: float

    @property
    def deadline_met(self) -> bool:
        return self.latency_ms <= self.latency_slo_ms

    def headers(self) -> dict[str, str]:
        """The `x-slo-*` headers."""
        headers = {
            "x-slo-model": self.model,
            "x-slo-variant": self.variant,
            "x-slo-batch-size": str(self.batch_size),
            "x-slo-queue-ms": f"{self.queue_ms:.3f}",
            "x-slo-exec-ms": f"{self.exec_ms:.3f}",
            "x-slo-latency-ms": f"{self.latency_ms:.3f}",
            "x-slo-deadline-met": str(self.deadline_met).lower(),
        }
        if self.accuracy is not None:
            headers["x-slo-accuracy"] = f"{self.accuracy:.2f}"
        return headers


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(
        f"a result of type {type(value).__name__} is not JSON; convert it in postprocess"
    )


def to_json(value: Any) -> bytes:
    """JSON, with NumPy arrays and scalars as lists and numbers.

    Raises:
        TypeError: the result holds something else.
    """
    return json.dumps(value, default=_plain).encode()
