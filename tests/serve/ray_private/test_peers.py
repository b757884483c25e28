"""Fails when Ray changes `DeploymentHandle.broadcast`, an alpha API that calls every replica, or
the option of a handle for calls of any size, or how a replica asks the proxy for a body."""

import asyncio
import inspect
from dataclasses import fields
from types import SimpleNamespace

from ray.serve import handle as serve_handle
from ray.serve._private.common import RequestMetadata
from ray.serve._private.http_util import ASGIReceiveProxy
from ray.serve._private.proxy import HTTPProxy

from ray_slo.serve.ray_private import peers
from tests.serve.loops import in_loop


def test_serve_is_as_it_was():
    assert list(inspect.signature(serve_handle.DeploymentHandle.broadcast).parameters) == [
        *("self", "method_name", "args", "kwargs")
    ]
    results = serve_handle.DeploymentBroadcastResponse.results_async
    assert {"timeout_s", "return_exceptions"} <= inspect.signature(results).parameters.keys()
    assert "_by_reference" in inspect.signature(serve_handle.DeploymentHandle.options).parameters


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


@in_loop
async def test_whether_a_proxy_answers():
    class Alive:
        asgi_receive_queues = {}  # noqa: RUF012

    def asked(ask, *came):
        receive = ASGIReceiveProxy({"type": "http"}, RequestMetadata("one", "one"), ask)
        for message in came:
            receive.queue.put_nowait(message)
        return peers.proxy_answers(receive, 0.2)

    def alive(metadata):
        return HTTPProxy.receive_asgi_messages(Alive, metadata)

    async def busy(metadata):
        await asyncio.sleep(60)

    async def dead(metadata):
        raise RuntimeError("it is gone")

    assert await asked(alive)
    assert not await asked(alive, {"type": "http.request"})  # the body came meanwhile
    assert not await asked(busy)
    assert not await asked(dead)
    assert await peers.proxy_answers(busy, 0.2)  # this is no proxy
    assert "internal_request_id" in {field.name for field in fields(RequestMetadata)}
