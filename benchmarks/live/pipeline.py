"""Live on Ray Serve, real pages: demand goes up and down, workers and variants follow.

The requests are pages of known text, rendered with noise, as PNGs through a handle, with Poisson
arrivals. The pipeline detects the lines of a page and recognises each (`deployments.ocr`), with all
variants. Demand begins with a trickle. It rises to a share of the capacity, stays there, and falls
again. The planner computes the capacity from the latencies that its workers measured. Above the
capacity called `most accurate`, even all workers together cannot use the best variants. From there
on the planner gives up accuracy, down to a floor.

Four workers and everything else share two cores. So each worker is slowed to the speed that it
would have with a fixed share of a core. After a batch it sleeps until the CPU time of the batch is
that share of the elapsed time. Otherwise it would be fast while it measures itself and the others
are idle, and slow later.

*Accuracy* is that of answers in time. *Of variants*: measured once per path on other pages. *Of
characters*: measured on these answers, against the known text. *Violations* are requests that were
refused, dropped or late, end to end, as the client sees them. *Failed* requests got neither an
answer nor a refusal with a reason. *As simulated*: the simulator's figures for the same arrivals,
planner and policy. It uses the latencies that the workers had learned by the end. Times to start a
worker and to load a network are guesses.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.live.load import Calls, learned
from benchmarks.loki import terms as loki
from benchmarks.loki.systems import simulate
from deployments.ocr import Detect, Recognise
from deployments.ocr.app import SIDES
from ray_slo.core import LatencyProfile
from ray_slo.planning.result import Infeasible
from ray_slo.serve.config.pipeline import PipelineConfig
from ray_slo.simulation.arrivals import Times, Trace
from ray_slo.simulation.workloads import Workload

SOURCE = "Loki Figure 5"
SLO_S = 2.5
CLIENT_SHARE = 0.95  # share of the SLO that the server is told; the rest is the way to the client
WORKERS = 4
CORES = 0.6  # share of the machine's cores that all workers may use together
TRICKLE = 0.3  # pages per second
PEAK = 0.75  # share of the capacity with accuracy scaling
FLOOR = 70.0  # percent: rather than go below this mean accuracy, the planner sheds pages
READERS = ("rec32-int8", "rec40-int8", "rec48-int8", "rec48")  # others are slower and no better
BIN_S = 5.0
BY_VARIANT = "workers by variant, over time"
INTERVAL_S = 5.0  # seconds between plans
SWAP_COST = 0.1  # the live planner's default
START_S, LOAD_S = 8.0, 1.0  # in the simulator: time to start a worker, and to load a network
NOISE = 0.25  # in the simulator: noise of the latencies, because lines differ in length
PLANNING = {"headroom_quantile": 0.95, "headroom_period_s": 1.0, "accuracy_floor": FLOOR}


def share() -> float:
    """Return the share of a core that each worker may use."""
    return min(CORES * (os.cpu_count() or 1) / WORKERS, 1.0)


def resting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Slow a batch method down to its speed with `share()` of a core."""

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
    """One request; times are in seconds from the start."""

    at_s: float
    status: str  # "answered", or as in `ray_slo.load.drive`
    latency_s: float
    accuracy: float | None = None  # mean accuracy of the variants, percent
    wrong: int = 0  # characters that were recognised wrongly
    written: int = 0  # characters on the page
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

    with local_serve(), running(pipeline(3.0 if quick else 12.0).bind()):
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


def pipeline(profile_seconds: float) -> Any:
    """Return the pipeline with all variants, planned every `INTERVAL_S`."""
    import ray_slo
    from deployments import ocr
    from deployments.ocr.app import measured

    few = {"profile_quantile": 0.75}  # lines differ in length, but a page averages over several
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
    """Wait for the first plan; return the profiles that it uses."""
    while (status := handle.slo_status.remote().result())["plan"]["state"] != "planned":
        time.sleep(0.5)
    return learned(status)


