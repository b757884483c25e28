"""From what users write to what runs: defaults, and what follows from the rest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ray_slo.core.explain import validated
from ray_slo.policies.registry import DEFAULTS, POLICIES, make_policy, name_of
from ray_slo.serve.config.app import AppConfig, PlannerConfig, Settings
from ray_slo.serve.config.policy import PolicyConfig, PolicySpec
from ray_slo.serve.config.spec import AppSpec, PlannerSpec, WorkerSpec
from ray_slo.serve.planner.plugin import planner_class

_PIPELINE = DEFAULTS["pipeline"]  # its arguments follow from the pipeline


def parse_spec(data: dict[str, Any]) -> AppSpec:
    """An application's `args`, checked and resolved.

    Raises:
        ValueError: one line per mistake: field, value, valid choices.
    """
    return resolve(validated(AppConfig, data))


def resolve(config: AppConfig) -> AppSpec:
    """What runs.

    Raises:
        ValueError: parts that do not fit each other, with the field, the value and the choices.
    """
    _check_served(config)
    planner = config.planned_by
    if planner is not None:
        planner_class(planner.name).check(config, planner)
        planner = planner.model_copy(
            update={"kwargs": planner_class(planner.name).arguments(planner.kwargs)}
        )
    _check_groups(config, planner)
    models, pipeline = config.served, config.pipeline
    if pipeline is not None:  # the models have its code
        bare = {name: task.without_code() for name, task in pipeline.tasks.items()}
        pipeline = pipeline.model_copy(update={"tasks": bare})
    return AppSpec(
        **{name: getattr(config, name) for name in Settings.model_fields},
        models=models,
        pipeline=pipeline,
        workers=_workers(config, planner),
        groups=config.groups,
        planner=_planner(planner),
        policy=_policy(config, planner, config.policy, _on_default(config, planner)),
        group_policies={
            name: _policy(config, planner, group.policy, _may_have(config, planner, name), name)
            for name, group in config.groups.items()
            if group.policy is not None
        },
        deployment_name=config.deployment_name,
    )


def _workers(config: AppConfig, planner: PlannerConfig | None) -> dict[str, WorkerSpec]:
    group_of = [name for name, group in config.groups.items() for _ in group.workers]
    answer = {}
    for i, (kind, worker) in enumerate(config.kinds.items()):
        bounds = None
        if planner is not None:
            bounds = planner_class(planner.name).replica_bounds(worker, planner)
        if bounds is None and worker.most_replicas is not None:
            raise ValueError(
                f"workers.{kind}.max_replicas: nobody decides how many there are; that takes a "
                "pipeline with the planner 'loki', or the planner 'kairos'"
            )
        answer[kind] = WorkerSpec(
            num_replicas=worker.first_replicas,
            replica_bounds=bounds,
            autoscaling=worker.autoscaling,
            ray_actor_options=worker.resources(),
            serve_options=worker.for_serve(),
            instance_type=worker.instance_type,
            group=group_of[i] if group_of else None,
        )
    return answer


def _planner(planner: PlannerConfig | None) -> PlannerSpec | None:
    if planner is None:
        return None
    kind = planner_class(planner.name)
    given = {name: getattr(planner, name) for name in PlannerConfig.model_fields}
    given["interval_s"] = planner.interval_s or kind.interval_s
    return PlannerSpec(**given, makes_groups=kind.makes_groups, tunable=kind.tunable)


def _may_have(config: AppConfig, planner: PlannerConfig | None, group: str) -> set[str]:
    """Models that a group has at first, or that a planner may give it."""
    moves = planner is not None and planner_class(planner.name).makes_groups
    return set(config.served if moves else config.groups[group].models)


def _on_default(config: AppConfig, planner: PlannerConfig | None) -> set[str]:
    """Models that the application's policy may have to serve."""
    if not config.groups:
        return set(config.served)
    without = [name for name, group in config.groups.items() if group.policy is None]
    return {model for name in without for model in _may_have(config, planner, name)}


