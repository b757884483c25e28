"""The plots of the demo. Make them through `report_html.svg` or `save`, which set the style."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.core.files import whole
from ray_slo.demo.extras import FOLLOWED, Following
from ray_slo.demo.stream import OverTime, Stretch, starts
from ray_slo.demo.systems import System

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"tuned": "#d1495b", "batch": "#3b7dd8", "deployment": "#1e9e5a"}
WIDTHS = {"tuned": 1.8, "batch": 2.2, "deployment": 3.6}
OFFERED = "#9a9a9a"
ON_PAPER: dict[str, object] = {  # of the files; those of the page are in `report_html`
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def story(
    runs: Mapping[System, OverTime], stretches: Sequence[Stretch], slo_ms: float, unit: float
) -> Figure:
    """Plot the offered rate, and each system's rate of answers in time, over time.

    Args:
        unit: rate that the stretches' loads are multiples of, in requests per second.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    axis = figure.subplots()
    offered = next(iter(runs.values()))
    axis.fill_between(
        *_stairs(offered.at_s, offered.offered), color=OFFERED, alpha=0.25, linewidth=0
    )
    axis.plot(
        *_stairs(offered.at_s, offered.offered), color=OFFERED, linewidth=1.2, label="offered"
    )
    for system, times in runs.items():
        axis.plot(
            times.at_s,
            times.goodput,
            color=COLOURS[system.key],
            linewidth=WIDTHS[system.key],
            linestyle="-" if system.ours else (0, (4, 1.5)),
            zorder=6 - WIDTHS[system.key],  # thin lines above wide ones, so that all are visible
            label=system.name,
        )
    # The names of the stretches are above the lines, and the legend is beside them.
    top = 1.18 * max(float(times.offered.max()) for times in runs.values())
    axis.set_ylim(0, top)
    _name_stretches(axis, stretches, top, unit)
    axis.set(xlabel="seconds", ylabel="requests per second")
    axis.set_title(
        f"The same requests to each system: how many are answered within {slo_ms:.0f} ms?",
        loc="left",
        fontsize=11,
    )
    axis.legend(loc="upper left", bbox_to_anchor=(0.0, 0.86), fontsize=9, frameon=False)
    return figure


def accuracy(
    runs: Mapping[System, OverTime], stretches: Sequence[Stretch], slo_ms: float, unit: float
) -> Figure:
    """Plot each system's latency over time, and the accuracy of the networks that answered."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for system, times in runs.items():
        colour = COLOURS[system.key]
        upper.plot(times.at_s, times.p99_ms, color=colour, linewidth=2, label=system.name)
        if np.isfinite(times.accuracy).any():
            lower.plot(times.at_s, times.accuracy, color=colour, linewidth=2, label=system.name)
    upper.axhline(slo_ms, color=OFFERED, linewidth=1, linestyle="--", label="SLO")
    upper.set(yscale="log", ylabel="p99 latency (ms)")
    upper.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.84))
    upper.yaxis.set_major_formatter("{x:g}")
    low, high = upper.get_ylim()
    upper.set_ylim(low, high * 4)
    _name_stretches(upper, stretches, high * 4, unit)
    _name_stretches(lower, stretches, None, unit)
    lower.set(xlabel="seconds", ylabel="accuracy (%)")
    lower.margins(y=0.15)
    lower.legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def following(found: Following) -> Figure:
    """Plot the offered rate, the rate of answers in time, and the number of serving replicas."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    times = found.times
    upper.fill_between(*_stairs(times.at_s, times.offered), color=OFFERED, alpha=0.25, linewidth=0)
    upper.plot(*_stairs(times.at_s, times.offered), color=OFFERED, linewidth=1.2, label="offered")
    upper.plot(
        times.at_s,
        times.goodput,
        color=COLOURS["deployment"],
        linewidth=2.4,
        label="answered in time",
    )
    upper.set(ylabel="requests per second")
    upper.set_ylim(bottom=0)
    upper.legend(fontsize=8, frameon=False, loc="upper left")
    if found.workers:
        at, count = zip(*found.workers, strict=True)
        lower.step(at, count, where="post", color=COLOURS["deployment"], linewidth=2.4)
        lower.set_yticks(range(max(count) + 2))
    lower.set_ylim(bottom=0)
    for axis in (upper, lower):
        _name_stretches(axis, FOLLOWED, None, 1.0)
    lower.set(xlabel="seconds", ylabel="replicas")
    return figure


def save(figure_of: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure with a white background as SVG and PNG. Return the paths.

    Args:
        figure_of: function that makes the figure.
    """
    import matplotlib

    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    with matplotlib.rc_context(ON_PAPER):  # type: ignore[arg-type]
        figure = figure_of()
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            with whole(path) as half:
                figure.savefig(half, dpi=150, metadata=metadata, format=path.suffix[1:])
    return paths


def _stairs(at: Any, values: Any) -> tuple[Any, Any]:
    """Return the points of a line with a flat piece for each bin."""
    half = (at[1] - at[0]) / 2 if len(at) > 1 else 0.5
    edges = np.concatenate([at - half, at[-1:] + half])
    return np.repeat(edges, 2)[1:-1], np.repeat(values, 2)


def _name_stretches(
    axis: Axes, stretches: Sequence[Stretch], top: float | None, unit: float
) -> None:
    """Draw a thin line at the start of each stretch. With `top`, write its name and rate below
    it."""
    begins = starts(stretches, 0.0)
    for at in begins[1:-1]:
        axis.axvline(at, color=OFFERED, linewidth=0.8, linestyle=":")
    axis.set_xlim(begins[0], begins[-1])
    if top is None:
        return
    for stretch, (begin, end) in zip(stretches, itertools.pairwise(begins), strict=True):
        axis.text(
            (begin + end) / 2,
            top,
            f"{stretch.name}\n{stretch.load * unit:.0f}/s",
            ha="center",
            va="top",
            fontsize=9,
            linespacing=1.3,
        )
