"""The workers that a scheduler knows, from their heartbeats."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ray_slo.core import Assigned
from ray_slo.serve.messages import Heartbeat, WorkerMemory

logger = logging.getLogger(__name__)

_QUARANTINE_S = (0.5, 5.0)  # at first, and at most


class Quarantine:
    """Workers that could not be reached, because they drain or are being reconfigured. Each gets no
    batches for half a second, and then for twice as long each time until it is reached again."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}  # end of the time, and its length

    def add(self, worker: str, now: float) -> None:
        first_s, longest_s = _QUARANTINE_S
        _, last_s = self._until.get(worker, (0.0, first_s / 2))
        time_s = min(2 * last_s, longest_s)
        self._until[worker] = (now + time_s, time_s)

    def holds(self, worker: str, now: float) -> bool:
        return worker in self._until and now < self._until[worker][0]

    def reached(self, worker: str) -> None:
        self._until.pop(worker, None)

    def forget(self, before: float) -> None:
        """Forget workers whose time ended before `before`."""
        self._until = {w: until for w, until in self._until.items() if until[0] >= before}


@dataclass(slots=True)
class WorkerState:
    """The last report of a worker. Two reports are equal if they are equal for a policy.

    Attributes:
        largest: largest batch of each variant that the worker has memory for.
    """

    kind: str
    variants: frozenset[str]
    largest: Mapping[str, int]
    assigned: tuple[Assigned, ...]
    seen_at: float = field(compare=False)
    preempt_delay_s: float = field(compare=False)
    node: str = field(compare=False)
    memory: WorkerMemory = field(compare=False)

    @classmethod
    def of(cls, beat: Heartbeat, variants: frozenset[str], now: float) -> WorkerState:
        """Make the state from a heartbeat.

        Args:
            variants: the known variants. Others belong to an older release and are left out.
        """
        assigned = tuple(a for a in beat.assigned if a.variant in variants)
        largest = {v: beat.profiles[v].max_batch_size for v in variants}
        return cls(
            beat.kind,
            variants,
            largest,
            assigned,
            now,
            beat.preempt_delay_s,
            beat.node,
            beat.memory,
        )


class Roster(dict[str, WorkerState]):
    """The last report of every worker, by its id."""

    def heard(self, worker: str, state: WorkerState) -> bool:
        """Store a report. Return whether it is news for a policy."""
        before = self.get(worker)
        self[worker] = state
        if before is None:
            logger.info("worker %s (%s) joined with %s", worker, state.kind, set(state.variants))
        return state != before

    def largest(self, variant: str, kind: str) -> int | None:
        """Return the largest batch that all workers of a kind have memory for. None if there is no
        limit or no worker."""
        of_kind = (w.largest.get(variant) for w in self.values() if w.kind == kind)
        return min((size for size in of_kind if size is not None), default=None)

    def kind_of(self, worker: str) -> str:
        return self[worker].kind if worker in self else ""

    def node_of(self, worker: str) -> str:
        return self[worker].node if worker in self else ""

    def silent(self, before: float) -> list[str]:
        """Return the workers without a report since `before`."""
        return [name for name, state in self.items() if state.seen_at < before]

    def status(self, now: float, running: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """For `ray-slo status`.

        Args:
            running: batches in flight, by worker; see `Flight.told`.
        """
        return {
            name: {
                "kind": w.kind,
                "node": w.node,
                "variants": sorted(w.variants),
                "assigned": [asdict(a) for a in w.assigned],
                "batches_in_flight": len(running.get(name, ())),
                "running": running.get(name, []),
                "last_heartbeat_s": now - w.seen_at,
                "memory": w.memory.to_json(),
            }
            for name, w in self.items()
        }
