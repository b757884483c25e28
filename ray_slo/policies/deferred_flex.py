"""Deferred batching that preempts where it gains: Symphony's Algorithm 1, SHEPHERD's preemption.

SHEPHERD asks whether a candidate is λ times as large as a running batch. Here the *predicted gain*
in requests decides. A due candidate goes before a batch of another model, or preempts one, if

    gain = rescued − lost − redone > 0

* rescued: how many more requests of the candidate's model are served if this worker serves them
  from now on instead of from the end of the batch on, beside the workers that the measured load of
  the other models leaves it;
* lost: requests of the batch that cannot be served after these;
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

The batch to preempt is the one with the fewest requests per second of what is left of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace, nsmallest
from typing import Any, NamedTuple

from ray_slo.core.arguments import Count, NonNegative, Positive, Share, checked
from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Preempt
from ray_slo.core.requests import BatchOutcome, Request, WorkerId
from ray_slo.policies.batching import LIVE_MARGIN
from ray_slo.policies.deferred import Deferred, Gathering, Objective
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
        preemption: False for the order of candidates alone: where the load exceeds the workers, a
            free one takes first what gains most, and nothing is stopped.
        objective, gathering, target_batch_size, max_batch_size, margin_ms, jitter_ms, headroom,
            rate_window_s: as of `Deferred`.

    Raises:
        ValueError: an argument out of its range.
    """

    preempts = True

    @checked
    def __init__(
        self,
        objective: Objective = "responsive",
        gathering: Gathering = "drop_head",
        *,
        preemption: bool = True,
        target_batch_size: Count | None = None,
        max_batch_size: Count | None = None,
        margin_ms: NonNegative = 0.0,
        jitter_ms: NonNegative = 0.0,
        headroom: Share = 0.95,
        rate_window_s: Positive | None = None,
    ) -> None:
        super().__init__(
            objective,
            gathering,
            target_batch_size=target_batch_size,
            max_batch_size=max_batch_size,
            margin_ms=margin_ms,
            jitter_ms=jitter_ms,
            headroom=headroom,
            rate_window_s=rate_window_s,
        )
        self.preempts = preemption

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """As for both that it is made of."""
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
            total = sum(work[lane] for lane in pool.lanes)
            for lane in pool.lanes:
                self._spare[lane] = max(1, int(pool.size - (total - work[lane])))

    def _soonest(self, model: ModelState, now: float) -> float:
        return now + model.reach_1 if self.preempts else super()._soonest(model, now)

    def _match(self, pool: Pool, now: float) -> None:
        several = len(pool.lanes) > 1
        # Below capacity the nearest `latest` first loses nobody.
        chooses = several and (self.preempts or pool.load >= 1)
        while chooses and pool.idle and (winner := self._winner(pool, now)):
            lane, first, size = winner
            self._dispatch(lane, pool.idle[0][1], first, size, now, now)
        super()._match(pool, now)
        if self.preempts and several and not pool.idle:
            for lane in self._due_lanes(pool):
                if lane.model not in self._preempting.values():
                    self._preempt(lane, now)

    def _dispatch(
        self, lane: Lane, worker: Worker, first: int, size: int, free_at: float, now: float
    ) -> None:
        queue = lane.model.queue
        requests = [queue[i] for i in range(first, first + size)]
        self._sent[worker.id] = lane, requests, now
        super()._dispatch(lane, worker, first, size, free_at, now)

    def _due_lanes(self, pool: Pool) -> list[Lane]:
        """By `latest`, the nearest first."""
        due = {lane: None for latest, _, lane in pool.ready if lane.ready and lane.latest == latest}
        return sorted(due, key=lambda lane: (lane.latest, lane.order))

    def _workers_of(self, pool: Pool) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.pool is pool]

    def _winner(self, pool: Pool, now: float) -> tuple[Lane, int, int] | None:
        """The due candidate to run before the one with the nearest `latest`, if one gains by it."""
        due = self._due_lanes(pool)
        if len(due) < 2:
            return None
        nearest = due[0]
        first, size = nearest.gather(now, now, nearest.target)
        if not size:
            return None
        batch = _Batch(
            nearest,
            [nearest.model.queue[i] for i in range(first, first + size)],
            end_at=now + nearest.reach[nearest.model.items(first, size) - 1],
        )
        others = [w.free_at for w in self._workers_of(pool) if w is not pool.idle[0][1]]
        gains = [(self._gain(lane, batch, others, now), lane) for lane in due[1:]]
        gain, best = max(gains, key=lambda offer: offer[0])
        first, size = best.gather(now, now, best.target)
        return (best, first, size) if gain > 0 and size else None

    def _preempt(self, lane: Lane, now: float) -> None:
        """Preempt the batch that yields least in the time that it still takes, if that gains."""
        workers = self._workers_of(lane.pool)
        victims = []
        for worker in workers:
            known = worker.id in self._sent  # else another policy sent it
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
        """Of starting `lane`'s requests instead of `batch`, in requests.

        Args:
            others: when the pool's other workers fall free.
        """
        others = nsmallest(self._spare[lane] - 1, others)
        served, over_at = _servable(lane, [now, *others], now)
        rescued = served - _servable(lane, [batch.end_at, *others], now)[0]
        size = sum(r.size for r in batch.requests)
        again_at = over_at + batch.lane.reach[size - 1] - TOLERANCE_S
        lost = sum(r.deadline < again_at for r in batch.requests)
        return rescued - lost - (len(batch.requests) - lost) * batch.done


def _servable(lane: Lane, free: list[float], now: float) -> tuple[int, float]:
    """How many of the lane's requests workers that fall free then can serve, and until when."""
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
