"""Find an SLO, the best wait and the rate that plain Serve holds with it on this machine.

A profile of the network will not do: HAProxy, replicas and client need CPU, too. So every figure is
measured on plain Serve over HTTP. A noisy machine must not spoil it, and no way of batching may
be favoured by a quiet moment: the ways take turns in short probes, and medians count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ray_slo.demo.client import Client
from ray_slo.demo.systems import DEFAULT_WAIT_S, Settings, Way
from ray_slo.load.workload import Payloads, Recorded
from ray_slo.simulation.arrivals import Poisson

BATCH = 8  # a batch this large is where batching has clearly paid off for the digits networks
SLO_ROUNDS = 3
WAITS = (0.25, 0.5, 1.0)  # of the time that such a batch takes: waits to try
FINE = 0.01  # bad rate at which plain Serve counts as keeping up
STEP = 1.12  # a rate goes up by this factor where it was held, else down
FIRST = 0.85  # of the capacity: the first rate
MINIMUM, MAXIMUM = 0.3, 1.6  # of the capacity: no rate outside is tried
LAST = 5  # rates of a way whose median it holds
PROBE_SLOS = 6  # times the SLO: in less, a queue that grows would not make requests late
IDLE_S = 3.0  # that the rest of a probe may take to leave the queues


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        probe_s: length of a probe, from the least to the most; between these, `PROBE_SLOS`.
        capacity_s, repeats: length and number of the measurements of the capacity.
        alive: how many ways are still probed, round by round.
    """

    probe_s: tuple[float, float] = (3.0, 6.0)
    capacity_s: float = 1.5
    repeats: int = 3
    alive: tuple[int, ...] = (5, 3, 2, 2, 2, 2)


FULL = Effort()
QUICK = Effort(probe_s=(1.5, 3.0), capacity_s=1.0, repeats=3, alive=(3, 1, 1))


@dataclass
class Climb:
    """One way of batching, and the rates at which it was probed.

    A rate goes up where it was held and down where it was not. Once it goes to and fro, the median
    of the last rates is the rate that is held half of the time: one disturbed probe moves it by no
    more than a step.
    """

    way: Way
    rate: float
    bounds: tuple[float, float]
    tried: list[tuple[float, float]] = field(default_factory=list)  # (rate, bad rate)

    def told(self, bad: float) -> None:
        """What the probe at `rate` showed; `rate` is the next one then."""
        self.tried.append((self.rate, bad))
        factor = STEP if bad <= FINE else 1 / STEP
        self.rate = float(np.clip(self.rate * factor, *self.bounds))

    @property
    def held(self) -> float:
        """The rate that this way holds, requests/s."""
        rates = [rate for rate, _ in self.tried]
        return float(np.median([*rates, self.rate][-LAST:]))

    @property
    def rank(self) -> tuple[float, float]:
        """The better way has the larger rank: what it holds, then how few were bad."""
        return self.held, -float(np.mean([bad for _, bad in self.tried] or [0.0]))


def race(
    ways: Sequence[Way],
    capacity: float,
    probe: Callable[[Way, float], float],
    alive: Sequence[int],
) -> tuple[Climb, list[Climb]]:
    """The best way to batch, and all of them.

    In each round, each way that is left is probed once, at a rate of its own. Then the worst ones
    leave.

    Args:
        capacity: requests/s; the first rate is a share of it.
        probe: bad rate of a way at a rate.
        alive: how many ways are probed, round by round.
    """
    bounds = (MINIMUM * capacity, MAXIMUM * capacity)
    climbs = [Climb(way, FIRST * capacity, bounds) for way in ways]
    left = list(climbs)
    for count in alive:
        left = sorted(left, key=lambda climb: climb.rank, reverse=True)[:count]
        for climb in left:
            climb.told(probe(climb.way, climb.rate))
    return max(left, key=lambda climb: climb.rank), climbs


