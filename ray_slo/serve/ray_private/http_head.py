"""What uvicorn lacks: limits for size and duration of a request's head (request line and headers),
the time when a request came to this machine, and quick ways to read bodies and write short ones.
Trailers are ignored: uvicorn would take them for headers, which proxies had no chance to check.

A busy server may accept a connection seconds after its request arrived; the kernel knows the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import logging
import socket
import struct
import termios
import time
import weakref
from collections.abc import Callable
from functools import wraps
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http import auto

from ray_slo.core.seldom import Seldom
from ray_slo.serve.ray_private.peers import proxy_answers

MAX_HEAD_BYTES = 262_144
MAX_HEAD_S = 30.0
HALF_CLOSED_S = 0.02  # a client that shuts its sending side within this time waits for its answer
ACCEPTED = 64  # connections per turn of the event loop
ARRIVAL = "ray_slo.arrival"  # in a scope: arrival of the request, `time.monotonic()` seconds
LEAVING = "ray_slo.leaving"  # in a scope: list of functions to call when the client leaves
_CYCLE = "ray_slo.cycle"  # in a scope: uvicorn's object for the request and its answer
_LEAST_REST = 65_536  # bytes that have to be missing, so that a place for a body is worth its cost
_LARGEST_PLACE = 16 * 2**20  # bytes of a body that is read into its place
_FIRST_PLACE, _GROWTH = 65_536, 4  # least bytes of a place; its size as a multiple of what came
_PROXY_S = 0.2  # seconds for an answer of Serve's proxy, which shows that it is not too busy
_MOST_WHOLE = 65_536  # bytes of a body up to which copying it costs less than a second write
_PROCESS = "ray_slo.process"  # in a scope: the process of that clock
_OURS = uuid4().hex

_STATUS = {one.value: f"HTTP/1.1 {one.value} {one.phrase}".encode() for one in HTTPStatus}
_PLAIN = (Response, JSONResponse)
_END, _LENGTH = b"\r\n", b"content-length"
_UVICORNS = (b"connection", b"transfer-encoding")  # headers that change what uvicorn does

_LAST_DATA_RECV = 52  # offset in Linux's `struct tcp_info`: milliseconds since data came
_TCP_INFO_BYTES = _LAST_DATA_RECV + 4


class _Cycle(weakref.ref[Any]):
    """Refers to uvicorn's object from a scope; that object refers to the scope.

    Serve's proxies pickle scopes for replicas, which may not have ray-slo. There, this is an empty
    dictionary.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


def _cycle_of(scope: Any) -> Any:
    found = scope.get(_CYCLE)
    return found() if isinstance(found, _Cycle) else None


def _answering(protocol: type[Any]) -> type[Any]:
    """Return uvicorn's `HttpToolsProtocol`, but a client may shut its sending side with its
    request. One that shuts it later has left."""

    class Answering(protocol):
        _complete_at = 0.0  # when the last request was complete, by the loop's clock

        def on_message_complete(self) -> None:
            self._complete_at = self.loop.time()
            super().on_message_complete()

        def eof_received(self) -> bool:
            """Return whether to keep the connection for an answer."""
            cycle = self.cycle
            if cycle is None or cycle.more_body or cycle.response_complete:
                return False
            if self.scheme == "https" or self.loop.time() - self._complete_at > HALF_CLOSED_S:
                return False
            cycle.keep_alive = False
            return True

    return Answering


def bounded(protocol: type[Any]) -> type[Any]:
    """Return uvicorn's `HttpToolsProtocol` with limits. It disconnects if a head is too large or
    too slow."""

    class Bounded(_answering(protocol)):  # type: ignore[misc]
        _head_bytes: int | None = 0  # bytes of the current head; None if there is none
        _head_timer: asyncio.TimerHandle | None = None
        _leaving: list[Callable[[], object]] = []  # noqa: RUF012 (every request has its own)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._line = transport.get_extra_info("socket")
            self._head_bytes = 0
            self._limit_time()

        def connection_lost(self, exc: Exception | None) -> None:
            self._have_head()
            super().connection_lost(exc)
            for tell in self._leaving:
                tell()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._have_head()
            self._head_bytes = 0

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._head_bytes is not None:  # otherwise it is a trailer, which uvicorn would add
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._have_head()
            self.scope[ARRIVAL] = time.monotonic() - waited_s(self._line)
            self.scope[_PROCESS] = _OURS
            self.scope[LEAVING] = self._leaving = []
            super().on_headers_complete()
            if self.cycle is not None and self.cycle.scope is self.scope:
                self.scope[_CYCLE] = _Cycle(self.cycle)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head_bytes is not None:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._hang_up()
                elif self._head_timer is None:  # most heads come at once, and need no timer
                    self._limit_time()

        def _limit_time(self) -> None:
            self._head_timer = self.loop.call_later(MAX_HEAD_S, self._hang_up)

        def _have_head(self) -> None:
            self._head_bytes = None
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _hang_up(self) -> None:
            self._have_head()
            if not self.transport.is_closing():
                self.transport.close()

    return Bounded


