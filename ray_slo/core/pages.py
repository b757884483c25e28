"""The last line of a message about a mistake: it names the section of docs/ on that field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

PAGE = PurePosixPath("docs/reference/config.md")
CLI = "docs/reference/cli.md"
DEPLOYMENTS, PIPELINES = (f"docs/reference/python.md#{of}" for of in ("deployments", "pipelines"))
_SERVE, _SIMULATION = "serve.config", "simulation"
_RAMSIS = "papers.ramsis"
_APPLICATION, _SIZING = f"{_SIMULATION}.application_spec", f"{_SIMULATION}.sizing.document"

SECTIONS: dict[str, tuple[str, ...]] = {
    "an-application": (f"{_SERVE}.app.AppConfig",),
    "models": (f"{_SERVE}.models.ModelConfig",),
    "variants": (f"{_SERVE}.models.VariantConfig",),
    "workers": (
        f"{_SERVE}.workers.WorkerConfig",
        f"{_SERVE}.workers.AutoscalingConfig",
        "planning.catalogue.InstanceType",
    ),
    "policy": (f"{_SERVE}.policy.PolicyConfig",),
    "groups": (f"{_SERVE}.workers.GroupConfig",),
    "planner": (f"{_SERVE}.app.PlannerConfig", "papers.kairos.solver.Arguments"),
    "pipelines": (f"{_SERVE}.pipeline.PipelineConfig",),
    "tasks": (f"{_SERVE}.pipeline.TaskConfig",),
    "decision_log": (f"{_SERVE}.app.DecisionLogConfig",),
    "a-simulation": (f"{_SIMULATION}.spec.SimulationSpec",),
    "cluster": (
        *(f"{_SIMULATION}.spec.{n}Spec" for n in ("Cluster", "Model", "Variant", "Delay")),
        "core.documents.ProfileSpec",
    ),
    "workload": (
        *(f"{_SIMULATION}.workloads.{n}" for n in ("Workload", "SloShare", "LogNormal")),
        *(f"{_SIMULATION}.workloads.{n}" for n in ("Gaussian", "Measured")),
        *(f"{_SIMULATION}.arrivals.{n}" for n in ("Constant", "Poisson", "Gamma", "Mmpp")),
        *(f"{_SIMULATION}.arrivals.{n}" for n in ("Trace", "Times", "Population", "Burst")),
    ),
    "worker_events": (f"{_SIMULATION}.spec.WorkerEventSpec",),
    "an-application-to-simulate": (f"{_APPLICATION}.ApplicationSpec",),
    "a-kind-of-workers-to-simulate": (f"{_APPLICATION}.KindSpec",),
    "a-model-to-simulate": (f"{_APPLICATION}.ModelSpec",),
    "its-variants": (f"{_APPLICATION}.NetworkSpec",),
    "a-pipeline-to-simulate": (f"{_APPLICATION}.PipelineSpec",),
    "its-tasks": (f"{_APPLICATION}.TaskSpec",),
    "a-plan": (f"{_SIZING}.PlanSpec",),
    "pool": (f"{_SIZING}.PoolSpec",),
    "pipeline-of-a-plan": (*(f"{_SIZING}.{n}Spec" for n in ("Pipeline", "Stage", "StageVariant")),),
    "tables-to-solve": (
        *(f"{_RAMSIS}.spec.{n}Spec" for n in ("Solve", "Variant", "Loads")),
        *(f"{_RAMSIS}.arrivals.{n}Spec" for n in ("Poisson", "Gamma", "Empirical")),
    ),
}
"""Classes of ray_slo whose fields a section of `PAGE` lists, by its anchor."""

_ANCHOR_OF = {path: anchor for anchor, paths in SECTIONS.items() for path in paths}
SEE = "See "  # begins the line


def anchor_of(model: type) -> str | None:
    """The section that lists a class's fields; None where there is none."""
    return _ANCHOR_OF.get(f"{model.__module__}.{model.__qualname__}".removeprefix("ray_slo."))


def see(anchors: Iterable[str | None]) -> list[str]:
    """The line that names sections; no line if there are none."""
    named = [f"{PAGE}#{anchor}" for anchor in dict.fromkeys(anchors) if anchor is not None]
    return [f"{SEE}{' and '.join(named[:3])}"] if named else []


def pointed(said: str, place: str) -> str:
    """A message that ends with the line that names a place in the docs, unless it has one."""
    has_one = any(line.startswith(SEE) for line in said.splitlines())
    return said if has_one else f"{said}\n{SEE}{place}"


@contextmanager
def pointing(place: str) -> Iterator[None]:
    """Add the line that names a place in the docs to the message of a ValueError that is raised
    inside, unless it has one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(pointed(str(error), place)) from error.__cause__
