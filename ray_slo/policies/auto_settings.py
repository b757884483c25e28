"""The settings that `auto` may use, by the shape of the application."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ray_slo.core.cluster import Cluster, Variant
from ray_slo.core.policy import InFlight, Policy, PolicyWrapper
from ray_slo.core.rehearsal import Setting
from ray_slo.core.trees import Tree
from ray_slo.policies.registry import policy_for

PLAIN = Setting("deferred", {})
PREFIX = Setting("deferred", {"gathering": "prefix"})
CONSOLIDATE = Setting("deferred", {"objective": "consolidate"})
EAGER = Setting("eager", {})
PRICE = Setting("price", {})
KAIROS = Setting("kairos", {"batch": True})
LARGEST = Setting("flex", {"preemption": False})
FLEX = Setting("flex", {})
DEFERRED_FLEX = Setting("deferred_flex", {})
CONSOLIDATE_FLEX = Setting("deferred_flex", {"objective": "consolidate"})


class Shape(NamedTuple):
    """The properties that decide which settings fit.

    Attributes:
        models: number of models.
        variants: largest number of variants of a model.
        kinds: number of kinds of hardware.
        sizes: whether requests with sizes other than 1 came.
    """

    models: int = 0
    variants: int = 0
    kinds: int = 0
    sizes: bool = False

    @classmethod
    def of(cls, cluster: Cluster, sizes: bool) -> Shape:
        """The shape of what the workers serve."""
        return cls(
            len(cluster.models),
            max((len(m.variants) for m in cluster.models.values()), default=0),
            len({worker.hardware for worker in cluster.workers.values()}),
            sizes,
        )


def candidates(shape: Shape, trees: Sequence[Tree], preempt: bool) -> list[Setting]:
    """Settings that fit; the first is the best guess."""
    tree = any(len(t.tasks) > 1 for t in trees)
    several = shape.variants > 1
    found = [PLAIN]
    if several or shape.models > 1:
        found.insert(0 if several else 1, PRICE)  # which shares workers by the fluid limit
    if shape.sizes:
        found.append(KAIROS)
    found += [EAGER, LARGEST]
    if tree:
        found += [found[0]._replace(limited=False), LARGEST._replace(limited=False)]
    elif shape.models > 1 or shape.sizes:
        found.append(PREFIX)
    if several:
        found += [PLAIN._replace(quickest=True), LARGEST._replace(quickest=True)]
    else:
        found.append(CONSOLIDATE)
    if shape.kinds > 1 and not shape.sizes and not tree:
        found.append(KAIROS)
    if preempt:
        found += [DEFERRED_FLEX, CONSOLIDATE_FLEX, FLEX]
    return found


def collapses(setting: Setting) -> bool:
    """Whether a setting serves ever smaller batches if the load exceeds the workers."""
    prefix = setting.kwargs.get("gathering") == "prefix"
    return prefix or setting.policy in ("eager", "timeout", "kairos")


def make(
    setting: Setting,
    cluster: Cluster,
    trees: Sequence[Tree],
    planned: bool,
    composing: Mapping[str, Any],
) -> Policy:
    """The policy of a setting, composed with what it lacks for the application."""
    variants = {m.name: len(m.variants) for m in cluster.models.values()}
    if setting.quickest:
        variants = dict.fromkeys(variants, 1)
    composing = {"planned": planned, "limited": setting.limited, **composing}
    made = policy_for(setting.policy, setting.kwargs, trees, variants, **composing)
    return Quickest(made) if setting.quickest else made


class Quickest(PolicyWrapper):
    """A policy that sees only the fastest variant of each model."""

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        loaded = {name for worker in cluster.workers.values() for name in worker.loaded}
        models = {
            m.name: replace(m, variants=(min(m.variants, key=partial(_latency_s, loaded)),))
            for m in cluster.models.values()
        }
        super().cluster_changed(now, replace(cluster, models=models))

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over from another policy, before the first event."""
        former = former.policy if isinstance(former, Quickest) else former
        self.policy.adopt(now, flights, batch_id, former)  # type: ignore[attr-defined]


def _latency_s(loaded: Collection[str], variant: Variant) -> float:
    """Latency of one request over all kinds of workers; infinite if no worker runs it."""
    if variant.name not in loaded:
        return math.inf
    return sum(profile.latency(1) for profile in variant.profiles.values())
