"""Limits that are found while planning. They exclude solutions that cannot be carried out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ray_slo.core import LatencyProfile
from ray_slo.planning.auto.problem import Demand, Kind, Problem

Pair = tuple[str, str]
"""Variant and kind. The variant is "" if all variants share the workers of a kind."""


@dataclass(frozen=True)
class Room:
    """Limit of the mean number of busy workers: slope·n − reserve of n workers. It leaves room for
    bursts and interruptions."""

    slope: float = 1.0
    reserve: float = 0.0

    def busy(self, workers: int) -> float:
        return max(self.slope * workers - self.reserve, 0.0)

    def workers(self, busy: float) -> int:
        """Return the least number of workers of which `busy` may be busy on average."""
        return max(math.ceil((busy + self.reserve) / self.slope - 1e-6), 1)

    def part(self, share: float) -> Room:
        """Return a room that keeps only `share` of this room's time free."""
        return Room(1 - share * (1 - self.slope), share * self.reserve)


@dataclass(frozen=True)
class Limits:
    """Limits besides those of the problem.

    Attributes:
        rooms: room for bursts, by variant and kind. If variants share workers, the variant is "".
            Without an entry, all workers may be busy.
        workers: number of workers for which the largest load per worker is computed, by kind. It is
            set if variants could not be packed on the workers of a kind.
        memory: share of the memory that may be planned, by kind. It is less than 1 if variants
            could not be packed into all of the memory.
        longest_s: longest allowed batch, in seconds, by kind. Other requests cannot wait longer for
            its end.
        least: least number of workers, by kind, so that requests that cannot wait have separate
            workers.
        mixed: kinds on which some requests wait longer, because there is no other plan.
    """

    rooms: Mapping[Pair, Room] = field(default_factory=dict)
    workers: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    longest_s: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    mixed: frozenset[str] = frozenset()

    def level(self, kind: str) -> float:
        """Return the share of its time that each worker of a kind may be busy, if variants share
        workers."""
        room, workers = self.rooms.get(("", kind), Room()), self.workers.get(kind)
        return room.busy(workers) / workers if workers else room.slope

    def unpacked(self, kind: str, workers: int) -> Limits:
        """Return tighter limits for a kind on whose `workers` the variants could not be packed. The
        limit on the time of each worker is lowered to that for `workers`. If it was that already,
        the limit on the memory is lowered."""
        fewer = replace(self, workers={**self.workers, kind: workers})
        if fewer.level(kind) < self.level(kind) - 1e-6:
            return fewer
        return replace(self, memory={**self.memory, kind: 0.85 * self.memory.get(kind, 1.0)})


NEAR = 0.2
"""Limits stay valid while the demand and the profiles differ by at most this share from theirs."""


@dataclass(frozen=True)
class Found:
    """Limits, and the problem that they were found for."""

    limits: Limits
    demand: Mapping[str, Demand]
    profiles: Mapping[Pair, LatencyProfile]
    kinds: tuple[Kind, ...]
    settings: tuple[object, ...]

    @classmethod
    def of(cls, problem: Problem, limits: Limits) -> Found:
        demand, settings = dict(problem.demand), _settings(problem)
        return cls(limits, demand, _profiles(problem), problem.kinds, settings)

    def holds_for(self, problem: Problem) -> bool:
        """Return whether the limits are valid for another problem. Its demand and profiles must be
        similar, and its kinds and settings must be the same. The rest does not matter, because
        programs check it again."""
        if self.kinds != problem.kinds or self.settings != _settings(problem):
            return False
        profiles = _profiles(problem)
        if (self.demand.keys(), self.profiles.keys()) != (problem.demand.keys(), profiles.keys()):
            return False
        if any(profiles[pair].differs(then, NEAR) for pair, then in self.profiles.items()):
            return False
        return all(
            abs(now.rate - then.rate) <= NEAR * then.rate
            and abs(now.dispersion - then.dispersion) <= NEAR * then.dispersion
            for now, then in ((problem.demand[s], then) for s, then in self.demand.items())
        )


def _settings(problem: Problem) -> tuple[object, ...]:
    present = None if problem.present is None else tuple(sorted(problem.present.items()))
    groups = tuple(sorted(problem.group_of.items()))
    rest = problem.objective, problem.sharing, problem.headroom, problem.target_bad
    floor = problem.accuracy_floor, problem.budget_per_hour, problem.batch_sizes
    return *rest, *floor, present, groups


def _profiles(problem: Problem) -> dict[Pair, LatencyProfile]:
    variants = problem.variant.values()
    return {(v.name, kind): profile for v in variants for kind, profile in v.profiles.items()}
