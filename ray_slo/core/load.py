"""Predicts a load from recent arrivals (RAMSIS §6: a moving average over 500 ms), and measures how
bursty arrivals are.

It reads no clock: the caller passes the time. O(1) amortised per arrival.

Worked example: arrivals every 5 ms, window 500 ms. From 0.5 s on, the window contains 100 of them:
200 requests/s. At 20 requests/s it would contain 10, and its rate would vary by a third. So the
window covers at least `min_arrivals`, here 3.2 s. A rise of the load is found at once, because
enough arrivals come in a short time. A fall is found later, which is the safe direction.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Annotated, Literal

from pydantic import Field

from ray_slo.core.arguments import Count, Positive, checked

Kind = Literal["mean", "ewma", "peak"]

_IN_WINDOW = 8  # with fewer arrivals, the index of dispersion is near 1 for any process


class LoadMonitor:
    """Requests per second, predicted from the arrivals so far.

    Args:
        kind: "mean" of the window; "ewma", exponentially weighted with the window as its time
            constant; "peak", the largest mean of the last `hold_windows` windows.
        window_s: seconds.
        min_arrivals: the mean covers at least this many arrivals, however old they are.

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
        """Predicted requests per second; 0 before the second arrival."""
        if math.isnan(self._started):
            return 0.0
        if self._kind == "mean":
            return self._mean(now)
        if self._kind == "ewma":
            self._decay(now)
            # The value that a steady load would have reached since the first arrival.
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
        # Time begins at the oldest arrival, so that one is not counted.
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
        """Number of steps that ended since the last call."""
        if now < self.next_at:
            return 0
        steps = int((now - self.next_at) / self.every_s) + 1
        self.next_at += steps * self.every_s
        return steps


class Dispersion:
    """Index of dispersion of counts: 1 for Poisson arrivals, more for bursty ones.

    It is the Allan factor, half the mean squared difference of successive counts over their mean.
    So a load that rises or falls slowly does not count as bursts, as it would with the variance.
    Renewal arrivals with gaps of squared coefficient of variation c² tend to c²: Gamma gaps of
    shape 0.25 to 4.

    Worked example: windows of 2 s with 4, 0, 4, 0, … arrivals. Squared differences are 16, half of
    that over the mean of 2 is 4.

    Args:
        window_s: arrivals are counted in windows of at least this length, seconds; longer ones, by
            powers of two, if they would contain fewer than 8 arrivals on average.
        memory: windows that are remembered, as the time constant of an average.

    Raises:
        ValueError: an argument out of its range.
    """

    @checked
    def __init__(self, window_s: Positive = 1.0, memory: Count = 256) -> None:
        self._least_s = self._length_s = window_s
        self._memory = memory
        self._end = math.nan  # of the window that is being filled
        self._count = 0
        self._before: int | None = None  # the count of the window before
        self._mean = self._squares = 0.0
        self.windows = 0

    def arrived(self, now: float, count: int = 1) -> None:
        """`count` requests arrived now."""
        if math.isnan(self._end):
            self._end = now + self._length_s
        self._close(now)
        self._count += count
        if self._count > 32 * _IN_WINDOW and self._length_s > self._least_s:
            # A load of another order of magnitude: begin again.
            self._count, self._before, self.windows = 0, None, 0
            self._length_s, self._end = self._least_s, now + self._least_s

    def counted(self, count: int) -> None:
        """A window with `count` arrivals is over, if the caller counts. Its windows must have equal
        lengths."""
        if self._before is not None:
            self.windows = min(self.windows + 1, self._memory)
            weight = 1 / self.windows
            self._mean += weight * (0.5 * (count + self._before) - self._mean)
            self._squares += weight * ((count - self._before) ** 2 - self._squares)
        self._before = count

    @property
    def value(self) -> float:
        """The index; 1 before the third window."""
        return 0.5 * self._squares / self._mean if self.windows > 1 and self._mean > 0 else 1.0

    @property
    def error(self) -> float:
        """Standard error of the index as a share of it, if arrivals are Poisson."""
        return math.sqrt(3 / self.windows) if self.windows else math.inf

    def _close(self, now: float) -> None:
        """Close windows that are over."""
        if now < self._end:
            return
        self.counted(self._count)
        self._count = 0
        self._end += self._length_s
        empty = int((now - self._end) / self._length_s) + 1 if now >= self._end else 0
        for _ in range(min(empty, self._memory)):
            self.counted(0)
        self._end += empty * self._length_s
        self._fit()

    def _fit(self) -> None:
        """Use longer windows if one has few arrivals, shorter ones if it has many."""
        if self.windows < 8:
            return
        rate = self._mean / self._length_s
        wanted = max(_IN_WINDOW / rate, self._least_s) if rate > 0 else self._length_s
        if self._length_s < wanted or self._length_s > 4 * wanted:
            steps = math.ceil(math.log2(wanted / self._least_s) - 1e-9)
            length_s = self._least_s * 2**steps
            self._end += length_s - self._length_s
            scale, self._length_s = length_s / self._length_s, length_s
            self._mean, self._squares = scale * self._mean, scale * self._squares
            self._before = None  # it must not be compared with a window of another length
