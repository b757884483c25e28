"""Rows of the program for room for bursts, for the batch sizes of models that several tasks use,
and for swaps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ray_slo.planning.auto.graph import NO_TIME, Graph
from ray_slo.planning.auto.limits import Room
from ray_slo.planning.auto.problem import Problem, Size
from ray_slo.planning.milp import Floats, Indices, Milp


def add_batch_sizes(m: Milp, g: Graph, w: Mapping[tuple[str, str], Indices]) -> None:
    """Add rows: a variant has one batch size on a kind, for all nodes that use it. If requests have
    size classes, it has one for each class.

    Args:
        w: variables of the number of busy workers, by node and configuration.
    """
    users: dict[tuple[str, Size | None], list[tuple[str, str]]] = {}
    for node, of in g.nodes.items():
        if of.most and of.configs:
            users.setdefault((of.task.model, g.configs[of.configs[0]].size), []).append(node)
    for (model, size), nodes in users.items():
        if len(nodes) < 2:
            continue
        of_model = sorted({k for node in nodes for k in g.nodes[node].configs})
        of_size = model if size is None else f"{model} up to {size.largest}"
        hosted = m.variables(f"hosted: {of_size}", len(of_model), upper=1, integer=True)
        pairs = [(g.configs[k].variant, g.configs[k].kind) for k in of_model]
        of_pair = np.array([[p == pair for p in pairs] for pair in dict.fromkeys(pairs)], float)
        m.block(
            f"(4) batch size: {of_size}",
            (of_pair, np.broadcast_to(hosted, of_pair.shape)),
            upper=1,
        )
        at = {k: i for i, k in enumerate(of_model)}
        for node in nodes:
            of = g.nodes[node]
            share = g.throughput(node) / (g.problem.rate(node[0]) * of.most)
            m.block(
                f"(4) hosted: {'/'.join(node)}",
                (share[:, None], w[node][:, None]),
                (-1, hosted[[at[k] for k in of.configs]][:, None]),
                upper=0,
            )


def add_room(
    m: Milp,
    name: str,
    busy: Floats,
    w: Indices,
    n: Indices,
    rooms: Sequence[Room],
    most: Sequence[int],
) -> None:
    """Add the rows Σ w ≤ slope·n − reserve. The reserve counts only if a w of the row is positive.

    Args:
        busy: which w count in each row, shape (rows, len(w)).
        w: variables of the number of busy workers.
        n: variables of the number of workers of each row, at most `most`.
        rooms: slope and reserve of each row.
    """
    slopes = np.array([room.slope for room in rooms])
    reserves = np.array([room.reserve for room in rooms])
    used = m.variables(f"used: {name}", len(rooms), upper=1, integer=True)
    of_row = np.broadcast_to(w, busy.shape)
    m.block(
        name,
        (busy, of_row),
        (-slopes[:, None], n[:, None]),
        (reserves[:, None], used[:, None]),
        upper=0,
    )
    if reserves.any():
        all_busy = np.array([room.busy(n) for room, n in zip(rooms, most, strict=True)])
        m.block(f"used: {name}", (busy, of_row), (-all_busy[:, None], used[:, None]), upper=0)


def takes_alone(g: Graph, node: tuple[str, str]) -> list[float]:
    """Return the number of requests that a worker takes in the task's time, for each configuration
    of a node, if one request at the root makes them at once and no others wait.

    In the time that the program leaves a task, a worker takes `waiting_factor` batches. A single
    request at the root does not wait before. So the share 1 − 1 / waiting_factor of the SLO is left
    for a task, if the other tasks on its paths have only one request to serve.
    """
    problem, (stream, name) = g.problem, node
    tree, of = problem.tree_of(stream), g.nodes[node]
    crowded = [task.name for task in tree.tasks if g.at_once((stream, task.name)) > 1]
    others = [other for other in crowded if other != name]
    related = any(other in tree.path(name) or name in tree.path(other) for other in others)
    time_s = 0.0 if related else problem.slo_s(stream) * (1 - 1 / problem.waiting_factor)
    configs = [g.configs[k] for k in of.configs]
    factor = problem.waiting_factor
    return [max(factor * c.batch_size, c.throughput * time_s) for c in configs]


def add_alone(
    m: Milp,
    g: Graph,
    nodes: Sequence[tuple[str, str]],
    pairs: Sequence[tuple[str, str]],
    x: Indices,
    budgets: Mapping[tuple[str, str], tuple[Indices, list[float]]],
) -> None:
    """Add rows: the workers of a task take the requests of a single request at the root in time. A
    variant has the largest batch within the task's budget.

    Args:
        nodes: nodes that get more requests at once than any one worker takes.
        pairs, x: pairs of variant and kind, and variables of the number of workers that host each.
        budgets: binaries and budgets of the nodes' time.
    """
    for node in nodes:
        z, times = budgets[node]
        takes = np.zeros((len(times), len(pairs)))
        for k, n in zip(g.nodes[node].configs, takes_alone(g, node), strict=True):  # batches rise
            config = g.configs[k]
            in_time = np.array(times) + NO_TIME >= config.time_s
            takes[in_time, pairs.index((config.variant, config.kind))] = n
        m.block(
            f"room for one request: {'/'.join(node)}",
            (takes, np.broadcast_to(x, takes.shape)),
            (-g.at_once(node) * (1 - 1e-6), z[:, None]),
            lower=0,
        )


def add_swaps(
    m: Milp,
    problem: Problem,
    pairs: Sequence[tuple[str, str]],
    x: Indices,
    n: Indices,
    bounds: Sequence[tuple[int, int]],
) -> Indices:
    """Add rows for swaps: loads of variants that are not loaded yet, minus those on idle workers.
    An idle worker takes one variant; if workers may host several, it takes one load of each.

    Args:
        pairs: pairs of variant and kind.
        x: variables of the number of workers that host each pair.
        n: variables of the number of workers by kind, within `bounds`.

    Returns:
        The variable of the number of swaps, shape (1,).
    """
    if not problem.current or not pairs:
        return m.variables("swaps", 1, upper=0)
    total = m.variables(
        "swaps", 1, upper=math.inf if problem.max_swaps is None else problem.max_swaps
    )
    loads = m.variables("loads", len(pairs))
    have = [
        sum(h.kind == kind and variant in h.variants for h in problem.current)
        for variant, kind in pairs
    ]
    m.block("loads", (1, x[:, None]), (-1, loads[:, None]), upper=have)
    idle = _idle(m, problem, n, [most for _, most in bounds])
    of_kind = np.array([[k == kind.name for _, k in pairs] for kind in problem.kinds])
    if problem.sharing:
        swaps = m.variables("swaps of variants", len(pairs))
        at = of_kind.argmax(axis=0)
        rows: list[Any] = [(1, loads[:, None]), (-1, idle[at][:, None]), (-1, swaps[:, None])]
    else:
        swaps = m.variables("swaps of kinds", len(problem.kinds))
        every = np.broadcast_to(loads, of_kind.shape)
        rows = [(of_kind.astype(float), every), (-1, idle[:, None]), (-1, swaps[:, None])]
    m.block("loads on idle workers", *rows, upper=0)
    m.block("swaps", (1, swaps), (-1, total), upper=0)
    return total


def _idle(m: Milp, problem: Problem, n: Indices, most: Sequence[int]) -> Indices:
    """Return variables of the number of workers by kind that have no variant loaded."""
    busy = [hosted.kind for hosted in problem.current if hosted.variants]
    used = np.array([busy.count(kind.name) for kind in problem.kinds])
    idle = m.variables("idle", len(used), upper=np.maximum(np.array(most) - used, 0))
    more = m.variables("more workers", len(used), upper=1, integer=True)
    m.block(
        "idle: only of more",
        (1, idle[:, None]),
        (-np.array(most, float)[:, None], more[:, None]),
        upper=0,
    )
    m.block(
        "idle: beyond those used",
        (1, idle[:, None]),
        (-1, n[:, None]),
        (used[:, None].astype(float), more[:, None]),
        upper=0,
    )
    return idle
