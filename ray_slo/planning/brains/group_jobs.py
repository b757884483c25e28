"""The measured input of a planner of groups, and its plan, which is made in another process.

The throughput T of a stream on one worker (SHEPHERD §4) is that of the policy in use. The process
that solves the plan simulates it (`Goodput`). It is kept as a share of the profile's throughput
with batches that take half of the SLO, until the profile changes.
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

_OTHER = 0.2  # share by which a profile must differ to count as changed

Profiles = Mapping[str, LatencyProfile]
Goodput = Callable[[str, Profiles, float, float], float]
"""From a model, its variants' profiles, an SLO in seconds and a guess to the requests per second
that one worker answers in time. It is a function of a module, because it may run in another
process."""


@dataclass(frozen=True)
class Share:
    """The share of the profiles' throughput that the policy in use attains."""

    share: float
    profiles: Profiles

    def fits(self, profiles: Profiles) -> bool:
        """Whether the share is still valid for these profiles."""
        same = profiles.keys() == self.profiles.keys()
        return same and not any(p.differs(self.profiles[v], _OTHER) for v, p in profiles.items())


@dataclass(frozen=True)
class Job:
    """A decision to make, and the number of workers.

    Attributes:
        problem: the planner's.
        now: when it was made.
        counted: requests of the interval that ends now, by stream.
        unknown: streams whose goodput must be simulated, with their variants' profiles and SLO.
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
        # If no request was in time, no plan helps; the plan uses the profile alone.
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
    """Profiles by variant: learned by workers, or else from files. If kinds of workers differ, the
    slowest."""
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
    """The measurements of streams, without memory. A stream without a profile counts as average.

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
    """Memory in MB of the models whose variants were all measured, and the smallest memory of a
    worker; None if unknown."""
    of_variant: dict[str, float] = {}
    for (variant, _), mb in seen.memory_mb.items():
        of_variant[variant] = max(mb, of_variant.get(variant, 0.0))
    of_model = {
        model: sum(of_variant[v] for v in names)
        for model, names in variants.items()
        if all(v in of_variant for v in names)
    }
    return of_model, min(seen.room_mb.values(), default=None)
