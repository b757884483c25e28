"""Which deadline does the call that runs now have? And the few private corners of Serve we touch.

A deadline comes, first found first taken, from

1. `deadline_scope(...)` around the call;
2. the HTTP request that Serve is handling: `x-slo-latency-ms`, else `x-request-timeout-seconds`.
   Serve keeps no headers in its request context, so `_note_http_deadlines` wraps the one place
   where a replica hands the ASGI scope to user code;
3. the gRPC request's metadata, by the same names; `ray_slo.serve.grpc.with_deadlines` puts gRPC's
   own deadline there, which Serve does not read.

`x-slo-latency-ms` replaces the model's SLO. `x-request-timeout-seconds` can only tighten it: it is
when Serve's proxy gives up, and gateways set it to minutes. Neither crosses a `DeploymentHandle`:
pass `latency_slo_ms=remaining_ms()` on.
Deadlines here are `time.monotonic()` seconds of this process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import wraps
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ray.serve import context as serve_context

TIMEOUT_HEADER = "x-request-timeout-seconds"
LATENCY_HEADER = "x-slo-latency-ms"
MAX_LATENCY_MS = 86_400_000.0  # a day: what a client, or a config, may give a request
PROXIED_HEADER = "x-slo-timeout-ms"  # the client's timeout, as our proxies pass it on
PROXY_CALLBACK_ENV = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_CALLBACK = "ray_slo.serve.proxy:middlewares"
# Between `ray_slo.serve.proxy.door` in a proxy and frontends:
WHOLE_HEADER = "x-slo-body-whole"  # of requests: "1", its body has come to the proxy, or "0"
REFUSED_HEADER = "x-slo-refused-before"  # of requests: how many the proxy refused before it
CAPACITY_HEADER = "x-slo-capacity"  # of answers: `frontend.Frontend._said_capacity`


@runtime_checkable
class HasHeaders(Protocol):
    """A Starlette or FastAPI request, or what looks like one."""

    @property
    def headers(self) -> Mapping[str, str]: ...


class _Limit(NamedTuple):
    at: float  # time.monotonic() seconds; inf for "none, whatever the request around says"
    replaces_slo: bool


_limit: ContextVar[_Limit | None] = ContextVar("ray_slo_limit", default=None)


@contextmanager
def deadline_scope(latency_ms: float | HasHeaders | None) -> Iterator[None]:
    """Calls inside have this long from now, whatever the request around them says.

    Args:
        latency_ms: milliseconds; or an HTTP request (anything with `headers`), whose headers are
            read; None for "as their model says".
    """
    if latency_ms is None:
        limit = None
    elif isinstance(latency_ms, HasHeaders):
        limit = _limit_from_headers(latency_ms.headers.items())
    else:
        limit = _limit_of(float(latency_ms) / 1e3, True)
    token = _limit.set(limit or _Limit(math.inf, False))
    try:
        yield
    finally:
        _limit.reset(token)


def deadline_for(latency_slo_s: float) -> float:
    """The deadline of a call that starts now at a model with this SLO, `time.monotonic()` s."""
    at = time.monotonic() + latency_slo_s
    limit = _current_limit()
    if limit is None:
        return at
    return limit.at if limit.replaces_slo else min(at, limit.at)


def remaining_ms() -> float | None:
    """Milliseconds left of the deadline of what runs now, at least 0; None when there is none."""
    limit = _current_limit()
    if limit is None or limit.at == math.inf:
        return None
    return max(0.0, 1e3 * (limit.at - time.monotonic()))


def _current_limit() -> _Limit | None:
    limit = _limit.get()
    if limit is None:
        request = serve_context._serve_request_context.get()
        grpc_context = getattr(request, "grpc_context", None)
        if grpc_context is not None:
            return _limit_from_headers(grpc_context.invocation_metadata())
    return limit


def _limit_from_headers(headers: Iterable[tuple[Any, Any]]) -> _Limit | None:
    """By Serve's rules: a value that is no positive number counts as absent."""
    budgets = {}
    for name, value in headers:
        key = _text(name).lower()
        if key in (TIMEOUT_HEADER, LATENCY_HEADER, PROXIED_HEADER):
            try:
                number = float(_text(value))
            except ValueError:
                continue
            if 0 < number < math.inf:
                budgets[key] = number
    if LATENCY_HEADER in budgets:
        return _limit_of(budgets[LATENCY_HEADER] / 1e3, True)
    if PROXIED_HEADER in budgets:
        return _limit_of(budgets[PROXIED_HEADER] / 1e3, False)
    if TIMEOUT_HEADER in budgets:
        return _limit_of(budgets[TIMEOUT_HEADER], False)
    return None


def _limit_of(budget_s: float, replaces_slo: bool) -> _Limit:
    return _Limit(time.monotonic() + min(budget_s, MAX_LATENCY_MS / 1e3), replaces_slo)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


# -- Serve's private corners -----------------------------------------------------------------


def request_context() -> Any:
    """Serve's context of the request that runs now, to be handed to `batch_context`."""
    return serve_context._get_serve_request_context()


def model_id(request_context: Any) -> str:
    """The multiplexed model id of a request; "" without multiplexing."""
    return str(request_context.multiplexed_model_id)


@contextmanager
def batch_context(request_contexts: list[Any]) -> Iterator[None]:
    """Inside, `serve.get_multiplexed_model_id()` works for the batch."""
    serve_context._set_batch_request_context(request_contexts)
    try:
        yield
    finally:
        serve_context._set_batch_request_context([])


def without_request() -> Context:
    """A copy of the current context that belongs to no request."""
    context = copy_context()
    context.run(serve_context._unset_request_context)
    context.run(_limit.set, None)
    return context


def max_ongoing_requests() -> int | None:
    """How many requests Serve lets into this replica at a time; None outside a replica."""
    replica = serve_context._get_internal_replica_context()
    config = getattr(replica, "_deployment_config", None)
    return None if config is None else int(config.max_ongoing_requests)


def _note_http_deadlines() -> None:
    """Make a replica set `_limit` for each HTTP request, whatever user code does with it, and
    refuse WebSockets where that code takes none.

    Does nothing outside a replica, and nothing when Serve has changed there: then the model's SLO
    holds, and `deadline_scope(request)` still works.
    """
    replica = sys.modules.get("ray.serve._private.replica")
    wrapper_class = getattr(replica, "UserCallableWrapper", None)
    original = getattr(wrapper_class, "_call_http_entrypoint", None)
    if original is None or hasattr(original, "_ray_slo"):
        return

    @wraps(original)
    def call(self: Any, info: Any, scope: Any, receive: Any, send: Any) -> Any:
        if scope.get("type") == "websocket" and not info.is_asgi_app:
            closing = send(
                {"type": "websocket.close", "code": 1003}
            )  # else an error of Starlette's
            threaded = getattr(self, "_run_user_code_in_separate_thread", False)
            return asyncio.ensure_future(closing) if threaded else closing
        limit = _limit_from_headers(scope.get("headers", ()))
        token = _limit.set(limit)
        try:
            # A future when user code has its own loop: the context is copied here and now.
            result = original(self, info, scope, receive, send)
        finally:
            _limit.reset(token)
        return _with_limit(result, limit) if inspect.iscoroutine(result) else result

    call._ray_slo = True  # type: ignore[attr-defined]
    wrapper_class._call_http_entrypoint = call  # type: ignore[union-attr]


async def _with_limit(coroutine: Any, limit: _Limit | None) -> Any:
    _limit.set(limit)
    return await coroutine


_note_http_deadlines()
