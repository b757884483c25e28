"""Admission and failover for gRPC, in Serve's proxy. Every attempt is one call of Serve's handler.
(`admission` and `http` do this for HTTP.)

Serve has no middleware for gRPC. `ray_private.grpc_server` wraps its handlers and reports the
exception of a failed call, because a status does not show that a replica died (`notice_death`).
"""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from grpc import StatusCode
from ray.exceptions import RayActorError

from ray_slo.serve.deadlines import (
    ATTEMPT_HEADER,
    CAPACITY_HEADER,
    MARK_HEADER,
    NO_PLACE,
    REFUSED_HEADER,
    WAY_HEADER,
    TimeLimits,
    left_ms,
    positive,
    spent,
    tightest,
    without,
)
from ray_slo.serve.errors import Expired, FrontendLost
from ray_slo.serve.protos import InferReply, InferRequest
from ray_slo.serve.proxy.direct import before_s
from ray_slo.serve.proxy.door import ProxyDoor
from ray_slo.serve.proxy.http import LOST, SUSPECT, TRIES, WAITED_S, Places, slo_in
from ray_slo.serve.proxy.modes import believes
from ray_slo.serve.proxy.places import Place, place_of_call
from ray_slo.serve.ray_private.addresses import Routes
from ray_slo.serve.ray_private.grpc_server import Handle
from ray_slo.serve.suspects import is_suspect, new_attempt

MESSAGE_OVERHEAD = 4096  # bytes of a message, in addition to the item


