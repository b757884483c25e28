"""Deferred compared with two kinds of eager, on a sample of the synthetic workloads.

The grid has a model of the 1080Ti zoo (8 to 64 copies), GPUs per model, SLO, and burstiness (shape
of Gamma gaps). Its SLOs are at least twice the time of a batch of one. It also has the mixed zoo
(35 models with their own SLOs) over GPUs per model and burstiness. There are no delays. The rows
have the goodput of `deferred` over that of `eager`, and over that of *window drop*. This is the
eager system of the paper's artifact (`benchmarks/peers/window.py`), and probably that of the
figure.

This program draws a sample of the grid; with `--quick`, a small one of small clusters. `python -m
benchmarks symphony-fig7 --full` runs the whole grid, which takes days. The paper has 5880 cases,
and does not name the combinations that it leaves out.

The paper claims gains of 35 to 102 % for mixtures, and of 34 to 234 % for DenseNet121 at 30 ms.
Bert (no batching effect) is about even. The factor is at least 0.95 "for almost all" cases, and 1.5
for 16 % of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.symphony.fig9 import upper_bound
from benchmarks.symphony.systems import search
from benchmarks.zoos import ZooModel, load
from ray_slo.core import Cluster
from ray_slo.policies import make_policy
from ray_slo.simulation import Gamma, Workload

SOURCE = "Symphony §3.4, Table 1, Figure 7"
ASKED = [
    ("* cases · deferred over *", "at least 0.95", "≥", 95),
    ("* cases · deferred over window drop", "at least 1.5", "≥", 16),
    (
        "* cases · deferred over eager",
        "at least 1.5",
        "≥",
        16,
        "our eager refuses single requests; that of the paper's artifact refuses whole windows",
    ),
]
MODELS = ("DenseNet121", "InceptionV3", "ResNet50V2", "VGG16", "Xception", "BERT")
COUNTS = (8, 16, 24, 32, 48, 64)
RATIOS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
SLOS_MS = (20, 25, 30, 40, 50)
SHAPES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
MIXED = "mixed"
POLICIES: dict[str, dict[str, Any]] = {
    "deferred": {},
    "consolidate": {"objective": "consolidate"},
    "as Algorithm 1": {"exact": True},
}
EAGER = {"eager": "eager", "window drop": "benchmarks.peers:WindowEager"}


class Case(NamedTuple):
    """One workload of the grid. A mixture has no common SLO: its models have their own."""

    model: str
    count: int
    ratio: float
    slo_ms: float | None
    shape: float

    def __str__(self) -> str:
        slo = f", {self.slo_ms:g} ms" if self.slo_ms else ""
        return f"{self.count} {self.model}{slo}, {self.gpus} GPUs, Γ({self.shape:g})"

    @property
    def gpus(self) -> int:
        return round(self.count * self.ratio)

    @property
    def models(self) -> list[ZooModel]:
        zoo = load("symphony_1080ti")
        if self.model == MIXED:
            return list(zoo.values())
        of = zoo[self.model]
        name = f"{self.model}-{{}}".format
        return [ZooModel(name(i), of.alpha_ms, of.beta_ms, self.slo_ms) for i in range(self.count)]


def grid() -> list[Case]:
    """Return every feasible case, in a fixed order."""
    zoo = load("symphony_1080ti")
    cases = [
        Case(model, count, ratio, slo, shape)
        for model, count, ratio, slo, shape in product(MODELS, COUNTS, RATIOS, SLOS_MS, SHAPES)
        if 2 * (zoo[model].alpha_ms + zoo[model].beta_ms) <= slo
    ]
    return cases + [
        Case(MIXED, len(zoo), ratio, None, shape) for ratio, shape in product(RATIOS, SHAPES)
    ]


def relative(case: Case, quick: bool, seed: int) -> dict[str, float]:
    """Return the goodput of each kind of deferral over each kind of eager; NaN if eager's is 0."""
    models = case.models
    cluster = Cluster.uniform([m.model() for m in models], case.gpus)
    bound = upper_bound(models, case.gpus)
    longest_s = max(m.model().latency_slo_s for m in models)
    warmup_s = max(0.3 if quick else 1.0, 3 * longest_s)
    # Each model needs enough requests to measure 1 % of them.
    duration_s = warmup_s + (200 if quick else 1000) * len(models) / bound

    def found(policy: str, kwargs: dict[str, Any]) -> float:
        return search(
            lambda: make_policy(policy, kwargs),
            cluster,
            Workload(arrivals=Gamma(rate=bound, shape=case.shape)),
            start_rate=0.6 * bound,
            growth=1.6,
            tolerance=0.05 if quick else 0.01,
            warmup_s=warmup_s,
            duration_s=duration_s,
            seed=seed,
        ).rate

    deferred = {name: found("deferred", kwargs) for name, kwargs in POLICIES.items()}
    eager = {name: found(policy, {}) for name, policy in EAGER.items()}
    return {
        f"{name} over {peer}": value / of if of else float("nan")
        for peer, of in eager.items()
        for name, value in deferred.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--full", action="store_true", help="run every case of the grid, which takes days"
    )


def run(quick: bool, seed: int, full: bool = False) -> list[Row]:
    cases = grid()
    if full:
        return _rows(cases, len(cases), quick, seed)
    rng = np.random.default_rng(seed)
    mixed = [c for c in cases if c.model == MIXED and (c.ratio <= 1.5 or not quick)]
    chosen = [mixed[i] for i in rng.choice(len(mixed), 1 if quick else 3, replace=False)]
    for model in MODELS:
        of = [c for c in cases if c.model == model and (c.gpus <= 24 or not quick)]
        chosen += [of[i] for i in rng.choice(len(of), 2 if quick else 4, replace=False)]
    return _rows(chosen, len(cases), quick, seed)


def _rows(cases: Sequence[Case], of: int, quick: bool, seed: int) -> list[Row]:
    results = {case: relative(case, quick, seed) for case in cases}
    rows = [
        Row(f"relative goodput · {case}", name, "×", value)
        for case, result in results.items()
        for name, value in result.items()
    ]
    for name in next(iter(results.values())):
        values = np.array([r[name] for r in results.values()])
        values = values[np.isfinite(values)]
        label = f"{len(values)} of {of} cases · {name}"
        rows += [
            Row(label, "at least 0.95", "% of cases", 100 * float(np.mean(values >= 0.95))),
            Row(label, "at least 1.5", "% of cases", 100 * float(np.mean(values >= 1.5)), 16),
            Row(label, "median", "×", float(np.median(values))),
            Row(label, "least", "×", float(values.min())),
            Row(label, "largest", "×", float(values.max())),
        ]
    return rows


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot Figure 7(d): the distribution over all cases."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    styles = dict(zip(EAGER, ("-", "--"), strict=True))
    for (i, name), peer in product(enumerate(POLICIES), EAGER):
        values = np.sort(
            [
                np.nan if r.ours is None else r.ours
                for r in rows
                if r.metric == f"{name} over {peer}" and r.case.startswith("relative goodput")
            ]
        )
        share = np.arange(1, len(values) + 1) / len(values)
        axes.plot(values, share, styles[peer], color=f"C{i}", label=f"{name} over {peer}")
    axes.axvline(1, color="0.6", lw=0.8)
    axes.set_xlabel("relative goodput")
    axes.set_ylabel("share of cases")
    axes.legend()
    return [saved(figure, directory, "relative-goodput")]
