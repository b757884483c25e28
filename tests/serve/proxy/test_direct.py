"""How an ingress replica reads what HAProxy wrote into a request."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from ray_slo.core.environment import MARK
from ray_slo.serve.errors import FrontendLost
from ray_slo.serve.proxy import direct, modes
from ray_slo.serve.ray_private.http_head import ARRIVAL

NOW, WALL = 5000.0, 1.8e9  # of the clocks, which stand


@pytest.fixture(autouse=True)
def behind_ours(monkeypatch):
    monkeypatch.setenv(modes.HAPROXY_ENV, "1")
    monkeypatch.setenv(modes.BINARY_ENV, f"/somewhere/{modes.COMMAND}")
    monkeypatch.delenv(MARK.name, raising=False)
    clocks = SimpleNamespace(monotonic=lambda: NOW, time=lambda: WALL)
    monkeypatch.setattr(direct, "time", clocks)


def through(headers, arrival=None):
    """The scope that the application gets, and what is sent without it."""
    seen, sent = [], []

    async def app(scope, receive, send):
        seen.append(scope)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    if arrival is not None:
        scope[ARRIVAL] = arrival
    asyncio.run(direct.DirectMiddleware(app)(scope, None, send))
    return seen[0] if seen else None, sent


def said(ago_s, clock=None):
    clock = modes.clock_name() if clock is None else clock
    return f"{int((WALL - ago_s) * 1e6)};{clock}"


def test_an_slo_counts_from_when_haproxy_had_the_request():
    half_a_second_ago = pytest.approx(NOW - 0.5, abs=1e-3)
    for here_s in (0.0, 0.3, 0.5):  # of which it waited here
        scope, _ = through({"x-slo-arrived": said(0.5)}, arrival=NOW - here_s)
        assert scope[ARRIVAL] == half_a_second_ago


@pytest.mark.parametrize(
    "arrived", ["", "soon", "1", said(-5000), said(5000), said(0.5, "another"), said(0.5, "")]
)
def test_what_says_nothing_changes_nothing(arrived):
    scope, _ = through({"x-slo-arrived": arrived}, arrival=NOW)
    assert scope[ARRIVAL] == NOW


def test_clients_are_not_believed_where_haproxy_is_not_ours(monkeypatch):
    monkeypatch.setenv(modes.BINARY_ENV, "/usr/bin/haproxy")
    scope, _ = through({"x-slo-arrived": said(0.5), "x-slo-timeout-ms": "7"}, arrival=NOW)
    assert scope[ARRIVAL] == NOW
    assert b"x-slo-timeout-ms" not in dict(scope["headers"])
    assert direct.before_s({"x-slo-arrived": said(0.5)}) == 0


def test_the_frontend_hears_of_the_timeout_and_serve_does_not():
    scope, _ = through({"x-request-timeout-seconds": "0.25"})
    headers = dict(scope["headers"])
    assert float(headers[b"x-slo-timeout-ms"]) == 250
    assert b"x-request-timeout-seconds" not in headers


def test_what_may_have_ended_a_frontend_does_not_end_the_next(monkeypatch):
    monkeypatch.setattr(direct, "is_suspect", lambda attempt: attempt == "ab")
    headers = {"x-slo-arrived": said(0.5), "x-slo-attempt": "ab"}
    scope, sent = through(headers, arrival=NOW)
    assert scope is None and sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["reason"] == "frontend_lost"
    scope, _ = through(headers | {"x-slo-attempt": "cd"}, arrival=NOW)
    assert scope is not None
    scope, _ = through(headers | {"x-slo-arrived": said(0.0)})  # nobody had it before
    assert scope is not None


def test_the_same_over_grpc(monkeypatch):
    monkeypatch.setattr(direct, "is_suspect", lambda attempt: attempt == "ab")
    assert direct.before_s({}) == 0
    before_s = direct.before_s({"x-slo-arrived": said(0.5), "x-slo-attempt": "cd"})
    assert before_s == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(FrontendLost, match="may be why"):
        direct.before_s({"x-slo-arrived": said(0.5), "x-slo-attempt": "ab"})


SECRET = "0123456789abcdef"
BELIEVED = {
    "x-slo-refused-before": "99999",
    "x-slo-body-whole": "1",
    "x-slo-attempt": "ab",
    "x-slo-known-ms": "5",
    "x-slo-timeout-ms": "7",
}


@pytest.mark.parametrize("mark", [None, "", "0", SECRET[:-1], SECRET.upper(), SECRET + "0", "é"])
def test_who_reaches_a_replica_beside_haproxy_is_not_believed(monkeypatch, mark):
    monkeypatch.setenv(MARK.name, SECRET)
    told = {} if mark is None else {"x-slo-mark": mark}
    headers = {**BELIEVED, "x-slo-arrived": said(0.5), "x-slo-latency-ms": "90", **told}
    scope, _ = through(headers, arrival=NOW)
    assert scope[ARRIVAL] == NOW
    assert dict(scope["headers"]) == {b"x-slo-latency-ms": b"90"}
    call = {"x-slo-arrived": said(0.5), **told}
    if mark:  # the HAProxy of another cluster
        with pytest.raises(FrontendLost, match="another cluster"):
            direct.before_s(call)
    else:
        assert direct.before_s(call) == 0


def test_haproxy_is_believed_by_its_mark_which_nobody_else_sees(monkeypatch):
    monkeypatch.setenv(MARK.name, SECRET)
    headers = {**BELIEVED, "x-slo-arrived": said(0.5), "x-slo-mark": SECRET}
    scope, _ = through(headers, arrival=NOW)
    assert scope[ARRIVAL] == pytest.approx(NOW - 0.5, abs=1e-3)
    names = {name.decode() for name, _ in scope["headers"]}
    assert names == headers.keys() - {"x-slo-mark"}
    ago_s = direct.before_s({"x-slo-arrived": said(0.5), "x-slo-mark": SECRET})
    assert ago_s == pytest.approx(0.5, abs=1e-3)
