"""The admission control in Serve's proxy."""

import asyncio
import json
import pickle
import socket
import time

import pytest

from ray_slo.serve.proxy.admission import AdmissionMiddleware
from ray_slo.serve.proxy.modes import since
from ray_slo.serve.proxy.places import Place
from ray_slo.serve.ray_private import http_head as heads
from ray_slo.serve.ray_private.http_head import ARRIVAL
from tests.serve.loops import in_loop, until

HEADERS = [(b"content-length", b"1"), (b"x-slo-latency-ms", b"400")]


class App:
    """What is behind the door; its answers say what it can do."""

    def __init__(self, capacity="1000;400;2000;9000000;5000000", status=200, took_s=0.0):
        self.capacity, self.status, self.took_s = capacity, status, took_s
        self.header = b"x-slo-capacity"
        self.scopes, self.bodies = [], []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        message = await receive()
        self.bodies.append((message.get("body"), message.get("more_body")))
        await self.go.wait()
        await asyncio.sleep(self.took_s)
        headers = [(b"x-slo-latency-ms", b"1")]
        if self.capacity is not None:
            headers.append((self.header, self.capacity.encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


async def ask(door, body=b"1", headers=HEADERS, path="/m", waited_s=0.0, chunks=None, leaving=None):
    """(status, headers, body) of an answer."""
    sent, rest = [], chunks if chunks is not None else [(body, False)]

    async def receive():
        if not rest:
            await asyncio.Event().wait()
        chunk = rest.pop(0)
        if chunk is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk[0], "more_body": chunk[1]}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": list(headers)}
    scope[ARRIVAL] = time.monotonic() - waited_s
    scope[heads.LEAVING] = [] if leaving is None else leaving
    await door(scope, receive, send)
    if not sent:
        return None
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


@in_loop
async def test_what_frontends_say_goes_no_further():
    app = App()
    door = AdmissionMiddleware(app)
    for _ in range(2):
        status, headers, body = await ask(door)
        assert (status, body) == (200, b"ok")
        assert b"x-slo-capacity" not in headers
        assert b"x-slo-latency-ms" in headers
    told = [dict(scope["headers"])[b"x-slo-body-whole"] for scope in app.scopes]
    assert told == [b"0", b"1"]  # from the first answer on, bodies are read here
    assert app.bodies == [(b"1", False)] * 2
    assert door._door.gate.inside == door._door.gate.waiting == 0


@in_loop
async def test_more_than_workers_can_do_are_refused_before_they_cost_anything():
    app = App(capacity="10;400;2000;9000000;5000000")
    door = AdmissionMiddleware(app)
    await ask(door)
    app.go.clear()
    asked = [asyncio.ensure_future(ask(door)) for _ in range(300)]
    done = asyncio.as_completed(asked)
    refused = [await next(done) for _ in range(284)]  # 16 may always be on their way
    assert len(app.scopes) <= 1 + 16
    for status, headers, body in refused:
        assert status == 503
        assert json.loads(body)["reason"] == "queue_full"
        assert int(headers[b"retry-after"]) >= 1
    app.go.set()
    assert {answer[0] for answer in await asyncio.gather(*asked)} == {200, 503}
    assert door._door.gate.inside == 0


@in_loop
async def test_so_are_those_for_functions_with_the_batch_decorator():
    """Other paths of such a deployment are as free as without a door, and it is no application of
    ray-slo: nothing is sent to it again."""
    app = App(capacity="replica;10;400")
    app.header = b"x-batch-capacity"
    door = AdmissionMiddleware(app)
    status, headers, _ = await ask(door)
    assert (status, *headers) == (200, b"x-slo-latency-ms")
    app.go.clear()
    asked = [asyncio.ensure_future(ask(door)) for _ in range(300)]
    done = asyncio.as_completed(asked)
    refused = [await next(done) for _ in range(284)]
    assert {status for status, _, _ in refused} == {503}
    others = [asyncio.ensure_future(ask(door, path="/other")) for _ in range(300)]
    await until(lambda: len(app.scopes) == 1 + 16 + 300)
    app.go.set()
    assert {answer[0] for answer in await asyncio.gather(*asked, *others)} == {200, 503}
    assert door._door.gate.inside == 0


@in_loop
async def test_batch_functions_learn_how_long_ago_a_request_came():
    app = App(capacity="replica;10;400")
    app.header = b"x-batch-capacity"
    door = AdmissionMiddleware(app)
    made_up = [*HEADERS, (b"x-slo-arrived", b"1;mine")]
    for path in ("/m", "/m", "/other"):
        await ask(door, path=path, headers=made_up, waited_s=0.2)
    first, second, other = (dict(s["headers"]).get(b"x-slo-arrived") for s in app.scopes)
    assert (first, other) == (None, None)
    assert since(second.decode(), time.time()) == pytest.approx(0.2, abs=0.19)


@in_loop
async def test_who_has_no_answer_leaves_the_door_too():
    async def silent(scope, receive, send): ...

    async def broken(scope, receive, send):
        raise RuntimeError("what is behind the door")

    for app in (silent, broken):
        door = AdmissionMiddleware(app)
        try:
            assert await ask(door) is None
        except RuntimeError:
            assert app is broken
        assert door._door.gate.inside == door._door.gate.waiting == 0


@in_loop
async def test_who_leaves_while_waiting_takes_nobodys_turn():
    app = App()
    door = AdmissionMiddleware(app)
    gate = door._door.gate
    await ask(door)
    gate.window = 1
    app.go.clear()
    app.scopes.clear()
    leaving = [[] for _ in range(50)]
    asking = [asyncio.ensure_future(ask(door, leaving=one)) for one in leaving]
    await until(lambda: gate.waiting == 49)
    for (tell,) in leaving[10:]:
        tell()
    await until(lambda: gate.waiting == 9)
    app.go.set()
    found = await asyncio.gather(*asking)
    assert [answer is not None for answer in found] == [True] * 10 + [False] * 40
    assert len(app.scopes) == len(pickle.loads(pickle.dumps(app.scopes))) == 10
    assert gate.inside == gate.waiting == 0


@in_loop
async def test_who_has_an_answer_finds_an_empty_door():
    """Its next request may come before the proxy is done with this one."""
    app = App()
    door = AdmissionMiddleware(app)
    await ask(door)
    ends, inside = [], []

    async def send(message):
        if message["type"] == "http.response.body":
            inside.append(door._door.gate.inside)
            ends.append(not message.get("more_body"))

    async def streaming(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        await send({"type": "http.response.body", "body": b"k"})

    async def receive():
        return {"type": "http.request", "body": b"1", "more_body": False}

    for behind in (app, streaming):
        door._app = behind
        await door({"type": "http", "path": "/m", "headers": list(HEADERS)}, receive, send)
    assert ends == [True, False, True]
    assert inside == [0, 1, 0]
    assert door._door.gate.inside == 0


@in_loop
async def test_time_counts_from_when_the_kernel_had_the_request():
    app = App()
    door = AdmissionMiddleware(app)
    await ask(door)
    app.go.clear()
    other = asyncio.ensure_future(ask(door))
    await asyncio.sleep(0.01)
    status, _, body = await ask(door, waited_s=3.0)
    assert (status, json.loads(body)["reason"]) == (503, "would_miss")
    assert len(app.scopes) == 2
    app.go.set()
    await other


@in_loop
async def test_a_busy_proxy_does_not_blame_the_client():
    app = App()
    door = AdmissionMiddleware(app)
    await ask(door)
    headers = [(b"content-length", b"9"), (b"x-slo-latency-ms", b"50")]
    asked = asyncio.ensure_future(ask(door, headers=headers, chunks=[(b"1", True)]))
    await asyncio.sleep(0.5)
    time.sleep(0.3)  # noqa: ASYNC251 (the loop stands still)
    status, told, body = await asked
    assert (status, json.loads(body)["reason"]) == (503, "queue_full")
    assert told[b"retry-after"] == b"1"
    await ask(door)
    assert dict(app.scopes[-1]["headers"])[b"x-slo-refused-before"] == b"1"


@in_loop
async def test_a_slow_client_is_told_so_and_occupies_nobody():
    app = App()
    door = AdmissionMiddleware(app)
    await ask(door)
    headers = [(b"content-length", b"9"), (b"x-slo-latency-ms", b"50")]
    status, _, body = await ask(door, headers=headers, chunks=[(b"1", True)])
    assert (status, json.loads(body)["reason"]) == (408, "slow_body")
    assert await ask(door, headers=headers, chunks=[(b"1", True), None]) is None  # it left
    assert len(app.scopes) == 1
    large = [(b"content-length", b"9000000")]
    await ask(door, headers=large, chunks=[(b"1", True)])
    assert app.bodies[-1] == (b"1", True)  # may be refused for its size: not read here
    kind = (b"content-type", b"application/json")
    for named in ([(b"content-length", b"9000001")], [(b"content-length", b"5000001"), kind]):
        status, _, body = await ask(door, headers=named)
        assert (status, json.loads(body)["reason"]) == (413, "body_too_large")
    assert "max_json_bytes" in json.loads(body)["message"]
    assert (await ask(door, headers=[(b"content-length", b"9" * 30)]))[0] == 413
    assert len(app.scopes) == 2


@in_loop
async def test_who_still_sends_a_large_body_hears_what_is_wrong_with_it():
    """The rest is read, and dropped, so that the answer is not lost with the connection."""
    door = AdmissionMiddleware(App())
    await ask(door)
    large = [(b"content-length", b"20000000")]
    chunks = [(b"1" * 10**6, True)] * 19 + [(b"1" * 10**6, False)]
    unread = list(chunks)
    assert (await ask(door, headers=large, chunks=unread))[0] == 413
    assert unread == []
    began = time.monotonic()
    assert (await ask(door, headers=large, chunks=chunks[:3]))[0] == 413  # the rest never comes
    assert 0.4 < time.monotonic() - began < 5
    began = time.monotonic()
    waits = [*large, (b"expect", b"100-continue")]
    assert (await ask(door, headers=waits, chunks=[]))[0] == 413
    assert time.monotonic() - began < 0.4


@in_loop
async def test_who_has_sent_a_large_body_has_the_answer_before_the_application_is_done():
    parts, sent, ends = [(b"1", True), (b"2", False)], [], []

    async def receive():
        body, more = parts.pop(0)
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})
        ends.append(not sent[-1].get("more_body"))  # and here it would work on

    large = [(b"content-length", b"2000000")]
    scope = {"type": "http", "path": "/m", "headers": large}
    await AdmissionMiddleware(app)(scope, receive, send)
    assert ends == [True]
    assert [message.get("body") for message in sent] == [None, b"ok"]


