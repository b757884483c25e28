"""A whole application, as users write it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ray_slo.core.explain import Misplaced
from ray_slo.core.text import quoted
from ray_slo.serve.config.common import MOST_REPLICAS, StrictConfig, check_name, names
from ray_slo.serve.config.models import ModelConfig
from ray_slo.serve.config.pipeline import PipelineConfig
from ray_slo.serve.config.policy import PolicyConfig
from ray_slo.serve.config.workers import NOT_OURS, GroupConfig, WorkerConfig, Workers
from ray_slo.serve.planner.plugin import planner_class

_LABEL = r"[\w-]{1,63}"
_HOST = re.compile(rf"\*|(\*\.)?{_LABEL}(\.{_LABEL})*\.?", re.ASCII)


class PlannerConfig(StrictConfig):
    """The planner: it decides how many workers of each kind there are and what they serve. "herd"
    and "partition" decide which models (and, without `groups`, which workers) make a group.

    Attributes:
        name: "auto" for any shape of application. It is the default if there is a pipeline, if
            `max_replicas` of a kind is given, or if there are groups and some model is in none of
            them; "loki" for one pipeline on workers of one kind, as in its paper; "kairos" for
            requests of different sizes and instance types under a budget, or "kairos_plus", which
            also simulates its candidates;
            "herd" (largest burst tolerance, sizes the groups itself) or "partition" (even loads on
            a fixed number of groups). Or a planner of your own, as "module:Class"
            (`ray_slo.serve.planner.plugin.PlannerPlugin`).
        interval_s: seconds between two plans. It plans at deployment, and after every interval for
            the demand measured in it. Default: 60 for groups, and 10 for the others. Those also
            plan when the demand has changed by more than chance.
        rates: expected requests per second by model, used until an interval was measured; 1 if not
            given. "loki" uses that of the pipeline's root. "auto" uses those of models and
            pipelines, or of an SLO class of one, "name@class".
        memory_mb: memory that each model needs on a worker, MB; 0 if not given. For groups.
        min_gain: a new plan must be better by more than this share, or the old one stays. Not for
            "loki" and "auto", which have `swap_cost`.
        demand: how the demand is predicted (`ray_slo.core.demand`). Not for groups.
        make_before_break: for "loki" and "auto": a worker loads its next variant before it unloads
            the last one, so it serves all the time. Use False if memory is enough for only one.
        kwargs: further arguments of the planner's `Problem` (`ray_slo.planning`), e.g.
            {"group_worker_limit": 4} of herd, {"sub_clusters": 2} of partition, or
            {"headroom_quantile": 0.95} of loki. Of kairos: `Arguments` of
            `ray_slo.papers.kairos.solver`, e.g. {"budget_per_hour": 2.5}. Those of auto and
            kairos can be changed at run time, with the frontend's `user_config: {planner:
            {budget_per_hour: 1.5}}`.
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
            raise Misplaced(wrong[0], f"not for the planner {self.name!r}; leave it out")
        return self


class DecisionLogConfig(StrictConfig):
    """Where every scheduler writes the events and decisions of its policy (docs/decision-log.md).

    Attributes:
        dir: folder on the node where the scheduler runs; schedulers may share it.
        max_mb: limit of all logs in the folder, MB; the oldest files are deleted first.
        flush_s: a crash loses at most this many seconds of the log.
    """

    dir: str = Field(min_length=1)
    max_mb: float = Field(default=64.0, gt=0)
    flush_s: float = Field(default=5.0, gt=0)


class Settings(StrictConfig):
    """The settings of an application other than models, workers, policy and planner.

    Attributes:
        scheduler: "embedded" in the only frontend (no control round trips), "actor" (a named
            actor that survives frontends and serves several), or "auto": embedded for one
            frontend, else an actor.
        num_frontends: Serve replicas that own requests from arrival to answer.
        frontend_actor_options: Ray resources for each frontend.
        max_queued_requests: limit per frontend; further requests are refused with "queue_full".
        isolate_errors: when a batch raises, run its items one by one, so that only the item that
            causes the error gets it.
        retries: number of times that a request is tried again after its worker died, within its
            deadline.
        response_margin_ms: time reserved at the end of a request's budget for the way back to the
            client, in addition to the measured time between frontend and worker.
        max_body_bytes: largest item that is read, over HTTP and gRPC. Serve's proxies have their
            own limit (`RAY_SLO_MAX_BODY_BYTES`, see SECURITY.md).
        max_json_bytes: the same for JSON.
        max_json_values: values in one body of JSON, a list or an object counted as ten. A million
            values hold Python's lock for about 50 ms, and a frontend does nothing else then.
        error_details: whether clients get the message of an error of the user's own code, over HTTP
            and gRPC; with False it is only in the log. Without `isolate_errors`, an error of a
            batch goes to all of its requests, and may quote another client's item.
        profile_seconds: time that a worker may spend to measure each variant at start; fast
            variants need less. 0: measure nothing, learn from the first batches.
        access_log: a line per request in the frontend's log, as Serve does by default. It costs
            about as much as the scheduling; `serve_slo_*` metrics count requests anyway.
        decision_log: every event and decision of the schedulers, for `ray-slo replay`.
        status_page: serve the content of `ray-slo top` as a web page, at `-/top` below the route
            prefix. Everybody who can reach the API can read it: names, load, errors of models'
            code.
        status_hosts: names under which browsers and programs may ask for the status pages, such as
            slo.example.com. `*.example.com` allows all names below it, and `*` every name. Always
            allowed are localhost, the names of the frontend's machine, and all IP addresses.
        name: name of the frontend's deployment.
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
    status_page: bool = False
    status_hosts: list[str] = Field(default_factory=list)
    name: str | None = None

    @field_validator("decision_log", mode="before")
    @classmethod
    def _log_by_folder(cls, value: Any) -> Any:
        return {"dir": value} if isinstance(value, str) else value

    @field_validator("status_hosts")
    @classmethod
    def _hosts(cls, value: list[str]) -> list[str]:
        for at, host in enumerate(value):
            if not _HOST.fullmatch(host):
                raise Misplaced(
                    str(at),
                    "must be the name of a host without scheme, port and path, such as "
                    f"slo.example.com, *.example.com or '*', got {quoted(host)}",
                )
        return value

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
        pipelines: trees of tasks, by name; clients ask for the whole tree. For scheduler, workers
            and metrics, a task with its own code is a model. Models, pipelines and tasks need
            different names.
        pipeline: the short form of one pipeline; its name is `name`, by default "pipeline".
        workers: workers by hardware kind.
        groups: serving groups by name, each with its own workers and models, instead of `workers`.
        planner: decides how many workers there are, what each of them serves, and in which group.
            The default is "auto" if numbers of workers may change, some model is in no group, or
            there are pipelines. "herd" and "partition" move models between groups, or make groups
            of `workers`. null: nothing changes at run time, and every worker has all variants.
        policy: the policy that decides; see `PolicyConfig`. Each group has its own policy object.
            It is made from this, unless the group names another policy.
    """

    instead: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(WorkerConfig.model_fields, "write it under workers.NAME"),
        **NOT_OURS,
        "user_config": "write it under models.NAME",
        "max_batch_size": "write it under models.NAME",
    }

    models: Annotated[dict[str, ModelConfig], names("model")] = Field(default_factory=dict)
    pipelines: Annotated[dict[str, PipelineConfig], names("pipeline")] = Field(default_factory=dict)
    pipeline: PipelineConfig | None = None
    workers: Workers | None = None
    groups: Annotated[dict[str, GroupConfig], names("group")] = Field(default_factory=dict)
    planner: PlannerConfig | None = None
    policy: PolicyConfig = Field(default_factory=PolicyConfig)

    @field_validator("planner", mode="before")
    @classmethod
    def _planner_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_form(self) -> AppConfig:
        if self.pipeline is not None and self.pipelines:
            raise Misplaced(
                "pipeline",
                "the short form of one pipeline; name it under `pipelines`, beside "
                f"{', '.join(self.pipelines)}",
            )
        return self

    @property
    def planned_by(self) -> PlannerConfig | None:
        """The named planner, or the default one."""
        if self.planner is not None or "planner" in self.model_fields_set:
            return self.planner
        scales = any(worker.most_replicas is not None for worker in self.kinds.values())
        listed = {model for group in self.groups.values() for model in group.models}
        places = bool(self.groups) and not listed >= self.served.keys()
        return PlannerConfig(name="auto") if scales or places or self.all_pipelines else None

    @property
    def all_pipelines(self) -> dict[str, PipelineConfig]:
        """Pipelines by name, from `pipelines` or `pipeline`."""
        if self.pipeline is None:
            return self.pipelines
        return {self.name or "pipeline": self.pipeline}

    @property
    def roots(self) -> dict[str, ModelConfig | PipelineConfig]:
        """The models and pipelines that clients may ask for."""
        return {**self.models, **self.all_pipelines}

    @property
    def lone_pipeline(self) -> PipelineConfig | None:
        """The pipeline, if it is all that clients may ask for and all its tasks have their own
        code."""
        if self.models or len(self.all_pipelines) != 1:
            return None
        (pipeline,) = self.all_pipelines.values()
        return None if pipeline.shares else pipeline

    def pipeline_field(self, name: str) -> str:
        """The field of the config that contains a pipeline."""
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

    def kind_field(self, kind: str) -> str:
        """Where a kind of worker, as `kinds` names it, is written."""
        for name, group in self.groups.items():
            for own in group.workers:
                if kind_in_group(name, own) == kind:
                    return f"groups.{name}.workers.{own}"
        return f"workers.{kind}"

    @property
    def served(self) -> dict[str, ModelConfig]:
        """What workers serve: the models, and tasks with their own code as models."""
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
