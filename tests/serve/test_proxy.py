"""The proxy's middleware: the client's timeout becomes a deadline, with a grace for the proxy."""

import asyncio

import pytest

from ray_slo.serve.failover import FailoverMiddleware
from ray_slo.serve.proxy import PROXY_CALLBACK, BoundsMiddleware, DeadlineMiddleware, middlewares


def through(headers, scope_type="http"):
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope)

    scope = {"type": scope_type, "headers": [(k.encode(), v.encode()) for k, v in headers]}
    asyncio.run(DeadlineMiddleware(app)(scope, None, None))
    return {k.decode(): v.decode() for k, v in seen["headers"]}


def test_timeout_becomes_deadline():
    seen = through([("x-request-timeout-seconds", "0.25"), ("accept", "*/*")])
    assert float(seen["x-slo-timeout-ms"]) == 250
    assert float(seen["x-request-timeout-seconds"]) == 2.25
    assert seen["accept"] == "*/*"


def test_own_slo_wins_over_the_timeout():
    seen = through([("x-request-timeout-seconds", "9"), ("x-slo-latency-ms", "40")])
    assert (seen["x-slo-latency-ms"], seen["x-request-timeout-seconds"]) == ("40", "11.0")
    assert float(seen["x-slo-timeout-ms"]) == 9000


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_what_is_no_timeout_is_left_alone(value):
    headers = {"x-request-timeout-seconds": value}
    assert through(list(headers.items())) == headers
    assert through([("a", "b")]) == {"a": "b"}


def test_websockets_are_left_alone():
    headers = {"x-request-timeout-seconds": "1"}
    assert through(list(headers.items()), "websocket") == headers


def test_callback_is_what_serve_loads():
    module, _, name = PROXY_CALLBACK.partition(":")
    assert module == middlewares.__module__
    assert name == middlewares.__name__
    # From the inside to the outside, as Serve applies them.
    wanted = [FailoverMiddleware, DeadlineMiddleware, BoundsMiddleware]
    assert [m.cls for m in middlewares()] == wanted
