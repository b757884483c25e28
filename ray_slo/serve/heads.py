"""Bounds on what comes before a request is one: Serve's HTTP server keeps a head, that is the
request line and the headers, in memory until it ends, however long it is and takes to come.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http import auto

MAX_HEAD_BYTES = 262_144
MAX_HEAD_S = 30.0


def bounded(protocol: type[Any]) -> type[Any]:
    """uvicorn's `HttpToolsProtocol`, hanging up on a head that is too large or too slow."""

    class Bounded(protocol):
        _head_bytes: int | None = 0  # of the head that is coming; None while there is none
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._have_head()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait_for_head()

        def on_headers_complete(self) -> None:
            self._have_head()
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head_bytes is not None:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._hang_up()

        def _wait_for_head(self) -> None:
            self._have_head()
            self._head_bytes = 0
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


def bound_heads() -> None:
    """Have the HTTP server that this process starts next bound heads.

    Does nothing where httptools is not installed: h11, which uvicorn takes then, has a bound.
    """
    current: Any = auto.AutoHTTPProtocol
    if current.__name__ == "HttpToolsProtocol":
        auto.AutoHTTPProtocol = bounded(current)
