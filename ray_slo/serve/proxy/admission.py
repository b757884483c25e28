"""The admission control in Serve's proxy (the door), for HTTP. Requests wait here before they cost
anything.

Small bodies are read here. So a slow client occupies no frontend, and a busy proxy does not look
like a slow client.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ray_slo.serve.deadlines import (
    ARRIVED_HEADER,
    BATCH_HEADER,
    CAPACITY_HEADER,
    LATENCY_HEADER,
    REFUSED_HEADER,
    WAY_HEADER,
    WHOLE_HEADER,
    TimeLimits,
    without,
)
from ray_slo.serve.errors import RefusedEarly, SLOError, http_response
from ray_slo.serve.frontend.http import body_of
from ray_slo.serve.proxy.door import ProxyDoor
from ray_slo.serve.proxy.gate import ClientLeft, Ticket
from ray_slo.serve.proxy.modes import stamp
from ray_slo.serve.proxy.places import Place, place_of
from ray_slo.serve.ray_private.addresses import Routes
from ray_slo.serve.ray_private.http_head import ARRIVAL, LEAVING

_CAPACITY, _BATCH = CAPACITY_HEADER.encode(), BATCH_HEADER.encode()
_LATENCY = LATENCY_HEADER.encode()  # header of an answer with the time in the frontend
_WHOLE, _REFUSED = WHOLE_HEADER.encode(), REFUSED_HEADER.encode()
_WAY = WAY_HEADER.encode()
_ARRIVED = ARRIVED_HEADER.encode()
_OF_THE_DOOR = {_CAPACITY, _BATCH}  # headers of answers
_SMALL_BYTES = 2**20
_HAS_BODY = {b"content-length", b"transfer-encoding"}
_LINGER_S = 2.0  # seconds to read the rest of a body after its request is answered

# Whether a frontend refused a request, by the status of the answer.
_OUTCOMES = {200: False, 503: True}


class AdmissionMiddleware:
    """Admits requests one by one, the earliest deadline first, and reads small bodies.

    Args:
        door: the door; default: a new one.
    """

    def __init__(self, app: Any, door: ProxyDoor | None = None) -> None:
        self._app = app
        self._door = door or ProxyDoor()
        self._routes = Routes(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = _declared(scope["headers"])
        if num_bytes is not None and num_bytes <= _SMALL_BYTES:
            await self._answer(scope, receive, send, num_bytes)
            return
        lingering = _Lingering(scope, receive, send)
        await self._answer(scope, lingering.receive, lingering.send, num_bytes)
        await lingering.finish()  # the request has left the door, so no other one waits for it

    async def _answer(self, scope: Any, receive: Any, send: Any, num_bytes: int | None) -> None:
        """Let a request wait for admission, and then be answered.

        Args:
            num_bytes: declared size of the body.
        """
        arrival = scope.get(ARRIVAL, time.monotonic())
        headers = without(scope["headers"], "door")
        place = place_of(self._routes, scope)
        slo_s = self._door.slo_s(place)
        left_s = TimeLimits(headers, proxied=False).budget_s(slo_s)
        is_small = num_bytes is not None and num_bytes <= _SMALL_BYTES
        is_batch = self._door.is_batch(place)
        whole = slo_s is not None and left_s is not None and is_small and not is_batch
        try:
            self._door.check(place, arrival, left_s)
            if whole:
                assert left_s is not None
                request = Request({**scope, "headers": headers}, receive)
                left_s_now = arrival + left_s - time.monotonic()
                try:
                    body = await body_of(request, _SMALL_BYTES, left_s_now)
                except RefusedEarly:
                    self._door.note_refused(place)
                    raise
                receive = _Replayed(body, receive)
            ticket = await self._door.enter(
                place,
                arrival,
                left_s,
                num_bytes=num_bytes or 0,
                is_json=_is_json(headers),
                leaving=scope.get(LEAVING),
            )
        except (ClientDisconnect, ClientLeft):
            return
        except SLOError as error:
            await http_response(error)(scope, receive, send)
            return
        try:
            headers.append((_WHOLE, b"1" if whole else b"0"))
            if refused := self._door.refused_before(place):
                headers.append((_REFUSED, str(refused).encode()))
            if way_s := self._door.way_s(place):
                headers.append((_WAY, f"{1e3 * way_s:.3f}".encode()))
            if is_batch:
                headers.append((_ARRIVED, stamp(time.monotonic() - arrival).encode()))
            # Serve pickles the scope for a replica, which has no use for these functions.
            scope = {**scope, "headers": headers, ARRIVAL: arrival, LEAVING: []}
            await self._app(scope, receive, self._watched(send, place, ticket))
        finally:
            self._door.leave(ticket)

    def _watched(self, send: Any, place: Place, ticket: Ticket) -> Any:
        """Return `send` without the header with the capacity, which is not for the client. The
        request leaves the door just before the end of its answer, so that the client's next request
        does not find it there."""
        let_in = time.monotonic()
        status = 0

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                found = {name.lower(): value for name, value in message.get("headers", ())}
                took_s = time.monotonic() - let_in if status == 200 else None
                if (said := found.get(_CAPACITY)) is not None:
                    inside = found.get(_LATENCY)
                    inside_s = None if inside is None else float(inside) / 1e3
                    self._door.heard(place, said.decode(), took_s, inside_s)
                elif (said := found.get(_BATCH)) is not None:
                    self._door.heard_of_batch(place, said.decode())
                if said is not None:
                    rest = [h for h in message["headers"] if h[0].lower() not in _OF_THE_DOOR]
                    message = {**message, "headers": rest}
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                self._door.leave(ticket, _OUTCOMES.get(status))
            await send(message)

        return watched


def _declared(headers: Any) -> int | None:
    """Return the declared size of a body, in bytes, or None."""
    declared = dict(headers).get(b"content-length", b"")
    return int(declared[:18]) if declared.isdigit() else None


def _is_json(headers: Any) -> bool:
    return b"json" in dict(headers).get(b"content-type", b"").lower()


class _Lingering:
    """`receive` and `send` of a request with a large body. Its client may get the answer while it
    is still sending. If a connection is closed with unread data, the answer is lost. So the end of
    the answer waits until `finish` has read the rest."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        names = {name for name, _ in scope["headers"]}
        # A client that sends the header "expect" waits for permission to send the body.
        self._more = bool(names & _HAS_BODY) and b"expect" not in names
        self._receive, self._send = receive, send
        self._owes_end = False

    async def receive(self) -> Any:
        message = await self._receive()
        self._more = self._more and bool(message.get("more_body"))
        return message

    async def send(self, message: Any) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if is_last and self._more:
            self._owes_end = True
            message = {**message, "more_body": True}  # sent now; `finish` ends the answer
        await self._send(message)

    async def finish(self) -> None:
        """Read the rest of the body, for two seconds at most, and end the answer."""
        if not self._owes_end:
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._rest(), _LINGER_S)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _rest(self) -> None:
        while self._more:
            await self.receive()


class _Replayed:
    """The `receive` of a request whose body was already read."""

    def __init__(self, body: bytes, receive: Any) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Any:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()
