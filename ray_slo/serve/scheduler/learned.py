"""Learns the time of batches and the travel time of messages from batches that ran."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ray_slo.core import (
    BatchStatus,
    Cluster,
    DispatchDelay,
    Drop,
    LatencyProfile,
    Model,
    Variant,
    Worker,
)
from ray_slo.core.beliefs import Belief, Beliefs
from ray_slo.core.quantile import FEW_SAMPLES, Quantile, QuantileLine
from ray_slo.core.seldom import Seldom
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.messages import BatchReport, Capacity
from ray_slo.serve.scheduler.flights import Flight
from ray_slo.serve.scheduler.roster import Roster

logger = logging.getLogger(__name__)
logger.addFilter(Seldom(10))

_DELAY_QUANTILE = 0.95  # predictions use this quantile of dispatch delays (Symphony, Appendix D)
_LARGE = 32  # batch size at which changes of the delay are checked


class Learned:
    """What the scheduler of an application has learned.

    Args:
        workers: the current workers. The scheduler keeps them up to date.

    Attributes:
        beliefs: learned profiles by variant and kind of worker.
    """

    def __init__(self, spec: AppSpec, workers: Roster) -> None:
        self._workers = workers
        self._spec = spec
        self._variants = spec.variants()
        models = {variant: ref.model for variant, ref in self._variants.items()}
        self.beliefs = Beliefs(models, spec.trees)
        # Time of a round trip to a worker without the batch.
        self._overhead = QuantileLine(_DELAY_QUANTILE, prior=FEW_SAMPLES)
        self._error, self._error_most = Quantile(0.5), Quantile(0.95)  # of predicted ends, seconds
        self._preempt_delay = Quantile(0.9)
        self._told_delays_s: tuple[float, ...] = (math.inf,) * 3
        self._changed = False  # whether something changed since the last check

    @property
    def dispatch_delay(self) -> DispatchDelay:
        """Measured one-way time between a decision and the worker. Most batches of a size take less
        time."""
        control_s, per_request_s = self._overhead.line(default=0.01)
        return DispatchDelay(0.5 * control_s, 0.5 * per_request_s)

    @property
    def preempt_delay_s(self) -> float:
        """90th percentile of the time from a preemption until the worker is known to be free, in
        seconds. Before the first preemption, it is the value of the workers' preemption
        profiles."""
        profiled_s = max((w.preempt_delay_s for w in self._workers.values()), default=0.0)
        return self._preempt_delay.value(default=2 * self.dispatch_delay(1) + profiled_s)

    def _delays_s(self) -> tuple[float, ...]:
        delay = self.dispatch_delay
        return delay(1), delay(_LARGE), self.preempt_delay_s

    def meet(self, profiles: Mapping[str, LatencyProfile], kind: str) -> bool:
        """Take a worker's profiles. Return whether one is for a new variant or kind, or for larger
        batches than other workers had memory for."""
        new = [
            variant
            for variant, profile in profiles.items()
            if (known := self.beliefs.get((variant, kind))) is None
            or profile.max_batch_size > known.limit
        ]
        for variant in new:
            quantile = self._spec.models[self._variants[variant].model].profile_quantile
            self.beliefs[variant, kind] = Belief(profiles[variant], quantile)
        return bool(new)

    def ended(self, report: BatchReport, kind: str, now: float) -> bool:
        """Note that a batch is over on a worker of this kind. Return whether the policy has to know
        at once."""
        self._changed |= bool(report.measured)
        return self.beliefs.ran(report.variant, kind, report.measured, now)

    def returned(self, report: BatchReport, flight: Flight, now: float) -> float:
        """Take the report of a batch that came back. Return the time since the batch ended, in
        seconds."""
        overhead_s = max(now - flight.granted_at - report.held_s, 0.0)
        self._overhead.add(report.batch_size, overhead_s)
        ago_s = 0.5 * overhead_s  # half of the overhead is the transfer of the report
        if report.status in (BatchStatus.FINISHED, BatchStatus.FAILED):
            for error in (self._error, self._error_most):
                error.add(now - flight.dispatch.finish_at - ago_s)
        if report.status is BatchStatus.FINISHED:
            self.beliefs.answered(flight.dispatch.requests, now - ago_s)
        return ago_s

    def preempted(self, delay_s: float) -> None:
        """Note that a batch was stopped. Its worker was known to be free `delay_s` seconds after
        the decision."""
        self._preempt_delay.add(delay_s)

    def take_news(self, now: float) -> bool:
        """Return whether there is news for the policy since the last call."""
        self._changed |= self.beliefs.forget_unused()
        if not self._changed:
            return False
        self._changed = False
        return any(belief.is_news() for belief in self.beliefs.values()) or any(
            abs(now_s - told_s) > max(0.1 * told_s, 1e-3)
            for now_s, told_s in zip(self._delays_s(), self._told_delays_s, strict=True)
        )

    def cluster(self) -> Cluster:
        """Return the cluster for the policy."""
        self._changed = False
        self._told_delays_s = self._delays_s()
        profiles: dict[str, dict[str, LatencyProfile]] = {name: {} for name in self._variants}
        for (variant, kind), belief in self.beliefs.items():
            belief.largest = self._workers.largest(variant, kind)
            profiles[variant][kind] = belief.tell()
        variants: dict[str, list[Variant]] = {name: [] for name in self._spec.models}
        for name, ref in self._variants.items():
            variants[ref.model].append(Variant(name, profiles[name], ref.accuracy))
        margin_ms = self._spec.response_margin_ms  # frontends reserve it for sending the answer
        models = [
            Model(name, max(m.latency_slo_ms - margin_ms, 1.0) / 1e3, tuple(variants[name]))
            for name, m in self._spec.models.items()
        ]
        workers = [
            Worker(name, w.kind, w.variants, w.assigned) for name, w in self._workers.items()
        ]
        return Cluster.of(models, workers, self.dispatch_delay, self.preempt_delay_s)

    def capacity(self) -> dict[str, Capacity]:
        """Return the capacity for models that have workers."""
        rates: dict[str, dict[str, list[float]]] = {}  # by model and worker
        for name, worker in self._workers.items():
            for variant in worker.variants:
                model = self._variants[variant].model
                slo_s = self._spec.models[model].latency_slo_ms / 1e3
                rate = self.beliefs[variant, worker.kind].rate_within(slo_s)
                rates.setdefault(model, {}).setdefault(name, []).append(rate)
        found = {}
        for model, of_model in rates.items():
            finite = [[rate for rate in its if math.isfinite(rate)] for its in of_model.values()]
            measured = [max(its) for its in finite if its]
            found[model] = Capacity(sum(measured) if measured else math.inf, frozenset(of_model))
        return found

    def tries(self, drop: Drop, flights: Iterable[Flight], now: float) -> bool:
        """Return whether requests are to arrive again, because their profile may be wrong, and a
        worker is idle. The profile is then lower. See `Beliefs.tries`.

        Args:
            flights: all batches in flight.
        """

        def idle() -> Iterator[frozenset[str]]:
            busy = {flight.worker for flight in flights}
            return (w.variants for name, w in self._workers.items() if name not in busy)

        if not self.beliefs.tries(drop, now, idle):
            return False
        logger.warning(
            "%s looked too slow for its SLO (%s): an idle worker tries it",
            drop.requests[0].model,
            drop.reason.value,
        )
        self._overhead.forget()
        return True

    def status(self, now: float) -> dict[str, Any]:
        """For `ray-slo status`."""
        delay = self.dispatch_delay
        return {
            "dispatch_delay_ms": 1e3 * delay(1),
            "dispatch_per_request_ms": 1e3 * delay.per_request_s,
            "preempt_delay_ms": 1e3 * self.preempt_delay_s,
            "prediction_error_ms": 1e3 * self._error.value(default=0.0),
            "prediction_error_p95_ms": 1e3 * self._error_most.value(default=0.0),
            "profiles": {
                f"{variant}@{kind}": belief.status(now)
                for (variant, kind), belief in self.beliefs.items()
            },
        }
