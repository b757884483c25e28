"""Fewer workers, and no model without one.

A planner says how many workers of a kind there are to be. Serve chooses which of them it stops:
those that do not run yet, then those on nodes with few replicas, then the youngest. What is on a
node, the planner does not know. So a number falls only when every model that the plan serves has a
worker *whichever* go:

* the workers that stay, as expected, have loaded what the plan wants of them;
* those that go, as expected, have loaded what only those have that stay (*spares*), where there is
  memory for it. Where there is none, the youngest are taken to go.

Pure: no clock.

Worked example: "a" has the detector, "b" and "c" the recogniser, and two are enough. Should Serve
stop "a", nobody would detect; so first "c" loads the detector, too.

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
    """Workers that Serve leaves, as expected: the first of each kind. All, where none would be.

    Args:
        targets: workers by kind; of other kinds all stay.
        workers: those that are ready first, the oldest first.
    """
    left, found = dict(targets), dict[str, WorkerSays]()
    for worker, says in workers.items():
        if left.get(says.kind, math.inf) > 0:
            found[worker] = says
            left[says.kind] = left.get(says.kind, math.inf) - 1
    return found or dict(workers)


class Leaving:
    """How far numbers of workers may fall now, and what must be loaded before they fall further.

    Args:
        model_of: model by variant.

    Attributes:
        least: workers that there must be, by kind.
        spares: variants that a worker is to load besides, by worker.
    """

    def __init__(self, model_of: Mapping[str, str]) -> None:
        self._model_of = model_of
        self.least: dict[str, int] = {}
        self.spares: dict[str, tuple[str, ...]] = {}

    def look(
        self, targets: Mapping[str, float], serving: Workers, slots: Iterable[Slot], fits: Fits
    ) -> None:
        """See who serves what.

        Args:
            targets: workers by kind that there are to be; of other kinds as many as there are.
            serving: workers that are ready, the oldest first.
            slots: of the plan.
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
                continue  # as expected, those that stay have it, and there is no room elsewhere
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
        """What workers are told, with the spares."""
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
        """Have workers that go load a model beside those that stay; whether numbers must wait for
        somebody to load it."""
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
            return True  # it will be loaded where nobody goes
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
