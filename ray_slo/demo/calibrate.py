"""Calibration: find an SLO, the best wait, and the rate that plain Serve then holds on this
machine. Serve *holds* a rate if at most 1 % of the requests are bad.

A profile of the network is not enough, because HAProxy, replicas and client need CPU too. So every
figure is measured on plain Serve over HTTP. The ways of batching take turns in short probes, and
medians count. So a disturbance of the machine favours none of them.
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

BATCH = 8  # batches of this size are clearly more efficient than single images
SLO_ROUNDS = 3
WAITS = (0.25, 0.5, 1.0)  # waits to try, as shares of the time of such a batch
FINE = 0.01  # a rate is held up to this bad rate
STEP = 1.12  # the next rate is larger by this factor if the rate was held, else smaller
FIRST = 0.85  # first rate, as a share of the capacity
MINIMUM, MAXIMUM = 0.3, 1.6  # range of the rates, as shares of the capacity
LAST = 5  # a way holds the median of its last rates, this many
PROBE_SLOS = 6  # length of a probe in SLOs; in a shorter one, a growing queue makes nothing late
IDLE_S = 3.0  # longest wait for empty queues after a probe


@dataclass(frozen=True)
class Effort:
    """The amount of measurement.

    Attributes:
        probe_s: least and largest length of a probe, in seconds. Between them, it is `PROBE_SLOS`
            times the SLO.
        capacity_s, repeats: length in seconds and number of the measurements of the capacity.
        alive: number of ways that are probed in each round.
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

    The rate goes up if it was held, and down if it was not. After some probes it goes up and down
    around the rate that is held half of the time. The result is the median of the last rates, so
    one disturbed probe changes it by at most one step.
    """

    way: Way
    rate: float
    bounds: tuple[float, float]
    tried: list[tuple[float, float]] = field(default_factory=list)  # (rate, bad rate)

    def told(self, bad: float) -> None:
        """Take the bad rate of the probe at `rate`, and set `rate` to the next one."""
        self.tried.append((self.rate, bad))
        factor = STEP if bad <= FINE else 1 / STEP
        self.rate = float(np.clip(self.rate * factor, *self.bounds))

    @property
    def held(self) -> float:
        """The rate that this way holds, in requests per second."""
        rates = [rate for rate, _ in self.tried]
        return float(np.median([*rates, self.rate][-LAST:]))

    @property
    def rank(self) -> tuple[float, float]:
        """Rank of this way; a better way has a larger one. It is the held rate, then the share of
        requests that were not bad."""
        return self.held, -float(np.mean([bad for _, bad in self.tried] or [0.0]))


def race(
    ways: Sequence[Way],
    capacity: float,
    probe: Callable[[Way, float], float],
    alive: Sequence[int],
) -> tuple[Climb, list[Climb]]:
    """Return the best way of batching, and all ways.

    In each round, each remaining way is probed once, at its own rate. Then the worst ways are left
    out.

    Args:
        capacity: capacity in requests per second. The first rate is a share of it.
        probe: function that returns the bad rate of a way at a rate.
        alive: number of ways that are probed in each round.
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
    """The result of the calibration.

    Attributes:
        settings: settings of all systems.
        capacity: answers per second of plain Serve with requests always in flight. Median of the
            repetitions.
        held: rate that plain Serve holds with the best way of batching, in requests per second.
        climbs: all ways, and the rates at which they were probed.
    """

    settings: Settings
    capacity: float
    held: float
    climbs: Sequence[Climb] = ()


def ways(round_s: float) -> list[Way]:
    """Return the ways of batching with `@serve.batch` that are compared.

    Args:
        round_s: time from end to end of a batch of `BATCH` images, in seconds.
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
    """Measure plain Serve. A tunable application must run at the URL.

    * Capacity: answers per second with 8 requests per replica always in flight. The method blocks,
      so its batches contain all requests in flight.
    * SLO: three times the time of such a batch from end to end: one to wait for a running batch,
      one to run, and one for bursts.
    * Way and rate: the best of `ways`, found by `race`. A rate is held if at most 1 % of a probe's
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
    """Wait until single requests are in time again, most likely in each replica."""
    lone = Recorded.record([0.0, 0.01, 0.02, 0.03], payloads, duration_s=0.1)
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end:
        result, _ = client.send(url, lone, payloads, slo_s, IDLE_S)
        if result.summary["bad_rate"] == 0.0:
            return


def poisson(
    payloads: Payloads, rate: float, duration_s: float, *, warmup_s: float, seed: int
) -> Recorded:
    """Return a recorded Poisson workload."""
    times = Poisson(rate=rate).times(duration_s, np.random.default_rng(seed))
    about: dict[str, Any] = {"arrivals": "poisson", "rate": rate}
    return Recorded.record(
        times, payloads, duration_s=duration_s, warmup_s=warmup_s, seed=seed, **about
    )


def round_up(seconds: float) -> float:
    """Round a time up to two significant digits, in seconds, as a person would choose an SLO."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / unit) * unit
