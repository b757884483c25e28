"""Deferred batch scheduling (Symphony, Algorithm 1 and Appendix D): wait while waiting is free.

A batch of b requests with the earliest deadline d may start until *latest* = d − ℓ(b). From
*frontrun* = d − ℓ(b + 1) on, one more request would make it late. Waiting gains nothing then, so
the batch is due. This forms the largest batches that the deadlines allow, and the workers fall into
a staggered pattern by themselves. If several models are due, a free worker takes the one with the
nearest `latest`. Decisions are sent `delay(b)` ahead, to a busy worker too.

Worked example (§3.3): 3 workers, ℓ(b) = b + 5, SLO 12, a request every 0.75. R4 arrives at 2.25;
R1 is due at 12, so frontrun is 12 − ℓ(5) = 2 and latest 12 − ℓ(4) = 3: R1–R4 leave at 2.25. R5–R8
leave at 5.25, R9–R12 at 8.25, and R13–R16 at 11.25, when the first worker is free again.

Two arguments go beyond the paper; `python -m benchmarks deferred-objectives` measures them:

* *objective*. `consolidate` is the rule above: few workers are busy, and every request has almost
  the latency of a full system. `responsive` sends a batch at once if the queue is long enough for
  the load: batches of this size, sent back to back, must keep the workers busy for at most
  `headroom` of the time. With a shorter queue it waits until frontrun. It also stops waiting after
  three times the time in which the missing requests should come at the measured rate, because the
  load has then fallen.
* *gathering*. `prefix` takes the longest batch that meets the head's deadline, and collapses in
  overload: late heads allow only tiny batches. `drop_head` drops the head if its slack allows fewer
  than min(target, queue) requests. The target is the smallest batch that sustains the measured
  load, at most the staggered batch: the largest b with (1 + 1/n)·ℓ(b) ≤ SLO (§3.3, n = workers that
  the load needs). In overload (ρ ≥ 1.3) more than the staggered batch can be gathered in the time
  that dropped requests leave, and the target is the batch that serves most. The measured load lags
  behind a burst, so the rate at which the waiting requests came counts if it is an overload. Below
  capacity, it is their number in at least half an SLO: a shorter burst can be served later.
  Batches grow beyond the target as far as the head allows. While two workers idle, nothing is
  dropped for larger batches.

For several models, the *load* ρ of a pool is the number of workers that all measured rates need,
divided by the workers that there are. The mean times of batches count (`Times.pace`): if times
scatter, the profile's are longer. Each model counts with its best batch (the staggered one, or the
requests that come within its SLO, if fewer). Every model then uses batches with the share ρ of its
own best throughput per worker (ρ / headroom for `responsive`). So all give up batching efficiency
in the same proportion. In a shared pool, a batch that is due only at frontrun may find no worker.
So

* batches are due earlier, by the recent wait for a worker (97th percentile). For a batch below its
  target this is bounded. Otherwise batches would get smaller and waits longer without end;
* if the load exceeds the workers (ρ ≥ 1) and not all due candidates can be sent in time, the one
  with the most requests per second of execution goes first, not the one with the nearest `latest`;
* `responsive` does not wait at all while the workers can serve all models in turn within their
  SLOs, each time with all that waits (`_round_s`). Then no head is dropped for a batch of more than
  half of the requests of a round.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from heapq import nlargest
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal

from ray_slo.core.arguments import Count, NonNegative, Positive, Share, checked
from ray_slo.core.cluster import Cluster
from ray_slo.core.load import Ticks
from ray_slo.core.policy import InFlight, Policy
from ray_slo.policies.batching import LIVE_JITTER, BatchingPolicy
from ray_slo.policies.shared.lanes import Lane, ModelState, Pool
from ray_slo.policies.shared.refusals import TOLERANCE_S

Objective = Literal["responsive", "consolidate"]
Gathering = Literal["drop_head", "prefix"]

_PATIENCE = 3.0  # times the expected wait for the missing requests of a batch
_BUCKETS = 20  # of the sliding window in which arrivals are counted
_WINDOW_PER_MODEL_S = 0.004  # limits the measurement of many models to a few % of a core
_ENOUGH = 0.99  # of a model's best throughput: no request waits or is dropped for more
_ON_TIME = 0.97  # share of the batches that find a worker in time
_WAIT_STEP = 0.02  # of the shortest SLO: step by which the margin for waiting adapts
_WAIT_MOST = 0.3  # largest margin, per model and worker: of the SLO that one request leaves free
_ROUND_MARGIN = 1.25  # rounds that must fit into the SLOs, because rounds vary
_ROUND_SHARE = 0.5  # of the requests of a round: heads are dropped for no larger batches

_LANES_PER_LOOK = 8  # with n due lanes, they are compared once in n / 8 dispatches
_BURST_OF_SLO = 0.5  # shortest time for the rate of a burst while the load is below 1
_OVERLOAD = 1.3  # load of a pool from which on it is surely overloaded: measured loads have errors

_latest = attrgetter("latest")


class Deferred(BatchingPolicy):
    """Symphony's deferred batch scheduling.

    Args:
        objective: `responsive` (low latency below capacity) or `consolidate` (the paper's).
        gathering: `drop_head` (holds in overload) or `prefix`.
        target_batch_size: target of `drop_head`; by default it follows the measured load.
        max_batch_size: upper bound, in addition to the profile's; a full batch is due at once.
        margin_ms: time kept between a batch's predicted end and its earliest deadline.
        jitter_ms: a batch is due this much before frontrun, because hosts wake late.
        headroom: the utilisation that `responsive` allows, above 0 and at most 1.
        rate_window_s: arrivals are counted over this time; by default 5 × the longest SLO, and at
            least 1 s and 4 ms per model.

    Raises:
        ValueError: an argument out of its range.
    """

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """Arguments for an event loop, which wakes late. If frontrun and the last moment are a
        millisecond apart, a request that waited for its batch would be late."""
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
        """Take over from another policy, with its measured load if it is of this kind."""
        super().adopt(now, flights, batch_id, former)
        if isinstance(former, Deferred):
            self._ticks = copy(former._ticks)
            for name, known in former._models.items():
                model = self._model(name)
                # Waiting requests arrive again.
                model.arrived = known.arrived - sum(r.size for r in known.queue)
                model.rate = known.rate
                counts = former._counts.get(known, ())
                self._counts[model] = deque(counts, maxlen=_BUCKETS)

    def expect_load(self, now: float, rates: Mapping[str, float]) -> None:
        """Use the measured items per second by model, if it has no measurements of its own."""
        for name, rate in rates.items():
            model = self._models.get(name)
            if model is not None and not model.rate:
                model.rate = rate
                self._counts[model].extend([round(rate * self._ticks.every_s)] * _BUCKETS)
        self._set_targets()

    def _send_at(self, lane: Lane, first: int, size: int, now: float) -> float:
        model, pool = lane.model, lane.pool
        queue = model.queue
        items, first = queue.items, queue.start + first
        waiting = len(items) - first
        if model.sized:
            waiting = lane.waiting(first - queue.start, lane.max_batch_size)
        missing = lane.go_size - waiting
        if missing <= 0:
            return now
        # Frontrun; `size` is below the maximum, so reach[size] is that of one more request.
        frontrun = items[first].deadline - lane.reach[size] - self._jitter_s
        # A single model falls into a pattern in which a worker is free when it is needed.
        if waiting >= lane.target:
            frontrun -= pool.wait_s
        elif pool.load < 1 and pool.models > 1:
            # This is limited: smaller batches occupy workers, and other batches then wait longer.
            frontrun -= min(pool.wait_s, self._wait_most_s * pool.models / pool.size)
        if not self._responsive or not model.rate:
            return frontrun
        # The missing requests should have come by now: the load has fallen.
        patient = items[-1].arrival + _PATIENCE * missing / model.rate
        return patient if patient < frontrun else frontrun

    def _target_of(self, lane: Lane, now: float) -> int:
        """The lane's target; in a burst, the batch with which most of its requests are served."""
        target, model, pool = lane.target, lane.model, lane.pool
        waiting = len(model.queue)
        if waiting <= target or not self._drop_head or self._fixed_target or pool.round_s:
            return target
        came_s = max(now - model.queue[0].arrival, 1e-9)
        if pool.load < 1:
            came_s = max(came_s, _BURST_OF_SLO * model.slo_s)
        rate = (waiting - math.sqrt(waiting)) / came_s
        if rate <= model.rate:
            return target
        efficiency = self._efficiency[lane]
        more = (rate - model.rate) * pool.times.pace / efficiency.best
        load = pool.load + more / pool.size
        return max(target, efficiency.serving_most(rate)) if load >= _OVERLOAD else target

    def _waited(self, pool: Pool, wait_s: float) -> None:
        # Follows the quantile: steps up and down are in the ratio of its two shares.
        if wait_s > pool.wait_s:
            pool.wait_s += _ON_TIME * self._wait_step_s
        else:
            pool.wait_s = max(0.0, pool.wait_s - (1 - _ON_TIME) * self._wait_step_s)

    # The order of candidates --------------------------------------------------------------------

    def _match(self, pool: Pool, now: float) -> None:
        while 0 < len(pool.idle) < len(pool.ready) and (best := self._best(pool, now)):
            lane, first, count = best
            self._dispatch(lane, pool.idle[0][1], first, count, now, now)
        super()._match(pool, now)

    def _due_lanes(self, pool: Pool) -> list[Lane]:
        """By `latest`, the nearest first."""
        due = {lane: None for latest, _, lane in pool.ready if lane.ready and lane.latest == latest}
        return sorted(due, key=_latest)

    def _best(self, pool: Pool, now: float) -> tuple[Lane, int, int] | None:
        """In overload the due candidate with the most items per second, unless all can be sent in
        time: (lane, first, count)."""
        if pool.load < 1:
            return None
        if pool.look_in <= 0:
            due = self._due_lanes(pool)
            pool.look_in = max(1, len(due) // _LANES_PER_LOOK)
            calm = len(due) <= len(pool.idle) or self._all_in_time(pool, due, now)
            pool.first = [] if calm else nlargest(pool.look_in, due, key=_rate)[::-1]
        pool.look_in -= 1
        while pool.first:
            lane = pool.first.pop()
            if lane.ready:
                first, count = lane.gather(now, now, self._target_of(lane, now))
                if count:
                    return lane, first, count
        return None

    @staticmethod
    def _all_in_time(pool: Pool, due: Sequence[Lane], now: float) -> bool:
        """Whether every candidate is sent in time if the nearest `latest` goes first, and the
        workers fall free evenly."""
        at, each = now - TOLERANCE_S, 1 / pool.size
        for lane in due:
            if at > lane.latest:
                return False
            at += each * lane.reach[lane.size - 1]
        return True

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
        if (rise := self._rise()) > 1:
            for model in self._models.values():
                model.rate *= rise
        self._set_targets()

    def _rise(self) -> float:
        """Factor for all rates if the load rises; for policies that detect this."""
        return 1.0

    def _set_targets(self) -> None:
        """Set the batch sizes for the measured load, on every lane."""
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
                    lane.target = efficiency.sustaining(pool.load, needed, lane.model.rate)
            rounds = self._responsive and pool.models > 1
            pool.round_s = self._round_s(pool, work) if rounds else 0.0
            if pool.round_s:
                for lane in pool.lanes:
                    lane.go_size = 1
                    if self._drop_head and self._fixed_target is None:
                        # No request waits for more than comes in a round.
                        comes = max(1, math.ceil(_ROUND_SHARE * lane.model.rate * pool.round_s))
                        lane.target = min(lane.target, comes)

    def _round_s(self, pool: Pool, work: Mapping[Lane, float]) -> float:
        """Time of a round, seconds, if workers that never wait serve every model often enough for
        its SLO; else 0.

        In a round of T seconds a model of rate λ is served once, in a batch of λT, or with the
        chance λT, alone. The workers go round in T if Σ min(1, λT)·ℓ(max(1, λT)) ≤ T · workers.
        """
        lanes = [(lane, lane.model.rate) for lane in pool.lanes if work.get(lane)]
        if len({lane.model for lane, _ in lanes}) < len(lanes):
            return 0.0  # a model has several kinds of batches, and the next one is not known

        def batch_s(lane: Lane, expected: float) -> float:
            return lane.profile.latency(max(1, math.ceil(expected)))

        round_s = sum(lane.model.slo_s - lane.reach[0] for lane, _ in lanes) / (len(lanes) or 1)
        for _ in range(4):
            work_s = sum(
                min(1.0, rate * round_s) * batch_s(lane, rate * round_s) for lane, rate in lanes
            )
            work_s *= pool.times.pace
            if work_s > round_s * pool.size:
                return 0.0
            round_s = work_s / pool.size
        # The nearest `latest` goes first, so models with short SLOs wait less than the others.
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
            # A model with several lanes uses them in proportion to their throughput.
            lanes = self._carrying(model)
            served = [lane.pool.size * self._efficiency[lane].at_rate(model.rate) for lane in lanes]
            for lane, part in zip(lanes, served, strict=True):
                rate = model.rate * part / sum(served)
                work[lane] = lane.pool.times.pace * rate / self._efficiency[lane].best
        return work


def _rate(lane: Lane) -> float:
    """Items per second of its candidate."""
    return lane.size / lane.reach[lane.size - 1]


class _Efficiency:
    """Requests per second and worker by batch size.

    Attributes:
        gathered: the batch that a lane forms if it need not wait for a worker: the requests that
            come within the SLO minus the batch's time. The load is too low for larger ones.
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
        """Set the values that depend on the requests per second; returns `best`."""
        lane = self._lane
        size = self.gathered = self._within(rate)
        staggered = self.staggered(lane.pool.size)
        self.best = self._rates[min(staggered, size) - 1]
        slo_s, takes_s = lane.model.slo_s + 1e-9, self._takes_s(size, rate)
        if size < min(staggered, lane.max_batch_size) and takes_s < slo_s:
            # The mean batch lies between this size and the next.
            part = (slo_s - takes_s) / (self._takes_s(size + 1, rate) - takes_s)
            latency = lane.profile.latency
            mean_s = latency(size) + part * (latency(size + 1) - latency(size))
            self.best = max(self.best, (size + part) / mean_s)
        return self.best

    def sustaining(self, load: float, workers: int, rate: float) -> int:
        """The smallest batch that sustains a load of the pool, if one does."""
        if load >= _OVERLOAD:
            return self.serving_most(rate)
        return min(self.smallest(load), self.staggered(workers), self.gathered)

    def serving_most(self, rate: float) -> int:
        """The smallest batch with enough throughput of those that come within the SLO. For a model
        alone they must come surely: if they do not, its worker idles."""
        most = self._within(rate, surely=self._lane.pool.models == 1)
        return bisect_left(self._rates, _ENOUGH * self._rates[most - 1], hi=most) + 1

    def _takes_s(self, size: int, rate: float, surely: bool = False) -> float:
        """Until a batch is over, from the arrival of its first request on; `surely` allows for
        one standard deviation of a Poisson process."""
        others = size - 1 + (math.sqrt(size - 1) if surely else 0.0)
        return self._lane.reach[size - 1] + (others / rate if rate else 0.0)

    def _within(self, rate: float, surely: bool = False) -> int:
        """The largest batch that comes within the SLO less the time that it takes."""
        sizes, slo_s = range(1, self._lane.max_batch_size + 1), self._lane.model.slo_s + 1e-9
        return max(1, bisect_right(sizes, slo_s, key=lambda b: self._takes_s(b, rate, surely)))

    def staggered(self, workers: int) -> int:
        """`staggered_batch`, cached: it is needed on every lane at every measurement."""
        if (batch := self._staggered.get(workers)) is None:
            batch = self._staggered[workers] = staggered_batch(self._lane, workers)
        return batch

    def smallest(self, share: float) -> int:
        """The smallest batch with this share of `best`, or with `_ENOUGH` of it."""
        return bisect_left(self._rates, min(share, _ENOUGH) * self.best) + 1


def staggered_batch(lane: Lane, workers: int) -> int:
    """The largest b with reach(b) + ℓ(b) / workers ≤ SLO (Symphony §3.3, Eq. 1); at least 1."""
    slo_s, latency = lane.model.slo_s + 1e-9, lane.profile.latency
    sizes = range(1, lane.max_batch_size + 1)
    return max(
        1, bisect_right(sizes, slo_s, key=lambda b: lane.reach[b - 1] + latency(b) / workers)
    )
