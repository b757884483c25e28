"""ModelSwitching (RAMSIS §7): the most accurate model whose response latency meets the SLO.

The response latency is the 99th percentile under the anticipated load, profiled offline.
`profile_responses` is that offline step. It simulates every model alone under Poisson load. Workers
take batches from a central queue. The paper has a grid of loads, from 400 to 4000 in steps of 100.
Response latency grows with the load, so bisection on that grid finds the largest load that a model
sustains. Batches go up to the largest that takes half the SLO ("adaptive batching"), at least 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from benchmarks.peers.central import CentralQueue, Choice, Offered
from ray_slo.core import Cluster
from ray_slo.simulation import Workload, simulate

GRID = tuple(range(400, 4001, 100))
"""The paper's grid of loads, in requests/s."""


def largest_batch(offered: Offered, variant: str) -> int:
    """Return the largest batch that takes at most half the SLO; at least 1."""
    return max(offered.profiles[variant].max_batch_within(offered.slo_s / 2), 1)


class Static(CentralQueue):
    """One variant at any load.

    Args:
        variant: name of the variant.
        load, window_ms: see `CentralQueue`; they have no effect.
    """

    def __init__(
        self, variant: str, *, load: float | None = None, window_ms: float = 500.0
    ) -> None:
        super().__init__(load=load, window_ms=window_ms)
        self._variant = variant

    def _choose(self, offered: Offered, load: float, waiting: int, slack_s: float) -> Choice:
        return self._variant, largest_batch(offered, self._variant)


class ModelSwitching(CentralQueue):
    """The most accurate variant that sustains the load.

    Args:
        limits: largest load that each variant sustains in requests/s, from `profile_responses`.
        load, window_ms: see `CentralQueue`.
    """

    def __init__(
        self,
        limits: Mapping[str, float],
        *,
        load: float | None = None,
        window_ms: float = 500.0,
    ) -> None:
        super().__init__(load=load, window_ms=window_ms)
        self._limits = dict(limits)

    def _choose(self, offered: Offered, load: float, waiting: int, slack_s: float) -> Choice:
        for name in reversed(list(offered.profiles)):
            if self._limits.get(name, 0.0) >= load:
                return name, largest_batch(offered, name)
        return offered.fastest


def profile_responses(
    cluster: Cluster,
    *,
    loads: Sequence[float] = GRID,
    requests: int = 10_000,
    slos: float = 100.0,
    percentile: float = 99.0,
    seed: int = 0,
) -> dict[str, float]:
    """Find the largest load at which each variant's response latency meets the SLO.

    Args:
        cluster: one model, with all variants on equal workers.
        loads: loads to try in requests/s, ascending.
        requests, slos: minimum length of a run, in requests and in SLOs.
        percentile: percentile of the response latency.

    Returns:
        By variant, the largest of `loads` (requests/s); 0 if it cannot sustain any of them.
    """
    (model,) = cluster.models.values()
    worker = next(iter(cluster.workers.values()))
    limits = {}
    for variant in model.variants:
        profile = variant.profiles[worker.hardware]
        most = len(cluster.workers) * max(
            profile.throughput(b) for b in range(1, profile.max_batch_size + 1)
        )
        low, high = -1, bisect_right(loads, most)  # indices: sustained, not sustained
        if profile.latency(1) > model.latency_slo_s:
            high = 0
        while high - low > 1:
            middle = (low + high) // 2
            report = simulate(
                Static(variant.name),
                cluster,
                Workload.poisson(loads[middle]),
                duration_s=max(requests / loads[middle], slos * model.latency_slo_s),
                seed=seed,
            )
            if report.latency_s(percentile) < model.latency_slo_s:
                low = middle
            else:
                high = middle
        limits[variant.name] = float(loads[low]) if low >= 0 else 0.0
    return limits
