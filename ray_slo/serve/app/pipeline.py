"""`ray_slo.Pipeline`: a tree of tasks under one end-to-end SLO, from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.serve import Application

from ray_slo.serve.app.build import build_app_from_spec
from ray_slo.serve.config.models import Variant
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.config.spec import AppSpec


@dataclass(frozen=True)
class Task:
    """A task of a pipeline.

    Args:
        name: of the task.
        callable: class (or "module:Class") whose instances map a list of items to a list of
            results, `__call__(self, items)`; with variants `__call__(self, network, items)`. A
            result is anything, or `ray_slo.Outputs` with items for child tasks. Static methods as
            in `ray_slo.deployment`: `preprocess`, `postprocess`, `example_input`, and `join`.
        model: instead of `callable` and all that belongs to it: the name of a model of the
            application, or of another task, that serves this task, too.
        parent: the task that makes its requests; None at the root.
        variants: networks to choose from.
        args, kwargs: of the class's constructor.
        accuracy: percent, of a task without variants.
        factors: items that it is expected to make per request, by child task; 1 where not given.
        options: further fields of `TaskConfig` (`ray_slo.serve.config`), e.g.
            {"max_batch_size": 8}.
    """

    name: str
    callable: str | Callable[..., Any] = ""
    parent: str | None = None
    variants: Sequence[Variant] = ()
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    accuracy: float | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None

    def said(self) -> dict[str, Any]:
        """Its fields of `TaskConfig`."""
        given: dict[str, Any] = {
            "callable": self.callable,
            "model": self.model,
            "parent": self.parent,
            "variants": list(self.variants),
            "args": self.args,
            "kwargs": dict(self.kwargs),
            "accuracy": self.accuracy,
            "factors": dict(self.factors),
        }
        return {name: value for name, value in given.items() if value} | dict(self.options)


def by_name(tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
    """Fields of tasks.

    Raises:
        ValueError: two have one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for task in tasks:
        if task.name in found:
            raise ValueError(f"two tasks are named {task.name!r}")
        found[task.name] = task.said()
    return found


class Pipeline:
    """A tree of tasks under one end-to-end SLO.

    An item goes to the root. What a task's batch method returns per request is a result, or
    `ray_slo.Outputs(result, {"child": [item, …]})`, each item a request of that child task. When
    all are done, the results are joined, and the client is answered once:

        app = ray_slo.Pipeline(
            [
                ray_slo.Task("detect", Detect, variants=[...]),
                ray_slo.Task("recognise", Recognise, parent="detect", variants=[...]),
            ],
            latency_slo_ms=1500,
            max_replicas=4,
        ).bind()
        handle = serve.run(app)
        await handle.remote(page)

    Args:
        tasks: one without a parent, the root; the others name theirs.
        latency_slo_ms: milliseconds from arrival to answer, end to end.
        slo_classes: other end-to-end SLOs in milliseconds, by a name that clients give.
        join: `join(result, {child: [joined, …]})` of the root; see `docs/pipelines.md`.
        path_accuracies: measured end-to-end accuracies, percent, by "variant/variant/…" from the
            root to a last task; else they are products.
        num_replicas: workers at first; each hosts the variant that the planner gives it.
        min_replicas, max_replicas: the planner decides how many between these; without
            `max_replicas`, always `num_replicas`.
        ray_actor_options: of a worker, e.g. {"num_gpus": 1}.
        planner: its name, or a dictionary with its name and other fields of `PlannerConfig`
            (`ray_slo.serve.config`). Default: as of a config file that names none: "loki", or
            "auto" for what that does not plan for, such as SLO classes. None: workers load all
            variants, and `policy` chooses.
        policy, policy_kwargs: "pipeline" (the default), or another one.
        name: of the deployment that answers, and in metrics.
        options: further fields of `ray_slo.serve.config.app.AppConfig`, e.g. num_frontends=2.

    Raises:
        ValueError: what cannot work, with the field, the value and the choices.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        latency_slo_ms: float,
        slo_classes: Mapping[str, float] | None = None,
        join: str | Callable[[Any, dict[str, list[Any]]], Any] | None = None,
        path_accuracies: Mapping[str, float] | None = None,
        num_replicas: int | None = None,
        min_replicas: int | None = None,
        max_replicas: int | None = None,
        ray_actor_options: Mapping[str, Any] | None = None,
        planner: str | Mapping[str, Any] | None = "default",
        policy: Any = None,
        policy_kwargs: Mapping[str, Any] | None = None,
        name: str = "pipeline",
        **options: Any,
    ) -> None:
        worker = {
            "num_replicas": num_replicas,
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "ray_actor_options": ray_actor_options and dict(ray_actor_options),
        }
        self._data: dict[str, Any] = {
            "pipeline": {
                "tasks": by_name(tasks),
                "latency_slo_ms": latency_slo_ms,
                "slo_classes": dict(slo_classes or {}),
                "join": join,
                "path_accuracies": dict(path_accuracies or {}),
            },
            "workers": {"default": {k: v for k, v in worker.items() if v is not None}},
            "policy": {"name": policy, "kwargs": dict(policy_kwargs or {})},
            "name": name,
            **options,
        }
        if planner != "default":
            self._data["planner"] = dict(planner) if isinstance(planner, Mapping) else planner
        self.spec()  # refuse here what cannot work

    @property
    def name(self) -> str:
        """Of the Serve deployment that answers."""
        return str(self._data["name"])

    def spec(self) -> AppSpec:
        """The application, as a config file would say it."""
        return parse_spec(self._data)

    def bind(self) -> Application:
        """A Serve application."""
        return build_app_from_spec(self.spec())
