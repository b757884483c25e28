"""From what workers do to what a plan wants of them, without a gap: make before break. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ray_slo.planning.auto import Slot
from ray_slo.planning.brains.brain import Wanted, WorkerSays

Fits = Callable[[frozenset[str], str], bool]  # variants on a worker of a kind


class Steps:
    """Says what each worker does next on the way to its slot.

    A worker that alone serves a model goes on with it, the next variants loaded beside, until
    another one can serve that model. Where both do not fit in its memory, it first lets go of what
    others serve, too. Only where nobody can do anything else, a worker lets go of what it alone
    serves.

    Args:
        model_of: model by variant.
    """

    def __init__(self, model_of: Mapping[str, str]) -> None:
        self._model_of = model_of
        self._told: dict[str, frozenset[str]] = {}  # variants by worker, also while they load
        self._needed: set[str] = set()  # models of the plan
        self._kept: dict[str, frozenset[str]] = {}  # variants that workers have, and keep for now

    def has(self, says: WorkerSays) -> frozenset[str]:
        """What a worker has loaded, or was told to load."""
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
        """What workers do next.

        Args:
            placed: slots by worker; the others have none.
            serving: those of the workers that serve.
            breaks: nobody waits for another.
        """
        goals = {w: frozenset(slot.variants) for w, slot in placed.items()}
        self._needed = {self._model_of[v] for goal in goals.values() for v in goal}
        self._kept = {w: says.loaded for w, says in serving.items()}
        settled = all(goals[w] <= serving[w].loaded for w in placed if w in serving)
        answer: dict[str, Wanted] = {}
        for worker, says in workers.items():
            slot = placed.get(worker)
            if worker not in serving:
                its = Wanted((), tuple(sorted(says.loaded)))  # as it helps out, maybe
                answer[worker] = its if slot is None else Wanted(slot.parts, slot.variants)
            elif slot is not None:
                answer[worker] = self._step(says, slot, serving, goals, fits, breaks)
            elif settled or breaks:
                # It keeps what it has till it is needed, or Serve takes it away.
                answer[worker] = Wanted((), tuple(sorted(says.loaded)))
            else:  # others are not ready to do without it
                answer[worker] = Wanted(says.assigned, tuple(sorted(says.loaded)))
        waits = all(set(answer[w].keep) == says.loaded for w, says in workers.items())
        if waits and workers.keys() == serving.keys():  # one that starts may be of help soon
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
        """Let go of what others serve, too, until there is room, and load what there is room for.
        What it has in reserve goes first."""
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
        """Nobody can do anything without a gap: have one without a slot help out, else have the
        first that waits for room let go."""
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
        """Whether another worker can serve a model, and will keep what it serves it with."""
        return any(
            self._model_of[v] == model
            for worker, says in serving.items()
            if worker != without
            for v in goals.get(worker, frozenset()) & says.loaded
        )


def _let_go(says: WorkerSays, slot: Slot) -> Wanted:
    """Let go of all that is not in the slot."""
    parts = tuple(part for part in says.assigned if part.variant in slot.variants)
    return Wanted(parts, tuple(v for v in slot.variants if v in says.loaded))
