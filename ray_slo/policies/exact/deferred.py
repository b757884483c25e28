"""Symphony's Algorithm 1 as it is printed, with the delay of Appendix D: `deferred`, `exact`.

It has none of the additions of `Deferred`: it measures no load, learns no wait for workers and
keeps no headroom. It waits until frontrun at any load. It also differs in these points:

* only UPDATECANDIDATE changes a candidate. If its `latest` has passed, it is no longer valid (line
  22). Then nothing is sent until a request comes or the first deadline passes, although a smaller
  batch could still be in time;
* a request that no worker can serve in time leaves the queue at the next update: at an arrival, or
  else at its deadline (`drop_timer`, Appendix D).

The paper leaves three points open. Here a batch of the profile's largest size is due at once, as
ℓ(|B| + 1) is not known. If several candidates become due at one instant, the one with the nearest
`latest` goes first. If no worker is idle, a batch is sent `delay(b)` before the first worker
becomes idle (`on_gpu_timer`).
"""

from __future__ import annotations

import math
from heapq import heappop
from typing import Any, ClassVar, Literal

from ray_slo.core.arguments import Count, NonNegative, checked
from ray_slo.policies.batching import LIVE_JITTER, BatchingPolicy
from ray_slo.policies.shared.lanes import Lane, ModelState, Pool, Worker
from ray_slo.policies.shared.refusals import TOLERANCE_S


class ExactDeferred(BatchingPolicy):
    """Algorithm 1 (Symphony §3.2).

    Args:
        gathering: GETBATCH: `prefix`, the longest that meets the first deadline, or `drop_head`,
            which gives heads up until `target_batch_size` requests, or all behind, fit (§3.2 names
            both).
        target_batch_size: of `drop_head`, which needs it.
        max_batch_size: upper bound beside the profile's; a full batch is due at once.
        margin_ms: kept between a batch's predicted finish and its tightest deadline.
        jitter_ms: how much before frontrun a batch is due, as hosts wake late.

    Raises:
        ValueError: an argument out of its range, or one of `target_batch_size` and `drop_head`
            without the other.
    """

    beyond: ClassVar[dict[str, str]] = {
        "objective": "it always waits until frontrun and takes the first idle worker",
        "headroom": "it aims at no utilisation",
        "rate_window_s": "it measures no load",
    }
    """Arguments of the improved policy that contradict the paper's, and why."""

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """As of `Deferred`."""
        return {"jitter_ms": LIVE_JITTER * shortest_slo_ms}

    @checked
    def __init__(
        self,
        *,
        gathering: Literal["prefix", "drop_head"] = "prefix",
        target_batch_size: Count | None = None,
        max_batch_size: Count | None = None,
        margin_ms: NonNegative = 0.0,
        jitter_ms: NonNegative = 0.0,
    ) -> None:
        super().__init__(max_batch_size=max_batch_size, margin_ms=margin_ms)
        if (gathering == "drop_head") != (target_batch_size is not None):
            raise ValueError(
                f"gathering 'drop_head' and target_batch_size go together, got {gathering!r} and "
                f"{target_batch_size}"
            )
        self._target = target_batch_size or 1
        self._jitter_s = jitter_ms / 1e3

    def _send_at(self, lane: Lane, first: int, size: int, now: float) -> float:
        deadline = lane.model.queue[first].deadline
        return deadline - lane.need[size] - lane.delay(lane.count) - self._jitter_s

    def _update(self, model: ModelState, now: float) -> None:
        """UPDATECANDIDATE, on every kind of worker that serves the model."""
        queue = model.queue
        if model.sized:
            self._actions += model.hopeless(now)
        late = queue.position(now + model.reach_1 - TOLERANCE_S)
        if late:
            self._refuse(model, queue.take(late), now)
        for lane in model.lanes:
            first, count = lane.gather(now, now, self._target) if queue else (0, 0)
            if first and lane is model.lanes[0] and lane.may_give_up():
                self._refuse(model, queue.take(first), now)
                first = 0
            if count:
                self._file(lane, first, count, model.items(first, count), now)
            else:
                lane.clear()
        drop_at = queue[0].deadline + 2 * TOLERANCE_S if queue else math.inf
        self._drops.set(model, drop_at, model.order)

    def _match(self, pool: Pool, now: float) -> None:
        """ONMODELTIMER and ONGPUTIMER: candidates due and valid, the nearest `latest` first."""
        ready = pool.ready
        while ready:
            latest, _, lane = ready[0]
            if not lane.ready or lane.latest != latest:
                heappop(ready)
                continue
            worker: Worker | None = pool.idle[0][1] if pool.idle else None
            free_at = now
            if worker is None:
                ahead_s = lane.delay(lane.count)
                worker = pool.next_free(now) if ahead_s else None
                if worker is None or self._too_soon(pool, worker.free_at - ahead_s, now):
                    return
                free_at = worker.free_at
            first, count = lane.gather(now, free_at, self._target)
            if not count or max(now, free_at - lane.delay(lane.count)) > latest + TOLERANCE_S:
                lane.ready = False
                continue
            self._dispatch(lane, worker, first, count, free_at, now)

    def _find_hopeless(self, now: float) -> bool:
        return False
