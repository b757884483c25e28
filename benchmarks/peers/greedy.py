"""Greedy: runs all waiting requests on the most accurate model that meets the head's deadline.

It looks at the queue as RAMSIS does, but not at the load. So a slow model may make later requests
late.
"""

from __future__ import annotations

from benchmarks.peers.central import CentralQueue, Choice, Offered


class Greedy(CentralQueue):
    """Runs all waiting requests together, up to the fastest model's largest batch.

    Args:
        load, window_ms: see `CentralQueue`; they have no effect.
    """

    def _choose(self, offered: Offered, load: float, waiting: int, slack_s: float) -> Choice:
        fastest, most = offered.fastest
        size = min(waiting, most)
        for name in reversed(list(offered.profiles)):
            if offered.profiles[name].latency(size) <= slack_s:
                return name, size
        return fastest, size
