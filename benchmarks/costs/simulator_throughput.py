"""Simulated requests per second of CPU time on one core, policy included.

"Host alone" has a policy that does nothing. The difference from it is the policy's share. Times are
of the present machine, the best of several runs.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.symphony.systems import alike
from ray_slo.core import Cluster, Decision, LatencyProfile
from ray_slo.policies import make_policy
from ray_slo.simulation import Workload, simulate

SOURCE = "ray-slo"
ALPHA_S, BETA_S, SLO_S = 1.053e-3, 5.072e-3, 0.025  # ResNet50, Symphony Table 2
LOAD_PER_WORKER = 550.0  # requests per second, 75 % of the staggered bound


class Nothing:
    """A policy that gets every event and does nothing, to measure the host's own cost."""

    serves_late = True
    _nothing = Decision()

    def requests_arrived(self, now: float, requests: Any) -> None: ...
    def requests_cancelled(self, now: float, requests: Any) -> None: ...
    def batch_finished(self, now: float, worker: str, outcome: Any) -> None: ...
    def cluster_changed(self, now: float, cluster: Cluster) -> None: ...
    def decide(self, now: float) -> Decision:
        return self._nothing


def run(quick: bool, seed: int) -> list[Row]:
    requests, repeats = (30_000, 1) if quick else (200_000, 3)
    policies: dict[str, tuple[Any, dict[str, Any]]] = {
        "host alone": (Nothing, {}),
        "eager": ("eager", {}),
        "deferred, consolidate": ("deferred", {"objective": "consolidate"}),
        "deferred, responsive": ("deferred", {"objective": "responsive"}),
    }
    rows = []
    for models, workers in ((1, 8), (1, 64), (8, 64), (32, 256)):
        cluster = alike(profile(), SLO_S, models, workers)
        rate = LOAD_PER_WORKER * workers
        for name, (policy, kwargs) in policies.items():
            best = 0.0
            for _ in range(repeats):
                began = time.process_time()
                report = simulate(
                    make_policy(policy, kwargs),
                    cluster,
                    Workload.poisson(rate),
                    duration_s=requests / rate,
                    seed=seed,
                )
                best = max(best, report.count() / (time.process_time() - began))
            case = f"{models} model{'s' * (models > 1)} × {workers} workers · {name}"
            rows += [
                Row(case, "simulated", "requests per s of CPU", best),
                Row(case, "cost", "µs per request", 1e6 / best),
            ]
    return rows


def profile() -> LatencyProfile:
    return LatencyProfile.linear(ALPHA_S, BETA_S)
