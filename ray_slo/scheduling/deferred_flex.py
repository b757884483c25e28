"""Deferred batching that preempts where it gains: Symphony's Algorithm 1, SHEPHERD's preemption.

SHEPHERD asks whether a candidate is λ times as large as a running batch. Here the *predicted gain*
in requests decides. A due candidate goes before a batch of another model, or preempts one, if

    gain = rescued − lost − redone > 0

* rescued: how many more requests of the candidate's model can be served by this worker from now on
  than from the end of the batch on;
* lost: requests of the batch that cannot be served after the candidate;
* redone: its others, times the share of their execution that is thrown away (0 if not begun).

Worked example (SHEPHERD §7.2, SLO 90 ms): one request of ResNet269 runs for 79 ms. After 5 ms come
1024 of ResNet18. In 90 ms the worker can serve 128, 128 and 102 of them, and 57 in the 16 ms that
would be left after the 79. The request would then be late: lost 1, redone 0, so the gain is
358 − 57 − 1. Where the burst fits in either way, nobody is rescued and nothing is preempted,
whatever the sizes.

Requests that only a preemption could save are refused when that is too late too, not when the
workers are taken, as `deferred` does. One preemption at a time is under way for a model, and a
batch is not preempted at the instant at which it was sent. A decision on a pool of several models
costs O(due candidates · workers) while all workers are busy.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Preempt
from ray_slo.core.requests import BatchOutcome, Request, WorkerId
from ray_slo.scheduling.batching import TOLERANCE_S, Lane, ModelState, Pool, _Worker
from ray_slo.scheduling.deferred import Deferred


class DeferredFlex(Deferred):
    """`Deferred` with preemption; takes the same arguments."""

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        # The batch that was sent last to a worker, and when; for which model one is preempted.
        sent, preempting = getattr(self, "_sent", {}), getattr(self, "_preempting", {})
        workers = cluster.workers
        self._sent: dict[WorkerId, tuple[Lane, Sequence[Request], float]] = {
            w: batch for w, batch in sent.items() if w in workers
        }
        self._preempting: dict[WorkerId, ModelState] = {
            w: model for w, model in preempting.items() if w in workers
        }
        super().cluster_changed(now, cluster)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self._preempting.pop(worker, None)
        super().batch_finished(now, worker, outcome)

    def _soonest(self, model: ModelState, now: float) -> float:
        return now + model.reach_1

    def _match(self, pool: Pool, now: float) -> None:
        several = len(pool.lanes) > 1
        while several and pool.idle and (winner := self._winner(pool, now)):
            lane, first, size = winner
            self._dispatch(lane, pool.idle[0][1], first, size, now, now)
        super()._match(pool, now)
        if several and not pool.idle:
            for lane in self._due_lanes(pool):
                if lane.model not in self._preempting.values():
                    self._preempt(lane, now)

    def _dispatch(
        self, lane: Lane, worker: _Worker, first: int, size: int, free_at: float, now: float
    ) -> None:
        queue = lane.model.queue
        requests = [queue[i] for i in range(first, first + size)]
        self._sent[worker.id] = lane, requests, now
        super()._dispatch(lane, worker, first, size, free_at, now)

    def _due_lanes(self, pool: Pool) -> list[Lane]:
        """By `latest`, the nearest first."""
        due = {lane: latest for latest, _, lane in pool.ready if lane.ready}
        due = {lane: latest for lane, latest in due.items() if lane.latest == latest}
        return sorted(due, key=lambda lane: (lane.latest, lane.order))

    def _winner(self, pool: Pool, now: float) -> tuple[Lane, int, int] | None:
        """The due candidate to run before the one with the nearest `latest`, if one gains by it."""
        due = self._due_lanes(pool)
        if len(due) < 2:
            return None
        first, size = due[0].gather(now, now, due[0].target)
        if not size:
            return None
        batch = [due[0].model.queue[i] for i in range(first, first + size)]
        end_at = now + due[0].reach[size - 1]
        gain, best = max(
            ((self._gain(lane, now, due[0], batch, end_at, 0.0), lane) for lane in due[1:]),
            key=lambda offer: offer[0],
        )
        if gain <= 0:
            return None
        return best, *best.gather(now, now, best.target)

    def _preempt(self, lane: Lane, now: float) -> None:
        best: tuple[float, WorkerId] = (0.0, "")
        for worker in self._workers.values():
            if worker.pool is not lane.pool or len(worker.flights) != 1:
                continue
            victim, requests, sent_at = self._sent[worker.id]
            if worker.id in self._preempting or not sent_at < now < worker.free_at:
                continue
            flight = worker.flights[0]
            done = max(0.0, 1 - (worker.free_at - now) / flight.latency_s)
            gain = self._gain(lane, now, victim, requests, worker.free_at, done)
            if gain > best[0]:
                best = gain, worker.id
        if best[1]:
            self._preempting[best[1]] = lane.model
            self._actions.append(Preempt(best[1], f"gains {best[0]:.1f} for {lane.variant!r}"))

    def _gain(
        self,
        lane: Lane,
        now: float,
        victim: Lane,
        requests: Sequence[Request],
        end_at: float,
        done: float,
    ) -> float:
        """Of `lane` over a batch of `victim` that ends at `end_at`, `done` of it executed."""
        if victim.model is lane.model:
            return 0.0
        served, over_at = _servable(lane, now)
        rescued = served - _servable(lane, end_at)[0]
        again_at = over_at + victim.reach[len(requests) - 1] - TOLERANCE_S
        lost = sum(r.deadline < again_at for r in requests)
        return rescued - lost - (len(requests) - lost) * done


def _servable(lane: Lane, free_at: float) -> tuple[int, float]:
    """How many of the lane's requests one worker can serve that is free then, and until when."""
    queue, count, at = lane.model.queue, 0, 0
    while True:
        at = max(at, queue.position(free_at + lane.reach[0] - TOLERANCE_S))
        if at >= len(queue):
            return count, free_at
        size = lane._fit(queue[at].deadline, free_at, free_at, len(queue) - at)
        count += size
        at += size
        free_at += lane.reach[size - 1]
