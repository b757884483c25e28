"""Finds ray-slo applications on a running cluster and asks them how they are."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from ray_slo.serve.errors import ConfigError
from ray_slo.serve.frontend.startup import in_a_line
from ray_slo.serve.planner.actor import find_plan
from ray_slo.serve.watch.connect import connect

_ANSWER_S = 10.0  # for a frontend's status


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
    found = _find(address, application)
    if not found:
        raise ValueError("no ray-slo application is running on this cluster")
    return {app: _status_of(app, name) for app, name in sorted(found.items())}


def _status_of(app: str, frontend: str) -> dict[str, Any]:
    """What a frontend says; `unreachable` where none answers, and what Serve says then."""
    try:
        handle = serve.get_deployment_handle(frontend, app)
        state: dict[str, Any] = handle.slo_status.remote().result(timeout_s=_ANSWER_S)
        return state
    except TimeoutError:
        seen = serve.status().applications[app]
        said = [seen.message, *(d.message for d in seen.deployments.values())]
        why = "; ".join(dict.fromkeys(filter(None, map(in_a_line, said))))
        return {
            "unreachable": f"no frontend answered in {_ANSWER_S:g} s; Serve says "
            f"{seen.status.value}" + (f": {why}" if why else "")
        }


def read_dry_run(address: str, application: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """What the application's planner would do now (`PlanActor.dry_run`).

    Raises:
        ValueError: no cluster at `address`, no such application, or nothing in it that plans.
        ConfigError: there is no plan, and why.
    """
    found = _find(address, application)
    try:
        actor = find_plan(f"{application}#{found[application]}")
    except ValueError:
        raise ValueError(
            f"application {application!r} has no planner of its workers: its args have no "
            "`planner` named loki, kairos or kairos_plus"
        ) from None
    try:
        answer: dict[str, Any] = ray.get(actor.dry_run.remote(), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        raise ValueError(f"the planner of {application!r} does not answer: {error}") from None
    return answer


def _find(address: str, application: str | None) -> dict[str, str]:
    """Frontends by application: of one, or all."""
    if not ray.is_initialized():
        connect(address)
    found = frontends()
    if application is None:
        return found
    if application not in found:
        raise ValueError(
            f"application {application!r} is not a running ray-slo application; "
            f"running: {', '.join(sorted(found)) or 'none'}"
        )
    return {application: found[application]}
