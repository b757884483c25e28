"""Choice of variants if several models share the workers, or requests have sizes: the other half of
`Price`.

A value per queue (`shared/queue_value.py`) does not know the other queues of a worker. So the
choice is made in two steps:

* *how much*: the fluid limit of the measured rates (`shared/fluid.py`), with batches no larger
  than come within the SLO, says how many requests per second of each model every variant serves;
* *when*: batches are deferred, gathered and dropped as by `Deferred`. A model's requests stay in
  one queue until a batch leaves. Only then it is decided whose *turn* it is: the most accurate
  variant that has served less than was planned for it, else the *base* variant, the one with the
  most requests per second. If no worker becomes free in time for that, a faster one gets the batch.

The plan uses a part of the workers, the *utilisation*. It grows a little after every plan under
which no request missed its deadline, and falls if more than one in a thousand did. If not all
requests can be served, all models use their base variants, and `Deferred` decides.

Rates are measured over some SLOs. A rise of the load is seen earlier: if the work of the last
arrivals exceeds the work before by more than chance explains, all rates are raised in that
proportion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from ray_slo.core.cluster import Cluster, Model, Variant
from ray_slo.core.decisions import Decision, Drop
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import BatchOutcome, WorkerId
from ray_slo.policies.deferred import Deferred
from ray_slo.policies.price_lanes import accuracy_of
from ray_slo.policies.price_load import SHORT, Precision
from ray_slo.policies.shared import fluid
from ray_slo.policies.shared.lanes import Lane, ModelState, Pool, Worker

_PLAN_S, _PLAN_SLOS = 0.5, 5.0  # least time between plans
_MOVED = 0.1  # of the work: after this change of the load, a new plan is made at once
_IDLE = 0.4  # times ρ/√n of n workers, of which the base variants need ρ: not planned with
_LEAST, _MOST = -0.5, 0.1  # added to that, as learned
_UP = 0.01  # added after every plan without misses
_MISS_COST = 10.0  # times the share of misses: subtracted
_FALLEN_COST = 0.1  # subtracted per share of requests that a less accurate variant had to serve
_DOWN = 0.05  # the most that is subtracted
_PAYS = 0.92  # of the planned throughput: an accurate batch starts with this share
_SPARE = 20.0  # times the measured rate: the most that a variant gets if workers are idle
_LAST, _SURPRISE = 2, 3.0  # tenths of the window, and standard errors: a rise of the load
_JITTER = 0.01  # of the shortest SLO: a batch is due this much before it must be


class VariantLane(Lane):
    """A model on a pool through one of its variants.

    Attributes:
        accuracy: percent.
        base: the lane of the same model and pool with the largest throughput.
        siblings: all lanes of that model and pool, the most accurate first.
        rate: planned items per second; tokens: planned minus served items, at most `depth`.
        busy: number of workers that the plan keeps busy with it.
    """

    __slots__ = ("accuracy", "at", "base", "busy", "depth", "rate", "siblings", "tokens")

    base: VariantLane
    siblings: list[VariantLane]

    def __init__(
        self,
        order: int,
        model: ModelState,
        pool: Pool,
        variant: str,
        profile: LatencyProfile,
        accuracy: float,
    ) -> None:
        super().__init__(order, model, pool, variant, profile)
        self.accuracy = accuracy
        self.rate = self.busy = self.depth = self.tokens = self.at = 0.0

    def earned(self, now: float) -> float:
        """The current number of tokens."""
        if now > self.at:
            self.tokens = min(self.tokens + (now - self.at) * self.rate, self.depth)
            self.at = now
        return self.tokens

    def give(self, now: float, rate: float, busy: float, depth: float) -> None:
        """Set a new plan."""
        self.earned(now)
        self.rate, self.busy, self.depth = rate, busy, depth
        self.tokens = min(max(self.tokens, -depth), depth)

    def turn(self, now: float) -> VariantLane:
        """The lane whose turn it is on this pool."""
        best, best_s = self.base, math.inf
        for lane in self.siblings:
            if lane.earned(now) > 0:
                return lane
            if lane.rate > 0:
                wait_s = -lane.tokens / lane.rate
                if wait_s < best_s:
                    best, best_s = lane, wait_s
        return best

    def gather(self, now: float, free_at: float, target: int) -> tuple[int, int]:
        """A more accurate lane than the base takes the head, in a large enough batch, or
        nothing."""
        if self is self.base:
            return super().gather(now, free_at, target)
        first, size = super().gather(now, free_at, self.target)
        return (len(self.model.queue), 0) if first else (first, size)


class Shared(Deferred):
    """Deferred batches, each of the variant whose turn it is.

    Args:
        violation_cost, max_batch_size, margin_ms: as in `Price`.
    """

    chooses_variants = True

    def __init__(
        self, *, violation_cost: float, max_batch_size: int | None, margin_ms: float
    ) -> None:
        super().__init__(max_batch_size=max_batch_size, margin_ms=margin_ms)
        self._violation_cost = violation_cost
        self._precision = Precision()
        self._short_s = 0.0
        self._cluster = Cluster({}, {})
        self._now = 0.0
        self._learned = 0.0  # share of the workers that is added to the plan
        self._planned_at = -math.inf
        self._planned: dict[ModelState, float] = {}  # rates
        self._all: dict[ModelState, list[VariantLane]] = {}  # the fastest first
        self._feasible = True
        self._binding = False
        self._worth: dict[str, float] = {}  # points per request, by its model's order
        self.explain = False  # put points per second of a worker's time into every dispatch
        self._missed = self._served = self._fallen = 0

    # Events ----------------------------------------------------------------------------------

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._now, self._cluster, self._planned_at = now, cluster, -math.inf
        slos_s = [model.latency_slo_s for model in cluster.models.values()]
        self._short_s = SHORT * min(slos_s, default=0.0)
        self._jitter_s = _JITTER * min(slos_s, default=0.0)
        self._all = {}
        super().cluster_changed(now, cluster)

    def _lanes(self, model: ModelState, spec: Model, pool: Pool) -> Sequence[Lane]:
        """One through every variant that the pool runs."""
        offers = sorted(spec.runnable(*pool.kind), key=lambda offer: -accuracy_of(offer[0]))
        lanes = [
            VariantLane(self._next_serial(), model, pool, v.name, profile, accuracy_of(v))
            for v, profile in offers
        ]
        if lanes:
            base = min(lanes, key=lambda lane: least_work_s(lane.profile, spec.latency_slo_s))
            for lane in lanes:
                lane.base, lane.siblings = base, lanes
            self._set_times(lanes)
        pool.lanes += lanes
        together = [*self._all.get(model, ()), *lanes]
        self._all[model] = sorted(together, key=lambda lane: lane.reach[0])
        return lanes

    def _set_times(self, lanes: Iterable[VariantLane]) -> None:
        for lane in lanes:
            lane.set_times(
                self._delay, self._margin_s, self._max_batch_size, self._precision.margin
            )
        for lane in lanes:
            reach = lane.base.reach
            lane.rush = [reach[min(b, len(reach) - 1)] for b in range(len(lane.reach))]

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        if self._precision.learn(self._workers.get(worker), outcome, self._short_s):
            for model, lanes in self._all.items():
                self._set_times(lanes)
                model.reach_1 = model.lanes[0].reach[0]
                self._dirty[model] = None
            self._set_efficiency()
            self._set_targets()
        super().batch_finished(now, worker, outcome)

    # The plan --------------------------------------------------------------------------------

    def _measure(self, now: float) -> None:
        self._now = now
        super()._measure(now)

    def _set_targets(self) -> None:
        if self._due_for_a_plan():
            self._plan(self._now)
        super()._set_targets()
        for pool in self._pools:
            for lane in cast("list[VariantLane]", pool.lanes):
                if lane is not lane.base:
                    pays = self._efficiency[lane].smallest(_PAYS * pool.load)
                    lane.target = min(lane.target, pays)
                    lane.go_size = min(lane.go_size, pays)

    def _target_of(self, lane: Lane, now: float) -> int:
        own = cast(VariantLane, lane)
        return super()._target_of(lane, now) if own is own.base else lane.target

    def _rise(self) -> float:
        """Work of the last arrivals relative to the whole window; 1 if chance explains the
        difference."""
        work_s = {
            model: 1 / self._efficiency[cast(VariantLane, model.lanes[0]).base].best
            for model in self._models.values()
            if model.lanes
        }
        counts = [
            (self._counts[model], of_one_s)
            for model, of_one_s in work_s.items()
            if model in self._counts
        ]
        buckets = max((len(of) for of, _ in counts), default=0)
        if buckets < _LAST + 2:
            return 1.0
        by_bucket = np.zeros(buckets)
        for of, of_one_s in counts:
            by_bucket[buckets - len(of) :] += np.array(of) * of_one_s
        before, last = by_bucket[:-_LAST], by_bucket[-_LAST:]
        mean, error = float(before.mean()), float(before.std(ddof=1)) / math.sqrt(_LAST)
        if not mean or last.mean() <= mean + _SURPRISE * error:
            return 1.0
        return float(last.mean() / by_bucket.mean())

    def _due_for_a_plan(self) -> bool:
        """Whether the plan is old, or the load has changed."""
        longest_s = max((model.slo_s for model in self._models.values() if model.lanes), default=0)
        if self._now >= self._planned_at + max(_PLAN_S, _PLAN_SLOS * longest_s):
            return True
        total = moved = most = 0.0
        for model in self._models.values():
            if model.lanes:
                work_s = 1 / self._efficiency[cast(VariantLane, model.lanes[0]).base].best
                change = (model.rate - self._planned.get(model, 0.0)) * work_s
                total, moved = total + model.rate * work_s, moved + change
                most = max(most, abs(change))
        return max(abs(moved), most) > _MOVED * total

    def _plan(self, now: float) -> None:
        """Give every lane its part of the fluid limit of the measured rates."""
        self._adapt()
        self._planned_at = now
        models = {str(m.order): m for m in self._models.values() if m.lanes}
        self._planned = {m: m.rate for m in models.values()}
        pools = {str(pool.order): pool for pool in self._pools}
        problem = [self._bounded(name, model) for name, model in models.items()]
        size = sum(pool.size for pool in self._pools)
        needed = sum(super()._work().values()) if size else 0.0
        used = (
            1 - _IDLE * min(needed / size, 1.0) / math.sqrt(size) + self._learned if size else 0.0
        )
        found = fluid.solve(
            fluid.Problem(
                problem,
                {name: model.rate for name, model in models.items()},
                {name: pool.size * used for name, pool in pools.items()},
                violation_cost=self._violation_cost,
            )
        )
        self._use(found.feasible, models.values())
        self._binding = max(found.worker_price.values(), default=0.0) > 0
        self._worth = dict(found.request_price)
        parts = {(p.model, p.variant, p.workers): p for p in found.mix}
        busy = sum(part.busy for part in found.mix)
        spare = min(max(size * used / max(busy, 1e-9), 1.0), _SPARE)
        for name, model in models.items():
            if not model.rate and found.feasible:
                self._grant_one(now, model, found)
                continue
            for lane in self._all[model]:
                part = parts.get((name, lane.variant, str(lane.pool.order)))
                if part is None or not found.feasible:
                    lane.give(now, 0.0, 0.0, 0.0)
                else:
                    rate = part.rate * spare
                    lane.give(now, rate, part.busy, max(rate * model.slo_s, 1.0))

    def _grant_one(self, now: float, model: ModelState, found: fluid.Fluid) -> None:
        """For a model without recent requests, grant the next batch to the variant that is worth
        its time."""

        def worth(lane: VariantLane) -> float:
            price = found.worker_price[str(lane.pool.order)]
            return lane.accuracy - price * lane.profile.latency(1)

        best = max(self._all[model], key=worth)
        for lane in self._all[model]:
            lane.give(now, 0.0, 0.0, 1.0 if lane is best else 0.0)
        best.tokens = 1.0

    def _use(self, feasible: bool, models: Iterable[ModelState]) -> None:
        """Use all lanes, or only the base lanes if not all requests can be served."""
        self._feasible = feasible
        for model in models:
            lanes = self._all[model]
            if not feasible:
                lanes = [lane for lane in lanes if lane is lane.base]
            if len(lanes) != len(model.lanes):
                for lane in self._all[model]:
                    lane.clear()
                model.lanes = list(lanes)
                model.reach_1 = lanes[0].reach[0]
                self._dirty[model] = None

    def _bounded(self, name: str, model: ModelState) -> Model:
        """The model with batches limited to the requests that come while the first one can wait."""
        profiles: dict[str, dict[str, LatencyProfile]] = {}
        accuracy: dict[str, float] = {}
        for lane in self._all[model]:
            self._efficiency[lane].at_rate(model.rate)
            most = self._efficiency[lane].gathered
            profiles.setdefault(lane.variant, {})[str(lane.pool.order)] = lane.profile.truncated(
                most
            )
            accuracy[lane.variant] = lane.accuracy
        variants = tuple(Variant(v, profiles[v], accuracy[v]) for v in profiles)
        return Model(name, model.slo_s, variants)

    def _adapt(self) -> None:
        """Adapt the part of the workers that plans use, by the results of the last plan."""
        total = self._missed + self._served
        if total and self._binding:
            change = _UP - (_MISS_COST * self._missed + _FALLEN_COST * self._fallen) / total
            # If only base variants serve, a better plan would not prevent the misses.
            self._learned += max(change, -_DOWN if self._feasible else 0.0)
            self._learned = min(max(self._learned, _LEAST), _MOST)
        self._missed = self._served = self._fallen = 0

    def _carrying(self, model: ModelState) -> Sequence[Lane]:
        return [lane for lane in self._all.get(model, ()) if lane is lane.base]

    def _work(self) -> dict[Lane, float]:
        """Workers that the plan keeps busy; if it cannot serve all, the workers that would be
        needed."""
        if not self._feasible:
            return super()._work()
        return {
            lane: lane.pool.times.pace * lane.busy * model.rate / self._planned[model]
            for model in self._models.values()
            if model.lanes and self._planned.get(model)
            for lane in self._all[model]
        }

    # Decisions -------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        decision = super().decide(now)
        for action in decision.actions:
            if isinstance(action, Drop):
                self._missed += len(action.requests)
        return decision

    def _file(self, lane: Lane, first: int, count: int, size: int, now: float) -> None:
        lane = cast(VariantLane, lane)
        if lane is not lane.base and lane.turn(now).accuracy < lane.accuracy:
            lane.clear()
        else:
            super()._file(lane, first, count, size, now)

    def _send_at(self, lane: Lane, first: int, size: int, now: float) -> float:
        lane = cast(VariantLane, lane)
        turn = lane.turn(now)
        if turn is lane:
            return super()._send_at(lane, first, size, now)
        # Another lane is due only when the lane whose turn it is can no longer be in time.
        deadline = lane.model.queue[first].deadline
        frontrun = deadline - lane.reach[size] - self._jitter_s - lane.pool.wait_s
        return max(frontrun, deadline - turn.reach[min(size, turn.target) - 1])

    def _dispatch(
        self, lane: Lane, worker: Worker, first: int, count: int, free_at: float, now: float
    ) -> None:
        items = lane.model.items(first, count)
        lane = cast(VariantLane, lane)
        if lane is not lane.base and self._is_needed(lane, now + lane.need[items - 1], now):
            lane.clear()
            return
        lane.tokens -= items
        if self.explain:
            gained = lane.accuracy - self._worth.get(str(lane.model.order), lane.accuracy)
            self._paid = items * gained / lane.profile.latency(items)
        self._served += count
        if lane.turn(now).accuracy > lane.accuracy:
            self._fallen += count
        super()._dispatch(lane, worker, first, count, free_at, now)

    def _is_needed(self, lane: VariantLane, back_at: float, now: float) -> bool:
        """Whether another model's head would be late if a worker takes a batch until `back_at`."""
        pool = lane.pool
        if len(pool.idle) > 1:
            return False
        busy = pool.next_free(now)
        if busy is not None and busy.free_at < back_at:
            back_at = busy.free_at
        for other in cast("list[VariantLane]", pool.lanes):
            queue = other.model.queue
            if other is other.base and queue and other.model is not lane.model:
                size = min(len(queue), other.target, other.max_batch_size)
                if queue[0].deadline - other.reach[size - 1] < back_at:
                    return True
        return False


def least_work_s(profile: LatencyProfile, slo_s: float) -> float:
    """Least time of a worker per request, in batches within the SLO, seconds."""
    most = max(1, profile.max_batch_within(slo_s))
    return min(profile.latency(b) / b for b in range(1, most + 1))
