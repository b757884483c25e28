"""Chooses variants by the price of a worker's time.

A model has several variants, from slow and accurate to fast and less accurate. At low load, time is
cheap: accurate variants, small batches. At high load, time is expensive. There is nothing to set:
prices follow from the profiles, the SLOs, the number of workers and the measured load. There are
two ways to find them, and `Price` uses the one that fits:

* one model's requests of size 1 (`policies.price_alone`): a value of the queue's length says what
  every free worker takes. It is exact, except for the times when workers become free;
* several models on the same workers, requests with sizes, or bursts that are too large for the
  variants with the largest throughput (`policies.price_shared`): the fluid limit of all measured
  rates says how many requests each variant should serve. Batches are deferred, and each uses the
  variant whose turn it is.

Bursts are too large if ρ + 0.3·√(D/n) exceeds 1.1: ρ is the share of n workers that the rate needs,
and D the dispersion of the arrivals. A value of the queue's length then drops heads of the queue
too late, while deferral drops them for full batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ray_slo.core.arguments import Count, NonNegative, checked
from ray_slo.core.cluster import Cluster, Model
from ray_slo.core.decisions import Decision
from ray_slo.core.load import Ticks
from ray_slo.core.policy import Abilities, InFlight, Policy
from ray_slo.core.requests import BatchOutcome, Request, WorkerId
from ray_slo.policies.batching import pace_of, succeed
from ray_slo.policies.price_alone import Alone
from ray_slo.policies.price_load import TICKS_PER_SLO
from ray_slo.policies.price_shared import Shared, least_work_s

_BURST = 0.3
_CROWDED, _CALM = (
    1.1,
    0.95,
)  # ρ + 0.3·√(D/n): bursts are too large above the first, and no longer below the second
_TICKS, _LOOK_EVERY = (
    128,
    16,
)  # quarters of the SLO: in which arrivals are counted, and between two checks


class Price(Abilities):
    """Variants and batch sizes by the price of a worker-second.

    Args:
        violation_cost: cost of a request that misses its SLO, in points of accuracy. At the
            default, a model gives up one point of accuracy to keep one more request in 1000 in
            time.
        max_batch_size: upper bound, in addition to the profile's.
        margin_ms: time kept between a batch's predicted end and its earliest deadline, in addition
            to what is learned.

    Raises:
        ValueError: an argument out of its range.
    """

    serves_late: ClassVar[bool] = False
    chooses_variants = True
    serves_tasks = False

    @checked
    def __init__(
        self,
        *,
        violation_cost: NonNegative = 1000.0,
        max_batch_size: Count | None = None,
        margin_ms: NonNegative = 0.0,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "violation_cost": violation_cost,
            "max_batch_size": max_batch_size,
            "margin_ms": margin_ms,
        }
        self._way: Alone | Shared = Alone(**self._arguments)
        self._cluster = Cluster({}, {})
        self._sized = self._crowded = False
        self._capacity, self._workers = 0.0, 0
        self._ticks = Ticks(0.0, math.inf)
        self._counts: deque[int] = deque(maxlen=_TICKS)  # arrivals per tick
        self._arrived, self._look_in = 0, _LOOK_EVERY
        self._explain = False
        self._adopted: tuple[float, Sequence[InFlight], int, Policy | None] | None = None

    @property
    def explain(self) -> bool:
        """Whether dispatches contain their value: points per second of a worker's time."""
        return self._explain

    @explain.setter
    def explain(self, explain: bool) -> None:
        self._explain = self._way.explain = explain

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._way.requests_arrived(now, requests)
        self._arrived += len(requests)
        if not self._sized and any(request.size != 1 for request in requests):
            self._sized = True
            self._follow(now)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        self._way.requests_cancelled(now, requests)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self._way.batch_finished(now, worker, outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        slos_s = [model.latency_slo_s for model in cluster.models.values()]
        tick_s = min(slos_s, default=math.inf) / TICKS_PER_SLO
        if tick_s != self._ticks.every_s:
            self._ticks, self._arrived = Ticks(now, tick_s), 0
            self._counts.clear()
        self._workers = len(cluster.workers)
        self._capacity = _capacity(cluster)
        self._follow(now)

    def expect_load(self, now: float, rates: Mapping[str, float]) -> None:
        """Use the items per second by model that were measured before it took over."""
        if isinstance(self._way, Shared):
            self._way.expect_load(now, rates)

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over from another policy, with what it has learned if it is of this kind."""
        if isinstance(former, Price):
            self._sized, former = former._sized, former._way
        self._adopted = now, flights, batch_id, former

    def _follow(self, now: float) -> None:
        """Use the way that fits; it takes over queued and running requests from the other one."""
        several = self._sized or self._crowded or len(_served(self._cluster)) > 1
        way = Shared if several else Alone
        if not isinstance(self._way, way):
            before, self._way = self._way, way(**self._arguments)
            succeed(self._way, before)
            self._way.explain = self._explain
        if self._adopted is not None:
            self._way.adopt(*self._adopted)
            self._adopted = None
        self._way.cluster_changed(now, self._cluster)

    def decide(self, now: float) -> Decision:
        if ticks := self._ticks.passed(now):
            self._counts.extend([0] * min(ticks - 1, _TICKS))
            self._counts.append(self._arrived)
            self._arrived = 0
            self._look_in -= ticks
            if self._look_in <= 0 and self._capacity:
                self._look_in = _LOOK_EVERY
                self._look(now)
        return self._way.decide(now)

    def _look(self, now: float) -> None:
        """Check whether bursts are too large, or no longer."""
        counts = np.array(self._counts)
        mean = float(counts.mean())
        dispersion = max(float(counts.var()) / mean, 1.0) if mean else 1.0
        needed = pace_of(self._way) * mean / self._ticks.every_s / self._capacity
        needed += _BURST * math.sqrt(dispersion / self._workers)
        crowded = needed > (_CALM if self._crowded else _CROWDED)
        if crowded != self._crowded:
            self._crowded = crowded
            self._follow(now)


def _served(cluster: Cluster) -> list[Model]:
    """Models that some worker has loaded; models of other groups have none."""
    kinds = {worker.kind for worker in cluster.workers.values()}
    return [m for m in cluster.models.values() if any(any(m.runnable(*kind)) for kind in kinds)]


def _capacity(cluster: Cluster) -> float:
    """Requests per second of the variants with the largest throughput within the SLO, if there is
    one model; else 0."""
    served = _served(cluster)
    if len(served) != 1:
        return 0.0
    (model,) = served
    return sum(
        max(
            (1 / least_work_s(p, model.latency_slo_s) for _, p in model.runnable(*worker.kind)),
            default=0.0,
        )
        for worker in cluster.workers.values()
    )
