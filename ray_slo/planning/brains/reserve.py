"""Fast variants that workers load for bursts, in addition to the variants that they serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ray_slo.planning.brains.brain import Seen, Wanted, WorkerSays
from ray_slo.planning.brains.known import Known


def with_reserve(
    known: Known,
    seen: Seen,
    told: Mapping[str, Wanted],
    has: Callable[[WorkerSays], frozenset[str]],
) -> dict[str, Wanted]:
    """Return the workers' orders with the fastest variant of each of their models added, if there
    is memory. A policy uses them if answers would be late otherwise. They are loaded after the
    plan's variants.

    Args:
        told: the workers' orders.
        has: function that returns the plan's variants for a worker, now or next.
    """
    least_s = {key: profile.latency(1) for key, profile in known.usable(seen).items()}
    found = {}
    for worker, order in told.items():
        says, keep = seen.workers[worker], list(order.keep)
        goal = has(says)
        for model in dict.fromkeys(known.model_of[part.variant] for part in order.assigned):
            able = [v.name for v in known.problem.model[model].variants]
            able = [name for name in able if (name, says.kind) in least_s]
            quickest = min(able, key=lambda v: least_s[v, says.kind], default=None)
            if quickest is None or quickest in keep:
                continue
            fits = known.fit(seen, says.loaded.union(goal, keep, [quickest]), says.kind)
            if fits and (quickest in says.loaded or goal <= says.loaded):
                keep.append(quickest)
        found[worker] = order._replace(keep=tuple(keep))
    return found
