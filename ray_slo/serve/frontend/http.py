"""Reads the bodies that clients send, within bounds. Nothing here trusts a request.

A body has a largest size and depth, and must arrive within a time. A body beyond a bound is
refused, and the error names the bound. `ray_slo.serve.deadlines` reads headers.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from ray_slo.serve.deadlines import WHOLE_HEADER
from ray_slo.serve.errors import BodyTooLarge, RefusedEarly, SlowBody
from ray_slo.serve.ray_private.http_head import read_whole, whole_body

MAX_DEPTH = 100  # largest depth of JSON; pickle fails at a depth of a few hundred
INLINE_BYTES = 32_768  # larger JSON bodies are parsed in a thread
_CONTAINER = 10  # a list or an object counts as this many values, as it takes so long to pickle

_WHOLE = WHOLE_HEADER.encode()
_BODY_S = 60.0  # the longest time for a body, for any SLO
_LATE_S = 0.5  # time for a body after its deadline, so that late requests get the right error


def headers_of(request: Request) -> dict[str, str]:
    """The headers as a dictionary. If a name occurs twice, the first value counts."""
    raw = request.scope["headers"]
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)}


def _header(request: Request, name: bytes) -> bytes:
    """Return the first value of a header, or nothing. Starlette's own way costs more."""
    return next((value for key, value in request.scope["headers"] if key == name), b"")


async def body_of(
    request: Request,
    max_bytes: int,
    left_s: float,
    option: str = "max_body_bytes",
    readers: Readers | None = None,
) -> bytes:
    """Return the body of a request.

    Args:
        max_bytes: largest size of the body, in bytes.
        left_s: time until the request's deadline, in seconds.
        option: the setting with this bound, for the message.
        readers: the bodies that are being read, including this one. Default: only this one.

    Raises:
        BodyTooLarge: the body is larger, or declares that it is.
        SlowBody: it did not come by the deadline, or others were read instead.
        RefusedEarly: it did not come by the deadline, because the proxy was too busy.
        ClientDisconnect: the client left before the body came.
    """
    declared = _header(request, b"content-length").decode("latin-1")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large("body", declared[:18], max_bytes, option=option)
    size = int(declared) if declared.isdecimal() else 0
    if size and (body := whole_body(request.scope, request.receive)):
        return body  # the HTTP server reads no more than is declared
    limit_s = min(max(left_s, 0.0) + _LATE_S, _BODY_S)
    chunks: list[bytes] = []
    came = 0
    readers = readers or Readers(1)
    reading = readers.begin(limit_s)
    try:
        more = True
        while more:
            message = await request.receive()  # Starlette's own generator costs more
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunks.append(message.get("body", b""))
            came += len(chunks[-1])
            if came > max_bytes:
                raise too_large("body", f"more than {max_bytes}", max_bytes, option=option)
            more = message.get("more_body", False)
            if more and size:
                body = await read_whole(request.scope, request.receive, chunks, size)
                if body is not None:
                    return body
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    except asyncio.CancelledError:
        if not reading.why:  # the request itself is cancelled
            raise
    finally:
        readers.end(reading)
    came = sum(map(len, chunks))
    if reading.why == _CROWDED:
        said = (
            f"of the body, {came} bytes had come when too many bodies were being read at once, and "
            "this one had been for longest"
        )
        raise SlowBody(said, field="body")
    if _header(request, _WHOLE) == b"1":
        said = f"the proxy was too busy to hand its body over within {limit_s:.4g} s"
        raise RefusedEarly(said, reason="queue_full")
    said = f"of the body, {came} bytes came within {limit_s:.4g} s; the request's deadline is over"
    raise SlowBody(said, field="body")


_LATE, _CROWDED = "late", "crowded"


class Reading:
    """A body that is being read, by the task that runs now.

    Attributes:
        why: the reason if reading was stopped.
    """

    def __init__(self, limit_s: float) -> None:
        self.why = ""
        self._task: Any = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.stop, _LATE)

    def stop(self, why: str) -> None:
        if not self.why:
            self.why = why
            self._task.cancel()

    def end(self) -> None:
        """Note that the task no longer reads the body."""
        self._timer.cancel()
        if self.why and sys.version_info >= (3, 11):
            self._task.uncancel()


class Readers:
    """Bodies that are being read. If there are too many, the slowest one is refused.

    Args:
        most: largest number at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._reading: dict[Reading, None] = {}  # the oldest first

    def begin(self, limit_s: float) -> Reading:
        """Note that this task reads a body, for at most this many seconds. It may be cancelled."""
        if len(self._reading) >= self._most:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.stop(_CROWDED)
        reading = Reading(limit_s)
        self._reading[reading] = None
        return reading

    def end(self, reading: Reading) -> None:
        """Note that the body is complete, or is no longer read."""
        self._reading.pop(reading, None)
        reading.end()


def too_large(
    field: str, size: int | str, most: int, what: str = "bytes", option: str = "max_body_bytes"
) -> BodyTooLarge:
    """Return the error for a body or a field of a message that is too large."""
    return BodyTooLarge(
        f"{field} has {size} {what}; at most {most} are read ({option})", field=field
    )


def json_of(body: bytes, max_values: int) -> Any:
    """Return the JSON in a body. It is bounded because parsing holds Python's lock in any thread.

    Args:
        max_values: approximate largest number of values. A list or an object counts as ten. Commas
            and brackets are counted, also those in strings.

    Raises:
        ValueError: the body is not JSON, or is nested too deeply.
        BodyTooLarge: it has too many values.
    """
    opened = body.count(b"[") + body.count(b"{")
    if (values := 1 + body.count(b",") + _CONTAINER * opened) > max_values:
        what = "values, where a list or an object counts as ten"
        raise too_large("body", values, max_values, what, "max_json_values")
    # The garbage collector would scan all new objects repeatedly, and find nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "depth limit" in str(error):
            raise _too_deep() from None
        raise
    finally:
        if collects:
            gc.enable()
    if opened > MAX_DEPTH:  # the depth is at most the number of opening brackets
        _check_depth(value)
    return value


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()
