"""Learns the time of batches and the travel time of messages from batches that ran.

Only a batch that runs corrects a profile. If a profile makes every deadline look impossible (after
a cold start, or a disturbance that is over), no batch would run, and the profile would never
change. So it is doubted from time to time: it is lowered until a batch of one is tried.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ray_slo.core import (
    BatchStatus,
    Cluster,
    DispatchDelay,
    LatencyProfile,
    Model,
    OnlineProfile,
    Request,
    Variant,
    Worker,
)
from ray_slo.core.quantile import FEW_SAMPLES, Quantile, QuantileLine
from ray_slo.core.trees import Tree, tree_of_task
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.messages import BatchReport, Capacity
from ray_slo.serve.scheduler.roster import Roster

logger = logging.getLogger(__name__)

_MATERIAL = 0.02  # smaller changes of a profile are not reported to the policy
_DELAY_QUANTILE = 0.95  # predictions use this quantile of dispatch delays (Symphony, Appendix D)
_LARGE = 32  # batch size at which changes of the delay are checked
_FORGET_AFTER_S = 60.0  # measurements of a variant that the policy avoids are kept this long
_DOUBT_AFTER_S = 1.0  # after this time without a batch, a model that looks too slow is tried again


class Belief:
    """A learned latency profile, and the version that the policy knows.

    Attributes:
        largest: largest batch that there is memory for. None: the largest of the profile.
    """

    def __init__(self, prior: LatencyProfile, quantile: float = 0.95) -> None:
        self._online = OnlineProfile(prior, quantile=quantile)
        self._told: LatencyProfile | None = None
        self.measured_at = -math.inf
        self.largest: int | None = None

    @property
    def profile(self) -> LatencyProfile:
        profile = self._online.profile
        if self.largest is None or self.largest >= profile.max_batch_size:
            return profile
        return profile.truncated(self.largest)

    @property
    def measured_to(self) -> int:
        """Largest batch size that was measured, and that there is memory for."""
        measured_to = self._online.measured_to
        return measured_to if self.largest is None else min(measured_to, self.largest)

    @property
    def limit(self) -> int:
        """Largest batch size of the profile, with or without memory for it."""
        return self._online.prior.max_batch_size

    @property
    def samples(self) -> int:
        return self._online.samples

    def observe(self, measured: Iterable[tuple[int, float]], now: float) -> None:
        """Take the sizes and seconds of batches that ran. Batches larger than the profile are
        ignored."""
        for size, seconds in measured:
            if size <= self.limit:
                self._online.observe(size, seconds)
                self.measured_at = now

    def is_news(self) -> bool:
        """Whether the profile differs from the policy's version."""
        return self._told is None or self.profile.differs(self._told, _MATERIAL)

    def tell(self) -> LatencyProfile:
        """Return the profile, and note that the policy knows it now."""
        self._told = self.profile
        return self._told

    def forget(self) -> None:
        """Return to the profile before the first batch."""
        self._online = OnlineProfile(self._online.prior, quantile=self._online.quantile)

    def doubt(self, factor: float) -> None:
        """Set the profile to `factor` times its value, and forget the measurements."""
        scaled = self._online.profile.scaled(factor)
        self._online = OnlineProfile(scaled, quantile=self._online.quantile)


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
        self._tree_of = tree_of_task(spec.trees)
        self.beliefs: dict[tuple[str, str], Belief] = {}
        self._ran_at: dict[str, float] = {}  # time of the last batch, by model
        # Time of a round trip to a worker without the batch.
        self._overhead = QuantileLine(_DELAY_QUANTILE, prior=FEW_SAMPLES)
        self._prediction_error = Quantile(0.5)
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

    def ended(self, report: BatchReport, kind: str, now: float) -> None:
        """Note that a batch is over on a worker of this kind."""
        if report.variant in self._variants:
            self._ran_at[self._variants[report.variant].model] = now
        belief = self.beliefs.get((report.variant, kind))
        if belief is not None and report.measured:
            belief.observe(report.measured, now)
            self._changed = True

    def returned(self, report: BatchReport, waited_s: float, finish_in_s: float) -> float:
        """Take the report of a batch that came back. Return the time since the batch ended, in
        seconds.

        Args:
            waited_s: time since the batch was granted, in seconds.
            finish_in_s: time until its predicted end, in seconds.
        """
        overhead_s = max(waited_s - report.held_s, 0.0)
        self._overhead.add(report.batch_size, overhead_s)
        ago_s = 0.5 * overhead_s  # half of the overhead is the transfer of the report
        if report.status in (BatchStatus.FINISHED, BatchStatus.FAILED):
            self._prediction_error.add(-finish_in_s - ago_s)
        return ago_s

    def preempted(self, delay_s: float) -> None:
        """Note that a batch was stopped. Its worker was known to be free `delay_s` seconds after
        the decision."""
        self._preempt_delay.add(delay_s)

    def take_news(self, now: float) -> bool:
        """Return whether there is news for the policy since the last call."""
        self._forget_unused()
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
        rates: dict[str, dict[str, float]] = {}  # by model and worker
        for name, worker in self._workers.items():
            for variant in worker.variants:
                model = self._variants[variant].model
                profile = self.beliefs[variant, worker.kind].profile
                slo_s = self._spec.models[model].latency_slo_ms / 1e3
                rate = profile.throughput(max(profile.max_batch_within(slo_s), 1))
                of_model = rates.setdefault(model, {})
                of_model[name] = max(of_model.get(name, 0.0), rate)
        return {
            model: Capacity(sum(of_model.values()), frozenset(of_model))
            for model, of_model in rates.items()
        }

    def _forget_unused(self) -> None:
        """Return to the first profile of a variant that the policy avoids. The variant may have
        looked slow in a disturbance that is over, and would never be measured again.
        """
        for (variant, _), belief in self.beliefs.items():
            ran_at = self._ran_at.get(self._variants[variant].model, -math.inf)
            if belief.samples and ran_at - belief.measured_at > _FORGET_AFTER_S:
                belief.forget()
                self._changed = True

    def doubt(self, refused: Request, now: float) -> bool:
        """Lower profiles if nothing else prevents a model from being served.

        In a pipeline, this may be a profile of any task from the refused one on.

        Returns:
            Whether a profile was lowered.
        """
        tree = self._tree_of[refused.task]
        models = _from(tree, refused.task)
        budget_s = refused.deadline - refused.arrival
        ran_at = max(self._ran_at.get(model, -math.inf) for model in models)
        slo_s = min(tree.slos_s.values())
        if now - ran_at <= _DOUBT_AFTER_S or budget_s < 0.5 * slo_s:
            return False
        self._ran_at.update(dict.fromkeys(models, now))
        self._overhead.forget()
        self._changed = True  # report it now, because no batch will run and report the change
        quickest: dict[str, dict[str, tuple[float, str]]] = {}  # by kind and model
        for (variant, kind), belief in self.beliefs.items():
            if (model := self._variants[variant].model) in models:
                found, of_kind = (belief.profile.latency(1), variant), quickest.setdefault(kind, {})
                of_kind[model] = min(of_kind.get(model, found), found)
        lowered = False
        for kind, of_kind in quickest.items():
            needed_s = sum(seconds for seconds, _ in of_kind.values())
            if needed_s <= 0.5 * budget_s:
                continue
            lowered = True
            for seconds, variant in of_kind.values():
                logger.warning(
                    "%s looks too slow for its SLO on %s (%.4g ms): trying again",
                    variant,
                    kind,
                    seconds * 1e3,
                )
                self.beliefs[variant, kind].doubt(0.5 * budget_s / needed_s)
        return lowered

    def status(self) -> dict[str, Any]:
        """For `ray-slo status`."""
        delay = self.dispatch_delay
        return {
            "dispatch_delay_ms": 1e3 * delay(1),
            "dispatch_per_request_ms": 1e3 * delay.per_request_s,
            "preempt_delay_ms": 1e3 * self.preempt_delay_s,
            "prediction_error_ms": 1e3 * self._prediction_error.value(default=0.0),
            "profiles": {
                f"{variant}@{kind}": {
                    "latency_1_ms": 1e3 * belief.profile.latency(1),
                    "latency_max_ms": 1e3 * belief.profile.latency(belief.profile.max_batch_size),
                    "max_batch_size": belief.profile.max_batch_size,
                    "measured_to": belief.profile.measured_to,
                    "samples": belief.samples,
                    **belief.profile.to_json(),
                }
                for (variant, kind), belief in self.beliefs.items()
            },
        }


def _from(tree: Tree, task: str) -> list[str]:
    """The models of a task and of all below it."""
    found = [task]
    for above in found:  # grows as it goes
        found += tree.children(above)
    return [tree[name].model for name in found]
