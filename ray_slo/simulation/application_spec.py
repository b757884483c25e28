"""A simulated application as one document (YAML), in the words of a live one's configuration.

workers:
  gpu: {min_replicas: 1, max_replicas: 8, price_per_hour: 3.0}
models:
  faces:
    latency_slo_ms: 300
    slo_classes: {gold: 150}
    variants:
      large: {accuracy: 90, profile: {alpha_ms: 10, beta_ms: 30, max_batch_size: 32}}
      small: {accuracy: 80, profile: {alpha_ms: 4, beta_ms: 10, max_batch_size: 32}}
pipelines:
  photo:
    latency_slo_ms: 900
    tasks:
      detect: {accuracy: 88, profile: {alpha_ms: 15, beta_ms: 50}, factors: {who: 2}}
      who: {parent: detect, model: faces}
workloads:
  faces@gold: {arrivals: {kind: poisson, rate: 30}}
  photo: {arrivals: {kind: trace, rates: [20, 60, 20], interval_s: 30}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from ray_slo.core.documents import DelayS, Frozen, ProfileSpec, SloMs
from ray_slo.core.explain import Misplaced, placed
from ray_slo.core.names import listed, nearest
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.catalogue import MAX_PRICE
from ray_slo.simulation.application import check_streams, simulate_application
from ray_slo.simulation.application_report import ApplicationReport
from ray_slo.simulation.spec import MAX_WORKERS, Noise, PolicySpec, VariantSpec
from ray_slo.simulation.workloads import Workload


class NetworkSpec(VariantSpec):
    """A variant.

    Attributes:
        accuracy: percent.
        memory_mb: memory that it needs on a worker, MB; one number, or one by kind.
        factors: mean number of requests that one of its requests makes, by child task, in every
            pipeline.
    """

    accuracy: float = Field(100.0, ge=0, le=100)
    memory_mb: NonNegativeFloat | dict[str, NonNegativeFloat] = 0.0
    factors: dict[str, NonNegativeFloat] = Field(default_factory=dict)

    def network(self, name: str, kinds: list[str], base: Path) -> auto.Variant:
        """For workers of these kinds."""
        profiles = self.build(name, kinds, base).profiles
        memory = self.memory_mb
        needs = memory if isinstance(memory, dict) else dict.fromkeys(profiles, memory)
        for unknown in sorted(needs.keys() - set(kinds)):
            raise Misplaced(
                f"memory_mb.{unknown}",
                f"no such kind of workers; they are {listed(kinds)}{nearest(unknown, kinds)}",
            )
        return auto.Variant(name, self.accuracy, profiles, needs)


class ServedSpec(Frozen):
    """The networks of a model or a task: variants, or a profile if there is only one network.

    Attributes:
        variants: by name.
        profile, profiles, accuracy, memory_mb: those of the only network, instead of `variants`.
        factors: mean number of requests that one request makes, by child task, for variants without
            their own. For a task that another's networks serve: for all of them.
        items: mean number of items in a request.
    """

    variants: dict[str, NetworkSpec] | None = None
    profile: ProfileSpec | None = None
    profiles: dict[str, ProfileSpec] | None = None
    accuracy: float = Field(100.0, ge=0, le=100)
    memory_mb: NonNegativeFloat | dict[str, NonNegativeFloat] = 0.0
    factors: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    items: float = Field(1.0, ge=1)

    def networks(self, name: str) -> dict[str, NetworkSpec]:
        """Variants by name.

        Raises:
            ValueError: there are neither variants nor a profile, or both; or a field stands beside
                variants that belongs to each of them.
        """
        own = self.profile is not None or self.profiles is not None
        if own == bool(self.variants):
            given = "both are" if own else "neither is"
            raise ValueError(f"give either variants or a profile; {given} given")
        if self.variants:
            if lost := sorted({"accuracy", "memory_mb"} & self.model_fields_set):
                raise Misplaced(lost[0], "every variant has its own; say it there")
            return self.variants
        only = NetworkSpec(
            profile=self.profile,
            profiles=self.profiles,
            accuracy=self.accuracy,
            memory_mb=self.memory_mb,
        )
        return {name: only}

    def model(self, name: str, kinds: list[str], base: Path) -> auto.Model:
        """For workers of these kinds."""
        made = []
        for variant, said in self.networks(name).items():
            with placed(f"variants.{variant}") if self.variants else nullcontext():
                made.append(said.network(variant, kinds, base))
        return auto.Model(name, tuple(made), self.items)

    def made(
        self, name: str, children: list[str], of_task: Mapping[str, float]
    ) -> dict[str, dict[str, float]]:
        """Mean number of requests that one request makes, by variant and child task. `of_task`
        overrides it."""
        return {
            variant: dict.fromkeys(children, 1.0)
            | {
                child: factor
                for said in (self.factors, network.factors, of_task)
                for child, factor in said.items()
                if child in children
            }
            for variant, network in self.networks(name).items()
        }

    @property
    def named(self) -> set[str]:
        """Child tasks that its factors name."""
        networks = (self.variants or {}).values()
        return {*self.factors, *(child for network in networks for child in network.factors)}


class RootSpec(Frozen):
    """A model or pipeline that clients ask for.

    Attributes:
        latency_slo_ms: time from arrival to answer, milliseconds.
        slo_classes: other SLOs, milliseconds, by the name of the class.
    """

    latency_slo_ms: SloMs
    slo_classes: dict[str, SloMs] = Field(default_factory=dict)

    @property
    def slos_s(self) -> dict[str, float]:
        return {"": self.latency_slo_ms / 1e3} | {c: s / 1e3 for c, s in self.slo_classes.items()}


class ModelSpec(RootSpec, ServedSpec):
    """A model alone."""


class TaskSpec(ServedSpec):
    """A task of a pipeline. It has its own networks, or uses those of a model or another task.

    Attributes:
        model: the model or task whose networks serve it, instead of its own.
        parent: the task that makes its requests; None at the root.
    """

    model_of: str | None = Field(None, alias="model")
    parent: str | None = None

    @model_validator(mode="after")
    def _of_another(self) -> TaskSpec:
        own = self.model_fields_set - {"model_of", "parent", "factors"}
        if self.model_of is not None and own:
            raise Misplaced(min(own), f"the task is served by {self.model_of!r}; say it there")
        return self


class PipelineSpec(RootSpec):
    """A tree of tasks under one SLO.

    Attributes:
        tasks: by name.
    """

    tasks: dict[str, TaskSpec] = Field(min_length=1)


class KindSpec(Frozen):
    """A kind of workers.

    Attributes:
        min_replicas, max_replicas: the smallest and the largest number of workers.
        price_per_hour: price of one worker per hour.
        memory_mb: memory of one worker, MB.
        group: their group, if there are groups.
        interruptions_per_hour: mean number of times per hour that a worker is taken away. The plan
            has spare workers for it. The simulation takes none away.
    """

    min_replicas: NonNegativeInt = 1
    max_replicas: int = Field(ge=1, le=MAX_WORKERS)
    price_per_hour: float = Field(0.0, ge=0, le=MAX_PRICE)
    memory_mb: PositiveFloat | None = None
    group: str | None = None
    interruptions_per_hour: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _in_range(self) -> KindSpec:
        if self.min_replicas > self.max_replicas:
            raise Misplaced(
                "min_replicas",
                f"must be at most max_replicas, {self.max_replicas}, got {self.min_replicas}",
            )
        return self

    def kind(self, name: str) -> auto.Kind:
        memory = {} if self.memory_mb is None else {"memory_mb": self.memory_mb}
        least, most = self.min_replicas, self.max_replicas
        return auto.Kind(
            name,
            least,
            most,
            self.price_per_hour,
            group=self.group,
            interruptions_per_hour=self.interruptions_per_hour,
            **memory,
        )


class ApplicationSpec(Frozen):
    """All arguments of `simulate_application`, with the same defaults.

    Attributes:
        workers: kinds of workers, by name.
        models, pipelines: the models and pipelines that clients ask for, by name.
        workloads: arrivals by stream: "root", or "root@class".
        planner: "auto"; or null: the largest number of workers, all with every variant.
        policy: the policy; the default is that of a live application.
        groups: group of each model and pipeline, if workers are in groups. `auto` chooses the group
            of those that are left out.
        objective, budget_per_hour, accuracy_floor: settings of the plan.
        duration_s: time for which requests arrive, seconds; not needed if all arrivals end by
            themselves.
        interval_s, solve_s, load_s, start_s, preempt_delay_s, latency_noise, seed: see
            `simulate_application`.
    """

    workers: dict[str, KindSpec] = Field(min_length=1)
    models: dict[str, ModelSpec] = Field(default_factory=dict)
    pipelines: dict[str, PipelineSpec] = Field(default_factory=dict)
    workloads: dict[str, Workload] = Field(min_length=1)
    planner: Literal["auto"] | None = "auto"
    policy: PolicySpec = PolicySpec()
    groups: dict[str, str] = Field(default_factory=dict)
    objective: auto.Objective = "accuracy"
    budget_per_hour: NonNegativeFloat | None = None
    accuracy_floor: float = Field(0.0, ge=0, le=100)
    duration_s: PositiveFloat | None = None
    interval_s: PositiveFloat = 10.0
    solve_s: DelayS = 0.0
    load_s: DelayS = 0.0
    start_s: DelayS = 0.0
    preempt_delay_s: DelayS = 0.0
    latency_noise: Noise = 0.0
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _there_is_something_to_ask_for(self) -> ApplicationSpec:
        if not self.models and not self.pipelines:
            raise ValueError("models or pipelines must name what clients ask for")
        if both := sorted(self.models.keys() & self.pipelines.keys()):
            raise Misplaced(f"pipelines.{both[0]}", "a model has that name, too; rename one")
        return self

    def problem(self, base: Path) -> auto.Problem:
        """The problem for `auto`. Profile files are relative to `base`."""
        kinds = list(self.workers)
        served: dict[str, ServedSpec] = dict(self.models)
        places = {name: f"models.{name}" for name in served}
        for name, pipeline in self.pipelines.items():
            for task, spec in pipeline.tasks.items():
                if spec.model_of is None:
                    if task in served:
                        raise Misplaced(
                            f"pipelines.{name}.tasks.{task}",
                            f"{places[task]} has that name, too; rename one",
                        )
                    served[task] = spec
                    places[task] = f"pipelines.{name}.tasks.{task}"
        models = []
        for name, serves in served.items():
            with placed(places[name]):
                models.append(serves.model(name, kinds, base))
        trees = [Tree.of_model(m, spec.slos_s) for m, spec in self.models.items()]
        for name, pipeline in self.pipelines.items():
            tasks = _tasks(name, pipeline, served)
            with placed(f"pipelines.{name}"):
                trees.append(Tree(name, tasks, pipeline.slos_s))
        _check_factors(trees, served, places)
        roots = [tree.name for tree in trees]
        for unknown in [name for name in self.groups if name not in roots]:
            raise Misplaced(
                f"groups.{unknown}",
                f"no such model or pipeline; they are {listed(roots)}{nearest(unknown, roots)}",
            )
        check_streams(self.workloads, [stream for tree in trees for stream, _ in tree.streams()])
        for stream, workload in self.workloads.items():
            with placed(f"workloads.{stream}"):
                workload.check_models([stream])
        group_of = {
            m: self.groups[tree.name]
            for tree in trees
            if tree.name in self.groups
            for m in tree.models
        }
        return auto.Problem(
            tuple(models),
            tuple(trees),
            {},
            tuple(spec.kind(name) for name, spec in self.workers.items()),
            objective=self.objective,
            budget_per_hour=self.budget_per_hour,
            accuracy_floor=self.accuracy_floor,
            group_of=group_of,
        )

    def run(self, base: str | Path = ".", log: Path | None = None) -> ApplicationReport:
        """Simulate; profile files are relative to `base`. `log`: folder for the decision log."""
        times = ("interval_s", "solve_s", "load_s", "start_s", "preempt_delay_s", "latency_noise")
        options: dict[str, Any] = {name: getattr(self, name) for name in times}
        return simulate_application(
            self.problem(Path(base)),
            self.workloads,
            policy=self.policy.name,
            policy_kwargs=self.policy.kwargs,
            planner=self.planner,
            duration_s=self.duration_s,
            seed=self.seed,
            log=log,
            **options,
        )


def _tasks(
    name: str, pipeline: PipelineSpec, served: Mapping[str, ServedSpec]
) -> tuple[TreeTask, ...]:
    """Nodes of a pipeline's tree."""
    nodes = []
    for task, spec in pipeline.tasks.items():
        model = spec.model_of or task
        if model not in served:
            raise Misplaced(
                f"pipelines.{name}.tasks.{task}.model",
                f"must be one of {', '.join(served)}, got {model!r}{nearest(model, list(served))}",
            )
        children = [c for c, child in pipeline.tasks.items() if child.parent == task]
        of_task = spec.factors if spec.model_of is not None else {}
        factors = served[model].made(model, children, of_task)
        if unknown := sorted(of_task.keys() - set(children)):
            raise Misplaced(
                f"pipelines.{name}.tasks.{task}.factors.{unknown[0]}",
                f"no child; its children are {listed(children)}{nearest(unknown[0], children)}",
            )
        nodes.append(TreeTask(task, model, spec.parent, factors))
    return tuple(nodes)


def _check_factors(
    trees: Iterable[Tree], served: Mapping[str, ServedSpec], places: Mapping[str, str]
) -> None:
    """Refuse factors for tasks that are no child of the model's tasks."""
    children: dict[str, set[str]] = {name: set() for name in served}
    for tree in trees:
        for task in tree.tasks:
            children[task.model].update(tree.children(task.name))
    for name, spec in served.items():
        if unknown := sorted(spec.named - children[name]):
            valid = sorted(children[name])
            raise Misplaced(
                f"{places[name]}.factors.{unknown[0]}",
                f"no child of a task that {name!r} serves; these are {listed(valid)}"
                f"{nearest(unknown[0], valid)}",
            )
