"""A stand-in for the solver of `ray_slo.planning.ramsis`: simple tables at no cost."""

from __future__ import annotations

from dataclasses import dataclass

from ray_slo.planning.ramsis.problem import Problem


@dataclass(frozen=True)
class Rule:
    """The most accurate variant that is in time for all that waits and keeps up with the load.

    Where none is: the fastest, for as many as are in time, at least one.
    """

    problem: Problem

    def lookup(self, n: int, slack_s: float) -> tuple[str, int]:
        per_worker = self.problem.rate / self.problem.num_workers
        for name, _, profile in reversed(self.problem.candidates):
            latency = profile.latency(n)
            if latency <= slack_s and n / latency >= per_worker:
                return name, n
        name, _, profile = min(self.problem.variants, key=lambda v: v[2].latency(1))
        return name, max(min(n, profile.max_batch_within(slack_s)), 1)


def solve(problem: Problem) -> Rule:
    return Rule(problem)
