"""What a plan expects of each root's requests: their accuracy, and the share not in time."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ray_slo.core.policy import Expected
from ray_slo.core.trees import Tree, root_and_class
from ray_slo.planning.auto.overflow import late_by_stream
from ray_slo.planning.auto.plan import Plan
from ray_slo.planning.auto.problem import Demand, Problem


def expected(
    problem: Problem, plan: Plan, factors: Mapping[str, float] | None = None
) -> dict[str, Expected]:
    """By root, of those that are asked for. Where several roots share the plan, the accuracy of a
    tree is the mean over its last tasks of the product of the tasks' accuracies on the way, and not
    known where paths have one of their own.

    Args:
        factors: planned demand over the one that there is, by stream; 1 where not given.
    """
    demand = _there(problem, factors)
    late = late_by_stream(problem, plan, demand)
    rates: dict[str, float] = {}
    bad: dict[str, float] = {}
    for stream, share in late.items():
        root = root_and_class(stream)[0]
        rates[root] = rates.get(root, 0.0) + demand[stream].rate
        bad[root] = bad.get(root, 0.0) + demand[stream].rate * share
    asked = [tree for tree in problem.trees if tree.name in rates]
    by_model = _by_model(problem, plan)
    found = {}
    for tree in asked:
        share = bad[tree.name] / rates[tree.name]
        accuracy = plan.accuracy if len(asked) == 1 else _of_tree(tree, by_model)
        found[tree.name] = Expected(accuracy if share < 1 else None, share)
    return found


def bad_share(problem: Problem, plan: Plan, factors: Mapping[str, float] | None = None) -> float:
    """Share of all requests that are expected to be late or refused; arguments as of `expected`."""
    demand = _there(problem, factors)
    late = late_by_stream(problem, plan, demand)
    total = sum(demand[stream].rate for stream in late)
    return sum(demand[s].rate * share for s, share in late.items()) / total if total else 0.0


def _there(problem: Problem, factors: Mapping[str, float] | None) -> dict[str, Demand]:
    """The demand that there is."""
    return {
        stream: Demand(of.rate / (factors or {}).get(stream, 1.0), of.dispersion)
        for stream, of in problem.demand.items()
    }


def _by_model(problem: Problem, plan: Plan) -> dict[str, float]:
    """Mean accuracy of the plan's answers, percent, by model."""
    accuracy = {v.name: (m.name, v.accuracy) for m in problem.models for v in m.variants}
    sums: dict[str, tuple[float, float]] = {}
    for slot in plan.slots:
        for part in slot.parts:
            model, of_variant = accuracy[part.variant]
            load, weighted = sums.get(model, (0.0, 0.0))
            more = part.load or 0.0
            sums[model] = load + more, weighted + more * of_variant
    return {model: weighted / load for model, (load, weighted) in sums.items() if load > 0}


def _of_tree(tree: Tree, by_model: dict[str, float]) -> float | None:
    if tree.path_accuracies or any(task.model not in by_model for task in tree.tasks):
        return None
    tasks = {task.name: task for task in tree.tasks}
    last = [name for name in tasks if not tree.children(name)]

    def on_the_way(name: str | None) -> float:
        if name is None:
            return 1.0
        return on_the_way(tasks[name].parent) * by_model[tasks[name].model] / 100

    return 100 * math.fsum(map(on_the_way, last)) / len(last)
