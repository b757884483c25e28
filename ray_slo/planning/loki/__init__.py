"""Loki: variants, replicas and batch sizes of a tree of models under one latency SLO (Loki §4).

A request enters at the root. A task's variant makes a number of requests from it for each child
task. There are three steps. Each is a mixed-integer linear program with the same constraints:

1. *hardware scaling*: the fewest workers that serve the demand with the most accurate variants;
2. *accuracy scaling*: if there are too few workers for that, the highest accuracy at the demand;
3. *share* (ours; the paper has no such step): if no variants are fast enough, the largest share of
   the demand, with the highest accuracy at that share. It is returned as `Infeasible`, and says
   what it sheds.

Worked example: a detector finds 4 faces per frame; there are 3 workers, and the SLO is 100 ms. The
large recogniser serves 100 faces per second in batches of 2 (20 ms), the small one 200 (10 ms).

    >>> from ray_slo.core.profiles import LatencyProfile
    >>> fixed = lambda ms: LatencyProfile([ms / 1e3, ms / 1e3])
    >>> detector = Variant("d", 90.0, fixed(20), {"name": 4.0})
    >>> recognisers = Variant("large", 90.0, fixed(20)), Variant("small", 80.0, fixed(10))
    >>> tasks = Task("detect", (detector,)), Task("name", recognisers, parent="detect")
    >>> p = plan(Problem(tasks, demand=60, workers=3, slo_s=0.1, batch_sizes=(1, 2)))
    >>> p.step, round(p.accuracy, 2), [(a.variant, a.batch_size, a.workers) for a in p.assignments]
    ('accuracy', 75.75, [('d', 2, 1), ('large', 2, 1), ('small', 2, 1)])
"""

from __future__ import annotations

import math
from dataclasses import replace

from ray_slo.planning.loki.plans import Assignment, PathShare, Plan, Step
from ray_slo.planning.loki.problem import Problem, Task, Variant, fastest
from ray_slo.planning.loki.program import EPS, Program
from ray_slo.planning.result import Infeasible

__all__ = [
    "Assignment",
    "PathShare",
    "Plan",
    "Problem",
    "Step",
    "Task",
    "Variant",
    "capacity",
    "fastest",
    "plan",
]
_NO_PLAN = "the solver stopped at its time limit without a plan"


def plan(problem: Problem, last: Plan | None = None) -> Plan | Infeasible[Plan]:
    """Return the plan of the first feasible step.

    Args:
        problem: the problem.
        last: plan from which the search starts, if the solver accepts one (Gurobi does). It does
            not change the optimum; `problem.current` does.

    Returns:
        A plan that serves the planned demand, or `Infeasible` with the plan of step 3.
    """
    accurate = Program(problem, most_accurate=True)
    solution = accurate.solve("hardware", last)
    if solution.found:
        return accurate.plan("hardware", solution)
    program = Program(problem)
    solution = program.solve("accuracy", last)
    if solution.found:
        return program.plan("accuracy", solution)
    proven = solution.status == "infeasible"
    solution = program.solve("share", last)
    best = program.plan("share", solution)
    if solution.found and best.shed_share < 1:
        exact = program.solve("accuracy", last, served=(1 - best.shed_share) * (1 - EPS))
        if exact.found:
            best = replace(program.plan("share", exact), gap=best.gap)
    if not proven:
        reason = _NO_PLAN
    elif not program.graph.paths:
        reason = (
            f"slo_s {problem.slo_s:g} is too short: the fastest path takes "
            f"{fastest(problem):.4g} s, waiting and communication included"
        )
    else:
        limits = [f"{problem.workers} workers"]
        if problem.accuracy_floor:
            limits.append(f"an accuracy of at least {problem.accuracy_floor:g} %")
        if problem.max_swaps is not None:
            limits.append(f"at most {problem.max_swaps} swaps")
        reason = (
            f"demand {problem.planned_demand:.5g} req/s is out of reach with "
            f"{', '.join(limits)}: {100 * (1 - best.shed_share):.3g} % of it can be served"
        )
    return Infeasible(reason, best, proven)


def capacity(problem: Problem, *, most_accurate: bool = False) -> float:
    """Return the largest demand that all workers can serve, in requests per second. With
    `most_accurate`, only the most accurate variants are used (the end of hardware scaling).
    Otherwise any variants that keep `problem.accuracy_floor` are used. The problem's demand and
    headroom do not matter.

    Raises:
        RuntimeError: the solver found nothing within its time limit.
    """
    free = replace(problem, demand=1.0, headroom_quantile=None)
    solution = Program(free, most_accurate, served=math.inf).solve("share", None)
    if not solution.found:
        raise RuntimeError(_NO_PLAN)
    return solution.objective
