"""Features that the installed Ray lacks, compared with the newest tested one. They are found by
inspection, not by the version number.

`tests/serve/ray_private/test_versions.py` fails when Ray has changed.
"""

from __future__ import annotations

import functools
import logging
import re

import ray
from ray._private.authentication import authentication_token_setup
from ray.serve._private import http_util
from ray.serve._private.proxy_request_response import ResponseStatus

from ray_slo.serve.proxy import modes
from ray_slo.serve.ray_private import tracing

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (2, 56), (2, 60)  # range of the tested releases; as in pyproject.toml


def lacks() -> list[str]:
    """Return the features that do not work with this Ray, and the release that has them."""
    found = []
    if not modes.is_known_to_ray():
        found.append("there is no fast mode (Ray 2.57 has it)")
    if not hasattr(http_util, "_walk_fastapi_routes"):
        found.append("`@serve.ingress` needs FastAPI below 0.137 (Ray 2.57 takes newer ones)")
    if not hasattr(ResponseStatus, "headers"):
        found.append(
            "refusals that a plain deployment passes on have no Retry-After (Ray 2.58 has)"
        )
    if not tracing.IS_CONFIGURED:
        found.append(
            "schedulers and planners trace as RAY_SERVE_TRACING_* says in the environment alone "
            "(Ray 2.59 has tracing_config)"
        )
    if not hasattr(authentication_token_setup, "enable_token_auth_by_default"):
        found.append(
            "Ray asks for a token only where RAY_AUTH_MODE=token is in its environment (Ray 2.59 "
            "does by default)"
        )
    return found


def about(version: str) -> str | None:
    """Return one line about a release of Ray. None for the newest that was tested."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not OLDEST <= numbers <= NEWEST:
        tested = " to ".join(".".join(map(str, one)) for one in (OLDEST, NEWEST))
        return f"Ray {version} was not tested with this release of ray-slo; {tested} were"
    missing = lacks()
    return f"with Ray {version}: {'; '.join(missing)}" if missing else None


@functools.cache
def say_once() -> None:
    """Log this line once per process."""
    if (line := about(ray.__version__)) is not None:
        logger.warning("%s", line)