class WithDeadline:
    """A call's context with the remaining time in its metadata.

    Args:
        spent_s: time before this attempt, in seconds.
        slo_s: the model's SLO in seconds, if the call has no deadline.
    """

    def __init__(self, context: Any, spent_s: float = 0.0, slo_s: float | None = None) -> None:
        self._context = context
        own_s = slo_s - spent_s if slo_s is not None and spent_s else None
        metadata = without(context.invocation_metadata() or (), "door", "failover", "mark")
        self._metadata = spent(metadata, spent_s, tightest(own_s, context.time_remaining()))

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return tuple(self._metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Attempt(WithDeadline):
    """The context of one attempt. Its values reach the client only through `settle`.

    Attributes:
        died: whether the replica died.
        id: id of the attempt; see `suspects`.
    """

    def __init__(
        self,
        context: Any,
        spent_s: float,
        slo_s: float | None = None,
        refused: int = 0,
        name: str = "",
        way_s: float = 0.0,
    ) -> None:
        super().__init__(context, spent_s, slo_s)
        self.id = name or new_attempt()
        self._metadata.append((ATTEMPT_HEADER, self.id))
        if refused:
            self._metadata.append((REFUSED_HEADER, str(refused)))
        if way_s:
            self._metadata.append((WAY_HEADER, f"{1e3 * way_s:.3f}"))
        self.died = False
        self._code: Any = None
        self._details = ""
        self._trailing: Any = ()

    def code(self) -> Any:
        return self._code

    def set_code(self, code: Any) -> None:
        self._code = code

    def details(self) -> str:
        return self._details

    def set_details(self, details: str) -> None:
        self._details = details

    def trailing_metadata(self) -> Any:
        return self._trailing

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailing = metadata

    @property
    def capacity(self) -> str | None:
        """The capacity that the frontend reported."""
        said: str | None = dict(self._trailing or ()).get(CAPACITY_HEADER)
        return said

    @property
    def was_refused(self) -> bool | None:
        """Whether a frontend refused the call. None if it failed in another way."""
        if self._code is None:
            return False
        return True if self._code is StatusCode.RESOURCE_EXHAUSTED else None

    def settle(self) -> None:
        if self._code is not None:
            self._context.set_code(self._code)
        self._context.set_details(self._details)
        told = [(name, value) for name, value in self._trailing or () if name != CAPACITY_HEADER]
        self._context.set_trailing_metadata(told)


@dataclass(frozen=True)
class _Call:
    """A client's call.

    Attributes:
        arrival: `time.monotonic()` seconds.
        budget_s: time from the call's arrival to the client's deadline, in seconds. None: the
            client has none.
        slo_s: the model's SLO in seconds, if the client has no deadline and the SLO is known.
        attempt: HAProxy's id of the call. It stays the same when HAProxy sends the call again.
    """

    request: Any
    context: Any
    arrival: float
    place: Place
    budget_s: float | None
    slo_s: float | None
    attempt: str = ""


class Failover:
    """Passes calls of `ray_slo.v1.Inference` through the door, and repeats them when their frontend
    died.

    Args:
        door: the door; default: a new one.
        routes: Serve's applications; default: they are not known.
    """

    def __init__(self, door: ProxyDoor | None = None, routes: Routes | None = None) -> None:
        self._ours = Places()
        self._routes = routes or Routes(None)
        self._door = door or ProxyDoor()

    async def __call__(self, handle: Handle, request: Any, context: Any) -> Any:
        """Return a frontend's answer, serialized.

        Raises:
            FrontendLost, Expired: no frontend answers.
            RefusedEarly: the call would be late.
            BodyTooLarge: its item is too large.
        """
        call = self._call(request, context)
        ticket = await self._door.enter(
            call.place,
            call.arrival,
            tightest(call.budget_s, call.slo_s),
            num_bytes=request.ByteSize() - MESSAGE_OVERHEAD,
            is_json=isinstance(request, InferRequest) and request.HasField("json"),
            is_ours=True,
        )
        was_refused = None
        try:
            answer, was_refused = await self._sent(handle, call)
            return answer
        finally:
            self._door.leave(ticket, was_refused)

    def _call(self, request: Any, context: Any) -> _Call:
        metadata = context.invocation_metadata() or ()
        said = dict(metadata)
        came_before_s = before_s(said)
        is_infer = isinstance(request, InferRequest)
        model = request.model if is_infer else ""
        place = place_of_call(self._routes, said.get("application", ""), model, metadata)
        limits = TimeLimits(metadata, proxied=False)
        own_s = limits.own_s()
        if is_infer and request.HasField("latency_slo_ms"):
            own_ms = positive(request.latency_slo_ms)
            own_s = None if own_ms is None else own_ms / 1e3
        budget_s = tightest(own_s, context.time_remaining(), limits.timeout_s())
        slo_s = self._door.slo_s(place) if own_s is None else None
        attempt = said.get(ATTEMPT_HEADER, "") if believes(said.get(MARK_HEADER, "")) else ""
        arrival = time.monotonic() - came_before_s
        return _Call(request, context, arrival, place, budget_s, slo_s, attempt)

    async def _sent(self, handle: Handle, call: _Call) -> tuple[Any, bool | None]:
        """Return a frontend's answer, and `Attempt.was_refused`."""
        place, budget_s = call.place, call.budget_s
        limit_s = self._ours.limit_s(place, budget_s)
        for i in range(TRIES):
            let_in = time.monotonic()
            spent_s = let_in - call.arrival
            if spent_s <= WAITED_S:
                spent_s = 0.0
            if budget_s is not None and spent_s >= budget_s:
                if i:
                    raise FrontendLost(LOST)
                raise Expired("its deadline passed while it waited for admission")
            refused = self._door.refused_before(place)
            known = refused, call.attempt, self._door.way_s(place)
            attempt = Attempt(call.context, spent_s, call.slo_s, *known)
            left_s = None if limit_s is None else limit_s - spent_s
            answer = await _within(left_s, handle, _with_less(call.request, spent_s), attempt)
            if limit_s is not None and answer is None:
                question = _Question(handle, call)
                raise self._ours.silent(place, limit_s, question.slo_s)
            is_reply = bool(answer) and isinstance(call.request, InferRequest)
            reply = InferReply.FromString(answer) if is_reply else None
            if (said := attempt.capacity) is not None:
                took_s = time.monotonic() - let_in if answer else None
                inside_s = None if reply is None else reply.latency_ms / 1e3
                self._door.heard(place, said, took_s, inside_s)
                if said != NO_PLACE:
                    self._ours.answered(place, slo_in(said))
            if not attempt.died:
                attempt.settle()
                return answer, attempt.was_refused
            if is_suspect(attempt.id):
                raise FrontendLost(SUSPECT)
        raise FrontendLost(LOST)


class _Question:
    """Asks an application for the SLO of a place, with a call without an item. The frontend refuses
    it, and says its capacity.

    Args:
        call: another call to the place, with the metadata that Serve needs.
    """

    def __init__(self, handle: Handle, call: _Call) -> None:
        self._handle = handle
        self._model = call.place.name
        self._attempt = Attempt(call.context, 0.0)

    async def slo_s(self) -> float | None:
        """Return the SLO in seconds, when a frontend has answered. None if it does not say."""
        await _within(None, self._handle, InferRequest(model=self._model), self._attempt)
        return None if (said := self._attempt.capacity) is None else slo_in(said)


_attempt: ContextVar[Attempt | None] = ContextVar("ray_slo_attempt", default=None)


def notice_death(error: BaseException) -> None:
    """Note that a call of this context failed with an error."""
    if (attempt := _attempt.get()) is not None and isinstance(error, RayActorError):
        attempt.died = True


async def _within(left_s: float | None, handle: Handle, request: Any, attempt: Attempt) -> Any:
    """Return the handler's answer, or None if it took longer than `left_s`."""
    _attempt.set(attempt)
    if left_s is None:
        return await handle(request, attempt)
    # `wait_for` does not work here: Serve's handlers return a value when they are cancelled.
    calling = asyncio.ensure_future(handle(request, attempt))
    try:
        done, _ = await asyncio.wait({calling}, timeout=max(left_s, 0.0))
    finally:
        calling.cancel()
    return calling.result() if done else None


def _with_less(request: Any, spent_s: float) -> Any:
    if not (spent_s and isinstance(request, InferRequest) and request.latency_slo_ms > 0):
        return request  # the application refuses an invalid SLO
    left = InferRequest()
    left.CopyFrom(request)
    left.latency_slo_ms = left_ms(request.latency_slo_ms, spent_s)
    return left
