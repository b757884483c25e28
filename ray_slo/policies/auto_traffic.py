"""What `auto` remembers: traffic, the error of batch times, and the results of its choices."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ray_slo.core.rehearsal import Rehearsed
from ray_slo.core.requests import Request
from ray_slo.core.trees import Tree
from ray_slo.policies.auto_choice import Choice

_LEAST = 200  # requests of a rehearsal
_MOST, _LIMIT = 4_000, 20_000  # remembered requests; and if that is less than `_SLOS`
_SLOS = 15.0  # of traffic
_MORE = 500  # new requests before old ones are removed again
_LEAST_SLOS = 2.0  # a rehearsal begins with an empty system
_WINDOW_S, _WINDOW_SLOS = 20.0, 20.0
_FIRST_S, _FIRST_SLOS, _LONGEST_S = 1.0, 6.0, 30.0  # between rehearsals
_CALM_TIMES = 4  # times the interval before, if no request was bad; otherwise 2
_WARM_S, _WARM_SLOS = 0.3, 5.0  # warm-up before the requests that count
_NEWS_S, _NEWS_SLOS = 0.5, 6.0  # time until a change of the load is seen
_RISE, _FALL = 1.4, 0.6  # times the rate that was rehearsed
_FEW = 50  # rates are given from this number of items on
_SEEN = 50  # factors are used from this number of requests on
_STORIES = 20


class Recent:
    """The newest requests of clients, and when the next rehearsal is due.

    Requests are kept in the groups in which they came: one reference per group.

    Attributes:
        slo_s: the longest SLO, seconds.
    """

    slo_s = 0.0

    def __init__(self) -> None:
        self._bunches: deque[tuple[float, Sequence[Request]]] = deque()
        self._came = self._gone = 0  # requests that came; those of them that were forgotten
        self._rehearsed = 0  # number of requests before the last rehearsal
        self._rehearsed_to = -math.inf
        self._full = _MOST  # number of requests until some are forgotten
        self._whole_from = math.inf  # all requests since then are here
        self._look_at = -math.inf
        self._every_s = _FIRST_S
        self._rate = 0.0  # the rate of the last rehearsal

    def begin(self, now: float) -> None:
        """The system is new."""
        self._every_s, self._rate, self._look_at = _FIRST_S, 0.0, now

    def add(self, now: float, requests: Sequence[Request]) -> None:
        """Requests arrived."""
        bunches = self._bunches
        if not bunches:
            self._whole_from = now
        bunches.append((now, requests))
        self._came += len(requests)
        if self._came > self._full:
            self._forget(now)

    def _forget(self, now: float) -> None:
        bunches = self._bunches
        while (count := self._came - self._gone) > _MOST:
            at, oldest = bunches[0]
            if count <= _LIMIT and at > now - _SLOS * self.slo_s:
                break
            bunches.popleft()
            self._gone += len(oldest)
            self._whole_from = at
        self._full = self._gone + max(count, _MOST) + _MORE

    def rehearsed(self, now: float, found: Rehearsed, news: bool, calm: bool = False) -> None:
        """Set the time of the next rehearsal: sooner if this one brought news, later if no request
        was bad."""
        first_s = max(_FIRST_S, _FIRST_SLOS * self.slo_s)
        later_s = (_CALM_TIMES if calm else 2) * self._every_s
        self._every_s = first_s if news else max(min(later_s, _LONGEST_S), first_s)
        self._look_at = now + self._every_s
        self._rate = found.rate
        self._rehearsed_to = found.at
        self._rehearsed = self._came - sum(len(bunch) for _, bunch in self._later(found.at))

    def due(self, now: float, surprise: bool) -> tuple[list[Request], int, bool]:
        """The requests to rehearse with (none if it is not time), the number of them that only warm
        up, and whether the load has changed. It changes nothing."""
        if self._came - self._rehearsed < _LEAST:
            return [], 0, False
        since = now - self.lag_s
        latest: list[Request] = []
        if self._rate > 0 and since >= max(self._whole_from, self._rehearsed_to):
            # Preempted requests count twice here, which matters only below.
            came = sum(len(b) for _, b in self._later(since) if b and b[0].upstream is None)
            latest = self._since(since) if self._moved(came / (now - since)) else []
            if len(latest) < _LEAST or not self._moved(len(latest) / (now - since)):
                latest = []
        if now < self._look_at and not latest and not surprise:
            return [], 0, False
        if not latest:
            since = max(now - max(_WINDOW_S, _WINDOW_SLOS * self.slo_s), self._rehearsed_to)
        least_s = _LEAST_SLOS * self.slo_s
        if now - max(since, self._bunches[0][0]) < least_s:
            return [], 0, False
        warm_s = max(_WARM_S, _WARM_SLOS * self.slo_s)
        chosen = self._since(since - warm_s)
        before = bisect_right(chosen, since, key=_arrival)
        if len(chosen) - before < _LEAST or chosen[-1].arrival - chosen[before].arrival < least_s:
            return [], 0, False
        return chosen, before, bool(latest) or surprise

    @property
    def lag_s(self) -> float:
        """Time until a change of the load is seen, seconds."""
        return max(_NEWS_S, _NEWS_SLOS * self.slo_s)

    def rates(self, now: float) -> dict[str, float]:
        """Recent items per second by model; empty if too little is known."""
        since = max(now - self.lag_s, self._whole_from)
        counts: dict[str, int] = {}
        for _, bunch in self._later(since):
            for r in bunch:
                counts[r.model] = counts.get(r.model, 0) + r.size
        if now <= since or sum(counts.values()) < _FEW:
            return {}
        return {model: count / (now - since) for model, count in counts.items()}

    def _moved(self, rate: float) -> bool:
        return rate > _RISE * self._rate or rate < _FALL * self._rate

    def _since(self, at: float) -> list[Request]:
        """Requests of clients, each once, in order of arrival."""
        found = [bunch for _, bunch in self._later(at)]
        # Preempted and lost requests arrive again; requests that a request made are not clients'.
        once = {r.id: r for bunch in reversed(found) for r in bunch if r.upstream is None}
        return sorted(once.values(), key=lambda r: (r.arrival, r.id))

    def _later(self, at: float) -> Iterator[tuple[float, Sequence[Request]]]:
        """Groups of requests that came later, the newest first."""
        for then, bunch in reversed(self._bunches):
            if then <= at:
                return
            yield then, bunch


def _arrival(r: Request) -> float:
    return r.arrival


class Pace:
    """Measured over predicted times of batches, by variant and hardware."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[float, float, float]] = {}

    def add(self, key: tuple[str, str], ratio: float) -> None:
        """A batch took `ratio` times as long as predicted."""
        x = math.log(ratio)
        n, s, ss = self._sums.get(key, (0.0, 0.0, 0.0))
        if n > 200:  # forget slowly
            n, s, ss = 0.99 * n, 0.99 * s, 0.99 * ss
        self._sums[key] = n + 1, s + x, ss + x * x

    def measured(self) -> tuple[dict[tuple[str, str], float], float]:
        """(median factor by variant and hardware, standard deviation of the logarithm around)."""
        pace, total, squares = {}, 0.0, 0.0
        for key, (n, s, ss) in self._sums.items():
            mean = s / n
            if n >= 5 and abs(mean) > 1e-9:
                pace[key] = math.exp(mean)
            total += n
            squares += max(ss - n * mean * mean, 0.0)
        sigma = math.sqrt(squares / total) if total else 0.0
        return pace, sigma if sigma > 1e-6 else 0.0


