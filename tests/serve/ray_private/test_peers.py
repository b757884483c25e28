"""Fails when Ray changes `DeploymentHandle.broadcast`, an alpha API that calls every replica."""

import inspect
from types import SimpleNamespace

from ray.serve import handle as serve_handle

from ray_slo.serve.ray_private import peers
from tests.serve.loops import in_loop


def test_serve_is_as_it_was():
    assert list(inspect.signature(serve_handle.DeploymentHandle.broadcast).parameters) == [
        *("self", "method_name", "args", "kwargs")
    ]
    results = serve_handle.DeploymentBroadcastResponse.results_async
    assert {"timeout_s", "return_exceptions"} <= inspect.signature(results).parameters.keys()


@in_loop
async def test_those_that_fail_are_left_out(monkeypatch):
    asked = []

    class Response:
        async def results_async(self, timeout_s, return_exceptions):
            assert return_exceptions
            asked.append(timeout_s)
            return [1, RuntimeError("it died"), 3]

    class Handle:
        def broadcast(self, method):
            asked.append(method)
            return Response()

    def handle_of(deployment, app):
        assert (deployment, app) == ("front", "app")
        return Handle()

    monkeypatch.setattr(peers, "serve", SimpleNamespace(get_deployment_handle=handle_of))
    assert await peers.asked_all("app", "front", "slo_seen", 2.0) == [1, 3]
    assert asked == ["slo_seen", 2.0]
