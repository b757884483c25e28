"""Chooses the setting of `auto` from the results of its rehearsals."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ray_slo.core.rehearsal import Rehearsed, Score

_KNOWN, _REMEMBERED = 24, 6  # rehearsals; and the last ones under the same load
_SAME_RATE = 1.3  # times; rates that differ by less are the same load
_SAME_MIX = 0.3  # of the requests may be for other models
_CALM = 0.05  # below this bad share, latency counts too
_EQUAL = 0.003  # of the value: below `_CALM`, settings that differ by less are equal
_LEVEL = 0.0005  # the same above
_CLEAN = 0.01  # bad share of the worst model that is asked for
_FOR_CLEAN = 0.007  # share of the value that may be given up for `_CLEAN`
_QUICKER = 0.01  # of p50: less is no reason to change
_NEAR = 0.95  # of the best value: settings with less are tried every second time
_SLOW = 1.5  # times the least p50: the same for slower ones
_PRIOR, _SPREAD = -0.005, 0.03  # of the value: gain over the first guess, before any rehearsal
_CHANCE = 0.02  # of the value: error between two rehearsals, in addition to the standard error
_MOST_ELSEWHERE = 0.5  # weight of other loads
_FRAGILE = 0.015  # of the value: gain that is asked of settings that may collapse
_RISES = 0.1  # share of the time in which the load has risen and no rehearsal has seen it
_PLANNED = 0.02  # of the value: gain that is asked for if a planner assigns variants
_STAY = 0.002  # of the value: less is no reason to change


class Choice(NamedTuple):
    """A setting's label, and the reason for it."""

    label: str
    why: str


class _Standing(NamedTuple):
    """The results of a setting.

    Attributes:
        value: mean value per request.
        bad: bad share.
        excess: amount by which the worst model's bad share is above the aim.
        fair: the worst model's share in time, divided by the mean share.
    """

    value: float
    bad: float
    excess: float
    fair: float
    p50_s: float


