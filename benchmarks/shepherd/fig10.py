"""Goodput against the number of workers, where schedulers have a speed.

Emulated V100, SLO 250 ms, no delays. Every 12 workers bring a copy of the zoo, a population of
46,000 streams of its own and 320 requests/s per worker, a load that they can serve. (In the paper
SHEPHERD has 2.5 times Clockwork's 50,000/s on 400 workers; it does not say how its 13 models make
34 groups, of which each model has one.) A central scheduler takes 50,000 requests per second, as
the paper measured, and refuses what exceeds that for 10 ms. Here all of it is reduced in scale:
with `--quick` to 12,500/s and 96 workers, else to 25,000/s and 192, so the highest number of
workers stands for the paper's 384 to 400.

* SHEPHERD: HERD makes groups of at most 12 workers, each with a FLEX scheduler of its own;
* one FLEX: a single scheduler of unlimited speed, which is what groups are to come close to;
* Clockwork: one scheduler; with "no limit" it is as fast as need be;
* Nexus: its plan needs no scheduler.

In the paper, on 400 workers, SHEPHERD has 2.5 times the goodput of Clockwork and 1.8 times that of
Nexus with MAF-stable, and "similar trends" with MAF-bursty. Where ours differ: our Nexus uses all
workers and serves whenever one is free, so a load that fits costs it less.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.shepherd.systems import SHEPHERD, WORKLOADS, compared, systems, traces, zoo
from benchmarks.zoos import ZooModel
from ray_slo.core import (
    BatchOutcome,
    Cluster,
    Decision,
    Drop,
    DropReason,
    Policy,
    Request,
    WorkerId,
)
from ray_slo.planning.herd import ModelStream, Plan, Problem, plan
from ray_slo.policies import make_policy
from ray_slo.simulation import Burst, Times, Workload, simulate

SOURCE = "SHEPHERD §7.1, Figure 10"
ASKED = [
    (
        "MAF-stable, SHEPHERD over · Clockwork",
        "factor at 192 workers",
        "≥",
        2.5,
        "the speed of a scheduler is an input here, and the scale was chosen",
    ),
    (
        "MAF-stable, SHEPHERD over · Nexus, as planned",
        "factor at 192 workers",
        "≥",
        1.8,
        "our Nexus uses all workers, so a load that fits costs it less",
    ),
]
GROUP = 12
PER_WORKER = 320.0  # requests per second
PER_SCHEDULER = 50_000.0
BACKLOG_S = 0.01
GPU_MODELS = 20  # that a worker's memory holds
PAPER = {"Clockwork": 2.5, "Nexus, as planned": 1.8}


class Limited:
    """A policy behind a scheduler that takes so many requests per second, one after the other.

    Args:
        per_s: requests that arrive while its backlog is above `BACKLOG_S` are refused.
    """

    serves_late: ClassVar[bool] = False

    def __init__(self, policy: Policy, per_s: float) -> None:
        self._policy = policy
        self._each_s = 1 / per_s
        self._free_at = 0.0
        self._line: deque[tuple[float, Request]] = deque()  # by when it is through
        self._refused: list[Request] = []

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            if self._free_at - now > BACKLOG_S:
                self._refused.append(request)
            else:
                self._free_at = max(self._free_at, now) + self._each_s
                self._line.append((self._free_at, request))

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        gone = {r.id for r in requests}
        self._line = deque(entry for entry in self._line if entry[1].id not in gone)
        self._policy.requests_cancelled(now, requests)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self._policy.batch_finished(now, worker, outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._policy.cluster_changed(now, cluster)

    def decide(self, now: float) -> Decision:
        through = []
        while self._line and self._line[0][0] <= now:
            through.append(self._line.popleft()[1])
        if through:
            self._policy.requests_arrived(now, through)
        decision = self._policy.decide(now)
        actions = list(decision.actions)
        if self._refused:
            actions.append(Drop(self._refused, DropReason.SHED))
            self._refused = []
        following = self._line[0][0] if self._line else math.inf
        return Decision(actions, min(decision.wake_at, following))


class Emulation:
    """So many workers with the models, streams and load that belong to them.

    Args:
        per_scheduler: requests per second that a central scheduler takes.
    """

    def __init__(
        self,
        workers: int,
        burst: Burst | None,
        *,
        per_scheduler: float,
        interval_s: float,
        intervals: int,
        seed: int,
    ) -> None:
        self.workers = workers
        self.per_scheduler = per_scheduler
        self.interval_s = interval_s
        self.duration_s = intervals * interval_s
        self.models: dict[str, ZooModel] = {}
        self.rates: dict[str, float] = {}
        self.arrivals: dict[str, Times] = {}  # the same for every system, in groups or not
        rng = np.random.default_rng(seed)
        for copy in range(workers // GROUP):
            models = {f"{m.name} #{copy}": replace(m, name=f"{m.name} #{copy}") for m in zoo()}
            self.models |= models
            drawn = traces(list(models), PER_WORKER * GROUP, intervals, interval_s, burst, copy)
            self.rates |= {name: trace.rate for name, trace in drawn.items()}
            self.arrivals |= {
                name: Times(times_s=trace.times(self.duration_s, rng).tolist())
                for name, trace in drawn.items()
            }

    @property
    def offered(self) -> float:
        """Requests per second after the first interval."""
        counted = sum(
            np.greater_equal(a.times_s, self.interval_s).sum() for a in self.arrivals.values()
        )
        return float(counted / (self.duration_s - self.interval_s))

    def central(self, system: str, *, limited: bool = True) -> float:
        """Goodput with one scheduler, requests per second."""
        policy = make_policy(*systems(self.interval_s)[system])
        if limited:
            policy = Limited(policy, self.per_scheduler)
        return self._goodput(policy, list(self.models), self.workers)

    def grouped(self, group_worker_limit: int = GROUP) -> float:
        """Goodput with a HERD plan and a FLEX scheduler per group, requests per second."""
        return sum(
            self._goodput(
                Limited(make_policy(*SHEPHERD), self.per_scheduler), group.models, group.workers
            )
            for group in self.plan(group_worker_limit).groups
        )

    def dealt_out(self) -> float:
        """Goodput of workers each on its own: the workers of a copy of the zoo hold all of its
        models and are dealt its streams, an equal share of each model; requests per second."""
        rng = np.random.default_rng(len(self.models))
        good = 0.0
        names = list(self.models)
        per_copy = len(names) // (self.workers // GROUP)
        for first in range(0, len(names), per_copy):
            shares: list[dict[str, Times]] = [{} for _ in range(GROUP)]
            for name in names[first : first + per_copy]:
                times = np.array(self.arrivals[name].times_s)
                worker = rng.integers(GROUP, size=len(times))
                for i, share in enumerate(shares):
                    if (worker == i).any():
                        share[name] = Times(times_s=times[worker == i].tolist())
            good += sum(self._goodput(make_policy(*SHEPHERD), list(s), 1, s) for s in shares)
        return good

    def plan(self, group_worker_limit: int) -> Plan:
        """HERD's, for the average rates. T_i is the throughput in batches with ℓ(b) ≤ SLO/2."""
        streams = []
        for name, zoo_model in self.models.items():
            model = zoo_model.model()
            profile = model.variants[0].profiles["default"]
            batch = max(profile.max_batch_within(model.latency_slo_s / 2), 1)
            load = self.rates[name] / profile.throughput(batch)
            streams.append(ModelStream(name, load, memory_mb=1))
        made = plan(Problem(tuple(streams), self.workers, group_worker_limit, GPU_MODELS))
        if not isinstance(made, Plan):
            raise ValueError(f"no plan for {self.workers} workers: {made}")
        return made

    def _goodput(
        self,
        policy: Policy,
        names: Sequence[str],
        workers: int,
        arrivals: Mapping[str, Times] | None = None,
    ) -> float:
        chosen = arrivals or {name: self.arrivals[name] for name in names}
        return simulate(
            policy,
            Cluster.uniform([self.models[name].model() for name in names], workers),
            Workload(arrivals=dict(chosen)),
            warmup_s=self.interval_s,
            duration_s=self.duration_s,
        ).goodput


