"""Reads the bodies that clients send, within bounds. Nothing here trusts a request.

A body has a largest size and depth, and must arrive within a time. A body beyond a bound is
refused, and the error names the bound. A client is told that it was slow only if its bytes really
did not come while this side was ready to read. `ray_slo.serve.deadlines` reads headers.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import math
import re
import sys
import time
import zlib
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from ray_slo.core.text import quoted
from ray_slo.serve.deadlines import LATE_BODY_S, WHOLE_HEADER
from ray_slo.serve.errors import (
    BodyTooLarge,
    RefusedEarly,
    SLOError,
    SlowBody,
    UnsupportedEncoding,
)
from ray_slo.serve.ray_private.http_head import client_is_slow, read_whole, whole_body

MAX_DEPTH = 100  # largest depth of JSON; pickle fails at a depth of a few hundred
INLINE_BYTES = 32_768  # larger JSON bodies are parsed in a thread
TAKEN_CODINGS = ("gzip", "x-gzip", "deflate", "identity")
_CONTAINER = 10  # a list or an object counts as this many values, as it takes so long to pickle

_WHOLE = WHOLE_HEADER.encode()
_BODY_S = 60.0  # the longest time for a body, for any SLO
_PATIENCE_S = 1.0  # a body that is read for longer than this gives way to others
_TURNS = 3  # turns of the event loop in which bytes that are here reach their reader
_LATE_TIMER_S = 0.1  # a timer that is later than this shows that this process was too busy
_BLOCK = 65_536  # bytes; smaller pieces of a body are joined as they come
_LARGEST_BODIES = 16  # bodies of the largest size whose bytes may be here, while they are read

_MEMBERS = 1000  # most parts of a gzip body; each costs time, and may be empty
_ZERO_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19  # the least number of digits of an integer that needs more than 64 bits
_CHARSETS = re.compile(
    r"utf-8|utf-(16|32)([bl]e)?|(us-)?ascii|latin-?1|iso-?8859-\d\d?|(windows-|cp)125\d"
)
_TAKEN_CHARSETS = "utf-8, utf-16, utf-32, us-ascii, iso-8859-N and windows-125N"


def headers_of(request: Request) -> dict[str, str]:
    """The headers as a dictionary. If a name occurs twice, the first value counts."""
    raw = request.scope["headers"]
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)}


def name_in(path: str, prefix: str = "") -> str:
    """Return the name that a path has below a prefix, without the slashes around it.

    Args:
        path: the path, with its percent signs decoded.
    """
    return path.removeprefix(prefix).strip("/")


def _header(request: Request, name: bytes) -> bytes:
    """Return the first value of a header, or nothing. Starlette's own way costs more."""
    return next((value for key, value in request.scope["headers"] if key == name), b"")


async def body_of(
    request: Request,
    max_bytes: int,
    left_s: float,
    option: str = "max_body_bytes",
    readers: Readers | None = None,
    has_door_before: bool = True,
) -> bytes:
    """Return the body of a request.

    Args:
        max_bytes: largest size of the body, in bytes.
        left_s: time until the request's deadline, in seconds.
        option: the setting with this bound, for the message.
        readers: the bodies that are being read, including this one. Default: only this one.
        has_door_before: whether a door of ours says if it has the whole body. Otherwise a client
            may say so.

    Raises:
        BodyTooLarge: the body is larger, or declares that it is.
        SlowBody: the client did not send it by the deadline, or others were read instead.
        RefusedEarly: too many bodies are being read, or this side was too busy to read it.
        ClientDisconnect: the client left before the body came.
    """
    declared = _header(request, b"content-length").decode("latin-1")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large("body", declared[:18], max_bytes, option=option)
    size = int(declared) if declared.isdecimal() else 0
    if size and (body := whole_body(request.scope, request.receive)):
        return body  # the HTTP server reads no more than is declared
    limit_s = min(max(left_s, 0.0) + LATE_BODY_S, _BODY_S)
    chunks: list[bytes | bytearray] = []
    came = 0
    readers = readers or Readers(1)
    reading = readers.begin(limit_s)
    try:
        more = True
        while more and not reading.why:
            message = await request.receive()  # Starlette's own generator costs more
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            _keep(chunks, piece)
            came += len(piece)
            if came > max_bytes:
                raise too_large("body", f"more than {max_bytes}", max_bytes, option=option)
            readers.grew(reading, came)
            more = message.get("more_body", False)
            if more and size and not reading.why:
                taken = functools.partial(readers.grew, reading)
                body = await read_whole(request.scope, request.receive, chunks, size, taken)
                if body is not None:
                    return body
        if not reading.why:
            return bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)
    except asyncio.CancelledError:
        if not reading.why:  # the request itself is cancelled
            raise
    finally:
        readers.end(reading)
    is_here = has_door_before and _header(request, _WHOLE) == b"1"
    raise await _not_come(request, reading, sum(map(len, chunks)), limit_s, is_here)


