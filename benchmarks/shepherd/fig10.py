"""Goodput against the number of workers, where schedulers have a limited speed.

Emulated V100, SLO 250 ms, no delays. Every 12 workers have their own copy of the zoo, their own
population of 46,000 streams, and 320 requests/s per worker, which they can serve. (In the paper,
SHEPHERD has 2.5 times Clockwork's 50,000/s on 400 workers. It does not say how its 13 models make
34 groups, although each model is in one group.) A central scheduler takes 50,000 requests per
second, as measured in the paper. If its backlog exceeds 10 ms, it refuses requests. Everything is
scaled down here: with `--quick` to 12,500/s and 96 workers, else to 25,000/s and 192. So the
highest number of workers corresponds to the paper's 384 to 400.

* SHEPHERD: HERD makes groups of at most 12 workers, each with its own FLEX scheduler.
* one FLEX: a single scheduler of unlimited speed, to which groups should come close.
* Clockwork: one scheduler; with "no limit", of unlimited speed.
* Nexus: follows its plan, without a scheduler.

In the paper, on 400 workers with MAF-stable, SHEPHERD has 2.5 times the goodput of Clockwork and
1.8 times that of Nexus. With MAF-bursty there are "similar trends". Ours differ: our Nexus uses all
workers whenever one is free, so it loses less under a load that fits.
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
from ray_slo.papers.herd import ModelStream, Plan, Problem, plan
from ray_slo.policies import make_policy
from ray_slo.simulation import Burst, Times, Workload, simulate

SOURCE = "SHEPHERD §7.1, Figure 10"
ASKED = [
    (
        "MAF-stable, SHEPHERD over · Clockwork",
        "factor at 192 workers",
        "≥",
        2.5,
        "the speed of a scheduler is an input here, and we chose the scale",
    ),
    (
        "MAF-stable, SHEPHERD over · Nexus, as planned",
        "factor at 192 workers",
        "≥",
        1.8,
        "our Nexus uses all workers, so it loses less under a load that fits",
    ),
]
GROUP = 12
PER_WORKER = 320.0  # requests per second
PER_SCHEDULER = 50_000.0
BACKLOG_S = 0.01
GPU_MODELS = 20  # number of models that fit into a worker's memory
PAPER = {"Clockwork": 2.5, "Nexus, as planned": 1.8}


class Limited:
    """A policy behind a scheduler that processes requests one by one, at a limited rate.

    Args:
        per_s: requests per second. Those that arrive at a backlog above `BACKLOG_S` are refused.
    """

    serves_late: ClassVar[bool] = False

    def __init__(self, policy: Policy, per_s: float) -> None:
        self._policy = policy
        self._each_s = 1 / per_s
        self._free_at = 0.0
        self._line: deque[tuple[float, Request]] = deque()  # (when it is processed, request)
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
    """A number of workers, with the models, streams and load that belong to them.

    Args:
        per_scheduler: requests per second that a central scheduler can take.
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
        self.arrivals: dict[str, Times] = {}  # the same for every system
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
        """Offered requests per second after the first interval."""
        counted = sum(
            np.greater_equal(a.times_s, self.interval_s).sum() for a in self.arrivals.values()
        )
        return float(counted / (self.duration_s - self.interval_s))

    def central(self, system: str, *, limited: bool = True) -> float:
        """Return the goodput with one scheduler, in requests per second."""
        policy = make_policy(*systems(self.interval_s)[system])
        if limited:
            policy = Limited(policy, self.per_scheduler)
        return self._goodput(policy, list(self.models), self.workers)

    def grouped(self, group_worker_limit: int = GROUP) -> float:
        """Return the goodput with a HERD plan and a FLEX scheduler per group, in requests/s."""
        return sum(
            self._goodput(
                Limited(make_policy(*SHEPHERD), self.per_scheduler), group.models, group.workers
            )
            for group in self.plan(group_worker_limit).groups
        )

    def dealt_out(self) -> float:
        """Return the goodput if each worker is on its own, in requests per second.

        The workers of a copy of the zoo hold all its models. Each gets an equal share of the
        requests of each model.
        """
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
        """Return HERD's plan for the average rates; T_i is the throughput with ℓ(b) ≤ SLO/2."""
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
    """Return the emulations by number of workers, all at the same scale."""
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
