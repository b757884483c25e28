"""`ray-slo check`: what a config would run. `ray-slo schema`: its JSON schema, for editors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_slo.cli._output import mistakes_in, print_json
from ray_slo.core.explain import placed, validated
from ray_slo.core.names import import_attr, nearest
from ray_slo.core.text import quoted

if TYPE_CHECKING:
    from ray_slo.serve.config.app import AppConfig
    from ray_slo.serve.config.models import ModelConfig
    from ray_slo.serve.config.pipeline import PipelineConfig
    from ray_slo.serve.config.spec import AppSpec, WorkerSpec

BUILDER = "ray_slo.serve:build_app"
_SHORT = ("PolicyConfig", "PlannerConfig", "DecisionLogConfig", "InstanceType")


def register(app: typer.Typer) -> None:
    app.command("check", no_args_is_help=True)(check)
    app.command("schema")(schema)


def check(
    config: Annotated[
        Path, typer.Argument(help="A `serve run` config, a RayService, or an application's args.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Check a config, and print what would run. Nothing is started.

    Code that the config names is imported, but no network is loaded.

    Example: ray-slo check configs/digits-variants.yaml
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `serve run` does
    from ray.serve.schema import ServeDeploySchema

    found, written = {}, applications(config, args_too=True)
    with mistakes_in(config, ServeDeploySchema):
        validated(ServeDeploySchema, {"applications": written})
    for application in written:
        name = str(application.get("name", "default"))
        if application["import_path"] != BUILDER:
            with placed(f"{config}: {name}.import_path"):
                import_attr(application["import_path"])
            checked = "only that it can be imported"
            found[name] = {"import_path": application["import_path"], "checked": checked}
            continue
        found[name] = _checked(config, application)
    if as_json:
        print_json(found)
    else:
        _print(found)


def applications(path: Path, *, args_too: bool = False) -> list[dict[str, Any]]:
    """Return the applications of a config of `serve run`, or of a RayService of KubeRay.

    Args:
        args_too: whether the file may also be the args of one application.

    Raises:
        ValueError: it is another document.
    """
    from ray_slo.core.documents import parse_yaml, read_yaml, what_it_is

    data = read_yaml(path)
    kind, said, told = what_it_is(data)
    if kind == "args" and args_too:
        return [{"import_path": BUILDER, "args": data}]
    if kind == "manifest" and data["kind"] == "RayService":
        spec = data.get("spec")
        inside = spec.get("serveConfigV2") if isinstance(spec, dict) else None
        if isinstance(inside, str):
            with placed(f"{path}: spec.serveConfigV2"):
                inside = parse_yaml(inside)
        data = inside if isinstance(inside, dict) else {}
        said = "a RayService without a `serve run` config in spec.serveConfigV2"
    found = [data] if "import_path" in data else data.get("applications")
    if not isinstance(found, list) or not all(isinstance(a, dict) for a in found):
        if kind in ("", "serve"):
            raise ValueError(f"{path}: not a `serve run` config: it has no list of applications")
        wanted = "" if args_too else "MODULE:CLASS, or "
        raise ValueError(
            f"{path}: this is {said} ({told}); wanted {wanted}a `serve run` config like "
            "configs/digits.yaml"
        )
    return found


def _checked(path: Path, application: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an application would run."""
    from ray_slo.serve.app.build import build_app_from_spec
    from ray_slo.serve.config.app import AppConfig
    from ray_slo.serve.config.resolve import resolve
    from ray_slo.serve.config.spec import worker_deployment

    with mistakes_in(path, AppConfig):
        config = validated(AppConfig, application.get("args") or {})
        spec = resolve(config)
        build_app_from_spec(spec)
    ours = [
        spec.deployment_name,
        *(worker_deployment(spec.deployment_name, kind) for kind in spec.workers),
    ]
    for changed in application.get("deployments") or ():
        if (name := changed["name"]) not in ours:
            raise ValueError(
                f"{path}: deployments: no deployment {quoted(name)}; there are {', '.join(ours)}"
                f"{nearest(name, ours)}"
            )
    return {"route_prefix": application.get("route_prefix", "/"), **_described(config, spec)}


