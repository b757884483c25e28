"""Reads the headers that HAProxy wrote into a request, in the ingress replicas behind HAProxy.

HAProxy writes the time when it got a request, and the SLO counts from then. Meanwhile the body may
have arrived slowly, or another frontend may have died with the request. HAProxy also gives the
request an id. If the request's hooks ran when a frontend ended, the next frontend does not run it.
Others that reach the replica may write the same headers. So they count only if HAProxy has the
rules of ray-slo, and with its mark (`modes.believes`).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from typing import Any

from ray_slo.core.environment import MARK
from ray_slo.serve.deadlines import (
    ARRIVED_HEADER,
    ATTEMPT_HEADER,
    MARK_HEADER,
    TIMEOUT_HEADER,
    spent,
    without,
)
from ray_slo.serve.errors import FrontendLost, http_response
from ray_slo.serve.proxy.http import ELSEWHERE, SUSPECT, WAITED_S
from ray_slo.serve.proxy.modes import believes, since
from ray_slo.serve.ray_private.http_head import ARRIVAL
from ray_slo.serve.ray_private.ingress import Ingress
from ray_slo.serve.suspects import is_suspect

_ARRIVED, _ATTEMPT = ARRIVED_HEADER.encode(), ATTEMPT_HEADER.encode()
_TIMEOUT, _MARK = TIMEOUT_HEADER.encode(), MARK_HEADER.encode()


class DirectMiddleware:
    """Gives the frontend of this process the time when a request came, and the time when its client
    gives up. Refuses a request that may have ended another frontend."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._believes = believes(MARK.read())  # with the right mark
        self._mark = MARK.read().encode()
        self._ingress = Ingress(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"])
        is_marked = self._believes and (
            not self._mark or hmac.compare_digest(said.get(_MARK, b""), self._mark)
        )
        if not is_marked:
            headers = without(scope["headers"], "door", "failover", "mark")
        else:
            headers = without(scope["headers"], "mark") if self._mark else scope["headers"]
        if _TIMEOUT in said:  # Serve would answer 408 without the reason, which the frontend gives
            headers = spent(headers, 0.0)
        if headers is not scope["headers"]:
            scope = {**scope, "headers": headers}
        if is_marked and (arrived := said.get(_ARRIVED)) is not None:
            now, here = time.monotonic(), scope.get(ARRIVAL)
            here_s = 0.0 if here is None else now - here
            before_s = since(arrived.decode("latin-1"), time.time()) - here_s
            if before_s > WAITED_S:
                scope[ARRIVAL] = now - here_s - before_s
                if is_suspect(said.get(_ATTEMPT, b"").decode("latin-1")):
                    await http_response(FrontendLost(SUSPECT))(scope, receive, send)
                    return
        if not await self._ingress.answer(scope, receive, send):
            await self._app(scope, receive, send)


def before_s(metadata: Mapping[str, str]) -> float:
    """Return the time since HAProxy got a gRPC call, in seconds. It is 0 if it is unknown, or if
    there is no HAProxy.

    Raises:
        FrontendLost: the call may have ended another frontend, or came through the HAProxy of
            another cluster, whose frontend had this port before.
    """
    arrived, mark = metadata.get(ARRIVED_HEADER), metadata.get(MARK_HEADER, "")
    if not believes(mark):
        if mark and believes(MARK.read()):
            raise FrontendLost(ELSEWHERE)
        return 0.0
    if arrived is None:
        return 0.0
    ago_s = since(arrived, time.time())
    if ago_s > WAITED_S and is_suspect(metadata.get(ATTEMPT_HEADER, "")):
        raise FrontendLost(SUSPECT)
    return ago_s
