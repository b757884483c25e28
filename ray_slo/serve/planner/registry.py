"""Which brain plans an application, and what it is told of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ray_slo.core import LatencyProfile
from ray_slo.core.policy import Policy
from ray_slo.core.profiles import load_profiles, profile_of
from ray_slo.planning import loki
from ray_slo.planning.brains.brain import Brain
from ray_slo.planning.brains.groups import GroupsBrain, GroupsSetting
from ray_slo.planning.brains.kairos import KairosBrain, KairosSetting, Sustained
from ray_slo.planning.brains.loki import LokiBrain, LokiSetting
from ray_slo.policies.registry import make_policy
from ray_slo.serve.config.spec import AppSpec

# A live plan has room for Poisson arrivals, and does not reload networks for nothing.
_LIVE = {"headroom_quantile": 0.95, "swap_cost": 0.1}


def make_brain(spec: AppSpec) -> Brain:
    """The brain of the planner that the application names, or of its groups."""
    if spec.planner is None or spec.planner.makes_groups:
        return GroupsBrain(groups_setting(spec))
    if spec.planner.is_loki:
        return LokiBrain(loki_setting(spec))
    return KairosBrain(kairos_setting(spec))


def setting(spec: AppSpec) -> GroupsSetting | LokiSetting | KairosSetting:
    """What the application's brain is told of it."""
    if spec.planner is None or spec.planner.makes_groups:
        return groups_setting(spec)
    return loki_setting(spec) if spec.planner.is_loki else kairos_setting(spec)


def groups_setting(spec: AppSpec) -> GroupsSetting:
    """What `GroupsBrain` is told."""
    variants: dict[str, tuple[str, ...]] = dict.fromkeys(spec.models, ())
    for key, ref in spec.variants().items():
        variants[ref.model] += (key,)
    homes = {kind: home for kind in spec.workers if (home := spec.group_of_kind(kind))}
    plain = GroupsSetting(
        variants,
        {name: model.latency_slo_ms / 1e3 for name, model in spec.models.items()},
        sum(worker.num_replicas for worker in spec.workers.values()),
        {name: tuple(group.models) for name, group in spec.groups.items()},
        homes,
    )
    if (planner := spec.planner) is None:
        return plain
    return replace(
        plain,
        planner=planner.name,
        kwargs=planner.kwargs,
        rates=planner.rates,
        memory_mb=planner.memory_mb,
        min_gain=planner.min_gain,
        profiles=profiles_of_files(spec),
    )


def loki_setting(spec: AppSpec) -> LokiSetting:
    """What `LokiBrain` is told."""
    pipeline, planner = spec.pipeline, spec.planner
    assert pipeline is not None and planner is not None
    kind, worker = next(iter(spec.workers.items()))
    slo_s = max(pipeline.latency_slo_ms - spec.response_margin_ms, 1.0) / 1e3
    problem = loki.Problem(
        pipeline.loki_tasks(lambda _: LatencyProfile([slo_s])),
        planner.rates.get(pipeline.root, 1.0),
        worker.most_replicas,
        slo_s,
        path_accuracies=pipeline.measured_paths,
        **{**_LIVE, **planner.kwargs},
    )
    return LokiSetting(
        problem,
        kind,
        worker.num_replicas,
        worker.scales,
        planner.interval_s,
        planner.demand,
        planner.make_before_break,
        profiles_of_files(spec),
    )


def kairos_setting(spec: AppSpec) -> KairosSetting:
    """What `KairosBrain` is told."""
    planner = spec.planner
    assert planner is not None
    ((name, model),) = spec.models.items()
    policy = functools.partial(make_policy, spec.policy.name, spec.policy.kwargs)
    return KairosSetting(
        name,
        tuple(spec.variants()),
        max(model.latency_slo_ms - spec.response_margin_ms, 1.0) / 1e3,
        {
            kind: worker.instance_type.model_copy(update={"name": kind})
            for kind, worker in spec.workers.items()
            if worker.instance_type is not None
        },
        {kind: bounds[1] for kind in spec.workers if (bounds := spec.replica_bounds(kind))},
        planner.kwargs,
        planner.rates.get(name, 1.0),
        planner.demand,
        planner.min_gain,
        _sustained(policy, name) if planner.name == "kairos_plus" else None,
    )


def _sustained(policy: Callable[[], Policy], model: str) -> Sustained:
    from ray_slo.simulation.sustained import sustained  # only one planner simulates

    return functools.partial(sustained, policy, model)


def profiles_of_files(spec: AppSpec) -> dict[str, LatencyProfile]:
    """Profiles of variants as files say, where they are given and can be read from here."""
    found = {}
    for key, ref in spec.variants().items():
        model = spec.models[ref.model]
        own = ref.spec.profile if ref.spec is not None else None
        if (file := own or model.profile) is None:
            continue
        try:
            known = load_profiles(file)
        except (OSError, ValueError):  # a worker will say what is wrong with it
            continue
        alone = own is not None or ref.spec is None
        if (profile := profile_of(known, ref.name, ref.model, alone=alone)) is not None:
            found[key] = profile.truncated(model.max_batch_size)
    return found