def emulations(quick: bool, seed: int, burst: Burst | None) -> Mapping[int, Emulation]:
    """By number of workers, all at the same scale."""
    scale = 4 if quick else 2
    return {
        workers // scale: Emulation(
            workers // scale,
            burst,
            per_scheduler=PER_SCHEDULER / scale,
            interval_s=0.4 if quick else 2.0,
            intervals=2 if quick else 3,
            seed=seed,
        )
        for workers in ((96, 192, 384) if quick else (48, 96, 192, 384))
    }


def run(quick: bool, seed: int) -> list[Row]:
    rows = []
    for workload, burst in WORKLOADS.items():
        goodput: dict[str, dict[float, float]] = {}
        for workers, emulation in emulations(quick, seed, burst).items():
            for name, value in {
                "SHEPHERD": emulation.grouped(),
                "one FLEX, no limit": emulation.central("SHEPHERD", limited=False),
                "Clockwork": emulation.central("Clockwork"),
                "Clockwork, no limit": emulation.central("Clockwork", limited=False),
                "Nexus": emulation.central("Nexus", limited=False),
                "Nexus, as planned": emulation.central("Nexus, as planned", limited=False),
                "offered": emulation.offered,
            }.items():
                goodput.setdefault(name, {})[workers] = value
        top = max(goodput["SHEPHERD"])
        paper = {(name, float(top)): x for name, x in PAPER.items() if burst is None}
        rows += compared(workload, goodput, "{} workers", paper)
    return rows


plot = partial(plot_series, x_label="workers (emulated)")
