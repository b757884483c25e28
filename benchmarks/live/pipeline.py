"""Live on Ray Serve: the demand of a pipeline goes up and down; workers and variants follow.

The pipeline has two tasks: `detect`, and `who` for each of the two that it finds. Each has three
variants that sleep, so four workers of half a core do not take each other's time. There are 1 to 4
workers, and planner and policy are the defaults. Requests come through a handle, with Poisson
arrivals: a day in six minutes. Demand begins at half of what one worker serves with the most
accurate variants, rises above what four serve with them (the capacity called `most accurate`),
stays there, and falls again. So first there should be more workers, then less accuracy, and then
both should come back.

Capacities are computed from the variants' latencies, for full batches without a gap. *Accuracy* is
that of answers in time: the product along a path, as the variants say. *Violations* are requests
that were refused, dropped or late, end to end, as the client sees them. *Failed* requests got
neither an answer nor a refusal with a reason. *Order*: the first and last time at which all workers
were wanted, and between which accuracy was below that of the quiet begin; each is a mean over 5 s.
*As simulated*: the simulator's figures for the same arrivals.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.live.load import Calls
from benchmarks.live.sleeper import Several, Sleeper
from benchmarks.own.applications import capacity
from ray_slo.core import LatencyProfile
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.simulation import Times, Workload, simulate_application
from ray_slo.simulation.arrivals import Trace

SOURCE = "Loki Figure 5"
ASKED = [
    (
        "order",
        "accuracy falls after all workers are wanted by",
        "≥",
        0,
        "while a worker starts, quicker variants serve what the others cannot",
    ),
    ("order", "workers leave after accuracy is back by", "≥", 0),
    ("phases · all", "failed", "≤", 0),
]
SLO_S = 6.0
CLIENT_SHARE = 0.95  # share of the SLO that the server is told; the rest is the way to the client
WORKERS, MAX_BATCH, FOUND = 4, 16, 2
NETS = {"detect": (0.12, 0.45), "who": (0.06, 0.225)}  # a batch of b takes α·b + β seconds
VARIANTS = {"l": (1.0, 0.0), "m": (0.6, 6.0), "s": (0.35, 14.0)}  # share of the time, points lost
BEST = {"detect": 96.0, "who": 94.0}
TRICKLE, PEAK = 0.5 / WORKERS, 1.3  # share of the capacity with the most accurate variants
BIN_S = 5.0
BY_VARIANT = "workers by variant, over time"
INTERVAL_S = 5.0  # seconds between plans
START_S, LOAD_S = 8.0, 0.1  # in the simulator: time to start a worker, and to load a network


@dataclass(frozen=True)
class Seen:
    """One request; times are in seconds from the start."""

    at_s: float
    status: str  # "answered", or as in `ray_slo.load.drive`
    latency_s: float
    accuracy: float | None = None  # percent
    why: str = ""  # the reason if it was not answered

    @property
    def in_time(self) -> bool:
        return self.status == "answered" and self.latency_s <= SLO_S

    @property
    def failed(self) -> bool:
        """Whether it got neither an answer nor a refusal with a reason."""
        return self.status not in ("answered", "refused", "expired")


@dataclass(frozen=True)
class Glance:
    """The plan and the workers at one time. `variants`: number of workers that serve each."""

    at_s: float
    wanted: int
    running: int
    variants: Counter[str] = field(default_factory=Counter)


def run(quick: bool, seed: int) -> list[Row]:
    from ray_slo.demo.systems import APP, local_serve, running

    limits = capacities()
    rates = ramp(limits[0], quick)
    trace = Trace(rates=rates, interval_s=BIN_S)
    times = trace.times(trace.length_s, np.random.default_rng(seed))
    with local_serve(), running(pipeline().bind()):
        from ray import serve

        handle = serve.get_app_handle(APP)
        while handle.slo_status.remote().result()["plan"]["state"] != "planned":
            time.sleep(0.5)
        seen, glances = asyncio.run(drive(handle, times, trace.length_s))
    return rows(limits, rates, seen, glances) + simulated(times)


def pipeline() -> Any:
    """Return the pipeline with all variants, planned every `INTERVAL_S`."""
    import ray_slo

    def variants(task: str) -> list[ray_slo.Variant]:
        alpha_s, beta_s = NETS[task]
        return [
            ray_slo.Variant(
                f"{task}-{name}",
                accuracy=BEST[task] - less,
                load=Sleeper,
                args=(share * alpha_s, share * beta_s),
                factors={"who": FOUND} if task == "detect" else None,
            )
            for name, (share, less) in VARIANTS.items()
        ]

    most = {"max_batch_size": MAX_BATCH}
    makes = {"makes": {"who": FOUND}}
    return ray_slo.Pipeline(
        [
            ray_slo.Task(
                "detect", Several, kwargs=makes, variants=variants("detect"), options=most
            ),
            ray_slo.Task("who", Several, parent="detect", variants=variants("who"), options=most),
        ],
        latency_slo_ms=1e3 * CLIENT_SHARE * SLO_S,
        min_replicas=1,
        max_replicas=WORKERS,
        ray_actor_options={"num_cpus": 0.5},
        planner={"name": "auto", "interval_s": INTERVAL_S},
        profile_seconds=2.0,
    )


def problem() -> auto.Problem:
    """Return the planner's problem, without a demand."""

    def model(task: str) -> auto.Model:
        alpha_s, beta_s = NETS[task]
        made = []
        for name, (share, less) in VARIANTS.items():
            table = [share * (alpha_s * b + beta_s) for b in range(1, MAX_BATCH + 1)]
            profiles = {"worker": LatencyProfile(table)}
            made.append(auto.Variant(f"{task}-{name}", BEST[task] - less, profiles))
        return auto.Model(task, tuple(made))

    models = tuple(model(task) for task in NETS)
    found = {variant.name: {"who": float(FOUND)} for variant in models[0].variants}
    tasks = TreeTask("detect", "detect", None, found), TreeTask("who", "who", "detect")
    tree = Tree("detect", tasks, {"": CLIENT_SHARE * SLO_S})
    return auto.Problem(models, (tree,), {}, (auto.Kind("worker", 1, WORKERS),))


