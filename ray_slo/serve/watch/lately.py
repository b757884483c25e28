"""Counts of the last seconds' requests, of one frontend and of all frontends.

These numbers are for people and need no Prometheus. A request costs a few additions. Latencies are
counted in buckets that are 9 % wide.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray_slo.core.trees import root_and_class
from ray_slo.serve.errors import OF_CLIENTS

if TYPE_CHECKING:
    from ray_slo.serve.frontend.answer import Answer

WINDOW_S = 10  # whole seconds in the past
_MINUTE_S = 60
_REFUSALS = 30  # the newest kinds of refusal that are kept, per second and frontend
_PER_OCTAVE = 8  # buckets of latency
_LEAST_MS = 0.01


@dataclass
class Served:
    """Sums over the answers of one variant.

    Attributes:
        batches: each answer counts for its share of its batch.
        exec_ms, expected_ms, took_ms: sums over batches. The last two are from the grant to the
            result, as predicted and as measured, of `predicted` batches.
    """

    answers: int = 0
    batches: float = 0.0
    exec_ms: float = 0.0
    predicted: int = 0
    expected_ms: float = 0.0
    took_ms: float = 0.0

    def add(self, other: Served) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def told(self) -> dict[str, Any]:
        def mean(total: float, number: float) -> float | None:
            return total / number if number else None

        return {
            "answers": self.answers,
            "batches": round(self.batches, 3),
            "batch_size": mean(self.answers, self.batches),
            "exec_ms": mean(self.exec_ms, self.batches),
            "predicted_ms": mean(self.expected_ms, self.predicted),
            "measured_ms": mean(self.took_ms, self.predicted),
        }


@dataclass
class Counts:
    """Counts of one or several seconds, of one or several frontends.

    Attributes:
        outcomes: number of requests, by model and outcome.
        latencies: number of answers, by model and bucket.
        served: sums by model and variant.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    latencies: dict[str, Counter[int]] = field(default_factory=dict)
    served: dict[tuple[str, str], Served] = field(default_factory=dict)

    def of(self, model: str, variant: str) -> Served:
        return self.served.setdefault((model, variant), Served())

    def add(self, other: Counts) -> None:
        self.outcomes.update(other.outcomes)
        for model, buckets in other.latencies.items():
            self.latencies.setdefault(model, Counter()).update(buckets)
        for key, served in other.served.items():
            self.of(*key).add(served)


@dataclass(frozen=True)
class Refused:
    """Requests of one second that ended in the same way, without an answer in time.

    Attributes:
        ago_s: time since that second began.
    """

    ago_s: float
    model: str
    slo_class: str
    outcome: str
    reason: str
    count: int


@dataclass(frozen=True)
class Seen:
    """The counts of one frontend for clients' requests.

    Attributes:
        pending: requests that it has not answered.
        goodput, accuracy: see `FrontendMetrics`.
        shares: requests of the last minute, and those of them not answered in time, by model.
    """

    pending: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    refused: Sequence[Refused] = ()


