"""The bounds that our module sets in Serve's proxies."""

import asyncio

from ray_slo.core.environment import MARK
from ray_slo.serve.deadlines import PROXY_CALLBACK
from ray_slo.serve.proxy import middlewares, modes
from ray_slo.serve.proxy.admission import AdmissionMiddleware
from ray_slo.serve.proxy.bounds import BoundsMiddleware
from ray_slo.serve.proxy.http import FailoverMiddleware


def test_callback_is_what_serve_loads():
    module, _, name = PROXY_CALLBACK.partition(":")
    assert module == middlewares.__module__
    assert name == middlewares.__name__
    # From the inside to the outside, as Serve applies them.
    assert [m.cls for m in middlewares()] == [
        FailoverMiddleware,
        AdmissionMiddleware,
        BoundsMiddleware,
    ]


async def answers(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def asked(*headers):
    """The status and the body of the answer to a request with these headers."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [*headers]}
    asyncio.run(BoundsMiddleware(answers, 100)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_the_haproxy_of_another_cluster_gets_no_answer_of_this_one(monkeypatch):
    monkeypatch.setenv(MARK.name, "0123456789abcdef")
    other = b"x-slo-mark", b"fedcba9876543210"
    assert asked(other) == (200, b"ok")  # a client's own word, where there is no HAProxy of ours
    monkeypatch.setenv(modes.HAPROXY_ENV, "1")
    monkeypatch.setenv(modes.BINARY_ENV, f"/somewhere/{modes.COMMAND}")
    status, body = asked(other)
    assert (status, b"another cluster has its port" in body) == (503, True)
    for fine in ([], [(b"x-slo-mark", b"")], [(b"x-slo-mark", b"0123456789abcdef")]):
        assert asked(*fine) == (200, b"ok")
    monkeypatch.setenv(MARK.name, "")
    assert asked(other) == (200, b"ok")  # nobody has a mark


def test_what_serve_decodes_where_it_traces_must_be_text():
    status, body = asked((b"tracestate", b"a=\xff"))
    assert (status, b"tracestate must be printable ASCII" in body) == (400, True)
    assert asked(*[(b"tracestate", b"a=" + b"1" * 300)] * 2) == (200, b"ok")
