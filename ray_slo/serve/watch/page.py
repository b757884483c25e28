"""The application's status as a web page, beside its API: `status_page: true` in the config.

It is for an operator without Grafana. It has three paths below the application's, which no model
can have as its name: `-/top` is the page, `-/screen` the data that it loads repeatedly, and
`-/status` the whole status as JSON. Everybody who can reach the API can read them. They change
nothing.

A web site that an operator visits must not read them through the operator's browser. So they answer
only to hosts that they are served on (`StatusPage`), and not to scripts of other sites.

The page loads nothing from other hosts. Names of users come as JSON and are set as text, never as
HTML. The policy in the page's headers forbids all scripts except its own.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ray_slo.core.text import quoted
from ray_slo.serve.errors import BadHeader, http_response
from ray_slo.serve.watch.screen import screen

_FRESH_S = 0.5  # shortest time between two reads of the status, for any number of viewers
_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_NONCE = "@nonce@"
_AUTHORITY = re.compile(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::\d*)?")  # a host, and perhaps its port
_SEE = "See SECURITY.md#the-status-page"


class StatusPage:
    """Answers requests below `-/`.

    The header `Host` must name localhost, this machine, an address, or one of `hosts`. A browser
    sends an address only for pages of this very address, so no other site can make it do that.

    Args:
        application: its name.
        status: `Frontend.slo_status`.
        hosts: further names of hosts, as in the setting `status_hosts`.
    """

    def __init__(
        self,
        application: str,
        status: Callable[[], Awaitable[dict[str, Any]]],
        hosts: Sequence[str] = (),
    ) -> None:
        self._application = application
        self._status = status
        machine = socket.gethostname()
        known = ("localhost", "*.localhost", machine, machine.partition(".")[0], *hosts)
        self._hosts = {host.lower().rstrip(".") for host in known}
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
        if path in ("-/top", "-/screen", "-/status") and (refusal := self._refusal(request)):
            return http_response(refusal)
        match path:
            case "-/top":
                return self._html()
            case "-/screen":
                opened = request.query_params.get("model") or None
                return _json(screen(self._application, await self._fresh(), opened).to_json())
            case "-/status":
                return _json(await self._fresh())
        return None

    def _refusal(self, request: Request) -> BadHeader | None:
        """Return why another site's page may have sent the request. None: it did not."""
        told = request.headers
        hosts = told.getlist("host")
        for said in hosts or [""]:
            if not self._is_served_on(host := _host_in(said)):
                wanted = "write its name into the application's setting status_hosts"
                if host and host == host.strip():
                    wanted = f"if it is yours, set status_hosts: [{quoted(host)}]"
                return BadHeader(
                    f"header Host: the status pages are not served on {quoted(said)}; {wanted}, or "
                    f"ask localhost or an address. {_SEE}",
                    field="host",
                )
        by_hand = told.get("sec-fetch-mode") == "navigate" and (
            told.get("sec-fetch-dest") == "document"
        )  # somebody opens the page, perhaps by a link, and sees it alone
        if told.get("sec-fetch-site", "none") not in ("none", "same-origin") and not by_hand:
            return _of_another_site("Sec-Fetch-Site", told["sec-fetch-site"])
        for origin in told.getlist("origin"):
            if origin.partition("://")[2].lower() != hosts[0].lower():
                return _of_another_site("Origin", origin)
        return None

    def _is_served_on(self, host: str) -> bool:
        if host in self._hosts or "*" in self._hosts:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            parts = host.split(".")
            return any(f"*.{'.'.join(parts[i:])}" in self._hosts for i in range(1, len(parts)))
        return True

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


def _host_in(authority: str) -> str:
    """Return the host in a `Host` header, in small letters. It is empty if there is none."""
    found = _AUTHORITY.fullmatch(authority)
    return "" if found is None else (found[1] or found[2] or "").lower().removesuffix(".")


def _of_another_site(header: str, said: str) -> BadHeader:
    return BadHeader(
        f"header {header}: the status pages do not answer pages of other sites, got "
        f"{quoted(said)}; open /-/top itself, or ask without a browser. {_SEE}",
        field=header.lower(),
    )


def _json(data: Any) -> Response:
    body = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, media_type="application/json", headers=_HEADERS)
