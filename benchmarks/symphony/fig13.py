"""Goodput against the number of GPUs.

20 equally popular ResNet50 (profile of Table 2), SLO 100 ms, Poisson arrivals, no delays. In the
paper, Symphony grows linearly. Clockwork does not, because of locks in its controller; a simulation
of scheduling rules does not show these. `scheduler-throughput` measures how many requests per
second our scheduler itself can take, and also covers the left part of the figure. What remains is
the goodput per GPU, which is steady from 64 GPUs on. With fewer GPUs than models, each model waits
for others. There the default `deferred`, which gives up heads for larger batches, is a little worse
than Algorithm 1.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row, series
from benchmarks.own.deferred_objectives import RESNET, staggered_bound
from benchmarks.symphony.fig11 import MODELS, cluster
from benchmarks.symphony.systems import SYSTEMS, System, goodput
from ray_slo.simulation import Workload

SOURCE = "Symphony Figure 13 (right)"
SLO_MS = 100
COMPARED: dict[str, System] = {
    **{name: SYSTEMS[name] for name in ("deferred", "Clockwork", "Nexus, 1 frontend")},
    "deferred, as Algorithm 1": ("deferred", {"exact": True}),
}


def run(quick: bool, seed: int) -> list[Row]:
    counts = (16, 32, 64) if quick else (16, 32, 64, 128, 256, 512)
    bounds = {n: staggered_bound(RESNET.profile, SLO_MS / 1e3, n)[1] for n in counts}
    found = {
        name: {
            gpus: goodput(
                system,
                cluster(SLO_MS, gpus),
                Workload.poisson(bounds[gpus]),
                start_rate=0.95 * bounds[gpus],
                growth=1.1,
                tolerance=0.05 if quick else 0.01,
                warmup_s=0.3 if quick else 1.0,
                # Beyond 64 GPUs, runs are shorter, and the number of requests stays the same.
                duration_s=1.0 if quick else 1 + 3 * min(1, 64 / gpus),
                seed=seed,
            ).rate
            for gpus in counts
        }
        for name, system in COMPARED.items()
    }
    found["staggered bound"] = bounds
    title = f"{MODELS} ResNet50, SLO {SLO_MS} ms"
    each = {name: {n: rate / n for n, rate in rates.items()} for name, rates in found.items()}
    rows = series(title, found, "goodput at {} GPUs", "req/s")
    return rows + series(f"{title}, each", each, "goodput per GPU at {} GPUs", "req/s")


plot = partial(plot_series, x_label="GPUs")
