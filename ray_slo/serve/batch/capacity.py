"""What a plain deployment with `@ray_slo.batch` functions and the door before it tell each other.

The door is in Serve's proxy (`proxy.door`) or HAProxy (`proxy.haproxy_rules`). It lets on as many
requests of a path as can be answered in time. An answer counts if functions with `@ray_slo.batch`
were called for it. From other answers, the door learns nothing.

The door says when a request came. A busy replica gets it some time later. The SLO of its
first calls counts from then. Answers wait for the event loop, so batches end so much earlier.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ray_slo.core.quantile import FEW_SAMPLES, Quantile
from ray_slo.serve.deadlines import ARRIVED_HEADER, BATCH_HEADER, MARK_HEADER, note_headers
from ray_slo.serve.proxy.modes import believes, has_door_before, has_haproxy_of_ours, since

if TYPE_CHECKING:
    from ray_slo.serve.batch.batcher import Batcher

_BATCH, _ARRIVED, _MARK = BATCH_HEADER.encode(), ARRIVED_HEADER.encode(), MARK_HEADER.encode()
_PROCESS = uuid.uuid4().hex[:8]
_after = Quantile(0.95, prior=FEW_SAMPLES)  # seconds until a caller goes on with its answer


class _Uses:
    """The functions that were called for a request, the time when it came here, and how long before
    it came to the door (seconds). The latter is 0 after the first answer of a function."""

    def __init__(self, before_s: float) -> None:
        self.came_at, self.before_s = time.monotonic(), before_s
        self.calls: Counter[Batcher] = Counter()


_uses: ContextVar[_Uses | None] = ContextVar("uses", default=None)


def note_request(headers: Iterable[tuple[Any, Any]]) -> None:
    """Note that the current context belongs to an HTTP request with these headers."""
    before_s = _before_s(dict(headers)) if (has_door := has_door_before()) else 0.0
    # Serve's proxy subtracts this time from the request's own; HAProxy cannot.
    note_headers(headers, before_s if has_haproxy_of_ours() else 0.0)
    if has_door:
        _uses.set(_Uses(before_s))


def _before_s(headers: dict[Any, Any]) -> float:
    """Return the time since the door got a request, in seconds."""
    if has_haproxy_of_ours() and not believes(headers.get(_MARK, b"")):
        return 0.0
    return since(headers.get(_ARRIVED, b"").decode("latin-1"), time.time())


def note_use(batcher: Batcher) -> float:
    """Note a call of a function for the request of the current context. Return how much of the SLO
    the request spends outside of the function, in seconds."""
    if (uses := _uses.get()) is None:
        return _after.value(0.0)
    uses.calls[batcher] += 1
    return uses.before_s + _after.value(0.0)


def note_answer(answered_at: float) -> None:
    """Note that a caller goes on with an answer that it got at this time (`time.monotonic()`
    seconds)."""
    _after.add(time.monotonic() - answered_at)
    if (uses := _uses.get()) is not None:
        uses.before_s = 0.0


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
