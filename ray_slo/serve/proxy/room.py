"""A bound on the number of HTTP connections, so that a process keeps descriptors for other files.

Without it, clients that hold thousands of idle connections take all of them. Then uvicorn closes
new connections without an answer, and the process cannot open anything.
"""

from __future__ import annotations

import math
import resource
import weakref
from typing import Any

from starlette.responses import Response

from ray_slo.serve.ray_private.http_head import in_parts

SHARE = 0.5  # largest share of a process's descriptors for connections of HTTP
GRPC_SHARE = 0.25  # the same of gRPC; its own server keeps to it
IDLE_S = 1.0  # a connection without a request for this time gives way to a new one
_REFUSED_S = 1.0  # seconds for the request of a connection without room


def most(share: float) -> float:
    """Return a share of the descriptors that this process may have."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if files == resource.RLIM_INFINITY else int(share * files)


class _Connections:
    """The connections of a server."""

    def __init__(self) -> None:
        # Weak, because a WebSocket takes the connection away from its protocol.
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._idle: dict[Any, float] = {}  # since when, by the loop's clock; the longest first

    def have_room(self, one: Any) -> bool:
        """Take a connection. If there are too many, close the one that has been idle longest.
        Return False if none has been idle for long."""
        if len(self._open) >= most(SHARE):
            first = next(iter(self._idle), None)
            if first is None or one.loop.time() - self._idle[first] < IDLE_S:
                return False
            self.left(first)
            first.transport.close()
        self._open.add(one)
        self.idle(one)
        return True

    def idle(self, one: Any) -> None:
        """Note that a connection has no request."""
        if one in self._open:
            self._idle[one] = one.loop.time()

    def busy(self, one: Any) -> None:
        """Note that a connection has a request."""
        self._idle.pop(one, None)

    def left(self, one: Any) -> None:
        """Note that a connection is closed."""
        self._open.discard(one)
        self._idle.pop(one, None)


def with_room(protocol: type[Any], full: Response) -> type[Any]:
    """Return uvicorn's `HttpToolsProtocol` with a bound on the number of connections. Beyond it,
    the one that has been idle longest is closed.

    Args:
        full: answer to the request of a new connection, if none has been idle for a second.
    """
    connections = _Connections()
    refusal = b"".join(in_parts(full, [*full.raw_headers, (b"connection", b"close")]))

    class Roomy(protocol):
        _has_room = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._has_room = connections.have_room(self)
            if not self._has_room:
                self.loop.call_later(_REFUSED_S, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.left(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._has_room:
                super().data_received(data)
            elif not self.transport.is_closing():
                self.transport.write(refusal)
                self.transport.close()

        def on_headers_complete(self) -> None:
            connections.busy(self)
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # otherwise the next request is here already
                connections.idle(self)

    return Roomy
