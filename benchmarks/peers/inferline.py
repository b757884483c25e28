"""InferLine as Loki's paper compares with it (§6.1): pipeline-aware hardware scaling, one variant.

The client names the variant of each task; here it is the most accurate one. Then Loki's program is
hardware scaling over paths, with its latency constraint, headroom and period. It is solved exactly.
InferLine's own search is a heuristic for the same problem, so this is at least as good. If all
workers are too few, they serve the largest possible share of the demand, the same at every task.
This is Loki's step 3 with one variant. So no task serves more than the others can follow.
"""

from __future__ import annotations

from dataclasses import replace

from ray_slo.planning import loki
from ray_slo.planning.result import Infeasible


def inferline(
    problem: loki.Problem, last: loki.Plan | None = None
) -> loki.Plan | Infeasible[loki.Plan]:
    """A planner for `simulate_pipeline`: `loki.plan` with the most accurate variants only."""
    tasks = tuple(
        replace(t, variants=(max(t.variants, key=lambda v: v.accuracy),)) for t in problem.tasks
    )
    current = problem.current
    if current is not None:
        kept = {(t.name, t.variants[0].name) for t in tasks}
        current = {key: workers for key, workers in current.items() if key in kept}
    return loki.plan(replace(problem, tasks=tasks, current=current), last)
