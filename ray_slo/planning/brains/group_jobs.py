"""What a planner of groups plans for, as measured, and the plan made of it elsewhere.

The throughput T of a stream on one worker (SHEPHERD §4) is that of the policy in use. The host
simulates it (`Goodput`) where the plan is solved, as a share of what the profile gives in batches
that take half of the SLO. The share is kept until the profile is another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray_slo.core import LatencyProfile
from ray_slo.core.trees import root_and_class
from ray_slo.planning import herd, partition
from ray_slo.planning.brains.brain import Seen
from ray_slo.planning.brains.group_plans import Measured, best_throughput, solve

logger = logging.getLogger(__name__)

_OTHER = 0.2  # a profile that differs by this share is another

Profiles = Mapping[str, LatencyProfile]
Goodput = Callable[[str, Profiles, float, float], float]
"""Requests/s that one worker answers in time, of a model, its variants' profiles, an SLO in
seconds and a guess. A function of a module, as it may run elsewhere."""


@dataclass(frozen=True)
class Share:
    """Of what profiles give, the share that the policy in use attains."""

    share: float
    profiles: Profiles

    def fits(self, profiles: Profiles) -> bool:
        """Whether it still holds for these profiles."""
        same = profiles.keys() == self.profiles.keys()
        return same and not any(p.differs(self.profiles[v], _OTHER) for v, p in profiles.items())


@dataclass(frozen=True)
class Job:
    """What is to be decided, for how many workers.

    Attributes:
        problem: the planner's.
        now: when it was made.
        counted: requests of the interval that ends now, by stream.
        unknown: streams whose goodput is to be simulated: their variants' profiles and SLO.
    """

    problem: herd.Problem | partition.Problem
    workers: int
    now: float
    measured: Measured
    counted: Mapping[str, int]
    goodput: Goodput | None = None
    unknown: Mapping[str, tuple[Profiles, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Solved:
    """The planner's answer, the problem as it was solved, and the shares that were found for it."""

    problem: herd.Problem | partition.Problem
    answer: Any
    shares: Mapping[str, Share]


def solve_job(job: Job) -> Solved:
    """The planner's answer; run as a Ray task."""
    shares: dict[str, Share] = {}
    throughput = dict(job.measured.throughput)
    for stream, (profiles, slo_s) in job.unknown.items():
        assert job.goodput is not None
        guess = throughput[stream]
        try:
            found = job.goodput(root_and_class(stream)[0], profiles, slo_s, guess)
        except Exception:
            logger.exception("the goodput of %s could not be simulated", stream)
            found = guess
        # Where nothing was in time, no plan helps: the profile alone is planned with.
        shares[stream] = Share(found / guess if found > 0 else 1.0, profiles)
        throughput[stream] *= shares[stream].share
    problem = job.problem
    if shares and isinstance(problem, herd.Problem):
        measured = replace(job.measured, throughput=throughput)
        models = (replace(m, load=measured.load(m.name)) for m in problem.models)
        problem = replace(problem, models=tuple(models))
    return Solved(problem, solve(problem), shares)


def profiles_of(
    variants: Collection[str], seen: Seen, files: Profiles
) -> dict[str, LatencyProfile]:
    """Profiles by variant: what workers have learned, else what profile files say. Where kinds of
    workers differ, the slowest."""
    found: dict[str, LatencyProfile] = {}
    for variant in variants:
        learned = [p for (v, _), p in seen.profiles.items() if v == variant]
        if known := learned or [p for v, p in files.items() if v == variant]:
            found[variant] = max(known, key=lambda p: p.latency(1))
    return found


def measured_of(
    rates: Mapping[str, float],
    slos_s: Mapping[str, float],
    profiles: Mapping[str, Profiles],
    shares: Mapping[str, float],
) -> Measured:
    """What is known of streams, but for memory. A stream without a profile is like the average.

    Args:
        profiles: of the variants of each model.
        shares: by stream; 1 where not given.
    """
    best: dict[str, float] = {}
    fastest: dict[str, LatencyProfile] = {}
    for stream, slo_s in slos_s.items():
        model, _ = root_and_class(stream)
        if profiles[model]:
            most = {v: best_throughput(p, slo_s) for v, p in profiles[model].items()}
            quickest = max(most, key=lambda v: most[v])
            best[stream] = shares.get(stream, 1.0) * most[quickest]
            fastest.setdefault(model, profiles[model][quickest])
    usual = sum(best.values()) / len(best) if best else 1.0
    return Measured(rates, {s: best.get(s, usual) for s in slos_s}, fastest)


def memory_of(
    variants: Mapping[str, Collection[str]], seen: Seen
) -> tuple[dict[str, float], float | None]:
    """Memory in MB of the models of which every variant was measured, and the least that a worker
    has; None where nobody knows."""
    of_variant: dict[str, float] = {}
    for (variant, _), mb in seen.memory_mb.items():
        of_variant[variant] = max(mb, of_variant.get(variant, 0.0))
    of_model = {
        model: sum(of_variant[v] for v in names)
        for model, names in variants.items()
        if all(v in of_variant for v in names)
    }
    return of_model, min(seen.room_mb.values(), default=None)
