"""From what workers do to what a plan wants of them, without a gap: make before break. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ray_slo.planning.auto import Slot
from ray_slo.planning.brains.brain import Wanted, WorkerSays

Fits = Callable[[frozenset[str], str], bool]  # variants on a worker of a kind


class Steps:
    """Says what each worker does next on the way to its slot.

    A worker that alone serves a model goes on with it, the next variants loaded beside, until
    another one has what it takes to serve that model. Where both do not fit in its memory, it first
    lets go of what it will not need.

    Args:
        model_of: model by variant.
    """

    def __init__(self, model_of: Mapping[str, str]) -> None:
        self._model_of = model_of
        self._told: dict[str, frozenset[str]] = {}  # variants by worker, also while they load

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
        settled = all(goals[w] <= serving[w].loaded for w in placed if w in serving)
        answer: dict[str, Wanted] = {}
        for worker, says in workers.items():
            slot = placed.get(worker)
            if worker not in serving:
                answer[worker] = (
                    Wanted((), ()) if slot is None else Wanted(slot.parts, slot.variants)
                )
            elif slot is not None:
                answer[worker] = self._step(says, slot, serving, goals, fits, breaks)
            elif settled or breaks:
                # It keeps what it has till it is needed, or Serve takes it away.
                answer[worker] = Wanted((), tuple(sorted(says.loaded)))
            else:  # others are not ready to do without it
                answer[worker] = Wanted(says.assigned, tuple(sorted(says.loaded)))
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
        used = goal | {part.variant for part in says.assigned}
        if not fits(says.loaded | goal, says.kind) and not says.loaded <= used:
            # What it has in reserve goes first.
            return Wanted(says.assigned, tuple(sorted(says.loaded & used)))
        if not fits(says.loaded | goal, says.kind) and not says.loaded <= goal:
            parts = tuple(part for part in says.assigned if part.variant in goal)
            return Wanted(parts, tuple(v for v in slot.variants if v in says.loaded))
        now = {part.variant for part in says.assigned} & says.loaded
        leaving = {self._model_of[v] for v in now} - {self._model_of[v] for v in goal}
        if breaks or all(self._is_served(m, says.worker, serving, goals) for m in leaving):
            return Wanted(slot.parts, slot.variants)
        return Wanted(says.assigned, tuple(dict.fromkeys((*sorted(now), *slot.variants))))

    def _is_served(
        self,
        model: str,
        without: str,
        serving: Mapping[str, WorkerSays],
        goals: Mapping[str, frozenset[str]],
    ) -> bool:
        """Whether another worker has what it takes, and will keep it."""
        return any(
            self._model_of[v] == model
            for worker, says in serving.items()
            if worker != without
            for v in goals.get(worker, frozenset()) & says.loaded
        )
