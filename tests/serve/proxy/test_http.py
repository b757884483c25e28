"""The proxy's middleware: timeouts are deadlines. Requests of a frontend that dies are sent again,
or refused with a reason; there is never a bare 500."""

import asyncio
import json
import time

import pytest

from ray_slo.core.environment import FRONTEND_WAIT_S
from ray_slo.serve.deadlines import KNOWN_HEADER
from ray_slo.serve.proxy import http as failover
from ray_slo.serve.proxy.http import FailoverMiddleware, Places
from ray_slo.serve.proxy.places import Place
from ray_slo.serve.ray_private.http_head import ARRIVAL
from tests.serve import clock

ANSWER = [
    {"type": "http.response.start", "status": 200, "headers": [(b"x-slo-model", b"m")]},
    {"type": "http.response.body", "body": b"4"},
]
WITH_SLO = [
    {**ANSWER[0], "headers": [(b"X-SLO-Capacity", b"9;250;100;1000;1000")]},
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


def test_who_is_not_ours_subtracts_the_time_since_the_door_itself():
    told = [("x-slo-latency-ms", "1000"), ("x-slo-arrived", "1;door")]
    proxy = Proxy(ANSWER, [], ANSWER, takes_s=0.05)
    middleware = FailoverMiddleware(proxy)
    through(middleware, told, waited_s=0.5)
    through(middleware, told, waited_s=0.5)  # by now it is known to be ours
    left_ms = [float(headers["x-slo-latency-ms"]) for headers in proxy.headers]
    assert left_ms == pytest.approx([1000, 500, 450])


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


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_what_is_no_timeout_is_left_alone(value):
    proxy = Proxy(WITH_SLO, WITH_SLO)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    through(middleware, [("x-request-timeout-seconds", value), ("accept", "*/*")])
    assert proxy.headers[1].pop("x-slo-attempt")
    assert proxy.headers[1] == {"x-request-timeout-seconds": value, "accept": "*/*"}


def test_who_names_no_deadline_has_the_slo_of_the_model():
    proxy = Proxy(ANSWER, WITH_SLO, [], TIMED_OUT)
    middleware = FailoverMiddleware(proxy)
    for _ in range(2):  # the first answer does not say its SLO
        through(middleware)
    assert "x-request-timeout-seconds" not in proxy.headers[1]
    proxy.takes_s = 0.6
    status, _, body = through(middleware)
    assert (status, json.loads(body)["reason"]) == (504, "expired")
    assert [float(h["x-request-timeout-seconds"]) for h in proxy.headers[2:]] == pytest.approx(
        [1.15, 0.55]
    )


def test_a_longer_slo_is_heard_of_also_if_no_answer_comes_within_the_old_one():
    longer = [{**ANSWER[0], "headers": [(b"x-slo-capacity", b"9;8000;100;1000;1000")]}, ANSWER[1]]
    proxy = Proxy(WITH_SLO, *[TIMED_OUT] * 3, longer, WITH_SLO)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    proxy.takes_s = 5.0

    async def burst():
        asked = [
            asyncio.create_task(middleware(*exchange([("x-slo-class", "gold")]))) for _ in range(3)
        ]
        await asyncio.gather(*asked)
        await asyncio.sleep(6.0)

    def exchange(headers):
        async def receive():
            return {"type": "http.request", "body": b""}

        async def send(message):
            pass

        named = [(k.encode(), v.encode()) for k, v in headers]
        return {"type": "http", "method": "POST", "path": "/m", "headers": named}, receive, send

    middleware._ours.answered(Place("", "m", "gold"), 0.25)
    clock.run(burst())
    asked = proxy.headers[4]  # once for all three
    assert (asked["x-slo-class"], asked["x-slo-body-whole"]) == ("gold", "1")
    assert "x-request-timeout-seconds" not in asked
    through(middleware, [("x-slo-class", "gold")])
    assert float(proxy.headers[5]["x-request-timeout-seconds"]) == pytest.approx(8.9)


@pytest.mark.parametrize("believes", [True, False])
def test_behind_haproxy_the_slo_is_known_before_the_first_answer(monkeypatch, believes):
    monkeypatch.setattr(failover, "believes", lambda mark: believes)
    proxy = Proxy(TIMED_OUT, takes_s=3.0)
    status, *_ = through(FailoverMiddleware(proxy), [(KNOWN_HEADER, "2000")])
    assert status == (504 if believes else 408)
    limit_s = proxy.headers[0].get("x-request-timeout-seconds")
    assert limit_s == ("2.9" if believes else None)
    assert KNOWN_HEADER not in proxy.headers[0]


def test_what_serve_says_in_words_while_an_application_is_replaced_has_a_reason():
    text = b"Deployment(name='m', app='a') is unavailable because it failed to deploy."
    start = {"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"text")]}
    gone = [start, {"type": "http.response.body", "body": text}]
    own = [start, {"type": "http.response.body", "body": b"closed on Sundays"}]
    proxy = Proxy(gone, ANSWER, own, gone)
    middleware = FailoverMiddleware(proxy)
    assert through(middleware)[2] == text  # not known to be ours
    through(middleware)
    assert through(middleware)[2] == b"closed on Sundays"
    status, headers, body = through(middleware)
    assert (status, headers[b"retry-after"]) == (503, b"1")
    assert json.loads(body)["reason"] == "frontend_lost"
    assert proxy.answers == []


def test_how_long_a_proxy_asks_for_a_new_slo_may_be_said(monkeypatch):
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
    monkeypatch.setattr(failover, "ANSWERED_S", 0.01)
    proxy = Proxy(TIMED_OUT, takes_s=0.05)
    status, _, body = through(FailoverMiddleware(proxy), [("x-slo-latency-ms", "20")])
    assert (status, json.loads(body)["reason"]) == (504, "expired")


def test_no_answer_is_begun_that_has_no_end(monkeypatch):
    start = {**ANSWER[0], "headers": [*ANSWER[0]["headers"], (b"Content-Length", b"1")]}
    proxy = Proxy(ANSWER, [start], [start, ANSWER[1]], takes_s=0.05)
    middleware = FailoverMiddleware(proxy)
    through(middleware)
    assert through(middleware)[0] == 200  # the frontend died in between
    monkeypatch.setattr(failover, "ANSWERED_S", 0.01)
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
    monkeypatch.setattr(failover, "PLACES_KEPT", 2)
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
