"""The systems that Symphony §5 compares, and code that the programs of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray_slo.core import Cluster, LatencyProfile, Model, Policy, Variant
from ray_slo.policies import make_policy
from ray_slo.simulation import GoodputResult, Report, Workload, goodput_search, simulate

System = tuple[str, dict[str, Any]]

ROUGHLY = 0.03
"""Tolerance of the first, rough step of `search`."""

SYSTEMS: dict[str, System] = {
    "deferred": ("deferred", {}),
    "Clockwork": ("benchmarks.peers:Clockwork", {}),
    "Nexus, 1 frontend": ("benchmarks.peers:Nexus", {}),
    "Nexus, 8 frontends": ("benchmarks.peers:Nexus", {"frontends": 8}),
    "Shepherd": ("flex", {"exact": True}),
}
"""Policy and arguments by name. "deferred" is our default; the paper's system is called Symphony.

"Shepherd" is Algorithms 1 and 2 as SHEPHERD prints them, which Symphony compared with. By default,
`flex` gathers the largest batch that can be served together instead, and does better.
"""


def alike(
    profile: LatencyProfile, slo_s: float, models: int, gpus: int, name: str = "m{}"
) -> Cluster:
    """Return a cluster of models that differ only in their names."""
    names = [name.format(i) for i in range(models)]
    each = [Model(n, slo_s, (Variant(n, {"default": profile}),)) for n in names]
    return Cluster.uniform(each, gpus)


def goodput(
    system: System, cluster: Cluster, workload: Workload, *, growth: float = 1.3, **options: Any
) -> GoodputResult:
    """Find the largest rate at which every model has at most 1 % bad requests (see `search`)."""
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
    """Call `goodput_search`, in two steps if the tolerance is small.

    The first step finds the rate roughly, with runs of a tenth of the length. This halves the time.
    """

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
    """Run a system once, with options of `simulate`."""
    return simulate(make_policy(*system), cluster, workload, **options)
