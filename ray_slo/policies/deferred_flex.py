"""Deferred batching that preempts for a gain: Symphony's Algorithm 1, SHEPHERD's preemption.

SHEPHERD asks whether a candidate is λ times as large as a running batch. Here the *predicted gain*
in requests decides. A due candidate goes before a batch of another model, or preempts one, if

    gain = rescued − lost − redone > 0

* rescued: additional requests of the candidate's model that are served if this worker serves them
  now and not only after the running batch. The workers that the measured load of other models
  leaves to the model serve as well;
* lost: requests of the running batch that cannot be served after these;
* redone: its other requests, times the share of their execution that is thrown away (0 if not
  begun).

Worked example (SHEPHERD §7.2, SLO 90 ms): one request of ResNet269 runs for 79 ms. After 5 ms come
1024 of ResNet18. In 90 ms the worker can serve 128, 128 and 102 of them, and 57 in the 16 ms that
would be left after the 79. The request would then be late: lost 1, redone 0, so the gain is
358 − 57 − 1. If the burst fits in both cases, no request is rescued, and nothing is preempted,
whatever the sizes.

Requests that only a preemption could save are refused when it is too late for that too. (`deferred`
refuses them as soon as the workers are taken.) A model has at most one preemption at a time, and a
batch is not preempted at the instant when it was sent. A decision on a pool of several models costs
O(due candidates · workers) while all workers are busy.

The batch to preempt is the one with the fewest requests per second of its remaining time.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace, nsmallest
from typing import Any, NamedTuple

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Preempt
from ray_slo.core.requests import BatchOutcome, Request, WorkerId
from ray_slo.policies.batching import LIVE_MARGIN
from ray_slo.policies.deferred import Deferred
from ray_slo.policies.shared.lanes import Lane, ModelState, Pool, Worker
from ray_slo.policies.shared.refusals import TOLERANCE_S


class _Batch(NamedTuple):
    lane: Lane
    requests: Sequence[Request]
    end_at: float
    done: float = 0.0  # share of its execution


class DeferredFlex(Deferred):
    """`Deferred` with preemption.

    Args:
        objective, gathering, target_batch_size, max_batch_size: as of `Deferred`.
        margin_ms, jitter_ms, headroom, rate_window_s: as of `Deferred`.

    Raises:
        ValueError: an argument out of its range.
    """

    preempts = True

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """The live arguments of `deferred` and `flex`."""
        return {
            **Deferred.live_arguments(shortest_slo_ms),
            "margin_ms": LIVE_MARGIN * shortest_slo_ms,
        }

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
        self._spare: dict[Lane, int] = {}  # workers that the other models' load leaves to a lane
        super().cluster_changed(now, cluster)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self._preempting.pop(worker, None)
        super().batch_finished(now, worker, outcome)

    def _set_targets(self) -> None:
        super()._set_targets()
        work = self._work()
        for pool in self._pools:
            total = sum(work.get(lane, 0.0) for lane in pool.lanes)
            for lane in pool.lanes:
                self._spare[lane] = max(1, int(pool.size - (total - work.get(lane, 0.0))))

    def _soonest(self, model: ModelState, now: float) -> float:
        return now + model.reach_1

    def _match(self, pool: Pool, now: float) -> None:
        super()._match(pool, now)
        if len(pool.lanes) > 1 and not pool.idle:
            for lane in self._due_lanes(pool):
                if lane.model not in self._preempting.values():
                    self._preempt(lane, now)

    def _dispatch(
        self, lane: Lane, worker: Worker, first: int, size: int, free_at: float, now: float
    ) -> None:
        queue = lane.model.queue
        self._sent[worker.id] = lane, [queue[i] for i in range(first, first + size)], now
        super()._dispatch(lane, worker, first, size, free_at, now)

    def _workers_of(self, pool: Pool) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.pool is pool]

    def _best(self, pool: Pool, now: float) -> tuple[Lane, int, int] | None:
        return super()._best(pool, now) or self._gaining(pool, now)

    def _gaining(self, pool: Pool, now: float) -> tuple[Lane, int, int] | None:
        """The due candidate to run before the one with the nearest `latest`, if one gains by it."""
        due = self._due_lanes(pool)
        if len(due) < 2:
            return None
        nearest = due[0]
        first, count = nearest.gather(now, now, self._target_of(nearest, now))
        if not count:
            return None
        batch = _Batch(
            nearest,
            [nearest.model.queue[i] for i in range(first, first + count)],
            end_at=now + nearest.reach[nearest.model.items(first, count) - 1],
        )
        others = [w.free_at for w in self._workers_of(pool) if w is not pool.idle[0][1]]
        gains = [(self._gain(lane, batch, others, now), lane) for lane in due[1:]]
        gain, best = max(gains, key=lambda offer: offer[0])
        first, count = best.gather(now, now, self._target_of(best, now))
        return (best, first, count) if gain > 0 and count else None

    def _preempt(self, lane: Lane, now: float) -> None:
        """Preempt the batch that serves least in its remaining time, if that gains."""
        workers = self._workers_of(lane.pool)
        victims = []
        for worker in workers:
            known = worker.id in self._sent  # otherwise another policy sent it
            if len(worker.flights) == 1 and known and worker.id not in self._preempting:
                victim, requests, sent_at = self._sent[worker.id]
                left_s = worker.free_at - now
                if left_s > 0 and sent_at < now and victim.model is not lane.model:
                    victims.append((len(requests) / left_s, worker.rank, worker))
        if not victims:
            return
        worker = min(victims)[2]
        victim, requests, _ = self._sent[worker.id]
        done = max(0.0, 1 - (worker.free_at - now) / worker.flights[0].latency_s)
        batch = _Batch(victim, requests, worker.free_at, done)
        gain = self._gain(lane, batch, [w.free_at for w in workers if w is not worker], now)
        if gain > 0:
            self._preempting[worker.id] = lane.model
            reason = f"gains {gain:.1f} for {lane.variant!r}"
            self._actions.append(Preempt(worker.id, reason, lane.variant, gain))

    def _gain(self, lane: Lane, batch: _Batch, others: Sequence[float], now: float) -> float:
        """Gain in requests if `lane`'s requests start instead of `batch`.

        Args:
            others: times when the pool's other workers become free, seconds.
        """
        others = nsmallest(self._spare[lane] - 1, others)
        served, over_at = _servable(lane, [now, *others], now)
        rescued = served - _servable(lane, [batch.end_at, *others], now)[0]
        size = sum(r.size for r in batch.requests)
        again_at = over_at + batch.lane.reach[size - 1] - TOLERANCE_S
        lost = sum(r.deadline < again_at for r in batch.requests)
        return rescued - lost - (len(batch.requests) - lost) * batch.done


def _servable(lane: Lane, free: list[float], now: float) -> tuple[int, float]:
    """Number of the lane's requests that these workers can serve, and the end of that."""
    free = [max(at, now) for at in free]
    heapify(free)
    queue, count, first = lane.model.queue, 0, 0
    while True:
        at = free[0]
        first = max(first, queue.position(at + lane.reach[0] - TOLERANCE_S))
        if first >= len(queue):
            return count, at
        if lane.model.sized:
            served, size = lane.fit_items(first, at, at)
            if not served:
                first += 1
                continue
        else:
            served = size = lane.fit(queue[first].deadline, at, at, len(queue) - first)
        heapreplace(free, at + lane.reach[size - 1])
        count += served
        first += served
