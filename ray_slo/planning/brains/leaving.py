"""Reduction of the number of workers without leaving a model unserved.

A planner sets the number of workers of a kind. Serve chooses the workers to stop: first those that
do not run yet, then those on nodes with few replicas, then the youngest. The planner does not know
which replicas are on a node. So it lowers a number only when every planned model keeps a worker,
*whichever* workers stop. It knows this when two conditions hold:

* the workers that are expected to stay have loaded the plan's variants;
* the workers that are expected to stop have loaded the models that only the others have (*spares*).

If there is no memory for spares, the planner relies on Serve to stop the youngest workers.

Pure: no clock.

Worked example: "a" has the detector, "b" and "c" have the recogniser, and two workers are enough.
If Serve stopped "a", no worker could detect. So "c" first loads the detector, too.

    >>> has = {"a": {"detect"}, "b": {"name"}, "c": {"name"}}
    >>> workers = {w: WorkerSays(w, "cpu", frozenset(models)) for w, models in has.items()}
    >>> leaving = Leaving({"detect": "detect", "name": "name"})
    >>> slots = [Slot("cpu", (), ("detect",)), Slot("cpu", (), ("name",))]
    >>> leaving.look({"cpu": 2}, workers, slots, lambda variants, kind: True)
    >>> leaving.spares, leaving.least
    ({'c': ('detect',)}, {'cpu': 3})
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ray_slo.planning.auto import Slot
from ray_slo.planning.brains.brain import Wanted, WorkerSays
from ray_slo.planning.brains.steps import Fits

Workers = Mapping[str, WorkerSays]


def staying(targets: Mapping[str, float], workers: Workers) -> dict[str, WorkerSays]:
    """Return the workers that Serve is expected to keep: the first of each kind. If none would
    stay, return all.

    Args:
        targets: wanted number of workers, by kind. All workers of other kinds stay.
        workers: reports of workers. Ready ones come first, and older ones before younger ones.
    """
    left, found = dict(targets), dict[str, WorkerSays]()
    for worker, says in workers.items():
        if left.get(says.kind, math.inf) > 0:
            found[worker] = says
            left[says.kind] = left.get(says.kind, math.inf) - 1
    return found or dict(workers)


class Leaving:
    """Decides how far the numbers of workers may fall now, and which variants must be loaded before
    they may fall further.

    Args:
        model_of: model by variant.

    Attributes:
        least: the smallest allowed number of workers, by kind.
        spares: variants that a worker loads in addition, by worker.
    """

    def __init__(self, model_of: Mapping[str, str]) -> None:
        self._model_of = model_of
        self.least: dict[str, int] = {}
        self.spares: dict[str, tuple[str, ...]] = {}

    def look(
        self, targets: Mapping[str, float], serving: Workers, slots: Iterable[Slot], fits: Fits
    ) -> None:
        """Compute `least` and `spares` from what the workers serve now.

        Args:
            targets: wanted number of workers by kind. The number of other kinds does not change.
            serving: ready workers, the oldest first.
            slots: slots of the plan: the planned work of each worker.
            fits: function that returns whether variants fit on a worker of a kind.
        """
        slots = tuple(slots)
        self.least, self.spares = {}, {}
        there = {says.kind: 0 for says in serving.values()}
        for says in serving.values():
            there[says.kind] += 1
        left = {kind: int(min(targets.get(kind, math.inf), n)) for kind, n in there.items()}
        if left == there:
            return
        stays = staying(targets, serving) if any(left.values()) else {}
        for model in dict.fromkeys(self._model_of[v] for slot in slots for v in slot.variants):
            if not self._add_spares(model, left, there, serving, stays, slots, fits):
                continue  # workers that should stay have the model, and the others have no memory
            safe = {
                kind: there[kind] - count + 1
                for kind in there
                if (
                    count := sum(self._serves(model, w) for w in serving.values() if w.kind == kind)
                )
            }
            if safe and not any(left[kind] >= n for kind, n in safe.items()):
                kind = min(safe, key=lambda kind: safe[kind] - left[kind])
                left[kind] = safe[kind]
        self.least = left

    def also(self, told: dict[str, Wanted]) -> dict[str, Wanted]:
        """Return the workers' orders with the spares added."""
        for worker in told.keys() & self.spares.keys():
            keep = dict.fromkeys((*told[worker].keep, *self.spares[worker]))
            told[worker] = told[worker]._replace(keep=tuple(keep))
        return told

    def _serves(self, model: str, says: WorkerSays) -> bool:
        return any(self._model_of.get(variant) == model for variant in says.loaded)

    def _add_spares(
        self,
        model: str,
        left: Mapping[str, int],
        there: Mapping[str, int],
        serving: Workers,
        stays: Workers,
        slots: tuple[Slot, ...],
        fits: Fits,
    ) -> bool:
        """Let workers that may stop load a model as a spare. Return whether the number of workers
        may fall only as far as a worker with the model is certain to remain."""
        mine = {
            slot.kind: (
                variant,
                sum(model in self._models(s) for s in slots if s.kind == slot.kind),
            )
            for slot in reversed(slots)
            for variant in slot.variants
            if self._model_of[variant] == model
        }
        if any(left.get(kind, 0) == there.get(kind, 0) for kind in mine):
            return True  # workers that stay will load it
        kind, (variant, planned) = next(iter(mine.items()))
        missing = there[kind] - left[kind] + 1 - min(planned, left[kind])
        going = {w: s for w, s in serving.items() if s.kind == kind and w not in stays}
        missing -= sum(self._serves(model, says) for says in going.values())
        for worker, says in going.items():
            if missing <= 0:
                break
            more = (*self.spares.get(worker, ()), variant)
            if not self._serves(model, says) and fits(says.loaded | frozenset(more), kind):
                self.spares[worker] = more
                missing -= 1
        return missing <= 0 or not any(self._serves(model, says) for says in stays.values())

    def _models(self, slot: Slot) -> set[str]:
        return {self._model_of[variant] for variant in slot.variants}
