"""Tasks, clusters and workloads of RAMSIS §7, and code that the programs of this folder share.

Profiles are the published measurements (`benchmarks/data/ramsis`): the 95th percentile per batch
size, as in the paper. Raw percentiles have outliers: one batch of 2 took ten times as long as a
batch of 9. So a batch is assumed to be no slower than any larger one, as in the published code.

A model set is the front of accuracy against ℓ(1), as in §4.3.3: 9 of 26 image models. Execution
takes exactly its profile, as in the paper's own simulation (§7.3.1).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.data import published
from benchmarks.harness.rows import Row, series
from benchmarks.peers.model_switching import GRID, profile_responses
from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.papers.ramsis import pareto_front
from ray_slo.policies import make_policy
from ray_slo.simulation import Report, Trace, Workload, simulate
from ray_slo.simulation.arrivals import Gamma

MODEL = "m"
HARDWARE = "default"

IMAGE_SLOS_MS, IMAGE_WORKERS = (150.0, 300.0, 500.0), 60
TEXT_SLOS_MS, TEXT_WORKERS = (100.0, 200.0, 300.0), 20
LOADS = tuple(range(400, 4001, 400))
DROPPED_ABOVE = 0.05
"""Points with a larger share of violations are left out, as in the paper's figures."""


def read_variants(path: str | Path, percentile: str = "p95") -> list[Variant]:
    """Return every model of a published profile file, the least accurate first.

    Args:
        percentile: column of the file: p50, p95, p99 or mean.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    points: dict[str, dict[int, float]] = {}
    accuracy: dict[str, float] = {}
    for row in rows:
        of_model = points.setdefault(row["model"], {})
        of_model[int(row["batch_size"])] = float(row[f"{percentile}_ms"]) / 1e3
        accuracy[row["model"]] = float(row["accuracy"])
    variants = []
    for name in sorted(points, key=lambda name: accuracy[name]):
        # Batch sizes were measured without gaps, up to some size.
        table = np.array([points[name][b] for b in range(1, len(points[name]) + 1)])
        table = np.minimum.accumulate(table[::-1])[::-1]
        variants.append(Variant(name, {HARDWARE: LatencyProfile(table)}, accuracy[name]))
    return variants


def front(variants: Iterable[Variant]) -> list[Variant]:
    """Return the variants that none beats in both accuracy and ℓ(1) (§4.3.3), by accuracy."""
    kept: list[Variant] = []
    for v in sorted(variants, key=lambda v: (-(v.accuracy or 0.0), _latency(v))):
        if not kept or _latency(v) < _latency(kept[-1]):
            kept.append(v)
    return kept[::-1]


def _latency(variant: Variant) -> float:
    return variant.profiles[HARDWARE].latency(1)


def image_task(*, wide_slo_s: float | None = None) -> list[Variant]:
    """Return the paper's 9 of 26 ImageNet models, the least accurate first.

    Args:
        wide_slo_s: if given, return those that no other beats at every batch size under this SLO
            instead. The paper compares batches of one, and so loses models that are better in
            larger batches.
    """
    variants = read_variants(published("ramsis/image_profiles.csv"))
    if wide_slo_s is None:
        return front(variants)
    profiles = [(v.name, v.accuracy or 0.0, v.profiles[HARDWARE]) for v in variants]
    kept = {name for name, _, _ in pareto_front(profiles, wide_slo_s)}
    return [v for v in variants if v.name in kept]


def text_task() -> list[Variant]:
    """Return the 5 BERT models, the least accurate first."""
    return front(read_variants(published("ramsis/text_profiles.csv")))


def interpolated(variants: Sequence[Variant], step: float = 0.5) -> list[Variant]:
    """Add synthetic variants between neighbours, every `step` percent of accuracy (§7.3.2).

    A synthetic variant has batches up to the smaller maximum of its two neighbours.
    """
    made = list(variants)
    for low, high in pairwise(variants):
        assert low.accuracy is not None
        assert high.accuracy is not None
        fast, slow = (np.array(v.profiles[HARDWARE].table) for v in (low, high))
        size = min(len(fast), len(slow))
        for accuracy in np.arange(low.accuracy + step, high.accuracy, step):
            w = (accuracy - low.accuracy) / (high.accuracy - low.accuracy)
            profile = LatencyProfile((1 - w) * fast[:size] + w * slow[:size])
            name = f"{low.name}+{accuracy - low.accuracy:.1f}"
            made.append(Variant(name, {HARDWARE: profile}, float(accuracy)))
    return sorted(made, key=lambda v: v.accuracy or 0.0)


def cluster(variants: Sequence[Variant], slo_s: float, num_workers: int) -> Cluster:
    """Return one model with these variants, all loaded on `num_workers` equal workers."""
    return Cluster.uniform([Model(MODEL, slo_s, tuple(variants))], num_workers, HARDWARE)


def constant(rate: float, shape: float = 1.0) -> Workload:
    """Return a constant load of `rate` requests/s, with Poisson or Gamma arrivals."""
    return (
        Workload(arrivals=Gamma(rate=rate, shape=shape)) if shape != 1 else Workload.poisson(rate)
    )


def twitter(
    first: int = 0, last: int | None = None, *, interval_s: float = 10.0, scale: float = 1.0
) -> Workload:
    """Return the Twitter trace: Poisson at the published rates (1617 to 3905/s), 10 s each.

    27 intervals are published. The paper has five minutes and 554,395 requests. The published rates
    give 752,420 in 270 s.

    Args:
        first, last: part of the trace, in intervals.
        interval_s: length of the intervals, if another; rates stay the same.
        scale: factor on the rates.
    """
    with published("ramsis/twitter_trace_raw.csv").open(encoding="utf-8", newline="") as file:
        rates = [scale * float(row["qps"]) for row in csv.DictReader(file)]
    return Workload(arrivals=Trace(rates=rates[first:last], interval_s=interval_s))


def measure(
    system: System, cluster: Cluster, workload: Workload, **options: Any
) -> dict[str, float]:
    """Run a system, and return the figures that the paper shows.

    Args:
        options: options of `simulate`.

    Returns:
        accuracy: percent, mean over the requests answered in time ("per satisfied query").
        violation_rate: share of the requests that were late or dropped, from 0 to 1.
        requests: number of requests that arrived.
        mean_batch: mean over batches.
        idle: share of the workers' time without a batch.
    """
    return figures(simulate(make_policy(*system), cluster, workload, **options))


def figures(report: Report) -> dict[str, float]:
    """Return the figures of `measure` for a report."""
    sizes = report.batch_sizes
    return {
        "accuracy": math.nan if report.accuracy is None else report.accuracy,
        "violation_rate": report.bad_rate(),
        "requests": report.count(),
        "mean_batch": float(sizes.mean()) if len(sizes) else math.nan,
        "idle": report.idle_fraction,
    }


def shown(measured: Mapping[str, float]) -> bool:
    """Whether the paper's figures would show this point."""
    return measured["violation_rate"] <= DROPPED_ABOVE


