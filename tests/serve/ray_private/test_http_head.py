"""Heads of HTTP requests have a largest size and duration. The kernel knows the time of arrival. A
request ends when its client leaves."""

import asyncio
import inspect
import socket

import pytest
import uvicorn
from uvicorn import Config
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ray_slo.serve.ray_private import http_head as heads
from tests.serve import clock


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

        config = Config(app, lifespan="off", http=heads.bounded(HttpToolsProtocol), log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        state = ServerState()
        near, far = socket.socketpair()
        await loop.connect_accepted_socket(
            lambda: config.http_protocol_class(config, state, {}, loop), far
        )
        reader, writer = await asyncio.open_connection(sock=near)
        for piece in sent:
            writer.write(piece)
            await asyncio.sleep(0.02)
        await asyncio.sleep(then_s)
        is_open = not reader.at_eof() and reader.exception() is None
        writer.close()
        await asyncio.sleep(0.02)
        return is_open, paths

    return lambda *sent, **kwargs: clock.run(ask(*sent, **kwargs))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_request_ends_when_its_client_leaves(leaves):
    """And not when the client leaves after its answer."""
    seen = []

    async def inner(scope, receive, send):
        seen.append(scope["path"])
        try:
            await asyncio.sleep(0.2)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        await asyncio.sleep(0.2)
        seen.append("done")

    async def app(scope, receive, send):
        await heads.until_client_leaves(inner, scope, {**scope}, receive, send)

    async def ask():
        config = Config(app, lifespan="off", http=heads.bounded(HttpToolsProtocol), log_config=None)
        config.load()
        loop, state = asyncio.get_running_loop(), ServerState()
        near, far = socket.socketpair()
        await loop.connect_accepted_socket(
            lambda: config.http_protocol_class(config, state, {}, loop), far
        )
        _, writer = await asyncio.open_connection(sock=near)
        writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.1 if leaves else 0.3)
        writer.close()
        await asyncio.sleep(0.5)

    clock.run(ask())
    assert seen == ["/x", "cancelled" if leaves else "done"]


def test_a_request_that_is_cancelled_for_another_reason_is_cancelled():
    async def inner(scope, receive, send):
        raise asyncio.CancelledError

    async def run():
        with pytest.raises(asyncio.CancelledError):
            await heads.until_client_leaves(inner, scope := {}, {}, None, None)
        assert scope == {}

    asyncio.run(run())


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


def test_uvicorn_changed_here():
    """Where this fails, uvicorn has changed: see where it parses a head and accepts now."""
    assert issubclass(auto.AutoHTTPProtocol, HttpToolsProtocol)
    for name in ("connection_made", "connection_lost", "on_message_begin", "data_received"):
        assert inspect.isfunction(getattr(HttpToolsProtocol, name))
    source = inspect.getsource(HttpToolsProtocol)
    assert "scope=self.scope" in inspect.getsource(HttpToolsProtocol.on_headers_complete)
    assert "self.cycle.response_complete" in inspect.getsource(HttpToolsProtocol.connection_lost)
    assert "self.transport = transport" in source and "self.loop = " in source
    startup = inspect.signature(uvicorn.Server.startup).parameters
    assert list(startup) == ["self", "sockets"]
