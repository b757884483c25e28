"""Search for the goodput as in the papers: the largest rate at which nearly all requests are
answered in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray_slo.core.cluster import Cluster
from ray_slo.core.policy import Policy
from ray_slo.simulation.report import Report
from ray_slo.simulation.simulator import simulate
from ray_slo.simulation.workloads import Workload


@dataclass(frozen=True)
class GoodputResult:
    """The result of `goodput_search`.

    Attributes:
        rate: the largest offered rate that passed, requests per second; 0 if none did.
        report: of the run at `rate`; None if none passed.
        probes: (rate, worst bad rate of any model) of every run, in order of the search.
    """

    rate: float
    report: Report | None
    probes: tuple[tuple[float, float], ...]


def goodput_search(
    make_policy: Callable[[], Policy],
    cluster: Cluster,
    workload: Workload | Callable[[float], Workload],
    *,
    duration_s: float,
    warmup_s: float = 0.0,
    bad_rate: float = 0.01,
    tolerance: float = 0.01,
    start_rate: float | None = None,
    growth: float = 2.0,
    max_probes: int = 40,
    seed: int = 0,
    **simulate_kwargs: Any,
) -> GoodputResult:
    """Find the largest rate at which every model's bad rate is at most `bad_rate` (Symphony §3.4,
    §5).

    The rate grows or shrinks by `growth` from `start_rate` until one rate passes and one fails.
    Then the interval between them is bisected (geometrically) until it is narrower than
    `tolerance`. Every run has the same seed, so it has the same pattern of arrivals, stretched to
    its rate. The bad rate of a finite run is not strictly monotone in the rate. The result is a
    rate that passed, next to one that failed.

    Args:
        make_policy: function that returns a new policy for each run.
        workload: a workload, which is scaled with `Workload.at_rate`; or a function from a total
            rate to a workload.
        duration_s, warmup_s, seed, simulate_kwargs: as in `simulate`, for each run.
        tolerance: relative width of the final interval.
        start_rate: first rate, in requests per second. The default is the workload's rate, or 1 for
            a function.
        growth: factor between the first rates, above 1. It should be small if `start_rate` is a
            good guess.
        max_probes: largest number of runs.

    Raises:
        ValueError: an argument is not valid, or `max_probes` runs found no rate that fails.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance}")
    if not growth > 1:
        raise ValueError(f"growth must be above 1, got {growth}")
    if not 0 <= bad_rate < 1:
        raise ValueError(f"bad_rate must be at least 0 and less than 1, got {bad_rate}")
    at_rate = workload.at_rate if isinstance(workload, Workload) else workload
    rate = start_rate or (workload.rate if isinstance(workload, Workload) else 1.0)
    low, high = 0.0, math.inf
    best: Report | None = None
    probes: list[tuple[float, float]] = []
    while len(probes) < max_probes:
        report = simulate(
            make_policy(),
            cluster,
            at_rate(rate),
            duration_s=duration_s,
            warmup_s=warmup_s,
            seed=seed,
            **simulate_kwargs,
        )
        if report.count() == 0:  # the rate is too low to be measured
            return GoodputResult(0.0, None, tuple(probes))
        probes.append((rate, report.worst_bad_rate))
        if report.worst_bad_rate <= bad_rate:
            low, best = rate, report
        else:
            high = rate
        if high <= low * (1 + tolerance):
            break
        if high == math.inf:
            rate = low * growth
        elif low == 0:
            rate = high / growth
        else:
            rate = math.sqrt(low * high)
    if high == math.inf:
        raise ValueError(
            f"no rate up to {low:.6g}/s failed in {max_probes} runs; raise start_rate or max_probes"
        )
    return GoodputResult(low, best, tuple(probes))
