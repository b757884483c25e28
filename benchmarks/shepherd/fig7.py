"""Goodput and busy GPUs against the offered load, with Clockwork and Nexus.

12 V100, SLO 250 ms, no delays. Models, workloads and systems are those of `systems`. Runs are
shorter at higher loads. The paper prints no figures, only curves. It says that near 3,000/s all
systems meet most deadlines. At 144,000/s, SHEPHERD has 4.6 (stable) and 5.2 (bursty) times the
goodput of Clockwork, and up to 7.1 and 18.1 times that of Nexus. SHEPHERD and Clockwork keep over
95 % of the GPUs busy, Nexus at most 89 % and 55 %.

Ours differ. Our Clockwork gives up heads for the largest batch that can be filled. So its goodput
still grows in overload, where the paper's does not. "Over the best of" compares SHEPHERD at the
highest load with a peer's best load. Our Nexus uses all GPUs whenever one is free, so it is busier
than the paper's.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row, series
from benchmarks.shepherd import systems

SOURCE = "SHEPHERD §7.1, Figure 7"
ASKED = [
    (
        "MAF-stable, SHEPHERD over · Clockwork",
        "factor at 144000/s",
        "≥",
        4.6,
        "our Clockwork gives up heads of its queues for the largest batch that can be filled",
    ),
    (
        "MAF-stable, SHEPHERD over · Nexus, as planned",
        "factor at 144000/s",
        "≥",
        7.1,
        "our Nexus uses all workers, and runs a batch whenever one is free",
    ),
    (
        "MAF-bursty, SHEPHERD over · Clockwork",
        "factor at 144000/s",
        "≥",
        5.2,
        "our Clockwork gives up heads of its queues for the largest batch that can be filled",
    ),
    (
        "MAF-bursty, SHEPHERD over · Nexus, as planned",
        "factor at 144000/s",
        "≥",
        18.1,
        "our Nexus uses all workers, and the paper does not print how its bursts arrive",
    ),
]
PAPER = {
    ("MAF-stable", "Clockwork"): 4.6,
    ("MAF-stable", "Nexus, as planned"): 7.1,
    ("MAF-bursty", "Clockwork"): 5.2,
    ("MAF-bursty", "Nexus, as planned"): 18.1,
}
PAPER_BUSY = {  # percent: lower bounds for SHEPHERD and Clockwork, upper bounds for Nexus
    ("MAF-stable", "SHEPHERD"): 95.0,
    ("MAF-stable", "Clockwork"): 95.0,
    ("MAF-stable", "Nexus, as planned"): 89.0,
    ("MAF-bursty", "Nexus, as planned"): 55.0,
}


def run(quick: bool, seed: int) -> list[Row]:
    models = systems.zoo()
    names = [m.name for m in models]
    loads = (3_000, 144_000) if quick else (3_000, 6_000, 12_000, 24_000, 72_000, 144_000)
    rows = []
    for workload, burst in systems.WORKLOADS.items():
        goodput: dict[str, dict[float, float]] = {}
        busy: dict[str, dict[float, float]] = {}
        for load in loads:
            longest_s, requests, intervals = (3.0, 25_000, 2) if quick else (10.0, 80_000, 3)
            interval_s = min(longest_s, requests / load)
            arrivals = systems.traces(names, load, intervals, interval_s, burst)
            for name in systems.systems(interval_s):
                if quick and name == systems.OVERHEADS:
                    continue  # the slowest to simulate
                report = systems.run_system(
                    name, models, systems.WORKERS, arrivals, interval_s=interval_s, seed=seed
                )
                goodput.setdefault(name, {})[load] = report.goodput
                busy.setdefault(name, {})[load] = 100 * (1 - report.idle_fraction)
        top = loads[-1]
        paper = {(peer, float(top)): x for (w, peer), x in PAPER.items() if w == workload}
        rows += systems.compared(workload, goodput, "{}/s", paper)
        best = goodput["SHEPHERD"][top]
        rows += [
            Row(
                f"{workload}, SHEPHERD at {top}/s over the best of · {peer}",
                "factor",
                "×",
                best / max(goodput[peer].values()),
                factor,
            )
            for (peer, _), factor in paper.items()
        ]
        printed = {(name, float(top)): x for (w, name), x in PAPER_BUSY.items() if w == workload}
        rows += series(f"{workload}, busy", busy, "busy GPUs at {}/s", "%", printed)
    return rows


plot = partial(plot_series, x_label="offered load (req/s)", log=True)
