"""How Serve traces. `tests/serve/ray_private/test_tracing.py` says when Serve has changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.serve._private import tracing_utils
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

logger = logging.getLogger(__name__)

_CONTROLLER_S = 10.0  # after this, an actor goes without Serve's controller


def is_enabled() -> bool:
    """Whether Serve's tracing is set up in this process."""
    return bool(tracing_utils.is_tracing_enabled())


@contextmanager
def own_stack() -> Iterator[None]:
    """Inside, Serve's stack of spans is another one: it is one list for all tasks of a request."""
    token = tracing_utils.TRACE_STACK.set([])
    try:
        yield
    finally:
        tracing_utils.TRACE_STACK.reset(token)


def set_up(name: str) -> None:
    """Trace in this process, which is no replica, as Serve does in its own. Blocks."""
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        config: Any = ray.get(controller.get_tracing_config.remote(), timeout=_CONTROLLER_S)
    except Exception as error:
        logger.warning("Serve's controller says nothing of tracing (%r): by the environment", error)
        config = None
    tracing_utils.setup_tracing(name, str(os.getpid()), tracing_config=config)