def _keep(chunks: list[bytes | bytearray], piece: bytes) -> None:
    """Append a piece of a body. Small ones are joined: thousands of objects would need much more
    memory than their bytes."""
    last = chunks[-1] if chunks else None
    if isinstance(last, bytearray) and len(last) < _BLOCK:
        last += piece
    else:
        chunks.append(bytearray(piece) if chunks and len(piece) < _BLOCK else piece)


async def _not_come(
    request: Request, reading: Reading, came: int, limit_s: float, is_here: bool
) -> SLOError:
    """Return the error for a body that was given up after this many bytes.

    Args:
        is_here: whether a proxy of ours has the whole body.
    """
    if reading.why == _CROWDED:
        said = f"{came} bytes of the body had come when too many bodies were being read at once"
        slow = f"{said}, and its client had sent nothing for {_PATIENCE_S:g} s"
        ours = f"{said}; the service is too busy"
    else:
        said = f"{came} bytes came within {limit_s:.4g} s"
        slow = f"of the body, {said}; the request's deadline is over"
        ours = f"the service was too busy to read the body in time: {said}"
    is_ours = is_here or reading.was_busy or (reading.why == _CROWDED and not reading.rests())
    if not is_ours and await client_is_slow(request.scope, request.receive):
        return SlowBody(slow, field="body")
    return RefusedEarly(ours, reason="queue_full")


_LATE, _CROWDED = "late", "crowded"


class Reading:
    """A body that is being read, by the task that runs now.

    Attributes:
        began: when its reading began, in `time.monotonic()` seconds.
        moved: when a part of it last came.
        num_bytes: bytes of memory that it needs.
        why: the reason if reading was stopped.
        was_busy: whether this process was too busy to stop it on time.
    """

    def __init__(self, limit_s: float) -> None:
        self.began = self.moved = time.monotonic()
        self.num_bytes = 0
        self.why = ""
        self.was_busy = False
        self._cancelled = False
        self._limit_s = limit_s
        self._task: Any = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle = self._loop.call_later(limit_s, self._due)

    def rests(self) -> bool:
        """Return whether no part of it came for some time."""
        return time.monotonic() - self.moved > _PATIENCE_S

    def _due(self) -> None:
        self.was_busy = time.monotonic() - self.began > self._limit_s + _LATE_TIMER_S
        self._after(_TURNS)

    def _after(self, turns: int) -> None:
        """Stop after some turns of the loop. What a busy loop has not read yet comes first."""
        if turns:
            self._timer = self._loop.call_soon(self._after, turns - 1)
        else:
            self.stop(_LATE)

    def stop(self, why: str) -> None:
        if not self.why:
            self.why = why
            if asyncio.current_task() is not self._task:  # that one looks at `why` itself
                self._cancelled = True
                self._task.cancel()

    def end(self) -> None:
        """Note that the task no longer reads the body."""
        self._timer.cancel()
        if self._cancelled and sys.version_info >= (3, 11):
            self._task.uncancel()


class Readers:
    """Bodies that are being read. If there are too many, the one that is read for longest is given
    up if it takes more than a second, otherwise the one that needs the place.

    Args:
        most: largest number at a time.
        max_body_bytes: largest size of one body. All together may need 16 times as much memory.

    Attributes:
        most_bytes: this memory, in bytes.
    """

    def __init__(self, most: int, max_body_bytes: float = math.inf) -> None:
        self._most = most
        self.most_bytes = _LARGEST_BODIES * max_body_bytes
        self._num_bytes = 0
        self._reading: dict[Reading, None] = {}  # the oldest first

    def begin(self, limit_s: float) -> Reading:
        """Note that this task reads a body, for at most this many seconds. It may be cancelled.

        Raises:
            RefusedEarly: too many bodies are being read.
        """
        if len(self._reading) >= self._most:
            if (oldest := self._giving_way()) is None:
                said = f"{self._most} bodies are being read, as many as may (max_queued_requests)"
                raise RefusedEarly(said, reason="queue_full")
            self._give_up(oldest)
        reading = Reading(limit_s)
        self._reading[reading] = None
        return reading

    def grew(self, reading: Reading, num_bytes: int) -> None:
        """Note that a part of a body came, and the memory that the body needs now, in bytes. If all
        need too much, one is given up, perhaps this one."""
        if reading not in self._reading:
            return
        reading.moved = time.monotonic()
        self._num_bytes += num_bytes - reading.num_bytes
        reading.num_bytes = num_bytes
        while self._num_bytes > self.most_bytes and reading in self._reading:
            self._give_up(self._giving_way() or reading)

    def end(self, reading: Reading) -> None:
        """Note that the body is complete, or is no longer read."""
        self._forget(reading)
        reading.end()

    def _giving_way(self) -> Reading | None:
        oldest = next(iter(self._reading))
        return oldest if time.monotonic() - oldest.began > _PATIENCE_S else None

    def _give_up(self, reading: Reading) -> None:
        self._forget(reading)
        reading.stop(_CROWDED)

    def _forget(self, reading: Reading) -> None:
        if reading in self._reading:
            del self._reading[reading]
            self._num_bytes -= reading.num_bytes


