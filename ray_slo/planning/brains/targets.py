"""The wanted number of workers of a kind over time. It changes only when plans have wanted the
change for some time, so workers do not start and stop all the time. Pure: no clock."""

from __future__ import annotations

from collections import deque


class Target:
    """Follows the numbers that plans want of one kind of worker.

    Worked example: plans want 2 workers, then 4, then 1. With `up_s=0` the number rises at once.
    With `down_s=10` it falls when fewer were wanted for 10 s.

        >>> target = Target(2, up_s=0.0, down_s=10.0)
        >>> target.wants(0.0, 4)
        >>> target.at(0.0)
        4
        >>> target.wants(5.0, 1)
        >>> target.at(5.0), target.at(14.9), target.at(15.0)
        (4, 4, 1)

    Args:
        first: initial number of workers.
        up_s, down_s: how long more, or fewer, workers must have been wanted before the number
            changes, in seconds.
    """

    def __init__(self, first: int, up_s: float, down_s: float) -> None:
        self._now = first
        self.up_s, self.down_s = up_s, down_s
        self._wanted: deque[tuple[float, int]] = deque()  # time in seconds, and number of workers

    def wants(self, now: float, workers: int, *, at_once: bool = False) -> None:
        """Take the number of workers that a plan wants from now on. With `at_once`, the number
        changes without a delay."""
        if at_once:
            self._wanted.clear()
            self._now = workers
        self._wanted.append((now, workers))

    def at(self, now: float) -> int:
        """Return the number of workers now. Successive calls have increasing times `now`."""
        more, fewer = min(self._lately(now, self.up_s)), max(self._lately(now, self.down_s))
        if more > self._now:
            self._now = more
        elif fewer < self._now:
            self._now = fewer
        oldest = now - max(self.up_s, self.down_s)
        while len(self._wanted) > 1 and self._wanted[1][0] <= oldest:
            self._wanted.popleft()
        return self._now

    def _lately(self, now: float, for_s: float) -> list[int]:
        """Return the numbers that were wanted in the last `for_s` seconds."""
        since = now - for_s
        found = [n for at, n in self._wanted if at > since]
        before = [n for at, n in self._wanted if at <= since]
        return (before[-1:] or [self._now]) + found
