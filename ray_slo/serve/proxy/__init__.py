"""Code that runs in Serve's proxies: bounds, early refusals and failover, for HTTP and gRPC.

`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=ray_slo.serve.proxy:middlewares` loads it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.middleware import Middleware


def middlewares() -> list[Middleware]:
    """Return the middlewares that Serve's HTTP proxy runs around every request."""
    # The import is late, because `ray-slo-haproxy` shares this package and must start without Ray.
    from ray_slo.serve.proxy.bounds import middlewares as make

    return make()
