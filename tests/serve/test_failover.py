"""The proxy's middleware for frontends that die: again, or a reason; never a bare 500."""

import asyncio
import json

import pytest

from ray_slo.serve import failover
from ray_slo.serve.failover import FailoverMiddleware

ANSWER = [
    {"type": "http.response.start", "status": 200, "headers": [(b"x-slo-model", b"m")]},
    {"type": "http.response.body", "body": b"4"},
]
PLAIN = [{**ANSWER[0], "headers": []}, ANSWER[1]]
TIMED_OUT = [
    {"type": "http.response.start", "status": 408, "headers": []},
    {"type": "http.response.body", "body": b"timed out"},
]


class Proxy:
    """Serve's: reads the body, then sends the next of `answers`; nothing for a dead frontend."""

    def __init__(self, *answers, takes_s=0.0):
        self.answers, self.takes_s = list(answers), takes_s
        self.bodies, self.headers = [], []

    async def __call__(self, scope, receive, send):
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message.get("more_body", False)
        self.bodies.append(body)
        await asyncio.sleep(self.takes_s)
        for message in self.answers.pop(0):
            await send(message)


def through(middleware, headers=(), parts=(b"[1,", b"2]"), path="/m"):
    """Status, headers and body that the client gets."""
    sent = []
    messages = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "path": path,
        "headers": [(k.encode(), v.encode()) for k, v in headers],
    }
    asyncio.run(middleware(scope, receive, send))
    if not sent:
        return None
    start, *rest = sent
    assert all(m["type"] == "http.response.body" for m in rest)
    return start["status"], dict(start["headers"]), b"".join(m["body"] for m in rest)


def test_a_request_goes_to_another_frontend_with_the_same_body_and_less_time():
    proxy = Proxy(ANSWER, [], ANSWER, takes_s=0.05)
    middleware = FailoverMiddleware(proxy)
    assert through(middleware)[0] == 200
    status, _, body = through(middleware, [("x-slo-latency-ms", "1000"), ("accept", "*/*")])
    assert (status, body) == (200, b"4")
    assert proxy.bodies == [b"[1,2]"] * 3
    first, again = proxy.headers[1:]
    assert float(first["x-slo-latency-ms"]) == 1000
    assert 0 < float(again["x-slo-latency-ms"]) <= 950
    limits = [float(h["x-request-timeout-seconds"]) for h in (first, again)]
    assert limits[0] == 1.9 and limits[1] <= 1.85
    assert again["accept"] == "*/*"


def test_the_timeout_of_the_client_shrinks_as_well():
    proxy = Proxy(ANSWER, [], ANSWER, takes_s=0.05)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    through(middleware, [("x-slo-timeout-ms", "500"), ("x-request-timeout-seconds", "2.5")])
    assert float(proxy.headers[1]["x-request-timeout-seconds"]) == 1.4
    assert float(proxy.headers[2]["x-slo-timeout-ms"]) <= 450


def test_where_all_frontends_die_there_is_a_reason():
    proxy = Proxy(ANSWER, [], [], [])
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    status, headers, body = through(middleware)
    assert (status, headers[b"retry-after"]) == (503, b"1")
    assert json.loads(body)["reason"] == "frontend_lost"
    assert int(headers[b"content-length"]) == len(body)
    assert proxy.answers == []


def test_no_time_is_left_for_another():
    proxy = Proxy(ANSWER, [], ANSWER, takes_s=0.05)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    status, _, body = through(middleware, [("x-slo-latency-ms", "20")])
    assert (status, json.loads(body)["reason"]) == (503, "frontend_lost")
    assert proxy.answers == [ANSWER]


def test_what_other_applications_do_is_not_repeated():
    proxy = Proxy(PLAIN, [], ANSWER)
    middleware = FailoverMiddleware(proxy)
    assert through(middleware)[0] == 200
    assert through(middleware)[0] == 503
    assert proxy.answers == [ANSWER]


def test_nobody_is_answered_who_left():
    proxy = Proxy(ANSWER, ANSWER)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    assert through(middleware, parts=()) is None
    assert proxy.answers == [ANSWER]


def test_without_any_frontend_a_deadline_still_ends(monkeypatch):
    monkeypatch.setattr(failover, "_GRACE_S", 0.01)
    proxy = Proxy(TIMED_OUT, takes_s=0.05)
    status, _, body = through(FailoverMiddleware(proxy), [("x-slo-latency-ms", "20")])
    assert (status, json.loads(body)["reason"]) == (504, "expired")


def test_no_answer_is_begun_that_has_no_end(monkeypatch):
    start = {**ANSWER[0], "headers": [*ANSWER[0]["headers"], (b"Content-Length", b"1")]}
    proxy = Proxy(ANSWER, [start], [start, ANSWER[1]], takes_s=0.05)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    assert through(middleware)[0] == 200  # the frontend died in between
    monkeypatch.setattr(failover, "_GRACE_S", 0.01)
    proxy.answers = [[start]]  # Serve gave up in between
    status, _, body = through(middleware, [("x-slo-latency-ms", "20")])
    assert (status, json.loads(body)["reason"]) == (504, "expired")


def test_an_applications_own_408_is_passed_on():
    status, _, body = through(FailoverMiddleware(Proxy(TIMED_OUT)), [("x-slo-latency-ms", "5000")])
    assert (status, body) == (408, b"timed out")


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "0"])
def test_nonsense_is_left_for_the_application_to_refuse(value):
    proxy = Proxy(ANSWER)
    assert through(FailoverMiddleware(proxy), [("x-slo-latency-ms", value)])[0] == 200
    assert proxy.headers == [{"x-slo-latency-ms": value}]


def test_so_many_paths_are_known(monkeypatch):
    monkeypatch.setattr(failover, "_PATHS_KEPT", 2)
    proxy = Proxy(ANSWER, ANSWER, ANSWER, [])
    middleware = FailoverMiddleware(proxy)
    for path in ("/a", "/b", "/c"):
        through(middleware, path=path)
    assert through(middleware, path="/a")[0] == 503


def test_websockets_are_left_alone():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    scope = {"type": "websocket", "headers": []}
    asyncio.run(FailoverMiddleware(app)(scope, None, None))
    assert seen == [scope]
