"""Tasks, clusters and workloads of RAMSIS §7, and what its programs share.

Profiles are the published measurements (`RAY_SLO_DATA`): the 95th percentile per batch size, as in
the paper. Raw percentiles have wild tails (one batch of 2 took ten times as long as a batch of 9),
so a batch is taken to be no slower than any larger one, as the published code does.

A model set is what §4.3.3 leaves of it: the front of accuracy against ℓ(1), 9 of 26 image models.
Execution takes exactly its profile, as in the paper's own simulation (§7.3.1).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import published
from ray_slo.core import Cluster, LatencyProfile, Model, Policy, Variant
from ray_slo.simulation import Report, Trace, Workload, simulate
from ray_slo.simulation.workloads import Gamma

MODEL = "m"
HARDWARE = "default"

IMAGE_SLOS_MS, IMAGE_WORKERS = (150.0, 300.0, 500.0), 60
TEXT_SLOS_MS, TEXT_WORKERS = (100.0, 200.0, 300.0), 20
LOADS = tuple(range(400, 4001, 400))
DROPPED_ABOVE = 0.05
"""The paper's figures leave out points with more violations than this."""


def read_variants(path: str | Path, percentile: str = "p95") -> list[Variant]:
    """Every model of a published profile file, least accurate first.

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
        # Measured up to some batch size without gaps; no slower than any larger batch.
        table = np.array([points[name][b] for b in range(1, len(points[name]) + 1)])
        table = np.minimum.accumulate(table[::-1])[::-1]
        variants.append(Variant(name, {HARDWARE: LatencyProfile(table)}, accuracy[name]))
    return variants


def front(variants: Iterable[Variant]) -> list[Variant]:
    """The variants that none beats in both accuracy and ℓ(1) (§4.3.3), least accurate first."""
    kept: list[Variant] = []
    for v in sorted(variants, key=lambda v: (-(v.accuracy or 0.0), _latency(v))):
        if not kept or _latency(v) < _latency(kept[-1]):
            kept.append(v)
    return kept[::-1]


def _latency(variant: Variant) -> float:
    return variant.profiles[HARDWARE].latency(1)


def image_task(*, everything: bool = False) -> list[Variant]:
    """The 9 ImageNet models on the front of 26, or all of them, least accurate first."""
    variants = read_variants(published("ramsis/image_profiles.csv"))
    return variants if everything else front(variants)


def text_task() -> list[Variant]:
    """The 5 BERT models, least accurate first."""
    return front(read_variants(published("ramsis/text_profiles.csv")))


def interpolated(variants: Sequence[Variant], step: float = 0.5) -> list[Variant]:
    """§7.3.2: `variants` and synthetic ones between neighbours, every `step` percent of accuracy.

    Where one neighbour was measured up to smaller batches, so is what lies between.
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
    """One model of these variants, all of them loaded on `num_workers` equal workers."""
    return Cluster.uniform([Model(MODEL, slo_s, tuple(variants))], num_workers, HARDWARE)


def constant(rate: float, shape: float = 1.0) -> Workload:
    """A constant load of `rate` requests/s; Poisson arrivals, or Gamma of another shape."""
    return (
        Workload(arrivals=Gamma(rate=rate, shape=shape)) if shape != 1 else Workload.poisson(rate)
    )


def twitter(first: int = 0, last: int | None = None) -> Workload:
    """The Twitter trace: Poisson at the published rates, 1617 to 3905 requests/s, 10 s each.

    27 intervals are published. The paper speaks of five minutes and 554,395 requests; these rates
    give 752,420 in 270 s.

    Args:
        first, last: a part of the trace, by interval.
    """
    with published("ramsis/twitter_trace_raw.csv").open(encoding="utf-8", newline="") as file:
        rates = [float(row["qps"]) for row in csv.DictReader(file)]
    return Workload(arrivals=Trace(rates=rates[first:last], interval_s=10.0))


def measure(
    policy: str | Policy,
    cluster: Cluster,
    workload: Workload,
    *,
    policy_kwargs: Mapping[str, Any] | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, float]:
    """Run a system; what the paper's figures show of it.

    Args:
        options: of `simulate`.

    Returns:
        accuracy: percent, mean over the requests answered in time ("per satisfied query").
        violation_rate: share of the requests that were late or dropped, 0 … 1.
        requests: how many arrived.
        mean_batch: over batches.
        idle: share of the workers' time without a batch.
    """
    report = simulate(
        policy,
        cluster,
        workload,
        policy_kwargs=policy_kwargs,
        duration_s=duration_s,
        seed=seed,
        **options,
    )
    return figures(report)


def figures(report: Report) -> dict[str, float]:
    """What `measure` returns, of a report."""
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
