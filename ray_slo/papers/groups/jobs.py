"""Jobs of the planners of groups: their measured input, and their plans. Another process solves
them.

The throughput T of a stream on one worker (SHEPHERD §4) depends on the policy in use. The process
that solves the plan finds it with the simulator (`Goodput`). The result is kept as a share of the
throughput that the profile promises for batches of at most half the SLO. It is used until the
profile changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray_slo.core import LatencyProfile
from ray_slo.core.trees import root_and_class
from ray_slo.papers import herd, partition
from ray_slo.papers.groups.plans import Measured, best_throughput
from ray_slo.planning.brains.brain import Seen

logger = logging.getLogger(__name__)

_OTHER = 0.2  # relative difference from which a profile counts as changed

Profiles = Mapping[str, LatencyProfile]
Goodput = Callable[[str, Profiles, float, float], float]
"""Function that returns the requests per second that one worker answers in time. Its arguments are
a model, the profiles of its variants, an SLO in seconds, and a first guess of the result. It is a
function at the top of a module, because it may run in another process."""


@dataclass(frozen=True)
class Share:
    """The share of the profiles' throughput that the policy in use attains.

    Attributes:
        share: the share.
        profiles: the profiles with which it was found, by variant.
    """

    share: float
    profiles: Profiles

    def fits(self, profiles: Profiles) -> bool:
        """Return whether the share is still valid for these profiles."""
        same = profiles.keys() == self.profiles.keys()
        return same and not any(p.differs(self.profiles[v], _OTHER) for v, p in profiles.items())


@dataclass(frozen=True)
class Job:
    """A problem to solve.

    Attributes:
        problem: problem of `herd` or `partition`.
        workers: number of workers.
        now: time when the job was made, in seconds.
        measured: the measurements in the problem.
        counted: number of requests in the interval that ends now, by stream.
        goodput: function that simulates the policy in use.
        unknown: streams whose goodput must be simulated, with their variants' profiles and their
            SLO in seconds.
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
    """The answer to a job.

    Attributes:
        problem: the problem as it was solved, with simulated throughputs.
        answer: the planner's answer.
        shares: shares of the throughput that were found by simulation, by stream.
    """

    problem: herd.Problem | partition.Problem
    answer: Any
    shares: Mapping[str, Share]


def solve_job(job: Job) -> Solved:
    """Simulate the unknown goodputs, then solve the problem. This runs as a Ray task."""
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
        # If no request was in time in the simulation, the plan uses the profile alone.
        shares[stream] = Share(found / guess if found > 0 else 1.0, profiles)
        throughput[stream] *= shares[stream].share
    problem = job.problem
    if shares and isinstance(problem, herd.Problem):
        measured = replace(job.measured, throughput=throughput)
        models = (replace(m, load=measured.load(m.name)) for m in problem.models)
        problem = replace(problem, models=tuple(models))
    planner: Any = herd if isinstance(problem, herd.Problem) else partition
    return Solved(problem, planner.plan(problem), shares)


def profiles_of(
    variants: Collection[str], seen: Seen, files: Profiles
) -> dict[str, LatencyProfile]:
    """Return the profiles by variant: learned by workers, otherwise from files. If kinds of workers
    differ, the slowest profile counts."""
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
    """Return the measurements of all streams, without memory. A stream without a profile gets the
    average throughput of the others.

    Args:
        rates: requests per second, by stream.
        slos_s: SLO in seconds, by stream.
        profiles: profiles of the variants, by model.
        shares: share of the profiles' throughput that the policy attains, by stream. The default is
            1.
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
    """Return the memory of each model whose variants were all measured, and the smallest memory of
    a worker. Both are in MB. The latter is None if it is unknown."""
    of_variant: dict[str, float] = {}
    for (variant, _), mb in seen.memory_mb.items():
        of_variant[variant] = max(mb, of_variant.get(variant, 0.0))
    of_model = {
        model: sum(of_variant[v] for v in names)
        for model, names in variants.items()
        if all(v in of_variant for v in names)
    }
    return of_model, min(seen.room_mb.values(), default=None)
