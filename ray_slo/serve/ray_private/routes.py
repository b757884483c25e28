"""The table of applications in Serve's proxy.

Clients write paths and names in many ways. This table says which application they reach, as Serve
itself decides. `tests/serve/ray_private/test_routes.py` fails when Serve has changed.
"""

from __future__ import annotations

from typing import Any

PARTS = ("match_route", "get_handle_for_endpoint")


class Routes:
    """Finds the application that a request is for.

    Args:
        proxy: a proxy of Serve, or an ASGI application around it. If it is something else, nothing
            is known.
    """

    def __init__(self, proxy: Any) -> None:
        router: Any = None
        while proxy is not None and router is None:
            router = getattr(proxy, "proxy_router", None)
            proxy = getattr(proxy, "_app", None)
        self._router = router if all(hasattr(router, part) for part in PARTS) else None

    @property
    def are_known(self) -> bool:
        return self._router is not None

    def of_path(self, path: str) -> str | None:
        """Return the route prefix of the application at a path. None if there is none, or it is
        not known."""
        found = None if self._router is None else self._router.match_route(path)
        return None if found is None else str(found[0])

    def of_application(self, name: str) -> str | None:
        """Return the route prefix of the application that a gRPC call with this name reaches. None
        if there is none, or it is not known."""
        found = None if self._router is None else self._router.get_handle_for_endpoint(name)
        return None if found is None else str(found[0])
