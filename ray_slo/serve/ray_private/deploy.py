"""Settings beyond Serve's public options: a deployment's version, the frontend of a worker, the
event loop of user code, the host on which Serve listens by default, and what `serve.run` says of an
application that failed.

`tests/serve/ray_private/test_deploy.py` fails when Serve has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any

from ray import serve
from ray.serve import context as serve_context
from ray.serve._private import client as serve_client
from ray.serve.config import HTTPOptions, RequestRouterConfig

from ray_slo.serve.ray_private.router import TargetedRouter

_ROUTER = f"{TargetedRouter.__module__}.{TargetedRouter.__name__}"
_USER_LOOP_ENV = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
_LOOPBACK = "127.0.0.1"
_FRONTEND = "frontend"  # argument of workers' routers; it identifies our applications


def on_one_loop(options: Mapping[str, Any]) -> dict[str, Any]:
    """Actor options of frontends, which answer on the event loop that receives requests.

    By default Serve gives user code an event loop on a thread of its own, in case it blocks. A
    frontend does not block, as it runs users' hooks on threads. With two loops, every request
    changes threads several times, which takes CPU time and makes requests wait for the
    interpreter's lock.
    """
    given = options.get("runtime_env") or {}
    if not isinstance(given, Mapping) or not isinstance(given.get("env_vars", {}), Mapping):
        return dict(options)  # Serve says what is wrong
    env_vars = {_USER_LOOP_ENV: "0", **given.get("env_vars", {})}
    return {**options, "runtime_env": {**given, "env_vars": env_vars}}


def keeps_one_loop(options: Mapping[str, Any]) -> bool:
    """Whether actor options say on which event loop a frontend answers; see `on_one_loop`."""
    env_vars = (options.get("runtime_env") or {}).get("env_vars") or {}
    return _USER_LOOP_ENV in env_vars


def versioned(deployed: Any, version: str) -> Any:
    """The deployment with a version; replicas of the same version are not replaced.

    Serve gives every `serve.run` a random version and restarts all replicas. The argument is only
    for Serve's own use (tried: Ray 2.60). A config file does not need it, because Serve makes a
    version from import path and `args`. To scale there, use `deployments: [{name, num_replicas}]`.
    """
    return deployed.options(version=version, _internal=True)


def router_of(frontend: str) -> RequestRouterConfig:
    """The router for a frontend's calls to a worker; it also marks the worker as the frontend's."""
    return RequestRouterConfig(
        request_router_class=TargetedRouter, request_router_kwargs={_FRONTEND: frontend}
    )


def is_router(path: str) -> bool:
    """Whether a path names the router of `router_of`."""
    return path == _ROUTER


def loopback_by_default() -> None:
    """Make Serve listen on loopback if this process starts it without a host, in every mode.

    With HAProxy, Serve would use every interface, for HAProxy and for the ingress replicas. Config
    files have another default: every interface, in every mode.
    """
    field = HTTPOptions.model_fields["host"]
    if field.default != _LOOPBACK:
        field.default = _LOOPBACK
        HTTPOptions.model_rebuild(force=True)


def explain_failures(in_words: Callable[[str], str]) -> None:
    """Make `serve.run` say in this process why an application of ours failed. Serve's own error
    only names the deployments. Does nothing if Serve has changed.

    Args:
        in_words: turns Serve's message about a failed deployment into one line.
    """
    client = getattr(serve_client, "ServeControllerClient", None)
    original = getattr(client, "_wait_for_application_running", None)
    if original is None or hasattr(original, "_ray_slo"):
        return

    @wraps(original)
    def wait(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, name, *args, **kwargs)
        except RuntimeError as error:
            failed: dict[str, str] = {}
            with suppress(Exception):  # the controller may be gone, which is not the error
                if name in frontends():
                    of = serve.status().applications[name].deployments
                    failed = {d: s.message for d, s in of.items() if s.status == "DEPLOY_FAILED"}
            if not failed:
                raise
            said = [f"{d}: {in_words(message)}" for d, message in failed.items()]
            raise RuntimeError(" ".join([str(error), *said])) from None

    wait._ray_slo = True  # type: ignore[attr-defined]
    client._wait_for_application_running = wait  # type: ignore[union-attr]


def frontends() -> dict[str, str]:
    """Frontend deployment by application, of every running application of ours."""
    found: dict[str, str] = {}
    for app, about in serve_details().get("applications", {}).items():
        for deployment in about["deployments"].values():
            router = deployment["deployment_config"].get("request_router_config") or {}
            kwargs = router.get("request_router_kwargs") or {}
            if is_router(router.get("request_router_class", "")) and _FRONTEND in kwargs:
                found[app] = kwargs[_FRONTEND]
    return found


def serve_details() -> Mapping[str, Any]:
    """What Serve's controller says of all applications; empty without one. This call blocks."""
    client = serve_context._get_global_client(raise_if_no_controller_running=False)
    return {} if client is None else client.get_serve_details()
