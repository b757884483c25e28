"""Large batches first and preemption on two streams; HERD's limit of a group.

(a) One GPU. Stream A is ResNet18 with bursts of 1024 requests at 5, 125, 245, … ms. Stream B is
ResNet269 with a request every millisecond from 0 on, each of which takes 79 ms alone. Profiles are
those of Table 4, SLOs 250 and 90 ms, and there are no delays. A alone offers 8533 requests/s; the
GPU can serve 4010 of them in batches of 128. The paper prints two factors: the goodput of SHEPHERD
over that of Clockwork and, at 90 ms, over SHEPHERD without preemption.

Both factors follow from one burst. At 250 ms, the GPU can serve 481 requests of A per period.
Clockwork serves one request of B and one batch of 128 of A, which gives the factor 3.7. At 90 ms, a
burst may find a request of B running. With preemption, 358 requests can be served at once. Without
it, 16.4 ms are left after 78.6 ms, enough for 57 requests; this gives 6.2. In a long run, ours
differ:

* Clockwork alternates between B and A by required start. Sometimes B has two turns in a row, or a
  batch.
* Without preemption, B starts when the last burst has expired. It ends with 30 to 40 ms left for
  the next burst, enough for a batch of 128. A period is about as long as a batch of each. So every
  burst after the first finds the GPU in this lucky state. "The first burst alone" has no luck. The
  state is chance: at 90 ms, also Clockwork's depends on milliseconds (compare its rows).

The systems:

* SHEPHERD: Algorithms 1 and 2 as printed, λ = 3.03. flex: ours, which gathers the largest feasible
  batch.
* no preemption: SHEPHERD-NP.
* with overheads: the paper's upper bounds (§7.3). Execution is 5 % slower for its exit points. A
  preemption takes 4 ms (5 % of ResNet269's 79) until the GPU is free.
* clockwork: as in `systems`, with batch sizes of powers of two up to the paper's 128. A second one
  has all batch sizes. A third one keeps its published distance of 5 ms from deadlines. Together
  with 10 ms ahead, that leaves no time to plan B at 90 ms, so B starts only on an idle GPU.
* deferred, deferred_flex: not in the paper.

(b) The emulation of `shepherd-fig10` with most workers, at its reduced scale, over HERD's limit Ḡ
of workers in a group. The scale is a quarter with `--quick`, else half, of the paper's 400 workers
and 50,000 requests/s per scheduler. With one group for all workers, the scheduler limits the
goodput. Ḡ = 1 is shown twice. HERD gives each model one group, so with this limit one worker,
whatever its load. "Dealt out" gives each worker a share of the streams of every model. The paper's
ILP allows this before it is aggregated to models.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.shepherd.fig10 import emulations
from benchmarks.shepherd.systems import SHEPHERD, WORKLOADS
from ray_slo.core import Cluster, LatencyProfile, Model, Policy, Variant
from ray_slo.policies import make_policy
from ray_slo.simulation import Report, Times, Workload, simulate

SOURCE = "SHEPHERD §7.2, Figure 11"
ASKED = [
    (
        "SLO 90 ms · SHEPHERD, no preemption",
        "SHEPHERD is better by",
        "≥",
        6.2,
        "for the first burst alone it is close; the paper does not print how its bursts arrive",
    ),
    (
        "SLO 90 ms, the first burst alone · SHEPHERD, no preemption",
        "SHEPHERD is better by",
        "≥",
        6.2,
        "2 % less; it depends on the phase of the burst, which the paper does not print",
    ),
]
TABLE_4_MS = {"RN18": (0.22, 3.74), "RS269": (4.37, 74.20)}
PERIOD_S, BURST = 0.120, 1024
OVERHEAD, PREEMPT_DELAY_MS = 0.05, 4.0
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "SHEPHERD": SHEPHERD,
    "SHEPHERD, with overheads": ("flex", {"exact": True, "preempt_delay_ms": PREEMPT_DELAY_MS}),
    "SHEPHERD, no preemption": ("flex", {"exact": True, "preemption": False}),
    "flex": ("flex", {}),
    "flex, no preemption": ("flex", {"preemption": False}),
    "clockwork": (
        "benchmarks.peers:Clockwork",
        {"slo_buffer_ms": 0.0, "batch_sizes": [2**i for i in range(8)]},
    ),
    "clockwork, all batch sizes": ("benchmarks.peers:Clockwork", {"slo_buffer_ms": 0.0}),
    "clockwork, 5 ms from deadlines": ("benchmarks.peers:Clockwork", {}),
    "eager": ("eager", {}),
    "deferred": ("deferred", {}),
    "deferred_flex": ("deferred_flex", {}),
}
WITH_OVERHEADS = ("SHEPHERD, with overheads",)
PAPER = {  # goodput of SHEPHERD divided by theirs
    (250.0, "clockwork"): 3.7,
    (250.0, "SHEPHERD, no preemption"): 1.0,
    (90.0, "clockwork"): 6.2,
    (90.0, "SHEPHERD, no preemption"): 6.2,
}
PAPER_GROUPS = {  # goodput with Ḡ = 12 divided by theirs; the paper does not name the workload
    "1, dealt out": 1.7,
    "∞, one scheduler": 2.5,
}


def cluster(slo_ms: float, slowdown: float = 1.0) -> Cluster:
    models = []
    for name, (alpha_ms, beta_ms) in TABLE_4_MS.items():
        profile = LatencyProfile.linear(alpha_ms / 1e3, beta_ms / 1e3).scaled(slowdown)
        models.append(Model(name, slo_ms / 1e3, (Variant(name, {"default": profile}),)))
    return Cluster.uniform(models, 1)


def run_streams(
    policy: str | Policy,
    slo_ms: float,
    *,
    periods: int = 50,
    warmup: int = 2,
    slowdown: float = 1.0,
    preempt_delay_ms: float = 0.0,
) -> Report:
    """Run a number of periods, after those of the warm-up."""
    duration_s = (warmup + periods) * PERIOD_S
    bursts = [0.005 + PERIOD_S * i for i in range(warmup + periods)]
    streams = {
        "RN18": [at for at in bursts for _ in range(BURST)],
        "RS269": [i / 1e3 for i in range(round(duration_s * 1e3))],
    }
    return simulate(
        policy,
        cluster(slo_ms, slowdown),
        Workload(arrivals={name: Times(times_s=times) for name, times in streams.items()}),
        duration_s=duration_s,
        warmup_s=warmup * PERIOD_S,
        preempt_delay_s=preempt_delay_ms / 1e3,
    )


def run(quick: bool, seed: int) -> list[Row]:
    """Run (a), whose streams are not random, and (b), which depends on `seed`."""
    return [*_flex(quick), *_herd(quick, seed)]


def _flex(quick: bool) -> list[Row]:
    rows = []
    for title, slo_ms, warmup, periods in (
        ("SLO 250 ms", 250.0, 2, 20 if quick else 200),
        ("SLO 90 ms", 90.0, 2, 20 if quick else 200),
        ("SLO 90 ms, the first burst alone", 90.0, 0, 1),
    ):
        shepherd = 0.0
        for label, (name, kwargs) in POLICIES.items():
            report = run_streams(
                make_policy(name, kwargs),
                slo_ms,
                periods=periods,
                warmup=warmup,
                slowdown=1 + OVERHEAD if label in WITH_OVERHEADS else 1.0,
                preempt_delay_ms=PREEMPT_DELAY_MS if label in WITH_OVERHEADS else 0.0,
            )
            shepherd = shepherd or report.goodput
            preempted = (report.batches.status == "preempted").sum()
            case, window_s = f"{title} · {label}", report.window_s
            rows.append(Row(case, "goodput", "req/s", report.goodput))
            for model in TABLE_4_MS:
                rate = report.count("good", model) / window_s
                rows.append(Row(case, model, "req/s", rate))
            paper = PAPER.get((slo_ms, label))
            if warmup == 0 and label == "clockwork":
                paper = None  # Clockwork's cycle takes several bursts
            rows.append(Row(case, "SHEPHERD is better by", "×", shepherd / report.goodput, paper))
            rows.append(Row(case, "mean batch", "", float(report.batch_sizes.mean())))
            rows.append(Row(case, "preempted", "batches/s", float(preempted) / window_s))
    return rows


def _herd(quick: bool, seed: int) -> list[Row]:
    rows = []
    for workload, burst in WORKLOADS.items():
        workers, emulation = max(emulations(quick, seed, burst).items())
        goodput = {
            "12": emulation.grouped(12),
            "6": emulation.grouped(6),
            "1, HERD": emulation.grouped(1),
            "1, dealt out": emulation.dealt_out(),
            "∞, one scheduler": emulation.central("SHEPHERD"),
        }
        paper = {} if burst else PAPER_GROUPS
        for limit, value in goodput.items():
            case = f"{workload}, {workers} workers · Ḡ = {limit}"
            rows += [
                Row(case, "goodput of groups", "req/s", value),
                Row(case, "Ḡ = 12 is better by", "×", goodput["12"] / value, paper.get(limit)),
            ]
        case = f"{workload}, {workers} workers · offered"
        rows += [
            Row(case, "goodput of groups", "req/s", emulation.offered),
            Row(case, "Ḡ = 12 is better by", "×", goodput["12"] / emulation.offered),
        ]
    return rows
