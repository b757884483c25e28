"""Proteus as Loki's paper compares with it (§6.1): accuracy scaling that ignores the pipeline.

For Proteus, every task is an independent application with its own demand and SLO, and all share the
cluster. It solves one program. Loki's paper only says "each task independently". We chose the rest,
and followed Proteus' published code where it says something:

* *Demand*: the requests that arrive at each task, measured there (`observe`), with the same
  headroom for Poisson arrivals as Loki's at the root. So the items that a new detector finds are
  only known when it has found them, a period later.
* *SLO*: that of the pipeline, in equal parts for the tasks of the longest path, because
  dependencies are unknown. A variant runs with the fastest batch of which `waiting_factor`
  executions fit into that part. (Its code: the largest batch below the SLO.)
* *Objective*: the mean accuracy of all requests of all tasks, regardless of what happens to them
  downstream. (Its code: Σ w_k / Σ s_k.)
* *All workers are always used*. (Its code: Σ_j x_ij = 1 for every device i.) Among the plans of the
  best accuracy, ours has the most spare capacity where it is smallest. Its code leaves that to
  chance.
* *Overload*: its code lowers the total throughput that it asks for. Ours serves the largest share
  of the demand that is the same at every task, so that no work is in vain.

The last two are better for Proteus than its code. Latency profiles, factors, policy, period and
headroom are those of Loki.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ray_slo.core.cluster import Assigned
from ray_slo.core.demand import Rate, poisson_rate
from ray_slo.core.profiles import LatencyProfile
from ray_slo.planning.auto import Plan, Prices, Problem, Slot, Variant
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.brains.auto_jobs import AutoSetting, Job, Plans, solve
from ray_slo.planning.brains.brain import Counts
from ray_slo.planning.milp import Indices, Milp
from ray_slo.planning.result import Infeasible

_EPS = 1e-6


class ProteusBrain(AutoBrain):
    """A planner for `simulate_application`. It counts the requests at each task."""

    def __init__(self, setting: AutoSetting) -> None:
        super().__init__(setting)
        self._arrived = {task.name: Rate() for task in setting.problem.trees[0].order}
        self._began = False

    @property
    def first_workers(self) -> Mapping[str, int]:
        return {kind.name: kind.max_workers for kind in self._setting.problem.kinds}

    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        super().counted(now, over_s, counts)
        for task in self._setting.problem.trees[0].order:
            made = (n.get(task.name, 0) for n in counts.made.values())
            came = sum(counts.requests.values()) if task.parent is None else sum(made)
            self._arrived[task.name].counted(now, over_s, came)
            self._began |= came > 0

    @property
    def solve(self) -> Callable[[Job], Plans]:
        return self._both

    def _both(self, job: Job) -> Plans:
        if self._began:
            rates = {task: rate.value(self._now) for task, rate in self._arrived.items()}
        else:
            rates = expected(job.whole)
        return solve(job._replace(plan=lambda problem, _: plan(self.asked(problem), rates)))

    def asked(self, problem: Problem) -> Problem:
        """Return the problem to solve in place of this one."""
        return problem


def expected(problem: Problem) -> dict[str, float]:
    """Return the requests per second by task, if all tasks run their most accurate variants."""
    (tree,) = problem.trees
    rates = {tree.root: problem.demand[tree.name].rate}
    for task in tree.order:
        best = max(problem.variants_of(task), key=lambda v: v.accuracy)
        for child in tree.children(task.name):
            rates[child] = rates[task.name] * task.factor(best.name, child)
    return rates


def plan(problem: Problem, rates: Mapping[str, float]) -> Plan | Infeasible[Plan]:
    """Return Proteus' plan.

    Args:
        rates: requests per second by task.
    """
    made = _Program(problem, rates).plan()
    shed = 1 - min(made.served.values())
    if shed:
        return Infeasible(f"{100 * shed:.3g} % of the demand is out of reach", made)
    return made


class _Program:
    """The program. A configuration c is a variant with a batch size; x(c) workers, y(c) req/s."""

    def __init__(self, problem: Problem, rates: Mapping[str, float]) -> None:
        self.problem = problem
        (self.tree,), (self.kind,) = problem.trees, problem.kinds
        self.tasks = self.tree.order
        self.workers = problem.most(self.kind)
        self.demand = np.array([_quantile(problem, rates.get(t.name, 0.0)) for t in self.tasks])
        depth = max(len(self.tree.path(t.name)) for t in self.tasks)
        part_s = problem.slo_s(self.tree.name) / depth - problem.communication_s
        self.configs = [
            (i, v, b)
            for i, task in enumerate(self.tasks)
            for v in problem.variants_of(task)
            if (b := self._fastest(v, part_s / problem.waiting_factor))
        ]
        self.throughput = np.array([self._profile(v).throughput(b) for _, v, b in self.configs])
        self.of_task = np.array(
            [[float(i == k) for i, _, _ in self.configs] for k in range(len(self.tasks))]
        ).reshape(len(self.tasks), len(self.configs))

    def _profile(self, variant: Variant) -> LatencyProfile:
        return variant.profiles[self.kind.name]

    def _fastest(self, variant: Variant, limit_s: float) -> int:
        """Return the batch size with the highest throughput within `limit_s`; 0 if none fits."""
        profile = self._profile(variant)
        most = profile.max_batch_size
        sizes = [b for b in self.problem.batch_sizes if b <= most and profile.latency(b) <= limit_s]
        return max(sizes, key=profile.throughput, default=0)

    def _base(self) -> tuple[Milp, Indices, Indices, Indices]:
        m = Milp("max")
        n = len(self.configs)
        x = m.variables("x: workers", n, upper=self.workers, integer=True)
        y = m.variables("y: requests per second", n)
        share = m.variables("share served", 1, upper=1)
        m.block("capacity", (1, y[:, None]), (-self.throughput[:, None], x[:, None]), upper=0)
        m.block(
            "demand",
            (self.of_task, np.broadcast_to(y, self.of_task.shape)),
            (-self.demand[:, None], np.broadcast_to(share, (len(self.tasks), 1))),
            lower=0,
            upper=0,
        )
        m.block("cluster size", (1, x), upper=self.workers)
        return m, x, y, share

    def plan(self) -> Plan:
        problem, n = self.problem, len(self.configs)
        total = max(float(self.demand.sum()), _EPS)
        served, workers, rates, gap = 0.0, np.zeros(n, int), np.zeros(n), 0.0
        if n:
            m, x, y, share = self._base()
            m.objective((1, share))
            # Solved to optimality, because the next program must reach that share.
            first = m.solve(problem.backend, problem.time_limit_s, seed=problem.seed)
            served = float(first[share][0]) if first.found else 0.0
            served = 1.0 if served > 1 - _EPS else served * (1 - _EPS)
            m, x, y, share = self._base()
            m.block("share", (1, share), lower=served)
            accuracy = np.array([v.accuracy for _, v, _ in self.configs])
            m.objective((accuracy / total, y))
            best = m.solve(
                problem.backend, problem.time_limit_s, problem.relative_gap, seed=problem.seed
            )
            if best.found:
                workers, rates = best[x].round().astype(int), np.maximum(best[y], 0.0)
                workers = self._spare(np.where(rates > _EPS, workers, 0), rates)
                gap = abs(best.bound - best.objective) / max(abs(best.objective), 1e-9)
        return self._made(served, workers, rates, gap if math.isfinite(gap) else math.inf)

    def _spare(self, workers: Indices, rates: np.ndarray) -> Indices:
        """Add spare workers one by one, each where the spare capacity is smallest."""
        used = workers > 0
        workers = workers.copy()
        for _ in range(self.workers - int(workers.sum())):
            if not used.any():
                break
            margin = np.where(used, workers * self.throughput / np.maximum(rates, _EPS), np.inf)
            workers[int(margin.argmin())] += 1
        return workers

    def _made(self, served: float, workers: Indices, rates: np.ndarray, gap: float) -> Plan:
        slots: list[Slot] = []
        load, right = np.zeros(len(self.tasks)), np.zeros(len(self.tasks))
        for (i, v, b), k, rate in zip(self.configs, workers.tolist(), rates.tolist(), strict=True):
            if k:
                slots += [Slot(self.kind.name, (Assigned(v.name, b, rate / k),), (v.name,))] * k
                load[i], right[i] = load[i] + rate, right[i] + rate * v.accuracy / 100
        served = 1.0 if served >= 1 - _EPS else served
        demand = ", ".join(
            f"{t.name} {d:.5g}" for t, d in zip(self.tasks, self.demand, strict=True)
        )
        return Plan(
            {self.kind.name: len(slots)},
            tuple(slots),
            100 * float(np.prod(right / np.maximum(load, _EPS))),
            {self.tree.name: served},
            1 - served,
            0.0,
            Prices(),
            "accuracy" if served == 1 else "share",
            f"Requests per second: {demand}.",
            gap=gap,
        )


def _quantile(problem: Problem, rate: float) -> float:
    """Return the planned demand, as `Problem.rate` does."""
    if problem.headroom_quantile is None:
        return rate
    return poisson_rate(rate, problem.headroom_quantile, problem.headroom_period_s)
