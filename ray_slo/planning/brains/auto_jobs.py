"""The problems that the brain of `auto` has solved in another process, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ray_slo.planning import auto
from ray_slo.planning.auto import Plan, Problem
from ray_slo.planning.brains.brain import Key
from ray_slo.planning.result import Infeasible

Made = Plan | Infeasible[Plan]


class Job(NamedTuple):
    """A problem to solve.

    Attributes:
        whole: for all workers that there may be.
        present: workers that serve, by kind.
        last: the plan from which the search starts.
        usable: variants whose latency is known, by kind.
        now: when the job was made, seconds.
        factors: planned demand over the measured one, by stream.
        idle: streams without demand.
    """

    whole: Problem
    present: Mapping[str, int]
    last: Plan | None
    usable: frozenset[Key]
    now: float
    factors: Mapping[str, float]
    idle: frozenset[str]

    def meanwhile(self, group_of: Mapping[str, str]) -> Problem:
        """The problem for the present workers, with models in these groups."""
        there = {kind.name for kind in self.whole.kinds if self.present.get(kind.name)}
        current = tuple(hosted for hosted in self.whole.current if hosted.kind in there)
        present = dict(self.present)
        return replace(self.whole, present=present, current=current, group_of=group_of)


class Plans(NamedTuple):
    """Both plans.

    Attributes:
        whole: for all workers that there may be.
        now: for the present workers, if their number differs; otherwise `whole` itself.
    """

    whole: Made
    now: Made

    @property
    def shortfall(self) -> str | None:
        """What cannot be served with all workers; None if everything can."""
        return self.whole.reason if isinstance(self.whole, Infeasible) else None


def best(answer: Made) -> Plan:
    """The plan to carry out."""
    return answer.best_effort if isinstance(answer, Infeasible) else answer


def solve(job: Job) -> Plans:
    """Both plans; run as a Ray task."""
    whole = auto.plan(job.whole, job.last)
    wanted, present = best(whole).workers, job.present
    if not any(present.values()) or all(n <= present.get(k, 0) for k, n in wanted.items()):
        return Plans(whole, whole)
    return Plans(whole, auto.plan(job.meanwhile(best(whole).group_of), job.last))
