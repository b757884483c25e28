"""Assignment of the slots of a plan to workers, with the fewest swaps.

A *swap* is a load of a variant on a worker that has other variants, which may lose their place.
Loading on an idle worker is cheaper. Keeping a loaded variant costs nothing. For each kind, this is
an assignment of slots to workers with the least cost.

Worked example: "a" and "b" have the small recogniser, and "c" is idle. The plan also wants the
large one on two workers.

    >>> from ray_slo.core.cluster import Assigned
    >>> from ray_slo.planning.auto.plan import Slot
    >>> slot = lambda *names: Slot("gpu", tuple(Assigned(n, 2) for n in names), names)
    >>> there = {"a": ("gpu", ["small"]), "b": ("gpu", ["small"]), "c": ("gpu", [])}
    >>> placed = place([slot("large"), slot("small", "large"), slot("small")], there)
    >>> {worker: slot.variants for worker, slot in placed.items()}
    {'a': ('small', 'large'), 'b': ('small',), 'c': ('large',)}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ray_slo.core.requests import WorkerId
from ray_slo.planning.auto.plan import Plan, Slot

_LOAD, _LATER = 1e-3, 1e-9
"""Costs in swaps: of a load on an idle worker, and of taking the later of two equal workers."""


def place(
    plan: Plan | Sequence[Slot], workers: Mapping[WorkerId, tuple[str, Collection[str]]]
) -> dict[WorkerId, Slot]:
    """Return the slot of each worker. Workers that the plan does not need are left out.

    Args:
        plan: the plan, or its slots.
        workers: kind of each worker, and the variants that it has loaded or is loading. Of equal
            workers the first are taken, so running workers should come before starting ones.

    Returns:
        Slots by worker, in the order of `workers`. If a kind has fewer workers than slots, the
        placed slots cover about the same share of the load of every variant.
    """
    slots = plan.slots if isinstance(plan, Plan) else tuple(plan)
    placed: dict[WorkerId, Slot] = {}
    for kind in dict.fromkeys(slot.kind for slot in slots):
        here = [(name, frozenset(loaded)) for name, (k, loaded) in workers.items() if k == kind]
        wanted = most_valuable([slot for slot in slots if slot.kind == kind], len(here))
        if wanted:
            placed.update(_assign(wanted, here))
    return {worker: placed[worker] for worker in workers if worker in placed}


def _assign(
    slots: Sequence[Slot], workers: Sequence[tuple[WorkerId, frozenset[str]]]
) -> dict[WorkerId, Slot]:
    # SciPy is imported late, because every replica imports this package.
    from scipy.optimize import linear_sum_assignment

    cost = np.array(
        [
            [
                len(set(slot.variants) - loaded) * (1.0 if loaded else _LOAD) + _LATER * i
                for i, (_, loaded) in enumerate(workers)
            ]
            for slot in slots
        ]
    )
    rows, columns = linear_sum_assignment(cost)
    return {workers[j][0]: slots[i] for i, j in zip(rows.tolist(), columns.tolist(), strict=True)}


def most_valuable(slots: Sequence[Slot], count: int) -> list[Slot]:
    """Return at most `count` slots. The next one is always for the variant with the smallest
    covered share of its load, because a request may need all variants."""
    if len(slots) <= count:
        return list(slots)
    load: dict[str, float] = {}
    for slot in slots:
        for part in slot.parts:
            load[part.variant] = load.get(part.variant, 0.0) + (part.load or 0.0)
    covered = dict.fromkeys(load, 0.0)
    left, chosen = list(slots), list[Slot]()
    while len(chosen) < count:
        able = {part.variant for slot in left for part in slot.parts}
        missing = min((v for v in covered if v in able), key=lambda v: covered[v])
        best = max(left, key=lambda slot: _load_of(slot, missing))
        left.remove(best)
        chosen.append(best)
        for part in best.parts:
            covered[part.variant] += (part.load or 0.0) / (load[part.variant] or 1.0)
    return chosen


def _load_of(slot: Slot, variant: str) -> float:
    return sum(part.load or 0.0 for part in slot.parts if part.variant == variant)
