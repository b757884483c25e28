"""Model selection from one shared queue, by price.

A model has several variants: slow accurate ones, quick poor ones. Every free worker asks what the
requests that wait are worth to it and takes the (variant, batch size) of the largest value

    b·accuracy − price(q) · ℓ(b) − b · worth(q)

where the price of a worker-second and the worth of a place in the queue follow from the load and
the queue's length q alone (`planning/queue_value.py`). If that is a larger batch than the queue, it
waits for the rest, at most until the last moment for the best that it could run at once. A short
queue makes time cheap: accurate variants, small batches. A long one makes it dear. There is nothing
to set: prices follow from the profiles, the SLO, the number of workers and the measured load.

Worked example: 60 workers, SLO 150 ms, the nine ImageNet models of RAMSIS §7, 2000 requests/s. In
the fluid limit efficientnet_b0 serves 61 % in batches of 4, mobilenet_v3_large the others in
batches of 8: 75.9 %. These batches take nearly the whole SLO, so their requests must come within
a few milliseconds. What is possible depends on how many wait for how long, and what pays on that
and the price: 55 % are served by mobilenet in sevens, 23 % by efficientnet_b2 in pairs, 18 % by
efficientnet_b0 in fours. `python -m benchmarks ramsis-price` shows 75.6 %; per-worker queues with
tables for this load reach 75.0 %.

What it learns on the way:

* the *load*, per model: arrivals of the last 32 SLOs; if the latest contradict them, of these.
  Their dispersion (1 for Poisson) makes the price rise earlier where arrivals are bursty;
* how exact the *profiles* are: variants and batches are chosen with the latency times the 99th
  percentile of measured over predicted time (at least 1); the pace of work counts with the mean.
  A request that only an optimist could serve in time is still tried, on the quickest variant.

Several models share the workers as in the fluid limit (`planning/fluid.py`): each is valued with
the workers that it gets there, a free worker goes to the model that pays most per second, and only
for so long that the heads of the other queues stay in time. Unlike workers count by their price in
the fluid limit.

Prices are solved for (2 to 30 ms per model) when a load is met for the first time, or when a
profile or the number of workers has changed. From then on a decision is a table lookup, whatever
the queue's length; where several models wait, it is O(models + workers).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapreplace, nsmallest

import numpy as np

from ray_slo.core.arguments import Count, NonNegative, checked
from ray_slo.core.cluster import Cluster, Model, Variant
from ray_slo.core.load import Ticks
from ray_slo.core.requests import BatchOutcome, BatchStatus, WorkerId
from ray_slo.planning import fluid
from ray_slo.planning.queue_value import Columns, QueueValue, solve
from ray_slo.policies.batching import BatchingPolicy
from ray_slo.policies.price_lanes import SHED, WAIT, Choice, Offer, PriceLane, lanes_of
from ray_slo.policies.price_load import Precision, TickedLoad, level
from ray_slo.policies.shared.lanes import Lane, ModelState, Pool, Worker
from ray_slo.policies.shared.refusals import TOLERANCE_S

_TICKS_PER_SLO = 4  # arrivals are counted in ticks of the shortest SLO
_WAKE_EARLY = 0.01  # of the SLO, before a batch that waited would become impossible
_SHORT = 0.1  # of the SLO: of shorter batches it does not matter how inexact they are
_SAME = 0.05  # profiles that differ by less have the same prices
_LEAST_WORKERS = 2.0  # a model is valued with, however small its part of the load
_REMEMBERED = 256  # loads that prices were solved for
_SHARE_EVERY = 16  # ticks, that is four SLOs
_SPEED_COUNTS = 0.02  # beside the fluid price

_Tables = dict[tuple[int, int], list[float]]
_Shares = dict[ModelState, tuple[dict[Pool, float], dict[Pool, float]]]


def _accuracy(variant: Variant) -> float:
    """Where it is not known, variants count alike: the quickest will do."""
    return 100.0 if variant.accuracy is None else variant.accuracy


def _with_accuracy(model: Model) -> Model:
    return replace(model, variants=tuple(replace(v, accuracy=_accuracy(v)) for v in model.variants))


def _alike(tables: _Tables, others: _Tables) -> bool:
    return tables.keys() == others.keys() and all(
        len(t) == len(others[k]) and np.allclose(t, others[k], rtol=_SAME, atol=0)
        for k, t in tables.items()
    )


class Price(BatchingPolicy):
    """Variants and batch sizes by the price of a worker-second.

    Args:
        violation_cost: points of accuracy that a request counts which misses its SLO. At the
            default a model gives up one point of accuracy to keep one request in 1000 in time.
        max_batch_size: upper bound beside the profile's.
        margin_ms: kept between a batch's predicted finish and its tightest deadline, beside what
            is learned.

    Raises:
        ValueError: an argument out of its range.
    """

    chooses_variants = True
    counts_requests = True

    @checked
    def __init__(
        self,
        *,
        violation_cost: NonNegative = 1000.0,
        max_batch_size: Count | None = None,
        margin_ms: NonNegative = 0.0,
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
        self.explain = False  # points per second of a worker's time, in every dispatch
        self._priced: dict[ModelState, tuple[int, ...]] = {}  # the one in force
        self._watched: list[ModelState] = []  # whose load is not known yet
        self._short_s = 0.0
        self._levels = (0, 0)
        self._shared: _Shares = {}  # by several models
        self._share_at = -math.inf

    # Events ----------------------------------------------------------------------------------

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        super().cluster_changed(now, cluster)
        slos = [model.latency_slo_s for model in cluster.models.values()]
        tick_s = min(slos, default=math.inf) / _TICKS_PER_SLO
        self._short_s = _SHORT * min(slos, default=0.0)
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
        state = self._workers.get(worker)
        if state is not None and outcome.status is BatchStatus.FINISHED:
            for flight in state.flights:
                if flight.batch_id == outcome.batch_id:
                    took_s = outcome.finished_at - outcome.started_at
                    if self._precision.add(took_s, flight.latency_s, self._short_s):
                        self._set_limits()
        super().batch_finished(now, worker, outcome)

    def _lane(self, model: ModelState, spec: Model, pool: Pool) -> Lane | None:
        """Through every variant that the pool runs; None without one."""
        offers = [Offer(v.name, p, _accuracy(v)) for v, p in spec.runnable(*pool.kind)]
        if not offers:
            return None
        lane = PriceLane(
            self._next_serial(), model, pool, offers, spec.latency_slo_s, self._max_batch_size
        )
        lane.set_times(self._delay, self._margin_s, self._max_batch_size)
        lane.set_limits(self._precision.margin, self._margin_s)
        pool.lanes.append(lane)
        return lane

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
        # Of a model without a measured load every doubling of what has arrived is news.
        self._watched = [m for m, demand in self._demand.items() if not demand.mean]
        for model in self._watched:
            self._demand[model].look_at = max(2 * model.arrived, 4)

    def _set_prices(self, now: float) -> None:
        """Every lane's value for the measured load."""
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
        if len(models) == 1 and len(models[0].lanes) == 1:
            pool = models[0].lanes[0].pool
            self._price(models[0], {pool: 1 / pool.size}, {pool: 0.0})
        elif models:
            if now >= self._share_at or any(model not in self._priced for model in models):
                self._shared = self._shares(models)
                self._share_at = now + _SHARE_EVERY * self._ticks.every_s
            for model, (weights, prices) in self._shared.items():
                self._price(model, weights, prices)

    def _shares(self, models: Sequence[ModelState]) -> _Shares:
        """How several models share unlike workers in the fluid limit: arguments of `_price`."""
        names = {str(m.order): m for m in models}
        specs = {self._models[name]: spec for name, spec in self._cluster.models.items()}
        pools = {str(pool.order): pool for pool in self._pools}
        found = fluid.solve(
            fluid.Problem(
                [replace(_with_accuracy(specs[m]), name=name) for name, m in names.items()],
                {name: self._demand[m].rate for name, m in names.items()},
                {name: pool.size for name, pool in pools.items()},
                loaded={name: pool.kind[1] for name, pool in pools.items()},
                hardware={name: pool.kind[0] for name, pool in pools.items()},
                violation_cost=self._violation_cost,
            )
        )
        busy = {(m, lane.pool): 0.0 for m in models for lane in m.lanes}
        for batches in found.mix:
            busy[names[batches.model], pools[batches.workers]] += batches.busy
        # Where nobody pays for time, workers count by their speed.
        dearest = max(found.worker_price.values()) or 1.0
        speeds = {
            p: max(lane.throughput for lane in lanes_of(p)) for p in pools.values() if p.lanes
        }
        fastest = max(speeds.values())
        weight = {
            p: found.worker_price[name] / dearest + _SPEED_COUNTS * speeds[p] / fastest
            for name, p in pools.items()
            if p in speeds
        }
        price = {p: found.worker_price[name] for name, p in pools.items()}
        made = {}
        for m in models:
            share = most = 0.0
            for lane in m.lanes:
                used = [busy[x, lane.pool] for x in models if (x, lane.pool) in busy]
                total = sum(used)
                part = busy[m, lane.pool] / total if total > 1e-9 else 1 / len(used)
                share += weight[lane.pool] * part * lane.pool.size
                most += weight[lane.pool] * lane.pool.size
            # A rare model is valued with whole workers, at their price.
            least = _LEAST_WORKERS * max(weight[lane.pool] for lane in m.lanes)
            valued = max(share, min(most, least))
            made[m] = (
                {lane.pool: weight[lane.pool] / valued for lane in m.lanes},
                {lane.pool: price[lane.pool] * (1 - share / valued) for lane in m.lanes},
            )
        return made

    def _price(
        self, model: ModelState, weights: Mapping[Pool, float], prices: Mapping[Pool, float]
    ) -> None:
        """Set the value of one model's lanes.

        Args:
            weights: of a pool's worker in all that the model gets.
            prices: points per worker-second to pay in addition.
        """
        demand, precision = self._demand[model], self._precision
        of_pools = (
            level(x) for lane in model.lanes for x in (weights[lane.pool], 1 + prices[lane.pool])
        )
        key = (model.order, demand.level, demand.burst, *precision.levels, *of_pools)
        if self._priced.get(model) == key:
            return
        self._priced[model] = key
        lanes = lanes_of(model)
        for lane in lanes:
            lane.share = min(1.0, 1 / (weights[lane.pool] * lane.pool.size))
            lane.reprice(
                Columns(
                    [size for _, _, size in lane.runs],
                    lane.accuracy,
                    np.array(lane.limits) + self._delay(1),
                    lane.latency_s * precision.pace,
                    weights[lane.pool],
                    lane.latency_s * prices[lane.pool],
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
        """A free worker serves the model that pays most for its time."""
        pool.ready.clear()
        while True:
            free_at = now
            if pool.idle:
                worker = pool.idle[0][1]
            else:
                longest = max((len(lane.model.queue) for lane in pool.lanes), default=0)
                ahead_s = self._delay(longest) if longest else 0.0
                busy = pool.next_free(now) if ahead_s else None
                if busy is None or self._too_soon(pool, busy.free_at - ahead_s, now):
                    return
                worker, free_at = busy, busy.free_at
            waiting = [lane for lane in lanes_of(pool) if lane.model.queue]
            choices = [self._choose(lane, now, free_at) for lane in waiting]
            able = [choice for choice in choices if choice.size]
            if not able:
                wake_at = min((choice.wake_at for choice in choices), default=math.inf)
                self._too_soon(pool, wake_at, now)
                return
            best = able[0]
            if len(waiting) > 1:
                best = max(able, key=Choice.bid)
                best = self._in_turn(best, waiting, worker, now, free_at)
            lane = best.lane
            lane.variant, lane.profile = best.variant, best.profile
            if free_at > now and self._too_soon(pool, free_at - self._delay(best.size), now):
                return
            if self.explain:
                self._paid = best.bid()
            self._dispatch(lane, worker, best.first, best.size, free_at, now)

    def _choose(
        self, lane: PriceLane, now: float, free_at: float, within_s: float = math.inf
    ) -> Choice:
        """What the lane would run on a worker that is free then, in at most `within_s`."""
        queue = lane.model.queue
        length = len(queue)
        start_at = max(now + self._delay(min(length, lane.max_batch_size)), free_at)
        idle = int(max(len(lane.pool.idle) - 1, 0) * lane.share)
        first = 0
        while first < length:
            slack = queue[first].deadline - start_at + TOLERANCE_S
            row = lane.row(length - first, idle)
            possible = bisect_right(row.limits, min(slack, within_s))
            act, run = row.acts[possible], row.runs[possible]
            if act == SHED:
                first += 1
                continue
            if run < 0:
                # Too late for any batch with the margin that was learned. Without it, perhaps.
                size = lane.fit(queue[first].deadline, now, free_at, length - first)
                if size and lane.need[size - 1] <= within_s:
                    return Choice(lane, first, *lane.quickest[size - 1], size)
                first += 1
                continue
            if act == WAIT:
                wake_at = now + slack - lane.limits[run] - _WAKE_EARLY * lane.model.slo_s
                if wake_at > now + TOLERANCE_S:
                    return Choice(lane, first, "", lane.profile, 0, wake_at)
            return Choice(lane, first, *lane.runs[run])
        return Choice(lane, first, "", lane.profile, 0)

    def _in_turn(
        self,
        best: Choice,
        waiting: Sequence[PriceLane],
        worker: Worker,
        now: float,
        free_at: float,
    ) -> Choice:
        """`best`, or what goes instead so that all other models' heads can be in time after it.

        They are dealt out to the other workers, the most urgent first, each as its quickest batch.
        Those that are left over need this worker; so it must be back before.
        """
        urgent = []
        for lane in waiting:
            if lane is not best.lane:
                head = lane.model.queue.head.deadline
                urgent.append((head - lane.reach[0], lane.order, lane.need[0], lane))
        urgent.sort()
        ends = (max(w.free_at, now) for w in self._workers.values() if w.pool is worker.pool)
        free = sorted(nsmallest(len(urgent) + 1, ends))
        free.remove(min(free, key=lambda at: abs(at - max(worker.free_at, now))))
        back_at, behind_s, first = math.inf, 0.0, None
        for latest, _, need, lane in urgent:
            if free and free[0] <= latest:
                heapreplace(free, free[0] + need)
            else:
                back_at, behind_s = min(back_at, latest - behind_s), behind_s + need
                first = first or lane
        if first is None or free_at + best.latency_s <= back_at:
            return best
        quicker = self._choose(best.lane, now, free_at, back_at - free_at)
        if quicker.size:
            return quicker
        head = first.model.queue.head.deadline
        size = first.fit(head, now, free_at, len(first.model.queue))
        return Choice(first, 0, *first.quickest[size - 1], size) if size else best
