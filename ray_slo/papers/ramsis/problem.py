"""The problem of a table: variants with their profiles, SLO, load, workers, and options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray_slo.core.arguments import Count, NonNegative, Positive, check_fields
from ray_slo.core.profiles import LatencyProfile
from ray_slo.papers.ramsis.arrivals import POISSON, Arrivals

VariantProfile = tuple[str, float, LatencyProfile]

Balancing = Literal["round_robin", "shortest_queue"]
Discretization = Literal["fld", "model_based"]
Batching = Literal["maximal", "variable"]
Objective = Literal["per_query", "per_batch"]
Late = Literal["serve", "drop"]


def profile_hash(variants: Sequence[VariantProfile]) -> str:
    """Return a short digest of names, accuracies and latency profiles. Their order does not
    matter."""
    parts = sorted((name, round(accuracy, 6), p.hash) for name, accuracy, p in variants)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Problem:
    """One worker's Markov decision process (RAMSIS §4).

    Attributes:
        variants: (name, accuracy in percent, latency profile) of each variant. Every worker has
            all of them loaded.
        slo_s: latency SLO from arrival to answer, in seconds.
        rate: requests per second that arrive at the whole pool.
        num_workers: K, the number of equal workers.
        balancing: rule by which requests get to workers: every K-th ("round_robin", §4.4), or to
            the shortest queue (Appendix I, an approximation).
        discretization: slack in `num_slacks` steps of equal length ("fld", §4.2.2), or by the
            latencies that occur ("model_based", §4.2.1).
        max_queue: N, the longest queue that decisions distinguish (§4.2.3). It is at most the
            largest batch of any variant. None: see `longest_queue`.
        batching: "maximal" takes all queued requests (§4.3.2), "variable" any part of them.
        objective: "per_query" maximises the sum of the accuracies of requests answered in time, per
            request. "per_batch" maximises the sum over batches, per decision, as the published
            code.
        late: treatment of requests that no variant can answer in time: "serve" them with the
            fastest variant (§4.3.1), or "drop" them, the most urgent first.
        late_penalty: cost of a request not answered in time, in percentage points, beside the
            missing accuracy ("per_query"). The paper's reward has none. Near peak load it gives up
            percents of the requests for the accuracy of the others.
        arrivals: distribution of arrivals; see `arrivals`.
        pareto: leave out variants that another one beats in accuracy and in latency (§4.3.3).

    Raises:
        ValueError: a field is out of its range. The message names it.
    """

    variants: tuple[VariantProfile, ...]
    slo_s: Positive
    rate: Positive
    num_workers: Count
    balancing: Balancing = "round_robin"
    discretization: Discretization = "fld"
    num_slacks: Count = 100
    max_queue: Count | None = None
    batching: Batching = "maximal"
    objective: Objective = "per_query"
    late: Late = "serve"
    late_penalty: NonNegative = 100.0
    arrivals: Arrivals = POISSON
    pareto: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "variants", tuple(tuple(v) for v in self.variants))
        if not self.variants:
            raise ValueError("variants must hold at least one (name, accuracy, profile)")
        names = [name for name, _, _ in self.variants]
        if "" in names or len(set(names)) < len(names):
            raise ValueError(f"variants must have different, non-empty names, got {names}")
        for name, accuracy, _ in self.variants:
            if not 0 <= accuracy <= 100:
                raise ValueError(f"accuracy of {name!r} must be 0 … 100 percent, got {accuracy}")
        check_fields(self)
        if min(p.latency(1) for _, _, p in self.variants) > self.slo_s:
            fastest = min(p.latency(1) for _, _, p in self.variants)
            raise ValueError(
                f"slo_s: no variant answers within {self.slo_s * 1e3:.6g} ms; "
                f"the fastest takes {fastest * 1e3:.6g} ms"
            )

    @property
    def candidates(self) -> tuple[VariantProfile, ...]:
        """The variants that decisions choose from, the least accurate first."""
        return (
            pareto_front(self.variants, self.slo_s) if self.pareto else _by_accuracy(self.variants)
        )

    @property
    def profile_hash(self) -> str:
        return profile_hash(self.variants)

    @property
    def capacity(self) -> float:
        """Requests per second that all workers can serve with batches that fit the SLO."""
        best = max(
            p.throughput(b)
            for _, _, p in self.variants
            for b in range(1, min(p.max_batch_within(self.slo_s), self.longest_queue) + 1)
        )
        return self.num_workers * best

    @property
    def longest_queue(self) -> int:
        """N. By default, it is twice the largest batch B that fits the SLO. If that is above 32, it
        is B + 3: the paper takes 32 for B = 29, and longer queues mean overload (§4.2.3)."""
        largest = max(p.max_batch_size for _, _, p in self.candidates)
        if self.max_queue is not None:
            return min(self.max_queue, largest)
        fitting = max(p.max_batch_within(self.slo_s) for _, _, p in self.candidates)
        return min(2 * fitting, max(32, fitting + 3), largest)

    def at_rate(self, rate: float) -> Problem:
        return replace(self, rate=rate)

    def options(self) -> dict[str, Any]:
        """Return all fields but variants and rate, as JSON data. Tables of one set have the same
        options."""
        names = (
            "balancing",
            "discretization",
            "batching",
            "objective",
            "late",
            "slo_s",
            "num_workers",
            "num_slacks",
            "max_queue",
            "late_penalty",
            "pareto",
        )
        chosen = {name: getattr(self, name) for name in names}
        return {**chosen, "arrivals": self.arrivals.to_json()}


def pareto_front(variants: Sequence[VariantProfile], slo_s: float) -> tuple[VariantProfile, ...]:
    """Return the variants that no other variant beats. Another one beats a variant if it is at
    least as accurate, and at least as fast at every batch size that fits the SLO.

    The paper compares the latencies of batches of one. So it loses variants that are
    better in large batches. With its own profiles, this costs 5 points of accuracy near peak load.
    """

    def beats(a: VariantProfile, b: VariantProfile) -> bool:
        compared = range(1, max(b[2].max_batch_within(slo_s), 1) + 1)
        return a[1] >= b[1] and all(a[2].latency(n) <= b[2].latency(n) for n in compared)

    kept: list[VariantProfile] = []
    for variant in sorted(variants, key=lambda v: (-v[1], v[2].latency(1))):
        if not any(beats(other, variant) for other in kept):
            kept.append(variant)
    return _by_accuracy(kept)


def _by_accuracy(variants: Sequence[VariantProfile]) -> tuple[VariantProfile, ...]:
    return tuple(sorted(variants, key=lambda v: v[1]))