# Systems -----------------------------------------------------------------------------------------

RAMSIS, OURS = "RAMSIS", "ramsis, our default"
JELLYFISH, SWITCHING, GREEDY = "Jellyfish+", "ModelSwitching", "greedy"
System = tuple[str, dict[str, Any]]


def ramsis(load: float | None = None, options: Mapping[str, Any] | None = None) -> System:
    """Return RAMSIS as in the paper.

    Slack has 100 steps, and a batch has all waiting requests. Late requests are served, and cost no
    more than their accuracy. Tables are for `load` if it is given. Else they are for the measured
    load, rounded up by at most 5 %. (The paper's steps differ by at most 1 point of accuracy.)
    """
    as_published = {"discretization": "fld", "batching": "maximal", "late_penalty": 0.0}
    fields = {**as_published, **(options or {})}
    return "ramsis", {
        "late": "serve",
        "load_rps": load,
        "load_step": 1.05,
        "arrivals": "poisson",
        "options": fields,
    }


def ours(load: float | None = None) -> System:
    """Return the policy's default.

    It has model-based discretisation, and batches of any part of the waiting requests. Requests
    that cannot be answered in time are dropped, at a high penalty.
    """
    return "ramsis", {"load_rps": load, "load_step": 1.05, "arrivals": "poisson"}


def jellyfish(load: float | None = None) -> System:
    return "benchmarks.peers.jellyfish:Jellyfish", {"load": load}


def switching(limits: Mapping[str, float], load: float | None = None) -> System:
    """Return ModelSwitching.

    Args:
        limits: result of `switching_limits`.
    """
    return "benchmarks.peers.model_switching:ModelSwitching", {"limits": limits, "load": load}


def switching_limits(
    here: Cluster, *, quick: bool, loads: Sequence[float] = GRID, slos: float = 300.0
) -> dict[str, float]:
    """Profile ModelSwitching offline for `loads`, in runs of `slos` SLOs."""
    if quick:
        return profile_responses(here, loads=loads, requests=1_000, slos=20.0)
    return profile_responses(here, loads=loads, slos=slos)


