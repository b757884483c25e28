"""What answers of a plain deployment say of its `@ray_slo.batch` functions to the door before it.

The door is in Serve's proxy (`proxy.door`) or HAProxy (`proxy.haproxy_rules`). It lets on as many
requests of a path as can be answered in time. An answer counts if functions with `@ray_slo.batch`
were called for it. From other answers, the door learns nothing.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ray_slo.serve.deadlines import BATCH_HEADER, note_headers
from ray_slo.serve.proxy.modes import has_door_before

if TYPE_CHECKING:
    from ray_slo.serve.batch.batcher import Batcher

_BATCH = BATCH_HEADER.encode()
_PROCESS = uuid.uuid4().hex[:8]


class _Uses:
    """The functions that were called for a request, and the time when it came (seconds)."""

    def __init__(self) -> None:
        self.came_at = time.monotonic()
        self.calls: Counter[Batcher] = Counter()


_uses: ContextVar[_Uses | None] = ContextVar("uses", default=None)


def note_request(headers: Iterable[tuple[Any, Any]]) -> None:
    """Note that the current context belongs to an HTTP request with these headers."""
    note_headers(headers)
    if has_door_before():
        _uses.set(_Uses())


def note_use(batcher: Batcher) -> None:
    """Note a call of a function for the request of the current context."""
    if (uses := _uses.get()) is not None:
        uses.calls[batcher] += 1


def said() -> list[tuple[bytes, bytes]]:
    """Return the header for the answer to the request of the current context: this process, the
    requests/s that it can answer, their SLO in milliseconds, and the milliseconds since the request
    came. No header if no function was called for it, or if it is not known what they can do."""
    uses = _uses.get()
    if uses is None or not uses.calls:
        return []
    can = [(*batcher.capacity, count) for batcher, count in uses.calls.items()]
    rate = min(rate / count for rate, _, count in can)
    if math.isinf(rate):
        return []
    slo_ms = 1e3 * max(slo_s for _, slo_s, _ in can)
    inside_ms = 1e3 * (time.monotonic() - uses.came_at)
    return [(_BATCH, f"{_PROCESS};{rate:.3f};{slo_ms:.6g};{inside_ms:.6g}".encode())]
