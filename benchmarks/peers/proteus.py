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
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from scipy.stats import poisson

from ray_slo.planning import loki
from ray_slo.planning.milp import Indices, Milp
from ray_slo.planning.result import Infeasible

_EPS = 1e-6


class Proteus:
    """A planner for `simulate_pipeline`. Make a new one for each run."""

    def __init__(self) -> None:
        self._rates: Mapping[str, float] = {}

    def observe(self, now: float, rates: Mapping[str, float]) -> None:
        """Receive the requests per second that arrive at each task."""
        self._rates = dict(rates)

    def __call__(
        self, problem: loki.Problem, last: loki.Plan | None = None
    ) -> loki.Plan | Infeasible[loki.Plan]:
        program = _Program(problem, self._rates)
        made = program.plan()
        if made.shed_share:
            return Infeasible(f"{100 * made.shed_share:.3g} % of the demand is out of reach", made)
        return made


class _Program:
    """The program. A configuration c is a variant with a batch size; x(c) workers, y(c) req/s."""

    def __init__(self, problem: loki.Problem, rates: Mapping[str, float]) -> None:
        self.problem = problem
        self.tasks = problem.order
        self.demand = np.array([_quantile(problem, rates.get(t.name, 0.0)) for t in self.tasks])
        depth: dict[str, int] = {}
        for task in self.tasks:
            depth[task.name] = 1 + (depth[task.parent] if task.parent else 0)
        part_s = problem.slo_s / max(depth.values()) - problem.communication_s
        self.configs = [
            (i, v, b)
            for i, task in enumerate(self.tasks)
            for v in task.variants
            if (b := _fastest(problem, v, part_s / problem.waiting_factor))
        ]
        self.throughput = np.array([v.profile.throughput(b) for _, v, b in self.configs])
        self.of_task = np.array(
            [[float(i == k) for i, _, _ in self.configs] for k in range(len(self.tasks))]
        ).reshape(len(self.tasks), len(self.configs))

    def _base(self) -> tuple[Milp, Indices, Indices, Indices]:
        m = Milp("max")
        n = len(self.configs)
        x = m.variables("x: workers", n, upper=self.problem.workers, integer=True)
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
        return m, x, y, share

    def plan(self) -> loki.Plan:
        problem, n = self.problem, len(self.configs)
        total = max(float(self.demand.sum()), _EPS)
        served, workers, rates, gap = 0.0, np.zeros(n, int), np.zeros(n), 0.0
        if n:
            m, x, y, share = self._base()
            m.block("cluster size", (1, x), upper=problem.workers)
            m.objective((1, share))
            # Solved to optimality, because the next program must reach that share.
            first = m.solve(problem.backend, problem.time_limit_s, seed=problem.seed)
            served = float(first[share][0]) if first.found else 0.0
            served = 1.0 if served > 1 - _EPS else served * (1 - _EPS)
            m, x, y, share = self._base()
            m.block("cluster size", (1, x), upper=problem.workers)
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
        for _ in range(self.problem.workers - int(workers.sum())):
            if not used.any():
                break
            margin = np.where(used, workers * self.throughput / np.maximum(rates, _EPS), np.inf)
            workers[int(margin.argmin())] += 1
        return workers

    def _made(self, served: float, workers: Indices, rates: np.ndarray, gap: float) -> loki.Plan:
        problem = self.problem
        assignments = tuple(
            loki.Assignment(
                self.tasks[i].name,
                v.name,
                b,
                int(k),
                float(rate),
                v.profile.throughput(b),
                v.profile.latency(b),
            )
            for (i, v, b), k, rate in zip(self.configs, workers, rates, strict=True)
            if k
        )
        mean = [
            sum(a.load * self._accuracy(a) for a in assignments if a.task == t.name)
            / max(sum(a.load for a in assignments if a.task == t.name), _EPS)
            for t in self.tasks
        ]
        shed = 1 - served if served < 1 - _EPS else 0.0
        demand = ", ".join(
            f"{t.name} {d:.5g}" for t, d in zip(self.tasks, self.demand, strict=True)
        )
        made = loki.Plan(
            "share" if shed else "accuracy",
            assignments,
            (),
            100 * math.prod(a / 100 for a in mean),
            float(self.demand[0]),
            shed,
            0,
            gap,
            f"Requests per second: {demand}.",
        )
        if problem.current is None:
            return made
        loads = sum(max(k - problem.current.get(key, 0), 0) for key, k in made.loaded.items())
        idle = max(problem.workers - sum(problem.current.values()), 0)
        return replace(made, swaps=max(loads - idle, 0))

    def _accuracy(self, a: loki.Assignment) -> float:
        return next(v.accuracy for _, v, _ in self.configs if v.name == a.variant)


def _quantile(problem: loki.Problem, rate: float) -> float:
    """Return the planned demand, as `loki.Problem.planned_demand` does."""
    if problem.headroom_quantile is None:
        return rate
    mean = rate * problem.headroom_period_s
    planned = float(poisson.ppf(problem.headroom_quantile, mean)) / problem.headroom_period_s
    return max(rate, planned)


def _fastest(problem: loki.Problem, variant: loki.Variant, limit_s: float) -> int:
    """Return the batch size with the highest throughput within `limit_s`; 0 if none fits."""
    profile = variant.profile
    sizes = [
        b
        for b in problem.batch_sizes
        if b <= profile.max_batch_size and profile.latency(b) <= limit_s
    ]
    return max(sizes, key=profile.throughput, default=0)
