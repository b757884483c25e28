"""DeepRecSys' query distribution (DRS), as in Kairos §7: a threshold on the size.

Requests above the threshold wait for base instances, the others for auxiliary ones. Both are served
first come, first served. `climb` finds the threshold by hill climbing, as DeepRecSys does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from benchmarks.peers.ribbon import SizedPeer
from ray_slo.core import Request
from ray_slo.core.decisions import Action


class DeepRecSys(SizedPeer):
    """Sends requests of more than `threshold` items to base instances, others to auxiliary ones.

    If there are only instances of one kind, they serve all requests.
    """

    def __init__(self, threshold: int, base: str | None = None) -> None:
        super().__init__(base)
        self._threshold = threshold
        self._large: deque[Request] = deque()
        self._small: deque[Request] = deque()

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for r in requests:
            large = r.size > self._threshold if self._bases and self._others else self._bases
            (self._large if large else self._small).append(r)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        gone = {r.id for r in requests}
        self._large = deque(r for r in self._large if r.id not in gone)
        self._small = deque(r for r in self._small if r.id not in gone)

    def _changed(self, now: float) -> None:
        waiting = sorted([*self._large, *self._small], key=lambda r: (r.arrival, r.id))
        self._large.clear()
        self._small.clear()
        self.requests_arrived(now, waiting)

    def _act(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for queue, workers in ((self._large, self._bases), (self._small, self._others)):
            idle = [w for w in workers if w not in self._running] if queue else []
            actions += [self._dispatch(now, queue.popleft(), w) for w in idle[: len(queue)]]
        return actions


def climb(
    throughput: Callable[[int], float], largest: int, start: int = 100, step: int = 128
) -> tuple[int, float, int]:
    """Climb over the threshold; the step is halved where neither side is better.

    Returns:
        The best threshold, its throughput, and the number of evaluated thresholds.
    """
    known: dict[int, float] = {}

    def value(threshold: int) -> float:
        if threshold not in known:
            known[threshold] = throughput(threshold)
        return known[threshold]

    at = start
    while step >= 4:
        around = [t for t in (at - step, at + step) if 0 <= t <= largest]
        best = max([at, *around], key=value)
        if best == at:
            step //= 2
        at = best
    return at, value(at), len(known)
