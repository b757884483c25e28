"""Direct connections: processes of one machine call each other without Serve and Ray.

Frontends call workers this way, and both call a scheduler actor (`serve.scheduler.line`).

A call of Serve's handle costs milliseconds of CPU on both sides together, for any content. Here a
call is one message in each direction, on a Unix socket that stays open. The worker names its
address (`Listener.address`). A frontend sends pieces this way only after it is connected. A
frontend on another machine cannot connect, and continues with Serve's handle.

Messages are plain pickles; `serve.payloads` pickles what users' code gives. Large arrays and bytes
are beside the pickle, and are not copied into it. Those of a call go through shared memory
(`serve.shared`), if the other side can open it. Serve's handle is also used for items that hold
references to Ray's objects, which only Ray can pass on.

Only processes of the same user are accepted; the kernel names the user of a socket. The sockets are
in Linux's abstract namespace, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import io
import itertools
import logging
import math
import mmap
import os
import pickle
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, NoReturn
from uuid import uuid4

import ray
from ray import cloudpickle

from ray_slo.core.processes import is_running, peer_of
from ray_slo.core.seldom import Seldom
from ray_slo.serve.shared import Lent, Offer, opened

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_SIZE = struct.Struct("<Q")  # size of the rest: call, number of parts, table of parts, the parts
_HEAD = struct.Struct("<QI")
_PART = struct.Struct("<Qq?")  # a part's size, its place in shared memory, whether it is bytes
_INLINE = -1  # the place of a part that is in the message itself
_READ = 65_536  # number of bytes to read ahead
_SHARED = 65_536  # parts of at least this many bytes go through shared memory
_ALIGNED = 64  # parts begin at multiples of this many bytes
_HELLO_S = 3.0  # seconds for a listener's first answer
_BACKLOG = 128  # connections that wait to be accepted
_ACCEPT_AGAIN_S = 1.0  # seconds until a process without descriptors tries to accept again
_SAY_AGAIN_S = 60.0  # seconds until the log says so again
_NO_OFFER = Offer(-1, 0)  # nobody can open it
_MAX_BYTES = 1 << 40
_UNANSWERED = (1 << 64) - 1  # id of calls whose answer nobody waits for


class NotDirect(Exception):
    """The value cannot be sent over a direct connection. Nothing was sent."""


class Disconnected(Exception):
    """The other side ended during a call."""


class NotRead(Exception):
    """A message cannot be read at the other end.

    Attributes:
        call: its call.
    """

    def __init__(self, said: str, call: int = 0) -> None:
        super().__init__(said)
        self.call = call


def _refused(found: Any) -> NoReturn:
    raise NotDirect(f"only Ray can pass a {type(found).__name__} on")


class _Pickler(pickle.Pickler):
    dispatch_table = dict.fromkeys((ray.ObjectRef, ray.ObjectRefGenerator), _refused)


def encode(
    call: int, value: Any, lend: Callable[[memoryview], int | None] | None = None
) -> list[Any]:
    """Return a message as pieces, which are written one after the other.

    Args:
        lend: function that puts a part into shared memory, and returns its place. Without it, or
            if it returns None, the part goes into the message.

    Raises:
        NotDirect: plain pickle cannot take the value.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        _Pickler(file, 5, buffer_callback=buffers.append).dump(value)
        views = [buffer.raw() for buffer in buffers]
    except NotDirect:
        raise
    except Exception as error:
        raise NotDirect(f"{type(error).__name__}: {error}") from error
    return _message(call, file.getbuffer(), views, lend)


def _message(
    call: int,
    pickled: memoryview,
    views: list[memoryview],
    lend: Callable[[memoryview], int | None] | None = None,
) -> list[Any]:
    placed: list[tuple[memoryview, int | None]] = [(pickled, None)]
    placed += [(view, lend(view) if lend else None) for view in views]
    head = _HEAD.pack(call, len(placed)) + b"".join(
        _PART.pack(part.nbytes, _INLINE if place is None else place, type(part.obj) is bytes)
        for part, place in placed
    )
    written: list[Any] = []
    at = len(head)
    for part, place in placed:
        if place is None:
            padding = -at % _ALIGNED
            written += (bytes(padding), part)
            at += padding + part.nbytes
    if len(written) == 2:
        return [b"".join((_SIZE.pack(at), head, *written))]
    return [_SIZE.pack(at) + head, *written]


