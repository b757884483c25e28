"""CLKWRK, as in Kairos §7: Clockwork's central controller over unlike instances.

Each instance has its own queue, first come, first served. The controller knows when every queue
will be empty, and how long every request takes on every instance. A new request joins the queue
that finishes it first. So it is in time, unless no instance can serve it in time. The controller
does not consider which instance suits the request best.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from benchmarks.peers.ribbon import SizedPeer
from ray_slo.core import Request, WorkerId
from ray_slo.core.decisions import Action


class Clkwrk(SizedPeer):
    """Every new request joins the queue that finishes it first."""

    def __init__(self, base: str | None = None) -> None:
        super().__init__(base)
        self._queues: dict[WorkerId, deque[Request]] = {}
        self._empty_at: dict[WorkerId, float] = {}
        self._homeless: list[Request] = []

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for r in requests:
            best, best_end = None, float("inf")
            for w in self._workers:
                end = max(now, self._empty_at[w]) + self._latency(r, w)
                if end < best_end:
                    best, best_end = w, end
            if best is None:
                (self._refused if self._workers else self._homeless).append(r)
            else:
                self._queues[best].append(r)
                self._empty_at[best] = best_end

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        gone = {r.id for r in requests}
        for w, queue in self._queues.items():
            self._queues[w] = deque(r for r in queue if r.id not in gone)
        self._homeless = [r for r in self._homeless if r.id not in gone]

    def _changed(self, now: float) -> None:
        waiting = self._homeless + [r for queue in self._queues.values() for r in queue]
        self._homeless = []
        self._queues = {w: deque() for w in self._workers}
        self._empty_at = dict(self._free_at)
        self.requests_arrived(now, sorted(waiting, key=lambda r: (r.arrival, r.id)))

    def _act(self, now: float) -> list[Action]:
        return [
            self._dispatch(now, queue.popleft(), w)
            for w, queue in self._queues.items()
            if queue and w not in self._running
        ]
