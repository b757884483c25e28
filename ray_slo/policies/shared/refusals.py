"""Why requests are refused."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ray_slo.core.decisions import Drop, DropReason
from ray_slo.core.requests import Request

TOLERANCE_S = 5e-7
"""A deadline may be missed by this much, seconds: clocks and sums of floats are not more exact."""


def reason(request: Request, now: float, soonest: float | None) -> DropReason:
    """The reason to refuse a request that could be done at `soonest`, seconds; None: no worker
    can."""
    if soonest is None:
        return DropReason.NO_WORKER
    if request.deadline <= now:
        return DropReason.EXPIRED
    if request.deadline < soonest - TOLERANCE_S:
        return DropReason.WOULD_MISS
    return DropReason.SHED


def drops(
    requests: Iterable[Request], now: float, soonest: float | None, margin_s: float = 0.0
) -> list[Drop]:
    """Refuse requests that could be done at `soonest`, with the margin: one action per reason."""
    finish_at = math.nan if soonest is None else soonest - margin_s
    return by_reason(((r, reason(r, now, soonest)) for r in requests), finish_at)


def by_reason(
    refused: Iterable[tuple[Request, DropReason]], finish_at: float = math.nan
) -> list[Drop]:
    """One action for each reason."""
    requests: dict[DropReason, list[Request]] = {}
    for request, why in refused:
        requests.setdefault(why, []).append(request)
    return [Drop(group, why, finish_at) for why, group in requests.items()]
