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

    Attributes:
        items, start: for inner loops, which only read them: the queued requests are
            `items[start:]`.
    """

    __slots__ = ("items", "start")

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.items: list[Request] = []
        self.start = 0  # earlier items are gone; compacted from time to time
        self.extend(requests)

    def __len__(self) -> int:
        return len(self.items) - self.start

    def __getitem__(self, index: int) -> Request:
        """The request at `index` ≥ 0 from the head. Raises IndexError past the tail."""
        return self.items[self.start + index]

    def __iter__(self) -> Iterator[Request]:
        for i in range(self.start, len(self.items)):
            yield self.items[i]

    @property
    def head(self) -> Request:
        """The request with the earliest deadline. Raises IndexError when empty."""
        return self.items[self.start]

    def position(self, deadline: float) -> int:
        """How many requests have an earlier deadline than `deadline`. O(log n)."""
        return bisect_left(self.items, deadline, lo=self.start, key=_deadline) - self.start

    def push(self, request: Request) -> None:
        """Insert in deadline order, after equal deadlines."""
        items = self.items
        if len(items) == self.start or items[-1].deadline <= request.deadline:
            items.append(request)
        else:
            insort_right(items, request, lo=self.start, key=_deadline)

    def extend(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.push(request)

    def take(self, count: int, start: int = 0) -> list[Request]:
        """Remove and return `count` requests from position `start` on (fewer if there are fewer).

        From the head it costs O(count); from the middle one `memmove` more.
        """
        if start:
            first = self.start + start
            taken = self.items[first : first + count]
            del self.items[first : first + count]
            return taken
        end = min(self.start + count, len(self.items))
        taken = self.items[self.start : end]
        self.start = end
        if end > 64 and 2 * end > len(self.items):
            del self.items[:end]
            self.start = 0
        return taken

    def pop(self) -> Request:
        """Remove and return the head. Raises IndexError when empty."""
        if not len(self):
            raise IndexError("pop from an empty DeadlineQueue")
        return self.take(1)[0]

    def remove(self, request: Request) -> bool:
        """Remove this object; False if it is not here."""
        items = self.items
        i = bisect_left(items, request.deadline, lo=self.start, key=_deadline)
        while i < len(items) and items[i].deadline == request.deadline:
            if items[i] is request:
                del items[i]
                return True
            i += 1
        return False
