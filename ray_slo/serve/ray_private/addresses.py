"""The address behind "auto", and the application behind an address in Serve's proxy.

`tests/serve/ray_private/test_addresses.py` fails when Ray or Serve have changed.
"""

from __future__ import annotations

import os
from typing import Any

from ray._private import services

PARTS = ("match_route", "get_handle_for_endpoint")  # of a proxy's router


def address_of_auto() -> str:
    """Return where `ray.init("auto")` would connect: RAY_ADDRESS, a cluster that runs on this
    machine, or the last one that `ray start` noted. Nothing may run there any more.

    Raises:
        ConnectionError: there is no such address.
    """
    services.find_gcs_addresses.cache_clear()  # as ray.init does
    return str(services.get_ray_address_from_environment("auto", None))


def clusters_of_auto() -> list[str]:
    """Return the clusters of which `ray.init("auto")` would take any, if there are several: they
    run on this machine, and neither RAY_ADDRESS nor the note of `ray start` names one."""
    running = sorted(services.find_gcs_addresses())
    named = os.environ.get("RAY_ADDRESS") or "auto"
    if len(running) < 2 or named != "auto" or services.find_bootstrap_address(None) is not None:
        return []
    return running


class Routes:
    """Serve's table of applications, in a proxy. Clients write paths and names in many ways; this
    says which application they reach, as Serve itself decides.

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
