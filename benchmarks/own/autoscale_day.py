"""A day of load over a plain model, one with variants and a pipeline: late requests, worker-hours.

The day has the shape of the Azure Functions trace that Loki uses (`benchmarks/data/loki`). It lasts
24 minutes here, with one rate per minute and a peak that 10 workers can serve. Ours is the planner
`auto`, with a plan every 10 s and 0.1 s to solve it. It is compared with Ray Serve's own rule
(`serve_rule.py`), with the same policy on the same pool. The rule runs twice. Once it has its
defaults. Once its delays are shortened as the day is, with the best target of ongoing requests out
of 4, 8 and 16. A worker takes 2 s to start, and 0.5 s to load a variant.

*Bad after rises* leaves out the requests that arrive in the first 10 s after each rise of the rate.
*Fewest* is the result of perfect knowledge of the day. For each step, it is the smallest number of
workers with at most 1 % bad requests, found by simulation. These workers run from the beginning of
the step. Serve has no variants: its rule runs the most accurate one, and so does *fewest*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.loki.data import trace
from benchmarks.own.applications import (
    AUTOSCALING,
    PIPELINE,
    VARIANTS,
    application,
    capacity,
    one_variant,
)
from benchmarks.own.serve_rule import Ongoing, Rule, ServeRule
from ray_slo.planning import auto
from ray_slo.policies import make_policy
from ray_slo.simulation import ApplicationReport, Poisson, Trace, Workload, simulate_application

SOURCE = "Loki §6.1"
ASKED = [
    ("* · ours", "bad after rises", "≤", 1.0),
    ("* · ours", "worker-hours over the fewest", "≤", 1.2),
]
APPLICATIONS = {"plain": (), "variants": (VARIANTS,), "pipeline": (PIPELINE,)}
STEPS, STEP_S, INTERVAL_S = 24, 60.0, 10.0
FASTER = 24 * 3600 / (STEPS * STEP_S)
PEAK_WORKERS, MOST = 10, 16
TARGETS = (4.0, 8.0, 16.0)
TIMES = {"load_s": 0.5, "start_s": 2.0}
POLICY = "deferred"


def shape() -> list[float]:
    """Return the rate of each step of the day, divided by the largest one."""
    rates = trace("traffic_analysis_maf_reconstructed")
    steps = np.array([part.mean() for part in np.array_split(rates, STEPS)])
    return (steps / steps.max()).tolist()


@dataclass(frozen=True)
class Day:
    """An application, and its rates in requests per second. Each rate lasts `STEP_S`."""

    name: str
    problem: auto.Problem
    rates: Sequence[float]
    seed: int

    @property
    def stream(self) -> str:
        return self.problem.trees[0].name

    def ours(self) -> ApplicationReport:
        return self._run(self.problem, POLICY, "auto")

    def serve(self, rule: Rule) -> ApplicationReport:
        """Run it under Serve's rule, which begins with a quarter of the peak's workers."""
        problem = one_variant(self.problem, 0)
        policy = Ongoing(make_policy(POLICY))
        first = dict.fromkeys(problem.model, max(PEAK_WORKERS // 4 // len(problem.models), 1))
        return self._run(problem, policy, ServeRule(problem, rule, first, policy))

    def _run(self, problem: auto.Problem, policy, planner) -> ApplicationReport:  # type: ignore[no-untyped-def]
        return simulate_application(
            problem,
            {self.stream: Workload(arrivals=Trace(rates=list(self.rates), interval_s=STEP_S))},
            policy=policy,
            planner=planner,
            interval_s=INTERVAL_S,
            solve_s=0.1,
            seed=self.seed,
            **TIMES,
        )

    def fewest(self) -> list[int]:
        """Return the smallest sufficient number of workers for each step."""
        least = one_variant(self.problem, 0)
        found: dict[float, int] = {}
        n = 1
        for rate in sorted(set(self.rates)):
            while n < MOST and self._bad(least, rate, n) > 0.01:
                n += 1
            found[rate] = n
        return [found[rate] for rate in self.rates]

    def _bad(self, problem: auto.Problem, rate: float, workers: int) -> float:
        """Return the share of bad requests on this number of workers, planned for `rate`."""
        kind = replace(problem.kinds[0], min_workers=workers, max_workers=workers)
        fixed = replace(problem, kinds=(kind,), demand={self.stream: auto.Demand(rate)})
        return simulate_application(
            fixed,
            {self.stream: Workload(arrivals=Poisson(rate=rate))},
            policy=POLICY,
            planner="auto" if len(problem.models) > 1 else None,
            duration_s=30.0,
            interval_s=60.0,
            seed=self.seed,
        ).bad_rate()

    def after_rises(self, report: ApplicationReport) -> float:
        """Return the share of bad requests, without those in the first interval after a rise."""
        arrival = report.requests.arrival_s.to_numpy()
        counted = np.ones(len(arrival), dtype=bool)
        for i, (before, after) in enumerate(zip(self.rates, self.rates[1:], strict=False), 1):
            if after > before:
                begin = i * STEP_S
                counted &= ~((arrival >= begin) & (arrival < begin + INTERVAL_S))
        bad = (report.requests.outcome != "ok").to_numpy()
        return float(bad[counted].mean())


def days(quick: bool, seed: int) -> list[Day]:
    made = []
    form = shape()[:: 4 if quick else 1]
    for name, features in APPLICATIONS.items():
        problem = application((AUTOSCALING, *features), 1.0, seed).problem
        kind = replace(problem.kinds[0], min_workers=1, max_workers=MOST)
        problem = replace(problem, kinds=(kind,))
        peak = 0.85 * PEAK_WORKERS * capacity(problem, problem.trees[0], kind.name)
        made.append(Day(name, problem, [peak * x for x in form], seed))
    return made


def run(quick: bool, seed: int) -> list[Row]:
    rows = []
    for day in days(quick, seed):
        fewest = sum(day.fewest()) * STEP_S / 3600
        systems = {
            "ours": day.ours(),
            "Serve's rule, defaults": day.serve(Rule()),
        }
        tuned = [
            day.serve(Rule(target).faster(FASTER)) for target in (TARGETS[2:] if quick else TARGETS)
        ]
        systems["Serve's rule, tuned"] = min(
            tuned, key=lambda r: (max(day.after_rises(r), 0.01), r.worker_hours())
        )
        for system, report in systems.items():
            case = f"{day.name} · {system}"
            rows += [
                Row(case, "bad after rises", "%", 100 * day.after_rises(report)),
                Row(case, "bad", "%", 100 * report.bad_rate()),
                Row(case, "worker-hours over the fewest", "×", report.worker_hours() / fewest),
                Row(case, "mean workers", "", report.workers_used()),
                Row(case, "accuracy", "%", report.accuracy()),
            ]
    return rows
