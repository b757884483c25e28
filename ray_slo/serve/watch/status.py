"""Connects to a running cluster, finds ray-slo applications there and reads their status."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve

from ray_slo.serve.errors import ConfigError
from ray_slo.serve.frontend.startup import in_a_line
from ray_slo.serve.planner.links import find_planner
from ray_slo.serve.planner.plugin import planners_of_workers
from ray_slo.serve.ray_private.addresses import address_of_auto, clusters_of_auto
from ray_slo.serve.ray_private.deploy import frontends

_CONNECT_S = 5.0
_ANSWER_S = 10.0  # for a frontend's status


def is_frontend(name: str) -> bool:
    """Whether "APP" (its ingress) or "APP/DEPLOYMENT" is a frontend of ray-slo."""
    app, _, deployment = name.partition("/")
    ingress = frontends().get(app)
    return ingress is not None and deployment in ("", ingress)


def read_status(address: str, application: str | None) -> dict[str, dict[str, Any]]:
    """Return the status of each application, by name.

    Raises:
        ValueError: no cluster at `address`, or no such application.
    """
    found = _find(address, application)
    if not found:
        raise ValueError("no ray-slo application is running on this cluster")
    return {app: _status_of(app, name) for app, name in sorted(found.items())}


def _status_of(app: str, frontend: str) -> dict[str, Any]:
    """Return the status from a frontend. If none answers, `unreachable` has Serve's message."""
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
    """Return what the application's planner would do now (`Planner.dry_run`).

    Raises:
        ValueError: no cluster at `address`, no such application, or it has no planner.
        ConfigError: there is no plan; with the reason.
    """
    found = _find(address, application)
    try:
        actor = find_planner(f"{application}#{found[application]}")
    except ValueError:
        raise ValueError(
            f"application {application!r} has no planner of its workers: its args have no "
            f"`planner` named {planners_of_workers()}"
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
    """Frontends by application, of one or all applications."""
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


# -- connecting --------------------------------------------------------------------------------


def connect(address: str, option: str = "--address") -> None:
    """Connect to a running Ray.

    Args:
        option: name of the option with the address, for the message.

    Raises:
        ValueError: no address, or no Ray there.
    """
    _check_listens(address, option)
    # Commands print only their answer, not Serve's progress, nor that a busy replica was slow.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise ValueError(
            f"{option}: the cluster at address {address!r} has another version of Ray or Python: "
            "run this command with the cluster's, or name another cluster "
            f"({' '.join(str(error).split())})"
        ) from None
    # A cluster that is stopping raises AssertionError.
    except (ConnectionError, AssertionError) as error:
        said = str(error) or "it went away"
        token = "; if it asks for a token, set RAY_AUTH_MODE=token" if "connect" in said else ""
        raise ValueError(_none_at(option, repr(address), said) + token) from None


def _check_listens(address: str, option: str) -> None:
    """Refuse an invalid address, and a "host:port" where nothing listens. Ray would try for
    minutes, and then end the process. It notes the last cluster's, and "auto" may find that.

    Raises:
        ValueError: the message says what is wrong.
    """
    given = repr(address)
    if address == "auto":
        try:
            address = address_of_auto()
        except ConnectionError:
            raise ValueError(_none_at(option, given, "none runs on this machine")) from None
        if several := clusters_of_auto():
            raise ValueError(
                f"{option}: several Ray clusters run on this machine, name one of them: "
                f"{', '.join(several)} (if it asks for a token, also set RAY_AUTH_MODE=token)"
            )
        given = f"'auto', which is {address!r} (from RAY_ADDRESS, or the last `ray start`)"
    if re.match(r"[a-z+]+://.", address):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{option} must be auto, HOST:PORT or ray://HOST:PORT, got {given}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(_none_at(option, given, error)) from None


def _none_at(option: str, given: str, said: object) -> str:
    return (
        f"{option}: no Ray cluster found at address {given}: start one (`ray start --head`, "
        f"`serve run …`), or name it ({said})"
    )


@contextmanager
def connected_handle(name: str, address: str = "auto") -> Iterator[Any]:
    """Connect to a running Ray and yield a handle to "APP" (its ingress) or "APP/DEPLOYMENT".

    Raises:
        ValueError: no Ray at `address`, or no such application; the message lists those that run.
    """
    connect(address, "--ray-address")
    try:
        app, _, deployment = name.partition("/")
        running = sorted(serve.status().applications)
        if app not in running:
            raise ValueError(
                f"--handle: no application {app!r}; running: {', '.join(running) or 'none'}"
            )
        if deployment:
            yield serve.get_deployment_handle(deployment, app_name=app)
        else:
            yield serve.get_app_handle(app)
    finally:
        ray.shutdown()
