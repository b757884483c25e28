"""Pipelines and their tasks, as users write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from ray_slo.core.documents import SloMs
from ray_slo.core.explain import Misplaced
from ray_slo.core.names import nearest
from ray_slo.serve.config.common import SloClasses, StrictConfig, names
from ray_slo.serve.config.models import ModelConfig, Served

MAX_OUTPUTS = 5000  # items that a task may make for one request, if nobody says otherwise


class TaskConfig(Served):
    """A task of a pipeline: a model that other tasks may send requests to. It has its own code
    (`callable`), or is served by a `model` that clients and other tasks may use too. Batches of
    such a model mix all their requests.

    A task's class has the same methods as a model's. Its batch method returns, per request, a
    result or `ray_slo.Outputs(result, {child: [item, …]})`: every item is a request of the child
    task. A model that serves several tasks may make items for the children of all of them; each
    tree takes its own. A class may also have a static method `join(result, {child: [joined, …]})`.
    It combines a request's result with those of the requests that it made. Default: `{"result":
    result, "outputs": {child: [joined, …]}}`.

    Attributes:
        callable: as in `Served`; not together with `model`.
        model: name of one of the application's models, or of another task with its own code. It
            excludes all fields of `Served`.
        parent: the task whose batch method makes this one's requests; None at the root.
        factors: expected number of items per request, by child task, for variants without their own
            value; 1 if neither is given.
        max_outputs: largest number of items that its batch method may make for one request of a
            client, for all child tasks together. A request with more is refused at once.
    """

    callable: str | Callable[..., Any] = ""
    model: str | None = None
    parent: str | None = None
    factors: dict[str, float] = Field(default_factory=dict)
    max_outputs: int = Field(default=MAX_OUTPUTS, ge=1)

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
                raise Misplaced(
                    "callable", "required, or model: the name of a model that serves the task"
                )
        elif said := sorted(self.model_fields_set & set(Served.model_fields)):
            raise Misplaced(
                said[0], f"the model {self.model!r} says that; leave it out, or leave model out"
            )
        return self

    def shared(self, model: Served) -> TaskConfig:
        """The same, with the properties of the model that serves it."""
        return self.model_copy(update={"variants": model.variants, "accuracy": model.accuracy})

    def as_model(self, latency_slo_ms: float) -> ModelConfig:
        """The task as a model, for the scheduler and the workers."""
        common = {field: getattr(self, field) for field in Served.model_fields}
        return ModelConfig(**common, latency_slo_ms=latency_slo_ms)


class PipelineConfig(StrictConfig):
    """A rooted tree of tasks under one SLO.

    A client's item is a request of the root. Its answer is complete when all requests that it made
    are answered.

    Attributes:
        tasks: the tasks by name.
        latency_slo_ms: end to end: answer within this many milliseconds, counted from arrival at
            the frontend.
        slo_classes: other end-to-end SLOs in milliseconds, by a name that clients use.
        join: function (or "module:function") for the root, instead of the `join` of its class.
        path_accuracies: measured end-to-end accuracy, percent, by the names of the variants from
            the root to a last task, "variant/variant"; a missing path has the product of its
            variants' accuracies. A task without variants has its model's name in the path, which is
            its own name unless it sets `model`.
    """

    tasks: Annotated[dict[str, TaskConfig], Field(min_length=1), names("task")]
    latency_slo_ms: SloMs
    slo_classes: SloClasses = Field(default_factory=dict)
    join: str | Callable[..., Any] | None = None
    path_accuracies: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_a_tree(self) -> PipelineConfig:
        for name, task in self.tasks.items():
            if task.parent is not None and task.parent not in self.tasks:
                raise Misplaced(
                    f"tasks.{name}.parent",
                    f"no task {task.parent!r}; the tasks are {', '.join(self.tasks)}"
                    f"{nearest(task.parent, list(self.tasks))}",
                )
        roots = [name for name, task in self.tasks.items() if task.parent is None]
        if len(roots) > 1:
            raise Misplaced(
                "tasks", f"{', '.join(roots)} have no parent; a pipeline is a tree with one root"
            )
        if lost := [name for name in self.tasks if name not in self.parents]:
            raise Misplaced(
                "tasks",
                f"{', '.join(lost)} are in a cycle or below one; a pipeline is a tree, and its "
                "root has no parent",
            )
        self._check_variants()
        if not self.shares:
            self._check_paths()
        return self

    @property
    def shares(self) -> dict[str, str]:
        """Models that serve tasks without their own code, by task."""
        return {name: task.model for name, task in self.tasks.items() if task.model is not None}

    def with_models(self, models: Mapping[str, ModelConfig]) -> PipelineConfig:
        """The same, with the properties of the models in the tasks that they serve.

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
                        raise Misplaced(
                            field,
                            f"{child!r} is no child of {name!r}; its children are "
                            f"{', '.join(children) or 'none'}{nearest(child, children)}",
                        )
                    if not 0 <= factor < math.inf:
                        raise Misplaced(f"{field}.{child}", f"must be at least 0, got {factor}")
            for variant in () if task.model is not None else task.variants or (name,):
                if variant in owner:
                    raise Misplaced(
                        f"tasks.{name}.variants",
                        f"{variant!r} is a variant of {owner[variant]!r}, too; variants of a "
                        "pipeline have names of their own",
                    )
                owner[variant] = name

    def _check_paths(self) -> None:
        valid = ["/".join(variant for _, variant in path) for path in self.paths]
        for path, accuracy in self.path_accuracies.items():
            if path not in valid:
                shown = valid[:8]
                raise Misplaced(
                    f"path_accuracies.{path}",
                    f"no path from the root to a last task; they are {', '.join(shown)}"
                    f"{', …' * (len(valid) > len(shown))}{nearest(path, valid)}",
                )
            if not 0 <= accuracy <= 100:
                raise Misplaced(
                    f"path_accuracies.{path}", f"must be from 0 to 100 (percent), got {accuracy}"
                )

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
        """Expected number of items per request, by variant and child task, for all variants."""
        found: dict[str, dict[str, float]] = {}
        for name in self.tasks:
            found |= self.factors_of(name)
        return found

    def factors_of(self, task: str) -> dict[str, dict[str, float]]:
        """The factors of one task's variants."""
        config, children = self.tasks[task], self.children(task)
        usual = {child: config.factors.get(child, 1.0) for child in children}
        own = {name: spec.factors for name, spec in config.variants.items()}
        return {
            name: {**usual, **{child: said[child] for child in children if child in said}}
            for name, said in (own or {config.model or task: {}}).items()
        }

    @property
    def paths(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Every path from the root to a last task: its tasks, each with a variant."""
        found: list[tuple[tuple[str, str], ...]] = []

        def walk(task: str, before: tuple[tuple[str, str], ...]) -> None:
            below = self.children(task)
            config = self.tasks[task]
            for variant in config.variants or (config.model or task,):
                path = (*before, (task, variant))
                if not below:
                    found.append(path)
                for child in below:
                    walk(child, path)

        walk(self.root, ())
        return tuple(found)
