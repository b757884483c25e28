"""Plots of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ray_slo.simulation.frames import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ray_slo.simulation.report import Report


def draw_latency(report: Report, axes: Axes) -> None:
    """Plot the CDF of each model's latency, and its SLO."""
    for i, model in enumerate(report.meta["models"]):
        _draw_cdf(axes, report.latencies_s(model) * 1e3, report.count(model=model), model, i)
        axes.axvline(report.meta["slo_s"][model] * 1e3, color=f"C{i % 10}", linestyle="--")
    axes.set(
        xlabel="latency (ms); dashed: SLO", ylabel="share of requests answered", ylim=(0, 1.02)
    )
    _legend(axes)


def draw_queueing(report: Report, axes: Axes) -> None:
    """Plot the CDF of each model's queueing delay."""
    for i, model in enumerate(report.meta["models"]):
        _draw_cdf(axes, report.queueing_s(model) * 1e3, report.count(model=model), model, i)
    axes.set(xlabel="queueing delay (ms)", ylabel="share of requests started", ylim=(0, 1.02))
    _legend(axes)


def draw_batch_sizes(report: Report, axes: Axes) -> None:
    """Plot the histogram of batch sizes."""
    sizes = report.batch_sizes
    bins = np.arange(0.5, sizes.max(initial=1) + 1.5).tolist()
    axes.hist(sizes, bins=bins, rwidth=0.9)
    axes.set(xlabel="batch size", ylabel="batches")


def draw_goodput(report: Report, axes: Axes) -> None:
    """Plot the offered rate and the goodput over time, in requests per second."""
    end = report.meta["duration_s"]
    edges = np.linspace(0, end, 51)
    arrival, good = report.arrivals()
    width = edges[1] - edges[0]
    for label, times in (("offered", arrival), ("goodput", arrival[good])):
        axes.stairs(np.histogram(times, edges)[0] / width, edges, label=label)
    if report.meta["warmup_s"]:
        axes.axvspan(0, report.meta["warmup_s"], color="0.9")
    axes.set(xlabel="time of arrival (s); grey: warm-up", ylabel="requests per second")
    axes.set_xlim(0, end)
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_cdf(axes: Axes, values: Array, of: int, label: str, colour: int) -> None:
    """Plot the cumulative share of `of` requests. It stays below 1 if some were not answered."""
    ordered = np.sort(values)
    share = np.arange(1, len(ordered) + 1) / max(of, 1)
    axes.plot(ordered, share, label=label, color=f"C{colour % 10}", drawstyle="steps-post")


def _legend(axes: Axes) -> None:
    if len(axes.get_legend_handles_labels()[0]) <= 10:
        axes.legend()
