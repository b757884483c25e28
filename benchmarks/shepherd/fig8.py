"""Latency distributions at low and at high load, with Clockwork and Nexus.

12 V100, SLO 250 ms, no delays, 3,000 and 144,000 requests per second. Models, workloads and systems
are those of `systems`. Latency is from arrival to the end of the batch, over answered requests.
Refused requests are not in the distribution; "answered" is the share of the others. Rows are the
1st, 5th, 10th … 95th, 99th and 100th percentile, which the plot draws as a CDF. The paper shows
MAF-stable, and says that MAF-bursty is similar.

The paper prints no figures, only curves. It says that all systems have similar distributions at low
load. At high load, many requests of Clockwork and of Nexus come close to the SLO, and SHEPHERD's
are distributed more evenly. We measure this as follows. "Near the SLO" is the share of the answered
requests that took more than 80 % of it. "Unevenness" is the largest distance between the CDF and
the uniform distribution from 0 to the SLO; 0 % is perfectly even.

Ours differ. At low load, most requests are far from the SLO, but the systems are not alike.
SHEPHERD runs the largest batch first, Clockwork the earliest required start, which it commits 10 ms
ahead. At high load under MAF-stable, SHEPHERD's answers come early rather than evenly, because the
models with the fastest full batches always win. "Of the quickest" is the share of the answers that
the 3 fastest of the 16 models give. Under bursts other models have their turn, and the distribution
is more even.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.shepherd.systems import SLO_MS, WORKERS, WORKLOADS, run_system, traces, zoo

SOURCE = "SHEPHERD §7.1, Figure 8"
LOADS = (3_000, 144_000)
PERCENTILES = (1, *range(5, 100, 5), 99, 100)
COMPARED = ("SHEPHERD", "flex", "Clockwork", "Nexus, as planned", "deferred")
NEAR = 0.8
"""A latency above this share of the SLO is near it."""
QUICKEST = 3
"""Number of models that count as the quickest, by the time per request of a large batch."""


def run(quick: bool, seed: int) -> list[Row]:
    models = zoo()
    names = [m.name for m in models]
    quickest = [m.name for m in sorted(models, key=lambda m: m.alpha_ms)[:QUICKEST]]
    longest_s, requests, intervals = (2.0, 25_000, 2) if quick else (10.0, 250_000, 4)
    summaries: list[Row] = []
    distributions: list[Row] = []
    for workload, burst in list(WORKLOADS.items())[: 1 if quick else None]:
        for load in LOADS:
            interval_s = min(longest_s, requests / load)
            arrivals = traces(names, load, intervals, interval_s, burst)
            title = f"{workload}, {load:,} requests/s"
            found: dict[str, NDArray[np.float64]] = {}
            for name in COMPARED:
                report = run_system(
                    name, models, WORKERS, arrivals, interval_s=interval_s, seed=seed
                )
                found[name] = latencies_ms = 1e3 * report.latencies_s()
                answered = len(latencies_ms) / report.count()
                near = float(np.mean(latencies_ms > NEAR * SLO_MS))
                of_quickest = sum(len(report.latencies_s(m)) for m in quickest) / len(latencies_ms)
                summaries += [
                    Row(f"{title}, summary · {name}", metric, unit, value)
                    for metric, unit, value in (
                        ("answered", "% of requests", 100 * answered),
                        ("latency p50", "ms", float(np.median(latencies_ms))),
                        ("near the SLO", "% of answers", 100 * near),
                        ("of the quickest", "% of answers", 100 * of_quickest),
                        ("unevenness", "%", 100 * unevenness(latencies_ms / SLO_MS)),
                    )
                ]
            distributions += [
                Row(f"{title} · p{p}", name, "ms", float(np.percentile(latencies_ms, p)))
                for p in PERCENTILES
                for name, latencies_ms in found.items()
            ]
    return summaries + distributions


def unevenness(shares: NDArray[np.float64]) -> float:
    """Return the largest distance between the CDF of `shares` and the uniform one over [0, 1].

    This is the Kolmogorov-Smirnov statistic: 0 is even, 1 is a single value of 0 or 1.
    """
    even = np.clip(np.sort(shares), 0, 1)
    steps = np.arange(len(even) + 1) / len(even)
    return float(max(np.max(steps[1:] - even), np.max(even - steps[:-1])))


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot the CDFs of all systems: a PNG per workload, with a panel per load."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for row in rows:
        title, _, label = row.case.partition(" · ")
        if label.startswith("p") and row.ours is not None:
            workload, _, load = title.partition(", ")
            of_load = panels.setdefault(workload, {}).setdefault(load, {})
            of_load.setdefault(row.metric, []).append((row.ours, float(label[1:])))
    paths = []
    for workload, loads in panels.items():
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        for axes, (load, systems) in zip(
            figure.subplots(1, len(loads), squeeze=False)[0], loads.items(), strict=True
        ):
            for system, points in systems.items():
                axes.plot(*zip(*points, strict=True), "o-", ms=2, label=system)
            axes.axvline(SLO_MS, color="grey", ls=":", label="SLO")
            axes.set_title(f"{workload}, {load}", loc="left", fontsize="medium")
            axes.set_xlabel("latency (ms)")
            axes.set_ylabel("requests answered (%)")
            axes.set_xlim(left=0)
            axes.legend(fontsize="small")
        paths.append(saved(figure, directory, f"latency {workload}"))
    return paths