def greedy() -> System:
    return "benchmarks.peers.greedy:Greedy", {}


def every_system(limits: Mapping[str, float], load: float | None = None) -> dict[str, System]:
    """Return the systems of the paper, our default, and greedy.

    Args:
        load: the load if it is known (§7.2); else every system measures it, in the same way.
    """
    return {
        RAMSIS: ramsis(load),
        OURS: ours(load),
        JELLYFISH: jellyfish(load),
        SWITCHING: switching(limits, load),
        GREEDY: greedy(),
    }


Measured = dict[str, dict[float, dict[str, float]]]
"""Results of `measure`, by system and x."""


def under_load(
    here: Cluster,
    systems_at: Callable[[float], Mapping[str, System]],
    *,
    quick: bool,
    seed: int,
    loads: Sequence[float] = LOADS,
    shape: float = 1.0,
    seconds: float = 30.0,
    **options: Any,
) -> Measured:
    """Run systems under constant loads.

    Args:
        systems_at: returns the systems to run at a load.
        loads: loads in requests/s.
        shape: shape of the Gamma gaps; 1 is Poisson.
        seconds: duration of the arrivals at each load; 3 when quick.
        options: options of `simulate`.
    """
    points: Measured = {}
    for load in loads:
        for name, system in systems_at(load).items():
            points.setdefault(name, {})[load] = measure(
                system,
                here,
                constant(load, shape),
                duration_s=3.0 if quick else seconds,
                seed=seed,
                **options,
            )
    return points


def image_rows(
    systems_at: Callable[[float], Mapping[str, System]],
    quick: bool,
    seed: int,
    quick_loads: Sequence[float] = (800, 2400),
) -> list[Row]:
    """Run systems on the image task (60 workers, SLO 150 ms) at constant loads; return the rows."""
    here = cluster(image_task(), 0.15, IMAGE_WORKERS)
    loads = quick_loads if quick else LOADS
    points = under_load(here, systems_at, quick=quick, seed=seed, loads=loads)
    return rows_of(f"image, SLO 150 ms, {IMAGE_WORKERS} workers", points, "{:g}/s")


# Rows --------------------------------------------------------------------------------------------


def rows_of(
    title: str,
    points: Measured,
    at: str,
    paper: Mapping[str, Mapping[float, float]] | None = None,
) -> list[Row]:
    """Return the rows: accuracy as in the paper's figures, violation rates, points left out.

    Args:
        at: a format of x, such as "{:g}/s".
        paper: violation rates in percent, by system and x.
    """
    rows = [
        Row(f"{title} · {name}", f"accuracy at {at.format(x)}", "%", _if(shown(p), p["accuracy"]))
        for name, of_x in points.items()
        for x, p in of_x.items()
    ]
    late = {
        n: {x: 100 * p["violation_rate"] for x, p in of_x.items()} for n, of_x in points.items()
    }
    printed = {(name, x): y for name, of_x in (paper or {}).items() for x, y in of_x.items()}
    rows += series(f"{title}, violations", late, f"late at {at}", "%", printed)
    left_out = {x for of_x in points.values() for x, p in of_x.items() if not shown(p)}
    rows += [
        Row(
            f"{title}, points left out above · {name}",
            f"accuracy, not shown, at {at.format(x)}",
            "%",
            _if(not shown(of_x[x]), of_x[x]["accuracy"]),
        )
        for name, of_x in points.items()
        if any(not shown(p) for p in of_x.values())
        for x in sorted(left_out)
        if x in of_x
    ]
    return rows


def _if(condition: bool, value: float) -> float | None:
    return value if condition else None


def gains(
    title: str, compared: Sequence[Measured], paper: Mapping[str, tuple[float, float]]
) -> list[Row]:
    """Return RAMSIS' gain in accuracy over each peer, where the paper would show both.

    Args:
        compared: points of each SLO.
        paper: by peer, the largest and the mean gain that the paper prints.
    """
    rows = []
    for peer in (JELLYFISH, SWITCHING):
        found = [
            points[RAMSIS][x]["accuracy"] - p["accuracy"]
            for points in compared
            for x, p in points[peer].items()
            if shown(p) and shown(points[RAMSIS][x])
        ]
        case = f"{title}, RAMSIS over · {peer}"
        largest, mean = paper.get(peer, (None, None))
        if found:
            rows += [
                Row(case, "largest gain", "points", max(found), largest),
                Row(case, "mean gain", "points", sum(found) / len(found), mean),
                Row(case, "least gain", "points", min(found)),
            ]
    return rows
