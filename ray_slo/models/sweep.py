"""Which batch size to measure next: the order of a warm-up sweep.

A slow network has time for few calls, so a sweep first reaches for the largest size that its budget
and its bound allow, by the latencies seen so far (`LatencyProfile.from_points`, which errs on the
slow side). The sizes in between follow. Then come rounds over all of them, so that a passing
disturbance touches every size alike. The first call of a size may compile or allocate; it counts
only where no other call of the size was possible.

Worked example: 0.2 s per item, 3 s to spend, results are of use up to 2 s.

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

_COSTLY = 0.25  # of the budget: a call that takes more is not repeated as its own warm-up


class Sweep:
    """Says which size to time next, and is told how long that took.

    Args:
        sizes: batch sizes to measure.
        budget_s: stop after about this many seconds in calls. Size 1 is always measured, and a
            second size where it takes no longer than the whole budget.
        bound_s: larger sizes than the first that takes longer than this are of no use.
        call_s: longest call, but for the smallest size: others wait for it meanwhile.
        repeats: rounds at most.

    Attributes:
        size: to be timed next; None at the end.
        samples: seconds by batch size.
        is_cut: larger sizes than those in `samples` do not fit.

    Raises:
        ValueError: no sizes, or one below 1.
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
        self._best: dict[int, float] = {}  # shortest call by size, the first one where alone
        self._rounds: dict[int, list[float]] = {}
        self.is_cut = False
        self._steps = self._run()
        self.size: int | None = next(self._steps)

    def took(self, seconds: float) -> None:
        """The call for `size` is over."""
        self._left_s -= seconds
        try:
            self.size = self._steps.send(seconds)
        except StopIteration:
            self.size = None

    def ran_out(self, seconds: float) -> bool:
        """The call for `size` ran out of memory after that time: neither it nor a larger size is
        tried again. Returns whether a smaller one worked."""
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

    def _run(self) -> Generator[int, float, None]:
        yield from self._measure(self._sizes[0])
        yield from self._rest()

    def _rest(self) -> Generator[int, float, None]:
        """All but the smallest size, as far as they are not measured yet; then rounds."""
        while (size := self._larger()) is not None:
            yield from self._measure(size)
        for size in self._sizes:
            if size in self._best or size > max(self._best):
                continue
            if min(t for b, t in self._best.items() if b > size) <= self._left_s:
                self._best[size] = yield size
        yield from self._repeat()

    def _measure(self, size: int) -> Generator[int, float, None]:
        """Reach a size: once, and once more unless the first call was costly."""
        self._best[size] = seconds = yield size
        affordable = seconds <= self._left_s and seconds <= _COSTLY * self._budget_s
        # One slow call must not end the sweep: it may have compiled.
        ends = seconds > self._bound_s and seconds <= self._left_s
        if affordable or ends:
            self._best[size] = min(seconds, (yield size)) if ends else (yield size)

    def _larger(self) -> int | None:
        """The next size to reach for; None where that makes no sense."""
        reached = max(self._best)
        beyond = [size for size in self._sizes if size > reached]
        if not beyond or self._best[reached] > self._bound_s:
            return None
        expected = LatencyProfile.from_points(self._best, beyond[-1])
        limit_s = min(self._bound_s, self._call_s, self._left_s / 2)
        if fits := [size for size in beyond if expected(size) <= limit_s]:
            return fits[-1]
        # It may take less than is expected: try the next one up, and a second size above all.
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
