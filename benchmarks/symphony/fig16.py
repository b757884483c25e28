"""How even sub-clusters are in rate and memory, against the random solver.

800 models are partitioned into 20 sub-clusters, and 400 into 4 (the size in Appendix A.1). Models
are randomly drawn variants of networks, with exponential rates. Each seed is a configuration. The
random solver draws partitions again and again, and keeps the best within the limits. It gets ten
seconds of CPU time in a full run, and one in a quick run; the paper gives both solvers ten. Ours
stops when the partition is good enough. "After a change": every rate is drawn anew, and at most 5 %
of the models may move. The paper shows its figure only as curves.

The paper has no memory sizes. Static sizes here are sizes of weights as Keras Applications lists
them. Dynamic sizes are up to three times that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from ray_slo.papers import partition

SOURCE = "Symphony §4.4, Appendix A, Figure 16"
# MB of weights: "Size" in the table of https://keras.io/api/applications/
ZOO_MB = {
    "Xception": 88, "VGG16": 528, "VGG19": 549, "ResNet50": 98, "ResNet101": 171, "ResNet152": 232,
    "InceptionV3": 92, "InceptionResNetV2": 215, "MobileNet": 16, "MobileNetV2": 14,
    "DenseNet121": 33, "DenseNet169": 57, "DenseNet201": 80, "NASNetMobile": 23, "NASNetLarge": 343,
    "EfficientNetB0": 29, "EfficientNetB3": 48, "EfficientNetB5": 118, "EfficientNetB7": 256,
}  # fmt: skip
SIZES = {"800 models, 20 sub-clusters": (800, 20), "400 models, 4 sub-clusters": (400, 4)}
KINDS = ("load", "memory")


def run(quick: bool, seed: int) -> list[Row]:
    configurations, limit_s = (2, 1.0) if quick else (8, 10.0)
    rows = []
    for case, (models, parts) in SIZES.items():
        ours: list[list[float]] = []
        random: list[list[float]] = []
        changed: list[list[float]] = []
        for i in range(configurations):
            rng = np.random.default_rng([seed, i])
            problem = instance(models, parts, rng)
            ours.append(_planned(problem, limit_s))
            random.append([*random_solver(problem, rng, limit_s), limit_s])
            changed.append(_planned(_changed(problem, rng), limit_s))
        for solver, found in (
            ("planner", ours), ("random solver", random), ("planner after a change", changed)
        ):  # fmt: skip
            values = np.array(found)
            for k, kind in enumerate(KINDS):
                rows += [
                    Row(f"{case} · {solver}", f"{kind} imbalance, {name}", "%", 100 * float(value))
                    for name, value in (
                        ("median", np.median(values[:, k])), ("largest", values[:, k].max())
                    )
                ]  # fmt: skip
            rows.append(Row(f"{case} · {solver}", "CPU time", "s", float(values[:, 2].mean())))
    return rows


def instance(models: int, parts: int, rng: np.random.Generator) -> partition.Problem:
    static = rng.choice(list(ZOO_MB.values()), models).astype(float) * rng.uniform(0.8, 1.2, models)
    dynamic = static * rng.uniform(1, 3, models)
    rates = rng.exponential(100, models)
    return partition.Problem(
        tuple(
            partition.Model(f"m{i}", float(rates[i]), float(static[i]), float(dynamic[i]))
            for i in range(models)
        ),
        sub_clusters=parts,
        max_rate=float(rates.sum()) / parts * 1.5,
        max_memory_mb=float(static.sum()) / parts * 1.2 + float(dynamic.max()),
    )


def _changed(problem: partition.Problem, rng: np.random.Generator) -> partition.Problem:
    plan = partition.plan(problem)
    assert isinstance(plan, partition.Plan), plan.reason
    where = {name: j for j, part in enumerate(plan.sub_clusters) for name in part.models}
    rates = rng.exponential(100, len(problem.models))
    return replace(
        problem,
        models=tuple(replace(m, rate=float(r)) for m, r in zip(problem.models, rates, strict=True)),
        current=tuple(where[m.name] for m in problem.models),
        max_change_cost=0.05 * len(problem.models) * 2,  # a move is one unload and one load
        tolerance=0.01,
    )


def _planned(problem: partition.Problem, limit_s: float) -> list[float]:
    began = time.process_time()
    plan = partition.plan(replace(problem, time_limit_s=limit_s))
    took = time.process_time() - began
    assert isinstance(plan, partition.Plan), plan.reason
    return [*imbalances(plan), took]


def imbalances(plan: partition.Plan) -> list[float]:
    """Return (max − min) / average of the rates, and of the static memory, of the sub-clusters."""
    rates = [s.rate for s in plan.sub_clusters]
    statics = [s.static_mb for s in plan.sub_clusters]
    return [float(np.ptp(a) / np.mean(a)) for a in (rates, statics)]


def random_solver(
    problem: partition.Problem, rng: np.random.Generator, limit_s: float
) -> tuple[float, float]:
    """Draw random partitions until the time is over (Appendix A.2).

    Returns the load and memory imbalance of the best one within the limits, by our objective.
    """
    count, parts = len(problem.models), problem.sub_clusters
    rate = np.array([m.rate for m in problem.models])
    static = np.array([m.static_mb for m in problem.models])
    dynamic = np.array([m.dynamic_mb for m in problem.models])
    least, best = np.inf, (np.nan, np.nan)
    end = time.process_time() + limit_s
    while time.process_time() < end:
        group = rng.integers(parts, size=count)
        rates = np.bincount(group, rate, parts)
        statics = np.bincount(group, static, parts)
        largest = np.zeros(parts)
        np.maximum.at(largest, group, dynamic)
        if (rates > problem.max_rate).any() or (statics + largest > problem.max_memory_mb).any():
            continue
        spreads = [np.abs(a / a.mean() - 1).max() for a in (rates, statics)]
        if sum(spreads) < least:
            least = sum(spreads)
            best = tuple(float(np.ptp(a) / a.mean()) for a in (rates, statics))
    return best


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot the median imbalance by solver, with the largest as a whisker."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), KINDS, strict=True):
        chosen = {
            name: {r.case: r.ours or 0.0 for r in rows if r.metric == f"{kind} imbalance, {name}"}
            for name in ("median", "largest")
        }
        cases = list(chosen["median"])
        medians = [chosen["median"][c] for c in cases]
        above = [chosen["largest"][c] - chosen["median"][c] for c in cases]
        axes.barh(range(len(cases)), medians, xerr=[[0.0] * len(cases), above], alpha=0.7)
        axes.set_yticks(range(len(cases)), cases if kind == KINDS[0] else [""] * len(cases))
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel(f"{kind} imbalance (%): median, largest")
    return [saved(figure, directory, "imbalance")]
