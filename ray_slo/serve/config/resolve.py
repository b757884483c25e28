"""From what users write to what runs: sets defaults and derived values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ray_slo.core.explain import explaining, validated
from ray_slo.core.names import nearest
from ray_slo.policies.registry import DEFAULT, make_policy, refuse_told
from ray_slo.serve.config.app import AppConfig, PlannerConfig, Settings
from ray_slo.serve.config.files import stopping
from ray_slo.serve.config.policy import PolicyConfig, PolicySpec
from ray_slo.serve.config.spec import AppSpec, PlannerSpec, WorkerSpec
from ray_slo.serve.config.trees import trees_of
from ray_slo.serve.config.workers import homes_of
from ray_slo.serve.planner.plugin import PLANNERS, PlannerPlugin, planner_class

_PIPELINE = "pipeline"  # its arguments follow from the pipeline
_SAME = ("communication_s",)  # values of the planner that this policy must share


def parse_spec(data: dict[str, Any]) -> AppSpec:
    """An application's `args`, checked and resolved.

    Raises:
        ValueError: one line per mistake: field, value, valid choices.
    """
    config = validated(AppConfig, data)
    with explaining(AppConfig):
        return resolve(config)


def resolve(config: AppConfig) -> AppSpec:
    """The application that runs.

    Raises:
        ValueError: parts do not fit each other; with the field, the value and the choices.
    """
    _check_served(config)
    planner = config.planned_by
    if planner is not None:
        planner_class(planner.name).check(config, planner)
        _check_classes(config, planner)
        planner = planner.model_copy(
            update={"kwargs": planner_class(planner.name).arguments(planner.kwargs)}
        )
    _check_groups(config, planner)
    pipelines = {}
    for name, pipeline in config.all_pipelines.items():
        try:
            whole = pipeline.with_models(config.served)
        except ValueError as error:
            raise ValueError(f"{config.pipeline_field(name)}.{error}") from None
        bare = {task: said.without_code() for task, said in whole.tasks.items()}
        pipelines[name] = whole.model_copy(update={"tasks": bare})  # the models have the code
    return AppSpec(
        **{name: getattr(config, name) for name in Settings.model_fields},
        models=config.served,
        pipelines=pipelines,
        trees=trees_of(config.models, pipelines, config.served),
        fields=_fields(config),
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
    reads = PlannerPlugin if planner is None else planner_class(planner.name)
    for i, (kind, worker) in enumerate(config.kinds.items()):
        bounds = None
        if planner is not None:
            bounds = planner_class(planner.name).replica_bounds(worker, planner)
        if bounds is None and worker.most_replicas is not None:
            scaling = [name for name in PLANNERS if planner_class(name).scales]
            raise ValueError(
                f"{config.kind_field(kind)}.max_replicas: no planner decides how many there are; "
                f"leave `planner` out, or choose one of {', '.join(scaling)}"
            )
        for field in ("price_per_hour", "interruptions_per_hour"):
            if getattr(worker, field) is not None and field not in reads.reads_workers:
                raise ValueError(
                    f"{config.kind_field(kind)}.{field}: no planner reads it here; leave it out, "
                    f"or choose {_planners('reads_workers', field)}"
                )
        answer[kind] = WorkerSpec(
            num_replicas=worker.first_replicas,
            replica_bounds=bounds,
            autoscaling=worker.autoscaling,
            ray_actor_options=worker.resources(),
            serve_options=worker.for_serve(),
            instance_type=worker.rented,
            price_per_hour=0.0 if worker.rented is None else worker.rented.price_per_hour,
            interruptions_per_hour=worker.interruptions_per_hour or 0.0,
            memory_mb=worker.room_mb,
            group=group_of[i] if group_of else None,
        )
    return answer


def _planner(planner: PlannerConfig | None) -> PlannerSpec | None:
    if planner is None:
        return None
    kind = planner_class(planner.name)
    given = {name: getattr(planner, name) for name in PlannerConfig.model_fields}
    given["interval_s"] = planner.interval_s or kind.interval_s
    return PlannerSpec(
        **given, makes_groups=kind.makes_groups, assigns=kind.assigns, tunable=kind.tunable
    )


def _may_have(config: AppConfig, planner: PlannerConfig | None, group: str) -> set[str]:
    """Models that a group has at first, or that a planner may move there."""
    if planner is None:
        return set(config.groups[group].models)
    if planner_class(planner.name).makes_groups:
        return set(config.served)
    listed = {m: name for name, its in config.groups.items() for m in its.models}
    homes = homes_of(listed, _together(config))
    return {model for model in config.served if homes.get(model, group) == group}


def _together(config: AppConfig) -> list[list[str]]:
    """Models of the tasks of each pipeline."""
    pipelines = config.all_pipelines.values()
    return [[p.shares.get(task, task) for task in p.tasks] for p in pipelines]


def _on_default(config: AppConfig, planner: PlannerConfig | None) -> set[str]:
    """Models that the application's own policy may have to serve."""
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
    """The named policy, or the planner's, or the default.

    Args:
        models: the models that it may have to serve.
        group: whose policy it is; None: the application's.

    Raises:
        ValueError: it cannot serve them.
    """
    name, kwargs = given.name, given.kwargs
    if name is None:
        name = DEFAULT if planner is None else planner_class(planner.name).default_policy
    if name == _PIPELINE:
        kwargs = _routed(config, planner, kwargs)
    if name == "auto" and stopping({model: config.served[model] for model in models}):
        kwargs = {"preempt": True, **kwargs}  # exit points say that networks may stop
    try:
        refuse_told(name, kwargs)
        made = make_policy(name, kwargs)
        spec = PolicySpec(name=name, kwargs=kwargs, preempts=getattr(made, "preempts", False))
    except ValueError as error:
        where = "policy" if group is None else f"groups.{group}.policy"
        raise ValueError(f"{where}: {str(error).removeprefix('policy: ')}") from None
    return spec


