"""Jellyfish+ (RAMSIS §7): the most accurate model whose throughput covers the load.

Its inference takes at most half the SLO, so that waiting may take the other half. A batch size
suffices if ℓ(b) ≤ SLO / 2 and b / ℓ(b) exceeds the load per worker, with 5 % to spare as in the
published code. The model is the most accurate one with such a size, and batches may grow up to its
largest such size. If no model has one, the fastest runs with its largest batches.

Worked example: ℓ(b) = 10 + 10·b ms (70 %) and 20 + 20·b ms (80 %), SLO 200 ms, one worker. At 30
requests/s, 20 + 20·b ≤ 100 allows b ≤ 4, and 4 / 0.1 s = 40/s suffices: the accurate model with up
to 4. At 50/s it is the other model: 9 / 0.1 s = 90/s.
"""

from __future__ import annotations

from benchmarks.peers.central import CentralQueue, Choice, Offered


class Jellyfish(CentralQueue):
    """The most accurate variant with enough throughput in half the SLO.

    Args:
        headroom: ratio of throughput to load that a batch size must have.
        load, window_ms: see `CentralQueue`.
    """

    def __init__(
        self, *, headroom: float = 1.05, load: float | None = None, window_ms: float = 500.0
    ) -> None:
        super().__init__(load=load, window_ms=window_ms)
        self._headroom = headroom

    def _choose(self, offered: Offered, load: float, waiting: int, slack_s: float) -> Choice:
        needed = self._headroom * load / offered.workers
        for name in reversed(list(offered.profiles)):
            profile = offered.profiles[name]
            for b in range(profile.max_batch_within(offered.slo_s / 2), 0, -1):
                if b / profile.latency(b) >= needed:
                    return name, b
        return offered.fastest
