"""Reads the bodies that clients send, within bounds: nothing here trusts a request.

A body has a largest size and depth, and a time in which it must come. What breaks a bound is
refused with an error that names it. Headers: `ray_slo.serve.deadlines`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import orjson
from starlette.requests import Request

from ray_slo.serve.deadlines import WHOLE_HEADER
from ray_slo.serve.errors import BodyTooLarge, RefusedEarly, SlowBody

MAX_DEPTH = 100  # of JSON; pickle gives up at a few hundred
INLINE_BYTES = 32_768  # of JSON: more of it is parsed on a thread
_CONTAINER = 10  # a list or an object counts as ten values: pickling one takes that much longer

_BODY_S = 60.0  # the longest time for a body, whatever SLO its client asked for
_LATE_S = (
    0.5  # time for a body after its deadline, so that late requests are told that they are late
)


async def body_of(
    request: Request,
    max_bytes: int,
    left_s: float,
    option: str = "max_body_bytes",
    readers: Readers | None = None,
) -> bytes:
    """The body of a request.

    Args:
        max_bytes: no more than this is kept.
        left_s: seconds until the request's deadline.
        option: the setting that bounds it, for the message.
        readers: the bodies that are being read, of which this is one; default: it alone.

    Raises:
        BodyTooLarge: it is larger, or says that it is.
        SlowBody: it did not come by the deadline, or others were read instead.
        RefusedEarly: it did not come by the deadline, because the proxy was too busy.
        ClientDisconnect: the client left before it came.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large("body", declared[:18], max_bytes, option=option)
    limit_s = min(max(left_s, 0.0) + _LATE_S, _BODY_S)
    body = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            body.extend(chunk)
            if len(body) > max_bytes:
                raise too_large("body", f"more than {max_bytes}", max_bytes, option=option)

    task = (readers or Readers(1)).start(read())
    try:
        await asyncio.wait([task], timeout=limit_s)
        if task.cancelled():
            said = (
                f"of the body, {len(body)} bytes had come when too many bodies were being read at "
                "once, and this one had been for longest"
            )
            raise SlowBody(said, field="body")
        if task.done():
            task.result()
            return bytes(body)
        if request.headers.get(WHOLE_HEADER) == "1":
            said = f"the proxy was too busy to hand its body over within {limit_s:.4g} s"
            raise RefusedEarly(said, reason="queue_full")
        came = f"of the body, {len(body)} bytes came within {limit_s:.4g} s"
        raise SlowBody(f"{came}; the request's deadline is over", field="body")
    finally:
        task.cancel()


class Readers:
    """Bodies that are being read. When there are too many, the one that takes longest gives way.

    Args:
        most: at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: dict[asyncio.Task[None], None] = {}  # the oldest first

    def start(self, read: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin to read."""
        if len(self._tasks) >= self._most:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(read)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task


def too_large(
    field: str, size: int | str, most: int, what: str = "bytes", option: str = "max_body_bytes"
) -> BodyTooLarge:
    """The refusal of a body, or of the field of a message."""
    return BodyTooLarge(
        f"{field} has {size} {what}; at most {most} are read ({option})", field=field
    )


def json_of(body: bytes, max_values: int) -> Any:
    """The JSON in a body. Parsing holds Python's lock, on whatever thread: hence the bound.

    Args:
        max_values: about how many values it may hold, a list or an object counted as ten: commas,
            and brackets ten times, those in strings, too.

    Raises:
        ValueError: it is no JSON, or is nested too deeply.
        BodyTooLarge: too many values.
    """
    opened = body.count(b"[") + body.count(b"{")
    if (values := 1 + body.count(b",") + _CONTAINER * opened) > max_values:
        what = "values, where a list or an object counts as ten"
        raise too_large("body", values, max_values, what, "max_json_values")
    # The collector would look at all that is made, again and again, and find nothing.
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
    if opened > MAX_DEPTH:  # no more than are opened can be nested
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
