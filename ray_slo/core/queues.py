"""A queue in deadline order (earliest first, ties in order of arrival) with cancellation."""

from __future__ import annotations

from bisect import bisect_left, insort_right
from collections.abc import Iterable, Iterator
from operator import attrgetter

from ray_slo.core.requests import Request

_deadline = attrgetter("deadline")


class DeadlineQueue:
    """Requests of one model, earliest deadline first.

    Appending in deadline order and taking from the head are O(1); a request with an earlier
    deadline than the tail is inserted by bisection (one `memmove`).
    """

    __slots__ = ("_head", "_items")

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._items: list[Request] = []
        self._head = 0  # items before it are gone; compacted now and then
        self.extend(requests)

    def __len__(self) -> int:
        return len(self._items) - self._head

    def __getitem__(self, index: int) -> Request:
        """The request at `index` ≥ 0 from the head. Raises IndexError past the tail."""
        return self._items[self._head + index]

    def __iter__(self) -> Iterator[Request]:
        for i in range(self._head, len(self._items)):
            yield self._items[i]

    @property
    def head(self) -> Request:
        """The request with the earliest deadline. Raises IndexError when empty."""
        return self._items[self._head]

    def position(self, deadline: float) -> int:
        """How many requests have an earlier deadline than `deadline`. O(log n)."""
        return bisect_left(self._items, deadline, lo=self._head, key=_deadline) - self._head

    def push(self, request: Request) -> None:
        """Insert in deadline order, after equal deadlines."""
        items = self._items
        if len(items) == self._head or items[-1].deadline <= request.deadline:
            items.append(request)
        else:
            insort_right(items, request, lo=self._head, key=_deadline)

    def extend(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.push(request)

    def take(self, count: int, start: int = 0) -> list[Request]:
        """Remove and return `count` requests from position `start` on (fewer if there are fewer).

        From the head it costs O(count); from the middle one `memmove` more.
        """
        if start:
            first = self._head + start
            taken = self._items[first : first + count]
            del self._items[first : first + count]
            return taken
        end = min(self._head + count, len(self._items))
        taken = self._items[self._head : end]
        self._head = end
        if end > 64 and 2 * end > len(self._items):
            del self._items[:end]
            self._head = 0
        return taken

    def pop(self) -> Request:
        """Remove and return the head. Raises IndexError when empty."""
        if not len(self):
            raise IndexError("pop from an empty DeadlineQueue")
        return self.take(1)[0]

    def remove(self, request: Request) -> bool:
        """Remove this very request; False if it is not here."""
        items = self._items
        i = bisect_left(items, request.deadline, lo=self._head, key=_deadline)
        while i < len(items) and items[i].deadline == request.deadline:
            if items[i] is request:
                del items[i]
                return True
            i += 1
        return False
