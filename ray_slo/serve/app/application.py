"""`ray_slo.application`: several models and pipelines on the same workers, from Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve import Application

from ray_slo.core.explain import placed
from ray_slo.core.pages import PIPELINES, pointing
from ray_slo.serve.app.build import build_app
from ray_slo.serve.app.pipeline import by_name


def application(
    *,
    models: Mapping[str, Mapping[str, Any]] | None = None,
    pipelines: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Application:
    """A Serve application of any shape, with the fields of a config file.

        app = ray_slo.application(
            models={
                "read": {
                    "callable": Read,
                    "latency_slo_ms": 100,
                    "slo_classes": {"bulk": 2000},
                    "variants": [ray_slo.Variant("small", accuracy=80, load=load), ...],
                },
            },
            pipelines={
                "pages": {
                    "latency_slo_ms": 500,
                    "tasks": [
                        ray_slo.Task("find", Find),
                        ray_slo.Task("lines", model="read", parent="find"),
                    ],
                },
            },
            workers={"cpu": {"num_replicas": 2, "max_replicas": 8}},
        )
        handle = serve.run(app)
        await handle.remote(page, model="pages")
        await handle.remote(line, model="read", slo_class="bulk")

    Args:
        models: fields of `ModelConfig` (`ray_slo.serve.config.models`) by name.
        pipelines: fields of `PipelineConfig` by name; `tasks` may be a list of `ray_slo.Task`.
        options: further fields of `AppConfig` (`ray_slo.serve.config.app`): workers, planner,
            policy, groups, ….

    Raises:
        ValueError: an option cannot work. The message has the field, the value and the choices.
    """
    said: Any = pipelines
    if isinstance(pipelines, Mapping):
        said = {name: _by_name(name, fields) for name, fields in pipelines.items()}
    shape = {"models": models, "pipelines": said}
    return build_app({name: value for name, value in shape.items() if value is not None} | options)


def _by_name(name: str, fields: Any) -> Any:
    """Fields of a pipeline, with its tasks by name."""
    tasks = fields.get("tasks") if isinstance(fields, Mapping) else None
    if not isinstance(tasks, list | tuple):
        return fields
    with pointing(PIPELINES), placed(f"pipelines.{name}"):
        return {**fields, "tasks": by_name(tasks)}
