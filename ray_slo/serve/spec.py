"""What an application is made of: the one typed form behind the decorator and the YAML.

Unknown keys and bad values are refused at parse time with the field, the value and the choices.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from ray_slo.scheduling.registry import import_attr, make_policy


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class ModelSpec(_Strict):
    """One model: the user's class and its SLO.

    Attributes:
        callable: class (or "module:Class") whose instances map a list of items to a list of
            results. Optional static methods: `preprocess(item)` and `postprocess(result)`, which
            run in the frontend, and `example_input()`, a representative preprocessed item for
            warm-up and profiling. Optional method: `reconfigure(user_config)`.
        args, kwargs: of the class's constructor.
        latency_slo_ms: answer within this many milliseconds, counted from arrival at the frontend.
        accuracy: percent, where known; goes into answers.
        max_batch_size: upper bound; the policy chooses the size.
        profile: path of a latency-profile file (`ray-slo profile`) to start from.
        profile_quantile: of measured batch durations, which the policy plans with.
        user_config: passed to `reconfigure`.
    """

    callable: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = Field(default_factory=dict)
    latency_slo_ms: float = Field(gt=0)
    accuracy: float | None = Field(default=None, ge=0, le=100)
    max_batch_size: int = Field(default=64, ge=1, le=4096)
    profile: str | None = None
    profile_quantile: float = Field(default=0.95, gt=0, lt=1)
    user_config: Any = None

    def load(self) -> type[Any]:
        """The user's class, checked.

        Raises:
            ValueError: not importable, or its methods do not fit.
        """
        target = import_attr(self.callable) if isinstance(self.callable, str) else self.callable
        # What @ray_slo.deployment made of a class will do, too.
        return check_user_class(getattr(target, "user_class", target))


class WorkerSpec(_Strict):
    """A kind of worker: so many Serve replicas with such resources, each hosting every model."""

    num_replicas: int = Field(default=1, ge=1)
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)


class PolicySpec(_Strict):
    """A policy by name or "module:attr", with its arguments."""

    name: Any = "deferred"
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _resolves(self) -> PolicySpec:
        if getattr(make_policy(self.name, self.kwargs), "preempts", False):
            raise ValueError(
                f"policy {self.name!r} preempts running batches, which live workers cannot do: "
                "it runs in the simulator; `flex` runs live with kwargs {preemption: false}"
            )
        return self


class AppSpec(_Strict):
    """A whole application.

    Attributes:
        models: by name; the name is what a client asks for (`/name` over HTTP, `model=` on a
            handle; neither is needed when there is one).
        workers: by hardware kind.
        policy: who decides.
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
        max_body_bytes: largest HTTP body that is read.
        profile_seconds: time that a worker may spend measuring itself at start.
        access_log: a line per request in the frontend's log, as Serve does by default. It costs
            about as much as the scheduling; `serve_slo_*` metrics count requests anyway.
        name: of the frontend's deployment.
    """

    models: dict[str, ModelSpec] = Field(min_length=1)
    workers: dict[str, WorkerSpec] = Field(default_factory=lambda: {"default": WorkerSpec()})
    policy: PolicySpec = Field(default_factory=PolicySpec)
    scheduler: Literal["auto", "actor", "embedded"] = "auto"
    num_frontends: int = Field(default=1, ge=1)
    frontend_actor_options: dict[str, Any] = Field(default_factory=lambda: {"num_cpus": 0})
    max_queued_requests: int = Field(default=1000, ge=1)
    isolate_errors: bool = False
    retries: int = Field(default=2, ge=0)
    response_margin_ms: float = Field(default=5.0, ge=0)
    max_body_bytes: int = Field(default=16 * 2**20, ge=1)
    profile_seconds: float = Field(default=3.0, ge=0)
    access_log: bool = False
    name: str | None = None
    _version: float = PrivateAttr(default_factory=time.time)
    _fingerprint: str = PrivateAttr(default="")

    @field_validator("policy", mode="before")
    @classmethod
    def _policy_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict | PolicySpec):
            return value
        return {"name": value}

    @field_validator("workers")
    @classmethod
    def _some_workers(cls, value: dict[str, WorkerSpec]) -> dict[str, WorkerSpec]:
        if not value:
            raise ValueError("name at least one kind of worker")
        return value

    @field_validator("models")
    @classmethod
    def _model_names(cls, value: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
        for name in value:
            if not name or not all((c.isascii() and c.isalnum()) or c in "-_." for c in name):
                raise ValueError(
                    f"model name {name!r}: use ASCII letters, digits, '-', '_' and '.' "
                    "(it is part of a URL and of metric tags)"
                )
        return value

    @model_validator(mode="after")
    def _scheduler_fits(self) -> AppSpec:
        if self.scheduler == "embedded" and self.num_frontends > 1:
            raise ValueError(
                f"scheduler 'embedded' lives in the only frontend, but num_frontends is "
                f"{self.num_frontends}; choose 'actor' or 'auto'"
            )
        return self

    def without_code(self) -> AppSpec:
        """The same for the scheduler, which needs neither the user's classes nor arguments."""
        models = {
            name: m.model_copy(
                update={"callable": "", "args": (), "kwargs": {}, "user_config": None}
            )
            for name, m in self.models.items()
        }
        return self.model_copy(update={"models": models})

    @property
    def version(self) -> float:
        """When it was parsed: of two, the later one counts."""
        return self._version

    @property
    def fingerprint(self) -> str:
        """Equal for two that differ in nothing that a running replica would have to know of."""
        return self._fingerprint

    def stamped(self, fingerprint: str) -> AppSpec:
        """The same with a fingerprint."""
        copy = self.model_copy()
        copy._fingerprint = fingerprint
        return copy

    @property
    def deployment_name(self) -> str:
        """Name of the frontend's deployment, before Serve makes it unique in its application."""
        return self.name or (next(iter(self.models)) if len(self.models) == 1 else "models")

    @property
    def embedded(self) -> bool:
        """Whether the scheduler lives in the frontend."""
        return self.scheduler == "embedded" or (
            self.scheduler == "auto" and self.num_frontends == 1
        )


