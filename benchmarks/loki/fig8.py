"""Accuracy and violations under SLOs from 100 to 400 ms.

This is the day of `loki-fig5` with every second point; with --quick, five points of the peak. Rows
have the mean accuracy over the day, its largest drop, and the mean violations. The largest drop is
from the most accurate path to the worst 10 seconds. The paper prints only curves. All its curves
improve with the SLO, less and less.

In the paper, 200 ms is the smallest SLO that can be served at all. On the published profiles it is
much smaller: the fastest path takes 14 ms, and 27 ms with as much waiting. So 100 and 150 ms are
shown, too. Tighter SLOs need more small, inefficient batches. At 100 ms, the most accurate detector
and recogniser together are too slow, so there is no hardware scaling at all.
"""

from __future__ import annotations

from benchmarks.harness.rows import Row
from benchmarks.loki import terms as loki
from benchmarks.loki.data import CARS, FACES, trace, traffic
from benchmarks.loki.systems import WINDOW_S, Day, problem, windows

SOURCE = "Loki §6.4, Figure 8"
STEP_S, EVERY, QUICK = 4.0, 2, slice(195, 200)
SLOS_MS = (100, 150, 200, 250, 300, 350, 400)


def run(quick: bool, seed: int) -> list[Row]:
    rates = trace("traffic_analysis_maf_reconstructed")
    rates = rates[QUICK] if quick else rates[::EVERY]
    tasks = traffic((CARS, FACES))
    best = _best(tasks)
    rows = []
    for slo_ms in SLOS_MS:
        asked = problem(tasks, seed, slo_s=slo_ms / 1e3)
        report = Day("three tasks", asked, rates, STEP_S).run("ours", seed)
        case = f"{slo_ms} ms"
        ends = loki.capacity(asked, most_accurate=True)
        worst = float(windows(report, WINDOW_S).accuracy.min())
        rows += [
            Row(case, "hardware scaling ends at", "req/s", max(ends, 0.0)),
            Row(case, "mean accuracy", "%", report.accuracy()),
            Row(case, "largest drop of accuracy", "points", best - worst),
            Row(case, "mean violations", "%", 100 * report.bad_rate()),
        ]
    return rows


def _best(tasks: tuple[loki.Task, ...]) -> float:
    """Return the accuracy of the most accurate path, as a mean over the sinks."""
    made = loki.plan(loki.Problem(tasks, demand=1.0, workers=20, slo_s=10.0))
    assert isinstance(made, loki.Plan)
    return made.accuracy
