"""The demand by stream, for planners' brains: the rate of requests, its burstiness and trend, and
the bad requests. Pure: no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping

from ray_slo.core.demand import LEAST_RATE, Holt, Kind, Rate
from ray_slo.planning.auto import Demand
from ray_slo.planning.autoscale import Limits, Problem, Signals, plan
from ray_slo.planning.result import Infeasible

# Requests in an average. The target is the largest of several, so noise would add workers.
_ENOUGH = 300
_BITS = 5  # the requests of a report are spread over this many parts of equal length
_WINDOW_S, _WINDOWS = 2.0, 64  # of the dispersion
_FEW_WINDOWS = 8
_KEPT = 0.623  # of a χ² distribution's mean, below its 90 % quantile
_SURE = 2.0  # standard errors above Poisson from which a load counts as bursty
_SLOWLY = 0.2, 0.05  # Holt's shares of a new second in level and trend
_TREND = 0.0175  # standard deviation of its trend of a steady load, in those of a second's count
_RISES = 3.5  # standard deviations from which a trend counts as one
_BAD_S = 10.0  # seconds in the share of bad requests
_FEW_BAD = 5  # bad requests; fewer may be chance
_MOST_FACTOR = 3.0  # the plan is for at most this many times the measured demand
_FADES_S = 60.0  # time constant of the demand beyond the measured one
BAD_SHARE = 0.01  # share of bad requests that an SLO allows


class Burstiness:
    """Index of dispersion of counts that a change of the rate does not disturb. It is the Allan
    factor of windows of 2 s, as in `core.load.Dispersion`, without the largest tenth of the
    differences. For a normal distribution, 62 % of the mean of their squares remain.
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
        """At least 1 (Poisson); more only if chance does not explain it."""
        kept = sorted(self._ratios)[: len(self._ratios) - max(len(self._ratios) // 10, 1)]
        if len(kept) < _FEW_WINDOWS:
            return 1.0
        found = sum(kept) / (_KEPT * len(kept))
        return found if found > 1 + _SURE * math.sqrt(3 / len(kept)) else 1.0


class Stream:
    """Requests for one root in one SLO class.

    Args:
        expected: requests per second, until requests have come.
        kind, horizon_s: of `core.demand.Rate`.
    """

    def __init__(self, expected: float, kind: Kind = "ewma", horizon_s: float = 0.0) -> None:
        self._expected = expected
        self._rate = Rate(kind, horizon_s, enough=_ENOUGH)
        self._burstiness = Burstiness()
        self._trend = Holt(1.0, *_SLOWLY)
        self._counted_s = 0.0  # all counted time
        self._recent: deque[tuple[float, int, int]] = deque()  # when, requests, bad ones
        self.last_at = -math.inf  # time of the last request
        self.factor, self.factor_at = 1.0, -math.inf

    def counted(self, now: float, over_s: float, requests: int, bad: int) -> None:
        """Count the requests, and the bad requests, of the last `over_s` seconds."""
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
        """Whether a request has come."""
        return self._rate.seen

    @property
    def dispersion(self) -> float:
        """Index of dispersion to plan for; at least 1."""
        return self._burstiness.value

    def rate(self, now: float, ahead_s: float = 0.0) -> float:
        """Mean requests per second; if they rise, the prediction for `ahead_s` from now."""
        if not self.seen:
            return self._expected
        usual = self._rate.value(now, self.dispersion)
        level = self._trend.rate(self._counted_s)
        rise = self._trend.rate(self._counted_s, 1.0) - level
        chance = _TREND * math.sqrt(max(level, LEAST_RATE) * self.dispersion)
        return usual + rise * ahead_s if rise > _RISES * chance else usual

    def differs(self, now: float, planned: float) -> bool:
        """Whether the demand differs from the planned one by more than chance explains."""
        return self.seen and self._rate.differs(now, planned, self.dispersion)

    def bad(self, since: float) -> tuple[int, int]:
        """Requests and bad requests of the last seconds, but not before `since`."""
        found = [(requests, bad) for at, requests, bad in self._recent if at > since]
        return sum(n for n, _ in found), sum(n for _, n in found)

    def is_bad(self, since: float) -> bool:
        """Whether there are more bad requests than an SLO allows, and more than by chance."""
        requests, bad = self.bad(since)
        return bad >= _FEW_BAD and bad > BAD_SHARE * requests

    def load_factor(self, now: float, workers: int, since: float) -> float:
        """Planned demand over the measured one. If requests were bad although the plan was in
        force, the load is that of N·r/(1 − r) more workers (`planning.autoscale`). This addition
        fades."""
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
        expected: requests per second until requests have come, by stream.
        idle_s: time without a request after which a stream has no demand, seconds; None: it always
            has some.
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
        """Count the requests and bad requests of a frontend. Those of an unknown class count for
        the default class."""
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
        """The demand to plan for, and its factor over the measured one, by stream.

        Args:
            ahead_s: time that a worker takes to start, seconds.
            workers: that serve.
            since: the time when they began to serve as planned, seconds.
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
