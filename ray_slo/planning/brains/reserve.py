"""Fast variants that workers load for bursts, in addition to the variants that they serve."""

from __future__ import annotations

from collections.abc import Callable

from ray_slo.planning.brains.brain import Seen, Wanted, WorkerSays
from ray_slo.planning.brains.known import Known


def with_reserve(
    known: Known,
    seen: Seen,
    says: WorkerSays,
    order: Wanted,
    has: Callable[[WorkerSays], frozenset[str]],
) -> Wanted:
    """Return a worker's order with the fastest variant of each of its models added, if there is
    memory. A policy uses them if answers would be late otherwise. They are loaded after the plan's
    variants.

    Args:
        says: the worker's report.
        order: the worker's order.
        has: function that returns the plan's variants for a worker, now or next.
    """
    goal = has(says)
    profiles = known.measured(seen)
    keep = list(order.keep)
    for model in dict.fromkeys(known.model_of[part.variant] for part in order.assigned):
        names = [v.name for v in known.problem.model[model].variants]
        able = [name for name in names if (name, says.kind) in profiles]
        quickest = min(able, key=lambda v: profiles[v, says.kind].latency(1), default=None)
        if quickest is None or quickest in keep:
            continue
        fits = known.fit(seen, says.loaded.union(goal, keep, [quickest]), says.kind)
        if fits and (quickest in says.loaded or goal <= says.loaded):
            keep.append(quickest)
    return order._replace(keep=tuple(keep))