@dataclass(frozen=True)
class Calibration:
    """What was found.

    Attributes:
        capacity: answers/s of plain Serve with requests always in flight, median of repeats.
        held: rate that plain Serve holds with the best way to batch, requests/s.
        climbs: all ways and the rates at which they were probed.
    """

    settings: Settings
    capacity: float
    held: float
    climbs: Sequence[Climb] = ()


def ways(round_s: float) -> list[Way]:
    """Ways to batch with `@serve.batch`, among which the best is searched.

    Args:
        round_s: time that a batch of `BATCH` takes end to end.
    """
    waits = [DEFAULT_WAIT_S, *(share * round_s for share in WAITS)]
    return [*(Way(wait) for wait in waits), Way(DEFAULT_WAIT_S, off_loop=False)]


def calibrate(
    client: Client,
    url: str,
    payloads: Payloads,
    settings: Settings,
    effort: Effort = FULL,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure what plain Serve can do; a tunable one must run at the URL.

    * Capacity: answers/s with 8 requests per replica always in flight, in blocking style (whose
      batches then hold all that are in flight).
    * SLO: three times the time that such a batch takes end to end: one to wait for a running
      batch, one to run, one for bursts.
    * Way and rate: the best of `ways`, by `race`. A rate is held if at most 1 % of a probe's
      requests are bad.
    """
    in_flight = BATCH * settings.num_replicas
    blocking = Way(DEFAULT_WAIT_S, off_loop=False).header
    client.closed_loop(url, payloads, in_flight, effort.capacity_s, blocking)  # warm
    capacities = [
        client.closed_loop(url, payloads, in_flight, effort.capacity_s, blocking)
        for _ in range(effort.repeats)
    ]
    capacity = float(np.median(capacities))
    round_s = in_flight / capacity
    slo_s = round_up(SLO_ROUNDS * round_s)
    say(
        f"plain Serve does {capacity:.0f} req/s with {in_flight} always in flight; "
        f"SLO {1e3 * slo_s:.0f} ms"
    )
    seed, probe_s = 0, float(np.clip(PROBE_SLOS * slo_s, *effort.probe_s))

    def probe(way: Way, rate: float) -> float:
        nonlocal seed
        seed += 1
        workload = poisson(payloads, rate, probe_s, warmup_s=probe_s / 4, seed=seed)
        result, _ = client.send(url, workload, payloads, slo_s, 2 * slo_s, way.header)
        bad = float(result.summary["bad_rate"] or 0.0)
        say(f"{way.name} at {rate:.0f} req/s: {100 * bad:.1f} % bad")
        if bad > FINE:
            _wait_until_idle(client, url, payloads, slo_s)
        return bad

    every = ways(round_s)
    some = every if max(effort.alive) >= len(every) else [every[0], every[2], every[-1]]
    best, climbs = race(some, capacity, probe, effort.alive)
    found = replace(settings, slo_s=slo_s, way=best.way)
    return Calibration(found, capacity, best.held, climbs)


def _wait_until_idle(client: Client, url: str, payloads: Payloads, slo_s: float) -> None:
    """Until lone requests are answered in time again, in each replica most likely."""
    lone = Recorded.record([0.0, 0.01, 0.02, 0.03], payloads, duration_s=0.1)
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end:
        result, _ = client.send(url, lone, payloads, slo_s, IDLE_S)
        if result.summary["bad_rate"] == 0.0:
            return


def poisson(
    payloads: Payloads, rate: float, duration_s: float, *, warmup_s: float, seed: int
) -> Recorded:
    """A recorded Poisson workload."""
    times = Poisson(rate=rate).times(duration_s, np.random.default_rng(seed))
    about: dict[str, Any] = {"arrivals": "poisson", "rate": rate}
    return Recorded.record(
        times, payloads, duration_s=duration_s, warmup_s=warmup_s, seed=seed, **about
    )


def round_up(seconds: float) -> float:
    """Up to two significant digits: an SLO that a person would write."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / unit) * unit
