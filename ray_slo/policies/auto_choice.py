"""Which setting `auto` takes, from what its rehearsals showed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ray_slo.core.rehearsal import Rehearsed, Score

_KNOWN, _REMEMBERED = 24, 6  # rehearsals; of these, the last ones under the same load
_SAME_RATE = 1.3  # times; rates that differ by less are the same load
_SAME_MIX = 0.3  # of the requests may be for other models
_CALM = 0.05  # bad share below which latency counts, too
_EQUAL, _UNSURE = 0.003, 0.01  # of the value: settings that differ by less are equal there,
# or by less than the second, if that is within the standard error
_LEVEL = 0.0005  # the same above
_ELSEWHERE = 0.005  # of the value: what is lost by more under other loads is not equal
_CLEAN = 0.01  # bad share of the worst model that is asked for
_FOR_CLEAN = 0.007  # of the value is given for that
_QUICKER = 0.01  # of p50: less is no reason to change
_NEAR = 0.95  # of the best value: what has less is tried every second time
_SURE = 0.5  # standard errors that a gain must have: what is in force was chosen by chance, too


class Choice(NamedTuple):
    """A setting's label, and why it."""

    label: str
    why: str


class _Standing(NamedTuple):
    """What is known of a setting.

    Attributes:
        value: per request.
        bad: share.
        excess: of the worst model's bad share over what is asked for.
        fair: the worst model's share in time over the mean share.
    """

    value: float
    bad: float
    excess: float
    fair: float
    p50_s: float


class Evidence:
    """Rehearsals under one load.

    Args:
        fairness: share of the mean share of requests in time that the worst model must keep.
    """

    def __init__(self, fairness: float) -> None:
        self._fairness = fairness
        self._known: deque[Rehearsed] = deque(maxlen=_KNOWN)
        self._seen: list[Rehearsed] = []  # of these, under the load of the last one

    def add(self, found: Rehearsed) -> bool:
        """Whether the load is another than before."""
        other = bool(self._known) and not _alike(self._known[-1], found)
        self._known.append(found)
        self._seen = [known for known in self._known if _alike(known, found)][-_REMEMBERED:]
        return other

    def worth(self, labels: Iterable[str]) -> list[str]:
        """Those worth trying next: what was far behind the last time is left out once."""
        if not self._seen:
            return list(labels)
        last = self._seen[-1]
        most = max((sum(s.value) for s in last.scores.values()), default=0.0)
        whole = len(last.stretches)
        near = [
            label
            for label in labels
            if (score := last.scores.get(label)) is None
            or (len(score.value) == whole and sum(score.value) >= _NEAR * most)
        ]
        return near if len(near) > 2 else list(labels)

    def clear(self) -> None:
        """Forget: the system has changed."""
        self._known.clear()
        self._seen = []

    def choose(self, current: str) -> Choice:
        """The best setting, by what is known; `current` unless another gains more than noise."""
        able = [
            label
            for label, score in self._seen[-1].scores.items()
            if not score.error and len(score.value) == len(self._seen[-1].stretches)
        ]
        if not able:
            return Choice(current, "no setting could be rehearsed")
        base = current if current in able else able[0]
        known = {label: self._standing(label, base) for label in able}
        fair = {s for s in able if known[s].fair >= self._fairness}
        if not fair:
            most = max(standing.fair for standing in known.values())
            fair = {s for s in able if known[s].fair >= most - 1e-9}
        in_order = [s for s in able if s in fair]
        best = max(in_order, key=lambda s: known[s].value)
        value = max(known[best].value, 1e-9)
        calm = known[best].bad < _CALM
        equal = [s for s in in_order if self._equals(s, best, value, calm)]
        why = "most value in time"
        clean = [s for s in equal if known[s].excess <= 0]
        if not clean:
            near = [s for s in in_order if known[s].value >= (1 - _FOR_CLEAN) * value]
            clean = [s for s in near if known[s].excess <= 0]
            if clean:
                most = max(known[s].value for s in clean)
                clean = [s for s in clean if known[s].value >= most - _EQUAL * value]
                why = "every model under 1 % bad"
        equal = self._robust(clean or equal, value)
        pick = min(equal, key=lambda s: known[s].p50_s)
        if current in equal and known[current].p50_s <= (1 + _QUICKER) * known[pick].p50_s:
            return Choice(current, f"{why}, no other is quicker")
        if len(equal) > 1:
            why += ", and the least p50 of its equals"
        if current in fair and current not in equal and pick != current:
            gain, error = self._gain(pick, current)
            cleaner = known[pick].excess <= 0 < known[current].excess
            if gain < _SURE * error and not cleaner:
                return Choice(current, f"{pick} gains no more than chance may")
        return Choice(pick, why)

    def _equals(self, label: str, best: str, value: float, calm: bool) -> bool:
        behind, error = self._gain(best, label)
        if not calm:
            return behind <= _LEVEL * value
        return behind <= _EQUAL * value or behind <= min(error, _UNSURE * value)

    def _robust(self, equal: list[str], value: float) -> list[str]:
        """Of settings that are equal under this load, those that were the best under others: they
        may come again."""
        others = [found for found in self._known if found not in self._seen]
        kept = list(equal)
        for label in equal:
            for other in equal:
                if self._gain(other, label, others)[0] > _ELSEWHERE * value and label in kept:
                    kept.remove(label)
        return kept or equal

    def _gain(
        self, label: str, other: str, among: Sequence[Rehearsed] | None = None
    ) -> tuple[float, float]:
        """Value per request of one setting over another's on the same requests; standard error."""
        differences, counts = [], []
        for found in self._seen if among is None else among:
            a, b = found.scores.get(label), found.scores.get(other)
            if a is None or b is None:
                continue
            for x, y, n in zip(a.value, b.value, found.stretches, strict=False):
                differences.append((x - y) / n)
                counts.append(n)
        if not counts:
            return 0.0, math.inf
        mean = float(np.average(differences, weights=counts))
        return mean, float(np.std(differences)) / math.sqrt(len(counts))

    def _standing(self, label: str, base: str) -> _Standing:
        """By rehearsals that it went through to the end; its value beside that of `base`."""
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
        # A model with few requests need not have 99 of 100 in time.
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
            of_base + self._gain(label, base)[0],
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