def whole_body(scope: Any, receive: Any) -> bytes | None:
    """Take the body of a request from uvicorn, if all of it is here. Otherwise return None.

    Args:
        receive: what the application got. If it is not uvicorn's own, a middleware changes bodies.
    """
    cycle = _cycle_of(scope)
    if cycle is None or receive != cycle.receive or cycle.more_body or cycle.disconnected:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.flow.resume_reading()
    return body


async def client_is_slow(scope: Any, receive: Any) -> bool:
    """Return whether a body is missing because its client has not sent it, and not because this
    process or Serve's proxy is too busy to read it.

    Args:
        receive: what the application got.
    """
    if (cycle := _cycle_of(scope)) is None:
        return await proxy_answers(receive, _PROXY_S)
    waiting = bytes(4)  # an int: the bytes of the connection that are here, and not read yet
    with contextlib.suppress(OSError, ValueError):  # it is closed
        line = cycle.transport.get_extra_info("socket")
        waiting = fcntl.ioctl(line.fileno(), termios.FIONREAD, waiting)
    return bool(cycle.more_body) and not any(waiting)


async def read_whole(
    scope: Any,
    receive: Any,
    parts: list[bytes | bytearray],
    size: int,
    taken: Callable[[int], object] = lambda num_bytes: None,
) -> bytes | None:
    """Read the rest of a body from the connection into its place in memory. uvicorn copies each
    part four times, and stops reading after 64 KiB until the application has taken them.

    Args:
        receive: as for `whole_body`.
        parts: what the application has of the body. If the body does not become complete, what
            came is appended.
        size: declared size of the body, in bytes.
        taken: called with the size of the place whenever a part of the body came, in bytes.

    Returns:
        The body. None: the application has to go on with `receive`.
    """
    cycle = _cycle_of(scope)
    if cycle is None or receive != cycle.receive or not cycle.more_body:
        return None
    have = sum(map(len, parts)) + len(cycle.body)
    if size - have <= _LEAST_REST or size > _LARGEST_PLACE:
        return None
    http = cycle.on_response.__self__
    if http.cycle is not cycle or http.transport.is_closing():
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    parts.append(body)
    place = _Place(http, b"".join(parts), size, taken)
    try:
        while cycle.more_body and not cycle.disconnected:
            cycle.message_event.clear()
            await cycle.message_event.wait()
    finally:
        parts.append(place.give_up())
    return None if cycle.more_body else place.body()


