"""Deferred compared with eager over the batching effect, and with timeouts.

(a) 10 models with ℓ(b) = b + β ms, SLO 2·ℓ(8), 32 GPUs: eager's goodput as a share of deferred's.
In the paper both are nearly equal at β = 1 ms, and the share falls as the batching effect grows.

(b) Timeouts: a batch starts when a share of its model's SLO has passed since its first request (0 %
is eager). The rows have their goodput as a share of deferred's. There is one ResNet50 (SLO 50 ms, 8
GPUs), and the mixed zoo of Table 4 (64 GPUs; 16 with `--quick`). In the paper, the best timeout
equals deferred for one model, and is much worse for many. The share is taken of two systems. "As
Algorithm 1" gathers the longest prefix that meets the head's deadline, as timeouts and eager do
here. "Default" is our `deferred`.

Poisson arrivals, no delays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.own.deferred_objectives import RESNET, staggered_bound
from benchmarks.symphony.systems import alike, search
from benchmarks.zoos import load
from ray_slo.core import Cluster, LatencyProfile, Policy
from ray_slo.policies import make_policy
from ray_slo.policies.shared.lanes import Lane
from ray_slo.policies.timeout import Timeout
from ray_slo.simulation import Workload

SOURCE = "Symphony Figure 6"
ASKED = [("(a) eager of deferred · default", "share at β *", "≤", 100)]
ALGORITHM_1 = {"exact": True}


class SloTimeout(Timeout):
    """A timeout that is a share of each model's SLO."""

    def __init__(self, share: float) -> None:
        super().__init__(0.0)
        self._share = share

    def _send_at(self, lane: Lane, first: int, size: int, now: float) -> float:
        self._timeout_s = self._share * lane.model.slo_s
        return super()._send_at(lane, first, size, now)


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    for beta in (1, 5, 15) if quick else (1, 2, 3, 5, 7, 9, 11, 13, 15):
        profile = LatencyProfile.linear(1e-3, beta * 1e-3)
        slo_s = 2 * profile(8)
        cluster = alike(profile, slo_s, 10, 32)
        eager = _goodput(lambda: make_policy("eager"), cluster, quick, seed)
        for yardstick, kwargs in (("as Algorithm 1", ALGORITHM_1), ("default", {})):
            deferred = _goodput(lambda k=kwargs: make_policy("deferred", k), cluster, quick, seed)
            case, share = f"(a) eager of deferred · {yardstick}", 100 * eager / deferred
            rows.append(Row(case, f"share at β {beta} ms", "%", share))
    rows.sort(key=lambda row: row.case)

    gpus = 16 if quick else 64
    mixed = [m.model() for m in load("symphony_a100").values()]
    shares = (0, 20, 40, 60) if quick else range(0, 91, 10)
    for title, cluster in (
        ("(b) timeouts, ResNet50 on 8 GPUs", alike(RESNET.profile, 0.05, 1, 8)),
        (f"(b) timeouts, 37 models on {gpus} GPUs", Cluster.uniform(mixed, gpus)),
    ):
        timeouts = {
            share: _goodput(lambda s=share: SloTimeout(s / 100), cluster, quick, seed)
            for share in shares
        }
        for yardstick, kwargs in (("as Algorithm 1", ALGORITHM_1), ("default", {})):
            deferred = _goodput(lambda k=kwargs: make_policy("deferred", k), cluster, quick, seed)
            rows += [
                Row(f"{title} · {yardstick}", f"share at {s} %", "%", 100 * found / deferred)
                for s, found in timeouts.items()
            ]
    return rows


def _goodput(make: Callable[[], Policy], cluster: Cluster, quick: bool, seed: int) -> float:
    models = list(cluster.models.values())
    share = len(cluster.workers) / len(models)
    guess = sum(
        share * profile.throughput(staggered_bound(profile, m.latency_slo_s, 8)[0])
        for m in models
        for profile in m.variants[0].profiles.values()
    )
    longest = max(m.latency_slo_s for m in models)
    warmup_s = (3 if quick else 10) * longest
    measured_s = 7 * longest if quick else max(30_000, 2_000 * len(models)) / guess
    return search(
        make,
        cluster,
        Workload.poisson(guess),
        start_rate=0.7 * guess,
        growth=1.3,
        tolerance=0.05 if quick else 0.01,
        warmup_s=warmup_s,
        duration_s=warmup_s + measured_s,
        seed=seed,
    ).rate


plot = partial(plot_series, x_label="(a) β in ms, α = 1 ms; (b) timeout in % of the SLO")
