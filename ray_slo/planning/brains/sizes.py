"""The sizes of the requests that an application gets, as the planners' brains see them, and whether
they are still what was planned for. Pure: no clock. How many a second: `planning.demand.Rate`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ks_2samp


class Sizes:
    """Sizes of recent requests. A change of their distribution is found by a two-sample
    Kolmogorov–Smirnov test of the last `recent` against those that were planned for; what came
    before it is then forgotten.

    Args:
        memory: the largest number of sizes to plan with.
        recent: the number of sizes that are tested.
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
