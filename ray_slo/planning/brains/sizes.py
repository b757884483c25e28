"""The sizes of an application's requests, and a test whether their distribution has changed since
the plan. Pure: no clock. For requests per second, see `core.demand.Rate`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ks_2samp


class Sizes:
    """Sizes of recent requests. A two-sample Kolmogorov–Smirnov test compares the last `recent`
    sizes with the planned ones. If it finds a change of the distribution, older sizes are
    forgotten.

    Args:
        memory: the largest number of sizes to plan with.
        recent: the number of sizes that are tested.
        p_value: a p-value below this counts as a change. The test runs again after every `recent` /
            4 requests, so this must be small.
        share: a smaller distance between the two distribution functions does not count as a change,
            because it makes no difference to a plan.

    Attributes:
        changes: number of changes found so far.
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
        self._rng = np.random.default_rng(0)
        self.changes = 0

    def counted(self, sizes: Mapping[int, int]) -> None:
        """Take the number of requests of each size."""
        if not sizes:
            return
        # In any order: the last of many requests must not be only the largest.
        counted = self._rng.permutation(np.repeat(list(sizes), list(sizes.values()))).tolist()
        self._sizes.extend(counted)
        self._recent.extend(counted)
        self._untested += len(counted)

    def __len__(self) -> int:
        return len(self._sizes)

    def values(self) -> NDArray[np.int64]:
        """Return the sizes to plan with, shape (n,)."""
        if self.differ():
            return np.array(self._recent, dtype=np.int64)
        return np.array(self._sizes, dtype=np.int64)

    def planned(self) -> None:
        """Note that the plan in force is for the present `values`."""
        self._planned = self.values()
        if self._differ:
            self._differ = False
            self.changes += 1
            self._sizes.clear()
            self._sizes.extend(self._recent)

    def differ(self) -> bool:
        """Return whether recent sizes have another distribution than the planned ones."""
        enough = 4 * self._untested >= (self._recent.maxlen or 0)
        if self._planned is None or self._differ or not enough:
            return self._differ
        self._untested = 0
        recent = np.array(self._recent)
        if np.array_equal(np.unique(recent), np.unique(self._planned)) and np.ptp(recent) == 0:
            return False  # as for most models: all requests have one size
        # Sizes are whole numbers, so there are ties. They make the test more cautious.
        test = ks_2samp(self._planned, recent, method="asymp")
        self._differ = bool(test.pvalue < self._p_value and test.statistic > self._share)
        return self._differ
