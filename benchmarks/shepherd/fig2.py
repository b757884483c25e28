"""Variation of the requests in a window, of streams and of groups of streams.

The rows have the coefficient of variation (CV: standard deviation / mean) of the number of requests
in a window of τ minutes. It is averaged over streams (groups of 1: Figure 2), or over groups of
randomly chosen streams (Figure 5). There are two populations, both synthetic:

* "synthetic": 1000 Poisson streams with exponential mean rates, as in the paper. The average is one
  request per minute; the paper does not give it.
* "Azure-like": a replacement for the 46,000 applications of the Azure Functions trace in the paper.
  That trace is public (invocations per minute), but this repository has no copy. Mean rates are
  log-normal through two points of Shahrad et al., "Serverless in the Wild" (ATC 2020). 45 % have at
  most one request per hour, 81 % at most one per minute. The rest is our choice. A stream is the
  sum of as many independent sources as it has requests per minute (1 to 100). Sources burst (MMPP).
  In bursts they have four times their mean rate, else a quarter of it. Bursts last 10 minutes on
  average, and take a fifth of the time. All share a daily rhythm of ±30 %. The rhythm alone has a
  CV of 0.21, and no group gets below that; a planner knows it.

The paper prints only curves. It claims that CV grows as τ shrinks, and much less so for groups of
100 to 1000.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row

SOURCE = "SHEPHERD §2.2, §3.1, Figures 2 and 5"
GROUP_SIZES = (1, 10, 100, 1000)
WINDOWS_MIN = (1, 4, 15, 60, 240)
CHUNK = 1000  # streams that are drawn at once
# Parameters of ln(requests per minute): 45 % are below 1/60, 81 % below 1.
SIGMA = float(np.log(60) / (0.8779 + 0.1257))
MU = -0.8779 * SIGMA


def run(quick: bool, seed: int) -> list[Row]:
    azure, minutes = (3_000, 1440) if quick else (46_000, 2880)
    rows = []
    for k, (name, streams) in enumerate((("synthetic", 1_000), ("Azure-like", azure))):
        rng = np.random.default_rng([seed, k])
        synthetic = name == "synthetic"
        rates = rng.exponential(1.0, streams) if synthetic else rng.lognormal(MU, SIGMA, streams)
        cvs: dict[tuple[int, int], list[float]] = {}
        for first in range(0, streams, CHUNK):  # streams are independent: these are random groups
            chunk = rates[first : first + CHUNK]
            intensity: Any = chunk[:, None]
            if not synthetic:
                intensity = intensity * bursts(chunk, minutes, rng) * daily(minutes)
            counts = rng.poisson(intensity, (len(chunk), minutes))
            for size in GROUP_SIZES:
                grouped = counts.reshape(-1, size, minutes).sum(axis=1)
                for window in WINDOWS_MIN:
                    cvs.setdefault((size, window), []).extend(variation(grouped, window))
        rows += [
            Row(
                f"{name}, {streams:,} streams · groups of {size}",
                f"CV at τ = {window} min",
                "",
                float(np.mean(cvs[size, window])),
            )
            for size in GROUP_SIZES
            for window in WINDOWS_MIN
        ]
    return rows


def variation(counts: NDArray[np.int64], window: int) -> list[float]:
    """Return the CV over windows of each group that has requests; `counts`: (groups, minutes)."""
    groups, minutes = counts.shape
    windows = counts[:, : minutes // window * window].reshape(groups, -1, window).sum(axis=2)
    windows = windows[windows.any(axis=1)]
    return list(windows.std(axis=1) / windows.mean(axis=1))


def bursts(
    rates: NDArray[np.float64], minutes: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return MMPP factors with mean 1, as (streams, minutes); `rates` are requests per minute."""
    sources = np.clip(np.ceil(rates), 1, 100).astype(int)
    on = rng.binomial(sources, 0.2)
    factors = np.empty((minutes, len(rates)))
    for minute in range(minutes):
        on = rng.binomial(on, 0.9) + rng.binomial(sources - on, 0.025)  # 10 minutes on, 40 off
        factors[minute] = 0.25 + 3.75 * on / sources
    return factors.T


def daily(minutes: int) -> NDArray[np.float64]:
    return np.asarray(1 + 0.3 * np.sin(2 * np.pi * np.arange(minutes) / 1440))


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    from matplotlib.figure import Figure

    populations: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        population, _, group = row.case.partition(" · ")
        populations.setdefault(population, {}).setdefault(group, []).append(row.ours or 0.0)
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, (population, groups) in zip(
        figure.subplots(1, len(populations)), populations.items(), strict=True
    ):
        for group, values in groups.items():
            axes.loglog(WINDOWS_MIN, values, marker="o", label=group)
        axes.set_title(population)
        axes.set_xlabel("window τ (minutes)")
        axes.set_ylabel("coefficient of variation")
        axes.legend()
    return [saved(figure, directory, "variation")]
