"""What happens to late requests: the paper's four rules, and ours.

The setting is the day of `loki-fig5` (traffic analysis, 20 servers, 250 ms), with every second
point, or with --quick five points of the peak. All plans are Loki's. Only the arguments `drop` and
`queues` of the policy `pipeline` differ. The paper prints only bars: no dropping loses most, then
last-task dropping, then per-task dropping, and opportunistic rerouting loses least.

*As in the paper*: every worker has its own queue. A request whose wait used up its budget for the
task counts as late, even if the next task could make up for it. That task's budget also has as much
time for waiting. But rarely is there a backup whose whole execution is that much shorter. *Shared*:
the workers of a variant have one queue, so fewer requests wait that long. `slack` is our rule. It
drops or reroutes by the time that is left until the deadline, not by the time spent at a task.

Violations have three parts: frames that were answered late, dropped at the first task, or dropped
at a later task, after they had cost something.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.plots import plot_bars
from benchmarks.harness.rows import Row
from benchmarks.loki.data import CARS, FACES, trace, traffic
from benchmarks.loki.systems import Day, problem
from ray_slo.simulation import ApplicationReport

SOURCE = "Loki §6.3, Figure 7"
STEP_S, EVERY, QUICK = 4.0, 2, slice(195, 200)
RULES = {
    "no early dropping": "none",
    "last-task dropping": "last_task",
    "per-task dropping": "per_task",
    "opportunistic rerouting": "opportunistic",
    "by slack (ours)": "slack",
}
QUEUES = {"a queue per worker, as in the paper": "worker", "shared queues": "variant"}


def run(quick: bool, seed: int) -> list[Row]:
    rates = trace("traffic_analysis_maf_reconstructed")
    rates = rates[QUICK] if quick else rates[::EVERY]
    day = Day("three tasks", problem(traffic((CARS, FACES)), seed), rates, STEP_S)
    rows = []
    for title, queues in QUEUES.items():
        for name, drop in RULES.items():
            report = day.run("ours", seed, policy_kwargs={"drop": drop, "queues": queues})
            rows += _rows(f"{title} · {name}", report)
    return rows


def _rows(case: str, report: ApplicationReport) -> list[Row]:
    frames = report.requests
    lost = frames[frames.outcome == "dropped"]
    first = int((lost.dropped_at == report.meta["tasks"][0]).sum())
    counts = {
        "violations": len(frames) - report.count("ok"),
        "late": report.count("late"),
        "dropped at the first task": first,
        "dropped later": len(lost) - first,
    }
    return [
        *(Row(case, metric, "%", 100 * n / len(frames)) for metric, n in counts.items()),
        Row(case, "accuracy", "%", report.accuracy()),
    ]


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot violations by rule."""
    return plot_bars([r for r in rows if r.metric == "violations"], directory)
