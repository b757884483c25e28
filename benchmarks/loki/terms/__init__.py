"""Loki's problems and plans in the paper's terms (§4): variants, replicas and batch sizes of a tree
of models under one latency SLO. The programs here, and the tests of `auto`, use them.

A request enters at the root. A task's variant makes a number of requests from it for each child
task. There are three steps. Each is a mixed-integer linear program with the same constraints:

1. *hardware scaling*: the fewest workers that serve the demand with the most accurate variants;
2. *accuracy scaling*: if there are too few workers for that, the highest accuracy at the demand;
3. *share* (ours; the paper has no such step): if no variants are fast enough, the largest share of
   the demand, with the highest accuracy at that share. It is returned as `Infeasible`, and says
   what it sheds.

The program is that of `planning.auto` with Loki's settings (`as_auto`): a worker has one variant,
and no time is left free for bursts. `benchmarks/loki/published.py` has the paper's own program.

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

from benchmarks.loki.terms.plans import Assignment, PathShare, Plan, Step, explain, swaps_of
from benchmarks.loki.terms.problem import Problem, Task, Variant, fastest
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.auto.program import Program
from ray_slo.planning.result import Infeasible

__all__ = [
    "Assignment",
    "PathShare",
    "Plan",
    "Problem",
    "Step",
    "Task",
    "Variant",
    "as_auto",
    "capacity",
    "fastest",
    "plan",
]
_NO_PLAN = "the solver stopped at its time limit without a plan"
_KIND = "worker"


def plan(problem: Problem, last: Plan | None = None) -> Plan | Infeasible[Plan]:
    """Return the plan of the first feasible step.

    Args:
        problem: the problem.
        last: the plan in force, for planners that start from it. This one does not.

    Returns:
        A plan that serves the planned demand, or `Infeasible` with the plan of step 3.
    """
    made = auto.plan(as_auto(problem))
    if not isinstance(made, Infeasible):
        return _as_loki(problem, made)
    best = _as_loki(problem, made.best_effort)
    if not made.proven:
        reason = _NO_PLAN
    elif (least_s := fastest(problem)) > problem.slo_s + 1e-12:
        reason = (
            f"slo_s {problem.slo_s:g} is too short: the fastest path takes "
            f"{least_s:.4g} s, waiting and communication included"
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
    return Infeasible(reason, best, made.proven)


def as_auto(problem: Problem) -> auto.Problem:
    """Return the same problem for `auto`: one kind of workers, one variant per worker, and no room
    for bursts except for the quantile of the demand."""
    root = problem.order[0].name
    models = (
        auto.Model(
            t.name, tuple(auto.Variant(v.name, v.accuracy, {_KIND: v.profile}) for v in t.variants)
        )
        for t in problem.order
    )
    tasks = (
        TreeTask(t.name, t.name, t.parent, {v.name: v.factors for v in t.variants})
        for t in problem.order
    )
    loaded = [
        frozenset({variant})
        for (_, variant), workers in (problem.current or {}).items()
        for _ in range(workers)
    ]
    return auto.Problem(
        tuple(models),
        (Tree(root, tuple(tasks), {"": problem.slo_s}, problem.path_accuracies),),
        {root: auto.Demand(problem.demand)},
        (auto.Kind(_KIND, 0, problem.workers),),
        current=tuple(auto.Hosted(f"{i}", _KIND, its) for i, its in enumerate(loaded)),
        **{**auto.LOKI, **{name: getattr(problem, name) for name in _SAME}},
    )


_SAME = (
    "accuracy_floor",
    "backend",
    "batch_sizes",
    "communication_s",
    "fits_alone",
    "headroom_period_s",
    "headroom_quantile",
    "max_swaps",
    "relative_gap",
    "seed",
    "swap_cost",
    "time_limit_s",
    "waiting_factor",
)
"""Fields that both kinds of problems have."""


def _as_loki(problem: Problem, made: auto.Plan) -> Plan:
    """Return a plan in Loki's words."""
    workers: dict[tuple[str, int], int] = {}
    load: dict[tuple[str, int], float] = {}
    for part in (part for slot in made.slots for part in slot.parts):
        key = part.variant, part.batch_size
        workers[key] = workers.get(key, 0) + 1
        load[key] = load.get(key, 0.0) + (part.load or 0.0)
    known = {v.name: (t, v) for t in problem.order for v in t.variants}
    assignments, latency_s = [], dict[str, float]()
    for name, (task, variant) in known.items():
        for (of, size), count in workers.items():
            if of == name:
                latency_s[name] = variant.profile.latency(size)
                throughput = variant.profile.throughput(size)
                assignments.append(
                    Assignment(
                        task.name, name, size, count, load[of, size], throughput, latency_s[name]
                    )
                )
    root = problem.order[0].name
    paths = []
    for names, share in made.paths.get(root, {}).items():
        product = 100 * math.prod(known[name][1].accuracy / 100 for name in names)
        accuracy = problem.path_accuracies.get(names, product)
        paths.append(PathShare(names, share, accuracy, sum(latency_s.get(n, 0.0) for n in names)))
    paths.sort(key=lambda path: (-path.accuracy, path.variants))
    step: Step = "hardware" if made.step == "cost" else made.step
    found = Plan(
        step,
        tuple(assignments),
        tuple(paths),
        made.accuracy,
        problem.planned_demand,
        1 - made.served[root] if step == "share" else 0.0,
        0,
        made.gap,
        "",
    )
    swaps = swaps_of(problem, found.loaded)
    return replace(found, swaps=swaps, explanation=explain(problem, found, swaps))


def capacity(problem: Problem, *, most_accurate: bool = False) -> float:
    """Return the largest demand that all workers can serve, in requests per second. With
    `most_accurate`, only the most accurate variants are used (the end of hardware scaling).
    Otherwise any variants that keep `problem.accuracy_floor` are used. The problem's demand and
    headroom do not matter.

    Raises:
        RuntimeError: the solver found nothing within its time limit.
    """
    most = problem.workers * max(
        v.profile.throughput(min(b, v.profile.max_batch_size))
        for v in problem.order[0].variants
        for b in problem.batch_sizes
    )
    asked = replace(problem, demand=most, headroom_quantile=None)
    program = Program(as_auto(asked), most_accurate)
    solution = program.solve("share")
    if not solution.found:
        raise RuntimeError(_NO_PLAN)
    return most * float(solution[program.share][0])
