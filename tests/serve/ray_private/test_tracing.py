"""What is known of how Serve traces."""

import inspect

from ray.serve._private import tracing_utils
from ray.serve._private.controller import ServeController

from ray_slo.serve.ray_private import tracing


def test_a_stack_of_its_own():
    token = tracing_utils.TRACE_STACK.set(["outer"])
    try:
        with tracing.own_stack():
            assert tracing_utils.TRACE_STACK.get() == []
        assert tracing_utils.TRACE_STACK.get() == ["outer"]
    finally:
        tracing_utils.TRACE_STACK.reset(token)


def test_ray_changed_here():
    """Where this fails, Serve has changed: see how it sets its tracing up now."""
    assert tracing.is_enabled() is False
    parameters = inspect.signature(tracing_utils.setup_tracing).parameters
    assert list(parameters)[:2] == ["component_name", "component_id"]
    assert "tracing_config" in parameters
    assert hasattr(ServeController, "get_tracing_config")
