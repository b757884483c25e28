"""Makes PNGs of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def saved(figure: Figure, directory: Path, title: str) -> Path:
    """Write the figure to a file named after its title, and return the path."""
    path = directory / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.png"
    figure.savefig(path, dpi=120)
    return path


def plot_bars(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Draw one PNG per metric: a bar per case, and marks for figures of the paper and its peers."""
    from matplotlib.figure import Figure

    paths = []
    for metric in dict.fromkeys(r.metric for r in rows):
        chosen = [r for r in rows if r.metric == metric]
        figure = Figure(figsize=(8, 1.2 + 0.35 * len(chosen)), layout="constrained")
        axes = figure.subplots()
        positions = range(len(chosen))
        values = [math.nan if r.ours is None else r.ours for r in chosen]
        axes.barh(positions, values, color="C0", alpha=0.7, label="ours")
        marks: dict[str, list[tuple[float, int]]] = {}
        for y, row in enumerate(chosen):
            others = ({"paper": row.paper} if row.paper is not None else {}) | row.peers
            for name, value in others.items():
                marks.setdefault(name, []).append((value, y))
        for i, (name, points) in enumerate(marks.items(), 1):
            axes.plot(*zip(*points, strict=True), "D", color=f"C{i}", label=name)
        axes.set_yticks(positions, [r.case for r in chosen])
        axes.invert_yaxis()
        axes.set_xlabel(f"{metric} ({chosen[0].unit})" if chosen[0].unit else metric)
        axes.legend()
        paths.append(saved(figure, directory, metric))
    return paths


def plot_series(
    rows: Sequence[Row], directory: Path, x_label: str, *, log: bool = False
) -> list[Path]:
    """Draw rows whose metric has the form "WHAT at X", with a line per case.

    There is one PNG for each title (the part of the case before " · ") and each WHAT. The paper's
    figures are diamonds in the colour of the line.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], dict[str, list[tuple[float, Row]]]] = {}
    for row in rows:
        what, at, x = row.metric.partition(" at ")
        number = re.search(r"[\d.]+", x)
        if at and number and row.ours is not None:
            title, _, label = row.case.rpartition(" · ")
            lines = panels.setdefault((title, what), {})
            lines.setdefault(label, []).append((float(number.group()), row))
    paths = []
    for (title, what), lines in panels.items():
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        unit = ""
        for i, (label, points) in enumerate(lines.items()):
            axes.plot([x for x, _ in points], [r.ours for _, r in points], "o-", ms=3, label=label)
            paper = [(x, r.paper) for x, r in points if r.paper is not None]
            if paper:
                axes.plot(*zip(*paper, strict=True), "D", color=f"C{i}", label=f"{label}, paper")
            unit = points[0][1].unit
        axes.set_xlabel(x_label)
        if log:
            axes.set_xscale("log")
        axes.set_ylabel(f"{what} ({unit})" if unit else what)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.legend(fontsize="small")
        paths.append(saved(figure, directory, f"{title} {what}"))
    return paths
