"""`@ray_slo.deployment` and `build_app`: from a class, or a config, to a Serve application.

Either way the result is one application of ordinary Serve deployments: a frontend (the ingress)
and one worker deployment per kind of worker.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ray import cloudpickle, serve
from ray.serve import Application

from ray_slo.core.profiles import load_profiles
from ray_slo.core.text import quoted
from ray_slo.policies.registry import refuse_sizes
from ray_slo.serve.config.models import ModelConfig, Variant
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.config.spec import AppSpec, worker_deployment
from ray_slo.serve.config.user_class import check_arguments, check_user_class
from ray_slo.serve.frontend.frontend import Frontend
from ray_slo.serve.planner.autoscaling import autoscaling
from ray_slo.serve.ray_private.deploy import router_of, versioned
from ray_slo.serve.worker.worker import Worker

# A worker accepts every call: the scheduler never sends more than it can take.
_UNBOUNDED = 100_000
# Serve's own default is 20 (at most 3 per replica); what we refuse at start is refused for good.
_CONSTRUCTOR_RETRIES = 3
_PROCESS = uuid.uuid4().hex


class Deployment:
    """A class with a latency SLO, ready to `bind`. Made by `@ray_slo.deployment`."""

    def __init__(self, user_class: type[Any], options: dict[str, Any]) -> None:
        self._user_class = check_user_class(user_class, bool(options.get("variants")))
        self._options = options
        functools.update_wrapper(self, user_class, updated=())
        self._spec((), {})  # refuse bad options where they are written

    @property
    def user_class(self) -> type[Any]:
        """The decorated class, undecorated."""
        return self._user_class

    @property
    def model(self) -> ModelConfig:
        """The model that it serves, without arguments of the constructor."""
        return next(iter(self._spec((), {}).models.values()))

    @property
    def name(self) -> str:
        """Name of the Serve deployment that answers (the frontend), and of the model."""
        return str(self._options.get("name") or self._user_class.__name__)

    def options(self, **changes: Any) -> Deployment:
        """The same with other options (those of `ray_slo.deployment`)."""
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
        model: dict[str, Any] = {
            key: options.pop(key)
            for key in (
                "latency_slo_ms",
                "variants",
                "accuracy",
                "max_batch_size",
                "profile",
                "profile_quantile",
                "exit_points",
                "user_config",
            )
            if key in options
        }
        worker = {
            key: options.pop(key) for key in ("num_replicas", "ray_actor_options") if key in options
        }
        policy = {
            "name": options.pop("policy", None),
            "kwargs": options.pop("policy_kwargs", {}),
        }
        name = options.pop("name", None) or self._user_class.__name__
        model = {"callable": self._user_class, "args": args, "kwargs": kwargs, **model}
        return parse_spec(
            {
                "models": {name: model},
                "workers": {"default": worker},
                "policy": policy,
                "name": name,
                **options,
            }
        )


def deployment(
    _user_class: type[Any] | None = None,
    *,
    latency_slo_ms: float | None = None,
    variants: Sequence[Variant] | None = None,
    policy: Any = None,
    policy_kwargs: dict[str, Any] | None = None,
    num_replicas: int | None = None,
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
    the load leaves time for. The batch method is given the loaded one:

        @ray_slo.deployment(latency_slo_ms=150, variants=[
            ray_slo.Variant("small", accuracy=69.8, load=load_network, args=("small",)),
            ray_slo.Variant("large", accuracy=80.9, load=load_network, args=("large",)),
        ])
        class Classifier:
            def __call__(self, network: Any, images: list[np.ndarray]) -> list[str]: ...

    Optional static methods of the class: `preprocess(item)` and `postprocess(result)` run in the
    frontend; `example_input()` gives an item to warm up and to measure with, so that the first
    request is already planned well; `size(item)` says how many things an item is, where they differ
    (policy "kairos"). Optional method: `reconfigure(user_config)`.

    Args:
        latency_slo_ms: answer within so many milliseconds of arrival. Required.
        variants: networks that can answer; every worker loads (and measures) all of them.
        policy: "deferred" (the default), "flex" or "deferred_flex" (which preempt), "eager",
            "timeout", "kairos" (for items of unlike sizes), "module:Class", or a policy class.
            With variants: "price" (the default) or "ramsis".
        policy_kwargs: its arguments, e.g. {"objective": "consolidate"}.
        num_replicas: workers, each a Serve replica.
        ray_actor_options: of a worker, e.g. {"num_gpus": 1}.
        name: of the deployment and of the model; default: the class's name.
        max_batch_size: upper bound; the policy chooses the size.
        decision_log: folder for what the scheduler was told and decided (`ray-slo report`).

    The other arguments are fields of `AppConfig` and `ModelConfig` (`ray_slo.serve.config`) and
    documented there.

    Raises:
        ValueError: an option that cannot work, with the field, the value and the choices.
    """
    options = {k: v for k, v in locals().items() if k != "_user_class"}
    if latency_slo_ms is None:
        raise ValueError(
            "@ray_slo.deployment needs latency_slo_ms, e.g. @ray_slo.deployment(latency_slo_ms=100)"
        )
    make: Callable[[type[Any]], Deployment] = functools.partial(Deployment, options=options)
    return make(_user_class) if _user_class is not None else make


def build_app(args: dict[str, Any]) -> Application:
    """The import path for `serve run` configs: `import_path: ray_slo.serve:build_app`.

    Args:
        args: the fields of `ray_slo.serve.config.app.AppConfig`.

    Raises:
        ValueError: one line per mistake in `args`.
    """
    return build_app_from_spec(parse_spec(args))