class _Place(asyncio.BufferedProtocol):
    """Has a connection in place of uvicorn's protocol until a body is complete. Its memory grows
    with what comes: a client may declare much and send little.

    Args:
        http: uvicorn's protocol.
        begun: the first part of the body, which uvicorn's parser has seen.
        size: declared size of the body, in bytes.
        taken: as for `read_whole`.
    """

    def __init__(self, http: Any, begun: bytes, size: int, taken: Callable[[int], object]) -> None:
        self._http, self._size, self._taken = http, size, taken
        self._seen = self._at = len(begun)
        self._bytes, self._memory = io.BytesIO(), memoryview(begun)
        self._grow()
        # In a turn of its own: the task that reads may be stopped, and waits then.
        http.loop.call_soon(taken, len(self._memory))
        self._connect(self)

    def _grow(self) -> None:
        place = io.BytesIO(bytes(min(max(_GROWTH * self._at, _FIRST_PLACE), self._size)))
        memory = place.getbuffer()
        memory[: self._at] = self._memory[: self._at]
        self._memory.release()
        self._bytes, self._memory = place, memory

    def body(self) -> bytes:
        """Return the body, when it is complete."""
        return self._bytes.getvalue()

    def _connect(self, protocol: Any) -> None:
        # A transport asks only at the start of reading how its protocol takes data.
        self._http.flow.pause_reading()
        self._http.transport.set_protocol(protocol)
        self._http.flow.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at == len(self._memory) < self._size:
            self._grow()
        self._taken(len(self._memory))
        if self._at == self._size:
            self._memory.release()
            self._connect(self._http)
            # The old parser would wait for the rest of this body.
            parser = self._http.parser = type(self._http.parser)(self._http)
            with contextlib.suppress(AttributeError):  # an old httptools; uvicorn does the same
                parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._http.on_message_complete()

    def eof_received(self) -> bool:
        return bool(self._http.eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def give_up(self) -> bytes:
        """Give the connection back, if the body is not complete. Return what has come of it."""
        http = self._http
        if http.transport.get_protocol() is not self:
            return b""
        came = bytes(self._memory[self._seen : self._at])
        self._memory.release()
        if not http.transport.is_closing():
            self._connect(http)
            http.data_received(came)
        return came


def write_whole(scope: Any, send: Any, response: Response) -> bool:
    """Write a short answer with one call of the system, where uvicorn needs two and checks each
    header. Return False, without having done anything, if uvicorn has to write it.

    Args:
        send: what the application got. If it is not uvicorn's own, a middleware watches the answer.
    """
    cycle = _cycle_of(scope)
    if (
        type(response) not in _PLAIN
        or cycle is None
        or send != cycle.send
        or response.background is not None
        or len(response.body) > _MOST_WHOLE
        or not cycle.keep_alive
        or cycle.disconnected
        or cycle.response_started
        or cycle.access_log
        or cycle.flow.write_paused
        or scope["method"] == "HEAD"
    ):
        return False
    headers = [*cycle.default_headers, *response.raw_headers]
    head, _, body = parts = in_parts(response, headers)
    is_text = head.count(b"\n") == head.count(b"\r") == len(headers) and b"\0" not in head
    has_length = sum(name == _LENGTH and value == b"%d" % len(body) for name, value in headers) == 1
    if not (head and is_text and has_length) or any(name in _UVICORNS for name, _ in headers):
        return False
    cycle.response_started = cycle.response_complete = True
    cycle.transport.write(b"".join(parts))
    cycle.message_event.set()
    cycle.on_response()
    return True


def in_parts(response: Response, headers: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes, bytes]:
    """Return the head of an answer, what separates it from the body, and the body. The head is
    empty if its status is unknown."""
    status, body = _STATUS.get(response.status_code), bytes(response.body)
    lines = [status, *[name + b": " + value for name, value in headers]] if status else []
    return _END.join(lines), 2 * _END, body


def arrival_here(scope: Any) -> float | None:
    """Return when a request came to the HTTP server of this process, in `time.monotonic()` seconds.
    None: it came to another process, perhaps on another machine."""
    if scope.get(_PROCESS) != _OURS:
        return None
    came: float = scope[ARRIVAL]
    return came


def waited_s(line: Any) -> float:
    """Return the time since the last data of a connection came, in seconds. 0 if the kernel does
    not know.

    Args:
        line: socket of the connection. None if it has none.
    """
    if line is None or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (waited_ms,) = struct.unpack_from("I", info, _LAST_DATA_RECV)
    except (OSError, struct.error):
        return 0.0
    return float(waited_ms) / 1e3


def bound_heads(also: Callable[[type[Any]], type[Any]] = lambda protocol: protocol) -> None:
    """Make the HTTP server that this process starts next limit heads.

    Args:
        also: function that adds something else to uvicorn's `HttpToolsProtocol`.

    Does nothing without httptools: uvicorn then uses h11, which has a limit.
    """
    logging.getLogger("uvicorn.error").addFilter(Seldom())  # a line per request that is not HTTP
    current: Any = auto.AutoHTTPProtocol
    if current.__name__ == "HttpToolsProtocol":
        auto.AutoHTTPProtocol = bounded(also(current))


def accept_many() -> None:
    """Make the HTTP server that this process starts next accept many connections per turn of its
    event loop. uvloop accepts one. So a client with a short deadline would wait behind thousands of
    others."""
    original = uvicorn.Server.startup
    if hasattr(original, "_ray_slo"):
        return

    @wraps(original)
    async def startup(self: Any, sockets: list[socket.socket] | None = None) -> None:
        await original(self, sockets)
        if self.should_exit or self.config.is_ssl:
            return
        loop = asyncio.get_running_loop()
        if "uvloop" not in type(loop).__module__:
            return
        for listener in sockets or ():
            # A descriptor of its own: uvloop does not allow watching that of a transport.
            line = listener.dup()
            line.setblocking(False)
            loop.add_reader(line.fileno(), _accept, self, line, loop)

    startup._ray_slo = True  # type: ignore[attr-defined]
    uvicorn.Server.startup = startup  # type: ignore[method-assign]


def _accept(server: Any, listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
    if server.should_exit:
        loop.remove_reader(listener.fileno())
        listener.close()
        return

    def protocol() -> Any:
        return server.config.http_protocol_class(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )

    for _ in range(ACCEPTED):
        try:
            line, _ = listener.accept()
        except (
            OSError
        ):  # no connection is left, or there are no descriptors: uvicorn reports that itself
            return
        line.setblocking(False)
        loop.create_task(loop.connect_accepted_socket(protocol, line))
