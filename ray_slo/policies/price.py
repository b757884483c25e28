"""Which variant answers, by the price of a worker's time.

A model has several variants: slow accurate ones, quick poor ones. Little load makes time cheap:
accurate variants, small batches. Much makes it dear. There is nothing to set: prices follow from
the profiles, the SLOs, the number of workers and the measured load. There are two ways to find
them, and `Price` takes the one that fits what there is to serve:

* one model's requests of size 1 (`policies.price_alone`): a value of the queue's length, exact but
  for the workers' ends, tells what every free worker takes;
* several models on the same workers, or requests with sizes (`policies.price_shared`): the fluid
  limit of all measured rates tells how many requests every variant is to serve, and batches are
  deferred, each of the variant whose turn it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ray_slo.core.arguments import Count, NonNegative, checked
from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Decision
from ray_slo.core.policy import Abilities, InFlight, Policy
from ray_slo.core.requests import BatchOutcome, Request, WorkerId
from ray_slo.policies.batching import succeed
from ray_slo.policies.price_alone import Alone
from ray_slo.policies.price_shared import Shared


class Price(Abilities):
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
        self._sized = False
        self._explain = False
        self._adopted: tuple[float, Sequence[InFlight], int, Policy | None] | None = None

    @property
    def explain(self) -> bool:
        """Whether dispatches say what they are worth: points per second of a worker's time."""
        return self._explain

    @explain.setter
    def explain(self, explain: bool) -> None:
        self._explain = self._way.explain = explain

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._way.requests_arrived(now, requests)
        if not self._sized and any(request.size != 1 for request in requests):
            self._sized = True
            self._follow(now)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        self._way.requests_cancelled(now, requests)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self._way.batch_finished(now, worker, outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        self._follow(now)

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over, with what a policy of this kind has learned."""
        if isinstance(former, Price):
            self._sized, former = former._sized, former._way
        self._adopted = now, flights, batch_id, former

    def _follow(self, now: float) -> None:
        """The way that fits, with what the one before has queued and running."""
        way = Shared if self._sized or len(self._cluster.models) > 1 else Alone
        if not isinstance(self._way, way):
            before, self._way = self._way, way(**self._arguments)
            succeed(self._way, before)
            self._way.explain = self._explain
        if self._adopted is not None:
            self._way.adopt(*self._adopted)
            self._adopted = None
        self._way.cluster_changed(now, self._cluster)

    def decide(self, now: float) -> Decision:
        return self._way.decide(now)