def worker_deployment(frontend: str, kind: str) -> str:
    """Name of the Serve deployment of a kind of worker."""
    return f"{frontend}-worker" if kind == "default" else f"{frontend}-{kind}-worker"


def check_user_class(target: Any) -> type[Any]:
    """Refuse, before anything is deployed, a class that cannot work.

    Raises:
        ValueError: says what is wrong and what is wanted.
    """
    if not inspect.isclass(target):
        raise ValueError(
            f"a deployment is made from a class with __call__(self, items: list) -> list, "
            f"got {target!r}"
        )
    call = target.__dict__.get("__call__") or getattr(target, "__call__", None)  # noqa: B004
    if not inspect.isfunction(call):
        raise ValueError(
            f"{target.__name__} has no __call__; it must map a list of items to a list of results"
        )
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise ValueError(
            f"{target.__name__}.__call__ is a generator; a coordinated batch returns a list. "
            "For streaming, use @ray_slo.batch"
        )
    takes = [
        p
        for p in inspect.signature(call).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if len(takes) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in takes):
        raise ValueError(
            f"{target.__name__}.__call__ takes no argument; it must take a list of items"
        )
    for name in ("preprocess", "postprocess", "example_input"):
        for owner in target.__mro__:
            if name in owner.__dict__:
                if not isinstance(owner.__dict__[name], staticmethod | classmethod):
                    raise ValueError(
                        f"{target.__name__}.{name} must be a @staticmethod or @classmethod: it "
                        "runs where the model is not loaded"
                    )
                break
    return target


def parse_spec(data: dict[str, Any]) -> AppSpec:
    """Parse an application's `args`.

    Raises:
        ValueError: one line per mistake: field, value, valid choices.
    """
    try:
        return AppSpec.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(e) for e in error.errors())) from None


_CHILDREN: dict[str, type[BaseModel]] = {
    "models": ModelSpec,
    "workers": WorkerSpec,
    "policy": PolicySpec,
}


def _explain(error: Any) -> str:
    path = ".".join(str(p) for p in error["loc"]) or "args"
    if error["type"] == "extra_forbidden":
        owner = _CHILDREN[error["loc"][0]] if len(error["loc"]) > 1 else AppSpec
        valid = sorted(owner.model_fields)
        near = get_close_matches(str(error["loc"][-1]), valid, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"{path}: unknown key{hint}; valid keys are {', '.join(valid)}"
    if error["type"] == "missing":
        return f"{path}: required"
    shown = error["input"]
    got = f", got {shown!r}" if not isinstance(shown, dict) else ""
    return f"{path}: {error['msg'].removeprefix('Value error, ')}{got}"
