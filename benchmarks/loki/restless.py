"""How often plans change at a few requests per second, by average and swap cost.

The pipeline is the published two-task chain with 12 times its latencies, six workers and an SLO of
3 s. So hardware scaling ends at 5.2 req/s. Demand swings from 2 to 7 req/s and back in ten minutes,
with 30 s per point. Workers take 8 s to start and 1 s to load a variant. Headroom is 0.95, and
there is a plan every 10 s or when demand changes.

Demand is averaged over 3 s, or over up to 30 s if fewer than 32 requests arrive in that time (the
default of `core.demand.Rate`). *Swap cost*: points of accuracy that reloading a worker must gain;
0.1 is the live planner's default. *Changes*: plans with other variants than the plan before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

from benchmarks.harness.rows import Row
from benchmarks.loki.data import traffic
from ray_slo.core.demand import Rate
from ray_slo.core.profiles import LatencyProfile
from ray_slo.planning import loki
from ray_slo.simulation import Trace, Workload, simulate_pipeline

SOURCE = "ray-slo, Loki §4.2"
SLOWER, WORKERS, SLO_S, HEADROOM = 12.0, 6, 3.0, 0.95
LOW, HIGH, POINTS, STEP_S = 2.0, 7.0, 20, 30.0
TIMES = {"interval_s": 10.0, "solve_s": 0.1, "start_s": 8.0, "load_s": 1.0}
SHORT, LONG = (3.0,), (3.0, 10.0, 30.0)


def run(quick: bool, seed: int) -> list[Row]:
    tasks = tuple(
        replace(task, variants=tuple(_slower(v) for v in task.variants)) for task in traffic()
    )
    asked = loki.Problem(tasks, 0.0, WORKERS, SLO_S, headroom_quantile=HEADROOM, seed=seed)
    middle, swing = (LOW + HIGH) / 2, (HIGH - LOW) / 2
    rates = [
        middle + swing * math.sin(2 * math.pi * i / POINTS) for i in range(2 if quick else POINTS)
    ]
    rows = []
    for name, windows in (("3 s", SHORT), ("3 to 30 s", LONG)):
        for cost in (0.1,) if quick else (0.1, 1.0):
            report = simulate_pipeline(
                replace(asked, swap_cost=cost),
                Workload(arrivals=Trace(rates=rates, interval_s=STEP_S)),
                demand=partial(Rate, windows_s=windows),
                seed=seed,
                **TIMES,
            )
            plans = report.plans.variants.tolist()
            changes = sum(a != b for a, b in pairwise(plans))
            case = f"average over {name} · swap cost {cost:g}"
            rows += [
                Row(case, "swaps", "", float(report.plans.swaps.sum())),
                Row(case, "changes", "", float(changes)),
                Row(case, "plans", "", float(len(plans))),
                Row(case, "violations", "%", 100 * report.violation_ratio()),
                Row(case, "accuracy", "%", report.accuracy()),
                Row(case, "workers", "", report.workers_used()),
            ]
    return rows


def _slower(variant: loki.Variant) -> loki.Variant:
    return replace(
        variant, profile=LatencyProfile([SLOWER * latency for latency in variant.profile.table])
    )
