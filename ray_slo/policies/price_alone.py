"""One model's requests of size 1: this half of `Price` uses a value of the queue.

Every free worker takes the (variant, batch size) with the largest value

    b·accuracy − price(q) · ℓ(b) − b · worth(q)

The price of a worker-second and the worth of a place in the queue follow only from the load and the
queue's length q (`shared/queue_value.py`). If the best batch is larger than the queue, the worker
waits for the rest. It waits at most until the last moment for the best batch that it could run at
once. With a short queue, time is cheap: accurate variants, small batches. With a long one, time is
expensive. There is nothing to set: prices follow from the profiles, the SLO, the number of workers
and the measured load.

Worked example: 60 workers, SLO 150 ms, the nine ImageNet models of RAMSIS §7, 2000 requests/s. In
the fluid limit efficientnet_b0 serves 61 % in batches of 4, mobilenet_v3_large the others in
batches of 8: 75.9 %. These batches take nearly the whole SLO, so their requests must come within
a few milliseconds. The possible batches depend on how many requests wait for how long. The best one
also depends on the price: 55 % are served by mobilenet in sevens, 23 % by efficientnet_b2 in pairs,
18 % by efficientnet_b0 in fours. `python -m benchmarks ramsis-price` shows 75.6 %; per-worker
queues with tables for this load reach 75.0 %.

It learns two things:

* the *load* per model: arrivals of the last 32 SLOs, or only the latest ones if these contradict
  the others. With a higher dispersion (1 for Poisson), the price rises earlier;
* the error of the *profiles*: variants and batches are chosen with the latency times the 99th
  percentile of measured over predicted time (at least 1). The pace of work uses the mean. A request
  that is in time only without this margin is still tried, on the fastest variant.

Different workers count by their price in the fluid limit (`shared/fluid.py`).

Prices are solved (2 to 30 ms per model) for each new load, and when a profile or the number of
workers has changed. After that, a decision is a table lookup for any length of the queue.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ray_slo.core.cluster import Cluster, Model
from ray_slo.core.load import Ticks
from ray_slo.core.requests import BatchOutcome, WorkerId
from ray_slo.policies.batching import BatchingPolicy
from ray_slo.policies.price_lanes import (
    SHED,
    WAIT,
    Choice,
    Offer,
    PriceLane,
    accuracy_of,
    lanes_of,
)
from ray_slo.policies.price_load import SHORT, TICKS_PER_SLO, Precision, TickedLoad, level
from ray_slo.policies.shared import fluid
from ray_slo.policies.shared.lanes import Lane, ModelState, Pool
from ray_slo.policies.shared.queue_value import Columns, QueueValue, solve
from ray_slo.policies.shared.refusals import TOLERANCE_S

_WAKE_EARLY = 0.01  # of the SLO, before a batch that waited would become impossible
_SAME = 0.05  # profiles that differ by less have the same prices
_REMEMBERED = 256  # loads that prices were solved for
_SPEED_COUNTS = 0.02  # beside the fluid price

_Tables = dict[tuple[int, int], list[float]]


def _with_accuracy(model: Model) -> Model:
    variants = tuple(replace(v, accuracy=accuracy_of(v)) for v in model.variants)
    return replace(model, variants=variants)


def _alike(tables: _Tables, others: _Tables) -> bool:
    return tables.keys() == others.keys() and all(
        len(t) == len(others[k]) and np.allclose(t, others[k], rtol=_SAME, atol=0)
        for k, t in tables.items()
    )


class Alone(BatchingPolicy):
    """Variants and batch sizes of one model by the price of a worker-second.

    Args:
        violation_cost, max_batch_size, margin_ms: as in `Price`.
    """

    chooses_variants = True

    def __init__(
        self, *, violation_cost: float, max_batch_size: int | None, margin_ms: float
    ) -> None:
        super().__init__(max_batch_size=max_batch_size, margin_ms=margin_ms)
        self._violation_cost = violation_cost
        self._cluster = Cluster({}, {})
        self._demand: dict[ModelState, TickedLoad] = {}
        self._precision = Precision()
        self._ticks = Ticks(0.0, math.inf)
        self._sizes: list[int] = []
        self._tables: _Tables = {}
        self._values: dict[tuple[int, ...], QueueValue] = {}  # solved so far
        self.explain = False  # put points per second of a worker's time into every dispatch
        self._priced: dict[ModelState, tuple[int, ...]] = {}  # the current one
        self._watched: list[ModelState] = []  # models whose load is not known yet
        self._short_s = 0.0
        self._levels = (0, 0)

    # Events ----------------------------------------------------------------------------------

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        super().cluster_changed(now, cluster)
        slos = [model.latency_slo_s for model in cluster.models.values()]
        tick_s = min(slos, default=math.inf) / TICKS_PER_SLO
        self._short_s = SHORT * min(slos, default=0.0)
        if tick_s != self._ticks.every_s:
            self._demand, self._ticks = {}, Ticks(now, tick_s)
        self._demand = {m: self._demand.get(m) or TickedLoad() for m in self._models.values()}
        tables = {
            (i, lane.model.order): [*lane.latency_s.tolist(), *lane.accuracy.tolist()]
            for i, pool in enumerate(self._pools)
            for lane in lanes_of(pool)
        }
        sizes = [pool.size for pool in self._pools]
        if sizes != self._sizes or not _alike(tables, self._tables):
            self._sizes, self._tables, self._values = sizes, tables, {}
        self._priced = {}  # the lanes are new
        self._set_prices(now)
        self._watched = [m for m, demand in self._demand.items() if not demand.mean]

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        if self._precision.learn(self._workers.get(worker), outcome, self._short_s):
            self._set_limits()
        super().batch_finished(now, worker, outcome)

    def _lanes(self, model: ModelState, spec: Model, pool: Pool) -> Sequence[Lane]:
        """One lane for all variants that the pool runs; none if there are none."""
        offers = [Offer(v.name, p, accuracy_of(v)) for v, p in spec.runnable(*pool.kind)]
        if not offers:
            return ()
        lane = PriceLane(
            self._next_serial(), model, pool, offers, spec.latency_slo_s, self._max_batch_size
        )
        lane.set_times(self._delay, self._margin_s, self._max_batch_size)
        lane.set_limits(self._precision.margin, self._margin_s)
        pool.lanes.append(lane)
        return [lane]

    def _set_limits(self) -> None:
        for pool in self._pools:
            for lane in lanes_of(pool):
                lane.set_limits(self._precision.margin, self._margin_s)

    # The measured load, and the prices that follow ---------------------------------------------

    def _measure(self, now: float) -> None:
        if ticks := self._ticks.passed(now):
            for model in self._models.values():
                demand = self._demand.setdefault(model, TickedLoad())
                demand.count(model.arrived, ticks)
                model.arrived = 0
        elif not self._watched or not any(
            model.arrived >= self._demand[model].look_at for model in self._watched
        ):
            return
        self._set_prices(now)
        # For a model without a measured load, every doubling of its arrivals is news.
        self._watched = [m for m, demand in self._demand.items() if not demand.mean]
        for model in self._watched:
            self._demand[model].look_at = max(2 * model.arrived, 4)

    def _set_prices(self, now: float) -> None:
        """Set every lane's value for the measured load."""
        models = [model for model in self._models.values() if model.lanes]
        moved = False
        for model in models:
            demand = self._demand.setdefault(model, TickedLoad())
            if not (rate := demand.mean / self._ticks.every_s):
                # Before the first tick.
                rate = model.arrived / max(
                    now - (self._ticks.next_at - self._ticks.every_s), 0.02 * self._ticks.every_s
                )
            moved |= demand.settle(max(rate, 0.2 / model.slo_s)) or model not in self._priced
        if not moved and self._levels == self._precision.levels:
            return
        self._levels = self._precision.levels
        for model in models:
            self._price(model, self._weights(model))

    def _weights(self, model: ModelState) -> dict[Pool, float]:
        """Weight of a worker of each pool among all of the model's workers; the sum is 1."""
        pools = {str(lane.pool.order): lane.pool for lane in model.lanes}
        if len(pools) == 1:
            return {pool: 1 / pool.size for pool in pools.values()}
        name = next(name for name, state in self._models.items() if state is model)
        found = fluid.solve(
            fluid.Problem(
                [_with_accuracy(self._cluster.models[name])],
                {name: self._demand[model].rate},
                {order: pool.size for order, pool in pools.items()},
                loaded={order: pool.kind[1] for order, pool in pools.items()},
                hardware={order: pool.kind[0] for order, pool in pools.items()},
                violation_cost=self._violation_cost,
            )
        )
        # If time costs nothing, workers count by their speed.
        dearest = max(found.worker_price.values()) or 1.0
        speeds = {lane.pool: lane.throughput for lane in lanes_of(model)}
        fastest = max(speeds.values())
        weights = {
            pool: found.worker_price[order] / dearest + _SPEED_COUNTS * speeds[pool] / fastest
            for order, pool in pools.items()
        }
        total = sum(weight * pool.size for pool, weight in weights.items())
        return {pool: weight / total for pool, weight in weights.items()}

    def _price(self, model: ModelState, weights: Mapping[Pool, float]) -> None:
        """Set the value of a model's lanes.

        Args:
            weights: weight of a pool's worker among all of the model's workers.
        """
        demand, precision = self._demand[model], self._precision
        of_pools = (level(weights[lane.pool]) for lane in model.lanes)
        key = (model.order, demand.level, demand.burst, *precision.levels, *of_pools)
        if self._priced.get(model) == key:
            return
        self._priced[model] = key
        lanes = lanes_of(model)
        for lane in lanes:
            lane.reprice(
                Columns(
                    [size for _, _, size in lane.runs],
                    lane.accuracy,
                    np.array(lane.limits) + self._delay(1),
                    lane.latency_s * precision.pace,
                    weights[lane.pool],
                )
            )
        if (value := self._values.get(key)) is None:
            if len(self._values) >= _REMEMBERED:
                self._values.clear()
            value = self._values[key] = solve(
                Columns.together([lane.columns for lane in lanes if lane.columns]),
                demand.rate,
                model.slo_s,
                dispersion=2.0**demand.burst,
                violation_cost=self._violation_cost,
            )
        for lane in lanes:
            assert lane.columns is not None
            lane.value, lane.counts = value, value.arrivals(lane.columns)
            lane.top = len(value.h) - value.owed + 2 * lane.largest_run

    # Decisions -------------------------------------------------------------------------------

    def _send_at(self, lane: Lane, first: int, size: int, now: float) -> float:
        return now  # whether to wait is decided in `_match`

    def _match(self, pool: Pool, now: float) -> None:
        """A free worker takes the batch with the most value for its time."""
        pool.ready.clear()
        while pool.lanes and (length := len(pool.lanes[0].model.queue)):
            lane = lanes_of(pool)[0]
            free_at = now
            if pool.idle:
                worker = pool.idle[0][1]
            else:
                ahead_s = self._delay(length)
                busy = pool.next_free(now) if ahead_s else None
                if busy is None or self._too_soon(pool, busy.free_at - ahead_s, now):
                    return
                worker, free_at = busy, busy.free_at
            best = self._choose(lane, now, free_at)
            if not best.size:
                self._too_soon(pool, best.wake_at, now)
                return
            lane.variant, lane.profile = best.variant, best.profile
            if free_at > now and self._too_soon(pool, free_at - self._delay(best.size), now):
                return
            if self.explain:
                self._paid = best.worth()
            self._dispatch(lane, worker, best.first, best.size, free_at, now)

    def _choose(self, lane: PriceLane, now: float, free_at: float) -> Choice:
        """The batch for a worker that is free at `free_at`."""
        queue = lane.model.queue
        length = len(queue)
        start_at = max(now + self._delay(min(length, lane.max_batch_size)), free_at)
        idle = max(len(lane.pool.idle) - 1, 0)
        first = 0
        while first < length:
            slack = queue[first].deadline - start_at + TOLERANCE_S
            row = lane.row(length - first, idle)
            possible = bisect_right(row.limits, slack)
            act, run = row.acts[possible], row.runs[possible]
            if act == SHED:
                first += 1
                continue
            if run < 0:
                # Too late for any batch with the learned margin, but perhaps not without it.
                size = lane.fit(queue[first].deadline, now, free_at, length - first)
                if size:
                    return Choice(lane, first, *lane.quickest[size - 1], size)
                first += 1
                continue
            if act == WAIT:
                wake_at = now + slack - lane.limits[run] - _WAKE_EARLY * lane.model.slo_s
                if wake_at > now + TOLERANCE_S:
                    return Choice(lane, first, "", lane.profile, 0, wake_at)
            return Choice(lane, first, *lane.runs[run])
        return Choice(lane, first, "", lane.profile, 0)
