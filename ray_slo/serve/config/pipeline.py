"""Pipelines and their tasks, as users write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from ray_slo.core import LatencyProfile
from ray_slo.planning import loki
from ray_slo.serve.config.common import SloClasses, SloMs, StrictConfig, check_name
from ray_slo.serve.config.models import ModelConfig, Served


class TaskConfig(Served):
    """A task of a pipeline: a model that other tasks may send requests to. It has code of its own
    (`callable`), or is served by a `model` that clients and other tasks may ask, too: batches mix
    the requests of all.

    What is said of a model's class holds for a task's, and its batch method returns, per request,
    a result or `ray_slo.Outputs(result, {child: [item, …]})`: every item is a request of the child
    task; a model that serves several tasks may make items for children of any, and each tree takes
    its own. A class may have another static method, `join(result, {child: [joined, …]})`: what
    becomes of a request's result and those of the requests that it made. Default:
    `{"result": result, "outputs": {child: [joined, …]}}`.

    Attributes:
        callable: not beside `model`.
        model: name of one of the application's models, or of another task with code of its own.
            Nothing of `Served` is said beside it.
        parent: the task whose batch method makes this one's requests; None at the root.
        factors: downstream items expected per request, by child task, of variants that do not say
            their own; 1 where neither says.
    """

    callable: str | Callable[..., Any] = ""
    model: str | None = None
    parent: str | None = None
    factors: dict[str, float] = Field(default_factory=dict)

    @field_validator("parent", mode="before")
    @classmethod
    def _one_parent(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str):
            raise ValueError("a pipeline is a tree: a task has one parent (or none, at the root)")
        return value

    @model_validator(mode="after")
    def _one_code(self) -> TaskConfig:
        if self.model is None:
            if not self.callable:
                raise ValueError(
                    "callable: required, or model: the name of a model that serves the task"
                )
        elif said := sorted(self.model_fields_set & set(Served.model_fields)):
            raise ValueError(
                f"{said[0]}: the model {self.model!r} says that; leave it out, or leave model out"
            )
        return self

    def shared(self, model: Served) -> TaskConfig:
        """The same, with what is known of the model that serves it."""
        return self.model_copy(update={"variants": model.variants, "accuracy": model.accuracy})

    def as_model(self, latency_slo_ms: float) -> ModelConfig:
        """What the scheduler and the workers take it for."""
        common = {field: getattr(self, field) for field in Served.model_fields}
        return ModelConfig(**common, latency_slo_ms=latency_slo_ms)


class PipelineConfig(StrictConfig):
    """A rooted tree of tasks under one SLO.

    A client's item is a request of the root. Its answer is there when all that it made are.

    Attributes:
        tasks: by name.
        latency_slo_ms: end to end: answer within this many milliseconds, counted from arrival at
            the frontend.
        slo_classes: other end-to-end SLOs in milliseconds, by a name that clients give.
        join: function (or "module:function") for the root, instead of the `join` of its class.
        path_accuracies: measured end-to-end accuracy, percent, by the names of the variants from
            the root to a last task, "variant/variant"; the product of the variants' accuracies for
            a path that is missing. A task without variants goes by its model's name, which is its
            own unless it says another.
    """

    tasks: dict[str, TaskConfig] = Field(min_length=1)
    latency_slo_ms: SloMs
    slo_classes: SloClasses = Field(default_factory=dict)
    join: str | Callable[..., Any] | None = None
    path_accuracies: dict[str, float] = Field(default_factory=dict)

    @field_validator("tasks")
    @classmethod
    def _task_names(cls, value: dict[str, TaskConfig]) -> dict[str, TaskConfig]:
        for name in value:
            check_name("task", name)
        return value

    @model_validator(mode="after")
    def _is_a_tree(self) -> PipelineConfig:
        for name, task in self.tasks.items():
            if task.parent is not None and task.parent not in self.tasks:
                raise ValueError(
                    f"tasks.{name}.parent: no task {task.parent!r}; "
                    f"the tasks are {', '.join(self.tasks)}"
                )
        roots = [name for name, task in self.tasks.items() if task.parent is None]
        if len(roots) > 1:
            raise ValueError(
                f"tasks: {', '.join(roots)} have no parent; a pipeline is a tree with one root"
            )
        if lost := [name for name in self.tasks if name not in self.parents]:
            raise ValueError(
                f"tasks: {', '.join(lost)} are in a cycle or below one; a pipeline is a tree, and "
                "its root has no parent"
            )
        self._check_variants()
        if not self.shares:
            self._check_paths()
        return self

    @property
    def shares(self) -> dict[str, str]:
        """Models that serve tasks without code of their own, by task."""
        return {name: task.model for name, task in self.tasks.items() if task.model is not None}

    def with_models(self, models: Mapping[str, ModelConfig]) -> PipelineConfig:
        """The same, where tasks say what is known of the models that serve them.

        Raises:
            ValueError: factors or accuracies that do not fit, with the field.
        """
        tasks = {
            name: task if task.model is None else task.shared(models[task.model])
            for name, task in self.tasks.items()
        }
        made = self.model_copy(update={"tasks": tasks})
        made._check_paths()
        return made

    def _check_variants(self) -> None:
        owner: dict[str, str] = {}
        for name, task in self.tasks.items():
            children = self.children(name)
            named = {f"tasks.{name}.factors": task.factors}
            own = {} if task.model is not None else task.variants
            for variant, spec in own.items():
                named[f"tasks.{name}.variants.{variant}.factors"] = spec.factors
            for field, factors in named.items():
                for child, factor in factors.items():
                    if child not in children:
                        raise ValueError(
                            f"{field}: {child!r} is no child of {name!r}; "
                            f"its children are {', '.join(children) or 'none'}"
                        )
                    if not 0 <= factor < math.inf:
                        raise ValueError(f"{field}.{child} must be at least 0, got {factor}")
            for variant in () if task.model is not None else task.variants or (name,):
                if variant in owner:
                    raise ValueError(
                        f"tasks.{name}.variants: {variant!r} is a variant of {owner[variant]!r}, "
                        "too; variants of a pipeline have names of their own"
                    )
                owner[variant] = name

    def _check_paths(self) -> None:
        valid = self.paths
        for path, accuracy in self.path_accuracies.items():
            if tuple(path.split("/")) not in valid:
                shown = ["/".join(p) for p in valid[:8]]
                raise ValueError(
                    f"path_accuracies: no path {path!r} from root to a last task; they are "
                    f"{', '.join(shown)}{', …' * (len(valid) > len(shown))}"
                )
            if not 0 <= accuracy <= 100:
                raise ValueError(f"path_accuracies.{path} must be 0 to 100 percent, got {accuracy}")

    @property
    def is_sized(self) -> bool:
        """Whether the requests of a task have sizes."""
        return any(task.is_sized for task in self.tasks.values())

    @property
    def parents(self) -> dict[str, str | None]:
        """Parent by task, parents before their children: the root comes first."""
        order: dict[str, str | None] = {n: None for n, t in self.tasks.items() if t.parent is None}
        for name in (found := list(order)):  # grows as it goes
            below = self.children(name)
            order |= dict.fromkeys(below, name)
            found += below
        return order

    @property
    def root(self) -> str:
        return next(iter(self.parents))

    def children(self, task: str) -> tuple[str, ...]:
        return tuple(name for name, t in self.tasks.items() if t.parent == task)

    @property
    def factors(self) -> dict[str, dict[str, float]]:
        """Downstream items expected per request, by variant and child task; all variants."""
        found: dict[str, dict[str, float]] = {}
        for name in self.tasks:
            found |= self.factors_of(name)
        return found

    def factors_of(self, task: str) -> dict[str, dict[str, float]]:
        """Those of one task."""
        config, children = self.tasks[task], self.children(task)
        usual = {child: config.factors.get(child, 1.0) for child in children}
        own = {name: spec.factors for name, spec in config.variants.items()}
        return {
            name: {**usual, **{child: said[child] for child in children if child in said}}
            for name, said in (own or {config.model or task: {}}).items()
        }

    @property
    def measured_paths(self) -> dict[tuple[str, ...], float]:
        """`path_accuracies` by the variants as a tuple."""
        return {tuple(path.split("/")): value for path, value in self.path_accuracies.items()}

    def loki_tasks(
        self,
        profile: Callable[[str], LatencyProfile],
        factors: Mapping[str, Mapping[str, float]] | None = None,
    ) -> tuple[loki.Task, ...]:
        """What `loki.Problem` takes.

        Args:
            profile: by the name of a variant.
            factors: learned ones, by variant and child task; default: those expected.
        """
        made = {**self.factors, **(factors or {})}
        answer = []
        for name in self.parents:
            task = self.tasks[name]
            # One network whose accuracy is not known takes nothing away from those of others.
            only = 100.0 if task.accuracy is None else task.accuracy
            own = {n: v.accuracy for n, v in task.variants.items()} or {name: only}
            variants = tuple(loki.Variant(v, a, profile(v), made[v]) for v, a in own.items())
            answer.append(loki.Task(name, variants, task.parent))
        return tuple(answer)

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """Every path: its variants, from the root to a last task."""
        found: list[tuple[str, ...]] = []

        def walk(task: str, before: tuple[str, ...]) -> None:
            below = self.children(task)
            config = self.tasks[task]
            for variant in config.variants or (config.model or task,):
                if not below:
                    found.append((*before, variant))
                for child in below:
                    walk(child, (*before, variant))

        walk(self.root, ())
        return tuple(found)
