"""A host that learns execution times from batches, as a live scheduler does, in virtual time."""

from __future__ import annotations

from collections import Counter
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
    """

    def __init__(self, policy: Policy, cluster: Cluster, first_profile: float) -> None:
        super().__init__(policy)
        self._first_profile = first_profile
        self._model_of = {v.name: m.name for m in cluster.models.values() for v in m.variants}
        trees = {
            name: Tree.of_model(name, {DEFAULT_CLASS: model.latency_slo_s})
            for name, model in cluster.models.items()
        }
        self._beliefs = Beliefs(self._model_of, trees)
        self._cluster = cluster
        self._variant_of: dict[tuple[WorkerId, int], str] = {}  # of batches in flight
        self._flights: Counter[WorkerId] = Counter()
        self._next_look = 0.0
        self._has_news = False

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        for name, variant in cluster.variants.items():
            for kind, profile in variant.profiles.items():
                if (name, kind) not in self._beliefs:
                    self._beliefs[name, kind] = Belief(profile.scaled(self._first_profile))
        for worker in self._flights.keys() - cluster.workers.keys():
            del self._flights[worker]
        self._tell(now)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self._flights[worker] -= 1
        variant = self._variant_of.pop((worker, outcome.batch_id))
        self.policy.batch_finished(now, worker, outcome)
        if outcome.status is BatchStatus.FINISHED:
            items = sum(r.size for r in outcome.requests)
            took_s = outcome.finished_at - outcome.started_at
            kind = self._cluster.workers[worker].hardware
            self._has_news = True
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
                self._variant_of[action.worker, action.batch_id] = action.variant
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