class Lately:
    """Counts by second. Times are seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counts]] = deque(maxlen=_MINUTE_S + 1)
        self._refused: Counter[tuple[int, str, str, str]] = Counter()

    def answered(self, now: float, answers: Sequence[Answer]) -> None:
        """Requests were answered. The answers have one model, variant and class, and are all in
        time or all late."""
        first, number, counts = answers[0], len(answers), self._at(now)
        model, met = first.model, first.deadline_met
        counts.outcomes[model, "ok" if met else "late"] += number
        latencies = counts.latencies.setdefault(model, Counter())
        served = counts.of(model, first.variant)
        served.answers += number
        for answer in answers:
            latencies[round(_PER_OCTAVE * math.log2(max(answer.latency_ms, _LEAST_MS)))] += 1
            if not answer.stages:  # answers of a pipeline have no batch of their own
                share = 1.0 / max(answer.batch_size, 1)
                served.batches += share
                served.exec_ms += share * answer.exec_ms
        if not met:
            self._refuse(now, model, first.slo_class, "late", "", number)

    def unanswered(self, now: float, stream: str, outcome: str, reason: str, count: int) -> None:
        """Requests ended without an answer; see `FrontendMetrics.unanswered`."""
        model, slo_class = root_and_class(stream)
        self._at(now).outcomes[model, outcome] += count
        self._refuse(now, model, slo_class, outcome, reason, count)

    def predicted(
        self, now: float, model: str, variant: str, expected_ms: float, took_ms: float
    ) -> None:
        """Note the predicted and the measured time of a batch, from the grant to the result."""
        served = self._at(now).of(model, variant)
        served.predicted += 1
        served.expected_ms += expected_ms
        served.took_ms += took_ms

    def counts(self, now: float) -> Counts:
        """Counts of the last `WINDOW_S` whole seconds."""
        total, this = Counts(), int(now)
        for second, counts in self._seconds:
            if this - WINDOW_S <= second < this:
                total.add(counts)
        return total

    def shares(self, now: float) -> dict[str, tuple[int, int]]:
        """Requests of the last minute, and those of them not answered in time, by model."""
        found: dict[str, tuple[int, int]] = {}
        for second, counts in self._seconds:
            if second > int(now) - _MINUTE_S:
                for (model, outcome), number in counts.outcomes.items():
                    if outcome not in OF_CLIENTS:
                        before, bad = found.get(model, (0, 0))
                        found[model] = before + number, bad + number * (outcome != "ok")
        return found

    def refused(self, now: float) -> list[Refused]:
        """The last refusals, the newest first."""
        return [
            Refused(now - second, *root_and_class(stream), outcome, reason, count)
            for (second, stream, outcome, reason), count in reversed(self._refused.items())
        ]

    def _at(self, now: float) -> Counts:
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append((int(now), Counts()))
        return self._seconds[-1][1]

    def _refuse(
        self, now: float, model: str, slo_class: str, outcome: str, reason: str, count: int = 1
    ) -> None:
        stream = f"{model}@{slo_class}" if slo_class else model
        self._refused[int(now), stream, outcome, reason] += count
        if len(self._refused) > _REFUSALS:
            del self._refused[next(iter(self._refused))]


def together(seen: Iterable[Seen]) -> dict[str, Any]:
    """The counts of all frontends together, in the form of `slo_status`."""
    all_seen = list(seen)
    goodput: Counter[str] = Counter()
    weighted: dict[str, list[tuple[float, float]]] = {}
    shares: dict[str, tuple[int, int]] = {}
    counts = Counts()
    for one in all_seen:
        goodput.update(one.goodput)
        for model, accuracy in one.accuracy.items():
            weighted.setdefault(model, []).append((one.goodput.get(model, 0.0), accuracy))
        for model, (requests, bad) in one.shares.items():
            before = shares.get(model, (0, 0))
            shares[model] = before[0] + requests, before[1] + bad
        counts.add(one.counts)
    return {
        "frontends": len(all_seen),
        "pending": sum(one.pending for one in all_seen),
        "goodput": dict(goodput),
        "accuracy": {model: _mean(pairs) for model, pairs in weighted.items()},
        "bad_rate": {model: bad / n for model, (n, bad) in shares.items() if n},
        "lately": {
            "window_s": WINDOW_S,
            "models": _of_models(counts),
            "variants": _of_variants(counts),
            "refused": [
                vars(one)
                for one in sorted((r for s in all_seen for r in s.refused), key=lambda r: r.ago_s)
            ][:_REFUSALS],
        },
    }


def _of_models(counts: Counts) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (model, outcome), number in sorted(counts.outcomes.items()):
        found.setdefault(model, {"outcomes": {}})["outcomes"][outcome] = number
    for model, about in found.items():
        about["requests"] = sum(about["outcomes"].values())
        latencies = counts.latencies.get(model, Counter())
        about["latency_ms"] = {f"p{p}": _quantile(latencies, p / 100) for p in (50, 99)}
    return found


def _of_variants(counts: Counts) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (model, variant), served in sorted(counts.served.items()):
        found.setdefault(model, {})[variant] = served.told()
    return found


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Weighted mean; unweighted if all weights are 0."""
    total = sum(weight for weight, _ in pairs)
    if not total:
        return sum(value for _, value in pairs) / len(pairs)
    return sum(weight * value for weight, value in pairs) / total


def _quantile(buckets: Counter[int], share: float) -> float | None:
    """The middle of the bucket with this quantile of the answers, milliseconds."""
    wanted = math.ceil(share * buckets.total()) if buckets else 0
    for bucket in sorted(buckets):
        wanted -= buckets[bucket]
        if wanted <= 0:
            return float(2 ** (bucket / _PER_OCTAVE))
    return None
