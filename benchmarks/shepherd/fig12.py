"""Preemption delay and slowdown over the number of exit points, torch on this CPU.

Networks are plain torch with random weights on one CPU thread. *Delay*: time from a flag, which
another thread sets at a random time of the batch, until the batch's thread is free. *Slowdown*:
median of the paired ratios to the bare module. Both are in percent of the bare batch's time. All
times are CPU times of the batch's thread. This leaves out the time that other programs take, but
not how they slow it down through caches and memory. So the noise of the slowdown is far above its
size. *Own cost* is the time of the exit points' code, measured alone.

Numbers of exit points whose median delay is above 5 % are measured only briefly. *Chosen* is the
smallest number whose slowdown and p95 of the delay are within 5 %. If there is none, it is the one
with the least excess. A network of few large layers, such as ResNet18, cannot be stopped inside a
layer.

The paper measures on a V100. It prints no figures except "below 5 %" for most models. It needs 46
exit points for ResNet50: on a GPU, a preemption lasts up to two segments between exit points, on a
CPU one.
"""

from __future__ import annotations

import timeit
from pathlib import Path

import torch

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.shepherd.networks import resnet
from benchmarks.zoos import load
from ray_slo.models.preemption import (
    Preemptible,
    PreemptionFlag,
    preemption_scope,
)
from ray_slo.models.preemption_profile import PreemptionProfile, profile_preemption

SOURCE = "SHEPHERD §6, §7.3, Figure 12"
ASKED = [
    ("ResNet50, batch 8 · 32 exit points", "delay p95", "≤", 5, "32 is the number that is chosen"),
    ("ResNet50, batch 8 · 32 exit points", "slowdown", "≤", 5, "32 is the number that is chosen"),
]
LIMIT = 0.05


def run(quick: bool, seed: int) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        paper = load("shepherd_v100")
        cost_s = exit_point_s()
        rows = [Row("one exit point", "own cost", "µs", 1e6 * cost_s)]
        for depth in (18,) if quick else (18, 50):
            name, module = f"ResNet{depth}", resnet(depth)
            for size in (1,) if quick else (1, 8):
                profile = profile_preemption(
                    module,
                    torch.randn(3, 224, 224),
                    (size,),
                    (0, 8, 32) if quick else (0, 4, 8, 16, 32, 48),
                    budget_s=4 if quick else 4 * depth if size > 1 else depth / 2,
                    clock="thread",
                    seed=seed,
                )
                rows += profile_rows(name, profile, cost_s)
                chosen, exits = profile.chosen, paper[name].exit_points
                rows.append(Row(f"chosen · {name}, batch {size}", "exit points", "", chosen, exits))
    finally:
        torch.set_num_threads(threads)
    return rows


def profile_rows(name: str, profile: PreemptionProfile, cost_s: float | None = None) -> list[Row]:
    rows = []
    for point in sorted(profile.points, key=lambda p: (p.batch_size, p.exit_points)):
        case = f"{name}, batch {point.batch_size} · {point.exit_points} exit points"
        rows += [
            Row(case, "batch", "ms", 1e3 * point.batch_s),
            Row(case, "delay p50", "%", 100 * point.delay_p50_s / point.batch_s),
            Row(case, "delay p95", "%", 100 * point.delay),
            Row(case, "slowdown", "%", 100 * point.slowdown),
        ]
        if cost_s is not None:
            own = 100 * cost_s * point.placed / point.batch_s
            rows.append(Row(case, "own cost", "%", own))
        rows.append(Row(case, "preempted batches", "", point.preemptions))
    return rows


def exit_point_s(number: int = 32) -> float:
    """Return the seconds that one exit point adds to a pass on a CPU."""
    module = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(number)))
    x = torch.zeros(1)

    def best() -> float:
        return min(timeit.repeat(lambda: module(x), number=200, repeat=15)) / 200

    bare = best()
    names = [str(i) for i in range(number)]
    with Preemptible(module, names), preemption_scope(PreemptionFlag()):
        return (best() - bare) / number


def plot(rows: list[Row], directory: Path) -> list[Path]:
    """Plot delay and slowdown over exit points, with a panel per network and batch size."""
    from matplotlib.figure import Figure

    series: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        title, _, label = row.case.partition(" · ")
        if label.endswith(" exit points") and row.unit == "%" and row.ours is not None:
            of_panel = series.setdefault(title, {})
            of_panel.setdefault(row.metric, []).append((int(label.split()[0]), row.ours))
    figure = Figure(figsize=(3.6 * len(series), 3.2), layout="constrained")
    panels = figure.subplots(1, len(series), squeeze=False)[0]
    for axes, (title, lines) in zip(panels, series.items(), strict=True):
        for metric, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=metric)
        axes.axhline(100 * LIMIT, color="grey", linewidth=0.7)
        axes.set_xscale("symlog", base=2, linthresh=2)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [str(x) for x in ticks])
        axes.minorticks_off()
        axes.set_yscale("symlog", linthresh=10)
        axes.set(title=title, xlabel="exit points", ylabel="% of the batch's time")
        axes.legend(fontsize=7, frameon=False)
    return [saved(figure, directory, "preemption-overheads")]
