"""Failover in Serve's proxies: the rules for HTTP and gRPC (`grpc`), and the middleware for HTTP.

When a frontend dies, its requests are lost. Serve's proxies can only answer them with 500, or
INTERNAL, without a reason. This module sends such a request to another frontend, with the rest of
its time, as when a worker dies. If that is not possible, the answer has a reason.

While there is no frontend, Serve's proxies would wait forever. With this module, a request is
answered at most one second after its deadline. The deadline is its own, or follows from the SLO
that earlier answers of its place contained. That SLO may have changed: after a request without an
answer, the proxy asks the application for it (`_Question`).

For Serve, `x-request-timeout-seconds` means "cancel and answer 408 after this time". So a request
with a short deadline would end before there is a reason. The application gets that value under
another name, and Serve gets a later time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray_slo.core.environment import FRONTEND_WAIT_S
from ray_slo.core.recent import Recent
from ray_slo.core.seldom import Seldom
from ray_slo.serve.deadlines import (
    ANSWERED_S,
    ARRIVED_HEADER,
    ATTEMPT_HEADER,
    CAPACITY_HEADER,
    CLASS_HEADER,
    KNOWN_HEADER,
    MARK_HEADER,
    NO_PLACE,
    TIMEOUT_HEADER,
    WHOLE_HEADER,
    TimeLimits,
    positive,
    spent,
    without,
)
from ray_slo.serve.errors import Expired, FrontendLost, SLOError, http_response
from ray_slo.serve.proxy.gate import PLACES_KEPT
from ray_slo.serve.proxy.modes import believes
from ray_slo.serve.proxy.places import Place, place_of
from ray_slo.serve.ray_private.addresses import Routes
from ray_slo.serve.ray_private.http_head import ARRIVAL
from ray_slo.serve.suspects import is_suspect, new_attempt

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

TRIES = 3
_EARLY_S = 0.02  # Serve's timer may fire this much too early

WAITED_S = 0.002  # shorter waits before this middleware are not subtracted

_TIMEOUT, _ARRIVED = TIMEOUT_HEADER.encode(), ARRIVED_HEADER.encode()
_ATTEMPT = ATTEMPT_HEADER.encode()
_CAPACITY, _CLASS, _KNOWN = CAPACITY_HEADER.encode(), CLASS_HEADER.encode(), KNOWN_HEADER.encode()
_WHOLE, _MARK = WHOLE_HEADER.encode(), MARK_HEADER.encode()
# Serve's own text, without a reason for programs, while an application is deployed again.
_UNAVAILABLE = b" is unavailable because it failed to deploy"
# Why a frontend is lost, in the words of `FrontendLost`.
LOST = "the frontend died with the request, and no other could take it"
ELSEWHERE = "the frontend is gone, and another cluster has its port now"
REPLACED = "no frontend is up: the application is being deployed again, or deleted"
SUSPECT = (
    "the frontend ended while preprocess or postprocess of this request ran, which may be why; "
    "it was not sent to another"
)


class Places:
    """Places where applications of ray-slo have answered, and the time to wait there."""

    def __init__(self) -> None:
        self._wait_s = FRONTEND_WAIT_S.read()
        self._slo_s: Recent[Place, float | None] = Recent(PLACES_KEPT)
        self._asking: dict[Place, asyncio.Future[Any]] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._slo_s

    def answered(self, place: Place, slo_s: float | None) -> None:
        """Note that an application of ray-slo answered there.

        Args:
            slo_s: its model's SLO in seconds, if the answer contains it.
        """
        known = self._slo_s.get(place)
        self._slo_s[place] = known if slo_s is None else slo_s

    def slo_s(self, place: Place) -> float | None:
        """Return the model's SLO in seconds, if it is known."""
        return self._slo_s.get(place)

    def limit_s(self, place: Place, budget_s: float | None) -> float | None:
        """Return the longest wait for a request's answer, in seconds. None: no limit.

        Args:
            budget_s: time until the request's own deadline, in seconds.
        """
        if budget_s is not None:
            return budget_s + ANSWERED_S
        slo_s = self._slo_s.get(place)
        return None if slo_s is None else slo_s + ANSWERED_S

    def silent(
        self, place: Place, limit_s: float, ask: Callable[[], Awaitable[float | None]]
    ) -> SLOError:
        """Return the error for a request without an answer in this time. If the place is known, ask
        for its SLO: a longer one would never be heard of otherwise.

        Args:
            ask: function that asks an application for the SLO of its model, in seconds. It may wait
                for a frontend as long as `FRONTEND_WAIT_S`.
        """
        if place in self._slo_s and place not in self._asking:
            self._asking[place] = asyncio.ensure_future(self._asked(place, ask))
        return Expired(f"no frontend answered within {limit_s:.4g} s")

    async def _asked(self, place: Place, ask: Callable[[], Awaitable[float | None]]) -> None:
        try:
            slo_s = await asyncio.wait_for(ask(), self._wait_s)
            if slo_s is not None:
                self.answered(place, slo_s)
        except Exception as error:
            logger.info("no frontend says the SLO of %s: %r", place, error)
        finally:
            del self._asking[place]


def slo_in(capacity: str) -> float | None:
    """Return the SLO in a frontend's capacity header, in seconds."""
    found = positive(capacity.partition(";")[2].partition(";")[0])
    return None if found is None else found / 1e3


