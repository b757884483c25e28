"""Loki's own program (§4), beside which `benchmarks.loki.terms` is tested: `plan(problem)`.

*Linear form.* A *configuration* is a task's variant with a batch size. x is the number of workers
of each configuration. So the throughput of a configuration is a constant (Eq. 2), and its latency
too (Eq. 5). A path is a sequence of configurations from the root. It exists only if it is fast
enough (Eqs. 6, 7), so the program needs no binary I(p) and no products. c(p) is the share of
requests on a path. It equals the sum of the shares on the path's continuations to any one child.

`any_route` excludes configurations that are too slow together. Without it, two workers with the
same variant may have different batch sizes, and plans are at least as good as the paper's. Only
dominated configurations are left out: batches that are no faster per request than smaller ones, and
at a sink those that are never the fastest in the remaining time.

*Size with `any_route`.* If all children of the root are sinks, the slowest hosted configuration of
the root decides how the time is *split*. Then every variant runs the most efficient batch that its
part allows. There are few splits that no other dominates (7 for the published traffic pipeline), so
each has a binary. Deeper trees have a binary for every hosted configuration, and a row for each
pair that is too slow together. Two redundant constraints help solvers: the number of workers of
each task is an integer, and no configuration has more workers than the whole demand needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.loki.terms.plans import Assignment, PathShare, Plan, Step, explain, swaps_of
from benchmarks.loki.terms.problem import Problem, Task, Variant, cost, least_rest
from ray_slo.planning.milp import Floats, Indices, Milp, Solution

EPS = 1e-6
"""Tolerance of the solvers, in workers and in shares."""


@dataclass(frozen=True)
class Config:
    task: int
    variant: Variant
    batch_size: int
    latency_s: float
    throughput: float


@dataclass(frozen=True)
class Path:
    """A path from the root to `config`.

    Attributes:
        parent: index of the path without its last configuration. −1 at the root.
        arrivals: m(p), the number of requests that reach its end per request at the root.
        cost: time on the path, with waiting and communication.
        latency_s: sum of its batches' latencies, in seconds.
        product: product of its variants' accuracies, 0 to 1.
    """

    parent: int  # −1 at the root
    config: int
    names: tuple[str, ...]
    arrivals: float
    cost: float
    latency_s: float
    product: float  # of the accuracies, 0 to 1


class Graph:
    """Configurations and paths of one problem.

    Attributes:
        tasks: tasks, with parents before their children.
        of_task: paths that end at a task, by task.
        too_slow: pairs of a path's configurations and those that may not follow it.
        splits: batch sizes by variant, for each split of the time. Empty if the program has a
            binary for every configuration.
        sinks: paths to the last tasks.
        accuracy: accuracy that a path's share contributes, in percent, shape (paths,).
        at_once, takes: see `_alone`.
    """

    def __init__(self, problem: Problem, most_accurate: bool, any_route: bool) -> None:
        self.problem, self.any_route = problem, any_route
        self.tasks = [replace(t, variants=best(t)) if most_accurate else t for t in problem.order]
        self.configs: list[Config] = []
        self.paths: list[Path] = []
        self.of_task: list[range] = []
        self.too_slow: list[tuple[list[int], list[int]]] = []
        self.splits: list[dict[str, int]] = []
        if any_route:
            self.splits = self.find_splits()
        self._enumerate()
        sinks = [i for i, t in enumerate(self.tasks) if not problem.children(t)]
        self.sinks = [j for i in sinks for j in self.of_task[i]]
        self.at_once, self.takes = self._alone()
        self.accuracy = np.zeros(len(self.paths))  # contribution of a path's share
        for j in self.sinks:
            self.accuracy[j] = self.path_accuracy(self.paths[j]) / len(sinks)

    def path_accuracy(self, path: Path) -> float:
        return self.problem.path_accuracies.get(path.names, 100 * path.product)

    def find_splits(self) -> list[dict[str, int]]:
        """Return the batch sizes by variant, for every split of the time between the root and its
        children that no other split dominates. The result is empty if a child has children."""
        root, *below = self.tasks
        if any(task.parent != root.name for task in below):
            return []
        costs = {
            v.name: [(cost(self.problem, c.latency_s), c.batch_size) for c in self._options(i, v)]
            for i, task in enumerate(self.tasks)
            for v in task.variants
        }
        found: list[dict[str, int]] = []
        for slowest in sorted({time_s for v in root.variants for time_s, _ in costs[v.name]}):
            rest = self.problem.slo_s - slowest
            if rest < -1e-12:
                break
            split = {
                v.name: max((b for time_s, b in costs[v.name] if time_s <= room + 1e-12), default=0)
                for task, room in ((t, slowest if t is root else rest) for t in self.tasks)
                for v in task.variants
            }
            if all(any(split[v.name] for v in task.variants) for task in self.tasks):
                found = [s for s in found if any(s[v] > split[v] for v in s)]
                if not any(all(s[v] >= split[v] for v in s) for s in found):
                    found.append(split)
        return found

    def _enumerate(self) -> None:
        problem = self.problem
        index = {t.name: i for i, t in enumerate(self.tasks)}
        rest = least_rest(problem, self.tasks)
        for task in self.tasks:
            below = [rest[c.name] for c in problem.children(task)]
            start, room = len(self.paths), problem.slo_s + 1e-12 - max(below, default=0.0)
            prefixes: Sequence[tuple[int, Path | None]] = [(-1, None)]
            if task.parent is not None:
                prefixes = [(j, self.paths[j]) for j in self.of_task[index[task.parent]]]
            for variant in task.variants:
                options = self._options(index[task.name], variant)
                costs = [cost(problem, c.latency_s) for c in options]
                left = [room - (p.cost if p else 0.0) for _, p in prefixes]
                fits = [sum(c <= x for c in costs) for x in left]  # costs rise
                # At a sink, keep only those that are the fastest in the time that a prefix leaves.
                chosen = (
                    range(max(fits, default=0)) if below else sorted({f - 1 for f in fits if f})
                )
                first = len(self.configs)
                for o in chosen:
                    self.configs.append(options[o])
                    for (j, p), fit in zip(prefixes, fits, strict=True):
                        if o < fit:
                            path = self._extend(j, p, task, variant, options[o], costs[o])
                            self.paths.append(path)
                for (j, _), fit in zip(prefixes, fits, strict=True):
                    if late := [first + n for n, o in enumerate(chosen) if o >= fit]:
                        self.too_slow.append((self._chain(j), late))
            self.of_task.append(range(start, len(self.paths)))

    def _chain(self, j: int) -> list[int]:
        """Return the configurations on a path."""
        found = []
        while j >= 0:
            found.append(self.paths[j].config)
            j = self.paths[j].parent
        return found

    def _options(self, task: int, variant: Variant) -> list[Config]:
        """Return the configurations of a variant, by rising latency and throughput."""
        profile, found = variant.profile, list[Config]()
        for b in sorted({min(b, profile.max_batch_size) for b in self.problem.batch_sizes}):
            config = Config(task, variant, b, profile.latency(b), profile.throughput(b))
            if not found or config.throughput > found[-1].throughput:
                if found and config.latency_s <= found[-1].latency_s:
                    found.pop()
                found.append(config)
        if self.splits:
            used = {split[variant.name] for split in self.splits}
            return [config for config in found if config.batch_size in used]
        return found

    def _extend(
        self, j: int, p: Path | None, task: Task, variant: Variant, config: Config, cost: float
    ) -> Path:
        c = len(self.configs) - 1
        if p is None:
            product = variant.accuracy / 100
            return Path(-1, c, (variant.name,), 1.0, cost, config.latency_s, product)
        factor = self.configs[p.config].variant.factors.get(task.name, 1.0)
        return Path(
            j,
            c,
            (*p.names, variant.name),
            p.arrivals * factor,
            p.cost + cost,
            p.latency_s + config.latency_s,
            p.product * variant.accuracy / 100,
        )

    def _alone(self) -> tuple[Floats, Floats]:
        """Return two arrays for `fits_alone`: the number of requests that one request at the root
        makes at each task at once, and the number of these that a worker of each configuration
        takes in time. The first is 0 if any one worker is enough.

        In the time that the program leaves a task, a worker takes `waiting_factor` batches. A
        single request at the root does not wait before. So the share 1 − 1 / waiting_factor of the
        SLO is left for a task, if the other tasks on its paths have only one request to serve.
        """
        problem = self.problem
        arrivals = {t.name: 0.0 for t in self.tasks}
        for task, of in zip(self.tasks, self.of_task, strict=True):
            arrivals[task.name] = max((self.paths[j].arrivals for j in of), default=0.0)
        above: dict[str, list[str]] = {}
        for task in self.tasks:  # parents first
            above[task.name] = [] if task.parent is None else [task.parent, *above[task.parent]]
        busy = [name for name, n in arrivals.items() if n > 1]
        time_s = problem.slo_s * (1 - 1 / problem.waiting_factor)
        takes = np.zeros(len(self.configs))
        for i, config in enumerate(self.configs):
            takes[i] = problem.waiting_factor * config.batch_size
            name = self.tasks[config.task].name
            if not any(other in above[name] or name in above[other] for other in busy):
                takes[i] = max(takes[i], config.throughput * time_s)
        at_once = np.array([arrivals[t.name] for t in self.tasks])
        needed = problem.fits_alone and problem.planned_demand > 0
        return np.where(at_once > problem.waiting_factor, at_once, 0.0) * needed, takes


def best(task: Task) -> tuple[Variant, ...]:
    """Return the most accurate variants (Eqs. 8–10)."""
    top = max(v.accuracy for v in task.variants)
    return tuple(v for v in task.variants if v.accuracy == top)


class Program:
    """The mixed-integer linear program of one problem.

    Args:
        problem: the problem.
        most_accurate: whether only the most accurate variants are used.
        any_route: see `plan`.
    """

    def __init__(self, problem: Problem, most_accurate: bool, any_route: bool) -> None:
        self.problem = problem
        self.graph = Graph(problem, most_accurate, any_route)

    def solve(self, step: Step, served: float = 1.0) -> Solution:
        """Solve one step. In the step "accuracy", at least the share `served` is served."""
        m, x, c = self.program(step, served)
        problem = self.problem
        solution = m.solve(
            problem.backend,
            problem.time_limit_s,
            problem.relative_gap,
            problem.seed,
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
        least, most = (0.0, 1.0) if step == "share" else (served, served)
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
        if g.any_route and g.configs:
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


def plan(problem: Problem, any_route: bool = True) -> tuple[Plan, bool]:
    """Return the plan of the first feasible step, and whether it serves all demand.

    Args:
        any_route: whether every path through loaded configurations must be fast enough. Then a
            variant has one batch size, y(i, k) in the paper. False is the published program. It
            checks only the paths that it uses, although its routing tables (Algorithm 1) may form
            any path.
    """
    accurate = Program(problem, True, any_route)
    solution = accurate.solve("hardware")
    if solution.found:
        return accurate.plan("hardware", solution), True
    program = Program(problem, False, any_route)
    solution = program.solve("accuracy")
    if solution.found:
        return program.plan("accuracy", solution), True
    solution = program.solve("share")
    best = program.plan("share", solution)
    if solution.found and best.shed_share < 1:
        exact = program.solve("accuracy", served=(1 - best.shed_share) * (1 - EPS))
        if exact.found:
            best = replace(program.plan("share", exact), gap=best.gap)
    return best, False