def capacities() -> tuple[float, float]:
    """Return the requests per second that all workers can serve, with the most accurate variants
    and with the quickest."""
    asked = problem()
    best, quickest = (
        WORKERS * capacity(asked, asked.trees[0], "worker", at) for at in (0, len(VARIANTS) - 1)
    )
    return best, quickest


def ramp(best: float, quick: bool) -> list[float]:
    """Return the demand in requests per second, one figure per `BIN_S` seconds."""
    low, slope, high = (1, 2, 2) if quick else (8, 20, 12)
    up = np.linspace(TRICKLE * best, PEAK * best, slope + 2)[1:-1].tolist()
    quiet = [TRICKLE * best] * low
    return quiet + up + [PEAK * best] * high + up[::-1] + quiet * (1 if quick else 2)


async def drive(
    handle: Any, times: np.ndarray[Any, Any], duration_s: float
) -> tuple[list[Seen], list[Glance]]:
    """Send requests at these times (open loop), and look at the plan once a second."""
    calls = Calls()

    async def one(at: float, item: int) -> Seen:
        reply = await calls.call(at, handle.remote, item, response_metadata=True)
        if reply.error is not None:
            return Seen(at, reply.status, reply.latency_s, why=why(reply.error))
        return Seen(at, reply.status, reply.latency_s, reply.answer.accuracy)

    async def look() -> list[Glance]:
        glances = []
        for second in range(int(duration_s)):
            await calls.until(second)
            plan = (await handle.slo_status.remote())["plan"]
            serving = Counter(v for w in plan["workers"].values() for v in w["assigned"])
            (wanted,), (there,) = plan["targets"].values(), plan["running"].values()
            glances.append(Glance(calls.now_s, wanted or there, there, serving))
        return glances

    due = zip(times.tolist(), range(len(times)), strict=True)
    seen, glances = await asyncio.gather(calls.send(due, one), look())
    return seen, glances


def why(error: Exception) -> str:
    """Return the reason of a ray-slo error and the task that it happened in, else the error."""
    if (reason := getattr(error, "reason", None)) is None:
        return repr(error)[:200]
    task = getattr(error, "task", None)
    return f"{reason} in {task}" if task else str(reason)


def simulated(times: np.ndarray[Any, Any]) -> list[Row]:
    """Simulate the same arrivals, and return the rows."""
    report = simulate_application(
        problem(),
        {"detect": Workload(arrivals=Times(times_s=times.tolist()))},
        interval_s=INTERVAL_S,
        start_s=START_S,
        load_s=LOAD_S,
    )
    case = "as simulated"
    return [
        Row(case, "accuracy", "%", report.accuracy()),
        Row(case, "violations", "%", 100 * report.bad_rate()),
        Row(case, "workers", "", report.workers_used()),
    ]


def rows(
    limits: tuple[float, float],
    rates: Sequence[float],
    seen: Sequence[Seen],
    glances: Sequence[Glance],
) -> list[Row]:
    """Return the rows of the whole run, by phases of the ramp and by time."""
    made = [
        Row("capacity", "most accurate", "requests/s", limits[0]),
        Row("capacity", "quickest", "requests/s", limits[1]),
    ]
    peak = [i for i, rate in enumerate(rates) if rate == max(rates)]
    first, last = BIN_S * peak[0], BIN_S * (peak[-1] + 1)
    end = BIN_S * len(rates)
    quiet = BIN_S * next(i for i, rate in enumerate(rates) if rate > rates[0])
    for phase, (a, b) in {
        "quiet": (0.0, quiet),
        "rising": (quiet, first),
        "at the peak": (first, last),
        "falling": (last, end),
        "all": (0.0, end),
    }.items():
        made += _rows(f"phases · {phase}", a, b, seen, glances)
    made += _order(quiet, end, seen, glances)
    reasons = Counter(s.why for s in seen if s.why)
    made += [Row("not answered", reason, "", number) for reason, number in reasons.most_common()]
    bins = [(f"{i * BIN_S:g} s", i * BIN_S, (i + 1) * BIN_S) for i in range(len(rates))]
    for when, a, b in bins:
        made += _rows(f"over time · {when}", a, b, seen, glances)
    variants = sorted({variant for glance in glances for variant in glance.variants})
    for when, a, b in bins:
        at = [g for g in glances if a <= g.at_s < b]
        made += [
            Row(f"{BY_VARIANT} · {when}", v, "", _mean([g.variants[v] for g in at]))
            for v in variants
        ]
    return made


