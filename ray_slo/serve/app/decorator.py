"""`@ray_slo.deployment`: a class with a latency SLO becomes a Serve application."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ray.serve import Application

from ray_slo.core.pages import DEPLOYMENTS, pointed, pointing
from ray_slo.core.text import quoted
from ray_slo.serve.app.build import build_app_from_spec
from ray_slo.serve.config.models import ModelConfig, Variant
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.config.user_class import check_user_class
from ray_slo.serve.config.workers import WorkerConfig
from ray_slo.serve.errors import ConfigError


class Deployment:
    """A class with a latency SLO, ready to `bind`. Made by `@ray_slo.deployment`."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        # Serve makes a replica so. `@serve.deployment` itself would take anything callable.
        if not isinstance(cls, type):
            raise ConfigError(
                f"{cls.name}: @serve.deployment is written over @ray_slo.deployment, which makes "
                "the deployments itself: leave it out, and give its options to @ray_slo.deployment"
            )
        return super().__new__(cls)

    def __init__(self, user_class: type[Any], options: dict[str, Any]) -> None:
        variants = options.get("variants")
        named = isinstance(variants, Mapping)
        listed = isinstance(variants, list | tuple) and all(
            isinstance(v, Variant) for v in variants
        )
        has_variants = bool(variants) and (named or listed)  # of what is neither, the spec says so
        with pointing(DEPLOYMENTS):
            self._user_class = check_user_class(user_class, has_variants)
            self._options = options
            functools.update_wrapper(self, user_class, updated=())
            self._spec((), {})  # refuse bad options at the decorator

    @property
    def user_class(self) -> type[Any]:
        """The decorated class, undecorated."""
        return self._user_class

    @property
    def model(self) -> ModelConfig:
        """The model that it serves, without the constructor's arguments."""
        return next(iter(self._spec((), {}).models.values()))

    @property
    def name(self) -> str:
        """Name of the Serve deployment that answers (the frontend), and of the model."""
        return str(self._options.get("name") or self._user_class.__name__)

    def options(self, **changes: Any) -> Deployment:
        """A copy with other options (those of `ray_slo.deployment`)."""
        return Deployment(self._user_class, {**self._options, **changes})

    def bind(self, *args: Any, **kwargs: Any) -> Application:
        """A Serve application; the arguments are those of the class's constructor."""
        return build_app_from_spec(self._spec(args, kwargs))

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self.name} is a ray-slo deployment and is not constructed directly: "
            f"use {self.name}.bind(…) and serve.run, or {self.name}.user_class(…)"
        )

    def _spec(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AppSpec:
        options = {k: v for k, v in self._options.items() if v is not None}
        model = {k: options.pop(k) for k in ModelConfig.model_fields if k in options}
        worker = {k: options.pop(k) for k in WorkerConfig.model_fields if k in options}
        check_apart(options, worker, "models", "the model is the decorated class")
        policy = {
            "name": options.pop("policy", None),
            "kwargs": options.pop("policy_kwargs", {}),
        }
        name = options.pop("name", self._user_class.__name__)
        if not isinstance(name, str):
            raise ValueError(f"name: must be a text, got {quoted(name)}")
        model = {"callable": self._user_class, "args": args, "kwargs": kwargs, **model}
        return parse_spec(
            {
                "models": {name: model},
                **({"workers": {"default": worker}} if worker else {}),
                "policy": policy,
                "name": name,
                **options,
            }
        )


def check_apart(
    options: Mapping[str, Any], worker: Mapping[str, Any], made: str, what: str
) -> None:
    """Refuse fields of an application that would replace other arguments of the same call.

    Args:
        options: fields of the application.
        worker: fields of the only kind of workers.
        made: the field that the other arguments make.
        what: what it is, as a sentence.

    Raises:
        ValueError: names the field, and where to write it.
    """
    if made in options:
        raise ValueError(f"{made}: {what}; leave it out, or use ray_slo.application")
    for name in sorted({"workers", "groups"} & options.keys()):
        if worker:
            raise ValueError(
                f"{name}: {', '.join(worker)} would be lost; write it in {name}, for each kind of "
                "worker"
            )


def deployment(
    _user_class: type[Any] | None = None,
    *,
    latency_slo_ms: float | None = None,
    variants: Sequence[Variant] | None = None,
    policy: Any = None,
    policy_kwargs: dict[str, Any] | None = None,
    num_replicas: int | Literal["auto"] | None = None,
    min_replicas: int | None = None,
    max_replicas: int | None = None,
    autoscaling_config: dict[str, Any] | None = None,
    planner: str | dict[str, Any] | None = None,
    ray_actor_options: dict[str, Any] | None = None,
    name: str | None = None,
    max_batch_size: int | None = None,
    accuracy: float | None = None,
    profile: str | None = None,
    profile_quantile: float | None = None,
    exit_points: int | None = None,
    user_config: Any = None,
    scheduler: str | None = None,
    num_frontends: int | None = None,
    frontend_actor_options: dict[str, Any] | None = None,
    max_queued_requests: int | None = None,
    isolate_errors: bool | None = None,
    error_details: bool | None = None,
    retries: int | None = None,
    response_margin_ms: float | None = None,
    profile_seconds: float | None = None,
    max_body_bytes: int | None = None,
    max_json_bytes: int | None = None,
    max_json_values: int | None = None,
    decision_log: str | dict[str, Any] | None = None,
    **serve_options: Any,
) -> Any:
    """Serve a class under a latency SLO, batched across all its replicas by deadline.

    The class maps a list of items to a list of results, one per item:

        @ray_slo.deployment(latency_slo_ms=100, num_replicas=2)
        class Classifier:
            def __init__(self, folder: str = "/models"): ...
            def __call__(self, images: list[np.ndarray]) -> list[str]: ...

        handle = serve.run(Classifier.bind())
        await handle.remote(image)                       # one item in, one result out
        await handle.remote(image, latency_slo_ms=40)    # this call's own SLO

    With variants the policy chooses, per batch, the network that answers: the most accurate that
    the load leaves time for. The batch method gets the loaded network:

        @ray_slo.deployment(latency_slo_ms=150, variants=[
            ray_slo.Variant("small", accuracy=69.8, load=load_network, args=("small",)),
            ray_slo.Variant("large", accuracy=80.9, load=load_network, args=("large",)),
        ])
        class Classifier:
            def __call__(self, network: Any, images: list[np.ndarray]) -> list[str]: ...

    Optional static methods of the class: `preprocess(item)` and `postprocess(result)` run in the
    frontend; `example_input()` returns an item for warm-up and measurement, so that the first
    request is already planned well; `size(item)` returns the size of an item, if sizes differ.
    Optional methods, called on each worker as Serve calls them: `reconfigure(user_config)` or
    `reconfigure(user_config, rank)`, `check_health()`, `record_routing_stats()`,
    `record_autoscaling_stats()`, `record_replica_metadata()` and `__del__()`. The constructor may
    be async. It is then awaited on the worker's event loop, and must not block.

    Args:
        latency_slo_ms: milliseconds from arrival to answer. Required.
        variants: networks that can answer; every worker loads (and measures) all of them.
        policy: "auto" (the default: it tries the others on the traffic and runs the best), a fixed
            policy such as "deferred", "module:Class", or a policy class.
        policy_kwargs: its arguments, e.g. {"objective": "consolidate"} of "deferred".
        num_replicas: number of workers, each a Serve replica; only the initial number if it follows
            the load.
        min_replicas, max_replicas: bounds for the number of workers, which follows the load. With
            `min_replicas=0` the last worker stops when there are no requests, and the next request
            starts one.
        autoscaling_config: Serve's own form of these bounds (`num_replicas="auto"`: 1 to 100).
        planner: decides the number of workers: "auto" (the default with `max_replicas`), or a
            dictionary with its name and other fields of `PlannerConfig`.
        ray_actor_options: Ray resources of a worker, e.g. {"num_gpus": 1}.
        name: name of the deployment and of the model; default: the class's name.
        max_batch_size: upper bound; the policy chooses the size.
        decision_log: folder for the scheduler's events and decisions (`ray-slo report`).
        serve_options: options of `serve.deployment` that mean something for a worker:
            `placement_group_bundles`, `max_replicas_per_node`, `health_check_period_s`,
            `graceful_shutdown_timeout_s` and similar ones (`ServeOptions` of
            `ray_slo.serve.config.workers`). Others are refused; the error says what to write
            instead.

    The other arguments are fields of `AppConfig` and `ModelConfig` (`ray_slo.serve.config`), and
    are documented there.

    Raises:
        ValueError: an option cannot work. The message has the field, the value and the choices.
    """
    given = {k: v for k, v in locals().items() if k not in ("_user_class", "serve_options")}
    options = {**given, **serve_options}
    if latency_slo_ms is None:
        said = (
            "@ray_slo.deployment needs latency_slo_ms, e.g. @ray_slo.deployment(latency_slo_ms=100)"
        )
        raise ValueError(pointed(said, DEPLOYMENTS))
    make: Callable[[type[Any]], Deployment] = functools.partial(Deployment, options=options)
    return make(_user_class) if _user_class is not None else make
