"""Fails when Serve's tracing differs from what our code assumes."""

import inspect
from unittest.mock import Mock

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
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
    # Older releases have the environment alone; `versions` says so, and looks at the newest.
    assert hasattr(ServeController, "get_tracing_config") == tracing.IS_CONFIGURED


def test_tracing_that_is_on_is_not_yet_set_up(monkeypatch):
    """Before Ray 2.59, Serve says so in an actor that it does not set up."""
    assert tracing.is_set_up() is False
    monkeypatch.setattr(tracing_utils, "is_tracing_enabled", lambda: True)
    assert tracing.is_set_up() is False
    monkeypatch.setattr(trace, "get_tracer_provider", TracerProvider)
    assert tracing.is_set_up() is True


@pytest.mark.parametrize("is_configured", [False, True])
def test_an_actor_traces_as_serve_does(monkeypatch, is_configured):
    asked = []

    def set_up(name, process, **how):
        asked.append((name, *how))

    monkeypatch.setattr(tracing, "IS_CONFIGURED", is_configured)
    monkeypatch.setattr(tracing_utils, "setup_tracing", set_up)
    monkeypatch.setattr(tracing.ray, "get_actor", Mock(side_effect=ValueError("no controller")))
    tracing.set_up("scheduler")
    assert asked == [("scheduler", "tracing_config") if is_configured else ("scheduler",)]
