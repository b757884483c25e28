"""Greedy: for what waits, the most accurate model that meets the head's deadline.

It looks at the queue as RAMSIS does but at no load: a slow model now makes the next ones late.
"""

from __future__ import annotations

from benchmarks.peers.central import CentralQueue, Choice, Offered


class Greedy(CentralQueue):
    """All that waits goes together, in the fastest model's largest batch at most.

    Args:
        load, window_ms: see `CentralQueue`; without effect.
    """

    def _choose(self, offered: Offered, load: float, waiting: int, slack_s: float) -> Choice:
        fastest, most = offered.fastest
        size = min(waiting, most)
        for name in reversed(list(offered.profiles)):
            if offered.profiles[name].latency(size) <= slack_s:
                return name, size
        return fastest, size
