"""Room for bursts: the share of the workers' time that may be planned, and the share of the
requests that bursts make late.

Take a pool of n workers of which B are busy on average. Work arrives with a variance of σ²
worker-seconds² per second. σ² = Σ d·r·s² over the uses, where d is the index of dispersion of a
use's arrivals, r its rate, and s = ℓ(b)/b the work of a request. The workers do n worker-seconds of
work per second. So the waiting work is a reflected Brownian motion with drift B − n and variance σ²
(heavy traffic). A request may wait for W before its batch starts, so work beyond K = n·W is late. A
scheduler that knows deadlines drops it. This is a second barrier, at K. The share of the work that
is lost there is

    bad = x / (exp(2·(n − B)·K / σ²) − 1),   x = (n − B)/B;    σ²/(2·B·K) at n = B,

for any load. In overload it goes to 1 − n/B. For one use, (n − B)·K/σ² = x·k/d, where k = n·b·W/ℓ
is the number of requests that start within W. So more workers, larger batches and more slack make
room for bursts, and dispersion takes it. Requests start in whole batches. When a burst comes, half
a batch of the requests that start within W has already started on average. So k is n·b·W/ℓ − (b −
1)/2, which matters for few workers.

`tests/planning/auto/test_headroom.py` compares this with the simulator, for the policy `deferred`
and Poisson arrivals.

Worked example: one worker, batches of 8, W = ℓ: k = 4.5. With 80 % of its time planned, x = 0.25:

    >>> round(bad_rate(busy=0.8, workers=1, room=4.5 / 8, variance=0.8 / 8), 3)
    0.029
    >>> round(occupancy(workers=1, room=4.5 / 8, variance=1 / 8, target=0.01), 2)
    0.71
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ray_slo.planning.auto.limits import Room
from ray_slo.planning.auto.uses import Use

_LARGE = 700.0  # exponents above this overflow
_STEPS = 40  # number of steps of a bisection


def bad_rate(busy: float, workers: float, room: float, variance: float) -> float:
    """Return the share of the work that bursts make late.

    Args:
        busy: B, the mean number of busy workers.
        workers: n, the number of workers.
        room: K, the work that may wait, in worker-seconds.
        variance: σ², in worker-seconds² per second.
    """
    if busy <= 0:
        return 0.0
    if workers <= 0 or room <= 0:
        return 1.0
    if variance <= 0:
        return max(1 - workers / busy, 0.0)
    exponent = 2 * (workers - busy) * room / variance
    if exponent > _LARGE:
        return 0.0
    if abs(exponent) < 1e-9:
        return min(variance / (2 * busy * room), 1.0)
    if exponent < -_LARGE:
        return 1 - workers / busy
    return min((workers - busy) / busy / math.expm1(exponent), 1.0)


def occupancy(workers: float, room: float, variance: float, target: float) -> float:
    """Return the largest share of the workers' time that may be planned for a bad rate of `target`.

    Args:
        workers, room: as in `bad_rate`.
        variance: σ² per busy worker.
        target: the allowed bad rate.
    """
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        busy = middle * workers
        if bad_rate(busy, workers, room, variance * busy) <= target:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Pool:
    """Workers that serve the same uses, and the load of these uses.

    Attributes:
        busy: mean number of busy workers.
        wait_s: time that work may wait, in seconds: the mean over the work.
        half_s: work of half a batch, in worker-seconds.
        variance: σ² per busy worker.
        depth: number of tasks on the longest path of its requests. They share the bad rate.
    """

    busy: float
    wait_s: float
    half_s: float
    variance: float
    depth: int = 1

    @classmethod
    def of(cls, uses: Sequence[Use], depth: int = 1) -> Pool:
        busy = sum(use.busy for use in uses)

        def mean(value: Callable[[Use], float]) -> float:
            return sum(use.busy * value(use) for use in uses) / busy

        return cls(
            busy,
            mean(lambda use: use.wait_s),
            mean(lambda use: (use.config.latency_s - 1 / use.config.throughput) / 2),
            mean(lambda use: use.dispersion / use.config.throughput),
            depth,
        )

    def room(self, workers: int) -> float:
        """Return the work that may wait, in worker-seconds. It is at least half of a request's
        work, even if a batch has the worker to itself."""
        return max(workers * self.wait_s - self.half_s, self.variance / 2)

    def bad_rate(self, workers: int) -> float:
        return bad_rate(self.busy, workers, self.room(workers), self.variance * self.busy)

    def too_full(self, workers: int, target: float) -> bool:
        return self.bad_rate(workers) > target / self.depth * (1 + 1e-6)

    def most_busy(self, workers: int, target: float) -> float:
        """Return the mean number of these workers that may be busy."""
        room = self.room(workers)
        return workers * occupancy(workers, room, self.variance, target / self.depth)

    def allowed(self, workers: int, most: int, target: float) -> Room:
        """Return the room for bursts, for as many workers as this load needs, but at most `most`.
        The time that must be free grows more slowly than the number of workers. So the room is also
        enough for more workers."""
        while workers < most and self.too_full(workers, target):
            workers += 1
        low, high = (self.most_busy(n, target) for n in (workers, workers + 1))
        slope = min(max(high - low, low / workers), 1.0)
        too_few = slope * (workers - 1) - 0.999 * self.busy  # one worker less must be too few
        return Room(slope, max(slope * workers - low, too_few, 0.0))


def pools_of(
    uses: Sequence[Use], sharing: bool, depths: Mapping[str, int]
) -> dict[tuple[str, str], Pool]:
    """Return the pools by variant and kind. If variants share workers, a kind has one pool with the
    variant "".

    Args:
        depths: number of tasks on the longest path, by stream.
    """
    grouped: dict[tuple[str, str], list[Use]] = {}
    for use in uses:
        grouped.setdefault(("", use.config.kind) if sharing else use.pair, []).append(use)
    return {
        pair: Pool.of(of_pair, max(depths[node[0]] for use in of_pair for node in use.nodes))
        for pair, of_pair in grouped.items()
    }


def late_by_stream(
    pools: Mapping[tuple[str, str], Pool],
    workers: Mapping[tuple[str, str], int],
    uses: Sequence[Use],
    sharing: bool,
) -> dict[str, float]:
    """Return the share of each stream's requests that bursts make late at one task or more."""
    rates: dict[tuple[str, str], float] = {}
    late: dict[tuple[str, str], float] = {}
    for use in uses:
        key = ("", use.config.kind) if sharing else use.pair
        bad = pools[key].bad_rate(workers[key])
        for node in use.nodes:
            rates[node] = rates.get(node, 0.0) + use.rate
            late[node] = late.get(node, 0.0) + use.rate * bad
    in_time: dict[str, float] = {}
    for (stream, task), rate in rates.items():
        in_time[stream] = in_time.get(stream, 1.0) * (1 - late[stream, task] / rate)
    return {stream: 1 - share for stream, share in in_time.items()}
