"""GPUs needed for 15,000 requests per second, every system.

The GPUs are A100. There is one ResNet50 with SLO 25 ms, and the mixed zoo of Table 4 at equal
rates. Arrivals are Poisson, without delays. A number of GPUs suffices if no model has more than 1 %
of bad requests. In the paper, with one model, Symphony needs 2 to 6 GPUs fewer than Shepherd and
Nexus. It needs less than half of Clockwork's. With the mixed zoo, Nexus and Shepherd need 166 % and
90 % more, and Clockwork cannot serve the load. A dash means that 512 GPUs do not suffice. The last
line is a lower bound for every scheduler (see `symphony-fig9`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.harness.rows import Row
from benchmarks.symphony.fig9 import COMPARED, upper_bound
from benchmarks.symphony.systems import System, run_at
from benchmarks.zoos import ZooModel, load
from ray_slo.core import Cluster
from ray_slo.simulation import Workload

SOURCE = "Symphony Figure 10"
ASKED = [
    (
        "ResNet50* · Shepherd",
        "GPUs",
        "≥",
        8,
        "without overheads, Shepherd needs no more GPUs than the bound either",
    ),
    ("ResNet50* · Nexus, 1 frontend", "GPUs", "≥", 8),
    ("* · Clockwork", "more than deferred", "≥", 100),
    (
        "37 models* · Shepherd",
        "more than deferred",
        "≥",
        90,
        "our peers have no overheads",
    ),
    (
        "37 models* · Nexus, 1 frontend",
        "more than deferred",
        "≥",
        166,
        "our peers have no overheads",
    ),
]
RATE, MOST = 15_000, 512
PAPER_MORE = {"Nexus, 1 frontend": 166.0, "Shepherd": 90.0}  # percent, for the mixed zoo


def run(quick: bool, seed: int) -> list[Row]:
    zoo = load("symphony_a100")
    single = [ZooModel("ResNet50", zoo["ResNet50"].alpha_ms, zoo["ResNet50"].beta_ms, 25)]
    rows: list[Row] = []
    for title, models in (("ResNet50, SLO 25 ms", single), ("37 models", list(zoo.values()))):
        least = math.ceil(RATE / upper_bound(models, 1))
        needed = {
            name: _fewest(system, models, least, quick, seed) for name, system in COMPARED.items()
        }
        for name, gpus in needed.items():
            more = 100 * (gpus / needed["deferred"] - 1)
            paper = PAPER_MORE.get(name) if len(models) > 1 else None
            rows += [
                Row(f"{title}, {RATE}/s · {name}", "GPUs", "", gpus),
                Row(f"{title}, {RATE}/s · {name}", "more than deferred", "%", more, paper),
            ]
        more = 100 * (least / needed["deferred"] - 1)
        rows += [
            Row(f"{title}, {RATE}/s · no less than", "GPUs", "", least),
            Row(f"{title}, {RATE}/s · no less than", "more than deferred", "%", more),
        ]
    return rows


def _fewest(
    system: System, models: Sequence[ZooModel], least: int, quick: bool, seed: int
) -> float:
    """Return the fewest sufficient GPUs (up to 6 % more if quick); NaN if `MOST` do not suffice."""

    def suffices(gpus: int) -> bool:
        report = run_at(
            system,
            Cluster.uniform([m.model() for m in models], gpus),
            Workload.poisson(RATE),
            warmup_s=0.2 if quick else 2,
            duration_s=0.8 if quick else 8,
            seed=seed,
        )
        return report.worst_bad_rate <= 0.01

    low, high = least - 1, least
    while not suffices(high):
        low, high = high, high + max(1, high // 4)
        if low >= MOST:
            return math.nan
    while high - low > (max(1, high // 16) if quick else 1):
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high