def _routed(
    config: AppConfig, planner: PlannerConfig | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the policy `pipeline`: the given ones, and those that follow from the
    application.

    Raises:
        ValueError: it cannot serve the application, or a given argument follows from it.
    """
    lone = config.lone_pipeline
    if not config.all_pipelines:
        raise ValueError("policy: 'pipeline' is for a pipeline, and there is none")
    if lone is None or config.groups:
        raise ValueError(
            "policy: 'pipeline' serves one pipeline and nothing else, on `workers`, and each task "
            "must have its own code; choose another policy"
        )
    if planner is None:
        raise ValueError(
            "policy: 'pipeline' needs the routes of a planner, and there is none; choose another "
            "policy, or the planner 'auto'"
        )
    kwargs = {"parents": lone.parents, "factors": lone.factors}
    same = {key: planner.kwargs[key] for key in _SAME if key in planner.kwargs}
    if wrong := sorted(given.keys() & {*kwargs, *same}):
        raise ValueError(
            f"policy.kwargs.{wrong[0]}: follows from the "
            f"{'pipeline' if wrong[0] in kwargs else 'arguments of the planner'}; leave it out"
        )
    return {**kwargs, **same, **given}


def _check_served(config: AppConfig) -> None:
    if not config.models and not config.all_pipelines:
        raise ValueError("models: required (or a pipeline)")
    _check_names(config)
    _check_shared(config)
    fields = _fields(config)
    for name, said in config.roots.items():
        classes = {f"slo_classes.{c}": slo_ms for c, slo_ms in said.slo_classes.items()}
        for field, slo_ms in {"latency_slo_ms": said.latency_slo_ms, **classes}.items():
            if config.response_margin_ms >= slo_ms:
                raise ValueError(
                    f"response_margin_ms must be less than {fields[name]}.{field}, which is "
                    f"{slo_ms:g}, got {config.response_margin_ms:g}"
                )
    if config.scheduler == "embedded" and config.num_frontends > 1:
        raise ValueError(
            f"scheduler 'embedded' lives in the only frontend, but num_frontends is "
            f"{config.num_frontends}; choose 'actor' or 'auto'"
        )


def _check_classes(config: AppConfig, planner: PlannerConfig) -> None:
    """Refuse SLO classes that the planner does not support."""
    for name, said in config.roots.items():
        if said.slo_classes and not planner_class(planner.name).reads_classes:
            raise ValueError(
                f"{_fields(config)[name]}.slo_classes: the planner {planner.name!r} plans for one "
                f"SLO; choose {_planners('reads_classes')}"
            )


def _fields(config: AppConfig) -> dict[str, str]:
    """Field of the config by model, task with its own code, and pipeline."""
    fields = {name: f"models.{name}" for name in config.models}
    for name, pipeline in config.all_pipelines.items():
        fields[name] = field = config.pipeline_field(name)
        fields |= {t: f"{field}.tasks.{t}" for t in pipeline.tasks if t not in pipeline.shares}
    return fields


def _check_names(config: AppConfig) -> None:
    """Refuse two things with the same name: metrics could not separate them."""
    names = [(name, f"models.{name}") for name in config.models]
    for name, pipeline in config.all_pipelines.items():
        names += [(t, f"{config.pipeline_field(name)}.tasks.{t}") for t in pipeline.tasks]
    for name in config.all_pipelines:
        names.append((name, "name" if config.pipeline is not None else f"pipelines.{name}"))
    taken: dict[str, str] = {}
    for name, field in names:
        if (other := taken.setdefault(name, field)) != field:
            raise ValueError(
                f"{field}: {name!r} is {other}, too; models, pipelines and tasks have names of "
                "their own"
            )


def _check_shared(config: AppConfig) -> None:
    """Refuse tasks that no model serves, and factors of a model that serves no such task."""
    served = config.served
    children: dict[str, set[str]] = {name: set() for name in config.models}
    for name, pipeline in config.all_pipelines.items():
        for task, model in pipeline.shares.items():
            if model not in served:
                raise ValueError(
                    f"{config.pipeline_field(name)}.tasks.{task}.model: no model {model!r}; the "
                    f"models, and tasks with code of their own, are {', '.join(served)}"
                    f"{nearest(model, list(served))}"
                )
            children.setdefault(model, set()).update(pipeline.children(task))
    for name, served_by in config.models.items():
        for variant, said in served_by.variants.items():
            if unknown := sorted(set(said.factors) - children[name]):
                tasks = ", ".join(sorted(children[name])) or "none"
                raise ValueError(
                    f"models.{name}.variants.{variant}.factors: factors are for the tasks of a "
                    f"pipeline; {unknown[0]!r} is no child of a task that {name!r} serves; these "
                    f"are {tasks}{nearest(unknown[0], sorted(children[name]))}"
                )


def _planners(attribute: str, value: str | None = None) -> str:
    """What to choose instead: planners whose attribute is true, or holds the value."""
    found = {name: getattr(planner_class(name), attribute) for name in PLANNERS}
    named = [repr(name) for name, has in found.items() if (has if value is None else value in has)]
    return " or ".join(["planner: null"] * (value is None) + named)


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
            if model not in config.served:
                raise ValueError(
                    f"groups.{name}.models: no model {model!r}; the models, and tasks with code "
                    f"of their own, are {', '.join(sorted(config.served))}"
                    f"{nearest(model, list(config.served))}"
                )
            if model in listed:
                raise ValueError(
                    f"groups.{name}.models: {model!r} is in {listed[model]!r}, too; "
                    "a model has one group"
                )
            listed[model] = name
    places = planner is not None and planner_class(planner.name).chooses_groups
    if not makes_groups and not places and (missing := sorted(set(config.served) - set(listed))):
        raise ValueError(
            f"groups: no group lists {missing[0]!r}, and there is no planner to place it; "
            f"add it to the models of one of {', '.join(config.groups)}, or choose the planner "
            "'auto'"
        )
    homes = homes_of(listed, _together(config)) if places else listed
    for (name, _), models in zip(config.all_pipelines.items(), _together(config), strict=True):
        split = sorted({homes[model] for model in models if model in homes})
        if len(split) > 1:
            raise ValueError(
                f"{config.pipeline_field(name)}: its tasks are in the groups {', '.join(split)}; a "
                "group's scheduler does not know the latencies of other groups' workers, and "
                "cannot leave time for them; list the models of all tasks in one group"
            )
    if config.policy.name is not None and all(group.policy for group in config.groups.values()):
        raise ValueError("policy: every group names one of its own; leave this out")
    if len(config.kinds) < sum(len(group.workers) for group in config.groups.values()):
        raise ValueError(
            f"groups: {', '.join(config.groups)} have workers of the same name; rename one group"
        )
