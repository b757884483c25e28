"""Kinds of workers and groups of them, as users write them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ray_slo.core.explain import Misplaced
from ray_slo.core.names import nearest
from ray_slo.planning.catalogue import CATALOGUE, InstanceType, Price
from ray_slo.serve.config.common import MOST_REPLICAS, StrictConfig, names
from ray_slo.serve.config.policy import PolicyConfig

# Options of `serve.deployment`, and of Serve's `autoscaling_config`, that have no meaning here.
NOT_OURS = {
    "max_ongoing_requests": "a worker runs one batch at a time and is sent no more; bound a batch "
    "with max_batch_size, and what waits with max_queued_requests",
    "request_router_config": "the scheduler chooses the worker of every batch; say how with policy",
    "backpressure_config": "max_queued_requests bounds what waits, and what would miss its SLO is "
    "refused; leave it out",
    "logging_config": "write access_log: true for a line per request; the rest belongs in the "
    "logging_config of Serve's own config file",
    "version": "replicas are replaced when code or options have changed; leave it out",
    "route_prefix": "write it in serve.run(app, route_prefix=…), or in Serve's own config file",
    "max_constructor_retry_count": "a worker that cannot start is tried three times; leave it out",
    "gang_scheduling_config": "each worker serves on its own; leave it out",
    "deployment_actors": "start actors in the constructor of your class; leave it out",
    "rolling_update_percentage": "workers are replaced as Serve does by default; leave it out",
    "max_surge_percent": "workers are replaced as Serve does by default; leave it out",
}
_NO_TARGET = "the planner sizes by measured demand, latencies and the SLO; leave it out"
_NO_FACTOR = "the planner asks at once for what the demand needs; leave it out"
_MEASURED = "the planner measures the demand itself (planner.demand, planner.interval_s); leave "
_MEASURED += "it out"
SERVE_AUTO = 100  # workers, at most, of Serve's own num_replicas="auto"


class AutoscalingConfig(StrictConfig):
    """The fields of Serve's own `autoscaling_config` that a planner can use.

    Attributes:
        min_replicas, max_replicas: as in `WorkerConfig`.
        initial_replicas: initial number of workers.
        upscale_delay_s: more workers start when the plan has wanted them for this time, seconds.
        downscale_delay_s: workers stop when the plan has wanted fewer for this time, seconds.
            Default: the planner's interval.
        downscale_to_zero_delay_s: the last worker stops after this time without a request, seconds.
            Default: `downscale_delay_s`, at least 60 s.
    """

    instead: ClassVar[Mapping[str, str]] = {
        "target_ongoing_requests": _NO_TARGET,
        "target_num_ongoing_requests_per_replica": _NO_TARGET,
        "metrics_interval_s": _MEASURED,
        "look_back_period_s": _MEASURED,
        "aggregation_function": _MEASURED,
        "smoothing_factor": _NO_FACTOR,
        "upscale_smoothing_factor": _NO_FACTOR,
        "downscale_smoothing_factor": _NO_FACTOR,
        "upscaling_factor": _NO_FACTOR,
        "downscaling_factor": _NO_FACTOR,
        "policy": "name a planner: `planner: auto`, another one, or your own as 'module:Class'",
    }

    min_replicas: int | None = Field(default=None, ge=0, le=MOST_REPLICAS)
    max_replicas: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)
    initial_replicas: int | None = Field(default=None, ge=0, le=MOST_REPLICAS)
    upscale_delay_s: float = Field(default=0.0, ge=0)
    downscale_delay_s: float | None = Field(default=None, ge=0)
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)


class ServeOptions(StrictConfig):
    """Options of `serve.deployment` that are passed to Serve unchanged, for every worker.

    Attributes:
        placement_group_bundles, placement_group_strategy: as in `serve.deployment`, for each
            worker.
        placement_group_bundle_label_selector: likewise.
        max_replicas_per_node: likewise.
        health_check_period_s: likewise. Default: 5 s.
        health_check_timeout_s: likewise. Default: the longest SLO of the application, from 30 s to
            600 s, because code that holds Python's lock lets no check be answered.
        graceful_shutdown_wait_loop_s, graceful_shutdown_timeout_s: likewise.
    """

    placement_group_bundles: list[dict[str, float]] | None = None
    placement_group_strategy: str | None = None
    placement_group_bundle_label_selector: list[dict[str, str]] | None = None
    max_replicas_per_node: int | None = Field(default=None, ge=1)
    health_check_period_s: float | None = Field(default=None, gt=0)
    health_check_timeout_s: float | None = Field(default=None, gt=0)
    graceful_shutdown_wait_loop_s: float | None = Field(default=None, ge=0)
    graceful_shutdown_timeout_s: float | None = Field(default=None, ge=0)

    def for_serve(self) -> dict[str, Any]:
        """The given options."""
        given = {name: getattr(self, name) for name in ServeOptions.model_fields}
        return {name: value for name, value in given.items() if value is not None}


class WorkerConfig(ServeOptions):
    """A kind of worker: Serve replicas with the same resources. Each loads every model, or what the
    planner assigns.

    Attributes:
        num_replicas: number of workers; with a planner that scales, only the initial number.
            Default: 1, or `min_replicas` if that is larger. "auto" has Serve's meaning: from 1 to
            100.
        min_replicas, max_replicas: bounds for the planner. Without `max_replicas` there are always
            `num_replicas`; with "kairos" the budget is the limit. Default of `min_replicas`: 1, or
            0 with "kairos".
        autoscaling_config: Serve's own form of the same bounds, with delays.
        price_per_hour: price of one worker, in the budget's currency. For planners that use costs.
        interruptions_per_hour: mean number of times per hour that a spot worker is taken away. Its
            `ray_actor_options` must place it on spot nodes, and its price is the spot price. For
            "auto".
        memory_mb: memory of a worker for what it loads, MB: of its GPU if variants use one,
            otherwise of its process. Variants that do not fit are not loaded. Default: all that
            there is.
        instance_type: gives price, memory and resources that the worker does not set. It is the
            name of a type in `ray_slo.planning.catalogue.CATALOGUE`, or the fields of one, e.g.
            {price_per_hour: 0.5}.
        ray_actor_options: Ray resources of a worker. Default: those of its instance type, if any.
    """

    instead: ClassVar[Mapping[str, str]] = NOT_OURS

    num_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | Literal["auto"] | None = None
    min_replicas: int | None = Field(default=None, ge=0, le=MOST_REPLICAS)
    max_replicas: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)
    autoscaling_config: AutoscalingConfig | None = None
    price_per_hour: Price | None = None
    interruptions_per_hour: float | None = Field(default=None, gt=0, lt=math.inf)
    memory_mb: float | None = Field(default=None, gt=0, lt=math.inf)
    instance_type: InstanceType | None = None
    ray_actor_options: dict[str, Any] | None = None

    @field_validator("instance_type", mode="before")
    @classmethod
    def _from_catalogue(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in CATALOGUE:
                raise ValueError(
                    f"no type {value!r} in the catalogue{nearest(value, list(CATALOGUE))}; it has "
                    f"{', '.join(CATALOGUE)}; for another one, give its fields, e.g. "
                    "{price_per_hour: 0.5}"
                )
            return CATALOGUE[value]
        return {"name": "custom", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _in_range(self) -> WorkerConfig:
        if (serves := self.autoscaling_config) is not None:
            for field in ("min_replicas", "max_replicas"):
                if getattr(self, field) is not None and getattr(serves, field) is not None:
                    raise Misplaced(field, "it is in autoscaling_config, too; write it once")
            if isinstance(self.num_replicas, int):
                raise Misplaced(
                    "num_replicas",
                    "write autoscaling_config.initial_replicas for the number at first, got "
                    f"{self.num_replicas} beside autoscaling_config",
                )
            if self.most_replicas is None:
                raise Misplaced("autoscaling_config.max_replicas", "required")
        if self.most_replicas is None:
            if self.min_replicas is not None and self.instance_type is None:
                raise Misplaced(
                    "min_replicas",
                    f"give max_replicas, too, got {self.min_replicas} alone; there would always be "
                    "num_replicas",
                )
        elif not self.least_replicas <= self.first_replicas <= self.most_replicas:
            raise Misplaced(
                "num_replicas",
                f"must be from min_replicas {self.least_replicas} to max_replicas "
                f"{self.most_replicas}, got {self.first_replicas}",
            )
        return self

    @property
    def autoscaling(self) -> AutoscalingConfig:
        """`autoscaling_config`, or its defaults."""
        return self.autoscaling_config or AutoscalingConfig()

    @property
    def given_least(self) -> int | None:
        """`min_replicas`, from this config or from `autoscaling_config`."""
        serves = self.autoscaling.min_replicas
        return serves if self.min_replicas is None else self.min_replicas

    @property
    def least_replicas(self) -> int:
        """`min_replicas`, or its default."""
        return 1 if self.given_least is None else self.given_least

    @property
    def most_replicas(self) -> int | None:
        """`max_replicas`, or its default."""
        given = self.max_replicas or self.autoscaling.max_replicas
        return given or (SERVE_AUTO if self.num_replicas == "auto" else None)

    @property
    def first_replicas(self) -> int:
        """The number of workers at first."""
        if (initial := self.autoscaling.initial_replicas) is not None:
            return initial
        return (
            self.num_replicas if isinstance(self.num_replicas, int) else max(self.least_replicas, 1)
        )

    @property
    def rented(self) -> InstanceType | None:
        """Instance type of a worker, with its price; None if no price is given."""
        if self.price_per_hour is None:
            return self.instance_type
        known = self.instance_type or InstanceType(name="custom", price_per_hour=1.0)
        return known.model_copy(update={"price_per_hour": self.price_per_hour})

    @property
    def room_mb(self) -> float | None:
        """`memory_mb`, or that of its instance type; None if neither is given."""
        if self.memory_mb is not None:
            return self.memory_mb
        known = None if self.instance_type is None else self.instance_type.memory_gb
        return None if known is None else 1e3 * known

    def resources(self) -> dict[str, Any]:
        """Ray resources of a worker."""
        if self.ray_actor_options is None and self.instance_type is not None:
            return dict(self.instance_type.ray_actor_options)
        return dict(self.ray_actor_options or {})


def _some(value: dict[str, WorkerConfig]) -> dict[str, WorkerConfig]:
    if not value:
        raise ValueError("name at least one kind of worker, got {}")
    return value


Workers = Annotated[dict[str, WorkerConfig], AfterValidator(_some), names("worker")]
"""Workers by hardware kind."""


class GroupConfig(StrictConfig):
    """A serving group: its own workers with their own scheduler.

    Attributes:
        workers: workers by hardware kind.
        models: the models that it serves; with "partition" only at first. The planner "auto"
            chooses the group of models that no group lists.
        policy: policy of its scheduler; default: the application's.
    """

    workers: Workers = Field(default_factory=lambda: {"default": WorkerConfig()})
    models: list[str] = Field(default_factory=list)
    policy: PolicyConfig | None = None


def homes_of(listed: Mapping[str, str], together: Iterable[Collection[str]]) -> dict[str, str]:
    """Group of every model that a group lists, and of models that are used together with one.

    Args:
        listed: group by model.
        together: models of each tree.
    """
    found, before = dict(listed), -1
    trees = list(together)
    while len(found) > before:
        before = len(found)
        for models in trees:
            if named := [found[model] for model in models if model in found]:
                found = dict.fromkeys(models, named[0]) | found
    return found
