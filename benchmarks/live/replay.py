"""Live on Ray Serve: each decision log is replayed, and simulated with the other policy.

The same Poisson stream goes over HTTP to `deferred` and to `eager`, and each run writes a decision
log. There are two workers. A batch of b takes ℓ(b) = 200 ms + 24 ms · b. The worker sleeps for that
time, as the host of an accelerator does while it computes. There are three cases. The first rate
leaves room to spare. The second is more than `eager` can carry. The third is twice the second, on
workers that are twice as fast.

Every log is replayed with its own policy, decision by decision. It is also simulated with the
*other* policy. *Live* is a figure of the other policy's own run. *From the log* is what the
simulation of the first policy's log predicts for it. All figures are the scheduler's: a request is
in time if its batch ended by the deadline that the scheduler knew.

Each policy runs twice, in the order deferred, eager, eager, deferred, and figures are means of both
runs. If the machine gets slower meanwhile, it does so for both policies. *Two live runs apart* is
the difference between two runs of one policy with the same requests. No prediction from another run
can be more exact than that.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live.load import by_http
from ray_slo.simulation.report import Report

SOURCE = "ray-slo"
ASKED = [
    ("the same policy on its own log*", "decided otherwise", "≤", 0),
    ("deferred − eager · *", "off, log of *", "≤", 5),
]
ALPHA_S, BETA_S = 0.024, 0.2
SLO_S = 0.9
WORKERS = 2
MODEL = "sleeper"
POLICIES = ("deferred", "eager")
WARMUP_S = 4.0


@dataclass(frozen=True)
class Case:
    """An arrival rate, and the speed of the workers."""

    rate: float  # requests/s
    speed: float = 1.0  # a factor on the workers' speed; at 2, a fixed delay costs twice as much

    @property
    def slo_s(self) -> float:
        return SLO_S / self.speed

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" + (self.speed > 1) * " on workers twice as fast"


CASES = (Case(30.0), Case(50.0), Case(100.0, 2.0))


def run(quick: bool, seed: int) -> list[Row]:
    from ray_slo.demo.systems import local_serve

    rows: list[Row] = []
    order = POLICIES if quick else (*POLICIES, *reversed(POLICIES))
    seconds, warmup_s = (5.0, 1.0) if quick else (40.0, WARMUP_S)
    with tempfile.TemporaryDirectory() as folder, local_serve() as url:
        for number, case in enumerate(CASES[:1] if quick else CASES):
            lives: dict[str, list[Any]] = {p: [] for p in POLICIES}
            for i, policy in enumerate(order):
                where = Path(folder) / f"{number}-{i}"
                lives[policy].append(_record(url, policy, case, seconds, seed, where))
            rows += _rows(case, lives, warmup_s)
    return rows


def _rows(case: Case, lives: dict[str, list[Any]], warmup_s: float) -> list[Row]:
    from ray_slo.policies.registry import live_arguments
    from ray_slo.simulation.replay import recorded, replay, tape, what_if

    rows: list[Row] = []
    tapes = {p: [tape(life) for life in lives[p]] for p in POLICIES}
    live = {p: [recorded(t, warmup_s) for t in tapes[p]] for p in POLICIES}
    for policy in POLICIES:
        same = [replay(life) for life in lives[policy]]
        budgets = [r.deadline - r.arrival for t in tapes[policy] for r in t.requests.values()]
        name = f"the same policy on its own log · {case}, {policy}"
        rows += [
            Row(name, "decisions", "", sum(found.rounds for found in same)),
            Row(name, "decided otherwise", "", sum(not found.identical for found in same)),
            # The SLO, less what frontends keep for the way back to the client.
            Row(name, "budget p50", "ms", 1e3 * float(np.median(budgets))),
        ]
        if len(same) > 1:
            goodputs = [report.goodput for report in live[policy]]
            offered = _mean(live[policy], "offered")
            apart = 100 * (max(goodputs) - min(goodputs)) / offered
            rows.append(Row(name, "two live runs apart", "% of offered", apart))
    # By (policy that is simulated, policy whose log it is).
    said: dict[tuple[str, str], list[Report]] = {}
    for policy in POLICIES:
        for other in POLICIES:
            kwargs = live_arguments(other, 1e3 * case.slo_s)
            said[other, policy] = [
                what_if(t, other, kwargs, warmup_s=warmup_s) for t in tapes[policy]
            ]
    for policy, other in (
        *zip(POLICIES, reversed(POLICIES), strict=True),
        *zip(POLICIES, POLICIES, strict=True),
    ):
        whose = "its own log" if policy == other else f"the log of {policy}"
        rows += _compared(
            f"what if · {case}, {other} from {whose}", live[other], said[other, policy]
        )
    name = f"deferred − eager · {case}"
    goodput = {p: _mean(live[p], "goodput") for p in POLICIES}
    seen = goodput["deferred"] - goodput["eager"]
    for policy, other in zip(POLICIES, reversed(POLICIES), strict=True):
        sign = 1 if policy == "deferred" else -1
        guess = sign * (goodput[policy] - _mean(said[other, policy], "goodput"))
        off = 100 * abs(guess - seen) / _mean(live[policy], "offered")
        rows += [
            Row(name, "live", "requests/s", seen),
            Row(name, f"as the log of {policy} has it", "requests/s", guess),
            Row(name, f"off, log of {policy}", "% of offered", off),
        ]
    return rows


def _mean(reports: Sequence[Report], figure: str) -> float:
    return float(np.mean([getattr(report, figure) for report in reports]))


def _compared(case: str, live: Sequence[Report], said: Sequence[Report]) -> list[Row]:
    def median_ms(reports: Sequence[Report]) -> float:
        return 1e3 * float(np.mean([report.latency_s(50) for report in reports]))

    def mean_batch(reports: Sequence[Report]) -> float:
        return float(np.concatenate([report.batch_sizes for report in reports]).mean())

    seen, guess = _mean(live, "goodput"), _mean(said, "goodput")
    return [
        Row(case, "goodput live", "/s", seen),
        Row(case, "from the log", "/s", guess),
        Row(case, "off", "% of offered", 100 * abs(guess - seen) / _mean(live, "offered")),
        Row(case, "p50 live", "ms", median_ms(live)),
        Row(case, "p50 from the log", "ms", median_ms(said)),
        Row(case, "batch live", "", mean_batch(live)),
        Row(case, "batch from the log", "", mean_batch(said)),
    ]


def _record(url: str, policy: str, case: Case, seconds: float, seed: int, folder: Path) -> Any:
    from ray_slo.demo.systems import running
    from ray_slo.load.workload import Payloads
    from ray_slo.record.decode import read
    from ray_slo.serve import build_app

    app = build_app(
        {
            "models": {
                MODEL: {
                    "callable": "benchmarks.live.sleeper:Sleeper",
                    "args": (ALPHA_S / case.speed, BETA_S / case.speed),
                    "latency_slo_ms": 1e3 * case.slo_s,
                    "max_batch_size": 32,
                }
            },
            "workers": {"cpu": {"num_replicas": WORKERS, "ray_actor_options": {"num_cpus": 1}}},
            "policy": policy,
            "profile_seconds": 3.0,
            "decision_log": {"dir": str(folder), "flush_s": 0.5},
        }
    )
    payloads = Payloads([b"1"], None, "application/json")
    with running(app):
        by_http(url, payloads, case.rate, duration_s=seconds, seed=seed, slo_s=case.slo_s)
        time.sleep(1.5)  # until the log's last rows are written
    lives = read(folder)
    return lives[-1]
