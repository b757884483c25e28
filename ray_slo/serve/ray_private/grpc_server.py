"""Serve's gRPC server and the handlers of its proxy: what Serve has no option for.

`tests/serve/ray_private/test_grpc_server.py` says when Serve has changed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any

_PENDING_CALLS = 20_000

Handle = Callable[[Any, Any], Awaitable[Any]]


def bind_to(host: str) -> None:
    """Have Serve's gRPC server of this process listen on this host, where it has an option for the
    host of HTTP only and listens on every interface."""
    from ray.serve._private import default_impl

    original = getattr(default_impl.add_grpc_address, "_ray_slo", default_impl.add_grpc_address)

    @wraps(original)
    def add_grpc_address(server: Any, address: str) -> None:
        original(server, f"{host}:{address.rpartition(':')[2]}")

    add_grpc_address._ray_slo = original  # type: ignore[attr-defined]
    default_impl.add_grpc_address = add_grpc_address


def bound_messages(max_bytes: int) -> None:
    """Have Serve's gRPC server of this process take no larger messages, and hand us more than a
    thousand calls at a time.

    Serve takes 2 GiB, or what `RAY_SERVE_GRPC_MAX_MESSAGE_SIZE` says for both ways. gRPC cancels
    calls at random where more than a thousand have come that nobody has looked at; our door says
    why, and chooses by deadline.
    """
    from ray.serve._private import grpc_util

    key = "grpc.max_receive_message_length"
    options = dict(grpc_util.DEFAULT_GRPC_SERVER_OPTIONS)
    options[key] = min(options.get(key, max_bytes), max_bytes)
    for key in ("grpc.server.max_pending_requests", "grpc.server.max_pending_requests_hard_limit"):
        options.setdefault(key, _PENDING_CALLS)
    grpc_util.DEFAULT_GRPC_SERVER_OPTIONS = list(options.items())


def through(
    add_to_server: Callable[[Any, Any], None],
    call: Callable[[Handle, Any, Any], Awaitable[Any]],
    context_of: Callable[[Any], Any],
) -> Callable[[Any, Any], None]:
    """A servicer function whose unary calls go to `call(handle, request, context)`, where `handle`
    is Serve's, and whose streams have the context `context_of(context)`."""

    def add(servicer: Any, server: Any) -> None:
        make = server.service_handler_factory  # Serve's, of what a method does

        def making(service_method: str, streaming_type: Any) -> Any:
            handle = make(service_method=service_method, streaming_type=streaming_type)
            if inspect.isasyncgenfunction(handle):  # gRPC looks at what kind of function it is

                async def streamed(request: Any, context: Any) -> AsyncIterator[Any]:
                    async with contextlib.aclosing(handle(request, context_of(context))) as out:
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


def on_failure(told: Callable[[BaseException], None]) -> None:
    """Have `told` called with what a call of this process fails with, in the call's context, before
    Serve makes a status of it. Where Serve has changed, it never is, and a replica that died is
    `INTERNAL` to the client, as Serve says it."""
    from ray.serve._private import proxy

    original = getattr(proxy, "get_grpc_response_status", None)
    if original is None or hasattr(original, "_ray_slo"):
        return

    def get_grpc_response_status(exc: BaseException, *about: Any) -> Any:
        told(exc)
        return original(exc, *about)

    get_grpc_response_status._ray_slo = True  # type: ignore[attr-defined]
    proxy.get_grpc_response_status = get_grpc_response_status