def _order(
    quiet_s: float, end_s: float, seen: Sequence[Seen], glances: Sequence[Glance]
) -> list[Row]:
    """Return when all workers were wanted, and when accuracy was lower than at first."""

    def accuracy(a: float, b: float) -> float:
        return _mean([s.accuracy or 0.0 for s in seen if a <= s.at_s < b and s.in_time])

    least = accuracy(0.0, quiet_s) - 2.0
    starts = np.arange(0.0, end_s, BIN_S).tolist()
    full = [a for a in starts if _wanted(glances, a) > WORKERS - 0.5]
    lower = [a for a in starts if a >= quiet_s and accuracy(a, a + BIN_S) < least]
    if not full or not lower:
        return []
    return [
        Row("order", "accuracy falls after all workers are wanted by", "s", lower[0] - full[0]),
        Row("order", "workers leave after accuracy is back by", "s", full[-1] - lower[-1]),
        Row("order", "all workers wanted", "s", full[0]),
        Row("order", "accuracy back", "s", lower[-1] + BIN_S),
    ]


def _wanted(glances: Iterable[Glance], at_s: float) -> float:
    return _mean([g.wanted for g in glances if at_s <= g.at_s < at_s + BIN_S])


def _rows(
    case: str, a: float, b: float, seen: Iterable[Seen], glances: Iterable[Glance]
) -> list[Row]:
    here = [s for s in seen if a <= s.at_s < b]
    at = [g for g in glances if a <= g.at_s < b]
    answered = [s for s in here if s.status == "answered"]
    in_time = [s for s in here if s.in_time]
    known = [s.accuracy for s in in_time if s.accuracy is not None]
    latencies = [s.latency_s for s in answered]
    used = sum((g.variants for g in at), Counter())
    measured: list[tuple[str, str, float]] = [
        ("demand", "requests/s", len(here) / (b - a)),
        ("accuracy", "%", _mean(known)),
        ("violations", "%", 100 * _mean([not s.in_time for s in here])),
        ("late", "", sum(not s.in_time for s in answered)),
        ("failed", "", sum(s.failed for s in here)),
        ("latency p50", "ms", 1e3 * _quantile(latencies, 0.5)),
        ("latency p95", "ms", 1e3 * _quantile(latencies, 0.95)),
        ("workers wanted", "", _mean([g.wanted for g in at])),
        ("workers running", "", _mean([g.running for g in at])),
        ("variants in use", "", float(len(used))),
    ]
    return [Row(case, metric, unit, value) for metric, unit, value in measured]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _quantile(values: Sequence[float], q: float) -> float:
    return float(np.quantile(values, q)) if values else math.nan


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot demand, accuracy, workers and violations over time, as in Loki's Figure 5."""
    from matplotlib.figure import Figure

    over_time = _series(rows, "over time")
    by_variant = _series(rows, BY_VARIANT)
    capacity = {row.metric: row.ours for row in rows if row.case == "capacity"}
    figure = Figure(figsize=(8, 10), layout="constrained")
    panels = figure.subplots(5, 1, sharex=True)
    shown = (
        ("requests/s", ("demand",)),
        ("accuracy (%)", ("accuracy",)),
        ("workers", ("workers wanted", "workers running")),
        ("requests (%)", ("violations",)),
    )
    for panel, (label, metrics) in zip(panels, shown, strict=False):
        for metric in metrics:
            at, values = over_time[metric]
            panel.step([t + BIN_S / 2 for t in at], values, where="mid", label=metric)
        panel.set_ylabel(label)
        if "accuracy" not in label:
            panel.set_ylim(0, max(panel.get_ylim()[1], 5.0))
    for style, (metric, value) in zip((":", "--"), capacity.items(), strict=True):
        if value is not None:
            panels[0].axhline(value, color="grey", linestyle=style, label=f"capacity, {metric}")
    under = np.zeros(len(next(iter(by_variant.values()))[0])) if by_variant else None
    for variant, (at, values) in by_variant.items():
        panels[4].bar(at, values, BIN_S, under, align="edge", label=variant)
        under = under + np.nan_to_num(np.array(values))
    panels[4].set_ylabel("workers serving")
    panels[4].set_xlabel("time (s)")
    for panel in panels:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(
                loc="lower left", bbox_to_anchor=(0, 1), ncols=8, frameon=False, fontsize="small"
            )
    return [saved(figure, directory, "live-pipeline")]


def _series(rows: Sequence[Row], title: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return (seconds, values) by metric, for the rows whose case begins with `title`."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        head, _, when = row.case.partition(" · ")
        if head == title:
            at, values = found.setdefault(row.metric, ([], []))
            at.append(float(when.split()[0]))
            values.append(math.nan if row.ours is None else row.ours)
    return found
