"""What to run while workers start: a plan for those that there may be, and one for those that are
there.

The first says how many workers there should be. Until they are, or where the cluster never has room
for them, the others lower the accuracy rather than shed requests. The live planner and the
simulator both go by `plan_both`.

Worked example: one worker of three is there, for a task with a large and a small network.

    >>> from ray_slo.core.profiles import LatencyProfile
    >>> fixed = lambda ms: LatencyProfile([ms / 1e3])
    >>> task = loki.Task("name", (loki.Variant("large", 90.0, fixed(20)),
    ...                           loki.Variant("small", 80.0, fixed(10))))
    >>> problem = loki.Problem((task,), demand=80, workers=3, slo_s=0.1, batch_sizes=(1,))
    >>> plans = plan_both(problem, present=1)
    >>> plans.whole.loaded, plans.now.loaded
    ({('name', 'large'): 2}, {('name', 'small'): 1})
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ray_slo.planning import loki
from ray_slo.planning.result import Infeasible

Made = loki.Plan | Infeasible[loki.Plan]


class Plans(NamedTuple):
    """Both plans.

    Attributes:
        whole: for all workers that there may be.
        now: for those that are there, where that differs; else `whole` itself.
        present: how many are there.
    """

    whole: Made
    now: Made
    present: int

    @property
    def shortfall(self) -> str | None:
        """What is out of reach with all workers; None where nothing is."""
        return self.whole.reason if isinstance(self.whole, Infeasible) else None

    @property
    def why(self) -> str:
        """For people."""
        text = best(self.whole).explanation
        if self.shortfall is not None:
            text = f"Best effort, as {self.shortfall}. {text}"
        if self.now is not self.whole:
            text += f" With the {self.present} that are there: {best(self.now).explanation}"
        return text


def best(answer: Made) -> loki.Plan:
    """The plan to carry out."""
    return answer.best_effort if isinstance(answer, Infeasible) else answer


def plan_both(
    problem: loki.Problem,
    present: int,
    last: loki.Plan | None = None,
    planner: Callable[[loki.Problem, loki.Plan | None], Made] = loki.plan,
) -> Plans:
    """Both plans.

    Args:
        problem: for all workers that there may be.
        present: how many are there; 0 where nobody knows.
        last: where the search starts.
        planner: `loki.plan`, or another that does as it does.
    """
    whole = planner(problem, last)
    if best(whole).workers <= present or not 0 < present < problem.workers:
        return Plans(whole, whole, present)
    return Plans(whole, planner(replace(problem, workers=present), last), present)
