"""Heads of HTTP requests have a largest size and duration. The kernel knows the time of arrival.
Large bodies are read into their place; short answers are written at once."""

import asyncio
import gc
import inspect
import pickle
import socket
import time
import tracemalloc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import uvicorn
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from uvicorn import Config
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ray_slo.errors import RefusedEarly
from ray_slo.serve.frontend import http as bodies
from ray_slo.serve.frontend.http import Readers, body_of
from ray_slo.serve.ray_private import http_head as heads
from ray_slo.serve.ray_private.http_head import _CYCLE as CYCLE
from tests.serve import clock


async def connected(app, state=None):
    """Return a socket whose other end is served by uvicorn with bounded heads. It is no TCP."""
    protocol = heads.bounded(HttpToolsProtocol)
    config = Config(app, lifespan="off", http=protocol, log_config=None, access_log=False)
    config.load()
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    near.setblocking(False)
    await loop.connect_accepted_socket(
        lambda: config.http_protocol_class(config, state or ServerState(), {}, loop), far
    )
    return near


@pytest.fixture
def connection(monkeypatch):
    """What a connection to uvicorn with bounded heads says to bytes: (open?, path of requests)."""
    monkeypatch.setattr(heads, "MAX_HEAD_S", 0.2)

    async def ask(*sent, then_s=0.0):
        paths = []

        async def app(scope, receive, send):
            paths.append(scope["path"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        reader, writer = await asyncio.open_connection(sock=await connected(app))
        for piece in sent:
            writer.write(piece)
            await asyncio.sleep(0.02)
        await asyncio.sleep(then_s)
        is_open = not reader.at_eof() and reader.exception() is None
        writer.close()
        await asyncio.sleep(0.02)
        return is_open, paths

    return lambda *sent, **kwargs: clock.run(ask(*sent, **kwargs))


def test_heads_are_bounded(connection):
    head = b"GET /%d HTTP/1.1\r\nhost: x\r\n"
    assert connection(head % 1 + b"\r\n", head % 2, b"\r\n") == (True, ["/1", "/2"])
    assert connection(head % 1 + b"\r\n", then_s=0.3) == (True, ["/1"])  # keep-alive is uvicorn's
    assert connection(head % 1, then_s=0.17) == (True, [])
    assert connection(head % 1 + b"a: ", *[b"v" * 100_000] * 3) == (False, [])
    assert connection(head % 1, then_s=0.3) == (False, [])
    assert connection(then_s=0.3) == (False, [])
    body = b"content-length: 400000\r\n\r\n" + b"x" * 300_000
    assert connection(head % 1 + body, b"x" * 100_000, then_s=0.3) == (True, ["/1"])


def test_a_request_hears_when_its_client_leaves():
    left = []

    async def run():
        came = asyncio.Event()

        async def app(scope, receive, send):
            there = pickle.loads(pickle.dumps(scope))  # Serve's proxies send it to replicas
            assert there["path"] == scope["path"] and b"ray_slo" not in pickle.dumps(there[CYCLE])
            assert not heads.write_whole(there, send, Response(b"1"))
            scope[heads.LEAVING].append(lambda: left.append(scope["path"]))
            came.set()
            await asyncio.sleep(60)

        near = await connected(app)
        near.send(b"POST /1 HTTP/1.1\r\nhost: x\r\n\r\n")
        await came.wait()
        assert left == []
        near.close()
        await asyncio.sleep(0.02)

    asyncio.run(run())
    assert left == ["/1"]


def test_a_request_came_just_now_if_the_kernel_does_not_know():
    came = []

    async def run():
        async def app(scope, receive, send):
            came.append(time.monotonic() - scope[heads.ARRIVAL])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        near = await connected(app)
        near.send(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.02)
        near.close()
        await asyncio.sleep(0.02)

    clock.run(run())
    assert came == [0.0]
    assert heads.waited_s(None) == 0.0


class Listener:
    """Has so many connections, then none."""

    def __init__(self, count):
        self.left = [socket.socketpair() for _ in range(count)]
        self.closed = False

    def accept(self):
        if not self.left:
            raise BlockingIOError
        near, far = self.left.pop()
        near.close()
        return far, ""

    def fileno(self):
        return 7

    def close(self):
        self.closed = True


def test_64_connections_are_accepted_per_turn():
    accepted, removed = [], []
    loop = SimpleNamespace(
        connect_accepted_socket=lambda protocol, line: line,
        create_task=accepted.append,
        remove_reader=removed.append,
    )
    server, listener = SimpleNamespace(should_exit=False), Listener(70)
    for count in (64, 70, 70):
        heads._accept(server, listener, loop)
        assert len(accepted) == count
    assert not any(line.getblocking() for line in accepted)
    assert not (removed or listener.closed)
    server.should_exit = True
    heads._accept(server, listener, loop)
    assert (removed, listener.closed, len(accepted)) == ([7], True, 70)
    for line in accepted:
        line.close()


def test_uvicorn_changed_here():
    """Where this fails, uvicorn has changed: see where it parses a head and accepts now."""
    assert issubclass(auto.AutoHTTPProtocol, HttpToolsProtocol)
    for name in ("connection_made", "connection_lost", "on_message_begin", "data_received"):
        assert inspect.isfunction(getattr(HttpToolsProtocol, name))
    source = inspect.getsource(HttpToolsProtocol)
    assert "self.scope" in inspect.getsource(HttpToolsProtocol.on_headers_complete)
    assert "self.transport = transport" in source and "self.loop = " in source
    startup = inspect.signature(uvicorn.Server.startup).parameters
    assert list(startup) == ["self", "sockets"]


class Own(Response):
    """A user's class may send in its own way."""


async def streamed():
    yield b"ab"


WHOLE = {
    "text": lambda: Response(b"a", media_type="text/plain"),
    "json": lambda: JSONResponse({"b": 1}, 202),
    "length": lambda: Response(b"length", headers={"content-length": "6"}),
}
NOT_WHOLE = {
    "own": lambda: Own(b"own"),
    "stream": lambda: StreamingResponse(streamed()),
    "large": lambda: Response(bytes(70_000)),
    "task": lambda: Response(b"task", background=BackgroundTask(lambda: None)),
    "close": lambda: Response(b"close", headers={"connection": "close"}),
    "other": lambda: Response(b"other", 299),
    "empty": lambda: Response(status_code=204),
    "split": lambda: Response(b"split", headers={"x-user": "1\r\nx-evil: 2"}),
    "wrong": lambda: Response(b"wrong", headers={"content-length": "4"}),
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_answer_is_the_same_in_one_piece(method, watched):
    """The bytes are those that uvicorn writes, and the connection takes the next request."""

    async def run(whole):
        written = []

        async def app(scope, receive, send):
            async def watching(message):
                await send(message)

            out = watching if watched else send
            response = (WHOLE | NOT_WHOLE)[scope["path"][1:]]()
            at_once = whole and heads.write_whole(scope, out, response)
            written.append(at_once)
            if not at_once:
                await response(scope, receive, out)

        said = {}
        for path in WHOLE | NOT_WHOLE:
            state = ServerState()
            state.default_headers = [(b"server", b"uvicorn")]
            near = await connected(app, state)
            near.send(b"%s /%s HTTP/1.1\r\nhost: x\r\n\r\n" % (method.encode(), path.encode()) * 2)
            await asyncio.sleep(0.03)
            said[path] = near.recv(300_000), state.total_requests
            near.close()
            await asyncio.sleep(0)
        return said, written

    def lines(said):  # uvicorn writes names in small letters
        return {path: (data.lower(), number) for path, (data, number) in said.items()}

    ours, written = clock.run(run(True))
    theirs, _ = clock.run(run(False))
    assert lines(ours) == lines(theirs)
    assert sum(written) == (0 if watched or method == "HEAD" else 2 * len(WHOLE))
    assert ours["text"][0].count(b"HTTP/1.1 200 OK") == 2 == ours["text"][1]
    assert b"x-evil" not in ours["split"][0]


def test_a_body_is_taken_when_all_of_it_is_here():
    taken = []

    async def run():
        async def app(scope, receive, send):
            async def changed():
                return {**await receive(), "body": b""}

            assert heads.whole_body(scope, changed) is None
            before = heads.whole_body(scope, receive)
            while before is None and (await receive())["more_body"]:
                pass
            taken.append((before, heads.whole_body(scope, receive)))
            await Response(b"1")(scope, receive, send)

        near = await connected(app)
        for size, parts in ((3, [b"abc"]), (6, [b"abc", b"def"]), (300_000, [bytes(300_000)])):
            head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
            for part in (head + parts[0], *parts[1:]):
                await asyncio.get_running_loop().sock_sendall(near, part)
                await asyncio.sleep(0.02)
        near.close()
        await asyncio.sleep(0.02)

    clock.run(run())
    assert taken == [(b"abc", b""), (None, b""), (None, b"")]


BODY = bytes(range(256)) * 1200


def post(path, size, *headers):
    lines = [b"POST %s HTTP/1.1" % path, b"host: x", b"content-length: %d" % size, *headers]
    return b"\r\n".join((*lines, b"", b""))


@pytest.fixture(params=["asyncio", "uvloop"])
def run_in_loop(request):
    """`asyncio.run` with each of the event loops that uvicorn uses."""
    if request.param == "asyncio":
        return asyncio.run
    return pytest.importorskip("uvloop").run


def test_a_large_body_is_read_into_its_place(run_in_loop):
    taken = []

    async def run():
        done = asyncio.Event()

        async def app(scope, receive, send):
            async def changed():
                return await receive()

            assert await heads.read_whole(scope, changed, [], len(BODY)) is None
            parts = [(await receive())["body"]]
            body = await heads.read_whole(scope, receive, parts, len(BODY))
            taken.append((scope["path"], body, b"".join(parts) == BODY[: sum(map(len, parts))]))
            if body is None:
                taken.append((await receive())["type"])
            else:
                await Response(b"1")(scope, receive, send)
            done.set()

        near, loop = await connected(app), asyncio.get_running_loop()
        for pieces in (
            (post(b"/whole", len(BODY)), BODY[:90_000], BODY[90_000:]),
            (post(b"/continued", len(BODY), b"expect: 100-continue"), BODY[:90], BODY[90:]),
            # The client does not wait for the answer.
            (post(b"/first", len(BODY)) + BODY, post(b"/second", len(BODY)) + BODY),
            (post(b"/leaves", len(BODY)), BODY[:100_000]),
        ):
            for piece in pieces:
                await loop.sock_sendall(near, piece)
                await asyncio.sleep(0.02)
        answers = await loop.sock_recv(near, 10_000)
        assert answers.count(b"HTTP/1.1 200 OK") == 4
        done.clear()
        near.close()
        await asyncio.wait_for(done.wait(), 10)

    run_in_loop(run())
    names = ["/whole", "/continued", "/first", "/second"]
    assert taken == [*((name, BODY, True) for name in names), ("/leaves", None, True), END]


END = "http.disconnect"


@pytest.mark.parametrize(
    ("size", "first"),
    [(64_000, 1), (100_000, 40_000), (17 * 2**20, 9000)],
    ids=["small", "little is missing", "too large"],
)
def test_no_place_is_taken_for_a_body(monkeypatch, size, first):
    monkeypatch.setattr(heads, "_Place", None)
    found = []

    async def run():
        async def app(scope, receive, send):
            parts = [(await receive())["body"]]
            found.append((await heads.read_whole(scope, receive, parts, size), b"".join(parts)))

        near = await connected(app)
        near.send(post(b"/", size) + bytes(first))
        await asyncio.sleep(0.02)
        near.close()
        await asyncio.sleep(0.02)

    clock.run(run())
    assert found == [(None, bytes(first))]


def test_a_body_that_is_given_up_is_uvicorns_again(run_in_loop):
    """Nothing of it is lost, and the connection serves on."""
    slow, answered = [], []

    async def run():
        over = asyncio.Event()

        async def app(scope, receive, send):
            if scope["path"] == "/slow":
                parts = [(await receive())["body"]]
                reading = asyncio.ensure_future(heads.read_whole(scope, receive, parts, len(BODY)))
                await over.wait()
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                slow.append(b"".join(parts))
            answered.append(scope["path"])
            await Response(b"1")(scope, receive, send)

        near, loop = await connected(app), asyncio.get_running_loop()
        for first in (80_000, 90):
            await loop.sock_sendall(near, post(b"/slow", len(BODY)) + BODY[:first])
            await asyncio.sleep(0.02)
            await loop.sock_sendall(near, BODY[first:100_000])
            await asyncio.sleep(0.05)
            over.set()
            await asyncio.sleep(0.02)
            over.clear()
            await loop.sock_sendall(near, BODY[100_000:] + post(b"/next", 3) + b"abc")
            await asyncio.sleep(0.03)
        assert (await loop.sock_recv(near, 10_000)).count(b"HTTP/1.1 200 OK") == 4
        near.close()
        await asyncio.sleep(0.02)

    run_in_loop(run())
    assert answered == ["/slow", "/next"] * 2
    assert slow == [BODY[:100_000]] * 2


def test_a_body_is_not_copied_after_it_was_read(monkeypatch):
    places = []

    class Place(heads._Place):
        def _grow(self):
            super()._grow()
            places.append(np.frombuffer(self._memory, np.uint8).ctypes.data)

    monkeypatch.setattr(heads, "_Place", Place)

    async def run():
        async def app(scope, receive, send):
            parts = [(await receive())["body"]]
            body = await heads.read_whole(scope, receive, parts, len(BODY))
            places.append(np.frombuffer(body, np.uint8).ctypes.data)
            await Response(b"1")(scope, receive, send)

        near = await connected(app)
        for piece in (post(b"/", len(BODY)), BODY[:90], BODY[90:]):
            await asyncio.get_running_loop().sock_sendall(near, piece)
            await asyncio.sleep(0.02)
        near.close()
        await asyncio.sleep(0.02)

    clock.run(run())
    assert len(places) == 4 and places[-2] == places[-1]


def test_memory_follows_the_bytes_that_came(run_in_loop):
    taken, size = [], 15 * 2**20

    async def run():
        started = 0

        async def app(scope, receive, send):
            nonlocal started
            parts = [(await receive())["body"]]
            started += 1
            await heads.read_whole(scope, receive, parts, size, taken.append)

        loop, lines = asyncio.get_running_loop(), []
        for sent in (1, 40_000, 200_000):
            near = await connected(app)
            lines.append(near)
            await loop.sock_sendall(near, post(b"/", size) + b"1")
            await asyncio.sleep(0.02)
            taken.clear()
            tracemalloc.start()
            await loop.sock_sendall(near, bytes(sent))
            await asyncio.sleep(0.05)
            grown, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert taken[-1] <= 4 * (sent + 1) + 65_536
            assert grown < 4 * sent + 100_000
        for near in lines:
            near.close()
        await asyncio.sleep(0.02)
        assert started == 3

    run_in_loop(run())


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_a_client_may_shut_its_sending_side_with_its_request(monkeypatch, run_in_loop, late_s):
    """One that does so later has left."""
    left = []
    if not late_s:
        monkeypatch.setattr(heads, "HALF_CLOSED_S", 10.0)  # for a busy machine

    async def run():
        async def app(scope, receive, send):
            assert (await receive())["body"] == b"abc"
            scope[heads.LEAVING].append(lambda: left.append(late_s))
            await asyncio.sleep(0.2)
            response = Response(b"1")
            if not heads.write_whole(scope, send, response):
                await response(scope, receive, send)

        near, loop = await connected(app), asyncio.get_running_loop()
        near.send(post(b"/", 3) + b"abc")
        await asyncio.sleep(late_s)
        near.shutdown(socket.SHUT_WR)
        said = b""
        while got := await loop.sock_recv(near, 10_000):
            said += got
        assert said.startswith(b"HTTP/1.1 200 OK" if not late_s else b"")
        assert said.endswith(b"1") is (not late_s)
        near.close()
        await asyncio.sleep(0.02)

    run_in_loop(run())
    assert left == [late_s]  # when the connection ends


def test_bodies_that_only_declare_their_size_need_bounded_memory(monkeypatch, run_in_loop):
    monkeypatch.setattr(bodies, "_PATIENCE_S", 60.0)
    readers = Readers(1000, 8192)  # 128 KiB together; a place has at least 64 KiB

    async def run():
        refused = []

        async def app(scope, receive, send):
            request = Request(scope, receive)
            try:
                await body_of(request, 200_000, 60.0, readers=readers)
            except RefusedEarly as error:
                refused.append(error)
            await Response(b"1")(scope, receive, send)

        loop, lines = asyncio.get_running_loop(), []
        for _ in range(3):
            near = await connected(app)
            lines.append(near)
            await loop.sock_sendall(near, post(b"/", 150_000) + b"1")
            await asyncio.sleep(0.05)
        assert "too many bodies" in str(refused.pop()) and not refused
        assert readers._num_bytes == 131_072
        for near in lines:
            near.close()
        await asyncio.sleep(0.02)

    run_in_loop(run())


def test_trailers_are_no_headers(run_in_loop):
    seen = []

    async def run():
        async def app(scope, receive, send):
            while (await receive())["more_body"]:
                pass
            seen.append(dict(scope["headers"]))
            await Response(b"1")(scope, receive, send)

        near, loop = await connected(app), asyncio.get_running_loop()
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: x-a\r\n\r\n"
        rest = b"1\r\na\r\n0\r\nx-a: 1\r\nx-slo-refused-before: 999999\r\n\r\n"
        for pieces in ((head + rest,), (head, rest), (head + rest[:10], rest[10:])):
            for piece in pieces:
                await loop.sock_sendall(near, piece)
                await asyncio.sleep(0.02)
        await loop.sock_sendall(near, b"POST / HTTP/1.1\r\nhost: y\r\ncontent-length: 0\r\n\r\n")
        await asyncio.sleep(0.02)
        near.close()

    run_in_loop(run())
    ours = {b"host": b"x", b"transfer-encoding": b"chunked", b"trailer": b"x-a"}
    assert seen == [ours] * 3 + [{b"host": b"y", b"content-length": b"0"}]


def test_a_client_is_slow_if_nothing_of_its_body_is_unread(run_in_loop):
    found = []

    async def run():
        async def app(scope, receive, send):
            await receive()
            scope_of.append((scope, receive))
            await asyncio.sleep(60)

        scope_of = []
        near, loop = await connected(app), asyncio.get_running_loop()
        await loop.sock_sendall(near, post(b"/", 9) + b"abc")
        await asyncio.sleep(0.02)
        found.append(await heads.client_is_slow(*scope_of[0]))
        near.send(b"def")  # the loop has not read this yet
        found.append(await heads.client_is_slow(*scope_of[0]))
        await asyncio.sleep(0.02)
        found.append(await heads.client_is_slow(*scope_of[0]))
        near.send(b"ghi")
        await asyncio.sleep(0.02)
        found.append(await heads.client_is_slow(*scope_of[0]))
        near.close()

    run_in_loop(run())
    assert found == [True, False, True, False]


def test_a_request_leaves_no_garbage():
    """Otherwise bodies would stay until the next full collection."""
    scopes = []

    class Scope(dict):
        """A dictionary that can be watched."""

    async def run():
        async def app(scope, receive, send):
            assert heads.whole_body(scope, receive) == b"abc"
            assert heads.write_whole(scope, send, Response(b"1"))
            watched = heads._cycle_of(scope).scope = Scope(scope)
            watched[CYCLE] = scope[CYCLE]
            scopes.append(weakref.ref(watched))

        near = await connected(app)
        for _ in range(3):
            near.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
            await asyncio.sleep(0.02)
        kept = [scope() is not None for scope in scopes]
        near.close()
        await asyncio.sleep(0.02)
        return kept

    gc.disable()
    try:
        assert clock.run(run()) == [False, False, True]  # uvicorn keeps that of the last request
    finally:
        gc.enable()
