"""One model on 8 GPUs: goodput and batch sizes of every system, and overload.

Poisson arrivals, no delays; every system has its default configuration. *Goodput*: the largest rate
at which at most 1 % of the requests are bad. *Batch*: the median over requests at that rate (Figure
1 in the paper). *At 1.5× bound* and the like: requests answered in time per second, when the
offered rate is 1.5 times the staggered bound. "Of bound" is the least of these, as a share of the
bound.

The paper measures real systems; ours are only their scheduling rules. Clockwork's goodput depends
on two published constants: it schedules 10 ms ahead, and keeps 5 ms before the deadline. It is
shown with both, and without each. In overload it does better than in the paper, whose scheduler is
slow.
"""

from __future__ import annotations

from benchmarks.harness.rows import Row
from benchmarks.own.deferred_objectives import INCEPTION, RESNET, WORKERS, Case, staggered_bound
from benchmarks.symphony.systems import SYSTEMS, System, goodput, run_at
from ray_slo.simulation import Report, Workload

SOURCE = "Symphony Table 2, Figure 1"
ASKED = [
    ("ResNet50* · deferred", "goodput", "≥", 5450),
    ("InceptionResNetV2* · deferred", "goodput", "≥", 965),
    ("* · deferred", "of bound at *", "≥", 99),
    ("ResNet50* · auto", "goodput", "≥", 5450),
    ("InceptionResNetV2* · auto", "goodput", "≥", 970),
    ("* · auto", "of bound at *", "≥", 99),
]
PAPER_BATCH = {
    RESNET.name: {"deferred": 14, "Clockwork": 1, "Nexus, 1 frontend": 6, "Shepherd": 9},
    INCEPTION.name: {"deferred": 8, "Clockwork": 1, "Nexus, 1 frontend": 2, "Shepherd": 4},
}

COMPARED: dict[str, System] = {
    "auto": ("auto", {}),
    **SYSTEMS,
    "Clockwork, no SLO buffer": ("benchmarks.peers:Clockwork", {"slo_buffer_ms": 0.0}),
    "Clockwork, nothing ahead": ("benchmarks.peers:Clockwork", {"schedule_ahead_ms": 0.0}),
    "Shepherd without preemption": ("flex", {"exact": True, "preemption": False}),
    "Nexus, batches as planned": ("benchmarks.peers:Nexus", {"grow": False}),
    "flex, our default": ("flex", {}),
    "deferred, as Algorithm 1": ("deferred", {"exact": True}),
    "eager": ("eager", {}),
    "eager, window drop": ("benchmarks.peers:WindowEager", {}),
}


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    for case in (RESNET, INCEPTION):
        paper: dict[str, float] = {
            "deferred": case.symphony,
            "Clockwork": case.peers["Clockwork"],
            "Nexus, 1 frontend": case.peers["Nexus"],
            "Shepherd": case.peers["Shepherd"],
        }
        _, bound = staggered_bound(case.profile, case.slo_ms / 1e3, WORKERS)
        for name, system in COMPARED.items():
            rows += _compare(case, name, system, paper.get(name), bound, quick, seed)
    return rows


def _compare(
    case: Case,
    name: str,
    system: System,
    paper: float | None,
    bound: float,
    quick: bool,
    seed: int,
) -> list[Row]:
    label = f"{case.name}, SLO {case.slo_ms:g} ms, {WORKERS} GPUs · {name}"
    scale = case.slo_ms / RESNET.slo_ms
    window = {
        "warmup_s": (0.5 if quick else 5) * scale,
        "duration_s": (1.5 if quick else 25) * scale,
    }
    workload = Workload.poisson(bound)
    found = goodput(
        system,
        case.cluster,
        workload,
        start_rate=0.8 * bound,
        tolerance=0.05 if quick else 0.005,
        seed=seed,
        **window,
    )
    batch = _median_batch(found.report) if found.report else None
    rows = [
        Row(label, "goodput", "req/s", found.rate, paper),
        Row(label, "batch", "", batch, PAPER_BATCH[case.name].get(name)),
    ]
    overload = {
        factor: run_at(
            system, case.cluster, workload.at_rate(factor * bound), seed=seed, **window
        ).goodput
        for factor in (1.0, 1.5, 3.0)
    }
    rows += [Row(label, f"at {f:g}× bound", "req/s", value) for f, value in overload.items()]
    least = min(overload[1.5], overload[3.0])
    return [*rows, Row(label, "of bound at 1.5× and 3×", "%", 100 * least / bound)]


def _median_batch(report: Report) -> float:
    """Return the median over answered requests of the size of their batch."""
    requests = report.requests
    batch = requests.batch[requests.measured & (requests.batch >= 0)]
    return float(report.batches["size"].iloc[batch].median())
