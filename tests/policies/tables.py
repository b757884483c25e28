"""A stand-in for the solver of `ray_slo.papers.ramsis`: simple tables at no cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_slo.papers.ramsis import DROP, Problem


class OfProblem:
    """What a table says about itself."""

    problem: Problem
    max_queue = 8

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.problem.variants)

    @property
    def slo_s(self) -> float:
        return self.problem.slo_s

    @property
    def rate(self) -> float:
        return self.problem.rate

    @property
    def num_workers(self) -> int:
        return self.problem.num_workers

    @property
    def profile_hash(self) -> str:
        return self.problem.profile_hash

    @property
    def options(self) -> dict[str, Any]:
        return self.problem.options()


@dataclass(frozen=True)
class Rule(OfProblem):
    """The most accurate variant that is in time for all that waits and keeps up with the load.

    Where none is: the fastest, for as many as are in time, at least one. More than 7 are too many:
    the first is dropped.
    """

    problem: Problem

    def lookup(self, n: int, slack_s: float) -> tuple[str, int]:
        if n > 7 and self.problem.late == "drop":
            return DROP, 1
        per_worker = self.problem.rate / self.problem.num_workers
        for name, _, profile in reversed(self.problem.candidates):
            latency = profile.latency(n)
            if latency <= slack_s and n / latency >= per_worker:
                return name, n
        name, _, profile = min(self.problem.variants, key=lambda v: v[2].latency(1))
        return name, max(min(n, profile.max_batch_within(slack_s)), 1)


def solve(problem: Problem) -> Rule:
    return Rule(problem)
