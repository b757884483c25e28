"""What a plain deployment with `@ray_slo.batch` functions and the door before it tell each other.

The door is in Serve's proxy (`proxy.door`) or HAProxy (`proxy.haproxy_rules`). It lets on as many
requests of a path as can be answered in time. An answer counts if functions with `@ray_slo.batch`
were called for it. From other answers, the door learns nothing.

The door says when a request came. A busy replica gets it some time later. The SLO of its first
calls counts from then.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

from ray_slo.serve.deadlines import ARRIVED_HEADER, BATCH_HEADER, note_headers, without_request
from ray_slo.serve.proxy.modes import has_door_before, since

if TYPE_CHECKING:
    from ray_slo.serve.batch.batcher import Batcher

_BATCH, _ARRIVED = BATCH_HEADER.encode(), ARRIVED_HEADER.encode()
_PROCESS = uuid.uuid4().hex[:8]


class Uses:
    """The functions that are called for a request.

    Attributes:
        before_s: time from the door to this process, in seconds. It is 0 after the first answer of
            a function, or of the request: later calls come later by themselves.
        calls: number of calls, by function.

    Args:
        before_s: see above.
    """

    def __init__(self, before_s: float) -> None:
        self.before_s = before_s
        self.calls: Counter[Batcher] = Counter()
        self._came_at = self._since = time.monotonic()
        self._open = 0  # calls without an answer
        self._inside_s = self._longest_s = self._planned_s = 0.0

    def begin(self, function: Batcher, slo_s: float) -> None:
        """Note a call of a function with this SLO, in seconds."""
        if not self._open:
            self._since, self._longest_s = time.monotonic(), 0.0
        self._open += 1
        self.calls[function] += 1
        self._longest_s = max(self._longest_s, slo_s)

    def end(self) -> None:
        """Note an answer."""
        self.before_s = 0.0
        self._open -= 1
        if not self._open:
            self._inside_s += time.monotonic() - self._since
            self._planned_s += self._longest_s

    @property
    def allowed_s(self) -> float:
        """Time that a request may take, in seconds: the SLOs of calls one after another, and the
        time outside of functions."""
        now, planned_s, inside_s = time.monotonic(), self._planned_s, self._inside_s
        if self._open:  # a stream
            planned_s, inside_s = planned_s + self._longest_s, inside_s + now - self._since
        return planned_s + now - self._came_at - inside_s


_uses: ContextVar[Uses | None] = ContextVar("uses", default=None)


def note_request(headers: Iterable[tuple[Any, Any]]) -> None:
    """Note that the current context belongs to an HTTP request with these headers."""
    if not has_door_before():
        note_headers(headers)
        return
    # Only a door wrote this header: the middleware before this one removes those of others.
    arrived = dict(headers).get(_ARRIVED, b"").decode("latin-1")
    before_s = since(arrived, time.time())
    note_headers(headers, before_s)
    _uses.set(Uses(before_s))


def uses() -> Uses | None:
    """Return what is known of the request of the current context."""
    return _uses.get()


def without_uses() -> Context:
    """Return a copy of the current context that belongs to no request."""
    context = without_request()
    context.run(_uses.set, None)
    return context


def said() -> list[tuple[bytes, bytes]]:
    """Return the header for the answer to the request of the current context: this process, the
    requests/s that it can answer, and the milliseconds that one may take. No header if no function
    was called for it, or if it is not known what they can do."""
    uses = _uses.get()
    if uses is None:
        return []
    uses.before_s = 0.0
    rates = (function.capacity / count for function, count in uses.calls.items())
    rate = min(rates, default=math.inf)
    if math.isinf(rate):
        return []
    return [(_BATCH, f"{_PROCESS};{rate:.3f};{1e3 * uses.allowed_s:.3f}".encode())]
