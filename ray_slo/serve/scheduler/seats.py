"""Gives a batch to the free worker that is nearest to its payloads. It does not use Ray.

A policy does not know on which node a worker is. It dispatches to *seats*, and this module decides
which worker has which seat. Two free workers may exchange seats if they are equal for a policy:
they have the same kind, loaded variants and assignment. So the policy still makes every decision.
Its events and decisions, also in the decision log, do not depend on the workers' nodes. A seat has
the name of the worker that took it first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from ray_slo.core import (
    BatchOutcome,
    Cluster,
    Decision,
    Dispatch,
    Policy,
    Preempt,
    Request,
    WorkerId,
)
from ray_slo.core.policy import PolicyWrapper


class NearPayloads(PolicyWrapper):
    """A policy whose batches run near their payloads, if that makes no other difference.

    Args:
        node_of_worker, node_of_request: functions that return the name of a node, or "" if it is
            unknown.
    """

    def __init__(
        self,
        policy: Policy,
        node_of_worker: Callable[[WorkerId], str],
        node_of_request: Callable[[Request], str],
    ) -> None:
        super().__init__(policy)
        self._node_of_worker = node_of_worker
        self._node_of_request = node_of_request
        self._worker: dict[WorkerId, WorkerId] = {}  # worker by seat
        self._seat: dict[WorkerId, WorkerId] = {}  # seat by worker
        self._batches: dict[WorkerId, int] = {}  # number of unfinished batches by worker
        self._place: dict[WorkerId, tuple[Hashable, str]] = {}  # (class of equals, node) by worker
        self._free: dict[tuple[Hashable, str], dict[WorkerId, None]] = {}  # free workers by place
        self._spread = False  # whether the workers are on several nodes

    def optional_event(self, name: str, *args: Any) -> None:
        if name != "preempt_failed":
            return super().optional_event(name, *args)
        now, worker, batch_id = args
        if worker in self._seat:  # otherwise it left with its batches
            super().optional_event(name, now, self._seat[worker], batch_id)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        left = self._batches[worker] = max(self._batches.get(worker, 0) - 1, 0)
        if not left:
            self._free.setdefault(self._place[worker], {})[worker] = None
        self.policy.batch_finished(now, self._seat[worker], outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        workers = cluster.workers
        self._worker = {seat: w for seat, w in self._worker.items() if w in workers}
        self._seat = {w: seat for seat, w in self._worker.items()}
        self._batches = {w: n for w, n in self._batches.items() if w in workers}
        for worker in workers:
            if worker not in self._seat:
                seat = worker
                while seat in self._worker:  # the worker is back, and another one has its seat
                    seat = self._worker[seat]
                self._worker[seat], self._seat[worker] = worker, seat
        self._place = {
            name: ((w.hardware, w.loaded, w.assigned), self._node_of_worker(name))
            for name, w in workers.items()
        }
        self._spread = len({node for _, node in self._place.values()}) > 1
        self._free = {}
        for worker, place in self._place.items():
            if not self._batches.get(worker):
                self._free.setdefault(place, {})[worker] = None
        seats = {seat: replace(workers[w], id=seat) for seat, w in self._worker.items()}
        self.policy.cluster_changed(now, replace(cluster, workers=seats))

    def decide(self, now: float) -> Decision:
        decision = self.policy.decide(now)
        if not decision.actions:
            return decision
        return replace(decision, actions=[self._seated(action) for action in decision.actions])

    def _seated(self, action: Any) -> Any:
        if isinstance(action, Preempt):
            return replace(action, worker=self._worker.get(action.worker, action.worker))
        if not isinstance(action, Dispatch) or action.worker not in self._worker:
            return action
        worker = self._worker[action.worker]
        if not self._batches.get(worker):
            nearer = self._nearer(worker, action.requests) if self._spread else None
            if nearer is not None:
                self._change_seats(worker, nearer)
                worker = nearer
            self._free[self._place[worker]].pop(worker, None)
        self._batches[worker] = self._batches.get(worker, 0) + 1
        return action if worker == action.worker else replace(action, worker=worker)

    def _nearer(self, worker: WorkerId, requests: Sequence[Request]) -> WorkerId | None:
        """Return a free worker that is equal to this one, on a node with more of the payloads."""
        alike, here = self._place[worker]
        payloads: dict[str, int] = {}
        for request in requests:
            node = self._node_of_request(request)
            payloads[node] = payloads.get(node, 0) + 1
        best, most = None, payloads.get(here, 0)
        for node, count in payloads.items():
            if count > most and (free := self._free.get((alike, node))):
                best, most = next(iter(free)), count
        return best

    def _change_seats(self, a: WorkerId, b: WorkerId) -> None:
        seats = self._seat
        seats[a], seats[b] = seats[b], seats[a]
        self._worker[seats[a]], self._worker[seats[b]] = a, b
