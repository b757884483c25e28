"""Accuracy and violations that RAMSIS tables promise, and those of simulations.

Image task, SLO 150 ms, constant load, 40, 60 and 80 workers. *Expected*: the solver's figures of
its table (a lower bound of accuracy and an upper bound of violations, §5.1). *Simulated*: execution
takes exactly its profile. *Varying*: tables and predictions are the same, but a batch takes its
measured median, with a log-normal spread of 5 %. The paper's implementation is also more accurate
than its simulation, because most batches end before their 95th percentile. The paper prints no
figures, only curves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness.data import published
from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.ramsis import systems
from ray_slo.papers.ramsis import Problem, Table, solve

SOURCE = "RAMSIS §7.3.1, Figure 7"
SLO_S = 0.150
EXPECTED, SIMULATED, VARYING = "expected", "simulated", "varying"


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    variants = systems.image_task()
    medians = {
        v.name: v for v in systems.read_variants(published("ramsis/image_profiles.csv"), "p50")
    }
    for workers in (60,) if quick else (40, 60, 80):
        points: systems.Measured = {EXPECTED: {}, SIMULATED: {}, VARYING: {}}
        here = systems.cluster(variants, SLO_S, workers)
        truth = systems.cluster([medians[v.name] for v in variants], SLO_S, workers)
        for load in (800, 2400) if quick else systems.LOADS:
            solved: list[Table] = []

            def keep(problem: Problem, solved: list[Table] = solved) -> Table:
                solved.append(solve(problem))
                return solved[0]

            policy, kwargs = systems.ramsis(load)
            how: dict[str, Any] = {"duration_s": 3.0 if quick else 30.0, "seed": seed}
            points[SIMULATED][load] = systems.measure(
                (policy, {**kwargs, "solver": keep}), here, systems.constant(load), **how
            )
            (table,) = solved
            points[EXPECTED][load] = {
                "accuracy": table.expected_accuracy,
                "violation_rate": table.violation_rate,
            }
            known = (policy, {**kwargs, "solver": lambda problem, table=table: table})
            points[VARYING][load] = systems.measure(
                known, here, systems.constant(load), truth=truth, latency_noise=0.05, **how
            )
        title = f"image, SLO {1e3 * SLO_S:g} ms, {workers} workers"
        rows += systems.rows_of(title, points, "{:g}/s")
        rows += [
            Row(f"{title}, expected − simulated · accuracy", f"gap at {load:g}/s", "points", gap)
            for load in points[EXPECTED]
            if systems.shown(points[SIMULATED][load])
            for gap in [points[EXPECTED][load]["accuracy"] - points[SIMULATED][load]["accuracy"]]
        ]
    return rows


plot = partial(plot_series, x_label="load (requests/s)")
