"""A host that learns execution times from batches, as a live scheduler does, in virtual time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ray_slo.core.beliefs import Belief, Beliefs
from ray_slo.core.cluster import Cluster, Variant
from ray_slo.core.decisions import Decision, Dispatch, Drop
from ray_slo.core.policy import Policy, PolicyWrapper
from ray_slo.core.requests import BatchOutcome, BatchStatus, WorkerId
from ray_slo.core.trees import DEFAULT_CLASS, Tree

_TICK_S = 0.25  # as in `serve/scheduler`: the policy's view changes at most this often


class Learner(PolicyWrapper):
    """A policy that sees learned profiles, and whose refusals are tried if these may be wrong.

    Args:
        first_profile: factor of the profiles that are believed before the first batch.
        trees: what clients ask for. Default: every model.

    Raises:
        ValueError: `first_profile` is not positive.
    """

    def __init__(
        self,
        policy: Policy,
        cluster: Cluster,
        first_profile: float,
        trees: Sequence[Tree] | None = None,
    ) -> None:
        super().__init__(policy)
        if not (math.isfinite(first_profile) and first_profile > 0):
            raise ValueError(f"first_profile must be positive, got {first_profile}")
        self._first_profile = first_profile
        self._model_of = {v.name: m.name for m in cluster.models.values() for v in m.variants}
        alone = [
            Tree.of_model(name, {DEFAULT_CLASS: model.latency_slo_s})
            for name, model in cluster.models.items()
        ]
        self._beliefs = Beliefs(self._model_of, {t.name: t for t in trees or alone})
        self._cluster = cluster
        # Variants and kinds of workers of the batches in flight.
        self._ran_as: dict[tuple[WorkerId, int], tuple[str, str]] = {}
        self._flights: Counter[WorkerId] = Counter()
        self._next_look = 0.0
        self._has_news = False

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        for name, variant in cluster.variants.items():
            for kind, profile in variant.profiles.items():
                if (name, kind) not in self._beliefs:
                    self._beliefs[name, kind] = Belief(profile.scaled(self._first_profile))
        self._tell(now)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self._flights[worker] -= 1
        variant, kind = self._ran_as.pop((worker, outcome.batch_id))
        self.policy.batch_finished(now, worker, outcome)
        if outcome.status is BatchStatus.FINISHED:
            items = sum(r.size for r in outcome.requests)
            took_s = outcome.finished_at - outcome.started_at
            self._has_news = True
            self._beliefs.answered(outcome.requests, outcome.finished_at)
            if self._beliefs.ran(variant, kind, [(items, took_s)], now):
                self._tell(now)

    def decide(self, now: float) -> Decision:
        if now >= self._next_look and self._has_news:
            self._next_look, self._has_news = now + _TICK_S, False
            if self._beliefs.forget_unused() or any(b.is_news() for b in self._beliefs.values()):
                self._tell(now)
        decision = self._decided(now)
        again = [a for a in decision.actions if isinstance(a, Drop) and self._tries(now, a)]
        if not again:
            return decision
        self._tell(now)
        self.policy.requests_arrived(now, [r for drop in again for r in drop.requests])
        second = self._decided(now)
        kept = [a for a in decision.actions if not any(a is drop for drop in again)]
        return Decision([*kept, *second.actions], second.wake_at)

    def _decided(self, now: float) -> Decision:
        decision = self.policy.decide(now)
        for action in decision.actions:
            if isinstance(action, Dispatch):
                self._flights[action.worker] += 1
                kind = self._cluster.workers[action.worker].hardware
                self._ran_as[action.worker, action.batch_id] = action.variant, kind
        return decision

    def _tries(self, now: float, drop: Drop) -> bool:
        workers = self._cluster.workers.values()
        return self._beliefs.tries(
            drop, now, lambda: (w.loaded for w in workers if not self._flights[w.id])
        )

    def _tell(self, now: float) -> None:
        self.policy.cluster_changed(now, self._believed())

    def _believed(self) -> Cluster:
        models = {
            name: replace(model, variants=tuple(map(self._learned, model.variants)))
            for name, model in self._cluster.models.items()
        }
        return replace(self._cluster, models=models)

    def _learned(self, variant: Variant) -> Variant:
        beliefs = {kind: self._beliefs[variant.name, kind].tell() for kind in variant.profiles}
        return replace(variant, profiles=beliefs)
