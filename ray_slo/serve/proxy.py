"""Middleware for Serve's HTTP proxy: lets a deadline reach the application before it is a timeout.

Serve's own proxy reads `x-request-timeout-seconds` as "cancel and answer 408 after this", so a
request with a tight deadline is cut off before anybody can say why. With this middleware the
application gets the client's value, and the proxy's own timeout comes a grace period later, as a
safety net. Serve loads it from the environment of the machine that runs the proxy::

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=ray_slo.serve.proxy:middlewares

The same callback keeps Serve's gRPC server on one host (`grpc.bind_to_host`).
"""

from __future__ import annotations

import math
from typing import Any

from starlette.middleware import Middleware

from ray_slo.serve.failover import FailoverMiddleware

PROXY_CALLBACK_ENV = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_CALLBACK = "ray_slo.serve.proxy:middlewares"

_TIMEOUT = b"x-request-timeout-seconds"
_OURS = b"x-slo-timeout-ms"
_GRACE_S = 2.0


class DeadlineMiddleware:
    """Copies the client's timeout to `x-slo-timeout-ms` and relaxes the proxy's own."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            try:
                timeout_s = float(headers.get(_TIMEOUT, b""))
            except ValueError:
                timeout_s = 0.0
            if timeout_s > 0 and math.isfinite(timeout_s):
                kept = [(k, v) for k, v in scope["headers"] if k not in (_TIMEOUT, _OURS)]
                kept.append((_OURS, repr(timeout_s * 1e3).encode()))
                kept.append((_TIMEOUT, repr(timeout_s + _GRACE_S).encode()))
                scope = {**scope, "headers": kept}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve's proxy callback returns."""
    from ray_slo.serve.grpc import bind_to_host

    bind_to_host()
    return [Middleware(DeadlineMiddleware), Middleware(FailoverMiddleware)]
