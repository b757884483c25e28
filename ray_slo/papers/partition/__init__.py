"""Sub-cluster partitioning: models are divided among sub-clusters of equal load and memory
(Symphony §4.4, App. A).

Every worker of a sub-cluster has all its models loaded, and one dispatcher thread serves it. So
rate and memory are bounded, and should be even:

    minimise ΔR + w·ΔS                                       (3)
    Σ_i r_i x_ij ≤ R_max,  Σ_i s_i x_ij + max_i d_i x_ij ≤ S_max    (4, 5)
    |Σ_i r_i x_ij − R̄| ≤ ΔR,  |Σ_i s_i x_ij − S̄| ≤ ΔS        (6, 7)
    Σ_j x_ij = 1,  x binary                                  (8, 9)
    Σ_ij c_ij |x_ij − x'_ij| ≤ C_max                         (10)

Worked example: rates 5, 4, 3, 2 and equal memory over two sub-clusters: {5, 2} and {4, 3}.

    >>> models = [Model(n, rate=r, static_mb=10) for n, r in zip("abcd", [5, 4, 3, 2])]
    >>> p = plan(Problem(tuple(models), sub_clusters=2))
    >>> sorted(s.models for s in p.sub_clusters), p.rate_spread, p.gap
    ([('a', 'd'), ('b', 'c')], 0.0, 0.0)

*Solution.* The search starts from the current assignment, or from that of longest processing time
first. It is improved by moves and swaps of models, with a smooth replacement of the objective. All
moves and swaps of one sub-cluster are evaluated at once. If the result is further from the bound
than `tolerance`, the MILP (`program`) is solved for at most `time_limit_s`, and the better result
is used. For hundreds of models, the search alone is even to a fraction of a percent. The MILP is
for few large models.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ray_slo.papers.partition.problem import Model, Plan, Problem, SubCluster
from ray_slo.papers.partition.search import Search
from ray_slo.planning.milp import Indices, Milp
from ray_slo.planning.result import Infeasible

__all__ = [
    "Model",
    "Plan",
    "Problem",
    "SubCluster",
    "plan",
    "program",
]


def plan(problem: Problem) -> Plan | Infeasible[Plan]:
    """Return the partition with the least objective, or one within its `gap` of it."""
    search = Search(problem)
    bound, scale = search.bound(), search.scale
    why = search.impossible()
    best = None if why else search.run()
    how = "moves and swaps"
    status = "infeasible" if why else "unknown"
    good = best is not None and search.objective(best) - bound <= problem.tolerance * scale
    if not why and not good and problem.time_limit_s > 0:
        milp, x = program(problem)
        solution = milp.solve(problem.backend, problem.time_limit_s, seed=problem.seed)
        status = solution.status
        if math.isfinite(solution.bound):
            bound = max(bound, solution.bound)
        if solution.found:
            exact = solution[x].argmax(axis=1)
            if best is None or search.objective(exact) < search.objective(best):
                best, how = exact, "the MILP"
        if status == "infeasible":
            limits = ("(4) rate limit", "(5) memory limit", "(10) change cost")
            clash = milp.conflicts(problem.backend, problem.time_limit_s / 3, among=limits)
            why = "the MILP has no solution" + f" because of {' and '.join(clash)}" * bool(clash)
    if best is not None:
        return search.to_plan(best, bound, how)
    return _infeasible(problem, search, why, proven=status == "infeasible")


def program(problem: Problem) -> tuple[Milp, Indices]:
    """Return the MILP of Symphony Appendix A, and its variables x, shape (models, sub-clusters)."""
    search = Search(problem)
    rate, static, dynamic = search.rate, search.static, search.dynamic
    count, parts = len(rate), problem.sub_clusters
    m = Milp("min")
    x = m.variables("x: model in sub-cluster", (count, parts), upper=1, integer=True)  # (9)
    spread = m.variables("ΔR, ΔS", 2)
    largest = m.variables("max d", parts)
    m.objective((1, spread[:1]), (search.weight, spread[1:]))
    m.block("(4) rate limit", (rate, x.T), upper=problem.max_rate)
    m.block("(5) memory limit", (static, x.T), (1, largest[:, None]), upper=problem.max_memory_mb)
    m.block(
        "(5) largest dynamic memory",
        (dynamic[:, None, None], x[..., None]),
        (-1, largest[:, None]),
        upper=0,
    )
    for name, amount, k in (("(6) rate balance", rate, 0), ("(7) memory balance", static, 1)):
        of_part = np.broadcast_to(spread[k], (parts, 1))
        average = float(amount.sum()) / parts
        m.block(f"{name}: above", (amount, x.T), (-1, of_part), upper=average)
        m.block(f"{name}: below", (amount, x.T), (1, of_part), lower=average)
    m.block("(8) one sub-cluster", (1, x), lower=1, upper=1)
    if search.budget < math.inf:
        now = np.zeros((count, parts))
        known = np.flatnonzero(search.current >= 0)
        now[known, search.current[known]] = 1
        y = m.variables("y: change", (count, parts), upper=1)
        m.block("(10) change: load", (1, y[..., None]), (-1, x[..., None]), lower=-now)
        m.block("(10) change: unload", (1, y[..., None]), (1, x[..., None]), lower=now)
        m.block("(10) change cost", (search.cost.ravel(), y.ravel()), upper=search.budget)
    else:  # sub-clusters are interchangeable: model i goes to one of the first i + 1
        i, j = np.triu_indices(count, 1, parts)
        if len(i):
            m.block("sub-clusters in order", (1, x[i, j][:, None]), upper=0)
    return m, x


def _infeasible(problem: Problem, search: Search, why: str, proven: bool) -> Infeasible[Plan]:
    if search.budget < math.inf:
        free = plan(replace(problem, max_change_cost=math.inf))
        if isinstance(free, Plan):
            reason = (
                f"max_change_cost {problem.max_change_cost:g} is too small: the best partition "
                f"without it costs {free.change_cost:g}"
            )
            return Infeasible(reason, free, proven)
        return free
    group = search.start(partly=True)
    effort = search.to_plan(group, 0.0, "largest first, as many as fit")
    return Infeasible(why or "no partition that keeps the limits was found", effort, proven)
