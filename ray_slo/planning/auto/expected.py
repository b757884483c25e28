"""The results that a plan predicts for each root: the accuracy, and the share of bad requests."""

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
    """Return the prediction for each root with a demand.

    With only one root, its accuracy is that of the plan. With several, the accuracy of a tree is
    computed from the mean accuracies of its tasks. For each last task, these are multiplied along
    the path from the root; the result is the mean of the products. It is unknown if the accuracies
    of a tree are given by path.

    Args:
        factors: ratio of the planned to the actual demand, by stream. The default is 1.
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
    """Return the predicted share of all requests that are late or refused. The arguments are those
    of `expected`."""
    demand = _there(problem, factors)
    late = late_by_stream(problem, plan, demand)
    total = sum(demand[stream].rate for stream in late)
    return sum(demand[s].rate * share for s, share in late.items()) / total if total else 0.0


def _there(problem: Problem, factors: Mapping[str, float] | None) -> dict[str, Demand]:
    """Return the actual demand."""
    return {
        stream: Demand(of.rate / (factors or {}).get(stream, 1.0), of.dispersion)
        for stream, of in problem.demand.items()
    }


def _by_model(problem: Problem, plan: Plan) -> dict[str, float]:
    """Return the mean accuracy of the plan's answers by model, in percent."""
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