def _policy(
    config: AppConfig,
    planner: PlannerConfig | None,
    given: PolicyConfig,
    models: Collection[str],
    group: str | None = None,
) -> PolicySpec:
    """The policy that is named, else the planner's, else the default.

    Args:
        models: that it may have to serve.
        group: whose policy it is; None: the application's.

    Raises:
        ValueError: it cannot serve them.
    """
    name, kwargs = given.name, given.kwargs
    planned_by = None if planner is None else planner_class(planner.name)
    if config.pipeline is not None and planner is None and name in (None, _PIPELINE):
        raise ValueError(
            "policy: 'pipeline' routes as a planner says, and there is none; choose another "
            "policy, or the planner 'loki'"
        )
    if config.pipeline is None and name == _PIPELINE:
        raise ValueError("policy: 'pipeline' is for a pipeline, and there is none")
    if planner is not None and planned_by is not None and planned_by.default_policy is not None:
        name = name or planned_by.default_policy
        if name == planned_by.default_policy:
            kwargs = planned_by.policy_kwargs(config, planner, kwargs)
    if name is None:
        chooses = any(config.served[model].variants for model in models)
        name = DEFAULTS["variants" if chooses else "models"]
    instead = ""
    if config.pipeline is not None:
        instead = "'pipeline' with the planner 'loki'"
    try:
        made = make_policy(name, kwargs)
        if config.pipeline is not None and name != _PIPELINE:
            _check_serves_tasks(made, planner is not None)
        spec = PolicySpec(name=name, kwargs=kwargs, preempts=getattr(made, "preempts", False))
        for model in sorted(models):
            spec.refuse(model, config.served[model], False, instead)
    except ValueError as error:
        where = "policy" if group is None else f"groups.{group}.policy"
        raise ValueError(f"{where}: {str(error).removeprefix('policy: ')}") from None
    return spec


def _check_serves_tasks(policy: Any, planned: bool) -> None:
    """Refuse a policy that is not for the tasks of a pipeline, or ignores its planner."""
    if not getattr(policy, "serves_tasks", True):
        raise ValueError(
            f"policy: {name_of(policy)!r} takes the deadline of the pipeline for that of each "
            "task, and leaves the tasks below no time; choose 'pipeline' with the planner "
            "'loki', or 'eager' with planner: null"
        )
    if planned and name_of(policy) in POLICIES:
        raise ValueError(
            f"policy: {name_of(policy)!r} knows nothing of what the planner assigns; choose "
            "'pipeline', or planner: null"
        )


def _check_served(config: AppConfig) -> None:
    pipeline = config.pipeline
    if pipeline is None:
        if not config.models:
            raise ValueError("models: required (or a pipeline)")
        for name, model in config.models.items():
            if any(variant.factors for variant in model.variants.values()):
                raise ValueError(f"models.{name}.variants: factors are for the tasks of a pipeline")
    elif config.models:
        raise ValueError(
            "models: the tasks of a pipeline are its models; leave models out, or deploy them "
            "as another application"
        )
    elif config.deployment_name in pipeline.tasks:
        raise ValueError(
            f"name: {config.deployment_name!r} is a task of the pipeline, too; "
            "metrics could not tell them apart"
        )
    for name, model in config.served.items():
        if config.response_margin_ms >= model.latency_slo_ms:
            where = "pipeline" if pipeline is not None else f"models.{name}"
            raise ValueError(
                f"response_margin_ms must be less than {where}.latency_slo_ms, which is "
                f"{model.latency_slo_ms:g}, got {config.response_margin_ms:g}"
            )
    if pipeline is not None and config.groups:
        raise ValueError("groups: a pipeline has none; name its workers under `workers`")
    if config.scheduler == "embedded" and config.num_frontends > 1:
        raise ValueError(
            f"scheduler 'embedded' lives in the only frontend, but num_frontends is "
            f"{config.num_frontends}; choose 'actor' or 'auto'"
        )


def _check_groups(config: AppConfig, planner: PlannerConfig | None) -> None:
    makes_groups = planner is not None and planner_class(planner.name).makes_groups
    if (config.groups or makes_groups) and config.scheduler == "embedded":
        raise ValueError(
            "scheduler 'embedded' is one scheduler in the only frontend, but every group has "
            "its own; choose 'actor' or 'auto'"
        )
    if not config.groups:
        return
    if config.workers is not None:
        raise ValueError(
            "workers: with groups, every group names its own (groups.NAME.workers); leave these out"
        )
    listed: dict[str, str] = {}
    for name, group in config.groups.items():
        for model in group.models:
            if model not in config.models:
                raise ValueError(
                    f"groups.{name}.models: no model {model!r}; "
                    f"the models are {', '.join(sorted(config.models))}"
                )
            if model in listed:
                raise ValueError(
                    f"groups.{name}.models: {model!r} is in {listed[model]!r}, too; "
                    "a model has one group"
                )
            listed[model] = name
    if planner is None and (missing := sorted(set(config.models) - set(listed))):
        raise ValueError(
            f"groups: no group lists {missing[0]!r}, and there is no planner to place it; "
            f"add it to the models of one of {', '.join(config.groups)}"
        )
    if len(config.kinds) < sum(len(group.workers) for group in config.groups.values()):
        raise ValueError(
            f"groups: {', '.join(config.groups)} have workers of the same name; rename one group"
        )
