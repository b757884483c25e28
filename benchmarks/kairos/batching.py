"""Beyond Kairos: batches of several requests in the matching.

This is `Kairos(batch=True)`. The paper serves one request at a time. Part of a GPU's time for a
batch does not depend on its size, so waiting requests may join one that is dispatched. The pools
are the homogeneous one, the planner's choice, and the best of some others. These have the highest
bounds for each number of base instances. The planner's bounds ignore batches. The gain depends on
the fixed part of a GPU's latency. In our synthetic set it is 35 to 40 % of the latency of the
largest request.
"""

from __future__ import annotations

from benchmarks.harness.rows import Row
from benchmarks.kairos import systems
from ray_slo.planning.catalogue import CATALOGUE

SOURCE = "ray-slo"
BATCHING: systems.Policy = ("kairos", {"batch": True})


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 600 if quick else 5000, "tolerance": 0.03 if quick else 0.01, "seed": seed}
    rows = []
    for model in ("WND",) if quick else systems.MODELS:
        case = systems.Case(model)
        base, count = systems.homogeneous(case, **how)
        scale = case.budget / (count * CATALOGUE[systems.BASE].price_per_hour)
        plan = systems.planned(case.problem())
        # The highest bounds for each number of base instances.
        named = systems.space(case)[0]
        candidates = [
            c
            for bases in range(1, count + 1)
            for c in [c for c in named if c[systems.BASE] == bases][: 1 if quick else 4]
        ]
        best, chosen = systems.best_of(case, candidates, BATCHING, **how)
        for name, value in (
            (f"{count} × {systems.BASE}, scaled, no batches", base),
            (
                f"{count} × {systems.BASE}, scaled, batches",
                scale * systems.throughput(case, {systems.BASE: count}, BATCHING, **how),
            ),
            (
                f"Kairos {systems.text(plan.counts)}, no batches",
                systems.throughput(case, plan.counts, systems.KAIROS, **how),
            ),
            (
                f"Kairos {systems.text(plan.counts)}, batches",
                systems.throughput(case, plan.counts, BATCHING, **how),
            ),
            (f"best of the tried {systems.text(chosen)}, batches", best),
        ):
            label = f"{model} · {name}"
            rows += [
                Row(label, "throughput", "req/s", value),
                Row(label, "over homogeneous", "×", value / base),
            ]
    return rows
