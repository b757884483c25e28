"""The values of worker-seconds and requests under a plan: duals of the program's linear part.

A linear program has the plan's workers, budgets and batch sizes. It chooses the requests to serve
such that the points of accuracy per second are highest (the fluid limit, as in
`policies/shared/fluid.py`). The prices are its duals.
"""

from __future__ import annotations

import numpy as np

from ray_slo.planning.auto.plan import Prices
from ray_slo.planning.auto.program import Program
from ray_slo.planning.milp import Floats, Solution

_ZERO = 1e-9


def prices_of(program: Program, solution: Solution) -> Prices:
    """Return the prices of a program that was solved."""
    problem, g = program.problem, program.graph
    tasks = [task.name for tree in problem.trees for task in tree.tasks]
    zero = Prices({k.name: 0.0 for k in problem.kinds}, dict.fromkeys(tasks, 0.0))
    if not solution.found or not g.streams:
        return zero
    m = program.program("value", None)
    kept = [
        v.ravel() for name, v in m.labels.items() if name[0] in "nz" or name[:4] in ("host", "used")
    ]
    fixed = np.concatenate(kept)
    duals = m.duals(fixed, solution[fixed].round())
    if "workers" not in duals:
        return zero
    of_kind = np.maximum(duals["workers"], 0.0)
    worker_s = {k.name: _clean(v) for k, v in zip(problem.kinds, of_kind, strict=True)}
    return Prices(worker_s, {**zero.request, **_requests(program, solution, duals)})


def _requests(program: Program, solution: Solution, duals: dict[str, Floats]) -> dict[str, float]:
    """Return the price of a request at each task: the mean over the task's streams and the paths
    that lead to it."""
    worth: dict[str, float] = {}
    weight: dict[str, float] = {}
    g, problem = program.graph, program.problem
    for stream, task in g.nodes:
        tree, rate = problem.tree_of(stream), problem.rate(stream)
        paths, c = g.paths[tree.name], solution[program.c[stream]]
        if tree.root == task:
            entries = [(float(duals[f"root: {stream}"][0]), 1.0, 1.0)]
        else:
            parent = tree.parents[task]
            above = [j for j, p in enumerate(paths) if p.task == parent]
            values = duals[f"paths: {stream}/{task}"]
            made = [
                paths[j].arrivals * tree[str(parent)].factor(paths[j].variants[-1], task)
                for j in above
            ]
            entries = list(zip(values.tolist(), made, c[above].tolist(), strict=True))
        for value, arrivals, share in entries:
            if arrivals > 0:
                times = rate * max(share, _ZERO) * arrivals
                worth[task] = worth.get(task, 0.0) + times * value / (rate * arrivals)
                weight[task] = weight.get(task, 0.0) + times
    return {task: _clean(max(worth[task] / weight[task], 0.0)) for task in worth}


def _clean(value: float) -> float:
    return 0.0 if abs(value) < _ZERO else float(value)
