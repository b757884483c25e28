"""The planner `auto`. It decides the number of workers of each kind and what they serve, for any
application."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ray_slo.core.names import nearest
from ray_slo.core.trees import Tree, TreeTask, root_and_class, stream_of
from ray_slo.planning import auto
from ray_slo.planning.auto import Demand, Kind, Model, Problem, Variant
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.brains.auto_jobs import AutoSetting
from ray_slo.policies.registry import follows_assignments, policy_for
from ray_slo.serve.config.files import profiles_of_files
from ray_slo.serve.planner.plugin import PlannerPlugin, arguments_of

if TYPE_CHECKING:
    from ray_slo.serve.config.app import AppConfig, PlannerConfig
    from ray_slo.serve.config.spec import AppSpec
    from ray_slo.serve.config.workers import WorkerConfig

FOLLOWS = {"models", "trees", "demand", "kinds", "present", "current"}
FOLLOWS |= {"group_of", "group_now", "allowed_groups"}
"""Fields of a problem that are measured, or follow from the application."""

_FIXED = {"waiting_factor", "fits_alone", "headroom_quantile", "headroom_period_s"}
_IDLE_S = 60.0  # least time before the last worker stops, unless the user names one
_HEARD_S = 2.0  # frontends report more often than this; with less, busy streams would look idle


class Auto(PlannerPlugin):
    """Plans any application.

    Attributes:
        settings: what `planner.kwargs` has if it does not say otherwise.
    """

    settings: ClassVar[Mapping[str, Any]] = {"swap_cost": 0.1}  # no reload without a gain
    Arguments = arguments_of(auto.Problem, without=FOLLOWS | _FIXED)
    tunable = scales = chooses_groups = True
    assigns = False  # a policy that does not choose variants is composed, and follows the plan
    unused = frozenset({"memory_mb", "min_gain"})
    waits = True
    reads_workers = frozenset({"price_per_hour", "memory_mb", "interruptions_per_hour"})
    reads_classes = True

    @classmethod
    def check(cls, config: AppConfig, planner: PlannerConfig) -> None:
        given, kinds = cls.arguments(planner.kwargs), config.kinds
        free = [kind for kind, worker in kinds.items() if worker.rented is None]
        if given.get("budget_per_hour") is not None and free:
            raise ValueError(
                f"{config.kind_field(free[0])}.price_per_hour, or instance_type: required, as "
                "planner.kwargs.budget_per_hour is given"
            )
        for stream, rate in planner.rates.items():
            root, _, slo_class = stream.partition("@")
            first = {pipeline.root: pipeline for pipeline in config.all_pipelines.values()}
            known = config.roots.get(root) or first.get(root)
            if known is None or (slo_class and slo_class not in known.slo_classes):
                raise ValueError(
                    f"planner.rates: {stream!r} is not a model or pipeline; there are "
                    f"{', '.join(config.roots)}{nearest(root, list(config.roots))}; name an SLO "
                    "class as 'NAME@CLASS'"
                )
            if not 0 < rate < math.inf:
                raise ValueError(f"planner.rates.{stream} must be positive, got {rate}")

    @classmethod
    def arguments(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = super().arguments(kwargs)
        _check_arguments(cls.fields(given))
        return given

    @classmethod
    def fields(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the problem that the planner's arguments set."""
        return {**cls.settings, **given}

    @classmethod
    def replica_bounds(cls, worker: WorkerConfig, planner: PlannerConfig) -> tuple[int, int] | None:
        most = worker.most_replicas
        return None if most is None else (worker.least_replicas, most)

    @classmethod
    def brain(cls, spec: AppSpec) -> AutoBrain:
        return AutoBrain(cls.setting(spec))

    @classmethod
    def setting(cls, spec: AppSpec) -> AutoSetting:
        planner = spec.planner
        assert planner is not None
        bounds = {kind: worker.replica_bounds for kind, worker in spec.workers.items()}
        delays = {kind: worker.autoscaling for kind, worker in spec.workers.items()}
        idle = [
            max(delay.downscale_delay_s or 0.0, _IDLE_S)
            if delay.downscale_to_zero_delay_s is None
            else max(delay.downscale_to_zero_delay_s, _HEARD_S)
            for kind, delay in delays.items()
            if bounds[kind] is not None
        ]
        may_idle = all(least == 0 for b in bounds.values() for least in (b or (1,))[:1])
        files, assigned = profiles_of_files(spec), _assigned(spec)
        return AutoSetting(
            problem_of(spec, cls.fields(planner.kwargs)),
            {kind: worker.num_replicas for kind, worker in spec.workers.items()},
            frozenset(kind for kind, b in bounds.items() if b is not None),
            planner.interval_s,
            {kind: delay.upscale_delay_s for kind, delay in delays.items()},
            {k: d.downscale_delay_s for k, d in delays.items() if d.downscale_delay_s is not None},
            max(idle) if may_idle else None,
            planner.demand,
            planner.make_before_break,
            {(v, kind): profile for v, profile in files.items() for kind in spec.workers},
            choosing=frozenset(spec.workers.keys() - assigned),
        )


