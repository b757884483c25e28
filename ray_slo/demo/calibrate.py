"""Find an SLO, a rate and a wait that are fair to plain Serve on this machine.

The network's profile alone will not do: proxy, replicas and client need CPU, too. So the capacity
is what plain Serve really does, and the wait is the best of several at the very load of the test.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np

from ray_slo.core.profiles import LatencyProfile
from ray_slo.demo.systems import APP, Settings, plain, running
from ray_slo.load.drive import run_http_process
from ray_slo.load.workload import Payloads, Recorded
from ray_slo.simulation.arrivals import Poisson

BATCH = 8  # a batch this large is where batching has clearly paid off for the digits networks
SLO_ROUNDS = 3
FINE = 0.01  # bad rate at which the tuned system counts as keeping up
STEP = 0.88  # the rate goes up and down by this factor
MINIMUM, MAXIMUM = 0.4, 1.6  # of the capacity: where the search for the rate ends


@dataclass(frozen=True)
class Calibration:
    """What was found: requests/s, seconds, and what was tried on the way."""

    settings: Settings
    capacity: float
    rate: float
    tried: list[dict[str, float]]


def calibrate(
    url: str,
    payloads: Payloads,
    profile: LatencyProfile,
    settings: Settings,
    *,
    probe_s: float = 8.0,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure what plain Serve can do, and choose SLO, rate and wait from it.

    * Capacity: answers/s with 8 requests per replica always in flight, in blocking style (whose
      batches then hold all that are in flight).
    * SLO: three times the time that such a batch takes end to end: one to wait for a running
      batch, one to run, one for bursts.
    * Wait: of ℓ(4), ℓ(8) and ℓ(16), the one with the lowest bad rate at that capacity.
    * Rate: from that capacity up or down in steps, to the highest at which plain Serve with the
      best wait keeps up (bad rate ≤ 1 %): the edge of what a hand-tuned system can do.
    """
    from ray import serve

    in_flight = BATCH * settings.num_replicas
    with running(plain(settings, 0.01, off_loop=False)):
        closed_loop(url, payloads, in_flight, 2.0)  # warm
        capacity = closed_loop(url, payloads, in_flight, probe_s)
    slo_s = _round(SLO_ROUNDS * in_flight / capacity)
    say(
        f"plain Serve does {capacity:.0f} req/s with {in_flight} always in flight; "
        f"SLO {1e3 * slo_s:.0f} ms"
    )
    waits = sorted({profile.latency(b) for b in (4, BATCH, 16)})
    tried: list[dict[str, float]] = []

    def bad_rate(wait_s: float, rate: float) -> float:
        # Only the wait changes: Serve reconfigures the running replicas.
        serve.run(plain(settings, wait_s), name=APP, route_prefix="/")
        workload = poisson(payloads, rate, probe_s, warmup_s=probe_s / 4, seed=1)
        result = run_http_process(url, workload, payloads, slo_s=slo_s, timeout_s=10).result()
        bad = float(result.summary["bad_rate"])
        tried.append({"rate": rate, "wait_s": wait_s, "bad_rate": bad})
        say(f"wait {1e3 * wait_s:.0f} ms at {rate:.0f} req/s: {100 * bad:.1f} % bad")
        return bad

    rate = capacity
    with running(plain(settings, waits[0])):
        best, wait_s = min((bad_rate(wait, rate), wait) for wait in waits)
        if best <= FINE:
            while rate < MAXIMUM * capacity and bad_rate(wait_s, rate / STEP) <= FINE:
                rate /= STEP
        while best > FINE and rate > MINIMUM * capacity:
            rate *= STEP
            best = bad_rate(wait_s, rate)
    found = replace(settings, slo_s=slo_s, tuned_wait_s=wait_s)
    return Calibration(found, capacity, rate, tried)


def poisson(
    payloads: Payloads, rate: float, duration_s: float, *, warmup_s: float, seed: int
) -> Recorded:
    """A recorded Poisson workload."""
    times = Poisson(rate=rate).times(duration_s, np.random.default_rng(seed))
    return Recorded.record(
        times,
        payloads,
        duration_s=duration_s,
        warmup_s=warmup_s,
        seed=seed,
        arrivals="poisson",
        rate=rate,
    )


def closed_loop(url: str, payloads: Payloads, in_flight: int, duration_s: float) -> float:
    """Answers per second with `in_flight` requests always in flight, from a process of its own.

    Raises:
        RuntimeError: an answer was no success.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_closed_loop, url, payloads, in_flight, duration_s).result()


def _closed_loop(url: str, payloads: Payloads, in_flight: int, duration_s: float) -> float:
    return asyncio.run(_clients(url, payloads, in_flight, duration_s))


async def _clients(url: str, payloads: Payloads, in_flight: int, duration_s: float) -> float:
    import aiohttp

    end = time.monotonic() + duration_s
    answered = 0

    async def client(session: Any, index: int) -> None:
        nonlocal answered
        while time.monotonic() < end:
            body, kind = payloads.body(index % len(payloads))
            async with session.post(url, data=body, headers={"Content-Type": kind}) as response:
                text = await response.text()
                if response.status != 200:
                    raise RuntimeError(f"{url} answered {response.status}: {text[:300]}")
            answered += 1
            index += in_flight

    timeout = aiohttp.ClientTimeout(total=60)
    start = time.monotonic()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        await asyncio.gather(*(client(session, index) for index in range(in_flight)))
    return answered / (time.monotonic() - start)


def _round(seconds: float) -> float:
    """Up to two significant digits: an SLO that a person would write."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / unit) * unit
