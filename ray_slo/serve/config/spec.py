"""What runs: an application with a resolved config. It never changes."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import ConfigDict, Field

from ray_slo.core.documents import Strict
from ray_slo.core.explain import placed
from ray_slo.core.names import import_attr
from ray_slo.core.text import quoted
from ray_slo.core.trees import Tree
from ray_slo.planning.catalogue import InstanceType
from ray_slo.serve.config.app import Settings
from ray_slo.serve.config.models import ModelConfig, VariantConfig
from ray_slo.serve.config.pipeline import PipelineConfig
from ray_slo.serve.config.policy import PolicySpec
from ray_slo.serve.config.user_class import HOOKS, JOIN, check_fits, check_hook
from ray_slo.serve.config.workers import AutoscalingConfig, GroupConfig, homes_of


@dataclass(frozen=True)
class VariantRef:
    """A network and the model that it answers for.

    Attributes:
        name: name in answers, metrics and profile files.
        accuracy: percent, if known.
        spec: None for the only network of a model without variants: the model's own instance.
    """

    model: str
    name: str
    accuracy: float | None
    spec: VariantConfig | None = None


class _Frozen(Strict):
    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)


class WorkerSpec(_Frozen):
    """A kind of worker.

    Attributes:
        num_replicas: initial number of workers.
        replica_bounds: least and largest number that its planner may want; None: always
            `num_replicas`.
        autoscaling: when workers are started and stopped.
        serve_options: options of `serve.deployment`, unchanged.
        price_per_hour: price of one worker; 0 if not given.
        interruptions_per_hour: expected interruptions of one worker per hour; 0 if not given.
        memory_mb: memory of one worker for what it loads, MB; None if not given.
        group: the group of its workers; None if there are no groups, or a planner makes them.
    """

    num_replicas: int
    replica_bounds: tuple[int, int] | None
    autoscaling: AutoscalingConfig
    serve_options: dict[str, Any]
    ray_actor_options: dict[str, Any]
    instance_type: InstanceType | None
    price_per_hour: float = 0.0
    interruptions_per_hour: float = 0.0
    memory_mb: float | None = None
    group: str | None

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.replica_bounds is None else self.replica_bounds[1]


class PlannerSpec(_Frozen):
    """A planner; see `PlannerConfig` for the fields that it shares.

    Attributes:
        makes_groups: it plans serving groups; otherwise it decides how many workers there are and
            what they load.
        assigns: it decides which variants a worker serves, and for which share of the load.
        tunable: its arguments can be changed while it runs.
    """

    name: str
    interval_s: float
    rates: dict[str, float]
    memory_mb: dict[str, float]
    min_gain: float
    demand: Literal["ewma", "peak", "holt"]
    make_before_break: bool
    kwargs: dict[str, Any]
    makes_groups: bool
    assigns: bool
    tunable: bool


class AppSpec(Settings):
    """A whole application.

    Attributes:
        models: the models that workers serve, by name. Tasks of pipelines with their own code are
            models here, and their code is only here.
        pipelines: pipelines by name, without the code of their tasks. Tasks that a model serves
            have the model's properties.
        trees: what clients may ask for, by name: one tree per model of the config, and one per
            pipeline. Their variants have the names in `variants`.
        fields: field of the config by model and pipeline.
        workers: workers by kind; the name of a group's kind is unique in the application.
        policy: policy of the application, and of every group without its own.
        group_policies: policies of groups that name one.
        sized: models whose requests have sizes; known once their classes were loaded.
        version: time when it was resolved, by the clock of that machine. See `Releases`.
        fingerprint: equal for two applications if a running replica need not know of their
            differences.
    """

    model_config = ConfigDict(frozen=True)

    models: dict[str, ModelConfig]
    pipelines: dict[str, PipelineConfig]
    trees: dict[str, Tree]
    fields: dict[str, str]
    workers: dict[str, WorkerSpec]
    groups: dict[str, GroupConfig]
    planner: PlannerSpec | None
    policy: PolicySpec
    group_policies: dict[str, PolicySpec] = Field(default_factory=dict)
    sized: frozenset[str] = frozenset()
    deployment_name: str
    version: float = Field(default_factory=time.time)
    fingerprint: str = ""

    @property
    def grouped(self) -> bool:
        """Whether there are serving groups."""
        return bool(self.groups) or (self.planner is not None and self.planner.makes_groups)

    @property
    def planned(self) -> bool:
        """Whether a planner decides how many workers there are and what they load."""
        return self.planner is not None and not self.planner.makes_groups

    @property
    def embedded(self) -> bool:
        """Whether the scheduler runs in the frontend."""
        return self.scheduler == "embedded" or (
            self.scheduler == "auto" and self.num_frontends == 1 and not self.grouped
        )

    def policy_of(self, group: str | None) -> PolicySpec:
        """The policy of a group. `group` is None if there are no groups."""
        return self.group_policies.get(group or "", self.policy)

    def policies_for(self, model: str) -> list[PolicySpec]:
        """Policies that may have to serve a model: those of all groups that it may be in without a
        move by hand."""
        moves = self.planner is not None and self.planner.makes_groups
        home = None if moves else self.homes.get(model)
        groups = list(self.groups) if home is None else [home]
        return [self.policy_of(group) for group in groups] or [self.policy]

    @property
    def homes(self) -> dict[str, str]:
        """Group of every model that a group lists, and of those that share a pipeline with one."""
        listed = {model: name for name, group in self.groups.items() for model in group.models}
        return homes_of(listed, [tree.models for tree in self.trees.values()])

    @property
    def unlisted(self) -> frozenset[str]:
        """Models whose group the planner chooses."""
        chooses = bool(self.groups) and self.planned
        return frozenset(self.models.keys() - self.homes.keys() if chooses else ())

    def in_group(self, group: str) -> AppSpec:
        """The application for the scheduler of a group: with the group's policy."""
        return self.model_copy(update={"policy": self.policy_of(group)})

    def joins(self) -> dict[str, Callable[..., Any]]:
        """The user's functions that join results, by task with children.

        Raises:
            ValueError: it cannot be imported, or it is not a function.
        """
        found: dict[str, Callable[..., Any]] = {}
        for name, pipeline in self.pipelines.items():
            tree = self.trees[name]
            for task in tree.order:
                target: Any = self.models[task.model].load()
                own = inspect.getattr_static(target, "join", None)
                if own is not None and tree.children(task.name):
                    with placed(f"{self.fields[task.model]}.callable"):
                        check_hook(target, JOIN)
                    found[task.name] = target.join
            if (join := pipeline.join) is not None:
                found[tree.root] = _function(f"{self.fields[name]}.join", join)
        return found

    @property
    def shared(self) -> frozenset[str]:
        """Models that serve several tasks."""
        uses = Counter(task.model for tree in self.trees.values() for task in tree.tasks)
        return frozenset(model for model, count in uses.items() if count > 1)

    def slos_ms(self, model: str) -> tuple[float, float]:
        """The shortest and the longest SLO of all models and pipelines that use this model,
        milliseconds."""
        trees = [tree for tree in self.trees.values() if model in tree.models]
        slos_ms = [1e3 * slo_s for tree in trees for slo_s in tree.slos_s.values()]
        return min(slos_ms), max(slos_ms)

    def without_code(self) -> AppSpec:
        """The same for the scheduler, which needs neither the user's classes nor arguments."""
        models = {name: model.without_code() for name, model in self.models.items()}
        pipelines = {n: p.model_copy(update={"join": None}) for n, p in self.pipelines.items()}
        return self.model_copy(update={"models": models, "pipelines": pipelines})

    def stamped(self, fingerprint: str) -> AppSpec:
        """The same with a fingerprint."""
        return self.model_copy(update={"fingerprint": fingerprint})

    def variants(self) -> dict[str, VariantRef]:
        """Every network that workers load, by a name that is unique in the application.

        This is the variant's own name, or the model's if it has no variants. If two models use the
        same name, it is "model/variant".
        """
        return variants_of(self.models)


def variants_of(models: Mapping[str, ModelConfig]) -> dict[str, VariantRef]:
    """See `AppSpec.variants`."""
    refs = [
        VariantRef(model, name, variant.accuracy, variant)
        for model, m in models.items()
        for name, variant in m.variants.items()
    ] + [VariantRef(n, n, m.accuracy) for n, m in models.items() if not m.variants]
    uses = Counter(ref.name for ref in refs)
    return {ref.name if uses[ref.name] == 1 else f"{ref.model}/{ref.name}": ref for ref in refs}


def _function(field: str, said: str | Callable[..., Any]) -> Callable[..., Any]:
    try:
        found = import_attr(said) if isinstance(said, str) else said
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    if not callable(found):
        raise ValueError(f"{field} must be a function, got {quoted(found)}")
    wanted, counts = HOOKS[JOIN]
    check_fits(field, found, counts, wanted)
    return cast(Callable[..., Any], found)


def worker_deployment(frontend: str, kind: str) -> str:
    """Name of the Serve deployment of a kind of worker."""
    return f"{frontend}-worker" if kind == "default" else f"{frontend}-{kind}-worker"
