"""`failover` for gRPC: the handlers of Serve's gRPC proxy, called for one attempt after the other.

Serve has no middleware for gRPC. What there is: a servicer function, which it calls with its server
and which may wrap the handlers that this makes (`through`); and the one function that gives a call
that failed its status, wrapped here for what it cannot say by a status: that a replica died.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from ray_slo.serve.deadlines import (
    CAPACITY_HEADER,
    LATENCY_HEADER,
    PROXIED_HEADER,
    REFUSED_HEADER,
)
from ray_slo.serve.protos import InferReply, InferRequest
from ray_slo.serve.proxy.door import ProxyDoor
from ray_slo.serve.proxy.http import TRIES, WAITED_S, Places, lost, suspect, to_positive
from ray_slo.serve.suspects import ATTEMPT_HEADER, is_suspect, new_attempt

_OVERHEAD = 4096  # of a message, beside the item
Handle = Callable[[Any, Any], Awaitable[Any]]


class WithDeadline:
    """A call's context whose metadata says what is left of its deadline.

    Args:
        spent_s: before this attempt.
        slo_s: of the model, where that is all that the call has.
    """

    def __init__(self, context: Any, spent_s: float = 0.0, slo_s: float | None = None) -> None:
        self._context = context
        left_s = context.time_remaining()
        if slo_s is not None and spent_s:
            left_s = min(slo_s - spent_s, math.inf if left_s is None else left_s)
        kept = []
        for name, value in context.invocation_metadata() or ():
            if name == LATENCY_HEADER and spent_s and (slo_ms := to_positive(value)) is not None:
                value = repr(max(slo_ms - 1e3 * spent_s, 1.0))
            if name not in (PROXIED_HEADER, ATTEMPT_HEADER, REFUSED_HEADER):
                kept.append((name, value))
        if left_s is not None:
            kept.append((PROXIED_HEADER, repr(max(left_s * 1e3, 1e-3))))
        self._metadata = tuple(kept)

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Attempt(WithDeadline):
    """The context of one attempt: what is set on it reaches the client by `settle` alone.

    Attributes:
        died: the replica did.
        id: see `suspects`.
    """

    def __init__(
        self, context: Any, spent_s: float, slo_s: float | None = None, refused: int = 0
    ) -> None:
        super().__init__(context, spent_s, slo_s)
        self.id = new_attempt()
        self._metadata = (*self._metadata, (ATTEMPT_HEADER, self.id))
        if refused:
            self._metadata = (*self._metadata, (REFUSED_HEADER, str(refused)))
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
        """What the frontend says that it can do."""
        said: str | None = dict(self._trailing or ()).get(CAPACITY_HEADER)
        return said

    def settle(self) -> None:
        if self._code is not None:
            self._context.set_code(self._code)
        self._context.set_details(self._details)
        told = [(name, value) for name, value in self._trailing or () if name != CAPACITY_HEADER]
        self._context.set_trailing_metadata(told)


@dataclass(frozen=True)
class _Call:
    """Of a client.

    Attributes:
        arrival: `time.monotonic()` seconds.
        place: the application and the model that it names.
        budget_s: from then to the deadline that the client names; None: it names none.
        slo_s: of the model, where the client names no SLO and it is known.
    """

    request: Any
    context: Any
    arrival: float
    place: tuple[str | None, str]
    budget_s: float | None
    slo_s: float | None


class Failover:
    """Calls of `ray_slo.v1.Inference`: through the door, and again when their frontend died.

    Args:
        door: default: one of its own.
    """

    def __init__(self, door: ProxyDoor | None = None) -> None:
        self._ours = Places()  # by application and model
        self._door = door or ProxyDoor()

    async def __call__(self, handle: Handle, request: Any, context: Any) -> Any:
        """What a frontend answers, serialized.

        Raises:
            FrontendLost, Expired: none does.
            RefusedEarly: it would come too late.
            BodyTooLarge: its item is.
        """
        call = self._call(request, context)
        known_s = [s for s in (call.budget_s, call.slo_s) if s is not None]
        ticket = await self._door.enter(
            call.place,
            call.arrival,
            min(known_s, default=None),
            num_bytes=request.ByteSize() - _OVERHEAD,
            is_json=isinstance(request, InferRequest) and request.HasField("json"),
            is_ours=True,
        )
        try:
            return await self._sent(handle, call)
        finally:
            self._door.leave(ticket)

    def _call(self, request: Any, context: Any) -> _Call:
        metadata = dict(context.invocation_metadata() or ())
        is_infer = isinstance(request, InferRequest)
        place = (metadata.get("application"), request.model if is_infer else "")
        named_ms = metadata.get(LATENCY_HEADER)
        if is_infer and request.HasField("latency_slo_ms"):
            named_ms = request.latency_slo_ms
        budget_s, slo_ms = context.time_remaining(), to_positive(named_ms)
        if slo_ms is not None:
            budget_s = min(slo_ms / 1e3, math.inf if budget_s is None else budget_s)
        slo_s = self._door.slo_s(place) if slo_ms is None else None
        return _Call(request, context, time.monotonic(), place, budget_s, slo_s)

    async def _sent(self, handle: Handle, call: _Call) -> Any:
        place, budget_s = call.place, call.budget_s
        limit_s = self._ours.limit_s(place, budget_s)
        for _ in range(TRIES):
            let_in = time.monotonic()
            spent_s = let_in - call.arrival
            if spent_s <= WAITED_S:
                spent_s = 0.0
            if budget_s is not None and spent_s >= budget_s:
                break
            refused = self._door.refused_before(place)
            attempt = Attempt(call.context, spent_s, call.slo_s, refused)
            left_s = None if limit_s is None else limit_s - spent_s
            answer = await _within(left_s, handle, _with_less(call.request, spent_s), attempt)
            if limit_s is not None and answer is None:
                raise self._ours.silent(place, limit_s)
            is_reply = bool(answer) and isinstance(call.request, InferRequest)
            reply = InferReply.FromString(answer) if is_reply else None
            if (said := attempt.capacity) is not None:
                took_s = time.monotonic() - let_in if answer else None
                inside_s = None if reply is None else reply.latency_ms / 1e3
                self._door.heard(place, said, took_s, inside_s)
            if not attempt.died:
                if budget_s is None and reply is not None:
                    slo_ms = to_positive(reply.latency_slo_ms)
                    self._ours.answered(place, None if slo_ms is None else slo_ms / 1e3)
                attempt.settle()
                return answer
            if is_suspect(attempt.id):
                raise suspect()
        raise lost()


def through(
    add_to_server: Callable[[Any, Any], None], call: Callable[[Handle, Any, Any], Awaitable[Any]]
) -> Callable[[Any, Any], None]:
    """A servicer function whose unary calls Serve's handlers get by `call(handle, request,
    context)`, and whose others know their deadline."""

    def add(servicer: Any, server: Any) -> None:
        make = server.service_handler_factory  # Serve's, of what a method does

        def making(service_method: str, streaming_type: Any) -> Any:
            handle = make(service_method=service_method, streaming_type=streaming_type)
            if inspect.isasyncgenfunction(handle):  # gRPC looks at what kind of function it is

                async def streamed(request: Any, context: Any) -> AsyncIterator[Any]:
                    async with contextlib.aclosing(handle(request, WithDeadline(context))) as out:
                        async for message in out:
                            yield message

                return streamed

            async def called(request: Any, context: Any) -> Any:
                return await call(handle, request, context)

            return called

        server.service_handler_factory = making
        try:
            add_to_server(servicer, server)
        finally:
            server.service_handler_factory = make

    return add


_attempt: ContextVar[Attempt | None] = ContextVar("ray_slo_attempt", default=None)


def notice_deaths() -> None:
    """Have `Attempt.died` set in this process. Where Serve has changed, it never is, and a replica
    that died is `INTERNAL` to the client, as Serve says it."""
    from ray.serve._private import proxy

    original = getattr(proxy, "get_grpc_response_status", None)
    if original is None or hasattr(original, "_ray_slo"):
        return

    def get_grpc_response_status(exc: BaseException, *about: Any) -> Any:
        if (attempt := _attempt.get()) is not None and isinstance(exc, RayActorError):
            attempt.died = True
        return original(exc, *about)

    get_grpc_response_status._ray_slo = True  # type: ignore[attr-defined]
    proxy.get_grpc_response_status = get_grpc_response_status


async def _within(left_s: float | None, handle: Handle, request: Any, attempt: Attempt) -> Any:
    """The handler's answer; None if it took longer."""
    _attempt.set(attempt)
    if left_s is None:
        return await handle(request, attempt)
    # Not `wait_for`: Serve's handlers return something when they are cancelled.
    calling = asyncio.ensure_future(handle(request, attempt))
    try:
        done, _ = await asyncio.wait({calling}, timeout=max(left_s, 0.0))
    finally:
        calling.cancel()
    return calling.result() if done else None


def _with_less(request: Any, spent_s: float) -> Any:
    if not (spent_s and isinstance(request, InferRequest) and request.latency_slo_ms > 0):
        return request  # what is no SLO is the application's to refuse
    left = InferRequest()
    left.CopyFrom(request)
    left.latency_slo_ms = max(request.latency_slo_ms - 1e3 * spent_s, 1.0)
    return left