def _described(config: AppConfig, spec: AppSpec) -> dict[str, Any]:
    """Return what runs, in words, by field of the config."""
    found: dict[str, Any] = {}
    for name, model in config.models.items():
        variants = ", ".join(f"{v} ({said.accuracy:g} %)" for v, said in model.variants.items())
        found[f"models.{name}"] = _line(_slos(model), variants)
    for name, pipeline in config.all_pipelines.items():
        tasks = [
            f"{t.name} after {t.parent}" if t.parent else t.name for t in spec.trees[name].order
        ]
        found[config.pipeline_field(name)] = _line(_slos(pipeline), ", ".join(tasks))
    for kind, worker in spec.workers.items():
        found[config.kind_field(kind)] = _line(_number(worker), _resources(worker))
    for name, group in spec.groups.items():
        models = ", ".join(group.models) or "models that the planner chooses"
        found[f"groups.{name}"] = _line(models, f"policy {spec.policy_of(name).name}")
    given = [f"{key}={quoted(value)}" for key, value in config.policy.kwargs.items()]
    policy = " ".join([str(spec.policy.name), *given])
    found["policy"] = policy + " (default)" * (config.policy.name is None)
    planner = "none" if spec.planner is None else spec.planner.name
    found["planner"] = planner + " (default)" * ("planner" not in config.model_fields_set)
    found["scheduler"] = "in the frontend" if spec.embedded else "an actor"
    found["num_frontends"] = spec.num_frontends
    names = sorted(type(config).model_fields.keys() - config.model_fields_set - found.keys())
    values = {name: getattr(config, name) for name in names}
    plain = {n: v for n, v in values.items() if isinstance(v, int | float | str | None)}
    found["defaults"] = plain
    return found


def _line(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _slos(served: ModelConfig | PipelineConfig) -> str:
    slos_ms = {"": served.latency_slo_ms, **served.slo_classes}
    return "SLO " + ", ".join(f"{name} {ms:g} ms".strip() for name, ms in slos_ms.items())


def _number(worker: WorkerSpec) -> str:
    least, most = worker.replica_bounds or (worker.num_replicas, worker.num_replicas)
    number = f"{least}" if least == most else f"{least} to {most}"
    return f"{number} worker{'s' * (number != '1')}"


def _resources(worker: WorkerSpec) -> str:
    price = {"price_per_hour": worker.price_per_hour} if worker.price_per_hour else {}
    return ", ".join(f"{k} {v}" for k, v in {**worker.ray_actor_options, **price}.items())


def _print(found: Mapping[str, Mapping[str, Any]]) -> None:
    for name, said in found.items():
        typer.secho(name, bold=True)
        width = max(map(len, said))
        for field, value in said.items():
            if isinstance(value, Mapping):
                value = ", ".join(f"{k} {quoted(v)}" for k, v in value.items())
            typer.echo(f"  {field:{width}}  {value}")


def schema() -> None:
    """Print the JSON schema of a `serve run` config with applications of ray-slo.

    An editor with a YAML language server checks and completes a file that begins with
    `# yaml-language-server: $schema=PATH`.

    Example: ray-slo schema > serve.schema.json
    """
    print_json(schema_of_configs())


def schema_of_configs() -> dict[str, Any]:
    """Return the JSON schema of a config of Serve whose applications may be of ray-slo."""
    from pydantic.json_schema import GenerateJsonSchema

    from ray_slo.serve.config.app import AppConfig

    class Lenient(GenerateJsonSchema):
        """Functions and classes, which only Python can write, are texts in YAML."""

        def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:
            return {"type": "string"}

    args = AppConfig.model_json_schema(schema_generator=Lenient)
    kinds = args.pop("$defs")
    for name in _SHORT:
        kinds[name] = {"anyOf": [{"type": "string"}, kinds[name]]}
    kinds["Application"] = args
    ours = {"properties": {"import_path": {"const": BUILDER}}, "required": ["import_path"]}
    application = {
        "type": "object",
        "required": ["import_path"],
        "if": ours,
        "then": {"properties": {"args": {"$ref": "#/$defs/Application"}}, "required": ["args"]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of Ray Serve with applications of ray-slo",
        "type": "object",
        "properties": {"applications": {"type": "array", "items": application}},
        "required": ["applications"],
        "$defs": kinds,
    }