def build_app_from_spec(spec: AppSpec) -> Application:
    """Frontend and workers as Serve deployments.

    An application deployed again by the same process with nothing but `num_replicas`,
    `num_frontends`, `user_config` or the budget of the planner `kairos` (any of its `kwargs`)
    changed is changed in place: no replica restarts.

    Raises:
        ValueError: a class or a loader cannot be imported or cannot work.
    """
    _check_code(spec)
    spec = spec.stamped(_fingerprint(spec))
    name = spec.deployment_name
    user_config = {n: m.user_config for n, m in spec.models.items() if m.user_config is not None}
    workers = {}
    for kind, worker in spec.workers.items():
        replicas: dict[str, Any] = {"num_replicas": worker.num_replicas}
        if worker.replica_bounds is not None:
            replicas = {"autoscaling_config": autoscaling(spec, kind)}
        deployed = _deployment(
            f"workers.{kind}.ray_actor_options",
            Worker,
            name=worker_deployment(name, kind),
            **replicas,
            user_config=user_config or None,
            max_constructor_retry_count=_CONSTRUCTOR_RETRIES,
            ray_actor_options=worker.ray_actor_options,
            max_ongoing_requests=_UNBOUNDED,
            request_router_config=router_of(name),
            logging_config={"enable_access_log": False},
            health_check_period_s=5,
            graceful_shutdown_wait_loop_s=0.5,
        )
        workers[kind] = versioned(deployed, spec.fingerprint).bind(spec, kind, name)
    frontend = _deployment(
        "frontend_actor_options",
        Frontend,
        name=name,
        num_replicas=spec.num_frontends,
        user_config={"planner": _tunable(spec)} if _tunable(spec) else None,
        ray_actor_options=spec.frontend_actor_options,
        max_ongoing_requests=_UNBOUNDED,
        logging_config={"enable_access_log": spec.access_log},
        graceful_shutdown_wait_loop_s=0.5,
    )
    return versioned(frontend, spec.fingerprint).bind(spec, workers)


def _deployment(field: str, target: type[Any], **options: Any) -> Any:
    """`serve.deployment`, whose complaints about resources name the field.

    Raises:
        ValueError: resources that Ray does not take.
    """
    try:
        return serve.deployment(target, **options)
    except (ValueError, TypeError) as error:
        given = quoted(options["ray_actor_options"])
        raise ValueError(f"{field}: {error}; got {given}") from None


def _check_code(spec: AppSpec) -> None:
    """Refuse here what no worker could load.

    Raises:
        ValueError: names the field.
    """
    where = "models" if spec.pipeline is None else "pipeline.tasks"
    for name, model in spec.models.items():
        try:
            cls = model.load()
        except ValueError as error:
            raise ValueError(f"{where}.{name}.callable: {error}") from None
        for field, file in _profile_files(f"{where}.{name}", model):
            try:
                load_profiles(file)
            except (OSError, ValueError) as error:
                said = "no such file" if isinstance(error, FileNotFoundError) else str(error)
                raise ValueError(f"{field}: {file}: {said.removeprefix(f'{file}: ')}") from None
        try:
            if hasattr(cls, "size"):
                refuse_sizes(spec.policy.name, spec.policy.kwargs)
        except ValueError as error:
            raise ValueError(f"{where}.{name}.callable: {cls.__name__}.size: {error}") from None
        try:
            check_arguments(cls, cls.__name__, model.args, model.kwargs)
        except ValueError as error:
            raise ValueError(f"{where}.{name}: {error}") from None
        for key, variant in model.variants.items():
            try:
                variant.loader()
            except ValueError as error:
                raise ValueError(f"{where}.{name}.variants.{key}.load: {error}") from None
            try:
                variant.check()
            except ValueError as error:
                raise ValueError(f"{where}.{name}.variants.{key}: {error}") from None
    spec.joins()


def _profile_files(where: str, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Field and path of every file with profiles that a model names."""
    if model.profile is not None:
        yield f"{where}.profile", model.profile
    for key, variant in model.variants.items():
        if variant.profile is not None:
            yield f"{where}.variants.{key}.profile", variant.profile


def _tunable(spec: AppSpec) -> dict[str, Any]:
    """Arguments of the planner that can be changed while it runs."""
    return spec.planner.kwargs if spec.planner is not None and spec.planner.tunable else {}


def _fingerprint(spec: AppSpec) -> str:
    """Equal for equal applications of this process, while their modules have not been edited."""
    models = {n: {**m.__dict__, "user_config": None} for n, m in spec.models.items()}
    workers = {kind: w.ray_actor_options for kind, w in spec.workers.items()}
    policy = (spec.policy.name, spec.policy.kwargs)
    rest = {
        k: v
        for k, v in spec.__dict__.items()
        if k not in {"models", "workers", "groups", "policy", "num_frontends", "version"}
    }
    if _tunable(spec):
        rest["planner"] = spec.planner.model_copy(update={"kwargs": {}})  # type: ignore[union-attr]
    rest["groups"] = {name: group.models for name, group in spec.groups.items()}
    code: list[Any] = [cls for model in spec.models.values() for cls in model.load().__mro__]
    code += [v.loader() for model in spec.models.values() for v in model.variants.values()]
    edited = [
        Path(file).stat().st_mtime_ns
        for module in {getattr(item, "__module__", ""): None for item in code}
        if (file := getattr(sys.modules.get(module), "__file__", None)) is not None
        and Path(file).exists()
    ]
    content = cloudpickle.dumps((models, workers, policy, rest, spec.embedded, edited))
    return hashlib.sha1(_PROCESS.encode() + content, usedforsecurity=False).hexdigest()
