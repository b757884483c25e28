"""Loki's programs, one for each step. All have the same constraints."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ray_slo.planning.loki.graph import Config, Graph
from ray_slo.planning.loki.plans import Assignment, PathShare, Plan, Step, explain, swaps_of
from ray_slo.planning.loki.problem import Problem
from ray_slo.planning.milp import Floats, Indices, Milp, Solution

EPS = 1e-6
"""Tolerance of the solvers, in workers and in shares."""


class Program:
    """The mixed-integer linear program of one problem.

    Args:
        problem: the problem.
        most_accurate: whether only the most accurate variants are used.
        served: the largest share of the demand that step 3 may serve.
    """

    def __init__(self, problem: Problem, most_accurate: bool = False, served: float = 1.0) -> None:
        self.problem, self.limit = problem, served
        self.graph = Graph(problem, most_accurate)

    def solve(self, step: Step, last: Plan | None, served: float = 1.0) -> Solution:
        """Solve one step. In the step "accuracy", at least the share `served` is served."""
        g = self.graph
        m, x, c = self.program(step, served)
        start = None
        if last is not None:
            counts = {(a.task, a.variant, a.batch_size): a.workers for a in last.assignments}
            start = (x, np.array([float(counts.get(self._key(k), 0)) for k in g.configs]))
        problem = self.problem
        solution = m.solve(
            problem.backend,
            problem.time_limit_s,
            problem.relative_gap,
            problem.seed,
            start=start,
        )
        self.x, self.c = x, c
        return solution

    def _key(self, config: Config) -> tuple[str, str, int]:
        g = self.graph
        return g.tasks[config.task].name, config.variant.name, config.batch_size

    def program(self, step: Step, served: float = 1.0) -> tuple[Milp, Indices, Indices]:
        """Return the program of a step, and its variables x, shape (configurations,), and c, shape
        (paths,)."""
        g = self.graph
        problem, paths = self.problem, g.paths
        m = Milp("min" if step == "hardware" else "max")
        least, most = (0.0, self.limit) if step == "share" else (served, served)
        x = m.variables("x: workers", len(g.configs), upper=self._useful(most), integer=True)
        share = m.variables("share served", 1, least, most)
        c = m.variables("c: shares of paths", len(paths))
        if g.configs:
            self._throughput(m, x, c)
        root = g.of_task[0]
        m.block("demand", (1, c[root.start : root.stop]), (-1, share), lower=0, upper=0)
        for i, task in enumerate(g.tasks):
            for child in problem.children(task):
                k = next(k for k, t in enumerate(g.tasks) if t.name == child.name)
                if g.of_task[i]:
                    self._conserve(m, c, g.of_task[i], g.of_task[k], child.name)
        if problem.accuracy_floor:
            m.block(
                "accuracy floor",
                (g.accuracy, c),
                (-problem.accuracy_floor, share),
                lower=0,
            )
        if problem.any_route and g.configs:
            if g.splits:
                self._one_split(m, x, most)
            else:
                self._any_route(m, x)
        swaps = self._swaps(m, x)
        if step == "hardware":
            m.objective((1, x), (1 / (problem.workers + 1), swaps))
        elif step == "accuracy":
            m.objective((g.accuracy / max(served, EPS), c), (-problem.swap_cost, swaps))
        else:
            m.objective((1, share))
        return m, x, c

    def _throughput(self, m: Milp, x: Indices, c: Indices) -> None:
        """Add (2) and (3): there are enough workers for the paths, and the cluster has room for
        the workers."""
        g, problem, paths = self.graph, self.problem, self.graph.paths
        arrivals = np.zeros((len(g.configs), len(paths)))
        for j, p in enumerate(paths):
            throughput = g.configs[p.config].throughput
            arrivals[p.config, j] = problem.planned_demand * p.arrivals / throughput
        m.block(
            "(2) throughput",
            (arrivals, np.broadcast_to(c, arrivals.shape)),
            (-1, x[:, None]),
            upper=0,
        )
        of_task = np.array(
            [[k.task == i for k in g.configs] for i in range(len(g.tasks))],
            float,
        )
        per_task = m.variables("workers of tasks", len(g.tasks), integer=True)
        m.block(
            "workers of tasks",
            (of_task, np.broadcast_to(x, of_task.shape)),
            (-1, per_task[:, None]),
            lower=0,
            upper=0,
        )
        m.block("(3) cluster size", (1, x), upper=problem.workers)
        self._fit_alone(m, x, of_task)

    def _fit_alone(self, m: Milp, x: Indices, of_task: Floats) -> None:
        """Add rows: a task's workers serve the requests of a single root request in time."""
        g = self.graph
        many = g.at_once > 0
        if many.any():
            takes = of_task[many] * g.takes
            m.block(
                "room for one request",
                (takes, np.broadcast_to(x, takes.shape)),
                lower=g.at_once[many] * (1 - EPS),
            )

    def _conserve(self, m: Milp, c: Indices, above: range, below: range, child: str) -> None:
        """Add rows: the share on a path equals that on its continuations to a child."""
        g = self.graph
        matrix = np.zeros((len(above), len(below)))
        for j in below:
            matrix[g.paths[j].parent - above.start, j - below.start] = 1
        continued = np.broadcast_to(c[below.start : below.stop], matrix.shape)
        through = c[above.start : above.stop, None]
        m.block(f"paths to {child}", (matrix, continued), (-1, through), lower=0, upper=0)

    def _useful(self, served: float) -> Floats:
        """Return the largest useful number of workers of each configuration: enough for the whole
        demand."""
        g = self.graph
        problem, arrivals = self.problem, np.zeros(len(g.configs))
        for p in g.paths:
            arrivals[p.config] = max(arrivals[p.config], p.arrivals)
        throughput = np.array([k.throughput for k in g.configs])
        if not math.isfinite(served):
            return np.full(len(g.configs), float(problem.workers))
        enough: Floats = np.ceil(problem.planned_demand * served * arrivals / throughput - EPS)
        at_once = np.array([g.at_once[k.task] for k in g.configs])
        enough = np.maximum(enough, np.ceil(at_once / np.maximum(g.takes, EPS) - EPS))
        return np.minimum(enough, float(problem.workers)).astype(float)

    def _one_split(self, m: Milp, x: Indices, served: float) -> None:
        """Add (4), (6) and (7): all loaded configurations belong to one split."""
        g = self.graph
        chosen = m.variables("splits", len(g.splits), upper=1, integer=True)
        m.block("one split", (1, chosen), lower=1, upper=1)
        most = self._useful(served)
        useful = [
            [n * (split[k.variant.name] == k.batch_size) for split in g.splits]
            for k, n in zip(g.configs, most, strict=True)
        ]
        m.block(
            "(7) configurations of the split",
            (1, x[:, None]),
            (-np.array(useful), np.broadcast_to(chosen, (len(x), len(chosen)))),
            upper=0,
        )

    def _any_route(self, m: Milp, x: Indices) -> None:
        """Add (4), one batch size per variant, and (6) and (7) for all paths that hosted
        configurations can form."""
        g = self.graph
        hosted = m.variables("hosted", len(g.configs), upper=1, integer=True)
        m.block(
            "workers of the hosted",
            (1, x[:, None]),
            (-self.problem.workers, hosted[:, None]),
            upper=0,
        )
        names = list(dict.fromkeys(k.variant.name for k in g.configs))
        of = np.array([[k.variant.name == name for k in g.configs] for name in names], float)
        m.block("(4) batch size", (of, np.broadcast_to(hosted, of.shape)), upper=1)
        if g.too_slow:
            both = np.zeros((len(g.too_slow), len(g.configs)))
            for row, (path, late) in enumerate(g.too_slow):
                both[row, path + late] = 1
            lengths = [len(path) for path, _ in g.too_slow]
            m.block("(7) any path", (both, np.broadcast_to(hosted, both.shape)), upper=lengths)

    def _swaps(self, m: Milp, x: Indices) -> Indices:
        """Add the number of workers that change their variant: new loads minus the idle workers.
        Return its variables."""
        g = self.graph
        problem, current = self.problem, self.problem.current
        swaps = m.variables(
            "swaps", 1, upper=math.inf if problem.max_swaps is None else problem.max_swaps
        )
        if current is None or not g.configs:
            return swaps
        keys = list(dict.fromkeys(self._key(k)[:2] for k in g.configs))
        of = np.array([[self._key(k)[:2] == key for k in g.configs] for key in keys], float)
        loads = m.variables("loads", len(keys))
        m.block(
            "loads",
            (of, np.broadcast_to(x, of.shape)),
            (-1, loads[:, None]),
            upper=[current.get(key, 0) for key in keys],
        )
        idle = max(problem.workers - sum(current.values()), 0)
        m.block("swaps", (1, loads), (-1, swaps), upper=idle)
        return swaps

    def plan(self, step: Step, solution: Solution) -> Plan:
        """Return the plan of a solution, without unused workers."""
        g = self.graph
        problem = self.problem
        c, hosted = np.zeros(len(g.paths)), np.zeros(len(g.configs), int)
        load = np.zeros(len(g.configs))
        if solution.found:
            hosted = solution[self.x].round().astype(int)
            c = np.maximum(solution[self.c], 0.0)
        for j, p in enumerate(g.paths):
            # A solver's rounding may leave a tiny load on configurations without workers.
            if not hosted[p.config] or (p.parent >= 0 and not c[p.parent]):
                c[j] = 0.0
            load[p.config] += problem.planned_demand * c[j] * p.arrivals
        assignments = []
        for config, most, of_config in zip(g.configs, hosted, load.tolist(), strict=True):
            useful = math.ceil(of_config / config.throughput - EPS)
            if g.at_once[config.task]:
                useful = int(most)  # a single root request needs all of them
            if workers := min(int(most), useful):
                key = self._key(config)
                assignments.append(
                    Assignment(*key, workers, of_config, config.throughput, config.latency_s)
                )
        root = g.of_task[0]
        served = min(float(c[root.start : root.stop].sum()), 1.0)
        shed = 1 - served if step == "share" and served < 1 - EPS else 0.0
        accuracy = float(g.accuracy @ c) / served if served else 0.0
        gap = abs(solution.bound - solution.objective) / max(abs(solution.objective), 1e-9)
        made = Plan(
            step,
            tuple(assignments),
            self._shares(c),
            accuracy,
            problem.planned_demand,
            shed,
            0,
            gap if math.isfinite(gap) else math.inf,
            "",
        )
        swaps = swaps_of(problem, made.loaded)
        return replace(made, swaps=swaps, explanation=explain(problem, made, swaps))

    def _shares(self, c: Floats) -> tuple[PathShare, ...]:
        g = self.graph
        shares: dict[tuple[str, ...], PathShare] = {}
        for j in g.sinks:
            if c[j] > 0:
                p = g.paths[j]
                other = shares.get(p.names, PathShare(p.names, 0.0, g.path_accuracy(p), 0.0))
                latency_s = max(other.latency_s, p.latency_s)
                share = other.share + float(c[j])
                shares[p.names] = replace(other, share=share, latency_s=latency_s)
        return tuple(sorted(shares.values(), key=lambda s: (-s.accuracy, s.variants)))