def problem_of(spec: AppSpec, given: Mapping[str, Any] = MappingProxyType({})) -> Problem:
    """Return the problem of an application with these arguments, without its measured values."""
    variants: dict[str, list[Variant]] = {name: [] for name in spec.models}
    for key, ref in spec.variants().items():
        # A single network without a known accuracy gets 100 %, so it does not lower the mean.
        accuracy = 100.0 if ref.accuracy is None else ref.accuracy
        variants[ref.model].append(Variant(key, accuracy, {}))
    kinds = [
        Kind(
            kind,
            *(worker.replica_bounds or (worker.num_replicas, worker.num_replicas)),
            price_per_hour=worker.price_per_hour,
            memory_mb=math.inf if worker.memory_mb is None else worker.memory_mb,
            group=worker.group,
            interruptions_per_hour=worker.interruptions_per_hour,
        )
        for kind, worker in spec.workers.items()
    ]
    trees = tuple(_in_time(tree, spec.response_margin_ms / 1e3) for tree in spec.trees.values())
    streams = [stream for tree in trees for stream, _ in tree.streams()]
    # An SLO class without a given rate gets a small one, until there are requests.
    usual = {s: 0.0 if "@" in s else 1.0 for s in streams}
    usual |= _rates({} if spec.planner is None else spec.planner.rates, spec.trees)
    return Problem(
        tuple(Model(name, tuple(its)) for name, its in variants.items()),
        trees,
        {stream: Demand(usual[stream]) for stream in streams},
        tuple(kinds),
        group_of=spec.homes if spec.groups else {},
        allowed_groups=_allowed(spec),
        **given,
    )


def _rates(rates: Mapping[str, float], trees: Mapping[str, Tree]) -> dict[str, float]:
    """Return the rates by stream. The name of a pipeline's root task also means the pipeline."""
    first = {tree.root: name for name, tree in trees.items()}
    named = ((*root_and_class(stream), rate) for stream, rate in rates.items())
    return {
        stream_of(root if root in trees else first[root], slo_class): rate
        for root, slo_class, rate in named
    }


def _allowed(spec: AppSpec) -> dict[str, tuple[str, ...]]:
    """Return the groups whose policy can serve a model, for models that no group lists."""
    found = {}
    for model in sorted(spec.unlisted):
        sized = model in spec.sized
        may = tuple(g for g in spec.groups if not spec.policy_of(g).refusal(sized))
        found[model] = may or tuple(spec.groups)  # the config was checked
    return found


def _in_time(tree: Tree, margin_s: float) -> Tree:
    """Return the tree with its SLOs reduced by the time to send the answer back."""
    slos_s = {name: max(slo_s - margin_s, 1e-3) for name, slo_s in tree.slos_s.items()}
    return replace(tree, slos_s=slos_s)


def _assigned(spec: AppSpec) -> set[str]:
    """Return the kinds of workers for which the plan says what each one serves. They have variants
    to choose from and their policy follows the plan, or their policy makes routes from it."""
    found = set()
    trees = list(spec.trees.values())
    for kind, worker in spec.workers.items():
        given = spec.policy_of(worker.group)
        policy = policy_for(given.name, given.kwargs, trees)
        its = set(spec.models)
        if worker.group is not None:
            its = {m for m in spec.models if spec.homes.get(m, worker.group) == worker.group}
        several = any(len(spec.models[model].variants) > 1 for model in its)
        routes = getattr(policy, "for_pipelines", False)
        if routes or (several and follows_assignments(policy)):
            found.add(kind)
    return found


def _check_arguments(given: dict[str, Any]) -> None:
    """Check that the arguments are in their range."""
    one = Model("m", (Variant("m", 100.0, {}),))
    alone = Tree("m", (TreeTask("m", "m"),), {"": 1.0})
    try:
        Problem((one,), (alone,), {}, (Kind("k", 1, 1),), **given)
    except (TypeError, ValueError) as error:
        said = str(error)
        raise ValueError(said if said.startswith("planner") else f"planner.kwargs.{said}") from None
