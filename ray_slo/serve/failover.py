"""Middleware for Serve's HTTP proxy: callers hear something when no frontend answers them.

A frontend that dies takes along the requests that it owned, and Serve's proxy, which has nothing to
send then, leaves a bare 500. Here the request is sent again, to another frontend and with what is
left of its time, as it would be if a worker had died; else it is a 503 with a reason. While there
is no frontend at all, Serve's proxy waits for one: a request that names its deadline is answered
504 within a second after it.
"""

from __future__ import annotations

import math
import time
from typing import Any

from starlette.responses import JSONResponse

_LATENCY = b"x-slo-latency-ms"  # the client's own SLO
_TIMEOUT = b"x-slo-timeout-ms"  # the client's timeout, as `DeadlineMiddleware` passes it on
_SERVES = b"x-request-timeout-seconds"  # when Serve's proxy gives up and answers 408
_GRACE_S = 0.9  # frontends have answered by then, and a caller hears within a second
_EARLY_S = 0.02  # of Serve's timer
_TRIES = 3
_PATHS_KEPT = 1024


class FailoverMiddleware:
    """Sends a request again whose frontend died, and says why where that is no use."""

    def __init__(self, app: Any) -> None:
        self._app = app
        # Where an application of ours has answered: another's requests are not to be repeated.
        self._ours: dict[str, None] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival = time.monotonic()
        exchange = _Exchange(receive, send, _budget_s(scope["headers"]))
        path = scope["path"]
        for i in range(_TRIES):
            exchange.again()
            spent_s = time.monotonic() - arrival if i else 0.0
            if exchange.budget_s is not None and spent_s >= exchange.budget_s:
                break
            again = {**scope, "headers": _with_what_is_left(scope["headers"], spent_s)}
            await self._app(again, exchange.receive, exchange.send)
            if exchange.ours:
                self._know(path)
            if exchange.started or exchange.client_left:
                return
            if exchange.timed_out or path not in self._ours:
                break
        if exchange.timed_out:
            await exchange.expired()
        else:
            said = "the frontend died with the request, and no time is left for another"
            await exchange.refuse(503, "FrontendLost", "frontend_lost", said)

    def _know(self, path: str) -> None:
        if path not in self._ours:
            self._ours[path] = None
            if len(self._ours) > _PATHS_KEPT:
                del self._ours[next(iter(self._ours))]


class _Exchange:
    """What the client sends, so that it can be sent again, and what it is sent."""

    def __init__(self, receive: Any, send: Any, budget_s: float | None) -> None:
        self._receive, self._send = receive, send
        self.budget_s = budget_s
        self._arrival = time.monotonic()
        self._body: list[Any] = []
        self.replayed = 0
        self._held: Any = None  # the start of an answer whose body has not come
        self.client_left = self.started = self.ours = self._muted = False

    def again(self) -> None:
        self._held, self.replayed = None, 0

    async def receive(self) -> Any:
        if self.replayed < len(self._body):
            self.replayed += 1
            return self._body[self.replayed - 1]
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
        else:
            self._body.append(message)
            self.replayed += 1
        return message

    @property
    def timed_out(self) -> bool:
        """Whether Serve's proxy has given up by now."""
        waited_s = time.monotonic() - self._arrival
        return self.budget_s is not None and waited_s >= self.budget_s + _GRACE_S - _EARLY_S

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self.ours = any(name.startswith(b"x-slo-") for name in names)
            if message["status"] == 408 and self.timed_out:  # else it is the application's own
                self.started = self._muted = True
                await self.expired()
            elif b"content-length" in names:
                # Serve's proxy may give up between this and the body, and send neither.
                self._held = message
            else:
                self.started = True
                await self._send(message)
            return
        if self._muted:
            return
        if (held := self._held) is not None:
            self._held, self.started = None, True
            await self._send(held)
        await self._send(message)

    async def expired(self) -> None:
        said = f"no frontend answered within {_GRACE_S:g} s after the deadline"
        await self.refuse(504, "Expired", "expired", said)

    async def refuse(self, status: int, error: str, reason: str, said: str) -> None:
        body = {"error": error, "reason": reason, "message": said}
        headers = {"retry-after": "1"} if status == 503 else None
        answer = JSONResponse(body, status, headers)
        await answer({"type": "http"}, self._receive, self._send)


def _budget_s(headers: Any) -> float | None:
    """Until the deadline, where the client has named one."""
    found = dict(headers)
    for name in (_LATENCY, _TIMEOUT):
        if (left_ms := _positive(found.get(name, b""))) is not None:
            return left_ms / 1e3
    return None


def _with_what_is_left(headers: Any, spent_s: float) -> list[tuple[bytes, bytes]]:
    budget_s = _budget_s(headers)
    if budget_s is None:
        return list(headers)
    left = []
    for name, value in headers:
        if name == _SERVES:
            continue
        if name in (_LATENCY, _TIMEOUT) and spent_s and (ms := _positive(value)) is not None:
            value = repr(max(ms - 1e3 * spent_s, 1.0)).encode()
        left.append((name, value))
    left.append((_SERVES, repr(budget_s - spent_s + _GRACE_S).encode()))
    return left


def _positive(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 and math.isfinite(value) else None
