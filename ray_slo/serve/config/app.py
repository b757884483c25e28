"""A whole application, as users write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ray_slo.serve.config.common import MOST_REPLICAS, StrictConfig, check_name
from ray_slo.serve.config.models import ModelConfig
from ray_slo.serve.config.pipeline import PipelineConfig
from ray_slo.serve.config.policy import PolicyConfig
from ray_slo.serve.config.workers import NOT_OURS, GroupConfig, WorkerConfig
from ray_slo.serve.planner.plugin import planner_class


class PlannerConfig(StrictConfig):
    """Who decides how many workers of which kind there are and what they serve; or which models
    (and, without `groups`, which workers) make a group.

    Attributes:
        name: "auto" for any shape of application, the default where `max_replicas` of a kind is
            given, or where there are groups and models that none lists; "loki" for one pipeline on
            workers of one kind, the default there; "kairos" for requests of unlike sizes and
            instance types under a budget, or "kairos_plus", which simulates what it chooses from;
            "herd" (largest burst tolerance, sizes the groups itself) or "partition" (even loads on
            a fixed number of groups). Or one's own, as "module:Class"
            (`ray_slo.serve.planner.plugin.PlannerPlugin`).
        interval_s: it plans at deployment, and again after every interval, for the demand that was
            measured in it. Default: 60 for groups, and 10 for the others, which also plan when the
            demand has changed by more than chance.
        rates: requests per second expected of models, until there is a measured interval; 1 where
            not given. In a pipeline of "loki", of its root; with "auto", of models and pipelines,
            or of a class of one, "name@class".
        memory_mb: of models on a worker; 0 where not given. For groups.
        min_gain: a plan that is better by no more than this share is not worth the moves. Not for
            "loki" and "auto", which have `swap_cost`.
        demand: how the demand is anticipated (`ray_slo.core.demand`). Not for groups.
        make_before_break: of "loki" and "auto": a worker loads its next variant before it lets go
            of the last one, so that it serves all the time; False where memory is for one.
        kwargs: further arguments of the planner's `Problem` (`ray_slo.planning`), e.g.
            {"group_worker_limit": 4} of herd, {"sub_clusters": 2} of partition, or
            {"headroom_quantile": 0.95} of loki. Of kairos: `Arguments` of
            `ray_slo.planning.brains.kairos`, e.g. {"budget_per_hour": 2.5}. Those of auto and
            kairos can be changed while it runs, by the frontend's
            `user_config: {planner: {budget_per_hour: 1.5}}`.
    """

    name: str
    interval_s: float | None = Field(default=None, gt=0)
    rates: dict[str, float] = Field(default_factory=dict)
    memory_mb: dict[str, float] = Field(default_factory=dict)
    min_gain: float = Field(default=0.1, ge=0)
    demand: Literal["ewma", "peak", "holt"] = "ewma"
    make_before_break: bool = True
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        planner_class(value)  # may raise
        return value

    @model_validator(mode="after")
    def _fields_fit(self) -> PlannerConfig:
        planner = planner_class(self.name)
        if wrong := sorted(planner.unused & self.model_fields_set):
            raise ValueError(f"{wrong[0]}: not for the planner {self.name!r}; leave it out")
        return self


class DecisionLogConfig(StrictConfig):
    """Where every scheduler writes what its policy was fed and decided (docs/decision-log.md).

    Attributes:
        dir: folder on the node where the scheduler runs; schedulers may share it.
        max_mb: bound of all logs in it; the oldest files go first.
        flush_s: the most seconds of it that a crash costs.
    """

    dir: str = Field(min_length=1)
    max_mb: float = Field(default=64.0, gt=0)
    flush_s: float = Field(default=5.0, gt=0)


class Settings(StrictConfig):
    """What an application says beside its models, workers, policy and planner.

    Attributes:
        scheduler: "embedded" in the only frontend (no control round trips), "actor" (a named
            actor that survives frontends and serves several), or "auto": embedded for one
            frontend, else an actor.
        num_frontends: Serve replicas that own requests from arrival to answer.
        frontend_actor_options: Ray resources of a frontend.
        max_queued_requests: per frontend; more are refused with "queue_full".
        isolate_errors: when a batch raises, run its items one by one, so that only the poison
            item gets the error.
        retries: how often a request is tried again after its worker died, within its deadline.
        response_margin_ms: kept free at the end of a request's budget for the way back to the
            client, on top of what is measured between frontend and worker.
        max_body_bytes: largest item that is read, over HTTP and gRPC. Serve's proxies have a bound
            of their own (`RAY_SLO_MAX_BODY_BYTES`, see SECURITY.md).
        max_json_bytes: the same of JSON.
        max_json_values: values in one body of JSON, a list or an object counted as ten. A million
            keep Python's lock, and so all that a frontend does, for about 50 ms.
        error_details: whether clients are told, over HTTP and gRPC, what the user's own code said
            of its error; False keeps it to the log. Without `isolate_errors`, an error of a batch
            goes to all of its requests, and may quote another client's item.
        profile_seconds: time that a worker may spend measuring each variant at start, less than
            that for quick ones. 0: measure nothing, learn from the first batches.
        access_log: a line per request in the frontend's log, as Serve does by default. It costs
            about as much as the scheduling; `serve_slo_*` metrics count requests anyway.
        decision_log: every event and decision of the schedulers, for `ray-slo replay`.
        name: of the frontend's deployment.
    """

    scheduler: Literal["auto", "actor", "embedded"] = "auto"
    num_frontends: int = Field(default=1, ge=1, le=MOST_REPLICAS)
    frontend_actor_options: dict[str, Any] = Field(default_factory=lambda: {"num_cpus": 0})
    max_queued_requests: int = Field(default=1000, ge=1)
    isolate_errors: bool = False
    retries: int = Field(default=2, ge=0, le=100)
    response_margin_ms: float = Field(default=5.0, ge=0)
    max_body_bytes: int = Field(default=16 * 2**20, ge=1, le=2**31 - 1)
    max_json_bytes: int = Field(default=8 * 2**20, ge=1, le=2**31 - 1)
    max_json_values: int = Field(default=1_000_000, ge=1)
    error_details: bool = True
    profile_seconds: float = Field(default=2.0, ge=0)
    access_log: bool = False
    decision_log: DecisionLogConfig | None = None
    name: str | None = None

    @field_validator("decision_log", mode="before")
    @classmethod
    def _log_by_folder(cls, value: Any) -> Any:
        return {"dir": value} if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _own_name(cls, value: str | None) -> str | None:
        if value is not None:
            check_name("deployment", value)
        return value


class AppConfig(Settings):
    """A whole application.

    Attributes:
        models: by name; the name is what a client asks for (`/name` over HTTP, `model=` on a
            handle; neither is needed when there is one model or pipeline).
        pipelines: trees of tasks, by name; clients ask for the whole. A task with code of its own
            is a model to scheduler, workers and metrics. Models, pipelines and tasks have names of
            their own.
        pipeline: the short form of one pipeline; its name is `name`, by default "pipeline".
        workers: by hardware kind.
        groups: serving groups by name, each with workers and models of its own, instead of
            `workers`.
        planner: decides how many workers there are, what each of them serves, and in which group.
            The default is "auto" where numbers of workers may change, groups leave models out, or
            there are pipelines, and "loki" for one pipeline alone on one kind of workers. "herd"
            and "partition" move models between groups, or make groups of `workers`. null: all
            stays as it is written, and every worker has all variants.
        policy: who decides; see `PolicyConfig`. Each group has a policy object of its own, made of
            this where the group names no other.
    """

    instead: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(WorkerConfig.model_fields, "write it under workers.NAME"),
        **NOT_OURS,
        "user_config": "write it under models.NAME",
        "max_batch_size": "write it under models.NAME",
    }

    models: dict[str, ModelConfig] = Field(default_factory=dict)
    pipelines: dict[str, PipelineConfig] = Field(default_factory=dict)
    pipeline: PipelineConfig | None = None
    workers: dict[str, WorkerConfig] | None = None
    groups: dict[str, GroupConfig] = Field(default_factory=dict)
    planner: PlannerConfig | None = None
    policy: PolicyConfig = Field(default_factory=PolicyConfig)

    @field_validator("planner", mode="before")
    @classmethod
    def _planner_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("workers")
    @classmethod
    def _some_workers(cls, value: dict[str, WorkerConfig] | None) -> Any:
        if value is not None and not value:
            raise ValueError("name at least one kind of worker")
        return value

    @field_validator("models")
    @classmethod
    def _model_names(cls, value: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
        for name in value:
            check_name("model", name)
        return value

    @field_validator("pipelines")
    @classmethod
    def _pipeline_names(cls, value: dict[str, PipelineConfig]) -> dict[str, PipelineConfig]:
        for name in value:
            check_name("pipeline", name)
        return value

    @model_validator(mode="after")
    def _one_form(self) -> AppConfig:
        if self.pipeline is not None and self.pipelines:
            raise ValueError(
                "pipeline: the short form of one pipeline; name it under `pipelines`, beside "
                f"{', '.join(self.pipelines)}"
            )
        return self

    @field_validator("groups")
    @classmethod
    def _group_names(cls, value: dict[str, GroupConfig]) -> dict[str, GroupConfig]:
        for name, group in value.items():
            check_name("group", name)
            if not group.workers:
                raise ValueError(f"{name}: name at least one kind of worker")
        return value

    @property
    def planned_by(self) -> PlannerConfig | None:
        """The planner that is named, else the default one."""
        if self.planner is not None or "planner" in self.model_fields_set:
            return self.planner
        workers, lone = list(self.kinds.values()), self.lone_pipeline
        simple = len(workers) == 1 and workers[0].least_replicas > 0 and not self.groups
        if lone is not None and simple and not lone.slo_classes and not lone.is_sized:
            return PlannerConfig(name="loki")
        scales = any(worker.most_replicas is not None for worker in workers)
        listed = {model for group in self.groups.values() for model in group.models}
        places = bool(self.groups) and not listed >= self.served.keys()
        return PlannerConfig(name="auto") if scales or places or self.all_pipelines else None

    @property
    def all_pipelines(self) -> dict[str, PipelineConfig]:
        """Pipelines by name, in whatever form they were written."""
        if self.pipeline is None:
            return self.pipelines
        return {self.name or "pipeline": self.pipeline}

    @property
    def roots(self) -> dict[str, ModelConfig | PipelineConfig]:
        """What clients may ask for."""
        return {**self.models, **self.all_pipelines}

    @property
    def lone_pipeline(self) -> PipelineConfig | None:
        """The only thing that clients may ask for, if that is a pipeline whose tasks all have code
        of their own."""
        if self.models or len(self.all_pipelines) != 1:
            return None
        (pipeline,) = self.all_pipelines.values()
        return None if pipeline.shares else pipeline

    def pipeline_field(self, name: str) -> str:
        """Where a pipeline is written."""
        return f"pipelines.{name}" if self.pipeline is None else "pipeline"

    @property
    def kinds(self) -> dict[str, WorkerConfig]:
        """Workers by kind, those of groups under names that are unique in the application."""
        if not self.groups:
            return {"default": WorkerConfig()} if self.workers is None else self.workers
        return {
            kind_in_group(name, kind): worker
            for name, group in self.groups.items()
            for kind, worker in group.workers.items()
        }

    @property
    def served(self) -> dict[str, ModelConfig]:
        """What workers serve: the models, and tasks with code of their own as models."""
        served = dict(self.models)
        for pipeline in self.all_pipelines.values():
            for name, task in pipeline.tasks.items():
                if task.model is None:
                    served[name] = task.as_model(pipeline.latency_slo_ms)
        return served

    @property
    def deployment_name(self) -> str:
        """Name of the frontend's deployment, before Serve makes it unique in its application."""
        return self.name or (next(iter(self.roots)) if len(self.roots) == 1 else "models")


def kind_in_group(group: str, kind: str) -> str:
    """Name of a kind of worker of a group, unique in the application."""
    return group if kind == "default" else f"{group}-{kind}"
