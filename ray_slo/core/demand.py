"""Predicts what a planner needs: the demand, and how many requests a request makes.

`Rate` predicts requests per second from arrivals (Loki §4.2 uses an exponentially weighted moving
average). `changed` says whether a plan's demand is wrong by more than chance. Planners use both,
live and simulated. `Factors` learns multiplicative factors and branch ratios from what workers
count. It reads no clock: the caller passes the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from ray_slo.core.arguments import NonNegative, Positive, Share, checked
from ray_slo.core.load import LoadMonitor

Kind = Literal["ewma", "peak", "holt"]

HEADROOM_QUANTILE = 0.95  # a live plan is for this quantile of the Poisson arrivals in a second
LEAST_RATE = 0.1  # requests per second: no plan is made for less
# An average needs this many arrivals, if the longest window has them. Otherwise a plan for a few
# requests per second would follow their noise.
_ENOUGH = 32
# A change is seen in the last seconds at three standard deviations, or in the last one at four.
_RECENT = ((1.0, 4.0), (2.0, 3.0), (5.0, 3.0))
_SILENT_S = 2.0  # after this time without a count, there were no arrivals


@lru_cache(1024)
def poisson_rate(rate: float, quantile: float, period_s: float) -> float:
    """Return the rate that Poisson arrivals at `rate` exceed in a share 1 − `quantile` of all
    periods, but at least `rate`. Both are in requests per second."""
    # The import takes 0.4 s, and every replica imports this module.
    from scipy.stats import poisson

    return max(rate, float(poisson.ppf(quantile, rate * period_s)) / period_s)


class Holt:
    """Level and trend of a rate (Holt's double exponential smoothing), a bin at a time.

    Worked example: every second has 10 more requests than the one before. An average lags by its
    whole delay. Level and trend follow, and predict the rate in 10 s.

    Args:
        bin_s: length of the bins in which arrivals are counted, seconds.
        alpha, beta: shares of a new bin in the level, and of a new difference in the trend.
        horizon_s: how far ahead to look, seconds: usually the planner's period.

    Raises:
        ValueError: an argument out of its range.
    """

    @checked
    def __init__(
        self,
        bin_s: Positive = 1.0,
        alpha: Share = 0.3,
        beta: Share = 0.1,
        horizon_s: NonNegative = 0.0,
    ) -> None:
        self._bin_s, self._alpha, self._beta = bin_s, alpha, beta
        self._horizon_s = horizon_s
        self._end = math.nan  # of the bin that is being filled
        self._count = 0
        self._bins = 0
        self._level, self._trend = 0.0, 0.0  # requests/s, and requests/s per bin

    def arrived(self, now: float, count: int = 1) -> None:
        """`count` requests arrived now."""
        if math.isnan(self._end):
            self._end = now + self._bin_s
        self._close(now)
        self._count += count

    def rate(self, now: float, horizon_s: float | None = None) -> float:
        """Requests per second, `horizon_s` from now (default: that of the constructor); 0 before
        the first bin is over."""
        if math.isnan(self._end):
            return 0.0
        self._close(now)
        ahead_s = self._horizon_s if horizon_s is None else horizon_s
        return max(self._level + self._trend * (ahead_s / self._bin_s), 0.0)

    def _close(self, now: float) -> None:
        while now >= self._end:
            rate, before = self._count / self._bin_s, self._level
            if self._bins == 0:
                self._level = rate
            else:
                expected = before + self._trend
                self._level = self._alpha * rate + (1 - self._alpha) * expected
                self._trend += self._beta * (self._level - before - self._trend)
            self._bins += 1
            self._count = 0
            self._end += self._bin_s


def changed(
    planned: float, count: int, window_s: float, share: float = 0.1, deviations: float = 3.0
) -> bool:
    """Whether `count` arrivals in `window_s` require a new plan before the period is over (§4.2).

    They do if they differ from the planned average (requests per second) by more than `share` of
    it, and by more than chance explains: `deviations` standard deviations of a Poisson count.

        >>> changed(100, 130, 1.0), changed(100, 131, 1.0), changed(1000, 1099, 1.0)
        (False, True, False)
    """
    expected = planned * window_s
    return abs(count - expected) > max(share * expected, deviations * math.sqrt(expected))


class Rate:
    """The mean rate that a planner uses, requests per second, raised if more requests came lately
    than chance explains.

    The moving average ("ewma") is over 3 s, or over 10 or 30 s if fewer than 32 requests come in
    that time. At 2 requests per second, an average over 3 s is wrong by a third half of the time. A
    rise is seen before the average; a fall only when it is more than chance explains.

    Args:
        kind: "ewma", exponentially weighted with the window as its time constant; "peak", the
            largest mean over the window of the last 10 windows; "holt", level and trend from bins
            of the window's length.
        horizon_s: how far ahead "holt" looks, seconds: usually the planner's period.
        windows_s: windows of the moving average, seconds, increasing; the other kinds use the
            first.
        enough: a shorter window is used if it has this many requests, or differs by more than
            chance.
    """

    def __init__(
        self,
        kind: Kind = "ewma",
        horizon_s: float = 0.0,
        windows_s: Sequence[float] = (3.0, 10.0, 30.0),
        enough: int = _ENOUGH,
    ) -> None:
        self._enough = enough
        self._windows = windows_s if kind == "ewma" else windows_s[:1]
        self._demands: list[Holt | LoadMonitor] = [
            Holt(w, horizon_s=horizon_s) if kind == "holt" else LoadMonitor(kind, w, min_arrivals=1)
            for w in self._windows
        ]
        self._recent: deque[tuple[float, int]] = deque()  # seconds and requests, the last first
        self._counted_at = self._began_at = -math.inf

    def counted(self, now: float, over_s: float, requests: int) -> None:
        """Add the `requests` of the `over_s` seconds before now.

        If several processes count, each passes its share of the time. The shares add up to the
        real time.
        """
        if self._counted_at == -math.inf:
            self._began_at = now - over_s
            for demand in self._demands:
                demand.arrived(now - over_s, 0)
        self._counted_at = now
        if requests:
            for demand in self._demands:
                demand.arrived(now - over_s / 2, requests)
        self._recent.appendleft((over_s, requests))
        while len(self._recent) > 1 and self._covered() - self._recent[-1][0] >= _RECENT[-1][0]:
            self._recent.pop()

    def _covered(self) -> float:
        return sum(over_s for over_s, _ in self._recent)

    def value(self, now: float, dispersion: float = 1.0) -> float:
        """The rate to plan for; at least `LEAST_RATE`. `dispersion`: see `differs`."""
        # Arrivals since the last count are not known yet.
        silent = now - self._counted_at > _SILENT_S
        usual = self._usual(now if silent else self._counted_at)
        changes = self._changes(now, usual, dispersion)
        rises = [count / over_s for count, over_s in changes]
        return max(usual, LEAST_RATE, *rises)

    def _usual(self, now: float) -> float:
        since_s = now - self._began_at
        begun = [d for w, d in zip(self._windows, self._demands, strict=True) if w <= 5 * since_s]
        rates = [d.rate(now) for d in begun or self._demands[:1]]
        usual = rates.pop()
        for window_s, rate in zip(self._windows[len(rates) - 1 :: -1], rates[::-1], strict=False):
            # A shorter window if it has enough requests, or if the rate was different before.
            over_s = 2 * window_s  # a moving average has the variance of a mean over this time
            if rate * window_s >= self._enough or changed(usual, round(rate * over_s), over_s):
                usual = rate
        return usual

    def differs(self, now: float, planned: float, dispersion: float = 1.0) -> bool:
        """Whether the rate differs from the `planned` one by more than chance explains.

        Args:
            dispersion: variance of a count over its mean; 1 is Poisson.
        """
        return bool(self._changes(now, planned, dispersion))

    def _changes(self, now: float, planned: float, dispersion: float) -> list[tuple[int, float]]:
        """Recent periods with a different rate: requests, and seconds."""
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
            by_chance = deviations * math.sqrt(dispersion)
            if enough and changed(planned, count, over_s, deviations=by_chance):
                found.append((count, over_s))
        return found


class Factors:
    """Requests made per request, by variant and child task, learned from heartbeats (§4.2).

    A prior counts as `prior_requests` requests; older requests are forgotten, so that the last
    `memory_requests` of a variant decide. Each variant has its own factors, because accurate
    variants find more items.

    Worked example: profiled at 4 names per frame with the weight of 100 frames, 100 frames with 600
    names: 5.

        >>> prior = {"d": {"name": 4.0}}
        >>> factors = Factors(prior, prior_requests=100, memory_requests=math.inf)
        >>> factors.observe("d", 100, {"name": 600})
        >>> factors.of("d")
        {'name': 5.0}

    Measured factors of variants also correct the priors of variants for the same task that were not
    measured. Otherwise a plan would prefer these, because they seem to make less work:

        >>> prior = {"large": {"name": 2.0}, "small": {"name": 1.0}}
        >>> factors = Factors(prior, prior_requests=10)
        >>> factors.observe("large", 1000, {"name": 4000})
        >>> round(factors.of("small")["name"], 1)
        2.0

    Args:
        prior: factors as profiled, by variant and child task.
        prior_requests: weight of the priors. A missing prior is 1. If a plan believed that for
            long, later tasks would have no workers for that time.

    Raises:
        ValueError: an argument out of its range.
    """

    @checked
    def __init__(
        self,
        prior: Mapping[Hashable, Mapping[str, float]],
        *,
        prior_requests: Positive = 20.0,
        memory_requests: Annotated[float, Field(gt=0)] = 10_000.0,
    ) -> None:
        self._memory = memory_requests
        self._prior, self._weight = prior, prior_requests
        self._seen = dict.fromkeys(prior, 0.0)  # the part of `_requests` without the prior
        self._requests = dict.fromkeys(prior, prior_requests)
        self._made: dict[Hashable, dict[str, float]] = {}
        for variant, factors in prior.items():
            if min(factors.values(), default=0.0) < 0:
                raise ValueError(f"prior of {variant!r} must be at least 0, got {dict(factors)}")
            self._made[variant] = {c: f * prior_requests for c, f in factors.items()}

    def observe(self, variant: Hashable, requests: int, made: Mapping[str, int]) -> None:
        """A worker finished `requests` requests, which made `made` requests, by child task."""
        totals = self._made[variant]
        keep = math.exp(-requests / self._memory)
        self._seen[variant] = keep * self._seen[variant] + requests
        self._requests[variant] = keep * self._requests[variant] + requests
        for child in totals:
            totals[child] = keep * totals[child] + made.get(child, 0)

    def of(self, variant: Hashable) -> dict[str, float]:
        """Requests per request, by child task, for `loki.Variant` and `routing.Worker`."""
        return {
            child: (made + self._correction(variant, child)) / self._requests[variant]
            for child, made in self._made[variant].items()
        }

    def _correction(self, variant: Hashable, child: str) -> float:
        """Correction of the prior part of `_made` by its siblings."""
        prior = self._prior[variant][child]
        expected = found = self._weight * prior
        if not found:
            return 0.0
        for other, factors in self._prior.items():
            if other != variant and child in factors:
                left = self._requests[other] - self._seen[other]
                expected += self._seen[other] * factors[child]
                found += self._made[other][child] - left * factors[child]
        left = self._requests[variant] - self._seen[variant]
        return left * prior * (found / expected - 1)
