"""Live on Ray Serve, recorded: the same decisions again, and what the other policy would do.

The same Poisson stream over HTTP goes to `deferred` and to `eager`, each with a decision log: two
workers whose batches take ℓ(b) = 200 ms + 24 ms · b (they sleep, as a worker of an accelerator does
while it computes), once with room to spare and once beyond what `eager` can carry; and the latter
again twice as fast. Then every log is replayed: with its own policy, decision by decision, and in
the simulator with the *other* one. *Live* is the other policy's own run; *from the log* is what the
log of the one says of it. All figures are the scheduler's: in time means back at the worker's end
by the deadline that it knew.

Each policy runs twice, in the order deferred, eager, eager, deferred, and figures are means of the
two: a machine that gets slower meanwhile does so for both. What the two runs of one policy differ
by, with the same requests, is what no prediction from another run can be better than.
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
    """A load on workers of a speed."""

    rate: float
    speed: float = 1.0  # of workers; where it is 2, what is lost on the way counts twice

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
            # What frontends leave of the SLO, less the way back.
            Row(name, "budget p50", "ms", 1e3 * float(np.median(budgets))),
        ]
        if len(same) > 1:
            goodputs = [report.goodput for report in live[policy]]
            offered = _mean(live[policy], "offered")
            apart = 100 * (max(goodputs) - min(goodputs)) / offered
            rows.append(Row(name, "two live runs apart", "% of offered", apart))
    said: dict[tuple[str, str], list[Report]] = {}  # (of a policy, from the logs of a policy)
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
        time.sleep(1.5)  # the last lines are written
    lives = read(folder)
    return lives[-1]
