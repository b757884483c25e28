"""Live on Ray Serve, real pages: demand goes up and down, workers and variants follow.

Pages of known text, rendered and noisy, as PNGs through a handle, Poisson arrivals; detection, then
recognition of every line found (`deployments.ocr`), with all variants. The demand rises from a
trickle to a share of the capacity that the planner itself computes from the latencies that its
workers measured, stays there, and falls again. Beyond the capacity `most accurate` even all workers
cannot keep the best variants: this is where accuracy has to give way, down to a floor.

Four workers share two cores with all the rest, so a worker is made as slow as it would be with its
share of a core to itself: after a batch it rests until the processor time that the batch took is
that share of the time gone by. Without that, it would measure itself fast while the others are
idle, and be slow when they are not.

*Accuracy* is that of answers in time: *of variants* as measured once for each path on other pages,
*of characters* measured on the very answers against what is written on the pages. *Violations* are
requests that were refused, dropped or late, end to end, as the client sees it; *failed* is anything
that is neither an answer nor a refusal with its reason. *As simulated* is the simulator's answer
for the same arrivals, planner and policy, with the latencies as the workers had learned them by the
end; there, times to start a worker and to load a network are guesses.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.live.load import Calls, learned
from deployments.ocr import Detect, Recognise
from deployments.ocr.app import SIDES
from ray_slo.core import LatencyProfile
from ray_slo.planning import loki
from ray_slo.planning.result import Infeasible
from ray_slo.simulation import simulate_pipeline
from ray_slo.simulation.arrivals import Times, Trace
from ray_slo.simulation.workloads import Workload

SOURCE = "Loki Figure 5"
SLO_S = 2.5
CLIENT_SHARE = 0.95  # of it, the server is told: the rest is the way from and to the client
WORKERS = 4
CORES = 0.6  # share of the machine's that the workers may use together
TRICKLE = 0.3  # pages per second
PEAK = 0.75  # of the capacity with accuracy scaling
FLOOR = 70.0  # percent: pages are refused rather than read at a lower mean accuracy
READERS = ("rec32-int8", "rec40-int8", "rec48-int8", "rec48")  # the others are slower, no better
BIN_S = 5.0
BY_VARIANT = "workers by variant, over time"
INTERVAL_S = 5.0  # between plans
SWAP_COST = 0.1  # the live planner's default
START_S, LOAD_S = 8.0, 1.0  # in the simulator: of a worker, of a network
NOISE = 0.25  # likewise, of latencies: lines are of different lengths
PLANNING = {"headroom_quantile": 0.95, "headroom_period_s": 1.0, "accuracy_floor": FLOOR}


def share() -> float:
    """Of a core, that a worker has."""
    return min(CORES * (os.cpu_count() or 1) / WORKERS, 1.0)


def resting(call: Callable[..., Any]) -> Callable[..., Any]:
    """A batch method that takes as long as it would with `share()` of a core."""

    def slower(self: Any, network: Any, items: list[Any]) -> Any:
        start, used = time.perf_counter(), time.thread_time()
        made = call(self, network, items)
        until = start + (time.thread_time() - used) / share()
        time.sleep(max(until - time.perf_counter(), 0.0))
        return made

    return slower


class SlowDetect(Detect):
    __call__ = resting(Detect.__call__)


class SlowRecognise(Recognise):
    __call__ = resting(Recognise.__call__)


@dataclass(frozen=True)
class Seen:
    """One request; times in seconds from the start."""

    at_s: float
    status: str  # answered, or as `ray_slo.load.drive` has it
    latency_s: float
    accuracy: float | None = None  # of the variants, percent
    wrong: int = 0  # characters
    written: int = 0
    why: str = ""  # not answered

    @property
    def in_time(self) -> bool:
        return self.status == "answered" and self.latency_s <= SLO_S

    @property
    def failed(self) -> bool:
        """Neither answered nor refused for a reason."""
        return self.status not in ("answered", "refused", "expired")


@dataclass(frozen=True)
class Glance:
    """The plan and the workers at one time. `variants`: workers by the variant they serve."""

    at_s: float
    demand: float
    wanted: int
    running: int
    variants: Counter[str] = field(default_factory=Counter)


def run(quick: bool, seed: int) -> list[Row]:
    from ray_slo.demo.systems import APP, local_serve, running

    with local_serve(), running(application(3.0 if quick else 12.0)):
        from ray import serve

        handle = serve.get_app_handle(APP)
        told = planned(handle)
        limits = capacities(told)
        rates = ramp((0.5 if quick else PEAK) * limits[1], quick)
        trace = Trace(rates=rates, interval_s=BIN_S)
        times = trace.times(trace.length_s, np.random.default_rng(seed))
        seen, glances = asyncio.run(drive(handle, times, trace.length_s, 20 if quick else 60, seed))
        at_the_end = told | learned(handle.slo_status.remote().result())
    return (
        rows(limits, rates, seen, glances)
        + simulated(at_the_end, times)
        + [
            Row(
                f"a batch of one · {variant}",
                f"latency {when}",
                "ms",
                1e3 * known[variant].latency(1),
            )
            for variant in told
            for when, known in (("at start", told), ("at the end", at_the_end))
        ]
    )


def application(profile_seconds: float) -> Any:
    """The pipeline with all variants, planned often."""
    return pipeline(profile_seconds).bind()


def pipeline(profile_seconds: float) -> Any:
    import ray_slo
    from deployments import ocr
    from deployments.ocr.app import measured

    few = {"profile_quantile": 0.75}  # lines differ in length, but a page has several
    return ray_slo.Pipeline(
        [
            ray_slo.Task(
                "detect", SlowDetect, variants=ocr.detectors(), options={"max_batch_size": 4, **few}
            ),
            ray_slo.Task(
                "recognise",
                SlowRecognise,
                parent="detect",
                variants=ocr.recognisers(*READERS),
                options={"max_batch_size": 8, **few},
            ),
        ],
        latency_slo_ms=1e3 * CLIENT_SHARE * SLO_S,
        join=ocr.join,
        path_accuracies={
            path: accuracy
            for path, accuracy in measured()["path_accuracies"].items()
            if path.partition("/")[2] in READERS
        },
        num_replicas=2,
        min_replicas=2,
        max_replicas=WORKERS,
        ray_actor_options={"num_cpus": 0.4},
        planner={
            "name": "loki",
            "interval_s": INTERVAL_S,
            "rates": {"detect": TRICKLE},
            "kwargs": PLANNING,
        },
        profile_seconds=profile_seconds,
        name="ocr",
    )


def planned(handle: Any) -> dict[str, LatencyProfile]:
    """Wait for the first plan; the profiles that it goes by."""
    while (status := handle.slo_status.remote().result())["plan"]["state"] != "planned":
        time.sleep(0.5)
    return learned(status)


def capacities(known: dict[str, LatencyProfile]) -> tuple[float, float]:
    """Pages per second that all workers can serve: with the most accurate variants, and with those
    that keep the floor.

    By the planner, with the profiles that it goes by, and with its headroom.
    """
    problem = problem_of(known)
    best = max(problem.path_accuracies.values())
    return (
        largest(lambda demand: _accuracy(problem, demand) >= best - 0.01),
        largest(lambda demand: _accuracy(problem, demand) > 0),
    )


def problem_of(known: dict[str, LatencyProfile]) -> loki.Problem:
    """What the planner is asked, but for the demand."""
    ((_, tasks),) = pipeline(1.0).spec().pipelines.items()
    return loki.Problem(
        tasks.loki_tasks(known.__getitem__),
        demand=1.0,
        workers=WORKERS,
        slo_s=CLIENT_SHARE * SLO_S,
        path_accuracies=tasks.measured_paths,
        swap_cost=SWAP_COST,
        **PLANNING,
    )


def largest(fits: Callable[[float], bool]) -> float:
    """The largest demand that fits, to a twentieth of a request per second; 0 if none does."""
    low, high = 0.0, 0.5
    while fits(high):
        low, high = high, 2 * high
    while high - low > 0.05:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _accuracy(problem: loki.Problem, demand: float) -> float:
    """Of the plan for a demand, percent; 0 where some of it would be shed."""
    answer = loki.plan(replace(problem, demand=demand))
    return 0.0 if isinstance(answer, Infeasible) else answer.accuracy


def ramp(peak: float, quick: bool) -> list[float]:
    """The demand in pages per second, by bins of `BIN_S`."""
    low, slope, high = (1, 2, 2) if quick else (5, 20, 8)
    up = np.linspace(TRICKLE, peak, slope + 2)[1:-1].tolist()
    return [TRICKLE] * low + up + [peak] * high + up[::-1] + [TRICKLE] * low


async def drive(
    handle: Any, times: np.ndarray[Any, Any], duration_s: float, count: int, seed: int
) -> tuple[list[Seen], list[Glance]]:
    """Send pages at these times, whatever becomes of them; look at the plan once a second.

    Args:
        count: so many different pages.
    """
    from deployments.ocr.pages import errors, pages

    series = pages(count, seed + 1000)
    which = np.random.default_rng(seed + 1).integers(count, size=len(times))
    calls = Calls()

    async def one(at: float, index: int) -> Seen:
        page = series[index]
        reply = await calls.call(at, handle.remote, page.png, response_metadata=True)
        if reply.error is not None:
            return Seen(at, reply.status, reply.latency_s, why=why(reply.error))
        wrong, written = errors(page.lines, reply.answer.result["text"])
        return Seen(at, reply.status, reply.latency_s, reply.answer.accuracy, wrong, written)

    async def look() -> list[Glance]:
        glances = []
        for second in range(int(duration_s)):
            await calls.until(second)
            plan = (await handle.slo_status.remote())["plan"]
            serving = Counter(v for w in plan["workers"].values() for v in w["assigned"])
            (wanted,), (there,) = plan["targets"].values(), plan["running"].values()
            demand = plan["demand"]
            glances.append(Glance(calls.now_s, demand, wanted or there, there, serving))
        return glances

    due = zip(times.tolist(), which.tolist(), strict=True)
    seen, glances = await asyncio.gather(calls.send(due, one), look())
    return seen, glances


def why(error: Exception) -> str:
    """The reason that an error of ray-slo gives, and where in the pipeline; of others all."""
    if (reason := getattr(error, "reason", None)) is None:
        return repr(error)[:200]
    task = getattr(error, "task", None)
    return f"{reason} in {task}" if task else str(reason)


def simulated(known: dict[str, LatencyProfile], times: np.ndarray[Any, Any]) -> list[Row]:
    """What the simulator says of the same arrivals."""
    report = simulate_pipeline(
        problem_of(known),
        Workload(arrivals=Times(times_s=times.tolist())),
        initial_demand=TRICKLE,
        interval_s=INTERVAL_S,
        start_s=START_S,
        load_s=LOAD_S,
        latency_noise=NOISE,
    )
    case = "as simulated"
    return [
        Row(case, "accuracy", "%", report.accuracy()),
        Row(case, "violations", "%", 100 * report.violation_ratio()),
        Row(case, "workers", "", report.workers_used()),
    ]


def rows(
    limits: tuple[float, float],
    rates: Sequence[float],
    seen: Sequence[Seen],
    glances: Sequence[Glance],
) -> list[Row]:
    """The whole run by phases of the ramp, and over time."""
    made = [
        Row("capacity", "most accurate", "pages/s", limits[0]),
        Row("capacity", f"{FLOOR:g} % accurate", "pages/s", limits[1]),
    ]
    peak = [i for i, rate in enumerate(rates) if rate == max(rates)]
    first, last = BIN_S * peak[0], BIN_S * (peak[-1] + 1)
    end = BIN_S * len(rates)
    for phase, (a, b) in {
        "rising": (0.0, first),
        "at the peak": (first, last),
        "falling": (last, end),
        "all": (0.0, end),
    }.items():
        made += _rows(f"phases · {phase}", a, b, seen, glances)
    reasons = Counter(s.why for s in seen if s.why)
    made += [Row("not answered", reason, "", number) for reason, number in reasons.most_common()]
    bins = [(f"{i * BIN_S:g} s", i * BIN_S, (i + 1) * BIN_S) for i in range(len(rates))]
    for when, a, b in bins:
        made += _rows(f"over time · {when}", a, b, seen, glances)
    used = {variant for glance in glances for variant in glance.variants}
    variants = [v for v in (*SIDES, *READERS) if v in used]
    for when, a, b in bins:
        at = [g for g in glances if a <= g.at_s < b]
        made += [
            Row(f"{BY_VARIANT} · {when}", v, "", _mean([g.variants[v] for g in at]))
            for v in variants
        ]
    return made


def _rows(
    case: str, a: float, b: float, seen: Iterable[Seen], glances: Iterable[Glance]
) -> list[Row]:
    here = [s for s in seen if a <= s.at_s < b]
    at = [g for g in glances if a <= g.at_s < b]
    answered = [s for s in here if s.status == "answered"]
    in_time = [s for s in here if s.in_time]
    known = [s.accuracy for s in in_time if s.accuracy is not None]
    written = sum(s.written for s in in_time)
    latencies = [s.latency_s for s in answered]
    used = sum((g.variants for g in at), Counter())
    measured: list[tuple[str, str, float]] = [
        ("demand", "pages/s", len(here) / (b - a)),
        ("accuracy, of variants", "%", _mean(known)),
        (
            "accuracy, of characters",
            "%",
            100 * (1 - sum(s.wrong for s in in_time) / written) if written else math.nan,
        ),
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
    """Demand, accuracy, workers and violations over time, as Loki's Figure 5."""
    from matplotlib.figure import Figure

    over_time = _series(rows, "over time")
    by_variant = _series(rows, BY_VARIANT)
    capacity = {row.metric: row.ours for row in rows if row.case == "capacity"}
    figure = Figure(figsize=(8, 10), layout="constrained")
    panels = figure.subplots(5, 1, sharex=True)
    shown = (
        ("pages/s", ("demand",)),
        ("accuracy (%)", ("accuracy, of variants", "accuracy, of characters")),
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
    """(seconds, values) by metric of the rows under a title."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        head, _, when = row.case.partition(" · ")
        if head == title:
            at, values = found.setdefault(row.metric, ([], []))
            at.append(float(when.split()[0]))
            values.append(math.nan if row.ours is None else row.ours)
    return found
