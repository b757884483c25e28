"""Chooses the next batch size to measure in a warm-up sweep.

For a slow network, there is time for few calls. So a sweep first tries the largest size that should
fit its budget and its bound. `LatencyProfile.from_points` predicts the time from the measured
latencies, rather too long than too short. The sizes in between follow. Then come rounds over all
sizes, so that a passing disturbance affects all equally. The first call of a size may compile or
allocate. It counts only if no other call of that size was possible.

Worked example: 0.2 s per item, a budget of 3 s, and a bound of 2 s.

    >>> sweep = Sweep((1, 2, 4, 8, 16), budget_s=3.0, bound_s=2.0)
    >>> calls = []
    >>> while (size := sweep.size) is not None:
    ...     calls.append(size)
    ...     sweep.took(0.2 * size)
    >>> calls, sorted(sweep.samples)
    ([1, 1, 4, 8], [1, 4, 8])
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable

from ray_slo.core.profiles import LatencyProfile

_COSTLY = 0.25  # a call that takes a larger share of the budget is not repeated as a warm-up
_STEADY = 3  # rounds that show that times are steady
_ALIKE = 1.2  # largest multiple of the shortest time among them, for each size


class Sweep:
    """Gives the next size to time, and takes its duration.

    Args:
        sizes: batch sizes to measure.
        budget_s: approximate limit of the time in calls, in seconds. The smallest size is always
            measured. A second size is measured if it should take no longer than the whole budget.
        bound_s: after a size took longer than this, in seconds, no larger size is tried.
        call_s: longest allowed call, in seconds. The smallest size is tried in any case.
        repeats: largest number of rounds.

    Attributes:
        size: the next size to time. None at the end.
        samples: durations in seconds, by batch size.
        spread: the longest of the last three times of a size, as a multiple of the shortest. The
            largest of all sizes; infinite before three rounds.
        is_cut: whether larger sizes than those in `samples` ran out of memory.

    Raises:
        ValueError: there is no size, or a size below 1.
    """

    def __init__(
        self,
        sizes: Iterable[int],
        *,
        budget_s: float,
        bound_s: float | None = None,
        call_s: float = math.inf,
        repeats: int = 50,
    ) -> None:
        self._sizes = sorted(set(sizes))
        if not self._sizes or self._sizes[0] < 1:
            raise ValueError(f"sizes must be at least one number ≥ 1, got {self._sizes}")
        self._budget_s = self._left_s = budget_s
        self._bound_s = math.inf if bound_s is None else bound_s
        self._call_s = call_s
        self._repeats = repeats
        # Shortest call by size, in seconds. The first call counts only if it is the only one.
        self._best: dict[int, float] = {}
        self._rounds: dict[int, list[float]] = {}
        self.is_cut = False
        self._steps = self._run()
        self.size: int | None = next(self._steps)

    def took(self, seconds: float) -> None:
        """Take the duration of the call for `size`, in seconds."""
        self._left_s -= seconds
        try:
            self.size = self._steps.send(seconds)
        except StopIteration:
            self.size = None

    def ran_out(self, seconds: float) -> bool:
        """Note that the call for `size` ran out of memory after `seconds`. Neither this size nor a
        larger one is tried again. Return whether a smaller size worked."""
        self._left_s -= seconds
        failed = self.size or 0
        self._sizes = [size for size in self._sizes if size < failed]
        self._best = {size: best for size, best in self._best.items() if size < failed}
        self._rounds = {size: rounds for size, rounds in self._rounds.items() if size < failed}
        self.is_cut = True
        self._steps = self._rest()
        self.size = next(self._steps, None) if self._best else None
        return bool(self._best)

    @property
    def samples(self) -> dict[int, list[float]]:
        return {size: self._rounds.get(size) or [s] for size, s in sorted(self._best.items())}

    @property
    def spread(self) -> float:
        last = [self._rounds.get(size, [])[-_STEADY:] for size in self._best]
        if min(map(len, last), default=0) < _STEADY:
            return math.inf
        return max(max(times) / max(min(times), 1e-9) for times in last)

    @property
    def steady(self) -> dict[int, list[float]] | None:
        """The durations of the last three rounds, if they differ little. Other programs, such as
        Ray's own start, may have disturbed earlier ones."""
        if self.spread > _ALIKE:
            return None
        return {size: times[-_STEADY:] for size, times in self.samples.items()}

    @property
    def outcome(self) -> str:
        """Whether times were steady, for people."""
        if self.steady:
            return "times are steady"
        if math.isinf(self.spread):
            return "there was no time for three rounds"
        return (
            f"times are not steady, the longest is {self.spread:.3g} times the shortest; other "
            f"programs may have taken CPU time"
        )

    def _run(self) -> Generator[int, float, None]:
        yield from self._measure(self._sizes[0])
        yield from self._rest()

    def _rest(self) -> Generator[int, float, None]:
        """Measure the sizes that were not measured yet, then do rounds over all."""
        while (size := self._larger()) is not None:
            yield from self._measure(size)
        for size in self._sizes:
            if size in self._best or size > max(self._best):
                continue
            if min(t for b, t in self._best.items() if b > size) <= self._left_s:
                self._best[size] = yield size
        yield from self._repeat()

    def _measure(self, size: int) -> Generator[int, float, None]:
        """Measure a size for the first time, and once more unless the first call took long."""
        self._best[size] = seconds = yield size
        affordable = seconds <= self._left_s and seconds <= _COSTLY * self._budget_s
        # A second call confirms that the size is too slow: the first one may have compiled.
        ends = seconds > self._bound_s and seconds <= self._left_s
        if affordable or ends:
            self._best[size] = min(seconds, (yield size)) if ends else (yield size)

    def _larger(self) -> int | None:
        """Return the next larger size to try, or None if there is none."""
        reached = max(self._best)
        beyond = [size for size in self._sizes if size > reached]
        if not beyond or self._best[reached] > self._bound_s:
            return None
        expected = LatencyProfile.from_points(self._best, beyond[-1])
        limit_s = min(self._bound_s, self._call_s, self._left_s / 2)
        if fits := [size for size in beyond if expected(size) <= limit_s]:
            return fits[-1]
        # The next size may be faster than predicted, so try it if there is time. A second size may
        # even take the whole budget.
        left_s = self._left_s if len(self._best) > 1 else max(self._left_s, self._budget_s)
        return beyond[0] if expected(beyond[0]) <= min(left_s, self._call_s) else None

    def _repeat(self) -> Generator[int, float, None]:
        for _ in range(self._repeats):
            for size in sorted(self._best):
                if self._best[size] <= self._left_s:
                    seconds = yield size
                    self._rounds.setdefault(size, []).append(seconds)
                    self._best[size] = min(self._best[size], seconds)
            if self._best[self._sizes[0]] > self._left_s:
                return
