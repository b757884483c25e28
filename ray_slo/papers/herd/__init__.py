"""HERD: from streams to model-streams, and from these to serving groups (SHEPHERD §3.1, §4).

The load of a single stream cannot be predicted, but that of hundreds of streams can. One scheduler
cannot serve thousands of workers, but it can serve a group. HERD divides workers and models into
groups such that the least *burst tolerance* of a model is as large as possible:

    bt(k) = workers of k's group / n_k,    n_k = workers that k's average load needs

subject to (a) the cluster's size, (b) the workers one scheduler can drive, (c) the memory of a
worker, which holds every model of its group, (d) one group per model, and (e) only similar models
(by the affinity K of §5.2, Eq. 3) in one group.

Worked example: the loads are 4, 1 and 1 workers. There are 12 workers, at most 8 in a group, with
memory for two models. The big model gets 8 workers (bt = 2), and the small ones share 4 (bt = 4
each). So the least bt is 2, and every group has twice the workers that its average load needs.

    >>> models = [ModelStream(n, load, memory_mb=1) for n, load in [("a", 4), ("b", 1), ("c", 1)]]
    >>> p = plan(Problem(tuple(models), workers=12, group_worker_limit=8, memory_mb=2))
    >>> p.burst_tolerance, p.gap, [(g.workers, g.models) for g in p.groups]
    (2.0, 0.0, [(8, ('a',)), (4, ('b', 'c'))])

*Solution.* For a given tolerance t, model k needs a group of at least ⌈t·n_k⌉ workers. The rest is
bin packing, where the cost of a bin is its largest need. Best-fit packing gives plans. A count of
the memory that needs groups of each size gives a bound. A bisection over the finite number of
relevant t narrows the range from both sides. If plan and bound do not meet and the problem is
small, the ILP itself (`program`) decides. Otherwise the gap is stated.

The published ILP does not limit the *sum* of the loads in a group. So a second bisection makes the
least headroom (workers / load of a group) as large as the search finds at that tolerance.
`min_headroom` makes it a constraint. If all groups are at their limits, the remaining workers form
new groups, which take load from the groups with the least headroom. A model has one group. Streams
that need more than Ḡ workers need several model-streams.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ray_slo.papers.herd.problem import Group, ModelStream, Plan, Problem
from ray_slo.papers.herd.search import EPS, Bins, Search
from ray_slo.papers.herd.streams import affinity, affinity_sets
from ray_slo.planning.milp import Indices, Milp
from ray_slo.planning.result import Infeasible

__all__ = [
    "Group",
    "ModelStream",
    "Plan",
    "Problem",
    "affinity",
    "affinity_sets",
    "plan",
    "program",
]


def plan(problem: Problem) -> Plan | Infeasible[Plan]:
    """Return the plan with the largest least burst tolerance, or a plan within its `gap` of it."""
    search = Search(problem)
    found = _best(search)
    if isinstance(found, str):
        return _infeasible(problem, search, found)
    bins, bound, how = found
    return search.to_plan(bins, bound, how)


def _best(search: Search) -> tuple[Bins, float, str] | str:
    """Return groups, a bound on the tolerance, and the method. If there are none, return the
    reason."""
    problem, headroom = search.problem, search.problem.min_headroom
    values = search.tolerances()
    if why := search.possible(float(values[0]), headroom):
        return why
    low, high = 0, len(values) - 1  # the largest value that counting allows
    while low < high:
        middle = (low + high + 1) // 2
        if search.possible(float(values[middle]), headroom):
            high = middle - 1
        else:
            low = middle
    bound = top = low
    bins, reached = search.pack(float(values[top]), headroom), top
    if bins is None:
        low, high = -1, top - 1
        while low < high:
            middle = (low + high + 1) // 2
            if packed := search.pack(float(values[middle]), headroom):
                bins, low = packed, middle
            else:
                high = middle - 1
        reached = low
    limit = float(values[bound])
    how = "proven best"
    if reached < bound:
        how = "best found"
        if len(problem.models) * problem.groups <= problem.exact_cells:
            exact, limit, proven = _exact(search, limit)
            if exact is None and bins is None and proven:
                return "the ILP has no solution"
            if exact is not None and (
                bins is None or search.tolerance(exact) > search.tolerance(bins) * (1 + EPS)
            ):
                bins = exact
            if proven and bins is not None:
                how = "proven best by the ILP"
                limit = search.tolerance(bins)
    if bins is None:
        return ""
    return search.balanced(bins, min(search.tolerance(bins), limit)), limit, how


def program(problem: Problem) -> tuple[Milp, Indices, Indices]:
    """Return the linearised ILP of SHEPHERD §4 (Eq. 2), and its variables x, shape (models,
    groups), and size, shape (groups,).

    w_ij = x_ij·size_j replaces the product, and t is the max–min term. A group without models gets
    no workers. The groups are interchangeable, so they are ordered by falling size.
    """
    loads = np.array([m.load for m in problem.models], float)
    memory = np.array([m.memory_mb for m in problem.models], float)
    kinds, kind = np.unique([m.affinity_set for m in problem.models], return_inverse=True)
    count, groups = len(loads), problem.groups
    limit = min(problem.group_worker_limit, problem.workers)
    busy = loads > 0
    m = Milp("max")
    x = m.variables("x: stream in group", (count, groups), upper=1, integer=True)
    y = m.variables("y: affinity set of group", (len(kinds), groups), upper=1, integer=True)
    z = m.variables("z: model in group", (count, groups), upper=1, integer=True)
    size = m.variables("size: workers", groups, integer=True, upper=problem.workers)
    w = m.variables("w: workers of a stream", (count, groups))
    t = m.variables("t", upper=limit / loads.max() if busy.any() else 1.0)
    m.block("(a) cluster-size limit", (1, size), upper=problem.workers)
    m.block("(b) group-worker limit", (1, size[:, None]), upper=problem.group_worker_limit)
    m.block("(c) memory limit", (memory, z.T), upper=problem.memory_mb)
    m.block("(d) group surjectivity: streams", (1, x), lower=1, upper=1)
    m.block("(d) group surjectivity: models", (1, x[..., None]), (-1, z[..., None]), upper=0)
    m.block("(e) affinity-set surjectivity: groups", (1, y.T), lower=1, upper=1)
    m.block(
        "(e) affinity-set surjectivity: models",
        (1, z[..., None]),
        (-1, y[kind][..., None]),
        upper=0,
    )
    m.block("used groups have a worker", (1, z[..., None]), (-1, size[:, None]), upper=0)
    m.block("w at most size", (1, w[..., None]), (-1, size[:, None]), upper=0)
    m.block("w only where x", (1, w[..., None]), (-limit, x[..., None]), upper=0)
    if busy.any():
        m.block(
            "t is the least burst tolerance",
            (loads[busy][:, None], np.broadcast_to(t, (int(busy.sum()), 1))),
            (-1, w[busy]),
            upper=0,
        )
    if problem.min_headroom:
        m.block(
            "headroom of groups", (problem.min_headroom * loads, x.T), (-1, size[:, None]), upper=0
        )
    if groups > 1:
        m.block("groups by falling size", (1, size[1:, None]), (-1, size[:-1, None]), upper=0)
    m.objective((1, t))
    return m, x, size


def _exact(search: Search, bound: float) -> tuple[Bins | None, float, bool]:
    """Solve the ILP. Return the groups (None without a solution), the bound, and whether the result
    is final."""
    problem = search.problem
    m, x, size = program(problem)
    solution = m.solve(problem.backend, problem.time_limit_s, seed=problem.seed)
    proven = solution.status in ("optimal", "infeasible")
    if not solution.found:
        return None, bound, proven
    limit = bound if math.isinf(bound) else min(bound, solution.bound)
    return (
        Bins(solution[size].round().astype(int), solution[x].argmax(axis=1)),
        limit,
        proven,
    )


def _infeasible(problem: Problem, search: Search, why: str) -> Infeasible[Plan]:
    too_big = [m for m in problem.models if m.memory_mb > search.room]
    if too_big:
        why = (
            f"model {too_big[0].name!r} takes {too_big[0].memory_mb:g} MB, a worker has "
            f"{problem.memory_mb:g} MB"
        )
    elif problem.min_headroom and not isinstance(
        _best(relaxed := Search(replace(problem, min_headroom=0.0))), str
    ):
        largest = search.load.argmax()
        if (load := search.load[largest] * problem.min_headroom) > search.limit:
            why = (
                f"model {problem.models[largest].name!r} alone needs {math.ceil(load)} workers at "
                f"a headroom of {problem.min_headroom:g}, a group has at most {search.limit}: "
                f"split its streams over two model-streams"
            )
        reason = f"min_headroom {problem.min_headroom:g} is out of reach: "
        best = plan(relaxed.problem)
        assert isinstance(best, Plan)
        return Infeasible(
            reason + (why or f"the best packing found has {best.headroom:.3g}"),
            best,
            proven=bool(why),
        )
    bins = search.pack(0.0, 0.0, partly=True)
    assert bins is not None  # with `partly`, models that do not fit are left out
    if not len(bins.size):
        effort = search.to_plan(bins, 0.0, "as no model fits")
    else:
        effort = search.to_plan(search.spend(bins), math.inf, "by load per MB, as many as fit")
    return Infeasible(why or "no packing of every model was found", effort, proven=bool(why))
