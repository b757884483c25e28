"""What a host believes about execution times, and how a wrong belief heals.

`OnlineProfile` learns a profile from measured batches. A policy acts on a `Belief`. Only a batch
that runs corrects it. If a belief makes every deadline look impossible (after a cold start, or a
disturbance that is over), no batch would run, and the belief would never change. So a request is
*tried* instead of refused if a worker is idle and the belief is not sure: the profile is lowered
until a batch of one fits (`Beliefs.tries`). This is optimism in the face of uncertainty, without
random numbers.

A belief is cautious: it is a high quantile of the measured times. But a request that arrives while
a batch runs waits for that one, and then needs its own. If the quantile is more than half of the
SLO, such a request is refused, although most of them would be in time. So the belief is at most
half of the SLO for a batch of one, if that is more than the typical time and a tenth
(`Belief.bound`).

Caution costs: what is refused because of a rare long batch would mostly be in time. So the quantile
falls a little with every answer in time, and rises with every late one, until about one answer in
two hundred is late (`Caution`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ray_slo.core.decisions import Drop, DropReason
from ray_slo.core.online import FEW, OnlineProfile, octave_of
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import Request
from ray_slo.core.trees import Tree, tree_of_task

_MATERIAL = 0.02  # smaller changes of a profile are not reported to the policy
_FORGET_AFTER_S = 60.0  # measurements of a variant that the policy avoids are kept this long
# A belief is not sure after this time without a batch: seconds, and multiples of ℓ(1). So trials
# take at most a tenth of a worker's time.
_OLD = (1.0, 10.0)
TRIED_FROM = 0.5
"""A request is tried if at least this share of its SLO is left."""
_TRIED = 0.5  # share of the remaining time that a tried batch of one may take
# Batches of one on the way to an answer may take this share of the SLO, or this multiple of their
# typical times.
_OF_SLO, _OF_TYPICAL = 0.5, 1.1
CAUTIOUS = 0.95
"""A higher quantile of the measured times is a wish for caution: no bound, and no change."""
_LATE = 0.005  # share of late answers at which the quantile stays
_STEP = 0.1  # of the quantile, with a late answer
_LEAST = 0.5  # quantile


class Caution:
    """The quantile of measured times that predictions use. It follows the share of late answers.

    The rule is that of adaptive conformal inference (Gibbs and Candès, NeurIPS 2021, equation 2).

    Attributes:
        quantile: the quantile.
    """

    def __init__(self) -> None:
        self.quantile = CAUTIOUS

    def answered(self, in_time: int, late: int) -> bool:
        """Take the numbers of answers in time and late. Return whether the quantile has changed."""
        before = self.quantile
        quantile = before + _STEP * ((1 - _LATE) * late - _LATE * in_time)
        self.quantile = min(max(quantile, _LEAST), CAUTIOUS)
        return self.quantile != before


class Belief:
    """A learned latency profile, and the version that the policy knows.

    Attributes:
        largest: largest batch that there is memory for. None: the largest of the profile.
        measured_at: time of the last measurement, seconds.
    """

    def __init__(self, prior: LatencyProfile, quantile: float = CAUTIOUS) -> None:
        self._quantile, self._most = quantile, math.inf
        self._caution = quantile
        self._online = OnlineProfile(prior, quantile=quantile)
        self._told: LatencyProfile | None = None
        self._batches = 0  # measured ever, also before the profile was doubted
        self._octaves_at: dict[int, float] = {}  # times of the last measurements, seconds
        self._doubted_at = -math.inf
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

    @property
    def typical_s(self) -> float:
        """Typical time of a batch of one, in seconds."""
        return self._online.typical_s(1)

    def bound(self, slo_s: float, needed_s: float) -> None:
        """Bound the profile, so that a request can wait for a typical batch and be in time.

        Args:
            slo_s: SLO of the request, in seconds.
            needed_s: typical time of batches of one on its way to an answer, in seconds.
        """
        if self._quantile <= CAUTIOUS:
            self._most = max(_OF_SLO * slo_s / needed_s, _OF_TYPICAL)
            self._online.bound(self._most)

    def be_cautious(self, quantile: float) -> None:
        """Predict with this quantile of the measured times, unless more caution is wished."""
        if self._quantile <= CAUTIOUS:
            self._caution = quantile
            self._online.be_cautious(quantile)

    @property
    def margin(self) -> float:
        """Factor of the profile because the latest batches took longer than predicted."""
        return self._online.margin

    @property
    def is_settled(self) -> bool:
        """Whether the latest batches took as long as was expected. If not, the policy has to know
        at once."""
        return self._online.is_settled

    def observe(self, measured: Iterable[tuple[int, float]], now: float) -> None:
        """Take the sizes and seconds of batches that ran. Batches larger than the profile are
        ignored."""
        for size, seconds in measured:
            if size <= self.limit:
                self._online.observe(size, seconds)
                self._batches += 1
                self.measured_at = self._octaves_at[octave_of(size)] = now

    def rate_within(self, slo_s: float, most: float = math.inf) -> float:
        """Return the requests/s of batches back to back, of at most `most` requests. Each is
        predicted to be within the SLO, and takes its typical time. The rate is infinite before the
        first batch."""
        profile = self.profile
        if not profile.measured_to:
            return math.inf
        size = max(int(min(profile.max_batch_within(slo_s), most)), 1)
        return size / min(self._online.typical_s(size), profile.latency(size))

    def is_sure(self, now: float) -> bool:
        """Whether enough batches were measured, one of them lately, and no change was noticed."""
        least_s, times = _OLD
        old_s = max(least_s, times * self.profile.latency(1))
        is_fresh = self._batches >= FEW and now - self.measured_at <= old_s
        return is_fresh and self.is_settled

    def status(self, now: float) -> dict[str, Any]:
        """For `ray-slo status`. `sizes` has an entry per octave of batch sizes that was measured:
        its largest size, the estimate, the number of batches that count, how their durations
        scatter (quantile, as a multiple of typical times), and the age of the last one."""
        profile = self.profile
        return {
            "latency_1_ms": 1e3 * profile.latency(1),
            "latency_max_ms": 1e3 * profile.latency(profile.max_batch_size),
            "max_batch_size": profile.max_batch_size,
            "measured_to": profile.measured_to,
            "samples": self.samples,
            "margin": self.margin,
            "spread": self._online.spread,
            "age_s": now - self.measured_at if self._octaves_at else None,
            "sizes": [
                {
                    "batch_size": size,
                    "latency_ms": 1e3 * self._online.profile.latency(size),
                    "batches": count,
                    "spread": spread,
                    "age_s": now - self._octaves_at[octave_of(size)],
                }
                for size, (count, spread) in self._online.known().items()
            ],
            **profile.to_json(),
        }

    def is_tried(self, now: float) -> bool:
        """Whether a batch is to run because the profile was doubted."""
        return self._doubted_at > self.measured_at and now - self._doubted_at <= _OLD[0]

    def is_news(self) -> bool:
        """Whether the profile differs from the policy's version."""
        return self._told is None or self.profile.differs(self._told, _MATERIAL)

    def tell(self) -> LatencyProfile:
        """Return the profile, and note that the policy knows it now."""
        self._told = self.profile
        return self._told

    def forget(self) -> None:
        """Return to the profile before the first batch."""
        self._begin(self._online.prior)

    def _begin(self, prior: LatencyProfile) -> None:
        self._online = OnlineProfile(prior, quantile=self._quantile)
        self._online.bound(self._most)
        self._online.be_cautious(self._caution)

    def doubt(self, factor: float, now: float) -> None:
        """Lower the profile, so that it takes half of `factor` times its value or less, and forget
        the measurements.

        Args:
            factor: remaining time of the request that is tried, as a share of the predicted time.
        """
        self._begin(self._online.profile.scaled(min(_TRIED * factor, 1.0)))
        self._doubted_at = now


