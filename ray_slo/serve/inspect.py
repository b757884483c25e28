"""Finds ray-slo applications on a running cluster and asks them how they are."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve


def frontends() -> dict[str, str]:
    """Frontend deployment by application name, for every application made by ray-slo."""
    found: dict[str, str] = {}
    for app, state in serve.status().applications.items():
        names = set(state.deployments)
        for name in names:
            if any(n.startswith(f"{name}-") and n.endswith("worker") for n in names - {name}):
                found[app] = name
    return found


def is_frontend(name: str) -> bool:
    """Whether "APP" (its ingress) or "APP/DEPLOYMENT" is a frontend of ray-slo."""
    app, _, deployment = name.partition("/")
    ingress = frontends().get(app)
    return ingress is not None and deployment in ("", ingress)


def read_status(address: str, application: str | None) -> dict[str, dict[str, Any]]:
    """Status by application.

    Raises:
        ValueError: no cluster at `address`, or no such application.
    """
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            raise ValueError(f"no Ray cluster found at address {address!r}: {error}") from None
    found = frontends()
    if application is not None and application not in found:
        raise ValueError(
            f"application {application!r} is not a running ray-slo application; "
            f"running: {', '.join(sorted(found)) or 'none'}"
        )
    chosen = [application] if application is not None else sorted(found)
    if not chosen:
        raise ValueError("no ray-slo application is running on this cluster")
    return {
        app: serve.get_deployment_handle(found[app], app).slo_status.remote().result(timeout_s=10)
        for app in chosen
    }
