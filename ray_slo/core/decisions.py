"""Typed decisions: the actions that a policy asks of its host, with its predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ray_slo.core.requests import Request, WorkerId


class DropReason(str, Enum):
    """Why a policy dropped a request.

    Attributes:
        why: the same in words, for people.
    """

    why: str

    def __new__(cls, value: str, why: str = "") -> DropReason:
        reason = str.__new__(cls, value)
        reason._value_, reason.why = value, why
        return reason

    # Even alone, started now, it would finish after its deadline.
    WOULD_MISS = "would_miss", "it would have finished too late"
    # It could still have been served, but at the cost of larger batches behind it.
    SHED = "shed", "the system is overloaded, and serving it would have delayed others"
    EXPIRED = "expired", "its deadline passed while it waited"
    NO_WORKER = "no_worker", "no worker has its model loaded"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run `requests` as one batch of `variant` on `worker`.

    Attributes:
        batch_id: increasing per policy; comes back in `BatchOutcome`.
        start_at, finish_at: predicted start and finish in the host's clock, seconds. The worker
            starts as soon as it is free and has every payload; `start_at` is a prediction: the
            worker does not wait for it.
        price: the value of the batch for a policy that has prices, in the policy's unit; set if the
            host asked (`Policy.explain`).
        note: the reason for this batch, in words; set if the policy has one and the host asked.
    """

    batch_id: int
    worker: WorkerId
    variant: str
    requests: Sequence[Request]
    start_at: float
    finish_at: float
    price: float | None = None
    note: str = field(default="", compare=False)

    @property
    def slack_s(self) -> float:
        """Predicted slack of the tightest request, seconds; negative when it is served late."""
        return min(r.deadline for r in self.requests) - self.finish_at


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop the batch that runs on `worker`.

    Attributes:
        variant: the variant that runs instead.
        gain: predicted gain in requests: additional served requests minus those that may be lost.
    """

    worker: WorkerId
    reason: str
    variant: str = ""
    gain: float = math.nan


@dataclass(frozen=True, slots=True)
class Drop:
    """Refuse `requests` now.

    Attributes:
        finish_at: the earliest predicted finish, seconds in the host's clock; NaN if none could be
            predicted.
    """

    requests: Sequence[Request]
    reason: DropReason
    finish_at: float = math.nan


Action = Dispatch | Preempt | Drop


@dataclass(slots=True)
class Decision:
    """Actions to carry out now, in order, and when to ask again if nothing happens.

    Attributes:
        wake_at: seconds in the host's clock; `inf` means "only at the next event".
    """

    actions: list[Action] = field(default_factory=list)
    wake_at: float = math.inf
