"""In Serve's proxy: requests wait at a door before they cost anything (`gate`), and small bodies
are read here, so that a slow client occupies no frontend, and a busy proxy is not taken for one.

What a frontend can do it says in a header of its answers (`CAPACITY_HEADER`), which goes no further
than here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from ray_slo.serve.errors import SLOError, http_response
from ray_slo.serve.failover import named_s
from ray_slo.serve.gate import Door
from ray_slo.serve.heads import ARRIVAL
from ray_slo.serve.reading import slow_body, within_s
from ray_slo.serve.request_context import CAPACITY_HEADER, LATENCY_HEADER, WHOLE_HEADER

_CAPACITY = CAPACITY_HEADER.encode()
_LATENCY = LATENCY_HEADER.encode()  # of an answer: what the frontend took
_WHOLE = WHOLE_HEADER.encode()
_ORDERED_BY_S = 1.0  # of a request whose deadline is not known
_PLACES_KEPT = 1024
_SMALL_BYTES = 2**20
_WAY_S, _WAY_OF_SLO = 0.05, 0.15  # to a frontend and back, beyond which the proxy is too busy
# Requests on their way at a time: at first, least, most; by how much more per answer, by what
# factor fewer.
_FIRST, _LEAST, _MOST, _MORE, _FEWER = 64.0, 16.0, 2000.0, 0.5, 0.8
_LEAST_OF_SLO = 0.25  # so much is the least time at most: what was slow may be quick again
_FORGET = 1.01  # per answer: the least time is of the latest hundred or so


class _Place(NamedTuple):
    """What answers from a path have shown.

    Attributes:
        rate: requests/s that its workers can do.
        most: requests that its frontends keep.
        slo_s: of its model.
        least_s: from the door to the answer.
    """

    rate: float
    most: int
    slo_s: float
    least_s: float


class AdmissionMiddleware:
    """Lets requests in one by one, the earliest deadline first, with small bodies read."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._door = Door()
        self._door.gate.window = _FIRST
        self._cut_at = 0.0
        self._places: dict[str, _Place] = {}  # by path; of applications of ours

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival = scope.get(ARRIVAL, time.monotonic())
        path, headers = scope["path"], [h for h in scope["headers"] if h[0] != _WHOLE]
        place = self._places.get(path)
        budget_s = named_s(headers)
        if budget_s is None and place is not None:
            budget_s = place.slo_s
        whole = place is not None and budget_s is not None and _is_small(headers)
        try:
            if whole:
                assert budget_s is not None
                left_s = arrival + budget_s - time.monotonic()
                if (body := await _body(receive, left_s)) is None:
                    return  # the client has left
                receive = _Replayed(body, receive)
            ticket = await self._door.enter(
                arrival + (_ORDERED_BY_S if budget_s is None else budget_s),
                rate=None if place is None else place.rate,
                most=None if place is None else place.most,
                least_s=0.0 if place is None else place.least_s,
                may_refuse=place is not None,
            )
        except SLOError as error:
            await http_response(error)(scope, receive, send)
            return
        try:
            headers.append((_WHOLE, b"1" if whole else b"0"))
            scope = {**scope, "headers": headers, ARRIVAL: arrival}
            let_in = time.monotonic()
            await self._app(scope, receive, self._watched(send, path, let_in))
        finally:
            self._door.leave(ticket)

    def _watched(self, send: Any, path: str, let_in: float) -> Any:
        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                said = [value for name, value in headers if name.lower() == _CAPACITY]
                if said:
                    rest = [h for h in headers if h[0].lower() != _CAPACITY]
                    message = {**message, "headers": rest}
                    took_s = time.monotonic() - let_in
                    self._learn(path, said[0], took_s if message["status"] == 200 else None)
                    for name, value in rest:
                        if name.lower() == _LATENCY:
                            self._adapt(path, took_s, float(value) / 1e3)
            await send(message)

        return watched

    def _adapt(self, path: str, took_s: float, inside_s: float) -> None:
        """Fewer at a time when the way to the frontend and back takes long, else more.

        Args:
            inside_s: what the frontend itself took, with its workers.
        """
        gate, now = self._door.gate, time.monotonic()
        if took_s - inside_s <= max(_WAY_S, _WAY_OF_SLO * self._places[path].slo_s):
            gate.window = min(gate.window + _MORE, _MOST)
        elif now - self._cut_at > took_s:  # what was let in before the last cut says nothing new
            gate.window, self._cut_at = max(_FEWER * gate.window, _LEAST), now

    def _learn(self, path: str, said: bytes, took_s: float | None) -> None:
        rate, slo_ms, most = map(float, said.split(b";"))
        known = self._places.pop(path, None)
        least_s = 0.0 if known is None else known.least_s
        if took_s is not None:
            least_s = took_s if not least_s else min(_FORGET * least_s, took_s)
        least_s = min(least_s, _LEAST_OF_SLO * slo_ms / 1e3)
        self._places[path] = _Place(rate, int(most), slo_ms / 1e3, least_s)
        if len(self._places) > _PLACES_KEPT:
            del self._places[next(iter(self._places))]


def _is_small(headers: Any) -> bool:
    """Whether a body says that it is; a large one may be refused without being read."""
    declared = dict(headers).get(b"content-length", b"")
    return declared.isdigit() and len(declared) < 10 and int(declared) <= _SMALL_BYTES


class _Replayed:
    """`receive` of a request whose body was read before."""

    def __init__(self, body: bytes, receive: Any) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Any:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


async def _body(receive: Any, left_s: float) -> bytes | None:
    """The body of a request; None where the client has left.

    Raises:
        SlowBody: the client took too long.
    """
    body = bytearray()

    async def read() -> bool:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            body.extend(message.get("body", b""))
            more = message.get("more_body", False)
        return True

    limit_s = within_s(left_s)
    reading = asyncio.ensure_future(read())
    try:
        await asyncio.wait([reading], timeout=limit_s)
        if not reading.done():
            raise slow_body(len(body), limit_s)
        return bytes(body) if reading.result() else None
    finally:
        reading.cancel()
