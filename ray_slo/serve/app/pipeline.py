"""`ray_slo.Pipeline`: a tree of tasks under one end-to-end SLO, from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.serve import Application

from ray_slo.core.pages import PIPELINES, pointing
from ray_slo.core.text import quoted
from ray_slo.serve.app.build import build_app_from_spec
from ray_slo.serve.app.decorator import check_apart
from ray_slo.serve.config.models import Variant
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.config.spec import AppSpec


@dataclass(frozen=True)
class Task:
    """A task of a pipeline.

    Args:
        name: name of the task.
        callable: class (or "module:Class") whose instances map a list of items to a list of
            results, `__call__(self, items)`; with variants `__call__(self, network, items)`. A
            result is anything, or `ray_slo.Outputs` with items for child tasks. Static methods as
            in `ray_slo.deployment`: `preprocess`, `postprocess`, `example_input`, and `join`.
        model: name of a model of the application, or of another task, that also serves this task.
            It replaces `callable` and its arguments.
        parent: the task that makes its requests; None at the root.
        variants: networks to choose from.
        args, kwargs: arguments of the class's constructor.
        accuracy: percent, for a task without variants.
        factors: expected number of items per request, by child task; 1 if not given.
        max_outputs: largest number of items that it may make for one request of a client.
            Default: `MAX_OUTPUTS` (`ray_slo.serve.config.pipeline`).
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
    max_outputs: int | None = None

    def said(self) -> dict[str, Any]:
        """Its fields of `TaskConfig`."""
        if not isinstance(self.options, Mapping):
            raise ValueError(
                f"options of task {self.name!r}: must be a mapping, got {quoted(self.options)}"
            )
        unsaid = vars(Task(self.name))
        said = {
            n: v
            for n, v in vars(self).items()
            if n != "options" and v is not None and v != unsaid[n]
        }
        return said | dict(self.options)


def by_name(tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
    """Fields of tasks.

    Raises:
        ValueError: two tasks have the same name, or one is not a `ray_slo.Task`.
    """
    found: dict[str, dict[str, Any]] = {}
    if not isinstance(tasks, list | tuple):
        raise ValueError(f"tasks: must be a list of ray_slo.Task, got {quoted(tasks)}")
    for i, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise ValueError(f"tasks.{i}: must be a ray_slo.Task, got {quoted(task)}")
        if not isinstance(task.name, str):
            raise ValueError(f"tasks.{i}.name: must be a text, got {quoted(task.name)}")
        if task.name in found:
            raise ValueError(f"two tasks are named {task.name!r}")
        found[task.name] = task.said()
    return found


class Pipeline:
    """A tree of tasks under one end-to-end SLO.

    An item goes to the root. A task's batch method returns, per request, a result or
    `ray_slo.Outputs(result, {"child": [item, …]})`. Each item is a request of that child task. When
    all are done, the results are joined, and the client gets one answer:

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
        slo_classes: other end-to-end SLOs in milliseconds, by a name that clients use.
        join: function `join(result, {child: [joined, …]})` for the root; see `docs/pipelines.md`.
        path_accuracies: measured end-to-end accuracies, percent, by "variant/variant/…" from the
            root to a last task; other paths have the product of their accuracies.
        num_replicas: initial number of workers; each loads the variant that the planner assigns.
        min_replicas, max_replicas: bounds for the planner; without `max_replicas`, there are always
            `num_replicas`.
        ray_actor_options: Ray resources of a worker, e.g. {"num_gpus": 1}.
        planner: its name, or a dictionary with its name and other fields of `PlannerConfig`
            (`ray_slo.serve.config`). Default, as in a config file: "auto". None: workers load all
            variants, and `policy` chooses.
        policy, policy_kwargs: by default "pipeline" with the planner "loki", else "auto".
        name: name of the deployment that answers, and name in metrics.
        options: further fields of `ray_slo.serve.config.app.AppConfig`, e.g. num_frontends=2.

    Raises:
        ValueError: an option cannot work. The message has the field, the value and the choices.
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
            "ray_actor_options": ray_actor_options,
        }
        worker = {k: v for k, v in worker.items() if v is not None}
        check_apart(options, worker, "pipeline", "it is made of the tasks")
        with pointing(PIPELINES):
            named = by_name(tasks)
        self._data: dict[str, Any] = {
            "pipeline": {
                "tasks": named,
                "latency_slo_ms": latency_slo_ms,
                "slo_classes": {} if slo_classes is None else slo_classes,
                "join": join,
                "path_accuracies": {} if path_accuracies is None else path_accuracies,
            },
            **({"workers": {"default": worker}} if worker else {}),
            "policy": {"name": policy, "kwargs": {} if policy_kwargs is None else policy_kwargs},
            "name": name,
            **options,
        }
        if planner != "default":
            self._data["planner"] = dict(planner) if isinstance(planner, Mapping) else planner
        self.spec()  # refuse bad options here

    @property
    def name(self) -> str:
        """Name of the Serve deployment that answers."""
        return str(self._data["name"])

    def spec(self) -> AppSpec:
        """The application, as from a config file."""
        return parse_spec(self._data)

    def bind(self) -> Application:
        """A Serve application."""
        return build_app_from_spec(self.spec())
