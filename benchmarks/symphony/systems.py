"""The systems that Symphony §5 compares, at equal delays, and what its programs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray_slo.core import Cluster, LatencyProfile, Model, Policy, Variant
from ray_slo.policies import make_policy
from ray_slo.simulation import GoodputResult, Report, Workload, goodput_search, simulate

System = tuple[str, dict[str, Any]]

ROUGHLY = 0.03
"""Tolerance of the first step of `search`."""

SYSTEMS: dict[str, System] = {
    "deferred": ("deferred", {}),
    "Clockwork": ("benchmarks.peers:Clockwork", {}),
    "Nexus, 1 frontend": ("benchmarks.peers:Nexus", {}),
    "Nexus, 8 frontends": ("benchmarks.peers:Nexus", {"frontends": 8}),
    "Shepherd": ("flex", {"exact": True}),
}
"""By name: policy and arguments. "deferred" is our default; the paper's system is Symphony.

Shepherd is its Algorithms 1 and 2 as they are printed, which is what Symphony compared with; `flex`
by default gathers the largest set that can be served together, and does better.
"""


def alike(
    profile: LatencyProfile, slo_s: float, models: int, gpus: int, name: str = "m{}"
) -> Cluster:
    """Models that differ in their names only."""
    names = [name.format(i) for i in range(models)]
    each = [Model(n, slo_s, (Variant(n, {"default": profile}),)) for n in names]
    return Cluster.uniform(each, gpus)


def goodput(
    system: System, cluster: Cluster, workload: Workload, *, growth: float = 1.3, **options: Any
) -> GoodputResult:
    """The largest rate at which every model's bad rate is at most 1 %; options as in `search`."""
    return search(lambda: make_policy(*system), cluster, workload, growth=growth, **options)


def search(
    make: Callable[[], Policy],
    cluster: Cluster,
    workload: Workload,
    *,
    start_rate: float,
    growth: float,
    tolerance: float,
    duration_s: float,
    warmup_s: float,
    seed: int,
    **simulate_kwargs: Any,
) -> GoodputResult:
    """`goodput_search` in two steps where it is to be precise: runs of a tenth of the length find
    about where the rate lies, which halves the time that it takes."""

    def found(duration_s: float, **kwargs: Any) -> GoodputResult:
        return goodput_search(
            make,
            cluster,
            workload,
            duration_s=duration_s,
            warmup_s=warmup_s,
            seed=seed,
            **simulate_kwargs,
            **kwargs,
        )

    if tolerance < ROUGHLY:
        short_s = warmup_s + (duration_s - warmup_s) / 10
        rough = found(short_s, start_rate=start_rate, growth=growth, tolerance=ROUGHLY)
        if rough.rate:
            start_rate, growth = rough.rate, 1 + 1.5 * ROUGHLY
    return found(duration_s, start_rate=start_rate, growth=growth, tolerance=tolerance)


def run_at(system: System, cluster: Cluster, workload: Workload, **options: Any) -> Report:
    """One run of a system; options of `simulate`."""
    return simulate(make_policy(*system), cluster, workload, **options)
