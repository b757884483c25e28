"""Answers HTTP requests in an ingress replica, on a shorter way than Serve's.

Behind HAProxy, Serve's code starts two tasks for every request, passes its body and its answer
through wrappers, and looks for generators and ASGI applications. A frontend needs none of that.
This module keeps what else Serve does for a request: it counts as ongoing (for draining and
autoscaling), has Serve's context and spans, is in its access log and its metrics, and is cancelled
when its client leaves.

`tests/serve/ray_private/test_ingress.py` fails when Serve has changed. Requests that are not for
this way, and all requests of a replica without the expected parts, take Serve's.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakMethod

from ray._private.log import INTERNAL_TIMESTAMP_LOG_KEY
from ray.serve._private.common import RequestMetadata, RequestProtocol
from ray.serve._private.http_util import RequestIdMiddleware, parse_disconnect_disabled_header
from ray.serve._private.utils import generate_request_id
from starlette.requests import Request
from starlette.responses import Response

from ray_slo.serve.ray_private.http_head import LEAVING, write_whole

logger = logging.getLogger(__name__)

PARTS = (
    *("_wrap_request", "_can_accept_request", "get_asgi_tracing_context"),
    *("_semaphore", "_metrics_manager"),
    *("_user_callable_wrapper", "_http_options", "_route_prefix", "_deployment_id"),
)
_REQUEST_ID = b"x-request-id"
_MODEL_IDS = (b"serve-multiplexed-model-id", b"serve_multiplexed_model_id")
_handler: WeakMethod[Any] | None = None


def answer_with(handler: Callable[[Request], Awaitable[Response]]) -> None:
    """Let this method answer the POST requests that come to this replica."""
    global _handler
    _handler = WeakMethod(handler)


class Ingress:
    """The shorter way of a replica.

    Args:
        app: the ASGI application that Serve made of the replica.
    """

    def __init__(self, app: Any) -> None:
        if isinstance(app, RequestIdMiddleware):  # `answer` does its work
            app = app._app
        replica = getattr(app, "__self__", None)
        missing = [part for part in PARTS if not hasattr(replica, part)]
        self._replica = None if missing else replica
        if not missing:
            quick_access_log(sys.modules[type(replica).__module__])
        else:
            logger.warning(
                "Serve's replica has no %s. Requests take Serve's longer way, which costs more CPU "
                "time.",
                ", ".join(missing),
            )

    async def answer(self, scope: Any, receive: Any, send: Any) -> bool:
        """Answer a request. Return False, without having done anything, if it has to take Serve's
        way."""
        handler = None if _handler is None else _handler()
        replica = self._replica
        if handler is None or replica is None or not _is_for(replica, scope):
            return False
        headers = dict(scope["headers"])
        metadata = _metadata(replica, scope, headers)
        if not replica._can_accept_request(metadata):
            return False
        if replica._route_prefix != "/":
            scope["root_path"] = replica._route_prefix
        task: Any = asyncio.current_task()
        if not parse_disconnect_disabled_header(headers):
            scope.get(LEAVING, []).append(task.cancel)
        with replica._wrap_request(metadata) as status_is:
            try:
                async with _Ongoing(replica, metadata):
                    response = await handler(Request(scope, receive))
                    if all(name != _REQUEST_ID for name, _ in response.raw_headers):
                        response.raw_headers.append((_REQUEST_ID, metadata.request_id.encode()))
                    status_is(str(response.status_code))
                    if not write_whole(scope, send, response):
                        await response(scope, receive, send)
            except asyncio.CancelledError:
                status_is("499")
                raise  # Serve's context takes it and notes it; nobody is left to answer
        return True


class _Ongoing:
    """What Serve's `_start_request` does for a request without a reserved slot. An asynchronous
    generator costs more."""

    __slots__ = ("_metadata", "_replica")

    def __init__(self, replica: Any, metadata: Any) -> None:
        self._replica, self._metadata = replica, metadata

    async def __aenter__(self) -> None:
        await self._replica._semaphore.acquire()
        self._replica._metrics_manager.inc_num_ongoing_requests(self._metadata)

    async def __aexit__(self, *raised: object) -> None:
        self._replica._metrics_manager.dec_num_ongoing_requests(self._metadata)
        self._replica._semaphore.release()


class QuickAccessLog:
    """A logger that writes lines of Serve's access log with less work.

    For every line, `logging` looks for the caller's file and line, for the thread and for the
    process. They are the same in each line, so this takes them from the first one.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._first: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def info(self, said: str, *args: Any, **about: Any) -> None:
        extra = about.get("extra") or {}
        if args or len(about) != 1 or not extra.get("serve_access_log"):
            self._log.info(said, *args, **{"stacklevel": 2, **about})
        elif self._log.isEnabledFor(logging.INFO):
            self._log.handle(self._record(said, extra))

    def _record(self, said: str, extra: Mapping[str, Any]) -> logging.LogRecord:
        if not self._first:
            file, line, function, _ = self._log.findCaller(stacklevel=3)
            first = self._log.makeRecord(
                self._log.name, logging.INFO, file, line, said, (), None, function
            )
            self._first = vars(first)
        now_ns = time.time_ns()
        later_s = now_ns / 1e9 - self._first["created"]
        record = logging.LogRecord.__new__(logging.LogRecord)
        vars(record).update(
            self._first,
            msg=said,
            created=now_ns / 1e9,
            msecs=now_ns // 1_000_000 % 1000,
            relativeCreated=self._first["relativeCreated"] + 1e3 * later_s,
            **{INTERNAL_TIMESTAMP_LOG_KEY: now_ns},
        )
        vars(record).update(extra)
        return record


def quick_access_log(module: Any) -> None:
    """Let a module of Serve write its access log through `QuickAccessLog`."""
    log = getattr(module, "logger", None)
    if isinstance(log, logging.Logger):
        module.logger = QuickAccessLog(log)


def _is_for(replica: Any, scope: Any) -> bool:
    prefix, options = replica._route_prefix, replica._http_options
    return (
        scope["method"] == "POST"
        and bool(prefix)
        and scope["path"].startswith(prefix)
        and not scope.get("root_path")
        and options is not None
        and options.request_timeout_s is None
        # Otherwise the handler's event loop is on another thread.
        and not replica._user_callable_wrapper._run_user_code_in_separate_thread
    )


def _metadata(replica: Any, scope: Any, headers: dict[bytes, bytes]) -> Any:
    client, own_id = scope.get("client"), generate_request_id()
    model_id = next((headers[name] for name in _MODEL_IDS if name in headers), b"")
    return RequestMetadata(
        request_id=headers.get(_REQUEST_ID, b"").decode() or own_id,
        internal_request_id=own_id,
        route=replica._route_prefix,
        app_name=replica._deployment_id.app_name,
        multiplexed_model_id=model_id.decode(),
        is_streaming=True,
        tracing_context=replica.get_asgi_tracing_context(scope["headers"]),
        is_direct_ingress=True,
        _http_method=scope["method"],
        _request_protocol=RequestProtocol.HTTP,
        _client=f"{client[0]}:{client[1]}" if client else "",
    )
