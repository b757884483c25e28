"""In Serve's proxies: bounds, early refusals, failover, HTTP and gRPC.

`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=ray_slo.serve.proxy:middlewares` loads it into them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.middleware import Middleware


def middlewares() -> list[Middleware]:
    """The middlewares that Serve's HTTP proxy runs around every request."""
    # Lazy: `ray-slo-haproxy` shares this package and must start without Ray.
    from ray_slo.serve.proxy.bounds import middlewares as make

    return make()
