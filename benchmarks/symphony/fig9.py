"""The model zoos on 64 emulated GPUs, every system.

*Mixed* has every model of Table 3 (1080Ti) or Table 4 (A100), *strong* those with β/α > 2, *weak*
those below. Rates are equal, arrivals Poisson, and there are no delays. Goodput is the largest
total rate at which no model has more than 1 % of bad requests. `--quick` runs the 1080Ti only. The
paper's claim is in the column "over best peer". It is 2.0 to 2.4 times the baselines when mixed,
3.5 (1080Ti) and 5.7 (A100) times when strong, and 1.23 and 1.10 times when weak.

"No more than" is an upper bound for every system: all GPUs are busy, and each model has the largest
batch with ℓ(b) ≤ SLO. If a peer exceeds half of the bound, no system can be twice as good. Eager is
not one of the paper's peers. It shows that simple central scheduling comes close to the bound on a
mixed zoo. Clockwork and Shepherd are slower because of their rules: Clockwork commits early, and
Shepherd takes the largest batch first. Nexus loses by partitioning the GPUs, as it owes each model
a cycle of two batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.symphony.systems import SYSTEMS, System, goodput
from benchmarks.zoos import ZooModel, load
from ray_slo.core import Cluster
from ray_slo.simulation import Workload

SOURCE = "Symphony Figure 9"
ASKED = [
    (
        "1080Ti, mixed* · deferred",
        "over best peer",
        "≥",
        2.0,
        "our peers have no overheads, and no scheduler can exceed 1.68 × here",
    ),
    (
        "1080Ti, strong* · deferred",
        "over best peer",
        "≥",
        3.5,
        "our peers have no overheads, and no scheduler can exceed 1.52 × here",
    ),
    (
        "1080Ti, weak* · deferred",
        "over best peer",
        "≥",
        1.23,
        "our peers have no overheads, and no scheduler can exceed 1.13 × here",
    ),
    (
        "A100, mixed* · deferred",
        "over best peer",
        "≥",
        2.0,
        "our peers have no overheads, and no scheduler can exceed 2.22 × here",
    ),
    (
        "A100, strong* · deferred",
        "over best peer",
        "≥",
        5.7,
        "our peers have no overheads, and no scheduler can exceed 2.24 × here",
    ),
    (
        "A100, weak* · deferred",
        "over best peer",
        "≥",
        1.1,
        "our peers have no overheads, and no scheduler can exceed 1.06 × here",
    ),
]
GPUS = 64
PAPER = {
    ("1080Ti", "mixed"): 2.0,
    ("1080Ti", "strong"): 3.5,
    ("1080Ti", "weak"): 1.23,
    ("A100", "mixed"): 2.0,
    ("A100", "strong"): 5.7,
    ("A100", "weak"): 1.10,
}

COMPARED: dict[str, System] = {
    "deferred, consolidate": ("deferred", {"objective": "consolidate"}),
    "deferred, as Algorithm 1": ("deferred", {"exact": True}),
    **SYSTEMS,
    "eager": ("eager", {}),
    "eager, window drop": ("benchmarks.peers:WindowEager", {}),
}


def upper_bound(models: Sequence[ZooModel], gpus: int) -> float:
    """Return the requests per second, at equal rates, that no scheduler can exceed."""
    # GPU seconds for one request of every model
    per_round = sum(seconds / batch for seconds, batch in map(largest, models))
    return gpus * len(models) / per_round


def largest(zoo_model: ZooModel) -> tuple[float, int]:
    """Return the latency (seconds) and the size of the largest batch with ℓ(b) ≤ SLO."""
    model = zoo_model.model()
    profile = model.variants[0].profiles["default"]
    batch = profile.max_batch_within(model.latency_slo_s + 1e-9)
    return profile.latency(batch), batch


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    for gpu in ("1080Ti",) if quick else ("1080Ti", "A100"):
        zoo = list(load(f"symphony_{gpu.lower()}").values())
        for setting, models in (
            ("mixed", zoo),
            ("strong", [m for m in zoo if m.batching_effect > 2]),
            ("weak", [m for m in zoo if m.batching_effect < 2]),
        ):
            title = f"{gpu}, {setting}: {len(models)} models on {GPUS} GPUs"
            cluster = Cluster.uniform([m.model() for m in models], GPUS)
            bound = upper_bound(models, GPUS)
            rates = {
                name: goodput(
                    system,
                    cluster,
                    Workload.poisson(bound),
                    start_rate=bound / (6 if name.startswith("Nexus") else 1.6),
                    growth=1.4,
                    tolerance=0.05 if quick else 0.01,
                    warmup_s=0.5 if quick else 1,
                    duration_s=1.4 if quick else 1 + 1500 * len(models) / bound,
                    seed=seed,
                ).rate
                for name, system in COMPARED.items()
            }
            best_peer = max(
                rate for name, rate in rates.items() if name in SYSTEMS and name != "deferred"
            )
            for name, rate in rates.items():
                paper = PAPER[gpu, setting] if name == "deferred" else None
                rows += [
                    Row(f"{title} · {name}", "goodput", "req/s", rate),
                    Row(f"{title} · {name}", "over best peer", "×", rate / best_peer, paper),
                ]
            rows += [
                Row(f"{title} · no more than", "goodput", "req/s", bound),
                Row(f"{title} · no more than", "over best peer", "×", bound / best_peer),
            ]
    return rows


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot grouped bars: a group per setting, a bar per system."""
    from matplotlib.figure import Figure

    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.metric == "goodput":
            title, _, name = row.case.partition(" · ")
            groups.setdefault(title, {})[name] = math.nan if row.ours is None else row.ours
    names = list(next(iter(groups.values())))
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        at = [g + i * width for g in range(len(groups))]
        axes.bar(at, [values[name] for values in groups.values()], width, label=name)
    middle = [g + 0.425 - width / 2 for g in range(len(groups))]
    axes.set_xticks(middle, [title.partition(":")[0] for title in groups])
    axes.set_ylabel("goodput (req/s)")
    axes.legend(fontsize="small", ncols=2)
    return [saved(figure, directory, "goodput")]