def decode(message: memoryview, lent: mmap.mmap | None = None) -> tuple[int, Any]:
    """Return the call's number and the value of a message without its size. Arrays stay in the
    memory of the message; those in shared memory are copied.

    Args:
        lent: the sender's shared memory, if parts are there.

    Raises:
        NotRead: the value cannot be unpickled.
    """
    call, count = _HEAD.unpack_from(message)
    at = _HEAD.size + _PART.size * count
    parts: list[Any] = []
    for size, place, is_bytes in _PART.iter_unpack(message[_HEAD.size : at]):
        if place != _INLINE:
            assert lent is not None
            with memoryview(lent) as memory, memory[place : place + size] as part:
                parts.append(bytes(part) if is_bytes else bytearray(part))
            continue
        at += -at % _ALIGNED
        parts.append(message[at : at + size])
        at += size
    try:
        return call, pickle.loads(parts[0], buffers=parts[1:])
    except Exception as error:
        raise NotRead(f"{type(error).__name__}: {error}", call) from error


class _Messages(asyncio.BufferedProtocol, abc.ABC):
    """One side of a connection: reads messages, and writes them."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._ahead = memoryview(bytearray(_READ))
        self._have = 0  # number of bytes that are read and not processed
        self._message: memoryview | None = None  # a large message that is being read
        self._rest = memoryview(b"")  # the missing part of this message

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.peer, user = peer_of(transport.get_extra_info("socket"))
        if user != os.geteuid():
            logger.warning("a process of another user tried to connect; it is not heard")
            transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._ahead[self._have :] if self._message is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        if self._message is not None:
            self._rest = self._rest[nbytes:]
            if not self._rest:
                message, self._message = self._message, None
                self._hear(message)
            return
        self._have += nbytes
        at = 0
        while self._have - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._ahead, at)
            begin, end = at + _SIZE.size, at + _SIZE.size + size
            if end > self._have:
                if end - at > _READ:
                    self._begin_large(size, self._ahead[begin : self._have])
                    return
                break
            # Copy the message, because its arrays stay in this memory.
            self._hear(memoryview(bytearray(self._ahead[begin:end])))
            at = end
        self._ahead[: self._have - at] = bytes(self._ahead[at : self._have])
        self._have -= at

    def _begin_large(self, size: int, begun: memoryview) -> None:
        if size > _MAX_BYTES:
            self._transport.abort()
            return
        self._message = memoryview(bytearray(size))
        self._message[: len(begun)] = begun
        self._rest = self._message[len(begun) :]
        self._have = 0

    @abc.abstractmethod
    def _hear(self, message: memoryview) -> None:
        """Process a complete message. The message may keep its memory."""

    def _write(self, pieces: list[Any]) -> None:
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def _failed(error: Exception) -> NoReturn:
    raise error


class Connection(_Messages):
    """The side that calls."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._lent: Lent | None = None
        self._places: dict[int, list[int]] = {}  # in `_lent`, by the call that needs them

    @property
    def is_running(self) -> bool:
        """Whether the other side is a process of this machine that runs. If it does not answer, it
        is busy."""
        return self.is_open and is_running(self.peer)

    async def share(self, lent: Lent | None) -> None:
        """Send large parts of calls through this memory, if the other side can open it.

        Raises:
            NotDirect, Disconnected: as for a call.
        """
        if await self.call(_NO_OFFER if lent is None else lent.offer):
            self._lent = lent

    async def call(self, value: Any) -> Any:
        """The other side's answer.

        Raises:
            NotDirect: the value cannot be sent this way; nothing was sent.
            Disconnected: the other side ended.
            Exception: what the call raised there.
        """
        if not self.is_open:
            raise NotDirect("the connection is closed")
        call = next(self._ids)
        pieces = encode(call, value, partial(self._lend, call))
        future = self._calls[call] = self._loop.create_future()
        try:
            self._write(pieces)
            ok, answer = await future
        finally:
            self._calls.pop(call, None)
        if not ok:
            raise answer
        return answer

    def tell(self, value: Any) -> None:
        """Send a value whose answer does not matter.

        Raises:
            NotDirect: the value cannot be sent this way; nothing was sent.
        """
        if not self.is_open:
            raise NotDirect("the connection is closed")
        self._write(encode(_UNANSWERED, value))

    def _lend(self, call: int, part: memoryview) -> int | None:
        if self._lent is None or part.nbytes < _SHARED:
            return None
        place = self._lent.put(part)
        if place is not None:
            self._places.setdefault(call, []).append(place)
        return place

    def _take_back(self, call: int) -> None:
        for place in self._places.pop(call, ()):
            assert self._lent is not None
            self._lent.free(place)

    def _hear(self, message: memoryview) -> None:
        said: tuple[bool, Any]
        try:
            call, said = decode(message)
        except NotRead as error:  # other calls go on
            call, said = error.call, (False, error)
        self._take_back(call)
        future = self._calls.get(call)
        if future is not None and not future.done():
            future.set_result(said)

    def connection_lost(self, exc: Exception | None) -> None:
        for call in list(self._places):
            self._take_back(call)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(Disconnected(str(exc) if exc else "the connection was closed"))


