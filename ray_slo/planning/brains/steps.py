"""The steps from the workers' present work to the planned work. Every model stays served: a worker
loads its next variant before it unloads the last one (make before break). Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ray_slo.planning.auto import Slot
from ray_slo.planning.brains.brain import Wanted, WorkerSays

Fits = Callable[[frozenset[str], str], bool]  # do these variants fit on a worker of this kind?


class Steps:
    """Chooses each worker's next step to its slot, which is its work in the plan.

    A worker that alone serves a model continues to serve it until another worker can. Meanwhile it
    loads its next variants beside the present ones. If both do not fit in its memory, it first
    unloads variants of models that others serve too. It unloads a model that it alone serves only
    if no other step is possible.

    Args:
        model_of: model by variant.
    """

    def __init__(self, model_of: Mapping[str, str]) -> None:
        self._model_of = model_of
        self._told: dict[str, frozenset[str]] = {}  # planned variants by worker, loaded or not
        self._needed: set[str] = set()  # models in the plan
        self._kept: dict[str, frozenset[str]] = {}  # loaded variants that stay for now, by worker

    def has(self, says: WorkerSays) -> frozenset[str]:
        """Return the variants that a worker was told to load, or that it has loaded."""
        told = self._told.get(says.worker)
        if told is not None:
            return told
        serves = frozenset(part.variant for part in says.assigned)
        return serves or says.loaded & self._model_of.keys()

    def towards(
        self,
        placed: Mapping[str, Slot],
        workers: Mapping[str, WorkerSays],
        serving: Mapping[str, WorkerSays],
        fits: Fits,
        breaks: bool,
    ) -> dict[str, Wanted]:
        """Return the next orders for workers.

        Args:
            placed: slot of each worker that has one.
            workers: reports of all workers.
            serving: reports of the workers that serve.
            fits: function that returns whether variants fit on a worker of a kind.
            breaks: whether workers switch at once. A model may then be unserved for a moment.
        """
        goals = {w: frozenset(slot.variants) for w, slot in placed.items()}
        self._needed = {self._model_of[v] for goal in goals.values() for v in goal}
        self._kept = {w: says.loaded for w, says in serving.items()}
        settled = all(goals[w] <= serving[w].loaded for w in placed if w in serving)
        answer: dict[str, Wanted] = {}
        for worker, says in workers.items():
            slot = placed.get(worker)
            if worker not in serving:
                its = Wanted((), tuple(sorted(says.loaded)))  # it may serve a model meanwhile
                answer[worker] = its if slot is None else Wanted(slot.parts, slot.variants)
            elif slot is not None:
                answer[worker] = self._step(says, slot, serving, goals, fits, breaks)
            elif settled or breaks:
                # An idle worker keeps its variants until it is needed, or Serve stops it.
                answer[worker] = Wanted((), tuple(sorted(says.loaded)))
            else:  # other workers are not ready to replace it yet
                answer[worker] = Wanted(says.assigned, tuple(sorted(says.loaded)))
        waits = all(set(answer[w].keep) == says.loaded for w, says in workers.items())
        # If a worker is starting, wait for it: it may make a step possible.
        if waits and workers.keys() == serving.keys():
            self._break(answer, workers, placed, fits)
        self._told = goals
        return answer

    def _step(
        self,
        says: WorkerSays,
        slot: Slot,
        serving: Mapping[str, WorkerSays],
        goals: Mapping[str, frozenset[str]],
        fits: Fits,
        breaks: bool,
    ) -> Wanted:
        goal = frozenset(slot.variants)
        if not fits(says.loaded | goal, says.kind) and not says.loaded <= goal:
            return _let_go(says, slot) if breaks else self._in_turn(says, slot, fits)
        # Without an assignment, it serves all that it has loaded.
        now = ({part.variant for part in says.assigned} or says.loaded) & says.loaded
        leaving = {self._model_of[v] for v in now} - {self._model_of[v] for v in goal}
        leaving &= self._needed
        if breaks or all(self._is_served(m, says.worker, serving, goals) for m in leaving):
            self._kept[says.worker] = says.loaded & goal
            return Wanted(slot.parts, slot.variants)
        return Wanted(says.assigned, tuple(dict.fromkeys((*sorted(now), *slot.variants))))

    def _in_turn(self, says: WorkerSays, slot: Slot, fits: Fits) -> Wanted:
        """Unload variants of models that others serve too, until there is memory, and load what
        fits. Variants that the worker does not serve (the reserve) are unloaded first."""
        goal, keep = frozenset(slot.variants), says.loaded
        assigned = {part.variant for part in says.assigned}
        for variant in sorted(says.loaded - goal, key=lambda v: (v in assigned, v)):
            if fits(keep | goal, says.kind):
                break
            others = [kept for w, kept in self._kept.items() if w != says.worker]
            rest = frozenset().union(keep - {variant}, *others)
            model = self._model_of.get(variant)
            if model not in self._needed or any(self._model_of.get(v) == model for v in rest):
                keep -= {variant}
        self._kept[says.worker] = keep
        told = dict.fromkeys(sorted(keep))
        for variant in slot.variants:
            if fits(frozenset((*told, variant)), says.kind):
                told[variant] = None
        return Wanted(tuple(part for part in says.assigned if part.variant in keep), tuple(told))

    def _break(
        self,
        answer: dict[str, Wanted],
        workers: Mapping[str, WorkerSays],
        placed: Mapping[str, Slot],
        fits: Fits,
    ) -> None:
        """Make a step when every worker waits for memory. If a worker without a slot has memory for
        a missing variant, it loads the variant. Otherwise the first worker that waits unloads its
        old variants, and their models may be unserved for a moment."""
        blocked = [
            (workers[worker], slot)
            for worker, slot in placed.items()
            if not (goal := frozenset(slot.variants)) <= workers[worker].loaded
            and not fits(workers[worker].loaded | goal, workers[worker].kind)
        ]
        for says, slot in blocked:
            for variant in slot.variants:
                if variant in says.loaded:
                    continue
                for worker in [w for w in workers if w not in placed]:
                    keep, kind = answer[worker].keep, workers[worker].kind
                    more = frozenset((*keep, variant))
                    if kind == says.kind and variant not in keep and fits(more, kind):
                        answer[worker] = answer[worker]._replace(keep=tuple(sorted(more)))
                        return
        if blocked:
            answer[blocked[0][0].worker] = _let_go(*blocked[0])

    def _is_served(
        self,
        model: str,
        without: str,
        serving: Mapping[str, WorkerSays],
        goals: Mapping[str, frozenset[str]],
    ) -> bool:
        """Return whether another worker can serve a model now, and keeps the variant for it."""
        return any(
            self._model_of[v] == model
            for worker, says in serving.items()
            if worker != without
            for v in goals.get(worker, frozenset()) & says.loaded
        )


def _let_go(says: WorkerSays, slot: Slot) -> Wanted:
    """Return the order to unload all variants that are not in the slot."""
    parts = tuple(part for part in says.assigned if part.variant in slot.variants)
    return Wanted(parts, tuple(v for v in slot.variants if v in says.loaded))
