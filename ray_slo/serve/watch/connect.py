"""A handle to a deployment that is already running, for programs outside of it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CONNECT_S = 5.0


def connect(address: str, option: str = "--address") -> None:
    """Connect to a running Ray.

    Args:
        option: that names the address, for the message.

    Raises:
        ValueError: no address, or no Ray there.
    """
    import ray

    _check_listens(address, option)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, AssertionError) as error:  # the latter: of one that is just going
        raise ValueError(
            f"{option}: no Ray cluster found at address {address!r}: start one "
            f"(`ray start --head`, `serve run …`), or name it ({error or 'it went away'})"
        ) from None


def _check_listens(address: str, option: str) -> None:
    """Refuse what is no address, and "host:port" where nothing listens: Ray would try for minutes,
    and end the process.

    Raises:
        ValueError: says so.
    """
    if address in ("auto", "local") or re.match(r"[a-z+]+://.", address):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{option} must be auto, HOST:PORT or ray://HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"{option}: no Ray cluster found at address {address!r}: {error}"
        ) from None


@contextmanager
def connected_handle(name: str, address: str = "auto") -> Iterator[Any]:
    """Connect to a running Ray and yield a handle to "APP" (its ingress) or "APP/DEPLOYMENT".

    Raises:
        ValueError: no Ray at `address`, or no such application; the message lists those that run.
    """
    import ray
    from ray import serve

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
