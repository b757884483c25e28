"""Anticipates a load from what arrived lately (RAMSIS §6: a moving average over 500 ms).

Pure bookkeeping: the caller says what time it is. O(1) amortised per arrival.

Worked example: arrivals every 5 ms, window 500 ms. From 0.5 s on the window holds 100 of them:
200 requests/s. At 20 requests/s it would hold 10, and its rate would jump by a third from one look
to the next; so it reaches back over at least `min_arrivals`, here 3.2 s. A rise shortens that at
once (many arrivals are quickly together), a fall takes its time, which is the safe way round.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Annotated, Literal

from pydantic import Field

from ray_slo.core.arguments import Count, Positive, checked

Kind = Literal["mean", "ewma", "peak"]


class LoadMonitor:
    """Requests per second, as anticipated from the arrivals so far.

    Args:
        kind: "mean" of the window; "ewma", exponentially weighted with the window as its time
            constant; "peak", the largest mean of the last `hold_windows` windows.
        window_s: seconds.
        min_arrivals: the mean reaches back over at least as many, however long ago they are.

    Raises:
        ValueError: an argument out of its range.
    """

    @checked
    def __init__(
        self,
        kind: Kind = "mean",
        window_s: Positive = 0.5,
        *,
        min_arrivals: Count = 64,
        hold_windows: Annotated[float, Field(ge=1)] = 10.0,
    ) -> None:
        self._kind = kind
        self._window_s = window_s
        self._min_arrivals = min_arrivals
        self._hold_s = hold_windows * window_s
        self._arrivals: deque[tuple[float, int]] = deque()
        self._count = 0  # in `_arrivals`
        self._started = math.nan  # the first arrival
        self._weight, self._weighed_at = 0.0, 0.0  # of "ewma"
        self._peaks: deque[tuple[float, float]] = deque()  # (time, rate), rates falling

    def arrived(self, now: float, count: int = 1) -> None:
        """`count` requests arrived now."""
        if math.isnan(self._started):
            self._started = self._weighed_at = now
        if self._kind == "ewma":
            self._decay(now)
            self._weight += count
        else:
            self._arrivals.append((now, count))
            self._count += count
            self._forget(now)

    def rate(self, now: float) -> float:
        """Anticipated requests per second; 0 before the second arrival."""
        if math.isnan(self._started):
            return 0.0
        if self._kind == "mean":
            return self._mean(now)
        if self._kind == "ewma":
            self._decay(now)
            # What a steady load would have gathered since the first arrival.
            seen = -math.expm1(-max(now - self._started, 0.1 * self._window_s) / self._window_s)
            return self._weight / (self._window_s * seen)
        rate, peaks = self._mean(now), self._peaks
        while peaks and peaks[-1][1] <= rate:
            peaks.pop()
        peaks.append((now, rate))
        while peaks[0][0] < now - self._hold_s:
            peaks.popleft()
        return peaks[0][1]

    def _mean(self, now: float) -> float:
        self._forget(now)
        (oldest, count), start = self._arrivals[0], now - self._window_s
        if self._started < start <= oldest:
            return self._count / self._window_s
        # Counted from the oldest arrival on, so that one does not count.
        return (self._count - count) / max(now - oldest, 0.1 * self._window_s)

    def _forget(self, now: float) -> None:
        arrivals, start = self._arrivals, now - self._window_s
        while arrivals[0][0] < start and self._count - arrivals[0][1] >= self._min_arrivals:
            self._count -= arrivals.popleft()[1]

    def _decay(self, now: float) -> None:
        self._weight *= math.exp(-(now - self._weighed_at) / self._window_s)
        self._weighed_at = now


class Ticks:
    """Time in equal steps, in which arrivals are counted. `every_s`: their length, seconds."""

    def __init__(self, now: float, every_s: float) -> None:
        self.every_s = every_s
        self.next_at = now + every_s

    def passed(self, now: float) -> int:
        """How many steps ended since the last call."""
        if now < self.next_at:
            return 0
        steps = int((now - self.next_at) / self.every_s) + 1
        self.next_at += steps * self.every_s
        return steps
