"""Planners that an application may name: each is a class in a module, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from ray_slo.core.documents import Strict
from ray_slo.core.explain import validated
from ray_slo.core.names import import_attr, nearest
from ray_slo.policies.registry import DEFAULT

if TYPE_CHECKING:
    from ray_slo.planning.brains.brain import Brain
    from ray_slo.serve.config.app import AppConfig, PlannerConfig
    from ray_slo.serve.config.spec import AppSpec
    from ray_slo.serve.config.workers import WorkerConfig

PLANNERS: dict[str, str] = {
    "herd": "ray_slo.serve.planner.groups:Herd",
    "partition": "ray_slo.serve.planner.groups:Partition",
    "loki": "ray_slo.serve.planner.loki:Loki",
    "kairos": "ray_slo.serve.planner.kairos:Kairos",
    "kairos_plus": "ray_slo.serve.planner.kairos:KairosPlus",
    "auto": "ray_slo.serve.planner.auto:Auto",
}
_CONFIGURED = "ray_slo.serve.planner.groups:Groups"


class PlannerPlugin:
    """A planner that a config can name. The class is used as it is, without instances.

    Attributes:
        Arguments: the fields of `planner.kwargs`.
        makes_groups: it plans serving groups, and does not decide what workers load.
        chooses_groups: it chooses the group of models that no group lists, and may move them.
        default_policy: default policy of an application with this planner.
        assigns: it decides which variants a worker serves, and for which share of the load.
        tunable: its arguments can be changed while it runs.
        interval_s: default time between plans, seconds.
        unused: fields of `planner` that it does not read.
        reads_workers: those fields of `workers` that only planners read (price_per_hour), and that
            this one reads.
        reads_classes: its plan uses the SLO classes.
        scales: it decides how many workers there are.
        waits: its brain waits by itself before it asks for more or fewer workers.
    """

    Arguments: ClassVar[type[BaseModel]]
    makes_groups: ClassVar[bool] = False
    assigns: ClassVar[bool] = True
    chooses_groups: ClassVar[bool] = False
    default_policy: ClassVar[str] = DEFAULT
    tunable: ClassVar[bool] = False
    interval_s: ClassVar[float] = 10.0
    unused: ClassVar[frozenset[str]] = frozenset()
    reads_workers: ClassVar[frozenset[str]] = frozenset()
    reads_classes: ClassVar[bool] = False
    scales: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    @classmethod
    def check(cls, config: AppConfig, planner: PlannerConfig) -> None:
        """Refuse an application that it cannot plan.

        Raises:
            ValueError: names the field, the value and the valid choices.
        """

    @classmethod
    def replica_bounds(cls, worker: WorkerConfig, planner: PlannerConfig) -> tuple[int, int] | None:
        """Return the least and largest number of workers of a kind that the planner may ask for.
        None: always `num_replicas`."""
        return None

    @classmethod
    def brain(cls, spec: AppSpec) -> Brain:
        """The brain of the application's planner."""
        raise NotImplementedError

    @classmethod
    def setting(cls, spec: AppSpec) -> Any:
        """The brain's input about the application."""
        raise NotImplementedError

    @classmethod
    def arguments(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Check `planner.kwargs`, and return them without the defaults.

        Raises:
            ValueError: one line per mistake, with the field, the value and the valid choices.
        """
        made = validated(cls.Arguments, dict(kwargs), "planner.kwargs")
        return {name: getattr(made, name) for name in made.model_fields_set}


def planner_class(name: str) -> type[PlannerPlugin]:
    """Return the planner with this name or "module:Class".

    Raises:
        ValueError: it is unknown. The message lists the valid names.
    """
    if name not in PLANNERS and ":" not in name:
        raise ValueError(
            f"must be one of {', '.join(PLANNERS)}, or your own as 'module:Class'"
            f"{nearest(name, list(PLANNERS))}"
        )
    found = import_attr(PLANNERS.get(name, name))
    if not (isinstance(found, type) and issubclass(found, PlannerPlugin)):
        raise ValueError(
            f"{name!r} gives {found!r}, which is no PlannerPlugin (ray_slo.serve.planner)"
        )
    return found


def planners_of_workers() -> str:
    """Names of the planners that decide what workers load; the others make groups."""
    names = [name for name in PLANNERS if not planner_class(name).makes_groups]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def planner_of(spec: AppSpec) -> type[PlannerPlugin]:
    """The planner of an application; for groups without a planner, the class of plain groups."""
    return planner_class(_CONFIGURED if spec.planner is None else spec.planner.name)


def make_brain(spec: AppSpec) -> Brain:
    """The brain of an application's planner."""
    return planner_of(spec).brain(spec)


def arguments_of(problem: type[Any], *, without: set[str]) -> type[BaseModel]:
    """Return a pydantic model of a planner's problem (a dataclass). It leaves out fields that are
    measured or follow from the application."""
    hints = get_type_hints(problem)
    given: dict[str, Any] = {}
    for field in fields(problem):
        if field.name in without:
            continue
        default: Any = None if field.default is MISSING else field.default
        made = field.default_factory
        value = Field(default) if made is MISSING else Field(default_factory=cast(Any, made))
        given[field.name] = (hints[field.name], value)
    made_model: type[BaseModel] = create_model(
        "Arguments", __base__=_Frozen, __module__=__name__, **given
    )
    return made_model


class _Frozen(Strict):
    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)