class _Answering(_Messages):
    """The side that is called."""

    def __init__(self, answer: Callable[[Any], Awaitable[Any]], all_open: set[_Answering]) -> None:
        super().__init__()
        self._answer = answer
        self._all_open = all_open
        self._tasks: set[asyncio.Task[None]] = set()
        self._lent: mmap.mmap | None = None  # the other side's memory

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._all_open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all_open.discard(self)
        if self._lent is not None:
            self._lent.close()

    async def _answer_to(self, value: Any) -> Any:
        if isinstance(value, Offer):
            self._lent = opened(self.peer, value)
            return self._lent is not None
        return await self._answer(value)

    def _hear(self, message: memoryview) -> None:
        try:
            call, value = decode(message, self._lent)
            answer = self._answer_to(value)
        except NotRead as error:  # other calls go on
            call, answer = error.call, _failed(error)
        task = asyncio.get_running_loop().create_task(self._respond(call, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(self, call: int, answer: Awaitable[Any]) -> None:
        try:
            said: tuple[bool, Any] = (True, await answer)
        except Exception as error:
            said = (False, error)
            if call == _UNANSWERED:
                logger.exception("a message on a direct connection failed")
        if call == _UNANSWERED:
            return
        try:
            pieces = encode(call, said)
        except NotDirect as plain:
            try:
                # cloudpickle supports more types, such as those of the user's `__main__`.
                pieces = _message(call, memoryview(cloudpickle.dumps(said)), [])
            except Exception:
                pieces = encode(call, (False, TypeError(f"cannot be sent: {plain}")))
        if self.is_open:
            self._write(pieces)


@contextlib.contextmanager
def _line() -> Iterator[socket.socket]:
    """Give a socket to a block, and close it if the block fails.

    Raises:
        OSError: there is none.
    """
    line = socket.socket(socket.AF_UNIX)
    line.setblocking(False)
    try:
        yield line
    except BaseException:
        line.close()
        raise


class Listener:
    """A socket for processes of this machine.

    Args:
        answer: coroutine function that gets each value that frontends send, and returns the answer.
    """

    def __init__(self, answer: Callable[[Any], Awaitable[Any]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer = answer
        self._open: set[_Answering] = set()
        self._line: socket.socket | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._said_at = -math.inf
        self.address = ""  # empty if nobody can connect

    async def begin(self) -> None:
        """Listen, if this system has such sockets."""
        if sys.platform != "linux":
            return
        address = f"ray-slo-{uuid4().hex}"
        try:
            with _line() as line:
                line.bind(f"\0{address}")
                line.listen(_BACKLOG)
        except OSError as error:
            logger.warning("direct connections are not possible; calls go through Ray: %r", error)
            return
        self._line, self.address = line, address
        self._listen()

    def _listen(self) -> None:
        if self._line is not None:
            self._loop.add_reader(self._line, self._accept, self._line)

    def _accept(self, listening: socket.socket) -> None:
        # A server of asyncio would log a hundred tracebacks per second while there are no
        # descriptors. One of uvloop would accept the connection and close it.
        try:
            line, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._loop.remove_reader(listening)
            self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
            if self._loop.time() - self._said_at > _SAY_AGAIN_S:
                self._said_at = self._loop.time()
                logger.warning("no direct connection can be accepted: %s", error)
            return
        line.setblocking(False)
        heard = self._loop.connect_accepted_socket(
            lambda: _Answering(self._answer, self._open), line
        )
        task = self._loop.create_task(heard)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def is_heard(self) -> bool:
        """Whether somebody is connected."""
        return bool(self._open)

    def close(self) -> None:
        if self._line is not None:
            self._loop.remove_reader(self._line)
            self._line.close()
            self._line = None
        for one in list(self._open):
            one.close()


async def connect(address: str, lent: Lent | None = None) -> Connection | None:
    """Return a connection to a listener, when it has answered. None if there is no such address on
    this machine, or no answer in time: a process without descriptors cannot accept a connection.

    Args:
        lent: memory for large parts of calls.
    """
    connection: Connection | None = None
    try:
        with _line() as line:
            line.connect(f"\0{address}")
            _, connection = await asyncio.get_running_loop().create_unix_connection(
                Connection, sock=line
            )
        await asyncio.wait_for(connection.share(lent), _HELLO_S)
    except (OSError, NotDirect, Disconnected, asyncio.TimeoutError):
        if connection is not None:
            connection.close()
        return None
    return connection
