"""What is found out while planning: which programs have plans that cannot be carried out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ray_slo.planning.auto.problem import Demand, Kind, Problem

Pair = tuple[str, str]
"""Variant and kind; the variant is "" where all of a kind share its workers."""


@dataclass(frozen=True)
class Room:
    """How many workers may be busy: slope·n − reserve of n workers, none of no workers."""

    slope: float = 1.0
    reserve: float = 0.0

    def busy(self, workers: int) -> float:
        return max(self.slope * workers - self.reserve, 0.0)

    def workers(self, busy: float) -> int:
        """The fewest workers that may be busy for `busy` seconds a second, all together."""
        return max(math.ceil((busy + self.reserve) / self.slope - 1e-6), 1)

    def part(self, share: float) -> Room:
        """Room of which only `share` is kept free."""
        return Room(1 - share * (1 - self.slope), share * self.reserve)


@dataclass(frozen=True)
class Limits:
    """Limits besides those of the problem.

    Attributes:
        rooms: room for bursts, by variant and kind if workers have one variant each, else by "" and
            kind. Without an entry, all workers may be busy.
        workers: of a kind on which variants could not be packed: the share of its time that each
            worker may be busy is taken for so many.
        memory: share of a kind's memory that may be planned; less than 1 where variants could not
            be packed into all of it.
        longest_s: the longest batch on a kind, if other requests cannot wait longer for its end.
        least: the least number of workers of a kind, so that requests that cannot wait have their
        own. mixed: kinds on which some requests wait longer, because there is no other plan.
    """

    rooms: Mapping[Pair, Room] = field(default_factory=dict)
    workers: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    longest_s: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    mixed: frozenset[str] = frozenset()

    def level(self, kind: str) -> float:
        """Share of its time that each worker of a kind may be busy, where variants share them."""
        room, workers = self.rooms.get(("", kind), Room()), self.workers.get(kind)
        return room.busy(workers) / workers if workers else room.slope

    def unpacked(self, kind: str, workers: int) -> Limits:
        """With less of the time of each worker, if it was taken for that of more than this number
        of them, else with less of the memory."""
        fewer = replace(self, workers={**self.workers, kind: workers})
        if fewer.level(kind) < self.level(kind) - 1e-6:
            return fewer
        return replace(self, memory={**self.memory, kind: 0.85 * self.memory.get(kind, 1.0)})


NEAR = 0.2
"""Share by which the demand may differ from the one that limits were found for."""


@dataclass(frozen=True)
class Found:
    """Limits, and the problem that they were found for."""

    limits: Limits
    demand: Mapping[str, Demand]
    kinds: tuple[Kind, ...]
    settings: tuple[object, ...]

    @classmethod
    def of(cls, problem: Problem, limits: Limits) -> Found:
        return cls(limits, dict(problem.demand), problem.kinds, _settings(problem))

    def holds_for(self, problem: Problem) -> bool:
        """Whether a problem differs in little but what the programs look at again anyway."""
        if self.kinds != problem.kinds or self.settings != _settings(problem):
            return False
        if set(self.demand) != set(problem.demand):
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
    return *rest, present, groups