class FailoverMiddleware:
    """Passes clients' timeouts to applications, and sends a request again when its frontend died.
    If that does not help, the answer has the reason."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._ours = Places()  # requests of other applications must not be repeated
        self._routes = Routes(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, said = without(scope["headers"], "failover", "mark"), dict(scope["headers"])
        place = place_of(self._routes, scope)
        known_ms = positive(said.get(_KNOWN))
        if known_ms is not None and believes(said.get(_MARK, b"")):
            self._ours.answered(place, known_ms / 1e3)
        budget_s = TimeLimits(headers).named_s()
        limit_s = None
        if budget_s is not None or _TIMEOUT not in dict(headers):  # 0: the client wants to wait
            limit_s = self._ours.limit_s(place, budget_s)
        exchange = _Exchange(
            receive, send, limit_s, scope.get(ARRIVAL), is_ours=place in self._ours
        )
        for i in range(TRIES):
            exchange.again()
            waited_s = exchange.waited_s
            spent_s = waited_s if i > 0 or waited_s > WAITED_S else 0.0
            if _ARRIVED in said and place not in self._ours:
                spent_s = 0.0  # a function with `@ray_slo.batch` subtracts the time since then
            if i and budget_s is not None and spent_s >= budget_s:
                break
            # The model's SLO counts from the time when the proxy has the request.
            slo_s = self._ours.slo_s(place) if budget_s is None and spent_s else None
            told = spent(headers, spent_s, None if slo_s is None else slo_s - spent_s)
            if limit_s is not None and all(name != _TIMEOUT for name, _ in told):
                told.append((_TIMEOUT, repr(max(limit_s - spent_s, 1e-3)).encode()))
            attempt = new_attempt() if place in self._ours else ""
            if attempt:
                told.append((_ATTEMPT, attempt.encode()))
            again = {**scope, "headers": told}
            await self._app(again, exchange.receive, exchange.send)
            if exchange.ours and not exchange.is_nowhere:
                self._ours.answered(place, exchange.slo_s)
            if exchange.started or exchange.client_left:
                return
            if exchange.replaced:
                await exchange.refuse(FrontendLost(REPLACED))
                return
            if exchange.timed_out or place not in self._ours:
                break
            if is_suspect(attempt):
                await exchange.refuse(FrontendLost(SUSPECT))
                return
        if limit_s is not None and exchange.timed_out:
            question = _Question(self._app, scope)
            await exchange.refuse(self._ours.silent(place, limit_s, question.slo_s))
        else:
            await exchange.refuse(FrontendLost(LOST))


class _Exchange:
    """The client's messages, kept so that they can be sent again, and the messages to the
    client."""

    def __init__(
        self,
        receive: Any,
        send: Any,
        limit_s: float | None,
        arrival: float | None,
        *,
        is_ours: bool,
    ) -> None:
        self._receive, self._send = receive, send
        self._limit_s = limit_s
        self._is_ours = is_ours
        self._arrival = time.monotonic() if arrival is None else arrival
        self._body: list[Any] = []
        self._replayed = 0
        self._held: Any = None  # the start of an answer without its body
        self._muted = False
        self.client_left = self.started = self.ours = self.replaced = self.is_nowhere = False
        self.slo_s: float | None = None

    def again(self) -> None:
        self._held, self._replayed = None, 0
        self._muted = False

    async def receive(self) -> Any:
        if self._replayed < len(self._body):
            self._replayed += 1
            return self._body[self._replayed - 1]
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
        else:
            self._body.append(message)
            self._replayed += 1
        return message

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._arrival

    @property
    def timed_out(self) -> bool:
        """Whether Serve's proxy has already given up."""
        return self._limit_s is not None and self.waited_s >= self._limit_s - _EARLY_S

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self.ours = any(name.startswith(b"x-slo-") for name in headers)
            said = headers.get(_CAPACITY)
            self.slo_s = None if said is None else slo_in(said.decode())
            self.is_nowhere = said == NO_PLACE.encode()
            if message["status"] == 408 and self.timed_out:  # otherwise the application sent it
                self._muted = True
            elif b"content-length" in headers or (
                message["status"] == 503 and self._is_ours and not self.ours
            ):
                # Serve's proxy may give up between this and the body, and send neither. Or the body
                # says that there is no frontend.
                self._held = message
            else:
                self.started = True
                await self._send(message)
            return
        if self._held is not None and self._is_ours and not self.ours:
            self.replaced = self._held["status"] == 503 and _UNAVAILABLE in message.get("body", b"")
        if self._muted or self.replaced:
            return
        if (held := self._held) is not None:
            self._held, self.started = None, True
            await self._send(held)
        await self._send(message)

    async def refuse(self, error: SLOError) -> None:
        await http_response(error)({"type": "http"}, self._receive, self._send)


class _Question:
    """Asks an application for the SLO of a place, with a GET request to the path of another one."""

    def __init__(self, app: Any, scope: Any) -> None:
        self._app = app
        named = [pair for pair in scope["headers"] if pair[0] == _CLASS]
        self._scope = {**scope, "method": "GET", "headers": [*named, (_WHOLE, b"1")]}
        self._is_sent = False
        self._slo_s: float | None = None

    async def slo_s(self) -> float | None:
        """Return the SLO in seconds, when a frontend has answered. None if it does not say."""
        await self._app(self._scope, self._receive, self._send)
        return self._slo_s

    async def _receive(self) -> Any:
        if self._is_sent:
            await asyncio.Event().wait()  # Serve waits here for the client to leave
        self._is_sent = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Any) -> None:
        said = {name.lower(): value for name, value in message.get("headers", ())}
        if (capacity := said.get(_CAPACITY)) is not None:
            self._slo_s = slo_in(capacity.decode())
