"""`build_app` makes a Serve application from a config: a frontend (the ingress), and one worker
deployment per kind of worker."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ray import cloudpickle, serve
from ray.serve import Application

from ray_slo.core import environment
from ray_slo.core.explain import explaining
from ray_slo.core.profiles import load_profiles
from ray_slo.core.text import quoted, text_of
from ray_slo.models.preemption_profile import load_preemption
from ray_slo.policies.registry import refuse_sizes
from ray_slo.serve.app.settings import UNBOUNDED
from ray_slo.serve.config.app import AppConfig
from ray_slo.serve.config.models import ModelConfig
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.config.spec import AppSpec, worker_deployment
from ray_slo.serve.config.user_class import check_arguments
from ray_slo.serve.config.workers import ServeOptions
from ray_slo.serve.frontend.frontend import Frontend
from ray_slo.serve.frontend.startup import in_a_line
from ray_slo.serve.planner.autoscaling import autoscaling
from ray_slo.serve.ray_private.deploy import (
    explain_failures,
    loopback_by_default,
    on_one_loop,
    router_of,
    versioned,
)
from ray_slo.serve.ray_private.versions import say_once
from ray_slo.serve.worker.worker import Worker

logger = logging.getLogger(__name__)

# Serve's own default is 20 (at most 3 per replica). If our code refuses to start, trying again does
# not help.
_CONSTRUCTOR_RETRIES = 3
_LEAST_CHECK_S, _MOST_CHECK_S = 30.0, 600.0  # time for a health check; the first is Serve's own
_PROCESS = uuid.uuid4().hex


def build_app(args: dict[str, Any]) -> Application:
    """The import path for `serve run` configs: `import_path: ray_slo.serve:build_app`.

    Args:
        args: the fields of `ray_slo.serve.config.app.AppConfig`.

    Raises:
        ValueError: one line per mistake in `args`.
    """
    return build_app_from_spec(parse_spec(args))


def build_app_from_spec(spec: AppSpec) -> Application:
    """Return the Serve application with its frontend and workers.

    The same process may deploy an application again with changes only in `num_replicas`,
    `num_frontends`, `user_config` or the budget of the planner `kairos` (any of its `kwargs`). Then
    it is changed in place, and no replica restarts.

    Raises:
        ValueError: a class or a loader cannot be imported or cannot work; an environment variable
            has no valid value.
    """
    loopback_by_default()
    explain_failures(partial(in_a_line, failed=True))
    say_once()
    for line in environment.check():
        logger.warning("%s", line)
    with explaining(AppConfig):
        return _built(spec)


def _built(spec: AppSpec) -> Application:
    _check_code(spec)
    spec = spec.model_copy(update={"sized": _sized(spec)})
    spec = spec.stamped(_fingerprint(spec))
    name = spec.deployment_name
    user_config = {n: m.user_config for n, m in spec.models.items() if m.user_config is not None}
    slowest_s = max(slo_s for tree in spec.trees.values() for slo_s in tree.slos_s.values())
    workers = {}
    for kind, worker in spec.workers.items():
        replicas: dict[str, Any] = {"num_replicas": worker.num_replicas}
        if worker.replica_bounds is not None:
            replicas = {"autoscaling_config": autoscaling(spec, kind)}
        options = {
            "health_check_period_s": 5,
            # While code holds the interpreter's lock, no check is answered. A batch within its SLO
            # may do so. Serve waits for three checks.
            "health_check_timeout_s": min(max(_LEAST_CHECK_S, slowest_s), _MOST_CHECK_S),
            "graceful_shutdown_wait_loop_s": 0.5,
            **worker.serve_options,
        }
        deployed = _deployment(
            f"workers.{kind}.",
            Worker,
            name=worker_deployment(name, kind),
            **replicas,
            user_config=user_config or None,
            max_constructor_retry_count=_CONSTRUCTOR_RETRIES,
            ray_actor_options=worker.ray_actor_options,
            max_ongoing_requests=UNBOUNDED,
            request_router_config=router_of(name),
            logging_config={"enable_access_log": False},
            **options,
        )
        workers[kind] = versioned(deployed, spec.fingerprint).bind(spec, kind, name)
    frontend = _deployment(
        "frontend_actor_options",
        Frontend,
        name=name,
        num_replicas=spec.num_frontends,
        user_config={"planner": _tunable(spec)} if _tunable(spec) else None,
        ray_actor_options=on_one_loop(spec.frontend_actor_options),
        max_ongoing_requests=UNBOUNDED,
        logging_config={"enable_access_log": spec.access_log},
        graceful_shutdown_wait_loop_s=0.5,
    )
    return versioned(frontend, spec.fingerprint).bind(spec, workers)


def _deployment(where: str, target: type[Any], **options: Any) -> Any:
    """`serve.deployment`, with errors that name the field.

    Args:
        where: a field of the config, or its prefix.

    Raises:
        ValueError: resources that Ray does not accept.
    """
    try:
        return serve.deployment(target, **options)
    except (ValueError, TypeError, OverflowError) as error:
        said = str(error).replace("_", " ")
        named = [n for n in ServeOptions.model_fields if n.replace("_", " ") in said]
        option = next(iter(named), "ray_actor_options")
        field = f"{where}{option}" if where.endswith(".") else where
        raise ValueError(f"{field}: {error}; got {quoted(options.get(option))}") from None


def _check_code(spec: AppSpec) -> None:
    """Refuse code that no worker could load.

    Raises:
        ValueError: names the field.
    """
    for name, model in spec.models.items():
        where = spec.fields[name]
        try:
            cls = model.load()
        except ValueError as error:
            raise ValueError(f"{where}.callable: {error}") from None
        for field, file in _profile_files(f"{where}", model):
            try:
                load_profiles(file)
                load_preemption(file)
            except (OSError, ValueError) as error:
                said = "no such file" if isinstance(error, FileNotFoundError) else text_of(error)
                raise ValueError(f"{field}: {file}: {said.removeprefix(f'{file}: ')}") from None
        if hasattr(cls, "size") and (why := _refused_sizes(spec, name)):
            raise ValueError(f"{where}.callable: {cls.__name__}.size: {why}")
        try:
            json.dumps(model.user_config)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}.user_config: must be JSON, as Serve hands it to the workers: {error}; "
                f"got {quoted(model.user_config)}"
            ) from None
        try:
            check_arguments(cls, cls.__name__, model.args, model.kwargs)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        for key, variant in model.variants.items():
            try:
                variant.loader()
            except ValueError as error:
                raise ValueError(f"{where}.variants.{key}.load: {error}") from None
            try:
                variant.check()
            except ValueError as error:
                raise ValueError(f"{where}.variants.{key}: {error}") from None
    spec.joins()


def _refused_sizes(spec: AppSpec, model: str) -> str:
    """Why requests of a model may not have sizes; "" if they may."""
    policies, refused = spec.policies_for(model), list[str]()
    for policy in policies:
        try:
            refuse_sizes(policy.name, policy.kwargs)
        except ValueError as error:
            refused.append(str(error))
    # A planner that chooses the group skips those that cannot serve it.
    enough = model in spec.unlisted and len(refused) < len(policies)
    return refused[0] if refused and not enough else ""


def _sized(spec: AppSpec) -> frozenset[str]:
    """Models whose requests have sizes."""
    return frozenset(name for name, m in spec.models.items() if hasattr(m.load(), "size"))


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
    """Return a text that is equal for equal applications of this process, as long as their modules
    are not edited."""
    models = {n: {**m.__dict__, "user_config": None} for n, m in spec.models.items()}
    # A planner's budget bounds the numbers of replicas, and can be changed while it runs.
    in_place = {"num_replicas", *(["replica_bounds"] if _tunable(spec) else [])}
    workers = {
        kind: {name: value for name, value in worker.__dict__.items() if name not in in_place}
        for kind, worker in spec.workers.items()
    }
    policies = [spec.policy, *(spec.policy_of(name) for name in spec.groups)]
    policy = [(policy.name, policy.kwargs) for policy in policies]
    apart = {"models", "trees", "fields", "workers", "groups", "policy", "group_policies"}
    apart |= {"num_frontends", "version"}
    rest = {k: v for k, v in spec.__dict__.items() if k not in apart}
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
    digest = hashlib.sha1(_PROCESS.encode(), usedforsecurity=False)
    for piece in _pieces((models, workers, policy, rest, spec.embedded, edited)):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield a value in pickled pieces. A pickle of the whole would depend on which equal texts are
    the same object."""
    if isinstance(value, BaseModel):
        yield type(value).__name__.encode()
        value = value.__dict__
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if isinstance(value, list | tuple):
        yield f"{len(value)} parts".encode()
        for part in value:
            yield from _pieces(part)
    else:
        yield cloudpickle.dumps(value)
