"""The requests that an application gets, as the planners' brains see them: how many a second, and
of what sizes; and whether that is still what was planned for. Pure: no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ks_2samp

from ray_slo.planning.demand import Demand, Kind, changed

_WINDOW_S = 3.0
# A change shows in the last two seconds, at three standard deviations, or in the last one at four.
_RECENT = ((1.0, 4.0), (2.0, 3.0))
_SILENT_S = 2.0  # what nobody counted for so long did not come
LEAST_RATE = 0.1  # requests per second: no plan is for nothing


class Rate:
    """Requests per second, on average.

    Args:
        kind, horizon_s: of `Demand`.
    """

    def __init__(self, kind: Kind = "ewma", horizon_s: float = 0.0) -> None:
        self._demand = Demand(kind, _WINDOW_S, horizon_s=horizon_s)
        self._recent: deque[tuple[float, int]] = deque()  # seconds and requests, the last first
        self._counted_at = -math.inf
        self.seen = False
        """Whether there was a request."""

    def counted(self, now: float, over_s: float, requests: int) -> None:
        """So many requests came in the `over_s` seconds before now.

        Where several count, each counts for its share of the time, so that those of all add up to
        the time that went by.
        """
        if self._counted_at == -math.inf:
            self._demand.arrived(now - over_s, 0)
        self._counted_at = now
        if requests:
            self.seen = True
            self._demand.arrived(now - over_s / 2, requests)
        self._recent.appendleft((over_s, requests))
        while len(self._recent) > 1 and self._covered() - self._recent[-1][0] >= _RECENT[-1][0]:
            self._recent.pop()

    def _covered(self) -> float:
        return sum(over_s for over_s, _ in self._recent)

    def value(self, now: float) -> float:
        """To plan for; at least `LEAST_RATE`."""
        # What came since the last count, nobody knows yet.
        silent = now - self._counted_at > _SILENT_S
        usual = self._demand.rate(now if silent else self._counted_at)
        rises = [count / over_s for count, over_s in self._changes(now, usual)]
        return max(usual, LEAST_RATE, *rises)

    def differs(self, now: float, planned: float) -> bool:
        """Whether it is not the `planned` one, by more than chance explains."""
        return bool(self._changes(now, planned))

    def _changes(self, now: float, planned: float) -> list[tuple[int, float]]:
        """Recent times in which it was another: requests, and seconds."""
        found: list[tuple[int, float]] = []
        if now - self._counted_at > _SILENT_S:
            return found
        for window_s, deviations in _RECENT:
            count, over_s = 0, 0.0
            for seconds, requests in self._recent:
                if over_s >= window_s - 1e-9:
                    break
                count, over_s = count + requests, over_s + seconds
            enough = over_s >= window_s - 1e-9
            if enough and changed(planned, count, over_s, deviations=deviations):
                found.append((count, over_s))
        return found


class Sizes:
    """Sizes of recent requests. A change of their distribution is found by a two-sample
    Kolmogorov–Smirnov test of the last `recent` against those that were planned for; what came
    before it is then forgotten.

    Args:
        memory: so many sizes are planned with, at most.
        recent: so many are tested.
        p_value: of the test, below which a change is taken for one. It is made for every quarter of
            `recent` that comes, so it has to be small.
        share: and the distribution functions are apart by this much somewhere: what makes no
            difference to a plan is no change.
    """

    def __init__(
        self, memory: int = 2000, recent: int = 200, p_value: float = 1e-4, share: float = 0.1
    ) -> None:
        self._sizes: deque[int] = deque(maxlen=memory)
        self._recent: deque[int] = deque(maxlen=recent)
        self._p_value, self._share = p_value, share
        self._planned: NDArray[np.int64] | None = None
        self._untested = 0
        self._differ = False
        self.changes = 0

    def counted(self, sizes: Mapping[int, int]) -> None:
        """So many requests of each size came."""
        for size, count in sizes.items():
            repeated = [size] * count
            self._sizes.extend(repeated)
            self._recent.extend(repeated)
            self._untested += count

    def __len__(self) -> int:
        return len(self._sizes)

    def values(self) -> NDArray[np.int64]:
        """To plan with, shape (n,)."""
        if self.differ():
            return np.array(self._recent, dtype=np.int64)
        return np.array(self._sizes, dtype=np.int64)

    def planned(self, values: NDArray[np.int64]) -> None:
        """There is a plan for these."""
        self._planned = values
        if self._differ:
            self._differ = False
            self.changes += 1
            self._sizes.clear()
            self._sizes.extend(self._recent)

    def differ(self) -> bool:
        """Whether recent sizes are of another distribution than those planned for."""
        enough = 4 * self._untested >= (self._recent.maxlen or 0)
        if self._planned is None or self._differ or not enough:
            return self._differ
        self._untested = 0
        # Sizes are whole numbers, so there are ties, and the test errs on the side of no change.
        test = ks_2samp(self._planned, np.array(self._recent), method="asymp")
        self._differ = bool(test.pvalue < self._p_value and test.statistic > self._share)
        return self._differ
