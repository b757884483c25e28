"""Goodput and busy GPUs against the offered load, every system.

10 models with the ResNet50 profile of Table 2, SLO 100 ms, 24 GPUs, Poisson arrivals, no delays.
The paper says "10 ResNet models" without their profiles. The goodput of a good system does not fall
when more is offered, and its busy GPUs grow with the load. Both objectives of `deferred` are shown:
`consolidate` is the paper's system, and `responsive`, our default, uses idle GPUs to reduce
latency. In the paper, at 3,000/s, Symphony keeps 20 % of the GPUs busy, and the other three systems
all of them. Above capacity, Clockwork and Shepherd lose goodput there; Symphony and Nexus do not.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row, series
from benchmarks.own.deferred_objectives import RESNET, staggered_bound
from benchmarks.symphony.systems import SYSTEMS, System, alike, run_at
from ray_slo.simulation import Workload

SOURCE = "Symphony Figure 2"
GPUS, MODELS, SLO_S = 24, 10, 0.1

COMPARED: dict[str, System] = {
    "deferred, consolidate": ("deferred", {"objective": "consolidate"}),
    **SYSTEMS,
}

# The paper says that Symphony "only needs 20 % of the GPUs" at 3,000/s.
PAPER = {("deferred, consolidate", 3_000.0): 20}


def run(quick: bool, seed: int) -> list[Row]:
    cluster = alike(RESNET.profile, SLO_S, MODELS, GPUS)
    loads = (3_000, 12_000, 20_000, 30_000) if quick else range(3_000, 30_001, 3_000)
    title = f"{MODELS} ResNet50, {GPUS} GPUs"
    rows = []
    for name, system in COMPARED.items():
        reports = {
            load: run_at(
                system,
                cluster,
                Workload.poisson(load),
                warmup_s=0.5 if quick else 3,
                duration_s=1.5 if quick else 8,
                seed=seed,
            )
            for load in loads
        }
        goodputs = {name: {x: r.goodput for x, r in reports.items()}}
        busy = {name: {x: 100 * (1 - r.idle_fraction) for x, r in reports.items()}}
        rows += series(title, goodputs, "goodput at {}/s", "req/s")
        rows += series(f"{title}, busy", busy, "busy GPUs at {}/s", "%", PAPER)
    _, bound = staggered_bound(RESNET.profile, SLO_S, GPUS)
    rows.append(Row("staggered bound", "throughput", "req/s", bound))
    return rows


plot = partial(plot_series, x_label="offered load (req/s)")
