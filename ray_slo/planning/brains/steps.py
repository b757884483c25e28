"""The steps from the workers' present work to the plan's, without a gap: make before break.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ray_slo.planning.auto import Slot
from ray_slo.planning.brains.brain import Wanted, WorkerSays

Fits = Callable[[frozenset[str], str], bool]  # variants on a worker of a kind


class Steps:
    """Chooses each worker's next step to its slot.

    A worker that alone serves a model continues with it, and loads its next variants beside, until
    another worker can serve that model. If both do not fit in its memory, it first removes variants
    that others serve, too. It removes a variant that it alone serves only if no other step is
    possible.

    Args:
        model_of: model by variant.
    """

    def __init__(self, model_of: Mapping[str, str]) -> None:
        self._model_of = model_of
        self._told: dict[str, frozenset[str]] = {}  # variants by worker, even while they load
        self._needed: set[str] = set()  # models of the plan
        self._kept: dict[str, frozenset[str]] = {}  # variants that workers have, and keep for now

    def has(self, says: WorkerSays) -> frozenset[str]:
        """Variants that a worker has loaded, or was told to load."""
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
        """The next orders for workers.

        Args:
            placed: slots by worker; other workers have none.
            serving: the workers that serve.
            breaks: whether no worker waits for another.
        """
        goals = {w: frozenset(slot.variants) for w, slot in placed.items()}
        self._needed = {self._model_of[v] for goal in goals.values() for v in goal}
        self._kept = {w: says.loaded for w, says in serving.items()}
        settled = all(goals[w] <= serving[w].loaded for w in placed if w in serving)
        answer: dict[str, Wanted] = {}
        for worker, says in workers.items():
            slot = placed.get(worker)
            if worker not in serving:
                its = Wanted((), tuple(sorted(says.loaded)))  # it may help others
                answer[worker] = its if slot is None else Wanted(slot.parts, slot.variants)
            elif slot is not None:
                answer[worker] = self._step(says, slot, serving, goals, fits, breaks)
            elif settled or breaks:
                # It keeps its variants until it is needed, or Serve stops it.
                answer[worker] = Wanted((), tuple(sorted(says.loaded)))
            else:  # others still need it
                answer[worker] = Wanted(says.assigned, tuple(sorted(says.loaded)))
        waits = all(set(answer[w].keep) == says.loaded for w, says in workers.items())
        if waits and workers.keys() == serving.keys():  # a starting worker may help soon
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
        now = {part.variant for part in says.assigned} & says.loaded
        leaving = {self._model_of[v] for v in now} - {self._model_of[v] for v in goal}
        leaving &= self._needed
        if breaks or all(self._is_served(m, says.worker, serving, goals) for m in leaving):
            self._kept[says.worker] = says.loaded & goal
            return Wanted(slot.parts, slot.variants)
        return Wanted(says.assigned, tuple(dict.fromkeys((*sorted(now), *slot.variants))))

    def _in_turn(self, says: WorkerSays, slot: Slot, fits: Fits) -> Wanted:
        """Remove variants that others serve, too, until there is room, and load what fits. The
        reserve is removed first."""
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
        """No step is possible without a gap. Let a worker without a slot help, or else let the
        first worker that waits for room remove its variants."""
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
        """Whether another worker can serve a model, and keeps the variant for it."""
        return any(
            self._model_of[v] == model
            for worker, says in serving.items()
            if worker != without
            for v in goals.get(worker, frozenset()) & says.loaded
        )


def _let_go(says: WorkerSays, slot: Slot) -> Wanted:
    """Remove everything that is not in the slot."""
    parts = tuple(part for part in says.assigned if part.variant in slot.variants)
    return Wanted(parts, tuple(v for v in slot.variants if v in says.loaded))
