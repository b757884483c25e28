"""Kinds of workers and groups of them, as users write them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from ray_slo.planning.catalogue import CATALOGUE, InstanceType
from ray_slo.serve.config.common import MOST_REPLICAS, StrictConfig
from ray_slo.serve.config.policy import PolicyConfig


class WorkerConfig(StrictConfig):
    """A kind of worker: Serve replicas with such resources, each hosting every model, or what the
    planner has it host.

    Attributes:
        num_replicas: number of workers; with a planner that scales only the initial number.
            Default: 1, or `min_replicas` where it is more.
        min_replicas, max_replicas: between these the planner decides. Without `max_replicas` there
            are always `num_replicas` with "loki", and as many as the budget pays for with "kairos".
            Default of `min_replicas`: 1, and 0 with "kairos".
        instance_type: for the planner "kairos": name of a type in
            `ray_slo.planning.catalogue.CATALOGUE`, or the fields of one, e.g.
            {price_per_hour: 0.5}.
        ray_actor_options: Ray resources of a worker. Default: those of its instance type, if it
            has one.
    """

    num_replicas: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)
    min_replicas: int | None = Field(default=None, ge=0, le=MOST_REPLICAS)
    max_replicas: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)
    instance_type: InstanceType | None = None
    ray_actor_options: dict[str, Any] | None = None

    @field_validator("instance_type", mode="before")
    @classmethod
    def _from_catalogue(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in CATALOGUE:
                raise ValueError(
                    f"no type {value!r} in the catalogue; it has {', '.join(CATALOGUE)}; for "
                    "another one, give its fields, e.g. {price_per_hour: 0.5}"
                )
            return CATALOGUE[value]
        return {"name": "custom", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _in_range(self) -> WorkerConfig:
        if self.max_replicas is None:
            if self.min_replicas is not None and self.instance_type is None:
                raise ValueError(
                    f"min_replicas is {self.min_replicas} without max_replicas; there would always "
                    "be num_replicas"
                )
        elif not self.least_replicas <= self.first_replicas <= self.max_replicas:
            raise ValueError(
                f"num_replicas must be from min_replicas {self.least_replicas} to max_replicas "
                f"{self.max_replicas}, got {self.first_replicas}"
            )
        return self

    @property
    def least_replicas(self) -> int:
        """`min_replicas`, or its default."""
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def first_replicas(self) -> int:
        """`num_replicas`, or its default."""
        return self.num_replicas or max(self.least_replicas, 1)

    def resources(self) -> dict[str, Any]:
        """Ray resources of a worker."""
        if self.ray_actor_options is None and self.instance_type is not None:
            return dict(self.instance_type.ray_actor_options)
        return dict(self.ray_actor_options or {})


class GroupConfig(StrictConfig):
    """A serving group: workers of its own, with a scheduler of their own.

    Attributes:
        workers: by hardware kind.
        models: what it serves at first.
        policy: of its scheduler; default: the application's.
    """

    workers: dict[str, WorkerConfig] = Field(default_factory=lambda: {"default": WorkerConfig()})
    models: list[str] = Field(default_factory=list)
    policy: PolicyConfig | None = None
