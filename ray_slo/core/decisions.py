"""Typed decisions: what a policy tells its host to do, and what it predicts will happen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ray_slo.core.requests import Request, WorkerId


class DropReason(str, Enum):
    """Why a policy gave a request up.

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
            starts as soon as it is free and has every payload; `start_at` is no order to wait.
        price: what it was worth to a policy that has prices, in that policy's unit, if its host
            asked (`Policy.explain`).
        note: why this batch, in words, where the policy has any and its host asked.
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
        variant: what is to run instead.
        gain: predicted, in requests: served that would not be, less those that may be lost.
    """

    worker: WorkerId
    reason: str
    variant: str = ""
    gain: float = math.nan


@dataclass(frozen=True, slots=True)
class Drop:
    """Refuse `requests` now.

    Attributes:
        finish_at: the earliest finish that was predicted for them, seconds in the host's clock;
            NaN where none could be.
    """

    requests: Sequence[Request]
    reason: DropReason
    finish_at: float = math.nan


Action = Dispatch | Preempt | Drop


@dataclass(slots=True)
class Decision:
    """Actions to carry out now, in order, and when to ask again if nothing happens.

    Attributes:
        wake_at: seconds in the host's clock; `inf` for "only when something happens".
    """

    actions: list[Action] = field(default_factory=list)
    wake_at: float = math.inf
