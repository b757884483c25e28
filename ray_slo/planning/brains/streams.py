"""The demand of each stream, for planners' brains: the rate of requests, its burstiness and trend,
and the number of bad requests. Pure: no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping

from ray_slo.core.demand import LEAST_RATE, Holt, Kind, Rate
from ray_slo.planning.auto import Demand
from ray_slo.planning.brains.brain import Counts

# Number of requests in an average. The number of workers is the largest that several plans want, so
# noise in the average would add workers.
_ENOUGH = 300
_BITS = 5  # the requests of a report are spread evenly over this many parts of its time
_WINDOW_S, _WINDOWS = 2.0, 64  # length and largest number of the dispersion's windows
_FEW_WINDOWS = 8  # with fewer windows, the dispersion is taken as 1
_KEPT = 0.623  # share of a χ² distribution's mean that lies below its 90 % quantile
_SURE = 2.0  # a load counts as bursty from this many standard errors above a Poisson load
_SLOWLY = 0.2, 0.05  # weights of a new second in the level and the trend of Holt's method
# Standard deviation of the trend of a steady load, in standard deviations of a second's count.
_TREND = 0.0175
_RISES = 3.5  # a trend counts from this many of its standard deviations
_BAD_S = 10.0  # the share of bad requests is over this many seconds
_FEW_BAD = 5  # fewer bad requests may be chance
_MOST_FACTOR = 3.0  # the plan is for at most this many times the measured demand
_FADES_S = 60.0  # time constant with which the addition to the measured demand fades
BAD_SHARE = 0.01  # share of bad requests that an SLO allows


class Burstiness:
    """Index of dispersion of counts that a change of the rate does not disturb.

    It is the Allan factor of windows of 2 s, as in `core.load.Dispersion`. The largest tenth of the
    differences between successive windows is left out, because a change of the rate makes them
    large. For normally distributed differences, the rest has 62 % of the mean square; the estimate
    is divided by this share.
    """

    def __init__(self) -> None:
        # Half the squared difference of two successive counts, divided by their mean.
        self._ratios: deque[float] = deque(maxlen=_WINDOWS)
        self._before: float | None = None
        self._count, self._over_s = 0, 0.0

    def counted(self, over_s: float, requests: int) -> None:
        """Count the requests of the next `over_s` seconds."""
        self._count, self._over_s = self._count + requests, self._over_s + over_s
        if self._over_s < _WINDOW_S:
            return
        count = self._count * _WINDOW_S / self._over_s
        if self._before is not None and count + self._before > 0:
            self._ratios.append((count - self._before) ** 2 / (count + self._before))
        self._before, self._count, self._over_s = count, 0, 0.0

    @property
    def value(self) -> float:
        """The index of dispersion. It is 1 (Poisson) unless the load is burstier than chance
        explains."""
        kept = sorted(self._ratios)[: len(self._ratios) - max(len(self._ratios) // 10, 1)]
        if len(kept) < _FEW_WINDOWS:
            return 1.0
        found = sum(kept) / (_KEPT * len(kept))
        return found if found > 1 + _SURE * math.sqrt(3 / len(kept)) else 1.0


class Stream:
    """The demand of one stream: the requests of one root in one SLO class.

    Args:
        expected: expected requests per second, until requests have come.
        kind, horizon_s: arguments of `core.demand.Rate`.

    Attributes:
        expected: as the argument.
        last_at: time when a request came or waited last, in seconds.
        factor: ratio of the planned to the measured demand in the last plan.
        factor_at: time of that plan, in seconds.
    """

    def __init__(self, expected: float, kind: Kind = "ewma", horizon_s: float = 0.0) -> None:
        self.expected = expected
        self._rate = Rate(kind, horizon_s, enough=_ENOUGH)
        self._burstiness = Burstiness()
        self._trend = Holt(1.0, *_SLOWLY)
        self._counted_s = 0.0  # time of all reports, seconds
        self._recent: deque[tuple[float, int, int]] = deque()  # time, requests, bad requests
        self.last_at = -math.inf
        self.factor, self.factor_at = 1.0, -math.inf

    def counted(self, now: float, over_s: float, requests: int, bad: int, waiting: int = 0) -> None:
        """Take the number of requests, and of bad requests, in the last `over_s` seconds.

        Args:
            waiting: number of requests that have no answer yet. They are no new demand, but the
                stream is not idle: a worker may take longer to start than a stream stays busy.
        """
        self._rate.counted(now, over_s, requests)
        for i in range(_BITS):
            part = requests * (i + 1) // _BITS - requests * i // _BITS
            self._trend.arrived(self._counted_s + over_s * (i + 0.5) / _BITS, part)
        self._counted_s += over_s
        self._burstiness.counted(over_s, requests)
        if requests or waiting:
            self.last_at = now
        self._recent.append((now, requests, bad))
        while self._recent[0][0] < now - _BAD_S:
            self._recent.popleft()

    @property
    def seen(self) -> bool:
        """Whether a request has come, or waits."""
        return self.last_at > -math.inf

    @property
    def dispersion(self) -> float:
        """The index of dispersion to plan for. It is at least 1."""
        return self._burstiness.value

    def rate(self, now: float, ahead_s: float = 0.0) -> float:
        """Return the mean requests per second. If the rate rises, return its prediction for
        `ahead_s` seconds from now."""
        if not self.seen:
            return self.expected
        usual = self._rate.value(now, self.dispersion)
        level = self._trend.rate(self._counted_s)
        rise = self._trend.rate(self._counted_s, 1.0) - level
        chance = _TREND * math.sqrt(max(level, LEAST_RATE) * self.dispersion)
        return usual + rise * ahead_s if rise > _RISES * chance else usual

    def differs(self, now: float, planned: float) -> bool:
        """Return whether the demand differs from `planned` by more than chance explains. `planned`
        is in requests per second."""
        return self.seen and self._rate.differs(now, planned, self.dispersion)

    def bad(self, since: float) -> tuple[int, int]:
        """Return the number of requests and of bad requests in the last 10 s, but not before the
        time `since`."""
        found = [(requests, bad) for at, requests, bad in self._recent if at > since]
        return sum(n for n, _ in found), sum(n for _, n in found)

    def is_bad(self, since: float) -> bool:
        """Return whether there were more bad requests since `since` than an SLO allows, and more
        than chance explains."""
        requests, bad = self.bad(since)
        return bad >= _FEW_BAD and bad > BAD_SHARE * requests

    def load_factor(self, now: float, workers: int, since: float) -> float:
        """Return the ratio of the demand to plan for to the measured demand. It is 1 unless
        requests were bad although the plan was in force. If N workers left a share r of the
        requests bad, the load needs N·r/(1 − r) more workers. This is Symphony §3.5, for a goodput
        that is the same at any load above its peak. The addition fades with time.

        Args:
            workers: number of workers that served.
            since: time from which the plan was in force, in seconds.
        """
        faded = 1 + (self.factor - 1) * math.exp(-max(now - self.factor_at, 0.0) / _FADES_S)
        if not workers or not self.is_bad(max(since, self.factor_at)):
            return faded
        requests, bad = self.bad(max(since, self.factor_at))
        if bad >= requests:
            return _MOST_FACTOR
        more = math.ceil(workers * bad / (requests - bad) - 1e-9)
        return min(faded * (1 + more / workers), _MOST_FACTOR)


class Streams:
    """The demand of all streams of an application.

    Args:
        expected: expected requests per second by stream, until requests have come.
        kind, horizon_s: arguments of `core.demand.Rate`.
        idle_s: time without a request after which a stream has no demand, in seconds. None: a
            stream always has some demand.
    """

    def __init__(
        self,
        expected: Mapping[str, float],
        kind: Kind,
        horizon_s: float,
        idle_s: float | None,
    ) -> None:
        self._streams = {name: Stream(rate, kind, horizon_s) for name, rate in expected.items()}
        self._began = math.nan
        self.idle_s = idle_s

    def __getitem__(self, stream: str) -> Stream:
        return self._streams[stream]

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        """Take the counts of a frontend. Requests of an unknown class count for the root without a
        class."""
        if math.isnan(self._began):
            self._began = now
        found = [self._known(n) for n in (counts.requests, counts.bad, counts.waiting)]
        for name, stream in self._streams.items():
            stream.counted(now, over_s, *(by_name.get(name, 0) for by_name in found))

    def unserved(self, now: float) -> None:
        """Note that no worker has served yet. The time without a request begins only now."""
        self._began = now

    def _known(self, counts: Mapping[str, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, count in counts.items():
            known = name if name in self._streams else name.partition("@")[0]
            found[known] = found.get(known, 0) + count
        return found

    def is_idle(self, stream: str, now: float) -> bool:
        """Return whether a stream has no demand now."""
        if self.idle_s is None:
            return False
        last = self._streams[stream].last_at
        since = last if last > -math.inf else self._began
        return now - since > self.idle_s

    def demand(
        self, now: float, ahead_s: float, workers: int, since: float
    ) -> tuple[dict[str, Demand], dict[str, float]]:
        """Return the demand to plan for, and its ratio to the measured demand, both by stream.

        Args:
            ahead_s: time that a worker takes to start, in seconds.
            workers: number of workers that serve.
            since: time when the workers began to serve as planned, in seconds.
        """
        found, factors = {}, {}
        for name, stream in self._streams.items():
            if self.is_idle(name, now):
                found[name], factors[name] = Demand(0.0), 1.0
                continue
            factors[name] = stream.load_factor(now, workers, since)
            rate = factors[name] * stream.rate(now, ahead_s)
            found[name] = Demand(rate, stream.dispersion)
        return found, factors
