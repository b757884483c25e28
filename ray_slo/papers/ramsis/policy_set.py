"""`solve_set`: solves tables for a range of loads that are close enough together (RAMSIS §6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from ray_slo.papers.ramsis.problem import Problem
from ray_slo.papers.ramsis.solver import solve
from ray_slo.papers.ramsis.table import PolicySet, Table

# The smallest relative distance of two loads, even if the accuracy falls steeply between them
# (above capacity).
_LEAST_STEP = 0.01


def solve_set(
    problem: Problem,
    rates: Sequence[float] = (),
    *,
    low: float | None = None,
    high: float | None = None,
    step_accuracy: float = 1.0,
    mapper: Callable[..., Iterable[Table]] = map,
    progress: Callable[[Table], None] | None = None,
    existing: PolicySet | None = None,
) -> PolicySet:
    """Solve tables at `rates`, and at loads from `low` to `high`. If the accuracies of two adjacent
    tables differ by more than `step_accuracy`, the load in the middle is solved too.

    Args:
        problem: the problem. Its rate is not used.
        rates: loads that are solved in any case, in requests per second.
        low, high: ends of the range. Without `rates`, the defaults are 5 % and 100 % of
            `problem.capacity`.
        step_accuracy: largest difference of the expected accuracies, in percentage points.
        mapper: `map` (solves here, one table after the other), the `map` of a
            `ProcessPoolExecutor`, or a function that maps problems to Ray tasks.
        progress: called with every solved table.
        existing: a set for the same profiles and options. Its tables are not solved again.

    Raises:
        ValueError: an argument is out of its range, or `existing` is for another problem.
    """
    if not step_accuracy > 0:
        raise ValueError(f"step_accuracy must be positive, got {step_accuracy}")
    if not rates and low is None and high is None:
        low, high = 0.05 * problem.capacity, problem.capacity
    ends = [rate for rate in (low, high) if rate is not None]
    if len(ends) == 1 or (len(ends) == 2 and not 0 < ends[0] < ends[1]):
        raise ValueError(f"low and high must be rates with 0 < low < high, got {low} and {high}")
    tables: dict[float, Table] = {}
    if existing is not None:
        wanted = (problem.profile_hash, problem.options())
        if (existing.profile_hash, dict(existing.options)) != wanted:
            raise ValueError("existing: solved for other profiles or options; leave it out")
        tables = {t.rate: t for t in existing}

    todo = sorted({float(rate) for rate in (*rates, *ends)} - tables.keys())
    while todo:
        for table in mapper(solve, [problem.at_rate(rate) for rate in todo]):
            tables[table.rate] = table
            if progress is not None:
                progress(table)
        todo = _between(tables, ends, step_accuracy) if ends else []
    return PolicySet(tuple(tables.values()))


def _between(
    tables: dict[float, Table], ends: Sequence[float], step_accuracy: float
) -> list[float]:
    """Return the rates to solve next. If two tables are far apart, there are several between
    them."""
    known = [rate for rate in sorted(tables) if ends[0] <= rate <= ends[1]]
    result: list[float] = []
    for a, b in pairwise(known):
        gap = abs(tables[a].expected_accuracy - tables[b].expected_accuracy)
        if gap > step_accuracy and b > a * (1 + 2 * _LEAST_STEP):
            pieces = min(int(np.ceil(gap / step_accuracy)), 4)
            result += np.linspace(a, b, pieces + 1)[1:-1].tolist()
    return result
