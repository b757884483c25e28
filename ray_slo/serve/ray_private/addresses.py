"""The address behind "auto".

`tests/serve/ray_private/test_addresses.py` fails when Ray has changed.
"""

from __future__ import annotations

import os

from ray._private import services


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
