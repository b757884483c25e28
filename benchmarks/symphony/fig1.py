"""Batch sizes of every system at its goodput.

Percentiles over requests. The paper gives medians. One model on 8 GPUs, Poisson, no delays.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.own.deferred_objectives import INCEPTION, RESNET, WORKERS
from benchmarks.symphony.systems import SYSTEMS, goodput
from benchmarks.symphony.table2 import PAPER_BATCH
from ray_slo.simulation import Workload

SOURCE = "Symphony Figure 1"


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    for case in (RESNET, INCEPTION):
        scale = case.slo_ms / RESNET.slo_ms
        for name, system in SYSTEMS.items():
            found = goodput(
                system,
                case.cluster,
                Workload.poisson(case.bound),
                start_rate=0.8 * case.bound,
                tolerance=0.02 if quick else 0.005,
                warmup_s=(1 if quick else 5) * scale,
                duration_s=(3 if quick else 25) * scale,
                seed=seed,
            )
            if found.report is None:
                continue
            sizes = found.report.batch_sizes
            of_requests = np.repeat(sizes, sizes)
            for p in (5, 25, 50, 75, 95):
                paper = PAPER_BATCH[case.name].get(name) if p == 50 else None
                size = float(np.percentile(of_requests, p))
                rows.append(
                    Row(f"{case.name}, {WORKERS} GPUs · {name}", f"batch at p{p}", "", size, paper)
                )
    return rows


plot = partial(plot_series, x_label="percentile of requests")
