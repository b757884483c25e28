"""ModelSwitching (RAMSIS §7): the most accurate model whose 99th percentile response latency, as
profiled offline under the anticipated load, meets the SLO.

`profile_responses` is that offline step: every model alone, from a central queue that workers grab
batches from, is simulated under Poisson load. Response latency grows with the load, so instead of
every load of the paper's grid (400 to 4000 in steps of 100) the largest one that a model sustains
is found by bisection on that grid. Batches go up to the largest that takes half the SLO ("adaptive
batching"), at least 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers.central import CentralQueue, Choice, Offered
from ray_slo.core import Cluster
from ray_slo.simulation import Workload, simulate


def largest_batch(offered: Offered, variant: str) -> int:
    """The largest batch that takes half the SLO, at least 1."""
    return max(offered.profiles[variant].max_batch_within(offered.slo_s / 2), 1)


class Static(CentralQueue):
    """One model, whatever the load.

    Args:
        variant: its name.
        load, window_ms: see `CentralQueue`; without effect.
    """

    def __init__(
        self, variant: str, *, load: float | None = None, window_ms: float = 500.0
    ) -> None:
        super().__init__(load=load, window_ms=window_ms)
        self._variant = variant

    def _choose(self, offered: Offered, load: float, waiting: int, slack_s: float) -> Choice:
        return self._variant, largest_batch(offered, self._variant)


class ModelSwitching(CentralQueue):
    """Args:
    limits: the largest load that each variant sustains, requests/s, from `profile_responses`.
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
    step: float = 100.0,
    most: float = 4000.0,
    requests: int = 20_000,
    percentile: float = 99.0,
    seed: int = 0,
) -> dict[str, float]:
    """The largest load at which each variant's response latency meets the SLO.

    Args:
        cluster: one model, all variants on equal workers.
        step, most: of the grid of loads, requests/s.
        requests: simulated per model and load.
        percentile: of the response latency.

    Returns:
        By variant, requests/s: a multiple of `step`, 0 where the model is too slow at any.
    """
    (model,) = cluster.models.values()
    worker = next(iter(cluster.workers.values()))
    limits = {}
    for variant in model.variants:
        profile = variant.profiles[worker.hardware]
        low, high = 0, round(most / step) + 1  # sustained; not sustained
        best = max(profile.throughput(b) for b in range(1, profile.max_batch_size + 1))
        high = min(high, int(len(cluster.workers) * best / step) + 1)
        if profile.latency(1) > model.latency_slo_s:
            high = 1
        while high - low > 1:
            rate = (low + high) // 2 * step
            report = simulate(
                Static(variant.name),
                cluster,
                Workload.poisson(rate),
                duration_s=requests / rate,
                seed=seed,
            )
            if report.latency_s(percentile) < model.latency_slo_s:
                low = (low + high) // 2
            else:
                high = (low + high) // 2
        limits[variant.name] = low * step
    return limits
