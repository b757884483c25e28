"""The systems that Symphony §5 compares, at equal delays, and what its programs share."""

from __future__ import annotations

from typing import Any

from ray_slo.core import Cluster
from ray_slo.scheduling import make_policy
from ray_slo.simulation import GoodputResult, Report, Workload, goodput_search, simulate

System = tuple[str, dict[str, Any]]

SYSTEMS: dict[str, System] = {
    "deferred": ("deferred", {}),
    "Clockwork": ("benchmarks.peers:Clockwork", {}),
    "Nexus, 1 frontend": ("benchmarks.peers:Nexus", {}),
    "Nexus, 8 frontends": ("benchmarks.peers:Nexus", {"frontends": 8}),
    "Shepherd": ("flex", {}),
}
"""By name: policy and arguments. "deferred" is our default; the paper's system is Symphony."""


def goodput(
    system: System,
    cluster: Cluster,
    workload: Workload,
    *,
    start_rate: float,
    duration_s: float,
    warmup_s: float,
    tolerance: float,
    seed: int,
    growth: float = 1.3,
) -> GoodputResult:
    """The largest rate at which every model's bad rate is at most 1 %."""
    name, kwargs = system
    return goodput_search(
        lambda: make_policy(name, kwargs),
        cluster,
        workload,
        start_rate=start_rate,
        growth=growth,
        tolerance=tolerance,
        duration_s=duration_s,
        warmup_s=warmup_s,
        seed=seed,
    )


def run_at(
    system: System,
    cluster: Cluster,
    workload: Workload,
    *,
    duration_s: float,
    warmup_s: float,
    seed: int,
) -> Report:
    """One run of a system."""
    name, kwargs = system
    return simulate(
        make_policy(name, kwargs),
        cluster,
        workload,
        duration_s=duration_s,
        warmup_s=warmup_s,
        seed=seed,
    )