class Made:
    """Number of requests for each child task that a request of a task makes, by variant."""

    def __init__(self, trees: Sequence[Tree]) -> None:
        self._parent = {t.name: t.parent for tree in trees for t in tree.tasks if t.parent}
        self._made: dict[tuple[str, str], int] = {}
        self._finished: dict[tuple[str, str], int] = {}

    def arrived(self, requests: Sequence[Request]) -> None:
        """Requests arrived, including those that other requests made."""
        for r in requests:
            if r.upstream is not None:
                key = r.upstream.variant, r.task
                self._made[key] = self._made.get(key, 0) + 1

    def finished(self, variant: str, requests: Sequence[Request]) -> None:
        """A variant answered them."""
        for r in requests:
            key = variant, r.task
            self._finished[key] = self._finished.get(key, 0) + 1

    def factors(self) -> dict[tuple[str, str], float]:
        """Requests made per request, by (variant, child task), if enough were seen."""
        found = {}
        for (variant, child), made in self._made.items():
            parent = self._parent.get(child)
            if parent and (finished := self._finished.get((variant, parent), 0)) >= _SEEN:
                found[variant, child] = made / finished
        return found


class Story:
    """What was tried and predicted, and the results.

    Attributes:
        good, bad: requests since the last rehearsal: in time, and late or dropped.
    """

    def __init__(self) -> None:
        self.good = self.bad = 0
        self._label, self._why, self._at = "", "", 0.0
        self._told: deque[dict[str, Any]] = deque(maxlen=_STORIES)
        self._predicted: float | None = None

    def in_force(self, now: float, choice: Choice) -> None:
        """A setting becomes the current one."""
        self._label, self._why, self._at = choice.label, choice.why, now

    def is_calm(self) -> bool:
        """Whether there were answers since the last rehearsal, and none was bad."""
        return self.good >= _LEAST and not self.bad

    def surprise(self) -> bool:
        """Whether more requests are bad than predicted, by more than chance explains."""
        n = self.good + self.bad
        if self._predicted is None or n < _LEAST:
            return False
        bad = self._predicted
        return self.bad / n > bad + 0.01 + 3 * math.sqrt((bad * (1 - bad) + 0.01) / n)

    def add(self, now: float, found: Rehearsed, label: str, choice: Choice) -> None:
        """A rehearsal was done while `label` was the current setting."""
        if self._told and self.good + self.bad:
            self._told[-1]["measured_bad"] = self.bad / (self.good + self.bad)
        self.good = self.bad = 0
        total = sum(found.stretches)
        tried: dict[str, dict[str, Any]] = {
            name: {
                "value": sum(s.value) / max(sum(found.stretches[: len(s.value)]), 1),
                "bad": 1 - sum(s.good) / max(sum(found.stretches[: len(s.value)]), 1),
                "p50_ms": None if s.p50_s is None else 1e3 * s.p50_s,
                "whole": len(s.value) == len(found.stretches),
            }
            if not s.error
            else {"error": s.error}
            for name, s in found.scores.items()
        }
        predicted = tried.get(choice.label, {}).get("bad")
        self._predicted = predicted
        self._told.append(
            {
                "at": now,
                "requests": total,
                "rate": found.rate,
                "before": label,
                "setting": choice.label,
                "why": choice.why,
                "tried": tried,
                "predicted_bad": predicted,
                "measured_bad": None,
            }
        )

    def now(self) -> dict[str, Any]:
        """The current setting, its reason and its start."""
        return {"setting": self._label, "why": self._why, "since": self._at}

    def told(self) -> list[dict[str, Any]]:
        """The last rehearsals, the newest last; if there was none, the current setting and its
        reason."""
        if self._told:
            return list(self._told)
        return [{"at": self._at, "setting": self._label, "why": self._why}]