class Evidence:
    """Rehearsals, of this load and of others.

    A part of each result is chance, and the best of ten settings is partly the luckiest. So the
    gain of a setting over the *first guess* is combined with the gain that is expected before any
    rehearsal, as the posterior mean of a normal distribution.

    If loads change quickly, a setting meets the next load before the change is seen. So results
    under other loads count too, weighted by the share of the time for which this happens.

    Args:
        fairness: share of the mean share of requests in time that the worst model must keep.

    Attributes:
        planned: a planner assigns variants. It answers to what a setting does, which no rehearsal
            shows, so another setting must gain more.
    """

    def __init__(self, fairness: float) -> None:
        self._fairness = fairness
        self._known: deque[Rehearsed] = deque(maxlen=_KNOWN)
        self._seen: list[Rehearsed] = []  # those under the load of the last one
        self._first = ""
        self._fragile: frozenset[str] = frozenset()
        self.planned = False

    def add(self, found: Rehearsed) -> bool:
        """Add a rehearsal; whether the load has changed."""
        other = bool(self._known) and not _alike(self._known[-1], found)
        self._known.append(found)
        self._seen = [known for known in self._known if _alike(known, found)][-_REMEMBERED:]
        return other

    def worth(self, labels: Iterable[str]) -> list[str]:
        """Settings to try next: one that was far behind the last time, or much slower while few
        requests were bad, is left out once."""
        if not self._seen:
            return list(labels)
        last = self._seen[-1]
        most = max((sum(s.value) for s in last.scores.values()), default=0.0)
        whole = {
            label: score
            for label, score in last.scores.items()
            if len(score.value) == len(last.stretches)
        }
        quickest = min((s.p50_s for s in whole.values() if s.p50_s is not None), default=0.0)
        near = []
        for label in labels:
            score = whole.get(label)
            is_slow = (
                score is not None
                and sum(score.good) >= (1 - _CALM) * sum(last.stretches)
                and score.p50_s is not None
                and score.p50_s > _SLOW * quickest
            )
            if label not in last.scores or (
                score is not None and sum(score.value) >= _NEAR * most and not is_slow
            ):
                near.append(label)
        return near if len(near) > 1 else list(labels)

    def begin(self, first: str, fragile: Iterable[str] = ()) -> None:
        """The system is new: forget everything.

        Args:
            first: the first guess for it.
            fragile: settings that collapse if the load exceeds the workers.
        """
        self._known.clear()
        self._seen, self._first, self._fragile = [], first, frozenset(fragile)

    def choose(self, current: str, lag_s: float = 0.0) -> Choice:
        """The best setting so far; `current` unless another gains more than noise.

        Args:
            lag_s: time from a change of the load until it is seen, seconds.
        """
        able = [
            label
            for label, score in self._seen[-1].scores.items()
            if not score.error and len(score.value) == len(self._seen[-1].stretches)
        ]
        if not able:
            return Choice(current, "no setting could be rehearsed")
        base = next(label for label in (self._first, current, *able) if label in able)
        elsewhere = self._elsewhere(lag_s)
        known = {label: self._standing(label, base, elsewhere) for label in able}
        fair = {s for s in able if known[s].fair >= self._fairness}
        if not fair:
            most = max(standing.fair for standing in known.values())
            fair = {s for s in able if known[s].fair >= most - 1e-9}
        in_order = [s for s in able if s in fair]
        best = max(in_order, key=lambda s: known[s].value)
        value = max(known[best].value, 1e-9)
        level = (_EQUAL if known[best].bad < _CALM else _LEVEL) * value
        equal = [s for s in in_order if known[best].value - known[s].value <= level]
        why = "most value in time"
        clean = [s for s in equal if known[s].excess <= 0]
        if not clean:
            near = [s for s in in_order if known[s].value >= (1 - _FOR_CLEAN) * value]
            clean = [s for s in near if known[s].excess <= 0]
            if clean:
                most = max(known[s].value for s in clean)
                clean = [s for s in clean if known[s].value >= most - _EQUAL * value]
                why = "every model under 1 % bad"
        equal = clean or equal
        pick = min(equal, key=lambda s: known[s].p50_s)
        if current in equal and known[current].p50_s <= (1 + _QUICKER) * known[pick].p50_s:
            return Choice(current, f"{why}, no other is quicker")
        if len(equal) > 1:
            why += ", and the least p50 of its equals"
        if current in fair and current not in equal and pick != current:
            gain = known[pick].value - known[current].value
            cleaner = known[pick].excess <= 0 < known[current].excess
            if gain < _STAY * value and not cleaner:
                return Choice(current, f"{pick} gains no more than chance may")
        return Choice(pick, why)

    def _elsewhere(self, lag_s: float) -> float:
        """Weight of other loads: time until a change is seen, divided by the time between
        changes."""
        pairs = list(pairwise(self._known))
        changes = sum(not _alike(one, other) for one, other in pairs)
        if not changes:
            return 0.0
        over_s = self._known[-1].at - self._known[0].at
        return min(changes * lag_s / over_s, _MOST_ELSEWHERE) if over_s > 0 else _MOST_ELSEWHERE

    def _gain(
        self, label: str, other: str, among: Iterable[Rehearsed], value: float
    ) -> tuple[float, float]:
        """Gain per request of one setting over another on the same requests, and its error.

        Args:
            value: value per request of `other`.
        """
        differences, counts, rehearsals = [], [], 0
        for found in among:
            a, b = found.scores.get(label), found.scores.get(other)
            if a is None or b is None:
                continue
            rehearsals += bool(a.value and b.value)
            for x, y, n in zip(a.value, b.value, found.stretches, strict=False):
                differences.append((x - y) / n)
                counts.append(n)
        if not counts:
            return 0.0, math.inf
        mean = float(np.average(differences, weights=counts))
        variance = float(np.var(differences)) / len(counts) + (_CHANCE * value) ** 2 / rehearsals
        return mean, math.sqrt(variance)

    def _expected(self, label: str, base: str, elsewhere: float, value: float) -> float:
        """Gain per request over `base`, posterior mean."""
        if label == base:
            return 0.0
        gain, error = self._gain(label, base, self._seen, value)
        others = [found for found in self._known if found not in self._seen]
        there, there_error = self._gain(label, base, others, value)
        if elsewhere and math.isfinite(there_error):
            gain = (1 - elsewhere) * gain + elsewhere * there
            error = math.hypot((1 - elsewhere) * error, elsewhere * there_error)
        # A gain far beyond its error is not chance, however unlikely it was: empirical Bayes.
        beyond = math.sqrt(max(gain**2 - error**2, 0.0)) if math.isfinite(error) else 0.0
        prior, spread = _PRIOR * value, max(_SPREAD * value, beyond)
        trust = spread**2 / (spread**2 + error**2) if spread > 0 else 1.0
        handicap = _PLANNED * self.planned
        if label in self._fragile:
            handicap += self._risk(label)
        return trust * gain + (1 - trust) * prior - handicap * value

    def _risk(self, label: str) -> float:
        """Share of the value that a setting that may collapse is expected to lose in rises of the
        load before they are seen."""
        falls = [
            score.fall
            for found in self._seen
            if (score := found.scores.get(label)) is not None and score.fall is not None
        ]
        return _RISES * sum(falls) / len(falls) if falls else _FRAGILE

    def _standing(self, label: str, base: str, elsewhere: float) -> _Standing:
        """Results from complete rehearsals; the value is relative to that of `base`."""
        scores = [
            (found, score)
            for found in self._seen
            if (score := found.scores.get(label)) is not None
            and not score.error
            and len(score.value) == len(found.stretches)
        ]
        arrived = _by_root([(f.roots, f.arrived) for f, _ in scores])
        good = _by_root([(f.roots, s.good) for f, s in scores])
        shares = [good[root] / n for root, n in arrived.items() if n]
        mean = sum(good.values()) / max(sum(arrived.values()), 1)
        # A model with few requests need not reach 99 of 100 in time.
        excess = max(
            (
                (n - good[root] - _CLEAN * n - math.sqrt(_CLEAN * n)) / n
                for root, n in arrived.items()
                if n
            ),
            default=0.0,
        )
        values = [
            (sum(f.scores[base].value), sum(f.stretches)) for f in self._seen if base in f.scores
        ]
        of_base = sum(v for v, _ in values) / max(sum(n for _, n in values), 1)
        return _Standing(
            of_base + self._expected(label, base, elsewhere, of_base),
            1 - mean,
            max(excess, 0.0),
            min(shares, default=1.0) / mean if mean > 0 else 1.0,
            _p50(scores),
        )


def _p50(scores: Sequence[tuple[Rehearsed, Score]]) -> float:
    """Mean of the medians, weighted by requests."""
    known = [(s.p50_s, sum(f.stretches)) for f, s in scores if s.p50_s is not None]
    if not known:
        return math.inf
    return sum(p50_s * n for p50_s, n in known) / sum(n for _, n in known)


def _by_root(
    counted: Sequence[tuple[Sequence[str], Sequence[int]]],
) -> dict[str, int]:
    found: dict[str, int] = {}
    for roots, counts in counted:
        for root, count in zip(roots, counts, strict=True):
            found[root] = found.get(root, 0) + count
    return found


def _alike(one: Rehearsed, other: Rehearsed) -> bool:
    """Whether both saw the same load."""
    low, high = sorted((one.rate, other.rate))
    if high > _SAME_RATE * low:
        return False
    a, b = (
        {r: n / sum(f.arrived) for r, n in zip(f.roots, f.arrived, strict=True)}
        for f in (one, other)
    )
    moved = sum(abs(a.get(root, 0.0) - b.get(root, 0.0)) for root in a.keys() | b.keys()) / 2
    return moved <= _SAME_MIX
