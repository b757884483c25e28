"""Timers: times at which a policy must check something. To set one costs O(log n)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeVar


class Timed(Protocol):
    """An object with a timer. `timer_at`: when it is due, seconds; `inf` if it is off."""

    timer_at: float


T = TypeVar("T", bound=Timed)


class Timers(Generic[T]):
    """A heap of timers. An entry that differs from its item's `timer_at` is stale; stale entries
    are removed when they reach the top. `heap`: for `earliest`."""

    __slots__ = ("_serial", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, T]] = []
        self._serial = 0

    def set(self, item: T, at: float, order: int | None = None) -> None:
        """Set the timer of `item` to `at`, instead of its earlier time; `inf`: switch it off.

        Args:
            order: order of timers that are due at one instant; by default the order of setting.
        """
        if at == item.timer_at:
            return
        item.timer_at = at
        if order is None:
            order = self._serial = self._serial + 1
        if at < math.inf:
            heappush(self.heap, (at, order, item))

    def due(self, now: float) -> Iterable[T]:
        """Items whose timers are due by `now`; their timers are switched off."""
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
        """The item whose timer is due next; None without a timer."""
        heap = self.heap
        while heap and heap[0][2].timer_at != heap[0][0]:
            heappop(heap)
        return heap[0][2] if heap else None

    def next_at(self) -> float:
        """Time when the next timer is due, seconds; `inf` without a timer."""
        return earliest((self.heap,))


def earliest(heaps: Iterable[list[Any]]) -> float:
    """Time when the first timer of several heaps is due, seconds; `inf` without a timer."""
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