@in_loop
async def test_classes_have_slos_of_their_own():
    app = App(capacity="1000;400;2000;9000000;5000000")
    door = AdmissionMiddleware(app)
    await ask(door)
    app.capacity = "1000;5000;2000;9000000;5000000"
    bulk = [*HEADERS, (b"x-slo-class", b"bulk")]
    await ask(door, headers=bulk)
    slos_s = [door._door.slo_s(Place("", "m", slo_class)) for slo_class in ("", "bulk", "gold")]
    assert slos_s == [0.4, 5.0, None]


@in_loop
async def test_who_still_sends_after_the_answer_is_out_of_the_door():
    door = AdmissionMiddleware(App())
    await ask(door)
    for known in ({}, {"path": "/unknown"}):
        large = [(b"content-length", b"2000000")]
        began = time.monotonic()
        task = asyncio.ensure_future(ask(door, headers=large, chunks=[(b"1", True)], **known))
        await asyncio.sleep(0.2)
        assert not task.done()  # it waits for the rest, and nobody for it
        assert door._door.gate.inside == 0
        assert (await task)[0] == 200
        assert time.monotonic() - began < 5


@in_loop
async def test_fewer_go_on_at_a_time_while_the_way_takes_long():
    app = App(took_s=0.1)  # of which the frontend says that it took 1 ms
    door = AdmissionMiddleware(app)
    gate = door._door.gate
    before = gate.window
    await ask(door)
    await ask(door)
    assert gate.window < before
    app.took_s, low = 0.0, gate.window
    for _ in range(10):
        await ask(door)
    assert gate.window == low + 5


@in_loop
async def test_what_is_not_ours_passes():
    app = App(capacity=None)
    door = AdmissionMiddleware(app)
    answers = await asyncio.gather(*(ask(door, headers=[], path="/other") for _ in range(100)))
    assert {status for status, _, _ in answers} == {200}
    scope = {"type": "websocket"}
    seen = []

    async def inner(*given):
        seen.append(given)

    await AdmissionMiddleware(inner)(scope, "receive", "send")
    assert seen == [(scope, "receive", "send")]


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="Linux tells")
def test_the_kernel_knows_how_long_data_has_waited():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.sendall(b"x")
        time.sleep(0.2)
        line, _ = server.accept()
        with line:
            assert 0.15 < heads.waited_s(line) < 10
    assert heads.waited_s(None) == 0.0
