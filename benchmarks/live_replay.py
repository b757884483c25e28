"""Live on Ray Serve, recorded and replayed: does "what if" say what the other policy does live?

The same Poisson stream over HTTP goes to `deferred` and to `eager`, each with a decision log: two
workers whose batches take ℓ(b) = 200 ms + 24 ms · b (they sleep, as a worker of an accelerator does
while it computes), once with room to spare and once beyond what `eager` can carry. Then every log
is replayed: with its own policy, decision by decision, and in the simulator with the *other* one.
*Live* is the other policy's own run; *from the log* is what the log of the one says of it. All
figures are the scheduler's: in time means back at the worker's end by the deadline that it knew.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import Row
from ray_slo.simulation.report import Report

ALPHA_S, BETA_S = 0.024, 0.2
SLO_S = 0.9
WORKERS = 2
MODEL = "sleeper"
POLICIES = ("deferred", "eager")
RATES = (30.0, 50.0)
WARMUP_S = 4.0


class Sleeper:
    """A model on an accelerator, as its host sees it: it waits."""

    @staticmethod
    def example_input() -> int:
        return 0

    def __call__(self, items: list[Any]) -> list[Any]:
        time.sleep(BETA_S + ALPHA_S * len(items))
        return items


def run(quick: bool, seed: int) -> list[Row]:
    from ray_slo.cli.replay import live_kwargs
    from ray_slo.demo.systems import local_serve
    from ray_slo.simulation.decision_log import Life
    from ray_slo.simulation.replay import recorded, replay, tape, what_if

    rates = RATES[:1] if quick else RATES
    seconds = 5.0 if quick else 60.0
    warmup_s = 1.0 if quick else WARMUP_S
    lives: dict[tuple[float, str], Life] = {}
    with tempfile.TemporaryDirectory() as folder, local_serve() as url:
        for rate in rates:
            for policy in POLICIES:
                where = Path(folder) / f"{policy}-{rate:g}"
                lives[rate, policy] = _record(url, policy, rate, seconds, seed, where)
        rows: list[Row] = []
        for rate in rates:
            tapes = {p: tape(lives[rate, p]) for p in POLICIES}
            live = {p: recorded(tapes[p], warmup_s) for p in POLICIES}
            for policy in POLICIES:
                same = replay(lives[rate, policy])
                case = f"the same policy on its own log · {rate:g} requests/s, {policy}"
                rows += [
                    Row(case, "decisions", "", same.rounds),
                    Row(case, "decided otherwise", "", 0 if same.identical else 1),
                ]
            for policy, other in zip(POLICIES, reversed(POLICIES), strict=True):
                kwargs = live_kwargs(other, 1e3 * SLO_S)
                predicted = what_if(tapes[policy], other, kwargs, warmup_s=warmup_s)
                case = f"what if · {rate:g} requests/s, {other} from the log of {policy}"
                rows += _compared(case, live[other], predicted)
            for policy in POLICIES:
                kwargs = live_kwargs(policy, 1e3 * SLO_S)
                own = what_if(tapes[policy], policy, kwargs, warmup_s=warmup_s)
                case = f"what if · {rate:g} requests/s, {policy} from its own log"
                rows += _compared(case, live[policy], own)
            case = f"deferred − eager · {rate:g} requests/s"
            seen = live["deferred"].goodput - live["eager"].goodput
            said = {
                p: what_if(
                    tapes["deferred" if p == "eager" else "eager"],
                    *(p, live_kwargs(p, 1e3 * SLO_S)),
                    warmup_s=warmup_s,
                )
                for p in POLICIES
            }
            for policy, other in zip(POLICIES, reversed(POLICIES), strict=True):
                sign = 1 if policy == "deferred" else -1
                guess = sign * (live[policy].goodput - said[other].goodput)
                off = 100 * abs(guess - seen) / live[policy].offered
                rows += [
                    Row(case, "live", "requests/s", seen),
                    Row(case, f"as the log of {policy} has it", "requests/s", guess),
                    Row(case, f"off, log of {policy}", "% of offered", off),
                ]
    return rows


def _compared(case: str, live: Report, said: Report) -> list[Row]:
    def median_ms(report: Report) -> float:
        return 1e3 * report.latency_s(50)

    def mean_batch(report: Report) -> float:
        return float(report.batch_sizes.mean()) if len(report.batch_sizes) else float("nan")

    return [
        Row(case, "goodput live", "/s", live.goodput),
        Row(case, "from the log", "/s", said.goodput),
        Row(case, "off", "% of offered", 100 * abs(said.goodput - live.goodput) / live.offered),
        Row(case, "p50 live", "ms", median_ms(live)),
        Row(case, "p50 from the log", "ms", median_ms(said)),
        Row(case, "batch live", "", mean_batch(live)),
        Row(case, "batch from the log", "", mean_batch(said)),
    ]


def _record(url: str, policy: str, rate: float, seconds: float, seed: int, folder: Path) -> Any:
    from ray_slo.demo.systems import running
    from ray_slo.serve import build_app
    from ray_slo.serve.loadgen import run_http_process
    from ray_slo.serve.recorded import Payloads
    from ray_slo.serve.recorded import Workload as Recorded
    from ray_slo.simulation.decision_log import read
    from ray_slo.simulation.workloads import Workload

    app = build_app(
        {
            "models": {
                MODEL: {
                    "callable": "benchmarks.live_replay:Sleeper",
                    "latency_slo_ms": 1e3 * SLO_S,
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
    times = Workload.poisson(rate).arrivals.times(seconds, np.random.default_rng(seed))
    workload = Recorded.record(times, payloads, duration_s=seconds, warmup_s=0.0, seed=seed)
    with running(app):
        run_http_process(url, workload, payloads, slo_s=SLO_S).result()
        time.sleep(1.5)  # the last lines are written
    lives = read(folder)
    return lives[-1]