def too_large(
    field: str, size: int | str, most: int, what: str = "bytes", option: str = "max_body_bytes"
) -> BodyTooLarge:
    """Return the error for a body or a field of a message that is too large."""
    return BodyTooLarge(
        f"{field} has {size} {what}; at most {most} are read ({option})", field=field
    )


def check_coding(request: Request) -> str:
    """Return the content coding of a body, in small letters. It is empty if there is none.

    Raises:
        UnsupportedEncoding: it is none that is taken, or there are several.
    """
    said = [value for name, value in request.scope["headers"] if name == b"content-encoding"]
    coding = b",".join(said).decode("latin-1").strip().lower()
    if coding and coding not in TAKEN_CODINGS:
        raise UnsupportedEncoding(
            f"content-encoding {quoted(coding)} is not taken; send one of "
            f"{', '.join(TAKEN_CODINGS)}, or the body as it is without this header",
            field="content-encoding",
        )
    return coding.removeprefix("x-").replace("identity", "")


def decoded(body: bytes, coding: str, max_bytes: int, option: str = "max_body_bytes") -> bytes:
    """Return a compressed body as it was. It is not decompressed further than its bound.

    Args:
        coding: "gzip" or "deflate".
        max_bytes: largest size of the result, in bytes.
        option: the setting with this bound, for the message.

    Raises:
        BodyTooLarge: the result is larger.
        ValueError: the body is not compressed in this way.
    """
    bits = 31
    if coding == "deflate":  # zlib's format; some clients leave out its head
        is_zlib = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
        bits = 15 if is_zlib else -15
    view, at, parts, size = memoryview(body), 0, [], 0
    for _ in range(_MEMBERS):
        member = zlib.decompressobj(bits)
        while not member.eof:
            piece = view[at : at + _BLOCK]
            if not piece:
                raise ValueError("it ends too early")
            try:
                parts.append(member.decompress(piece, max_bytes + 1 - size))
            except zlib.error as error:
                raise ValueError(str(error)) from None
            if (size := size + len(parts[-1])) > max_bytes:
                what = f"bytes after {coding}"
                raise too_large("body", f"more than {max_bytes}", max_bytes, what, option)
            at += len(piece) - len(member.unused_data)
        if at == len(body):
            return b"".join(parts)
        if coding == "deflate":
            raise ValueError("more bytes follow its end")
    raise ValueError(f"it has more than {_MEMBERS} parts")


def in_utf8(body: bytes, content_type: str) -> bytes:
    """Return text in UTF-8, without a byte order mark. Its charset is in the content type.
    Otherwise it is a form of Unicode, as for JSON in Python.

    Raises:
        UnsupportedEncoding: the charset is none that is taken.
        ValueError: the body is not in its charset.
    """
    charset = ""
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            charset = value.strip().strip('"').lower()
    charset = re.sub(r"^utf(?=\d)", "utf-", charset)
    if charset and not _CHARSETS.fullmatch(charset):
        raise _unknown(charset)
    begin = body[:4]
    if charset in ("", "utf-8") and begin.isascii() and 0 not in begin:
        return body
    encoding = "utf-8-sig" if charset == "utf-8" else charset
    if charset in ("", "utf-16", "utf-32"):  # a byte order mark or zeros tell the rest
        found = json.detect_encoding(body)
        encoding = found if found.startswith(charset) else charset
    if encoding == "utf-8":
        return body
    try:
        return body.decode(encoding).removeprefix("\ufeff").encode()
    except LookupError:
        raise _unknown(charset) from None


def _unknown(charset: str) -> UnsupportedEncoding:
    said = f"charset {quoted(charset)} is not taken; send one of {_TAKEN_CHARSETS}"
    return UnsupportedEncoding(said, field="content-type")


def json_of(body: bytes, max_values: int, content_type: str = "") -> Any:
    """Return the JSON in a body. It is bounded because parsing holds Python's lock in any thread.

    Args:
        max_values: approximate largest number of values. A list or an object counts as ten. Commas
            and brackets are counted, also those in strings.
        content_type: may name the charset.

    Raises:
        ValueError: the body is not JSON, or is nested too deeply.
        BodyTooLarge: it has too many values.
        UnsupportedEncoding: its charset is none that is taken.
    """
    body = in_utf8(body, content_type)
    opened = body.count(b"[") + body.count(b"{")
    if (values := 1 + body.count(b",") + _CONTAINER * opened) > max_values:
        what = "values, where a list or an object counts as ten"
        raise too_large("body", values, max_values, what, "max_json_values")
    # The garbage collector would scan all new objects repeatedly, and find nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = orjson.loads(body)
        digits = body.translate(_ZERO_DIGITS)
        # Only an integer has so many digits without a point before them.
        if _LONG_NUMBER in digits and _LONG_NUMBER in digits.replace(b"." + _LONG_NUMBER, b"."):
            value = json.loads(body)  # slower, but exact: orjson rounds integers beyond 64 bits
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
