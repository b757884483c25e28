"""Loki and its peers on a day of demand: the shared setting, and the rows of their runs.

All systems have the same workers, period, demand estimate, headroom, factors, policy, solver and
times. Only the planner differs. The simulation is end to end: a frame is a violation if any branch
of it is late or dropped. Accuracy is over frames in time, which flatters systems that drop many.

The paper prints only two times: the period (10 s) and that of the solver (0.5 s). We chose the
others. A worker needs 2 s to start, and 1 s to load a variant while it serves the old one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.loki import terms as loki
from benchmarks.peers.inferline import InferLineBrain
from benchmarks.peers.proteus import ProteusBrain
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.result import Infeasible
from ray_slo.simulation import ApplicationReport, Trace, Workload, simulate_application
from ray_slo.simulation.application import auto_brain
from ray_slo.simulation.frames import frame

if TYPE_CHECKING:
    import pandas as pd

SERVERS, SLO_S = 20, 0.250
HEADROOM, WINDOW_S = 0.95, 10.0
TIMES: Mapping[str, Any] = {
    "interval_s": 10.0,
    "solve_s": 0.5,
    "load_s": 1.0,
    "start_s": 2.0,
}
SYSTEMS: dict[str, type[AutoBrain]] = {
    "ours": AutoBrain,
    "InferLine": InferLineBrain,
    "Proteus": ProteusBrain,
}
OFF_PEAK = 0.15
SERIES = (("accuracy", "accuracy", "%"), ("servers", "servers", ""), ("violations", "missed", "%"))


def best_plan(asked: loki.Problem, last: loki.Plan | None = None) -> loki.Plan:
    """Return the plan for a problem; if it is infeasible, the best-effort plan."""
    made = loki.plan(asked, last)
    return made.best_effort if isinstance(made, Infeasible) else made


def capacities(asked: loki.Problem, drop: float) -> tuple[float, float, float]:
    """Return the capacity (requests/s) with hardware scaling, at a drop of accuracy, and at all.

    `drop` is in points of accuracy.
    """
    exact = replace(asked, relative_gap=1e-6)
    hardware = loki.capacity(exact, most_accurate=True)
    best = best_plan(replace(asked, demand=hardware * 0.99)).accuracy
    dropped = loki.capacity(replace(exact, accuracy_floor=best - drop))
    return hardware, dropped, loki.capacity(exact)


@dataclass(frozen=True)
class Day:
    """A pipeline under a trace.

    Attributes:
        name: name of the pipeline, for titles.
        problem: the problem for the planners.
        rates: requests per second; each rate lasts `step_s`.
        unseen: number of workers that do not count as servers.
        systems: planners by name.
        times: arguments that replace `TIMES`.
        peak: the peak is where demand is at least this share of the largest.
    """

    name: str
    problem: loki.Problem
    rates: Sequence[float]
    step_s: float
    unseen: int = 0
    systems: Mapping[str, type[AutoBrain]] = field(default_factory=lambda: SYSTEMS)
    times: Mapping[str, Any] = field(default_factory=lambda: TIMES)
    peak: float = 0.9

    def run(self, system: str, seed: int, **times: Any) -> ApplicationReport:
        """Run one system over the whole day."""
        return simulate(
            self.problem,
            Workload(arrivals=Trace(rates=list(self.rates), interval_s=self.step_s)),
            self.systems[system],
            seed=seed,
            **{**self.times, **times},
        )

    def windows(self, report: ApplicationReport) -> pd.DataFrame:
        """Return the windows of a run with the trace's least and largest rate, and the phase.

        The phase of a window says whether hardware scaling alone suffices for its rates.
        """
        made = windows(report, WINDOW_S)
        made["workers"] -= self.unseen
        rates = np.array(self.rates)
        begin = (made.begin_s / self.step_s + 1e-9).astype(int)
        end = np.minimum(
            np.ceil((made.begin_s + WINDOW_S) / self.step_s - 1e-9).astype(int), len(rates)
        )
        parts = [rates[b:e] for b, e in zip(begin, end, strict=True)]
        made["least"] = [p.min() for p in parts]
        made["most"] = [p.max() for p in parts]
        hardware = loki.capacity(self.problem, most_accurate=True)
        made["phase"] = np.select(
            [made.most <= planned_for(self.problem, hardware), made.least >= hardware],
            ["hardware scaling", "accuracy scaling"],
            "between",
        )
        return made


def windows(report: ApplicationReport, window_s: float) -> pd.DataFrame:
    """Return one row per window of a run: begin_s, demand (arrivals per second), violation_ratio,
    accuracy, workers (mean), busy (mean)."""
    duration = float(report.meta["duration_s"])
    rows = []
    for i in range(math.ceil(duration / window_s - 1e-9)):
        begin, end = i * window_s, min((i + 1) * window_s, duration)
        rows.append(
            {
                "begin_s": begin,
                "demand": report.count(None, begin, end) / (end - begin),
                "violation_ratio": report.bad_rate(begin, end),
                "accuracy": report.accuracy(begin, end),
                "workers": report.workers_used(begin, end),
                "busy": report.busy(begin, end),
            }
        )
    return frame(rows)


def problem(tasks: tuple[loki.Task, ...], seed: int, **fields: Any) -> loki.Problem:
    """Return a problem with the shared setting, which `fields` may override."""
    shared = {"workers": SERVERS, "slo_s": SLO_S, "headroom_quantile": HEADROOM}
    return loki.Problem(tasks, 0.0, seed=seed, **{**shared, **fields})


def simulate(
    asked: loki.Problem,
    workload: Workload,
    system: type[AutoBrain] = AutoBrain,
    *,
    make_before_break: bool = True,
    **times: Any,
) -> ApplicationReport:
    """Run a pipeline with the policy `pipeline`. The first plan is for `asked.demand`; if that is
    0, for the arrivals in the first interval."""
    problem = loki.as_auto(asked)
    if not asked.demand:
        problem = replace(problem, demand={})

    kept = {"interval_s": times.get("interval_s", 10.0), "make_before_break": make_before_break}
    (root,) = problem.streams
    return simulate_application(
        problem,
        {root: workload},
        policy="pipeline",
        planner=partial(auto_brain, brain=system, **kept),
        make_before_break=make_before_break,
        **times,
    )


def planned_for(asked: loki.Problem, capacity: float) -> float:
    """Return the largest demand whose headroom quantile is within `capacity`."""
    low, high = 0.0, capacity
    for _ in range(40):
        middle = (low + high) / 2
        enough = replace(asked, demand=middle).planned_demand <= capacity
        low, high = (middle, high) if enough else (low, middle)
    return low


def figures(windows: pd.DataFrame, chosen: Any) -> dict[str, float]:
    """Return the demand, violations, accuracy (over frames) and servers of the chosen windows."""
    w = windows[chosen]
    good = w.demand * (1 - w.violation_ratio)
    return {
        "demand": float(w.demand.mean()),
        "violations": 100 * float((w.demand * w.violation_ratio).sum() / w.demand.sum()),
        "accuracy": float((w.accuracy * good).sum() / good.sum()),
        "servers": float(w.workers.mean()),
    }


def compare(day: Day, seed: int, paper: Mapping[str, float]) -> list[Row]:
    """Return the rows of all systems over the day: by phase, relative to ours, and over time.

    Args:
        paper: figures that the paper prints, by metric.
    """
    runs = {
        name: day.windows(day.run(name, seed)).fillna({"accuracy": 0.0}) for name in day.systems
    }
    ours, peers = runs["ours"], {k: v for k, v in runs.items() if k != "ours"}
    most = max(day.rates)
    phases = {
        "whole day": ours.most >= 0,
        f"off-peak, at most {100 * OFF_PEAK:g} % of the peak": ours.most <= OFF_PEAK * most,
        "hardware scaling suffices": ours.phase == "hardware scaling",
        "accuracy scaling": ours.phase == "accuracy scaling",
        f"peak, at least {100 * day.peak:g} %": ours.least >= day.peak * most,
    }
    rows, of = [], {}
    for phase, chosen in phases.items():
        if not chosen.any():
            continue
        for name, windows in runs.items():
            of[phase, name] = made = figures(windows, chosen)
            case = f"{day.name}: {phase} · {name}"
            rows += [
                Row(case, "demand", "req/s", made["demand"]),
                Row(case, "violations", "%", made["violations"]),
                Row(case, "accuracy", "%", made["accuracy"]),
                Row(case, "servers", "", made["servers"]),
            ]
    off_peak, peak = list(phases)[1], list(phases)[-1]
    least = ours.workers.min()
    for name, windows in peers.items():
        case = f"{day.name}: peers over ours · {name}"
        goodput = [(w.demand * (1 - w.violation_ratio)).max() for w in (ours, windows)]
        metrics: dict[str, tuple[str, float]] = {
            "violations, whole day": ("×", _ratio(of, "whole day", name, "violations")),
            "violations, peak": ("×", _ratio(of, peak, name, "violations")),
            "servers, off-peak": ("×", _ratio(of, off_peak, name, "servers")),
            "servers, up to": ("×", float(windows.workers[ours.workers.idxmin()] / least)),
            "accuracy, peak": (
                "points",
                of[peak, name]["accuracy"] - of[peak, "ours"]["accuracy"]
                if (peak, name) in of
                else math.nan,
            ),
            "most answered in time, ours": ("req/s", float(goodput[0])),
            "most answered in time, theirs": ("req/s", float(goodput[1])),
            "capacity, ours over theirs": ("×", float(goodput[0] / goodput[1])),
        }
        rows += [
            Row(case, metric, unit, value, paper.get(f"{name}: {metric}"))
            for metric, (unit, value) in metrics.items()
        ]
    return rows + series(day.name, runs)


def _ratio(
    of: Mapping[tuple[str, str], Mapping[str, float]], phase: str, name: str, metric: str
) -> float | None:
    if (phase, name) not in of:
        return math.nan
    theirs, ours = of[phase, name][metric], of[phase, "ours"][metric]
    return theirs / ours if ours else None


def series(name: str, runs: Mapping[str, pd.DataFrame], points: int = 36) -> list[Row]:
    """Return rows over time: demand, and each system's accuracy, servers and violations.

    There are at most `points` points.
    """
    first = next(iter(runs.values()))
    step = math.ceil(len(first) / points)
    rows = []
    for i in range(0, len(first), step):
        chosen = (first.index >= i) & (first.index < i + step)
        case = f"{name}: over time · {first.begin_s[i]:g} s"
        made = {system: figures(windows, chosen) for system, windows in runs.items()}
        rows.append(Row(case, "demand", "req/s", next(iter(made.values()))["demand"]))
        for metric, short, unit in SERIES:
            rows += [Row(case, f"{short} {s}", unit, of[metric]) for s, of in made.items()]
    return rows


def plot_days(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot demand, accuracy, servers and violations over time, as in the paper; one PNG each."""
    from matplotlib.figure import Figure

    days: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        title, _, at = row.case.partition(" · ")
        if title.endswith(": over time"):
            value = math.nan if row.ours is None else row.ours
            lines = days.setdefault(title.removesuffix(": over time"), {})
            lines.setdefault(row.metric, []).append((float(at[:-2]), value))
    paths = []
    for name, lines in days.items():
        figure = Figure(figsize=(8, 9), layout="constrained")
        panels = {"demand": "req/s"} | {short: unit for _, short, unit in SERIES}
        axes = figure.subplots(len(panels), sharex=True)
        for (metric, unit), ax in zip(panels.items(), axes, strict=True):
            for line, points in lines.items():
                if line == metric or line.startswith(f"{metric} "):
                    label = line.removeprefix(metric).strip()
                    ax.plot(*zip(*points, strict=True), label=label or None)
            ax.set_ylabel(f"{metric} ({unit})" if unit else metric)
            if metric != "accuracy":
                ax.set_ylim(bottom=0)
        axes[1].legend(fontsize="small")
        axes[-1].set_xlabel("time (s)")
        figure.suptitle(name, fontsize="medium")
        paths.append(saved(figure, directory, name))
    return paths
