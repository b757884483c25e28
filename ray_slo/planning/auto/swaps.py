"""Swaps: variants that are loaded on a worker in the place of others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ray_slo.planning.auto.problem import Problem
from ray_slo.planning.milp import Indices, Milp


def add_swaps(
    m: Milp,
    problem: Problem,
    pairs: Sequence[tuple[str, str]],
    x: Indices,
    n: Indices,
    bounds: Sequence[tuple[int, int]],
) -> Indices:
    """Loads of variants beyond those that are there, and beyond what idle workers take: each of
    them one variant, or one of each where workers host several.

    Args:
        pairs: variants and kinds, hosted by x workers.
        n: workers by kind, within `bounds`.
    """
    total = m.variables(
        "swaps", 1, upper=math.inf if problem.max_swaps is None else problem.max_swaps
    )
    if not problem.current or not pairs:
        return total
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
    """Workers by kind that have nothing loaded: those beyond the ones that have something."""
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
