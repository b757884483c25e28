"""The application's status as a web page, beside its API: `status_page: true` in the config.

It is for an operator without Grafana. It has three paths below the application's, which no model
can have as its name: `-/top` is the page, `-/screen` the data that it loads repeatedly, and
`-/status` the whole status as JSON. Everybody who can reach the API can read them. They change
nothing.

The page loads nothing from other hosts. Names of users come as JSON and are set as text, never as
HTML. The policy in the page's headers forbids all scripts except its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ray_slo.serve.watch.screen import screen

_FRESH_S = 0.5  # shortest time between two reads of the status, for any number of viewers
_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_NONCE = "@nonce@"


class StatusPage:
    """Answers requests below `-/`.

    Args:
        application: its name.
        status: `Frontend.slo_status`.
    """

    def __init__(self, application: str, status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._application = application
        self._status = status
        self._lock = asyncio.Lock()
        self._last: tuple[float, dict[str, Any]] | None = None
        self._page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    async def answer(self, request: Request, path: str) -> Response | None:
        """The answer; None if the path or the method is not ours. `-/screen?model=NAME` opens a
        model or pipeline.

        Args:
            path: below the application's, without slashes at its ends.
        """
        if request.method not in ("GET", "HEAD"):
            return None
        match path:
            case "-/top":
                return self._html()
            case "-/screen":
                opened = request.query_params.get("model") or None
                return _json(screen(self._application, await self._fresh(), opened).to_json())
            case "-/status":
                return _json(await self._fresh())
        return None

    async def _fresh(self) -> dict[str, Any]:
        async with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > _FRESH_S:
                self._last = time.monotonic(), await self._status()
            return self._last[1]

    def _html(self) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        headers = {**_HEADERS, "content-security-policy": policy}
        page = self._page.replace(_NONCE, nonce)
        return Response(page, media_type="text/html", headers=headers)


def _json(data: Any) -> Response:
    body = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, media_type="application/json", headers=_HEADERS)
