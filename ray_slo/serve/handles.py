"""A handle to a deployment that is already running, for programs outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def connected_handle(name: str, address: str = "auto") -> Iterator[Any]:
    """Connect to a running Ray and yield a handle to "APP" (its ingress) or "APP/DEPLOYMENT".

    Raises:
        ConnectionError: no Ray at `address`.
        ValueError: no such application; the message lists those that run.
    """
    import ray
    from ray import serve

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ConnectionError(
            f"no Ray cluster at address {address!r}: start one (`ray start --head`, "
            f"`serve run …`), or name it with --ray-address ({error})"
        ) from None
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
