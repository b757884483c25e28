"""Serve's tracing. `tests/serve/ray_private/test_tracing.py` fails when Serve has changed."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.serve._private import tracing_utils
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

logger = logging.getLogger(__name__)

# Whether a config file can set tracing up; older releases of Ray have only the environment.
IS_CONFIGURED = "tracing_config" in inspect.signature(tracing_utils.setup_tracing).parameters
_CONTROLLER_S = 10.0  # after this time, an actor continues without Serve's controller


def is_enabled() -> bool:
    """Whether Serve's tracing is on in this process."""
    return bool(tracing_utils.is_tracing_enabled())


def is_set_up() -> bool:
    """Whether this process exports spans. Before Ray 2.59, tracing is on in every process whose
    environment says so, also in those that Serve does not set up."""
    if not is_enabled():
        return False
    from opentelemetry import trace

    return hasattr(trace.get_tracer_provider(), "add_span_processor")


@contextmanager
def own_stack() -> Iterator[None]:
    """Give the block a new stack of spans of Serve. Otherwise all tasks of a request share one."""
    token = tracing_utils.TRACE_STACK.set([])
    try:
        yield
    finally:
        tracing_utils.TRACE_STACK.reset(token)


def set_up(name: str) -> None:
    """Trace in this process, which is not a replica, as Serve does in replicas. Blocks."""
    if not IS_CONFIGURED:
        tracing_utils.setup_tracing(name, str(os.getpid()))
        return
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        config: Any = ray.get(controller.get_tracing_config.remote(), timeout=_CONTROLLER_S)
    except Exception as error:
        logger.warning(
            "Serve's controller did not send its tracing settings (%r); the environment's are used",
            error,
        )
        config = None
    tracing_utils.setup_tracing(name, str(os.getpid()), tracing_config=config)
