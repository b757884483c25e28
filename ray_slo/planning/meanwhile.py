"""Plans for the time while workers start: one for all wanted workers, and one for the present ones.

The first plan sets the number of workers. Until they have started, or if the cluster has no room
for them, the present workers use less accurate variants rather than shed requests. The live planner
and the simulator both use `plan_both`.

Worked example: one of three workers is present, for a task with a large and a small network.

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
    """The two plans.

    Attributes:
        whole: plan for the largest allowed number of workers.
        now: plan for the present workers. If their number is as in `whole`, `whole` itself.
        present: number of present workers.
    """

    whole: Made
    now: Made
    present: int

    @property
    def shortfall(self) -> str | None:
        """What even all workers cannot serve. None if they can serve everything."""
        return self.whole.reason if isinstance(self.whole, Infeasible) else None

    @property
    def why(self) -> str:
        """The reason of the plan, for people."""
        text = best(self.whole).explanation
        if self.shortfall is not None:
            text = f"Best effort, as {self.shortfall}. {text}"
        if self.now is not self.whole:
            text += f" With the {self.present} that are there: {best(self.now).explanation}"
        return text


def best(answer: Made) -> loki.Plan:
    """Return the plan to carry out: the answer, or its best effort if it is infeasible."""
    return answer.best_effort if isinstance(answer, Infeasible) else answer


def plan_both(
    problem: loki.Problem,
    present: int,
    last: loki.Plan | None = None,
    planner: Callable[[loki.Problem, loki.Plan | None], Made] = loki.plan,
) -> Plans:
    """Return both plans.

    Args:
        problem: the problem for the largest allowed number of workers.
        present: number of present workers. 0 if unknown.
        last: plans from which the search starts.
        planner: `loki.plan`, or another planner with the same interface.
    """
    whole = planner(problem, last)
    if best(whole).workers <= present or not 0 < present < problem.workers:
        return Plans(whole, whole, present)
    return Plans(whole, planner(replace(problem, workers=present), last), present)
