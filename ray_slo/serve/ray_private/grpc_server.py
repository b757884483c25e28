"""Settings of Serve's gRPC server and its proxy's handlers for which Serve has no option.

`tests/serve/ray_private/test_grpc_server.py` fails when Serve has changed.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any

_PENDING_CALLS = 20_000
_BEGIN_MS = 30_000  # a connection has this long to begin; as a head of HTTP/1
_IDLE_MS = 120_000  # a connection without a call for this time is closed

Handle = Callable[[Any, Any], Awaitable[Any]]


def bind_to(host: str) -> None:
    """Make Serve's gRPC server of this process listen on this host. Serve has such an option only
    for HTTP. Its gRPC server listens on every interface."""
    from ray.serve._private import default_impl

    original = getattr(default_impl.add_grpc_address, "_ray_slo", default_impl.add_grpc_address)

    @wraps(original)
    def add_grpc_address(server: Any, address: str) -> None:
        original(server, f"{host}:{address.rpartition(':')[2]}")

    add_grpc_address._ray_slo = original  # type: ignore[attr-defined]
    default_impl.add_grpc_address = add_grpc_address


def keep_port() -> None:
    """Let a gRPC server that Serve starts without `SO_REUSEPORT` fail if another process has its
    port. Serve then tries the next one. Serve says so to gRPC with a text, which gRPC ignores, and
    replicas of two clusters on one machine would share a port."""
    from ray.serve._private import grpc_util

    original = grpc_util.gRPCGenericServer.__init__
    if hasattr(original, "_ray_slo"):
        return

    @wraps(original)
    def begin(self: Any, *args: Any, extra_options: Any = None, **options: Any) -> None:
        said = {"0": 0, "1": 1}
        extra = [(name, said.get(value, value)) for name, value in extra_options or []]
        original(self, *args, extra_options=extra, **options)

    begin._ray_slo = True  # type: ignore[attr-defined]
    grpc_util.gRPCGenericServer.__init__ = begin


def bound_messages(max_bytes: int, max_connections: float = math.inf) -> None:
    """Make Serve's gRPC server of this process refuse larger messages and more connections, close
    idle connections, and accept more than a thousand calls at a time.

    Serve accepts messages of 2 GiB, or of `RAY_SERVE_GRPC_MAX_MESSAGE_SIZE` bytes, in both
    directions. gRPC cancels calls at random if more than a thousand are unprocessed. The admission
    control (`proxy.door`) instead chooses by deadline, and gives the reason.
    """
    from ray.serve._private import grpc_util

    key = "grpc.max_receive_message_length"
    options = dict(grpc_util.DEFAULT_GRPC_SERVER_OPTIONS)
    options[key] = min(options.get(key, max_bytes), max_bytes)
    for key in ("grpc.server.max_pending_requests", "grpc.server.max_pending_requests_hard_limit"):
        options.setdefault(key, _PENDING_CALLS)
    options.setdefault("grpc.server_handshake_timeout_ms", _BEGIN_MS)
    options.setdefault("grpc.max_connection_idle_ms", _IDLE_MS)
    if max_connections < math.inf:
        options.setdefault("grpc.max_allowed_incoming_connections", int(max_connections))
    grpc_util.DEFAULT_GRPC_SERVER_OPTIONS = list(options.items())


def through(
    add_to_server: Callable[[Any, Any], None],
    call: Callable[[Handle, Any, Any], Awaitable[Any]],
    context_of: Callable[[Any], Any],
) -> Callable[[Any, Any], None]:
    """Return a servicer function. Its unary calls go to `call(handle, request, context)`, where
    `handle` is Serve's handler. Its streams have the context `context_of(context)`."""

    def add(servicer: Any, server: Any) -> None:
        make = server.service_handler_factory  # Serve's handlers of the methods

        def making(service_method: str, streaming_type: Any) -> Any:
            handle = make(service_method=service_method, streaming_type=streaming_type)
            if inspect.isasyncgenfunction(handle):  # gRPC checks the kind of the function

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
    """Call `told` with the exception of each failed call of this process.

    The call is made in the context of the failed one, before Serve turns the exception into a
    status. If Serve has changed, `told` is never called, and the client gets Serve's `INTERNAL` for
    a replica that died.
    """
    from ray.serve._private import proxy

    original = getattr(proxy, "get_grpc_response_status", None)
    if original is None or hasattr(original, "_ray_slo"):
        return

    def get_grpc_response_status(exc: BaseException, *about: Any) -> Any:
        told(exc)
        return original(exc, *about)

    get_grpc_response_status._ray_slo = True  # type: ignore[attr-defined]
    proxy.get_grpc_response_status = get_grpc_response_status
