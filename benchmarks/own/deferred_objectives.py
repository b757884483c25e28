"""Objectives and gathering rules of `deferred`, compared with eager and the staggered bound.

One model on 8 workers, with Poisson arrivals and no delays. *Goodput* is the largest rate at which
at most 1 % of the requests are bad. "paper" is the paper's measurement, with real delays. In the
table of objectives, *load* is a share of that measured goodput. The *bound* is that of staggered
execution: N·b / ℓ(b) with the largest b for which (1 + 1/N)·ℓ(b) ≤ SLO (Symphony §3.3, Eq. 1, 2).

* eager: run the waiting requests as soon as a worker is idle.
* consolidate: Symphony's Algorithm 1. It defers so long that every request has the latency of a
  fully loaded system.
* responsive: run a batch as soon as the queue holds as many requests as the load needs.
* prefix: a batch is the longest prefix of the queue that meets the head's deadline. This collapses
  in overload.
* drop-head: give up the head if it would keep a batch below its target size.
* default: responsive, and drop-head with a target that follows the measured load.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.harness.rows import Row
from benchmarks.symphony.systems import System, alike, goodput, run_at
from ray_slo.core import Cluster, LatencyProfile
from ray_slo.simulation import Report, Workload

SOURCE = "Symphony §3.3, §5.3, Table 2"
WORKERS = 8


class Case(NamedTuple):
    """A model with the paper's figures (Table 2): its bound, and the measured goodputs."""

    name: str
    alpha_ms: float
    beta_ms: float
    slo_ms: float
    bound: float
    batch: int
    symphony: float
    peers: dict[str, float]

    @property
    def profile(self) -> LatencyProfile:
        return LatencyProfile.linear(self.alpha_ms / 1e3, self.beta_ms / 1e3)

    @property
    def cluster(self) -> Cluster:
        return alike(self.profile, self.slo_ms / 1e3, 1, WORKERS, self.name)


RESNET = Case(
    *("ResNet50", 1.053, 5.072, 25, 5839, 16, 5264),
    {"Clockwork": 1358, "Nexus": 4027, "Shepherd": 4445},
)
INCEPTION = Case(
    *("InceptionResNetV2", 5.090, 18.368, 70, 1083, 8, 926),
    {"Clockwork": 458, "Nexus": 618, "Shepherd": 778},
)


def at_goodput(case: Case, system: System, quick: bool, seed: int) -> Report | None:
    """Run a system at its goodput, and return the report; None if the goodput is 0."""
    scale = case.slo_ms / RESNET.slo_ms
    return goodput(
        system,
        case.cluster,
        Workload.poisson(case.bound),
        start_rate=0.8 * case.bound,
        tolerance=0.02 if quick else 0.005,
        warmup_s=(1 if quick else 5) * scale,
        duration_s=(3 if quick else 25) * scale,
        seed=seed,
    ).report


def staggered_bound(profile: LatencyProfile, slo_s: float, workers: int) -> tuple[int, float]:
    """Return the batch size and the requests per second of staggered execution."""
    batch = profile.max_batch_within(slo_s / (1 + 1 / workers))
    return batch, workers * profile.throughput(batch)


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    for case in (RESNET, INCEPTION):
        batch, bound = staggered_bound(case.profile, case.slo_ms / 1e3, WORKERS)
        label = f"staggered bound · {case.name}"
        rows += [
            Row(label, "batch size", "", batch, case.batch),
            Row(label, "throughput", "req/s", bound, case.bound),
        ]

    objectives: dict[str, System] = {
        "eager": ("eager", {}),
        "consolidate, prefix": ("deferred", {"objective": "consolidate", "gathering": "prefix"}),
        "responsive, prefix": ("deferred", {"objective": "responsive", "gathering": "prefix"}),
        "default": ("deferred", {}),
    }
    found: dict[tuple[str, str], float] = {}
    for name, policy in objectives.items():
        label = f"{RESNET.name}, objectives · {name}"
        found[RESNET.name, name] = reached = _goodput(RESNET, policy, quick, seed)
        rows.append(_goodput_row(RESNET, label, reached, name))
        for load in (0.1, 0.5, 0.7):
            report = _run(RESNET, policy, load * RESNET.symphony, quick, seed)
            for p in (50, 99):
                latency = report.latency_s(p) * 1e3
                rows.append(Row(label, f"p{p} at {load:.0%}", "ms", latency))

    for case in (RESNET, INCEPTION):
        batch, bound = staggered_bound(case.profile, case.slo_ms / 1e3, WORKERS)
        head = {"objective": "consolidate", "gathering": "drop_head"}
        rules: dict[str, System] = {
            "consolidate, prefix": objectives["consolidate, prefix"],
            f"consolidate, drop-head to {3 * batch // 4}": (
                "deferred",
                {**head, "target_batch_size": 3 * batch // 4},
            ),
            f"consolidate, drop-head to {batch}": (
                "deferred",
                {**head, "target_batch_size": batch},
            ),
            "consolidate, drop-head by load": ("deferred", head),
            "default": objectives["default"],
        }
        for name, policy in rules.items():
            label = f"{case.name}, gathering rules · {name}"
            reached = found.get((case.name, name)) or _goodput(case, policy, quick, seed)
            rows.append(_goodput_row(case, label, reached, name))
            for factor in (1.0, 1.5, 3.0):
                report = _run(case, policy, factor * bound, quick, seed)
                rows.append(Row(label, f"at {factor:g}× bound", "req/s", report.goodput))
    return rows


def _goodput_row(case: Case, label: str, goodput: float, policy: str) -> Row:
    """Return a row of goodput; the default is compared with the paper's system."""
    if policy != "default":
        return Row(label, "goodput", "req/s", goodput)
    return Row(label, "goodput", "req/s", goodput, case.symphony, case.peers)


def _window(case: Case, quick: bool) -> dict[str, float]:
    """Return the warm-up and the duration, which are longer for the slower model."""
    scale = case.slo_ms / RESNET.slo_ms
    return {"warmup_s": (0.5 if quick else 5) * scale, "duration_s": (1.5 if quick else 25) * scale}


def _run(case: Case, policy: System, rate: float, quick: bool, seed: int) -> Report:
    window = _window(case, quick)
    return run_at(policy, case.cluster, Workload.poisson(rate), seed=seed, **window)


def _goodput(case: Case, policy: System, quick: bool, seed: int) -> float:
    return goodput(
        policy,
        case.cluster,
        Workload.poisson(case.bound),
        start_rate=0.84 * case.bound,
        growth=1.2,
        tolerance=0.05 if quick else 0.005,
        seed=seed,
        **_window(case, quick),
    ).rate
