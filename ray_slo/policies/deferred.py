"""Deferred batch scheduling (Symphony, Algorithm 1 and Appendix D): wait while waiting is free.

A batch of b requests, the tightest due at d, may start until *latest* = d − ℓ(b). From *frontrun*
= d − ℓ(b + 1) on, one request more would make it late, so waiting wins nothing: the batch is due.
Dispatching no earlier forms the largest batches that the deadlines allow, and the workers fall
into a staggered pattern by themselves. When several models are due, a worker that falls free takes
the one with the nearest `latest`. Decisions go out `delay(b)` ahead, to a busy worker too.

Worked example (§3.3): 3 workers, ℓ(b) = b + 5, SLO 12, a request every 0.75. R4 arrives at 2.25;
R1 is due at 12, so frontrun is 12 − ℓ(5) = 2 and latest 12 − ℓ(4) = 3: R1–R4 leave at 2.25. R5–R8
leave at 5.25, R9–R12 at 8.25, and R13–R16 at 11.25, when the first worker is free again.

Two choices beyond the paper, measured by `python -m benchmarks deferred-objectives`:

* *objective*. `consolidate` is the above: few busy workers, and every request has nearly the
  latency of a full system. `responsive` sends a batch at once when the queue is long enough for
  the load: when batches of this size, sent back to back, leave the workers busy for at most
  `headroom` of the time. Below that, it waits: for frontrun, or until three times as long as the
  missing requests should take at the measured rate (the load has fallen, then).
* *gathering*. `prefix` takes the longest batch that meets the head's deadline, and collapses in
  overload: late heads allow only tiny batches. `drop_head` gives the head up when its slack allows
  fewer than min(target, queue) requests. The target is the smallest batch that sustains the
  measured load, at most the staggered batch: the largest b with (1 + 1/n)·ℓ(b) ≤ SLO (§3.3, n =
  workers that the load needs). Batches grow past the target as far as the head allows. While two
  workers idle, nothing is dropped for the sake of larger batches.

Several models share a pool of workers by its *load* ρ: what all models' measured rates need over
the workers there are, each model in its best batch (the staggered one, or what comes within its
SLO, if less). Every model then aims at batches with the share ρ of its own best throughput per
worker (ρ / headroom for `responsive`), so that each gives up batching efficiency in the same
proportion. A batch that is due only at frontrun may find no worker in a shared pool; so

* batches are due earlier by the time that nearly all of them (97 %) waited for a worker lately. For
  one below its target that is bounded: batches would get smaller and waits longer without end;
* `responsive` does not wait at all while the workers, taking whatever is there, go round all models
  within their SLOs (`_round_s`). No head is dropped then for more than half of what comes in a
  round.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, Literal

from ray_slo.core.arguments import Count, NonNegative, Positive, Share, checked
from ray_slo.core.cluster import Cluster
from ray_slo.core.load import Ticks
from ray_slo.core.policy import InFlight, Policy
from ray_slo.policies.batching import LIVE_JITTER, BatchingPolicy
from ray_slo.policies.shared.lanes import Lane, ModelState, Pool

Objective = Literal["responsive", "consolidate"]
Gathering = Literal["drop_head", "prefix"]

_PATIENCE = 3.0  # times the expected wait for the requests that a batch lacks
_BUCKETS = 20  # of the sliding window over which arrivals are counted
_WINDOW_PER_MODEL_S = 0.004  # so that measuring many models stays below a few % of a core
_ENOUGH = 0.99  # of a model's best throughput: no request waits, nor is dropped, for more
_ON_TIME = 0.97  # of the batches find a worker when they must
_WAIT_STEP = 0.02  # of the shortest SLO: how fast the margin for waiting adapts
_WAIT_MOST = 0.3  # of what a request alone leaves of its SLO, per model and worker: that margin
_ROUND_MARGIN = 1.25  # rounds that must fit into the SLOs, as a round varies
_ROUND_SHARE = 0.5  # of what comes in a round: heads are dropped for no larger batches


class Deferred(BatchingPolicy):
    """Symphony's deferred batch scheduling.

    Args:
        objective: `responsive` (low latency below capacity) or `consolidate` (the paper's).
        gathering: `drop_head` (holds in overload) or `prefix`.
        target_batch_size: of `drop_head`; by default it follows the measured load.
        max_batch_size: upper bound beside the profile's; a full batch is due at once.
        margin_ms: kept between a batch's predicted finish and its tightest deadline.
        jitter_ms: how much before frontrun a batch is due, as hosts wake late.
        headroom: of `responsive`: the utilisation to aim at, above 0 and at most 1.
        rate_window_s: arrivals are counted over this time; by default 5 × the longest SLO, and at
            least 1 s and 4 ms per model.

    Raises:
        ValueError: an argument out of its range.
    """

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """An event loop wakes late. Where frontrun and the last moment are a millisecond apart,
        that would make a request that waited for its batch miss."""
        return {"jitter_ms": LIVE_JITTER * shortest_slo_ms}

    @checked
    def __init__(
        self,
        objective: Objective = "responsive",
        gathering: Gathering = "drop_head",
        *,
        target_batch_size: Count | None = None,
        max_batch_size: Count | None = None,
        margin_ms: NonNegative = 0.0,
        jitter_ms: NonNegative = 0.0,
        headroom: Share = 0.95,
        rate_window_s: Positive | None = None,
    ) -> None:
        super().__init__(max_batch_size=max_batch_size, margin_ms=margin_ms)
        if target_batch_size is not None and gathering == "prefix":
            raise ValueError("target_batch_size is an argument of gathering 'drop_head' only")
        self._responsive = objective == "responsive"
        self._drop_head = gathering == "drop_head"
        self._fixed_target = target_batch_size
        self._jitter_s = jitter_ms / 1e3
        self._headroom = headroom
        self._fixed_window_s = rate_window_s
        self._window_s = rate_window_s or 1.0
        self._wait_step_s = self._wait_most_s = 0.0
        self._ticks = Ticks(0.0, math.inf)
        self._counts: dict[ModelState, deque[int]] = {}
        self._efficiency: dict[Lane, _Efficiency] = {}

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        super().cluster_changed(now, cluster)
        slos = [model.latency_slo_s for model in cluster.models.values()]
        self._wait_step_s = _WAIT_STEP * min(slos, default=0.0)
        self._window_s = self._fixed_window_s or max(
            1.0, 5 * max(slos, default=0.0), _WINDOW_PER_MODEL_S * len(slos)
        )
        if math.isinf(self._ticks.next_at):
            self._ticks = Ticks(now, self._window_s / _BUCKETS)
        self._ticks.every_s = self._window_s / _BUCKETS
        lanes = [lane for pool in self._pools for lane in pool.lanes]
        spare_s = min((lane.model.slo_s - lane.reach[0] for lane in lanes), default=0.0)
        self._wait_most_s = _WAIT_MOST * max(spare_s, 0.0)
        self._set_efficiency()
        self._counts = {
            model: self._counts.get(model) or deque(maxlen=_BUCKETS)
            for model in self._models.values()
        }
        self._set_targets()

    def _set_efficiency(self) -> None:
        for pool in self._pools:
            pool.models = len({lane.model for lane in pool.lanes})
        self._efficiency = {lane: _Efficiency(lane) for pool in self._pools for lane in pool.lanes}

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over, with the measured load of a policy of this kind."""
        super().adopt(now, flights, batch_id, former)
        if isinstance(former, Deferred):
            self._ticks = copy(former._ticks)
            for name, known in former._models.items():
                model = self._model(name)
                # What waits arrives again.
                model.arrived = known.arrived - sum(r.size for r in known.queue)
                model.rate = known.rate
                counts = former._counts.get(known, ())
                self._counts[model] = deque(counts, maxlen=_BUCKETS)

    def expect_load(self, now: float, rates: Mapping[str, float]) -> None:
        """Items per second by model, as measured before it took over, where it knows none."""
        for name, rate in rates.items():
            model = self._models.get(name)
            if model is not None and not model.rate:
                model.rate = rate
                self._counts[model].extend([round(rate * self._ticks.every_s)] * _BUCKETS)
        self._set_targets()

    def _send_at(self, lane: Lane, first: int, size: int, now: float) -> float:
        queue, pool = lane.model.queue, lane.pool
        length = len(queue)
        waiting = length - first
        if lane.model.sized:
            waiting = lane.waiting(first, lane.max_batch_size)
        missing = lane.go_size - waiting
        if missing <= 0:
            return now
        # Frontrun; `size` is below the maximum, so reach[size] is that of one request more.
        frontrun = queue[first].deadline - lane.reach[size] - self._jitter_s
        # A model alone falls into a pattern in which a worker is free when it must be.
        if waiting >= lane.target:
            frontrun -= pool.wait_s
        elif pool.load < 1 and pool.models > 1:
            # Only so much: smaller batches keep workers from others, which then wait longer.
            frontrun -= min(pool.wait_s, self._wait_most_s * pool.models / pool.size)
        if not self._responsive or not lane.model.rate:
            return frontrun
        # What is missing should have come by now: the load has fallen since it was measured.
        patient = queue[length - 1].arrival + _PATIENCE * missing / lane.model.rate
        return patient if patient < frontrun else frontrun

    def _waited(self, pool: Pool, wait_s: float) -> None:
        # Follows the quantile: up by as much more as it must exceed fewer waits than not.
        if wait_s > pool.wait_s:
            pool.wait_s += _ON_TIME * self._wait_step_s
        else:
            pool.wait_s = max(0.0, pool.wait_s - (1 - _ON_TIME) * self._wait_step_s)

    # The measured load -------------------------------------------------------------------------

    def _measure(self, now: float) -> None:
        ticks = self._ticks
        if now < ticks.next_at:
            return
        elapsed = ticks.passed(now)
        for model in self._models.values():
            counts = self._counts.setdefault(model, deque(maxlen=_BUCKETS))
            counts.append(model.arrived)
            counts.extend([0] * min(elapsed - 1, _BUCKETS))
            model.arrived = 0
            model.rate = sum(counts) / (len(counts) * ticks.every_s)
        self._set_targets()

    def _set_targets(self) -> None:
        """Batch sizes that the load asks for, on every lane."""
        work = self._work()
        for pool in self._pools:
            pool.load = sum(work.get(lane, 0.0) for lane in pool.lanes) / pool.size
            for lane in pool.lanes:
                efficiency = self._efficiency[lane]
                if self._responsive:
                    lane.go_size = min(
                        efficiency.smallest(pool.load / self._headroom), efficiency.gathered
                    )
                if self._fixed_target is not None:
                    lane.target = self._fixed_target
                elif self._drop_head:
                    needed = min(max(math.ceil(work.get(lane, 0.0)), 1), pool.size)
                    lane.target = min(
                        efficiency.smallest(pool.load),
                        efficiency.staggered(needed),
                        efficiency.gathered,
                    )
            if self._responsive and pool.models > 1 and (round_s := self._round_s(pool, work)):
                for lane in pool.lanes:
                    lane.go_size = 1
                    if self._drop_head and self._fixed_target is None:
                        # Nobody waits for more than comes in a round.
                        comes = max(1, math.ceil(_ROUND_SHARE * lane.model.rate * round_s))
                        lane.target = min(lane.target, comes)

    def _round_s(self, pool: Pool, work: Mapping[Lane, float]) -> float:
        """How long a round takes, if workers that take what is there serve every model often
        enough for its SLO; else 0.

        In a round of T seconds a model of rate λ is served once, in a batch of λT, or with the
        chance λT, alone. The workers go round in T if Σ min(1, λT)·ℓ(max(1, λT)) ≤ T · workers.
        """
        lanes = [(lane, lane.model.rate) for lane in pool.lanes if work.get(lane)]
        if len({lane.model for lane, _ in lanes}) < len(lanes):
            return 0.0  # a model has batches of several kinds: which one comes next is not known

        def batch_s(lane: Lane, expected: float) -> float:
            return lane.profile.latency(max(1, math.ceil(expected)))

        round_s = sum(lane.model.slo_s - lane.reach[0] for lane, _ in lanes) / (len(lanes) or 1)
        for _ in range(4):
            work_s = sum(
                min(1.0, rate * round_s) * batch_s(lane, rate * round_s) for lane, rate in lanes
            )
            if work_s > round_s * pool.size:
                return 0.0
            round_s = work_s / pool.size
        # The nearest `latest` goes first, so the tight ones wait less than the others.
        wait_s = _ROUND_MARGIN * round_s
        spare_s = (
            lane.model.slo_s - wait_s - batch_s(lane, rate * round_s) for lane, rate in lanes
        )
        return round_s if sum(spare_s) >= 0 else 0.0

    def _carrying(self, model: ModelState) -> Sequence[Lane]:
        """The lanes that could take all of a model's load; at most one on every pool."""
        return model.lanes

    def _work(self) -> dict[Lane, float]:
        """Workers that each lane's part of the measured rate keeps busy."""
        work = {}
        for model in self._models.values():
            # A model with several lanes uses them in proportion to what they can serve.
            lanes = self._carrying(model)
            served = [lane.pool.size * self._efficiency[lane].at_rate(model.rate) for lane in lanes]
            for lane, part in zip(lanes, served, strict=True):
                work[lane] = model.rate * part / sum(served) / self._efficiency[lane].best
        return work


class _Efficiency:
    """Requests per second and worker by batch size.

    Attributes:
        gathered: the batch that a lane forms when no worker keeps it waiting: what comes within
            the SLO less the time that the batch takes. Larger ones are out of the load's reach.
        best: throughput with it, or with the staggered batch of the whole pool if this is smaller.
    """

    __slots__ = ("_lane", "_rates", "_staggered", "best", "gathered")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._staggered: dict[int, int] = {}
        rates = (b / lane.profile.latency(b) for b in range(1, lane.max_batch_size + 1))
        self._rates = list(accumulate(rates, max))
        self.at_rate(math.inf)

    def at_rate(self, rate: float) -> float:
        """Set what depends on the requests per second; `best`."""
        lane = self._lane
        slo_s, gap_s = lane.model.slo_s + 1e-9, 1 / rate if rate else 0.0

        def takes_s(b: int) -> float:
            return lane.reach[b - 1] + (b - 1) * gap_s

        most = lane.max_batch_size
        size = max(1, bisect_right(range(1, most + 1), slo_s, key=takes_s))
        self.gathered = size
        staggered = self.staggered(lane.pool.size)
        self.best = self._rates[min(staggered, size) - 1]
        if size < min(staggered, most) and takes_s(size) < slo_s:
            # The mean batch lies between this size and the next.
            part = (slo_s - takes_s(size)) / (takes_s(size + 1) - takes_s(size))
            latency = lane.profile.latency
            mean_s = latency(size) + part * (latency(size + 1) - latency(size))
            self.best = max(self.best, (size + part) / mean_s)
        return self.best

    def staggered(self, workers: int) -> int:
        """`staggered_batch`, remembered: it is asked for on every lane at every measurement."""
        if (batch := self._staggered.get(workers)) is None:
            batch = self._staggered[workers] = staggered_batch(self._lane, workers)
        return batch

    def smallest(self, share: float) -> int:
        """The smallest batch with this share of `best`, or with enough of it."""
        return bisect_left(self._rates, min(share, _ENOUGH) * self.best) + 1


def staggered_batch(lane: Lane, workers: int) -> int:
    """The largest b with reach(b) + ℓ(b) / workers ≤ SLO (Symphony §3.3, Eq. 1); at least 1."""
    slo_s, latency = lane.model.slo_s + 1e-9, lane.profile.latency
    sizes = range(1, lane.max_batch_size + 1)
    return max(
        1, bisect_right(sizes, slo_s, key=lambda b: lane.reach[b - 1] + latency(b) / workers)
    )
