"""Learns a latency profile from measured batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median_low
from typing import NamedTuple

import numpy as np

from ray_slo.core.profiles import LatencyProfile, slope_beyond, slope_hoped

_CLEARLY = 1.1  # a batch is clearly longer if it takes this multiple of the estimate
_RANGE = 8  # earlier batches that show the range of times. With fewer of them, clearly shorter ones
_CLEARLY_FIRST = 0.5  # take less than this share of the estimate
_CHANCE = 0.003  # of as many late batches in a row as raise the estimate
_MOST_MARGIN = 4.0  # more than that is a stall or a change, and the next batch will show which
_RECENT = 2  # the margin covers the latest rows of late batches: this many times their number
_RENEWED = 8  # the estimate, which costs more than a batch, is computed once in so many
_HALF = 4  # an octave that did not run for this many times its batches counts half
_IN_A_ROW = 3  # batches that show that times have become shorter
_WINDOW = 32  # samples kept per octave, and of any size; older ones are forgotten
# An octave that was not measured in this many latest batches no longer counts. Without this, slow
# large batches could prevent large batches from ever being tried (and measured) again.
_STALE_AFTER = 128
FEW = 3
"""With fewer batches, an octave of a profile is not sure."""


class _Sample(NamedTuple):
    """A measured batch, and its number."""

    number: int
    size: int
    duration_s: float


def octave_of(size: int) -> int:
    """Return the number of the octave of a batch size: 1, 2, 3–4, 5–8, …"""
    return (size - 1).bit_length()


class OnlineProfile:
    """Learns a `LatencyProfile` from measured batches.

    The profile starts as `prior`. Measured durations are compared with the prior, in a window per
    octave of batch sizes (1, 2, 3–4, 5–8, …). The *typical* time is the prior times the median
    ratio, interpolated over log b between octaves that were seen. So one number scales a prior of
    the right shape, and a wrong shape is corrected where batches were measured.

    The estimate is the typical time, times a quantile of the latest durations of any size, as
    shares of their typical times. It is `quantile`, or less (`be_cautious`). Times scatter because
    something else uses the machine. So sizes that did not run lately scatter now as those that did.

    Sizes that the prior only assumes are assumed anew, by the law at the head of `core.profiles`,
    when a larger batch than ever is measured. The next step, up to half as large again, is assumed
    rather too fast, so that it is tried.

    Times change: another program starts, or ends. Two batches in a row that take longer than the
    estimate raise it for all sizes, until shorter ones follow. Three in a row outside the range of
    the earlier ones count as a change. Then measurements before it are forgotten in the octaves of
    these three, and scaled by the same factor in others. An octave that does not run fades, the
    sooner the fewer batches it had: a slow moment in which few large batches ran does not last.

    Args:
        prior: profile before the first batch (from a file, a warm-up sweep or a guess).
        quantile: quantile of the measured durations, 0 … 1. With n samples it is at most n / (n +
            1), and always a measured value, so that a single early outlier does not decide.

    Attributes:
        samples: number of measured batches.
        margin: factor of the estimate because of the latest batches.
        spread: the quantile of the latest durations of any size, as a multiple of typical times.
    """

    def __init__(self, prior: LatencyProfile, *, quantile: float = 0.95) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile must lie between 0 and 1, got {quantile}")
        self.prior = prior
        self.quantile = quantile
        self._shape = prior  # fitted to the sizes that the prior assumes, once they are measured
        self._sizes_known = min(prior.measured_to, 2)  # 2: two or more
        self._seen_at: dict[int, int] = {}
        self._octaves: dict[int, deque[_Sample]] = {}
        self._latest: deque[_Sample] = deque(maxlen=_WINDOW)
        self._ratio: dict[int, tuple[float, float]] = {}  # of octaves without new samples
        self._caution = quantile
        self._typical, self.spread = prior, 1.0  # the estimate's parts
        self._scatter = 1.0  # the quantile `_caution` of the same
        self._profile: LatencyProfile | None = prior
        self._most = math.inf  # upper bound of the estimate, as a multiple of typical times
        # Numbers of samples, and their durations as shares of the estimates then.
        self._surprises: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._changed_at = -FEW  # number of the sample that showed the last change
        self.samples = 0
        self.margin = 1.0

    def observe(self, batch_size: int, duration_s: float) -> None:
        """Record that a batch of `batch_size` took `duration_s`. O(1), but O(max_batch_size) for
        the first batches of an octave, and for every eighth one."""
        if not 1 <= batch_size <= self.prior.max_batch_size:
            raise ValueError(
                f"batch_size must be 1 … {self.prior.max_batch_size}, got {batch_size}"
            )
        if not (math.isfinite(duration_s) and duration_s > 0):
            raise ValueError(f"duration_s must be positive and finite, got {duration_s}")
        octave = octave_of(batch_size)
        if self._knows(batch_size):
            surprise = self._surprise(batch_size, duration_s)
            self._surprises.append((self.samples + 1, surprise))
        if is_new := batch_size > self._shape.measured_to:
            self._extend(batch_size, duration_s)
        if self._is_stale(octave):
            old = self._octaves[octave]
            self._latest = deque((s for s in self._latest if s not in old), _WINDOW)
            old.clear()
        self.samples += 1
        sample = _Sample(self.samples, batch_size, duration_s)
        known = self._octaves.setdefault(octave, deque(maxlen=_WINDOW))
        known.append(sample)
        self._latest.append(sample)
        self._ratio.pop(octave, None)
        self._seen_at[octave] = self.samples
        if change := self._change():
            self._begin_anew(change)
        self._profile = None
        if is_new or change or len(known) <= FEW or not self.samples % _RENEWED:
            self._renew()
        elif self._margin() > 1:
            self._renew()  # the estimate may account for late batches already
        self.margin = self._margin()

    @property
    def measured_to(self) -> int:
        """The largest size that was measured. Asking for it computes no estimate."""
        return self._shape.measured_to

    @property
    def profile(self) -> LatencyProfile:
        """The current estimate (computed on demand after new samples)."""
        if self._profile is None:
            self._renew()
            scatter = self._scatter if self.margin == 1.0 else self.spread * self.margin
            self._profile = self._typical.scaled(min(scatter, self._most))
        return self._profile

    def typical_s(self, batch_size: int) -> float:
        """The typical time of a batch, in seconds."""
        return self._typical.latency(batch_size)

    def bound(self, most: float) -> None:
        """Let the estimate be at most this multiple of typical times from now on."""
        if most != self._most:
            self._most = most
            self._profile = None if self.samples else self._profile

    def be_cautious(self, quantile: float) -> None:
        """Let the estimate have this quantile from now on, if it is less than the profile's."""
        if quantile != self._caution:
            self._caution = quantile
            self._profile = None if self.samples else self._profile

    @property
    def is_settled(self) -> bool:
        """Whether the latest batches took as long as was expected."""
        return self.margin == 1.0 and self.samples - self._changed_at >= FEW

    def known(self) -> dict[int, tuple[int, float]]:
        """Number of the batches that count, and the quantile of their durations as a multiple of
        the typical ones, by the largest of their sizes: one entry per octave."""
        if self._profile is None:
            self._renew()
        found = {}
        for octave, samples in sorted(self._octaves.items()):
            if samples and not self._is_stale(octave):
                ratios = [s.duration_s / self._typical.latency(s.size) for s in samples]
                found[max(s.size for s in samples)] = len(samples), self._of(ratios)
        return found

    def _of(self, values: Collection[float], quantile: float = 1.0) -> float:
        """The profile's quantile of measured values, or this one if it is less. It is one of
        them."""
        q = min(quantile, self.quantile, len(values) / (len(values) + 1))
        return sorted(values)[math.floor((len(values) - 1) * q)]

    def _renew(self) -> None:
        """Compute the typical times, and quantiles of the latest durations as shares of them."""
        self._typical = self._estimate()
        shares = [s.duration_s / self._typical.latency(s.size) for s in self._latest]
        self.spread, self._scatter = self._of(shares), self._of(shares, self._caution)

    def _knows(self, size: int) -> bool:
        """Whether batches like this were measured. Before, the shape may be wrong."""
        return len(self._octaves.get(octave_of(size), ())) >= FEW

    def _surprise(self, size: int, duration_s: float) -> float:
        """A duration as a share of the estimate without the margin."""
        return duration_s / (self._typical.latency(size) * self.spread)

    def _late_in_a_row(self) -> int:
        """Number of batches that take longer than the estimate, one after the other, only by the
        rarest chance."""
        count = len(self._latest)
        share = 1 - min(self.quantile, count / (count + 1))
        return max(math.ceil(math.log(_CHANCE) / math.log(share)), 2)

    def _margin(self) -> float:
        """The factor that covers the latest batches in a row."""
        run = self._late_in_a_row()
        last = [self._surprise(s.size, s.duration_s) for s in self._latest if self._knows(s.size)]
        last = last[-_RECENT * run :]
        rows = [min(last[i : i + run]) for i in range(len(last) - run + 1)]
        late = max(rows, default=1.0)
        return min(late, _MOST_MARGIN) if late > _CLEARLY else 1.0

    def _change(self) -> int:
        """How many of the latest batches show that times have changed; 0 if they do not."""
        seen = [share for _, share in self._surprises]
        run = self._late_in_a_row() + 1 if seen else 0
        if len(latest := seen[-run:]) == run > 0 and min(latest) > _CLEARLY:
            return run
        earlier, latest = seen[:-_IN_A_ROW], seen[-_IN_A_ROW:]
        least = min(earlier) if len(earlier) >= _RANGE else _CLEARLY_FIRST
        return _IN_A_ROW * (len(latest) == _IN_A_ROW and max(latest) * _CLEARLY < least)

    def _begin_anew(self, count: int) -> None:
        """Forget or scale what was measured before the latest batches."""
        first = self._surprises[-count][0]
        latest = [sample for sample in self._latest if sample.number >= first]
        factor = median_low([s.duration_s / self._typical.latency(s.size) for s in latest])
        for octave, known in self._octaves.items():
            new = [sample for sample in known if sample.number >= first]
            kept = new or [s._replace(duration_s=factor * s.duration_s) for s in known]
            self._octaves[octave] = deque(kept, _WINDOW)
        self._latest = deque(latest, _WINDOW)
        for _ in range(count):
            self._surprises.pop()
        self._changed_at = self.samples
        self._ratio.clear()

    def _extend(self, batch_size: int, duration_s: float) -> None:
        """Fit the shape to the first batch of a size that was only assumed."""
        shape, known = self._shape, self._shape.measured_to
        if known:
            ratio = float(np.interp(math.log(known), *self._ratios())) if self.samples else 1.0
            # A first sample beyond the assumption is an outlier. Ratios correct this if it is not.
            most_s = min(duration_s, self._typical.latency(batch_size)) / ratio
            value = max(most_s, shape.latency(known))
            grid = np.arange(known + 1, shape.max_batch_size + 1)
            table = np.array(shape.table)
            table[known:] = np.interp(grid, (known, batch_size), (shape.latency(known), value))
        else:  # of a guess, the shape remains
            table = np.array(shape.table) * (duration_s / shape.latency(batch_size))
        self._shape = LatencyProfile(table, batch_size)  # `_estimate` assumes what is larger
        self._sizes_known = min(self._sizes_known + 1, 2)
        self._ratio.clear()

    def _ratios(self) -> tuple[list[float], list[float]]:
        """Measured durations as shares of the shape's, by the logarithm of the batch size.

        A few batches of an octave say little, and less when they are long ago. So they count
        together with all others.
        """
        found = []
        for octave in sorted(self._octaves):
            if self._is_stale(octave):
                continue
            if octave not in self._ratio:
                self._ratio[octave] = self._ratio_of(self._octaves[octave])
            count, age = len(self._octaves[octave]), self.samples - self._seen_at[octave]
            found.append((count * 0.5 ** (age / (_HALF * count)), *self._ratio[octave]))
        counts, log_sizes, ratios = np.array(found).T
        of_all = np.average(np.log(ratios), weights=counts)
        weights = 1 / (1 + counts**-2)
        ratios = np.exp(weights * np.log(ratios) + (1 - weights) * of_all)
        return log_sizes.tolist(), ratios.tolist()

    def _ratio_of(self, known: Collection[_Sample]) -> tuple[float, float]:
        """(mean logarithm of the batch size, median ratio) of an octave."""
        ratios = [s.duration_s / self._shape.latency(s.size) for s in known]
        return sum(math.log(s.size) for s in known) / len(known), median_low(ratios)

    def _estimate(self) -> LatencyProfile:
        """The typical times."""
        shape = self._shape
        grid = np.log(np.arange(1, shape.max_batch_size + 1))
        table = np.array(shape.table) * np.interp(grid, *self._ratios())
        known = shape.measured_to or shape.max_batch_size  # of a guess, the shape remains
        # A batch takes no longer than a larger one did. Repair downwards, so that one slow small
        # batch (a cold start) does not outweigh fast larger ones, as it would in an average.
        table[:known] = np.minimum.accumulate(table[:known][::-1])[::-1]
        if known < shape.max_batch_size:
            sizes = np.arange(1 if self._sizes_known > 1 else known, known + 1)
            last_s = table[known - 1]
            slope, hoped = slope_beyond(sizes, table[sizes - 1]), slope_hoped(known, last_s)
            more = np.arange(1, len(table) - known + 1)
            near = np.minimum(more, max(known // 2, 1))
            table[known:] = last_s + hoped * near + slope * (more - near)
        return LatencyProfile(table, shape.measured_to)

    def _is_stale(self, octave: int) -> bool:
        seen_at = self._seen_at.get(octave, self.samples)
        return self.samples - seen_at >= _STALE_AFTER
