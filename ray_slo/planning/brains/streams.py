"""Demand as a planner's brain sees it, stream by stream: how many requests come, how bursty they
are, where they are going, and how many went wrong. Pure: no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping

from ray_slo.core.demand import LEAST_RATE, Holt, Kind, Rate
from ray_slo.planning.auto import Demand
from ray_slo.planning.autoscale import Limits, Problem, Signals, plan
from ray_slo.planning.result import Infeasible

# Requests of an average: as the most of a while is the target, noise would add workers.
_ENOUGH = 300
_BITS = 5  # parts of equal length in which the requests of a report are taken to have come
_WINDOW_S, _WINDOWS = 2.0, 64  # of the dispersion
_FEW_WINDOWS = 8
_KEPT = 0.623  # of a χ² distribution's mean, below its 90 % quantile
_SURE = 2.0  # standard errors by which a load is burstier than Poisson, to be taken for it
_SLOWLY = 0.2, 0.05  # Holt's shares of a new second in level and trend
_TREND = 0.0175  # standard deviation of its trend of a steady load, in those of a second's count
_RISES = 3.5  # standard deviations of a trend, to be taken for one
_BAD_S = 10.0  # a bad share is that of the last seconds
_FEW_BAD = 5  # requests: fewer are chance
_MOST_FACTOR = 3.0  # no more than that many times the measured demand is planned for
_FADES_S = 60.0  # time constant of what is planned for beyond the measured demand
BAD_SHARE = 0.01  # what an SLO allows


class Burstiness:
    """Index of dispersion of counts that a change of the rate does not disturb: the Allan factor of
    windows of 2 s, as `core.load.Dispersion` has it, without the tenth of the differences that are
    the largest. Of a normal distribution that leaves 62 % of their squares' mean.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_WINDOWS)  # half a difference², over the mean
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
        """At least 1, Poisson; more only where that is more than chance explains."""
        kept = sorted(self._ratios)[: len(self._ratios) - max(len(self._ratios) // 10, 1)]
        if len(kept) < _FEW_WINDOWS:
            return 1.0
        found = sum(kept) / (_KEPT * len(kept))
        return found if found > 1 + _SURE * math.sqrt(3 / len(kept)) else 1.0


class Stream:
    """Requests for one root in one SLO class.

    Args:
        expected: requests per second, until there were some.
        kind, horizon_s: of `core.demand.Rate`.
    """

    def __init__(self, expected: float, kind: Kind = "ewma", horizon_s: float = 0.0) -> None:
        self._expected = expected
        self._rate = Rate(kind, horizon_s, enough=_ENOUGH)
        self._burstiness = Burstiness()
        self._trend = Holt(1.0, *_SLOWLY)
        self._counted_s = 0.0  # all the time that was counted
        self._recent: deque[tuple[float, int, int]] = deque()  # when, requests, bad ones
        self.last_at = -math.inf  # when there was a request
        self.factor, self.factor_at = 1.0, -math.inf

    def counted(self, now: float, over_s: float, requests: int, bad: int) -> None:
        """Count requests of the `over_s` seconds before now, and those that went wrong."""
        self._rate.counted(now, over_s, requests)
        for i in range(_BITS):
            part = requests * (i + 1) // _BITS - requests * i // _BITS
            self._trend.arrived(self._counted_s + over_s * (i + 0.5) / _BITS, part)
        self._counted_s += over_s
        self._burstiness.counted(over_s, requests)
        if requests:
            self.last_at = now
        self._recent.append((now, requests, bad))
        while self._recent[0][0] < now - _BAD_S:
            self._recent.popleft()

    @property
    def seen(self) -> bool:
        """Whether there was a request."""
        return self._rate.seen

    @property
    def dispersion(self) -> float:
        """Index of dispersion to plan for; at least 1."""
        return self._burstiness.value

    def rate(self, now: float, ahead_s: float = 0.0) -> float:
        """Requests per second, on average; where they rise, `ahead_s` from now."""
        if not self.seen:
            return self._expected
        usual = self._rate.value(now, self.dispersion)
        level = self._trend.rate(self._counted_s)
        rise = self._trend.rate(self._counted_s, 1.0) - level
        chance = _TREND * math.sqrt(max(level, LEAST_RATE) * self.dispersion)
        return usual + rise * ahead_s if rise > _RISES * chance else usual

    def differs(self, now: float, planned: float) -> bool:
        """Whether the demand is not the planned one, by more than chance explains."""
        return self.seen and self._rate.differs(now, planned, self.dispersion)

    def bad(self, since: float) -> tuple[int, int]:
        """Requests and bad ones, of the last seconds, but not before `since`."""
        found = [(requests, bad) for at, requests, bad in self._recent if at > since]
        return sum(n for n, _ in found), sum(n for _, n in found)

    def is_bad(self, since: float) -> bool:
        """Whether more went wrong than an SLO allows, and more than by chance."""
        requests, bad = self.bad(since)
        return bad >= _FEW_BAD and bad > BAD_SHARE * requests

    def load_factor(self, now: float, workers: int, since: float) -> float:
        """Demand to plan for over the measured one. Where requests went wrong although the plan was
        in force, the load is that of N·r/(1 − r) more workers (`planning.autoscale`); what that
        adds fades."""
        faded = 1 + (self.factor - 1) * math.exp(-max(now - self.factor_at, 0.0) / _FADES_S)
        if not workers or not self.is_bad(max(since, self.factor_at)):
            return faded
        requests, bad = self.bad(max(since, self.factor_at))
        limits = Limits(0, math.ceil(_MOST_FACTOR * workers))
        share = min(bad / max(requests, 1), 1.0)
        found = plan(Problem(Signals(workers, share, 0.0), limits))
        wanted = found.best_effort if isinstance(found, Infeasible) else found
        return min(faded * wanted.workers / workers, _MOST_FACTOR)


class Streams:
    """All streams of an application.

    Args:
        expected: requests per second until there were some, by stream.
        idle_s: seconds without a request after which a stream has no demand; None: it always has
            some.
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

    def counted(
        self, now: float, over_s: float, requests: Mapping[str, int], bad: Mapping[str, int]
    ) -> None:
        """Requests, and bad ones, of a frontend. Of a class that is not known, they are counted as
        of the default one."""
        if math.isnan(self._began):
            self._began = now
        requests, bad = self._known(requests), self._known(bad)
        for name, stream in self._streams.items():
            stream.counted(now, over_s, requests.get(name, 0), bad.get(name, 0))

    def _known(self, counts: Mapping[str, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, count in counts.items():
            known = name if name in self._streams else name.partition("@")[0]
            found[known] = found.get(known, 0) + count
        return found

    def is_idle(self, stream: str, now: float) -> bool:
        """Whether a stream has no demand now."""
        if self.idle_s is None:
            return False
        last = self._streams[stream].last_at
        since = last if last > -math.inf else self._began
        return now - since > self.idle_s

    def demand(
        self, now: float, ahead_s: float, workers: int, since: float
    ) -> tuple[dict[str, Demand], dict[str, float]]:
        """What to plan for, and the factors over the measured demand in that, by stream.

        Args:
            ahead_s: that a worker takes to start.
            workers: that serve.
            since: when they began to serve as planned.
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
