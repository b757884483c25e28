"""A quantile of the last few samples."""

from __future__ import annotations

from collections import deque

import numpy as np

FEW_SAMPLES = 20  # of a delay. With fewer, a long one may be a cold start


class Quantile:
    """Quantile of the last `window` samples.

    Args:
        prior: the default stands in for missing samples until there are `prior`: one cold start
            is no measure of the next.
    """

    def __init__(self, q: float, window: int = 128, prior: int = 0) -> None:
        self._q = q
        self._samples: deque[float] = deque(maxlen=window)
        self._prior = prior
        self._value: float | None = None

    def add(self, value: float) -> None:
        self._samples.append(value)
        self._value = None

    def value(self, default: float) -> float:
        """The quantile, or `default` while there is no sample."""
        if self._value is None:
            if not self._samples:
                return default
            missing = max(self._prior - len(self._samples), 0)
            self._value = float(np.quantile([*self._samples, *[default] * missing], self._q))
        return self._value

    def forget(self) -> None:
        self._samples.clear()
        self._value = None
