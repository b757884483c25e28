"""Workers that may be taken away: how busy spot workers may be.

A spot worker is interrupted ρ times an hour, and another takes its place after `replacement_s`: it
is there a = 1/(1 + ρ·replacement_s/3600) of the time. Of n in a pool, K are there, each by itself,
so K is binomial. What the pool cannot do then is lost. It may be busy with B workers on average, if

    E[(B − K)⁺] ≤ loss · B,

the second condition of `ray_slo.planning.spot`; the first, B ≤ a·n, follows where the loss is
small. Here it holds for every pool by itself: workers of another kind do not step in.

Worked example: of 2 workers that are there 90 % of the time, both are gone 1 % of the time and one
is 18 %. So no more than the work of one may be planned. One worker alone may do nothing.

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
    """Mean number of workers that may be busy, of `workers` that are up the share `there` of the
    time."""
    if there >= 1:
        return float(workers)
    from scipy.stats import binom  # every replica imports this module's package

    k = np.arange(workers + 1)
    chance = binom.pmf(k, workers, there)
    # E[(B − K)⁺] is linear in B between two numbers of workers: the first kink beyond the loss, and
    # the line that leads to it, say where it is reached.
    below, seen = np.cumsum(chance), np.cumsum(chance * k)
    lost = k * below - seen  # E[(B − K)⁺] at B = k
    beyond = np.flatnonzero(lost > loss * k + 1e-12)
    if not beyond.size:
        return float(workers)
    j = int(beyond[0]) - 1  # the largest number of workers that may be busy
    free = below[j] - loss
    return float(min(seen[j] / free, workers)) if free > 1e-12 else float(workers)


def room(busy: float, there: float, loss: float, most: int) -> Room:
    """Room for interruptions, for the fewest workers of which `busy` may be busy, at most `most`.
    The number of spare workers grows slower than the workers, so this is enough for others, too."""
    workers = max(math.ceil(busy - 1e-9), 1)
    while workers < most and most_busy(workers, there, loss) < busy:
        workers += 1
    low, high = (most_busy(n, there, loss) for n in (workers, workers + 1))
    slope = min(max(high - low, low / workers, 1e-3), 1.0)
    too_few = slope * (workers - 1) - 0.999 * busy  # keeps one worker less from being enough
    return Room(slope, max(slope * workers - low, too_few, 0.0))


def both(bursts: Room, interruptions: Room) -> Room:
    """Room for bursts on the workers that interruptions leave."""
    slope = bursts.slope * interruptions.slope
    return Room(slope, bursts.slope * interruptions.reserve + bursts.reserve)
