"""Queueing delay of every system at its goodput.

The delay is from arrival to the start of the batch. There is one model on 8 GPUs, with Poisson
arrivals and no delays. Each system has its goodput of Table 2 as load. Percentiles are over the
answered requests; p100 is the longest. The paper's text says "2x to 3x shorter than Nexus and
Clockwork", and "comparable" for Shepherd. It says that Nexus's longest is "around half the latency
SLO". *Analysis* is the longest wait of §5.3 with constant gaps: ℓ(b)/N when staggered, ℓ(b) without
coordination.

Large batches leave little of the SLO for waiting. So a short wait does not make a good system.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.own.deferred_objectives import (
    INCEPTION,
    RESNET,
    WORKERS,
    at_goodput,
    staggered_bound,
)
from benchmarks.symphony.systems import SYSTEMS, System

SOURCE = "Symphony Figure 12"
PERCENTILES = (5, 25, 50, 75, 95, 99, 100)

COMPARED: dict[str, System] = {
    **SYSTEMS,
    "deferred, as Algorithm 1": ("deferred", {"exact": True}),
}


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    for case in (RESNET, INCEPTION):
        title = f"{case.name}, SLO {case.slo_ms:g} ms, {WORKERS} GPUs"
        waits: dict[str, np.ndarray] = {}
        for name, system in COMPARED.items():
            if (report := at_goodput(case, system, quick, seed)) is None:
                continue
            waits[name] = np.percentile(report.queueing_s() * 1e3, PERCENTILES)
            longest = case.slo_ms / 2 if name.startswith("Nexus, 1") else None
            rows += [
                Row(
                    f"{title} · {name}",
                    f"queueing at p{p}",
                    "ms",
                    float(wait),
                    longest if p == 100 else None,
                )
                for p, wait in zip(PERCENTILES, waits[name], strict=True)
            ]
        for name in waits:
            rows += [
                Row(f"{title}, over deferred · {name}", f"factor at p{p}", "×", float(w / own))
                for p, w, own in zip(PERCENTILES, waits[name], waits["deferred"], strict=True)
                if p >= 50  # at lower percentiles, requests do not wait at all
            ]
        staggered, _ = staggered_bound(case.profile, case.slo_ms / 1e3, WORKERS)
        alone = case.profile.max_batch_within(case.slo_ms / 2e3)
        rows += [
            Row(f"{title}, analysis · {name}", "longest wait", "ms", wait_s * 1e3)
            for name, wait_s in (
                ("staggered", case.profile(staggered) / WORKERS),
                ("no coordination", case.profile(alone)),
            )
        ]
    return rows


plot = partial(plot_series, x_label="percentile of requests")