class Beliefs(dict[tuple[str, str], Belief]):
    """Beliefs by variant and kind of worker.

    Args:
        models: the model of each variant.
        trees: of the application's tasks.
    """

    def __init__(self, models: Mapping[str, str], trees: Mapping[str, Tree]) -> None:
        super().__init__()
        self._models = models
        self._tree_of = tree_of_task(trees)
        self._trees = tuple(trees.values())
        self._caution = {name: Caution() for name in trees}
        self._ran_at: dict[str, float] = {}  # time of the last batch, by model

    def ran(
        self, variant: str, kind: str, measured: Sequence[tuple[int, float]], now: float
    ) -> bool:
        """Take the sizes and seconds of a variant's batches. Return whether the policy has to know
        at once."""
        if variant in self._models:
            self._ran_at[self._models[variant]] = now
        belief = self.get((variant, kind))
        if belief is None or not measured:
            return False
        belief.observe(measured, now)
        self._bound(self._models[variant])
        return not belief.is_settled

    def answered(self, requests: Iterable[Request], at: float) -> None:
        """Note that requests were answered at this time. All tasks of a tree have one quantile,
        because a late answer may be the fault of each."""
        counts: dict[str, list[int]] = {}  # in time and late, by tree
        for request in requests:
            tree, late = self._tree_of[request.task], request.deadline < at
            if late or not tree.children(request.task):
                counts.setdefault(tree.name, [0, 0])[late] += 1
        moved = [name for name, count in counts.items() if self._caution[name].answered(*count)]
        if not moved:  # mostly so, as it stays at a bound
            return
        changed = {model for tree in self._trees if tree.name in moved for model in tree.models}
        for (variant, _), belief in self.items():
            if (model := self._models[variant]) in changed:
                its = [self._caution[t.name].quantile for t in self._trees if model in t.models]
                belief.be_cautious(max(its))

    def _bound(self, model: str) -> None:
        """Bound the beliefs of a model by the SLOs of the requests that it serves."""
        quickest: dict[str, float] = {}  # typical seconds of the fastest variant, by model
        for (variant, _), belief in self.items():
            its = self._models[variant]
            quickest[its] = min(quickest.get(its, math.inf), belief.typical_s)
        times = [(t.slo_s, _longest_s(t, quickest)) for t in self._trees if model in t.models]
        if not times:
            return
        slo_s, needed_s = min(times, key=lambda time: time[0] / time[1])
        for (variant, _), belief in self.items():
            if self._models[variant] == model:
                belief.bound(slo_s, needed_s)

    def forget_unused(self) -> bool:
        """Return to the first profiles of variants that the policy avoids. Such a variant may have
        looked slow in a disturbance that is over, and would never be measured again.

        Returns:
            Whether there was one.
        """
        found = False
        for (variant, _), belief in self.items():
            ran_at = self._ran_at.get(self._models[variant], -math.inf)
            if belief.samples and ran_at - belief.measured_at > _FORGET_AFTER_S:
                belief.forget()
                found = True
        return found

    def tries(self, drop: Drop, now: float, idle: Callable[[], Iterable[Collection[str]]]) -> bool:
        """Lower profiles that are not sure, so that refused requests are tried, if the first one
        has at least half of its SLO left.

        In a pipeline, these may be profiles of any task from the refused one on.

        Args:
            idle: function that returns the loaded variants of each worker with nothing to do.

        Returns:
            Whether a profile was lowered. Then the requests are to arrive again.
        """
        refused = drop.requests[0]
        if drop.reason not in (DropReason.WOULD_MISS, DropReason.SHED):
            return False
        tree = self._tree_of[refused.task]
        models = _from(tree, refused.task)
        left_s = refused.deadline - now
        if left_s < TRIED_FROM * min(tree.slos_s.values()):
            return False
        quickest: dict[str, dict[str, tuple[float, str]]] = {}  # by kind and model
        for (variant, kind), belief in self.items():
            if (model := self._models[variant]) in models:
                found, of_kind = (belief.profile.latency(1), variant), quickest.setdefault(kind, {})
                of_kind[model] = min(of_kind.get(model, found), found)
        lowered = False
        for kind, of_kind in quickest.items():
            needed_s = sum(seconds for seconds, _ in of_kind.values())
            beliefs = [self[variant, kind] for _, variant in of_kind.values()]
            if all(b.is_sure(now) for b in beliefs) or any(b.is_tried(now) for b in beliefs):
                continue
            if not lowered and not any(
                self._models.get(variant) == refused.model
                for loaded in idle()
                for variant in loaded
            ):
                return False
            lowered = True
            for belief in beliefs:
                belief.doubt(left_s / needed_s, now)
        return lowered


def _longest_s(tree: Tree, quickest: Mapping[str, float]) -> float:
    """Return the longest sum of seconds from the root of a tree to a last task."""
    until: dict[str | None, float] = {None: 0.0}
    for task in tree.order:
        until[task.name] = until[task.parent] + quickest.get(task.model, 0.0)
    return max(until.values())


def _from(tree: Tree, task: str) -> list[str]:
    """The models of a task and of all below it."""
    found = [task]
    for above in found:  # grows as it goes
        found += tree.children(above)
    return [tree[name].model for name in found]
