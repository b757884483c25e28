"""Jobs of the brain of `auto`: its problems and their plans. Another process solves them."""

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
        whole: the problem for the largest allowed numbers of workers.
        present: number of workers that serve, by kind.
        last: the plan from which the search starts.
        usable: (variant, kind) pairs whose latency is known.
        now: time when the job was made, in seconds.
        factors: ratio of the planned to the measured demand, by stream.
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
        """Return the problem for the present workers, with the models in the groups `group_of`."""
        there = {kind.name for kind in self.whole.kinds if self.present.get(kind.name)}
        current = tuple(hosted for hosted in self.whole.current if hosted.kind in there)
        present = dict(self.present)
        return replace(self.whole, present=present, current=current, group_of=group_of)


class Plans(NamedTuple):
    """The two plans of a job.

    Attributes:
        whole: the plan for the largest allowed numbers of workers.
        now: the plan for the present workers. If their number is as in `whole`, `whole` itself.
    """

    whole: Made
    now: Made

    @property
    def shortfall(self) -> str | None:
        """What cannot be served even with all workers. None if everything can."""
        return self.whole.reason if isinstance(self.whole, Infeasible) else None


def best(answer: Made) -> Plan:
    """Return the plan to carry out: the answer, or its best effort if it is infeasible."""
    return answer.best_effort if isinstance(answer, Infeasible) else answer


def solve(job: Job) -> Plans:
    """Return both plans of a job. This runs as a Ray task."""
    whole = auto.plan(job.whole, job.last)
    wanted, present = best(whole).workers, job.present
    if not any(present.values()) or all(n <= present.get(k, 0) for k, n in wanted.items()):
        return Plans(whole, whole)
    return Plans(whole, auto.plan(job.meanwhile(best(whole).group_of), job.last))
