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
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ray_slo.core.documents import Frozen, ProfileSpec
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.policies.registry import DEFAULTS
from ray_slo.simulation.application import simulate_application
from ray_slo.simulation.application_report import ApplicationReport
from ray_slo.simulation.spec import PolicySpec, VariantSpec
from ray_slo.simulation.workloads import Workload


class NetworkSpec(VariantSpec):
    """A variant.

    Attributes:
        accuracy: percent.
        memory_mb: that it needs on a worker, of any kind or by kind.
        factors: requests that it makes per request, by child task, in every pipeline.
    """

    accuracy: float = Field(100.0, ge=0, le=100)
    memory_mb: NonNegativeFloat | dict[str, NonNegativeFloat] = 0.0
    factors: dict[str, NonNegativeFloat] = Field(default_factory=dict)

    def network(self, name: str, kinds: list[str], base: Path) -> auto.Variant:
        """For workers of these kinds."""
        profiles = self.build(name, kinds, base).profiles
        memory = self.memory_mb
        needs = memory if isinstance(memory, dict) else dict.fromkeys(profiles, memory)
        return auto.Variant(name, self.accuracy, profiles, needs)


class ServedSpec(Frozen):
    """What serves a model or a task: variants, or a profile where it is its own only one.

    Attributes:
        variants: by name.
        profile, profiles, accuracy, memory_mb: instead, of the only variant.
        factors: requests made per request, by child task, of variants that do not say their own;
            of a task that another's networks serve, of all of them.
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
            ValueError: neither variants nor a profile are given, or both; or what is said beside
                variants is for each of them to say.
        """
        own = self.profile is not None or self.profiles is not None
        if own == bool(self.variants):
            given = "both are" if own else "neither is"
            raise ValueError(f"{name}: give either variants or a profile; {given} given")
        if self.variants:
            if lost := sorted({"accuracy", "memory_mb"} & self.model_fields_set):
                raise ValueError(f"{name}.{lost[0]}: every variant has its own; say it there")
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
        networks = self.networks(name).items()
        return auto.Model(name, tuple(n.network(v, kinds, base) for v, n in networks), self.items)

    def made(
        self, name: str, children: list[str], of_task: Mapping[str, float]
    ) -> dict[str, dict[str, float]]:
        """Requests made per request, by variant and child task; `of_task` says otherwise."""
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
    """What clients ask for.

    Attributes:
        latency_slo_ms: from arrival to answer.
        slo_classes: other SLOs, ms, by the name of the class.
    """

    latency_slo_ms: PositiveFloat
    slo_classes: dict[str, PositiveFloat] = Field(default_factory=dict)

    @property
    def slos_s(self) -> dict[str, float]:
        return {"": self.latency_slo_ms / 1e3} | {c: s / 1e3 for c, s in self.slo_classes.items()}


class ModelSpec(RootSpec, ServedSpec):
    """A model alone."""


class TaskSpec(ServedSpec):
    """A task of a pipeline: with networks of its own, or served by another's.

    Attributes:
        model: whose networks serve it, instead of its own.
        parent: the task that makes its requests; None at the root.
    """

    model_of: str | None = Field(None, alias="model")
    parent: str | None = None

    @model_validator(mode="after")
    def _of_another(self) -> TaskSpec:
        own = self.model_fields_set - {"model_of", "parent", "factors"}
        if self.model_of is not None and own:
            raise ValueError(f"{min(own)}: the task is served by {self.model_of!r}; say it there")
        return self


class PipelineSpec(RootSpec):
    """A tree of tasks under one SLO.

    Attributes:
        tasks: by name.
    """

    tasks: dict[str, TaskSpec] = Field(min_length=1)


