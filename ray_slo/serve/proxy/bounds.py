"""The middlewares in Serve's proxies: bounds, admission (`admission`) and failover (`http`).

`BoundsMiddleware` refuses headers that would break Serve's proxy: the proxy decodes headers that
may not be text. It also refuses bodies that would fill the proxy's memory: the proxy reads a whole
body, even if no replica reads it. Serve loads the middleware from the environment of the machine
that runs the proxy::

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=ray_slo.serve.proxy:middlewares

The same callback keeps Serve's gRPC server on one host and bounds its messages, and bounds the head
of HTTP requests (`ray_private`).
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware
from starlette.responses import Response

from ray_slo.core.environment import GRPC_HOST, MARK, MAX_BODY_BYTES
from ray_slo.serve.deadlines import HEADERS, HTTP_PAGE, MARK_HEADER
from ray_slo.serve.errors import (
    BadHeader,
    BodyTooLarge,
    FrontendLost,
    RefusedEarly,
    http_response,
)
from ray_slo.serve.proxy.admission import AdmissionMiddleware
from ray_slo.serve.proxy.direct import DirectMiddleware
from ray_slo.serve.proxy.door import shared
from ray_slo.serve.proxy.http import ELSEWHERE, FailoverMiddleware
from ray_slo.serve.proxy.modes import has_haproxy_of_ours
from ray_slo.serve.proxy.room import GRPC_SHARE, most, with_room

_MAX_HEADERS_BYTES = 65_536  # largest size of all headers together
_SHORT = 64  # keys of header names up to this many characters are remembered
_MAX_VALUE = 256  # characters of a header that Serve or ray-slo reads
_PRINTABLE = re.compile(rb"[ -~]*").fullmatch
_STATE = b"tracestate"  # Serve decodes it. It may be long, and may come more than once
_MARK = MARK_HEADER.encode()
_READ = {
    name.lower().replace("-", "_").encode()
    for name in (
        *HEADERS,
        "x-request-id",
        "x-request-disconnect-disabled",
        "serve-multiplexed-model-id",
        "traceparent",
        os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id"),
    )
}


class BoundsMiddleware:
    """Refuses headers that are too large or not text (400, 431), bodies that are too large (413),
    and requests from the HAProxy of another cluster (503), whose frontend had this port before.

    Args:
        max_body_bytes: largest body for any application behind this proxy, in bytes.
    """

    def __init__(self, app: Any, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._mark = MARK.read().encode() if has_haproxy_of_ours() else b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        named = dict(scope["headers"])
        refusal = _bad_headers(scope["headers"])
        if self._mark and named.get(_MARK, self._mark) not in (b"", self._mark):
            refusal = http_response(FrontendLost(ELSEWHERE))
        if scope["type"] == "websocket":
            if refusal is None:
                await self._app(scope, receive, send)
            else:  # closing it before it is accepted gives HTTP status 403
                await send({"type": "websocket.close", "code": 1008})
            return
        declared = named.get(b"content-length", b"")
        is_declared = declared.isdigit() and b"transfer-encoding" not in named
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._max_body_bytes):
            refusal = refusal or self._too_large()
        if refusal is not None:
            await refusal(scope, receive, send)
        elif is_declared:  # the HTTP server reads no more than that
            await self._app(scope, receive, send)
        else:
            await self._bounded(scope, receive, send)

    async def _bounded(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, and count its body. If the body is too large, Serve is told that the
        client left, and this middleware answers."""
        size = 0
        started = refused = False

        async def counted() -> Any:
            nonlocal size, refused
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                refused = True
                return {"type": "http.disconnect"}
            return message

        async def watched(message: Any) -> None:
            nonlocal started
            if refused and not started:
                return
            started = True
            await send(message)

        await self._app(scope, counted, watched)
        if refused and not started:
            await self._too_large()(scope, receive, send)

    def _too_large(self) -> Response:
        said = f"at most {self._max_body_bytes} bytes of a body are read"
        return http_response(BodyTooLarge(said, field="body"))


def _key_of(name: bytes) -> bytes | None:
    """Return the name by which Serve or ray-slo read a header. None if neither does."""
    key = name.lower().replace(b"-", b"_")
    return key if key in _READ or key.startswith(b"x_slo_") else None


_known_key = functools.lru_cache(1024)(_key_of)  # clients send the same names in every request


def _bad_headers(headers: Any) -> Response | None:
    size = 0
    seen: set[bytes] = set()
    for name, value in headers:
        size += len(name) + len(value)
        key = _known_key(name) if len(name) <= _SHORT else _key_of(name)
        if key is None and name != _STATE:
            continue
        wrong = ""
        if key is not None and len(value) > _MAX_VALUE:
            wrong = f"has {len(value)} characters; at most {_MAX_VALUE} are read"
        elif _PRINTABLE(value) is None:
            wrong = "must be printable ASCII"
        elif key in seen:
            wrong = "is there more than once; send one"
        if key is not None:
            seen.add(key)
        if wrong:
            header = name.decode("latin-1")
            said = f"header {header} {wrong}. See {HTTP_PAGE}#requests"
            return http_response(BadHeader(said, field=header))
    if size > _MAX_HEADERS_BYTES:
        said = f"headers have {size} bytes; at most {_MAX_HEADERS_BYTES} are read"
        error = BadHeader(said, reason="headers_too_large", field="headers")
        return http_response(error, status=431)
    return None


def middlewares() -> list[Middleware]:
    """Return the middlewares for Serve's proxy callback. With HAProxy, Serve calls this in ingress
    replicas; admission and failover are then in HAProxy (`haproxy`)."""
    from ray_slo.serve.memory import give_back
    from ray_slo.serve.proxy.grpc import MESSAGE_OVERHEAD
    from ray_slo.serve.ray_private import grpc_server
    from ray_slo.serve.ray_private.http_head import accept_many, bound_heads

    give_back()
    max_body_bytes = MAX_BODY_BYTES.read()
    grpc_server.bind_to(GRPC_HOST.read())
    grpc_server.keep_port()
    grpc_server.bound_messages(max_body_bytes + MESSAGE_OVERHEAD, most(GRPC_SHARE))
    bound_heads(functools.partial(with_room, full=http_response(_full())))
    accept_many()
    bounds = Middleware(BoundsMiddleware, max_body_bytes=max_body_bytes)
    # Serve wraps each middleware around those before it, so the last one sees a request first.
    if _is_replica():
        return [Middleware(DirectMiddleware), bounds]
    return [Middleware(FailoverMiddleware), Middleware(AdmissionMiddleware, door=shared()), bounds]


def _full() -> RefusedEarly:
    """Return the error for a client for whose connection there is no room."""
    said = "the server has as many connections as it has descriptors for, and all have requests"
    return RefusedEarly(said, reason="queue_full", retry_after_s=1.0)


def _is_replica() -> bool:
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True
