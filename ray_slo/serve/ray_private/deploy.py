"""What a deployment has beyond Serve's public options: a version, and the frontend of a worker.

`tests/serve/ray_private/test_deploy.py` says when Serve has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve import context as serve_context
from ray.serve.config import RequestRouterConfig

from ray_slo.serve.ray_private.router import TargetedRouter

_ROUTER = f"{TargetedRouter.__module__}.{TargetedRouter.__name__}"
_FRONTEND = "frontend"  # argument of workers' routers, by which applications of ours are known


def versioned(deployed: Any, version: str) -> Any:
    """The deployment, which replaces no replica of one of the same version.

    Serve gives every `serve.run` a random version and restarts all replicas; the argument is there
    for its own use only (tried: Ray 2.60). A config file does not need it, as Serve has a version
    by import path and `args`: scale there by `deployments: [{name, num_replicas}]`.
    """
    return deployed.options(version=version, _internal=True)


def router_of(frontend: str) -> RequestRouterConfig:
    """How a frontend's calls find a worker; it also marks the worker as that frontend's."""
    return RequestRouterConfig(
        request_router_class=TargetedRouter, request_router_kwargs={_FRONTEND: frontend}
    )


def frontends() -> dict[str, str]:
    """Frontend deployment by application, of every running application of ours."""
    client = serve_context._get_global_client(raise_if_no_controller_running=False)
    return {} if client is None else frontends_in(client.get_serve_details())


def frontends_in(details: Mapping[str, Any]) -> dict[str, str]:
    """The same, from what Serve's controller says of all applications."""
    found: dict[str, str] = {}
    for app, about in details.get("applications", {}).items():
        for deployment in about["deployments"].values():
            router = deployment["deployment_config"].get("request_router_config") or {}
            kwargs = router.get("request_router_kwargs") or {}
            if router.get("request_router_class") == _ROUTER and _FRONTEND in kwargs:
                found[app] = kwargs[_FRONTEND]
    return found
