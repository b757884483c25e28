"""Times at which something must be looked at. Setting one costs O(log n)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeVar


class Timed(Protocol):
    """What has a timer. `timer_at`: when it rings, seconds; `inf` where it is off."""

    timer_at: float


T = TypeVar("T", bound=Timed)


class Timers(Generic[T]):
    """A heap of timers. An entry that is not its item's `timer_at` is void; void entries are
    thrown away when they surface. `heap`: for `earliest`."""

    __slots__ = ("_serial", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, T]] = []
        self._serial = 0

    def set(self, item: T, at: float, order: int | None = None) -> None:
        """Ring for `item` at `at` instead of what was set before; `inf`: not at all.

        Args:
            order: of timers that ring at one instant; by default the order of setting.
        """
        if at == item.timer_at:
            return
        item.timer_at = at
        if order is None:
            order = self._serial = self._serial + 1
        if at < math.inf:
            heappush(self.heap, (at, order, item))

    def due(self, now: float) -> Iterable[T]:
        """Items whose timers ring by `now`; each timer is off then."""
        heap = self.heap
        return self._ringing(now) if heap and heap[0][0] <= now else ()

    def _ringing(self, now: float) -> Iterator[T]:
        heap = self.heap
        while heap and heap[0][0] <= now:
            at, _, item = heappop(heap)
            if item.timer_at == at:
                item.timer_at = math.inf
                yield item

    def first(self) -> T | None:
        """The item whose timer rings next; None without a timer."""
        heap = self.heap
        while heap and heap[0][2].timer_at != heap[0][0]:
            heappop(heap)
        return heap[0][2] if heap else None

    def next_at(self) -> float:
        """When the next timer rings, seconds; `inf` without a timer."""
        return earliest((self.heap,))


def earliest(heaps: Iterable[list[Any]]) -> float:
    """When the first timer of several heaps rings, seconds; `inf` without a timer."""
    first = math.inf
    for heap in heaps:
        while heap:
            at, _, item = heap[0]
            if item.timer_at == at:
                if at < first:
                    first = at
                break
            heappop(heap)
    return first
