"""Batch sizes of every system at its goodput.

One model on 8 GPUs, Poisson arrivals, no delays. Percentiles count requests: a batch of b counts b
times. The paper gives medians.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.own.deferred_objectives import INCEPTION, RESNET, WORKERS, at_goodput
from benchmarks.symphony.systems import SYSTEMS
from benchmarks.symphony.table2 import PAPER_BATCH

SOURCE = "Symphony Figure 1"


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    for case in (RESNET, INCEPTION):
        for name, system in SYSTEMS.items():
            if (report := at_goodput(case, system, quick, seed)) is None:
                continue
            sizes = report.batch_sizes
            of_requests = np.repeat(sizes, sizes)
            for p in (5, 25, 50, 75, 95):
                paper = PAPER_BATCH[case.name].get(name) if p == 50 else None
                size = float(np.percentile(of_requests, p))
                rows.append(
                    Row(f"{case.name}, {WORKERS} GPUs · {name}", f"batch at p{p}", "", size, paper)
                )
    return rows


plot = partial(plot_series, x_label="percentile of requests")