def capacities(known: dict[str, LatencyProfile]) -> tuple[float, float]:
    """Return the pages per second that all workers can serve.

    The first figure is with the most accurate variants, the second with any that keep the floor.
    The planner computes both, with its profiles and its headroom.
    """
    problem = problem_of(known)
    best = max(problem.path_accuracies.values())
    return (
        largest(lambda demand: _accuracy(problem, demand) >= best - 0.01),
        largest(lambda demand: _accuracy(problem, demand) > 0),
    )


def problem_of(known: dict[str, LatencyProfile]) -> loki.Problem:
    """Return the planner's problem, with a demand of 1."""
    ((_, tasks),) = pipeline(1.0).spec().pipelines.items()
    return loki.Problem(
        tuple(_task(tasks, name, known) for name in tasks.parents),
        demand=1.0,
        workers=WORKERS,
        slo_s=CLIENT_SHARE * SLO_S,
        path_accuracies={tuple(p.split("/")): a for p, a in tasks.path_accuracies.items()},
        swap_cost=SWAP_COST,
        **PLANNING,
    )


def _task(tasks: PipelineConfig, name: str, known: Mapping[str, LatencyProfile]) -> loki.Task:
    task = tasks.tasks[name]
    variants = (
        loki.Variant(v, of.accuracy, known[v], tasks.factors[v]) for v, of in task.variants.items()
    )
    return loki.Task(name, tuple(variants), task.parent)


def largest(fits: Callable[[float], bool]) -> float:
    """Return the largest demand that fits, to 0.05 requests per second; 0 if none does."""
    low, high = 0.0, 0.5
    while fits(high):
        low, high = high, 2 * high
    while high - low > 0.05:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _accuracy(problem: loki.Problem, demand: float) -> float:
    """Return the accuracy of the plan for a demand, in percent; 0 if there is no plan."""
    answer = loki.plan(replace(problem, demand=demand))
    return 0.0 if isinstance(answer, Infeasible) else answer.accuracy


def ramp(peak: float, quick: bool) -> list[float]:
    """Return the demand in pages per second, one figure per `BIN_S` seconds."""
    low, slope, high = (1, 2, 2) if quick else (5, 20, 8)
    up = np.linspace(TRICKLE, peak, slope + 2)[1:-1].tolist()
    return [TRICKLE] * low + up + [peak] * high + up[::-1] + [TRICKLE] * low


async def drive(
    handle: Any, times: np.ndarray[Any, Any], duration_s: float, count: int, seed: int
) -> tuple[list[Seen], list[Glance]]:
    """Send pages at these times (open loop), and look at the plan once a second.

    Args:
        count: number of different pages.
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
            glances.append(Glance(calls.now_s, wanted or there, there, serving))
        return glances

    due = zip(times.tolist(), which.tolist(), strict=True)
    seen, glances = await asyncio.gather(calls.send(due, one), look())
    return seen, glances


def why(error: Exception) -> str:
    """Return the reason of a ray-slo error and the task that it happened in, else the error."""
    if (reason := getattr(error, "reason", None)) is None:
        return repr(error)[:200]
    task = getattr(error, "task", None)
    return f"{reason} in {task}" if task else str(reason)


def simulated(known: dict[str, LatencyProfile], times: np.ndarray[Any, Any]) -> list[Row]:
    """Simulate the same arrivals, and return the rows."""
    report = simulate(
        replace(problem_of(known), demand=TRICKLE),
        Workload(arrivals=Times(times_s=times.tolist())),
        interval_s=INTERVAL_S,
        start_s=START_S,
        load_s=LOAD_S,
        latency_noise=NOISE,
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
    """Plot demand, accuracy, workers and violations over time, as in Loki's Figure 5."""
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
    """Return (seconds, values) by metric, for the rows whose case begins with `title`."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        head, _, when = row.case.partition(" · ")
        if head == title:
            at, values = found.setdefault(row.metric, ([], []))
            at.append(float(when.split()[0]))
            values.append(math.nan if row.ours is None else row.ours)
    return found
