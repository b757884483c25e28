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

    def __iter__(self) -> Iterator[Request]:
        for i in range(self._head, len(self._items)):
            yield self._items[i]

    @property
    def head(self) -> Request:
        """The request with the earliest deadline. Raises IndexError when empty."""
        return self._items[self._head]

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

    def take(self, count: int) -> list[Request]:
        """Remove and return the first `count` requests (fewer if there are fewer)."""
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
