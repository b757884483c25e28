"""The proxy's middleware: timeouts are deadlines. Requests of a frontend that dies are sent again,
or refused with a reason; there is never a bare 500."""

import asyncio
import json
import time

import pytest

from ray_slo.core.environment import FRONTEND_WAIT_S
from ray_slo.serve.deadlines import TimeLimits
from ray_slo.serve.proxy import http as failover
from ray_slo.serve.proxy.http import FailoverMiddleware, Places
from ray_slo.serve.ray_private.http_head import ARRIVAL
from tests.serve import clock

ANSWER = [
    {"type": "http.response.start", "status": 200, "headers": [(b"x-slo-model", b"m")]},
    {"type": "http.response.body", "body": b"4"},
]
WITH_SLO = [
    {**ANSWER[0], "headers": [(b"X-SLO-Latency-SLO-ms", b"250.000")]},
    ANSWER[1],
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


def through(middleware, headers=(), parts=(b"[1,", b"2]"), path="/m", waited_s=0.0):
    """Status, headers and body that the client gets. The kernel had the request `waited_s` ago."""
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

    async def ask():
        arrival = {ARRIVAL: time.monotonic() - waited_s} if waited_s else {}
        await middleware({**scope, **arrival}, receive, send)

    clock.run(ask())
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
    assert float(again["x-slo-latency-ms"]) == pytest.approx(950)
    limits = [float(h["x-request-timeout-seconds"]) for h in (first, again)]
    assert limits == pytest.approx([1.9, 1.85])
    assert again["accept"] == "*/*"


def test_every_attempt_has_a_name_and_what_was_in_a_hook_is_not_repeated(monkeypatch):
    suspects = []
    monkeypatch.setattr(failover, "is_suspect", lambda attempt: attempt in suspects)
    proxy = Proxy(ANSWER, [], ANSWER, [])
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    assert "x-slo-attempt" not in proxy.headers[0]  # whose application is not known
    through(middleware, [("x-slo-attempt", "mine")])
    names = [headers["x-slo-attempt"] for headers in proxy.headers[1:]]
    assert len(set(names)) == 2 and "mine" not in names

    monkeypatch.setattr(failover, "new_attempt", lambda: suspects.append("fatal") or "fatal")
    status, headers, body = through(middleware)
    assert (status, headers[b"retry-after"]) == (503, b"1")
    said = json.loads(body)
    assert said["reason"] == "frontend_lost" and "may be why" in said["message"]
    assert len(proxy.headers) == 4  # there was no fifth


def test_the_timeout_of_the_client_shrinks_as_well():
    proxy = Proxy(ANSWER, [], ANSWER, takes_s=0.05)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    through(middleware, [("x-slo-timeout-ms", "9"), ("x-request-timeout-seconds", "0.5")])
    first, again = proxy.headers[1:]
    assert float(first["x-slo-timeout-ms"]) == 500  # the client's own word for it is not believed
    assert float(first["x-request-timeout-seconds"]) == 1.4
    assert float(again["x-slo-timeout-ms"]) == pytest.approx(450)


def test_time_before_the_middleware_counts_unless_it_is_hardly_any():
    proxy = Proxy(WITH_SLO, ANSWER, ANSWER, ANSWER)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    through(middleware, [("x-slo-latency-ms", "1000")], waited_s=0.3)
    through(middleware, waited_s=0.1)  # the model's SLO is 250 ms
    through(middleware, [("x-slo-latency-ms", "1000")], waited_s=0.001)
    named, unnamed, prompt = proxy.headers[1:]
    assert float(named["x-slo-latency-ms"]) == pytest.approx(700)
    assert float(named["x-request-timeout-seconds"]) == pytest.approx(1.6)
    assert float(unnamed["x-slo-timeout-ms"]) == pytest.approx(150)
    assert prompt["x-slo-latency-ms"] == "1000"


def test_own_slo_wins_over_the_timeout():
    proxy = Proxy(ANSWER)
    through(
        FailoverMiddleware(proxy), [("x-request-timeout-seconds", "9"), ("x-slo-latency-ms", "40")]
    )
    (told,) = proxy.headers
    assert told["x-slo-latency-ms"] == "40"
    assert float(told["x-request-timeout-seconds"]) == pytest.approx(0.94)
    assert float(told["x-slo-timeout-ms"]) == 9000


@pytest.mark.parametrize(
    ("headers", "slo_s", "budget_s"),
    [
        ({}, None, None),
        ({}, 0.4, 0.4),
        ({b"x-request-timeout-seconds": b"5"}, 0.4, 0.4),
        ({b"x-request-timeout-seconds": b"0.1"}, 0.4, 0.1),
        ({b"x-request-timeout-seconds": b"5"}, None, 5.0),
        ({b"x-slo-latency-ms": b"9000", b"x-request-timeout-seconds": b"5"}, 0.4, 9.0),
        ({b"x-slo-latency-ms": b"soon"}, 0.4, 0.4),
    ],
)
def test_a_timeout_can_only_tighten_the_slo(headers, slo_s, budget_s):
    assert TimeLimits(headers.items(), proxied=False).budget_s(slo_s) == budget_s


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_what_is_no_timeout_is_left_alone(value):
    proxy = Proxy(WITH_SLO, WITH_SLO)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    through(middleware, [("x-request-timeout-seconds", value), ("accept", "*/*")])
    assert proxy.headers[1].pop("x-slo-attempt")
    assert proxy.headers[1] == {"x-request-timeout-seconds": value, "accept": "*/*"}


def test_who_names_no_deadline_has_the_slo_and_waits_half_a_minute_for_a_frontend():
    proxy = Proxy(ANSWER, WITH_SLO, WITH_SLO, [], TIMED_OUT, WITH_SLO)
    middleware = FailoverMiddleware(proxy)
    for _ in range(2):  # the first answer does not say its SLO
        through(middleware)
    assert "x-request-timeout-seconds" not in proxy.headers[1]
    through(middleware, [("x-slo-latency-ms", "9")])  # its own, which is nobody else's
    proxy.takes_s = 20.0
    status, _, body = through(middleware)
    assert (status, json.loads(body)["reason"]) == (504, "expired")
    assert [float(h["x-request-timeout-seconds"]) for h in proxy.headers[3:]] == pytest.approx(
        [30.25, 10.25]
    )
    through(middleware)
    assert "x-request-timeout-seconds" not in proxy.headers[5]  # it may be another one by now


def test_how_long_that_is_may_be_said(monkeypatch):
    monkeypatch.setenv(FRONTEND_WAIT_S.name, "2.5")
    assert Places()._wait_s == 2.5
    monkeypatch.setenv(FRONTEND_WAIT_S.name, "soon")
    with pytest.raises(ValueError, match=f"{FRONTEND_WAIT_S.name}: must be a number of seconds"):
        FailoverMiddleware(None)


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
    monkeypatch.setattr(failover, "_PLACES_KEPT", 2)
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
    clock.run(FailoverMiddleware(app)(scope, None, None))
    assert seen == [scope]
