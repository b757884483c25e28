"""What `Price` learns: the load of a model, and the error of the profiles. Both are rounded to a
grid, so that prices are solved for few values."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

import numpy as np

from ray_slo.core.requests import BatchOutcome, BatchStatus
from ray_slo.policies.shared.lanes import Worker

_TICKS = 128  # in which the load is measured
_RECENT = (1, 2, 4, 8)  # latest ticks that must not contradict the others,
_SURPRISE = 4.0  # standard deviations
_PER_OCTAVE = 16  # grid for loads and speeds
_MARGIN_QUANTILE = 0.99
_MARGIN_SAMPLES = 512
_MARGIN_MAX = 2.0

TICKS_PER_SLO = 4
"""Arrivals are counted in ticks of the shortest SLO."""

SHORT = 0.1
"""Share of the SLO: the error of shorter batches does not matter."""


def level(value: float) -> int:
    """A value on the grid."""
    return round(_PER_OCTAVE * math.log2(value))


class TickedLoad:
    """Arrivals of a model, per tick.

    Attributes:
        mean: arrivals per tick.
        level, burst: grid values of the load and the dispersion that the prices are for.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.level = -(2**31)
        self.burst = 0
        self.look_at = 4
        self._log_dispersion = 0.0
        self._counts: deque[int] = deque(maxlen=_TICKS)

    def count(self, arrived: int, ticks: int) -> None:
        """`ticks` have passed, with this number of arrivals."""
        counts = self._counts
        counts.extend([0] * min(ticks - 1, _TICKS))
        counts.append(arrived)
        mean = sum(counts) / len(counts)
        for ticks in _RECENT:
            if len(counts) < 4 * ticks:
                break
            recent = list(islice(reversed(counts), ticks))
            deviation = math.sqrt(max(mean * ticks, 4.0) * 2**self._log_dispersion)
            if abs(sum(recent) - mean * ticks) > _SURPRISE * deviation:
                counts.clear()
                counts.extend(reversed(recent))
                mean = sum(counts) / ticks
                break
        if len(counts) >= _TICKS // 4 and mean > 0:
            variance = sum((c - mean) ** 2 for c in counts) / (len(counts) - 1)
            self._log_dispersion = min(max(math.log2(max(variance / mean, 1.0)), 0.0), 4.0)
        self.mean = mean

    def settle(self, rate: float) -> bool:
        """Whether prices for another load are needed. Differences that may be chance are
        ignored."""
        at = _PER_OCTAVE * math.log2(rate)
        burst = self._log_dispersion
        # One standard deviation of the measured rate, on the grid.
        chance = _PER_OCTAVE * math.sqrt(2 * 2**burst / max(sum(self._counts), 1))
        if abs(at - self.level) <= 0.75 + chance and abs(burst - self.burst) <= 0.6:
            return False
        self.level, self.burst = round(at), round(burst)
        return True

    @property
    def rate(self) -> float:
        """Requests per second that the prices are for."""
        return float(2 ** (self.level / _PER_OCTAVE))


class Precision:
    """Ratio of measured to predicted times of batches.

    Attributes:
        margin: factor for predictions such that almost all hold; at least 1.
        pace: total measured time over total predicted time.
        levels: both, on a grid.
    """

    def __init__(self) -> None:
        self.margin = self.pace = 1.0
        self.levels = (0, 0)
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_MARGIN_SAMPLES)
        self._fresh = 0

    def learn(self, worker: Worker | None, outcome: BatchOutcome, short_s: float) -> bool:
        """Learn from a finished batch; whether the margin has changed."""
        if worker is not None and outcome.status is BatchStatus.FINISHED:
            for flight in worker.flights:
                if flight.batch_id == outcome.batch_id:
                    took_s = outcome.finished_at - outcome.started_at
                    return self.add(took_s, flight.latency_s, short_s)
        return False

    def add(self, took_s: float, predicted_s: float, short_s: float) -> bool:
        """Add a batch; whether the margin has changed.

        Args:
            short_s: the error of a shorter batch counts relative to this time, seconds.
        """
        error = (took_s - predicted_s) / max(predicted_s, short_s)
        self._samples.append((1 + error, took_s, predicted_s))
        self._fresh += 1
        if self._fresh < 32:
            return False
        self._fresh = 0
        ratio, took, predicted = np.array(self._samples).T
        quantile = min(_MARGIN_QUANTILE, len(ratio) / (len(ratio) + 1))
        margin = min(max(float(np.quantile(ratio, quantile)), 1.0), _MARGIN_MAX)
        # A batch that hangs says nothing about the others.
        took = np.minimum(took, _MARGIN_MAX * np.maximum(predicted, short_s))
        pace = min(max(float(took.sum() / predicted.sum()), 0.25), _MARGIN_MAX)
        before = self.levels
        # The margin has a finer grid and is rounded up, because it keeps batches in time.
        self.levels = math.ceil(4 * _PER_OCTAVE * math.log2(margin) - 1e-6), level(pace)
        self.margin = 2 ** (self.levels[0] / (4 * _PER_OCTAVE))
        self.pace = 2 ** (self.levels[1] / _PER_OCTAVE)
        return self.levels[0] != before[0]
