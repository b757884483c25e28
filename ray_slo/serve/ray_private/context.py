"""Serve's context of the current request, the headers of HTTP requests and answers, and what Serve
calls and counts.

Serve keeps no headers in its context. So `install` wraps the one place where a replica passes an
ASGI scope to user code. `count_only` and `answer_only` wrap those where it counts a call, and where
it looks for the method. `tests/serve/ray_private/test_context.py` fails when Serve has changed.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import wraps
from typing import Any

from ray import serve
from ray.serve import context as serve_context
from ray.serve._private import constants
from ray.serve.exceptions import RayServeException

Headers = Iterable[tuple[bytes, bytes]]
_note: Callable[[Headers], None] | None = None
_say: Callable[[], Headers] | None = None


def request_context() -> Any:
    """Serve's context of the current request, for `batch_context`."""
    return serve_context._get_serve_request_context()


def model_id(request_context: Any) -> str:
    """The multiplexed model id of a request; "" without multiplexing."""
    return str(request_context.multiplexed_model_id)


def is_multiplexed(method: Any) -> bool:
    """Return whether a function is decorated with `@serve.multiplexed`."""
    return getattr(getattr(method, "__code__", None), "co_name", "") == "_multiplex_wrapper"


@contextmanager
def batch_context(request_contexts: list[Any]) -> Iterator[None]:
    """Inside, `serve.get_multiplexed_model_id()` works for the batch."""
    serve_context._set_batch_request_context(request_contexts)
    try:
        yield
    finally:
        serve_context._set_batch_request_context([])


def forget_request() -> None:
    """Detach the current context from its request."""
    serve_context._unset_request_context()


def grpc_metadata() -> Any:
    """Metadata of the current gRPC request; None if there is none."""
    request = serve_context._serve_request_context.get()
    context = getattr(request, "grpc_context", None)
    return None if context is None else context.invocation_metadata()


def came_by_http() -> bool:
    """Whether the current call came through a handle, while its caller answered HTTP requests."""
    request = serve_context._serve_request_context.get()
    return bool(getattr(request, "route", "")) and not getattr(request, "is_http_request", False)


def max_ongoing_requests() -> int | None:
    """Largest number of requests that Serve lets into this replica; None outside a replica."""
    try:
        replica = serve.get_replica_context()
    except RayServeException:
        return None
    config = getattr(replica, "_deployment_config", None)
    return None if config is None else int(config.max_ongoing_requests)


def batch_buckets() -> tuple[list[float], list[float], list[float]]:
    """Return Serve's buckets for batches: of times in milliseconds, of percentages, of sizes."""
    return (
        list(constants.BATCH_EXECUTION_TIME_BUCKETS_MS),
        list(constants.BATCH_UTILIZATION_BUCKETS_PERCENT),
        list(constants.BATCH_SIZE_BUCKETS),
    )


def count_only(methods: Collection[str]) -> None:
    """Keep calls of other methods, such as heartbeats, out of what Serve counts in this replica:
    requests, errors, latencies and lines of the access log.

    Does nothing outside a replica, and nothing if Serve has changed there.
    """
    replica = sys.modules.get("ray.serve._private.replica")
    names = ("Replica", "ReplicaBase")  # the second one before Ray 2.60
    classes = [cls for name in names if (cls := getattr(replica, name, None)) is not None]
    for cls in classes:
        original = vars(cls).get("_record_errors_and_metrics")
        if original is not None and not hasattr(original, "_ray_slo"):
            cls._record_errors_and_metrics = _counting(original, frozenset(methods))


def _counting(original: Callable[..., Any], methods: Collection[str]) -> Callable[..., Any]:
    @wraps(original)
    def record(self: Any, *about: Any, **named: Any) -> None:
        # One of them is the request's metadata.
        called = [part.call_method for part in (*about, *named.values()) if _has_method(part)]
        if not called or called[-1] in methods:
            original(self, *about, **named)

    record._ray_slo = True  # type: ignore[attr-defined]
    return record


def _has_method(part: Any) -> bool:
    return hasattr(part, "call_method")


def answer_only(check: Callable[[str], None]) -> None:
    """Call `check` with the name of every method that a call to this replica asks for, once per
    name. It raises for those that callers may not call; otherwise Serve would list all of ours.

    Does nothing outside a replica, and nothing if Serve has changed there.
    """
    replica = sys.modules.get("ray.serve._private.replica")
    wrapper_class: Any = getattr(replica, "UserCallableWrapper", None)
    original = getattr(wrapper_class, "get_user_method_info", None)
    if original is None or hasattr(original, "_ray_slo"):
        return

    @wraps(original)
    def find(self: Any, method_name: str) -> Any:
        if method_name not in getattr(self, "_cached_user_method_info", ()):
            check(method_name)
        return original(self, method_name)

    find._ray_slo = True  # type: ignore[attr-defined]
    wrapper_class.get_user_method_info = find


def install(
    note: Callable[[Headers], None] | None = None, say: Callable[[], Headers] | None = None
) -> None:
    """Make this replica refuse WebSockets if user code accepts none (Starlette would raise), call
    `note` with the headers of each HTTP request, in the context of the user code, and add to the
    headers of its answer what `say` returns.

    Does nothing outside a replica, and nothing if Serve has changed there: then the model's SLO is
    used, and `deadline_scope(request)` still works.
    """
    global _note, _say
    _note, _say = note or _note, say or _say
    replica = sys.modules.get("ray.serve._private.replica")
    wrapper_class = getattr(replica, "UserCallableWrapper", None)
    original = getattr(wrapper_class, "_call_http_entrypoint", None)
    if original is None or hasattr(original, "_ray_slo"):
        return

    @wraps(original)
    def call(self: Any, info: Any, scope: Any, receive: Any, send: Any) -> Any:
        if scope.get("type") == "websocket" and not info.is_asgi_app:
            closing = send({"type": "websocket.close", "code": 1003})
            threaded = getattr(self, "_run_user_code_in_separate_thread", False)
            return asyncio.ensure_future(closing) if threaded else closing
        if _note is None:
            return original(self, info, scope, receive, send)
        note, headers = _note, list(scope.get("headers", ()))
        if _say is not None:
            send = _saying(send, _say)
        # It is a future if user code has its own loop: the context is copied now.
        context = copy_context()
        context.run(note, headers)
        result = context.run(original, self, info, scope, receive, send)
        return _noted(result, note, headers) if inspect.iscoroutine(result) else result

    call._ray_slo = True  # type: ignore[attr-defined]
    wrapper_class._call_http_entrypoint = call  # type: ignore[union-attr]


def _saying(send: Any, say: Callable[[], Headers]) -> Any:
    async def said(message: Any) -> None:
        if message["type"] == "http.response.start" and (more := list(say())):
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return said


async def _noted(coroutine: Any, note: Callable[[Headers], None], headers: Headers) -> Any:
    note(headers)
    return await coroutine