class KindSpec(Frozen):
    """Workers that are alike.

    Attributes:
        min_replicas, max_replicas: as many as there must be, and may be.
        price_per_hour: of one.
        memory_mb: of one.
        group: that they serve in, where there are groups.
        interruptions_per_hour: how often one is taken away, on average; the plan has spares. Nobody
            is taken away in the simulation.
    """

    min_replicas: NonNegativeInt = 1
    max_replicas: PositiveInt
    price_per_hour: NonNegativeFloat = 0.0
    memory_mb: PositiveFloat | None = None
    group: str | None = None
    interruptions_per_hour: NonNegativeFloat = 0.0

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
    """Everything that `simulate_application` takes. Defaults are its own.

    Attributes:
        workers: kinds of workers, by name.
        models, pipelines: what clients ask for, by name.
        workloads: what arrives when, by stream: "root", or "root@class".
        planner: "auto"; null for the largest number of workers, all with every variant.
        policy: who decides; the default is the live one's.
        groups: group of each model and pipeline, where workers are in groups; `auto` chooses it for
            those that are left out.
        objective, budget_per_hour, accuracy_floor: of the plan.
        duration_s: may be left out where all arrivals end by themselves.
        interval_s, solve_s, load_s, start_s, preempt_delay_s, latency_noise, seed: as of
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
    solve_s: NonNegativeFloat = 0.0
    load_s: NonNegativeFloat = 0.0
    start_s: NonNegativeFloat = 0.0
    preempt_delay_s: NonNegativeFloat = 0.0
    latency_noise: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _there_is_something_to_ask_for(self) -> ApplicationSpec:
        if not self.models and not self.pipelines:
            raise ValueError("models or pipelines must name what clients ask for")
        if both := sorted(self.models.keys() & self.pipelines.keys()):
            raise ValueError(f"pipelines.{both[0]}: a model has that name, too")
        return self

    @property
    def policy_name(self) -> str:
        """Of the policy that is given, or the default."""
        if self.policy.name is not None:
            return self.policy.name
        if any(len(p.tasks) > 1 for p in self.pipelines.values()):
            return DEFAULTS["tasks"]
        variants = any(m.variants and len(m.variants) > 1 for m in self.models.values())
        return DEFAULTS["variants" if variants else "models"]

    def problem(self, base: Path) -> auto.Problem:
        """What `auto` plans; profile files are relative to `base`."""
        kinds = list(self.workers)
        served: dict[str, ServedSpec] = dict(self.models)
        for name, pipeline in self.pipelines.items():
            for task, spec in pipeline.tasks.items():
                if spec.model_of is None:
                    if task in served:
                        raise ValueError(f"pipelines.{name}.tasks.{task}: the name is taken")
                    served[task] = spec
        trees = [Tree.of_model(m, spec.slos_s) for m, spec in self.models.items()]
        for name, pipeline in self.pipelines.items():
            trees.append(Tree(name, _tasks(name, pipeline, served), pipeline.slos_s))
        _check_factors(trees, served)
        if unknown := sorted(self.groups.keys() - {tree.name for tree in trees}):
            raise ValueError(f"groups.{unknown[0]}: no such model or pipeline")
        group_of = {
            m: self.groups[tree.name]
            for tree in trees
            if tree.name in self.groups
            for m in tree.models
        }
        return auto.Problem(
            tuple(spec.model(name, kinds, base) for name, spec in served.items()),
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
            policy=self.policy_name,
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
            raise ValueError(
                f"pipelines.{name}.tasks.{task}.model must be one of {', '.join(served)}, "
                f"got {model!r}"
            )
        children = [c for c, child in pipeline.tasks.items() if child.parent == task]
        of_task = spec.factors if spec.model_of is not None else {}
        factors = served[model].made(model, children, of_task)
        if unknown := sorted(of_task.keys() - set(children)):
            raise ValueError(
                f"pipelines.{name}.tasks.{task}.factors.{unknown[0]}: no child; its children are "
                f"{', '.join(children) or 'none'}"
            )
        nodes.append(TreeTask(task, model, spec.parent, factors))
    return tuple(nodes)


def _check_factors(trees: Iterable[Tree], served: Mapping[str, ServedSpec]) -> None:
    """Refuse factors for tasks that are the child of none that the model serves."""
    children: dict[str, set[str]] = {name: set() for name in served}
    for tree in trees:
        for task in tree.tasks:
            children[task.model].update(tree.children(task.name))
    for name, spec in served.items():
        if unknown := sorted(spec.named - children[name]):
            raise ValueError(
                f"{name}.factors.{unknown[0]}: no child of a task that {name!r} serves; these are "
                f"{', '.join(sorted(children[name])) or 'none'}"
            )
