"""Room for interruptions: the load that may be planned for spot workers.

A spot worker is interrupted ρ times an hour, and another one replaces it after `replacement_s`. So
it is present for the share a = 1/(1 + ρ·replacement_s/3600) of the time. K of the n workers in a
pool are present, independently, so K is binomial. Work that these cannot do is lost. The pool may
have a mean load of B workers if

    E[(B − K)⁺] ≤ loss · B.

B ≤ a·n follows if the loss is small. Every pool must meet the condition alone: workers of other
kinds do not help.

Worked example: 2 workers are present 90 % of the time. Both are absent 1 % of the time, and one is
absent 18 % of the time. So at most the work of one worker may be planned. A single worker may have
no work.

    >>> round(most_busy(2, 0.9, loss=0.01), 3), most_busy(1, 0.9, loss=0.01)
    (1.0, 0.0)
    >>> room(1.5, 0.9, loss=0.01, most=9).workers(1.5)
    4
"""

from __future__ import annotations

import math

import numpy as np

from ray_slo.planning.auto.limits import Room


def most_busy(workers: int, there: float, loss: float) -> float:
    """Return the mean number of `workers` that may be busy. Each is present for the share `there`
    of the time."""
    if there >= 1:
        return float(workers)
    # SciPy is imported late, because every replica imports this package.
    from scipy.stats import binom

    k = np.arange(workers + 1)
    chance = binom.pmf(k, workers, there)
    # E[(B − K)⁺] is linear in B between whole numbers. So find the first whole number beyond the
    # allowed loss; the solution is on the line that leads to it.
    below, seen = np.cumsum(chance), np.cumsum(chance * k)
    lost = k * below - seen  # E[(B − K)⁺] at B = k
    beyond = np.flatnonzero(lost > loss * k + 1e-12)
    if not beyond.size:
        return float(workers)
    j = int(beyond[0]) - 1  # the largest number of workers that may be busy
    free = below[j] - loss
    return float(min(seen[j] / free, workers)) if free > 1e-12 else float(workers)


def room(busy: float, there: float, loss: float, most: int) -> Room:
    """Return the room for interruptions, for the least number of workers of which `busy` may be
    busy, but at most `most`. The number of spare workers grows more slowly than the number of
    workers. So the room is also enough for other numbers of workers."""
    workers = max(math.ceil(busy - 1e-9), 1)
    while workers < most and most_busy(workers, there, loss) < busy:
        workers += 1
    low, high = (most_busy(n, there, loss) for n in (workers, workers + 1))
    slope = min(max(high - low, low / workers, 1e-3), 1.0)
    too_few = slope * (workers - 1) - 0.999 * busy  # one worker less must be too few
    return Room(slope, max(slope * workers - low, too_few, 0.0))


def both(bursts: Room, interruptions: Room) -> Room:
    """Return the room for bursts on the workers that interruptions leave."""
    slope = bursts.slope * interruptions.slope
    return Room(slope, bursts.slope * interruptions.reserve + bursts.reserve)
