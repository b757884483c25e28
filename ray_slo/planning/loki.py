"""Loki: variants, replicas and batch sizes of a tree of models under one latency SLO (Loki §4).

A request enters at the root; a task's variant makes so many requests of it for each child task.
Three steps, each a mixed-integer linear program over the same constraints:

1. *hardware scaling*: the fewest workers that serve the demand with the most accurate variants;
2. *accuracy scaling*: where all workers are too few for that, the highest accuracy at the demand;
3. *share* (ours; the paper is silent): where no variants suffice, the largest share of the demand,
   and the highest accuracy at that share. It comes as `Infeasible` and says what it sheds.

Worked example: a detector that finds 4 faces per frame, 3 workers, 100 ms. The large recogniser
serves 100 faces per second in batches of 2 (20 ms), the small one 200 (10 ms).

    >>> from ray_slo.core.profiles import LatencyProfile
    >>> fixed = lambda ms: LatencyProfile([ms / 1e3, ms / 1e3])
    >>> detector = Variant("d", 90.0, fixed(20), {"name": 4.0})
    >>> recognisers = Variant("large", 90.0, fixed(20)), Variant("small", 80.0, fixed(10))
    >>> tasks = Task("detect", (detector,)), Task("name", recognisers, parent="detect")
    >>> p = plan(Problem(tasks, demand=60, workers=3, slo_s=0.1, batch_sizes=(1, 2)))
    >>> p.step, round(p.accuracy, 2), [(a.variant, a.batch_size, a.workers) for a in p.assignments]
    ('accuracy', 75.75, [('d', 2, 1), ('large', 2, 1), ('small', 2, 1)])

How it is linear. A *configuration* is a task's variant with a batch size; x counts workers per
configuration, so throughput is a constant of it (Eq. 2), and so is latency (Eq. 5). A path is a
sequence of configurations from the root, and exists only if it is fast enough (Eqs. 6, 7): no
binary I(p), no products. c(p) is the share of requests on it; the shares on a path and on all its
continuations to any one child are equal, so those of the sinks agree. `any_route` excludes what is
too slow together; without it two workers with the same variant may have different batch sizes, and
plans are at least as good as the paper's. Left out are only configurations that others dominate:
batches no faster per request than smaller ones, and at a sink those that are nowhere the fastest in
the time that is left.

How `any_route` stays small. Where all children of the root are sinks, the slowest hosted
configuration of the root decides how the time is *split*, and then every variant runs the fastest
batch that its part allows. There are few such splits that no other dominates (7 on the published
traffic pipeline), so a binary each does. Deeper trees have a binary for every hosted configuration,
and a row for each pair that is too slow together. Workers per task are integers of their own, and
no configuration has more workers than all demand takes: both are implied, and help solvers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ray_slo.core.profiles import LatencyProfile
from ray_slo.planning.milp import Backend, Floats, Indices, Milp, Solution
from ray_slo.planning.result import Infeasible

Step = Literal["hardware", "accuracy", "share"]
_EPS = 1e-6  # rounding of the solvers, in workers and in shares
_NO_PLAN = "the solver stopped at its time limit without a plan"


@dataclass(frozen=True)
class Variant:
    """A network for one task.

    Args:
        name: unique in the pipeline.
        accuracy: of this network alone, percent.
        profile: latency by batch size on the cluster's workers.
        factors: requests made for each child task per request (the paper's multiplicative factor
            times the branch ratio); 1 for a child that is not named.
    """

    name: str
    accuracy: float
    profile: LatencyProfile
    factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A node of the pipeline; the root has no parent."""

    name: str
    variants: tuple[Variant, ...]
    parent: str | None = None


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Args:
        tasks: a rooted tree.
        demand: D, requests per second at the root, on average.
        workers: S, of one kind.
        slo_s: L, end to end, seconds.
        batch_sizes: B, those that may be configured; a variant's largest is its profile's.
        waiting_factor: a request is in a task for so many executions of a batch, waiting included
            (2 is the paper's "SLO/2").
        communication_s: delay per server on the path, seconds (§4.2).
        any_route: whatever hosted configurations a request comes by, the path is fast enough, and
            a variant has one batch size, y(i, k) in the paper. The published program sees only to
            the paths that it uses itself, but its routing tables (Algorithm 1) form any: False.
        headroom_quantile: plan for this quantile of what arrives in `headroom_period_s` if arrivals
            are Poisson at `demand`; None plans for the average itself, as the paper does.
        fits_alone: the requests that one request at the root makes at a task fit, in batches of the
            task's workers, into the time that the task has (ours): a lone request is in time, too.
        path_accuracies: measured end-to-end accuracy, percent, by the names of the variants from
            root to sink; a path that is missing has the product of its variants' accuracies.
        accuracy_floor: percent; requests are shed rather than served at a lower mean accuracy.
        current: workers by (task, variant) that are loaded now; None where nothing runs.
        swap_cost: points of accuracy that reloading one of them must gain. In step 1 swaps only
            decide between plans with as few workers.
        max_swaps: reload at most so many of them. Loading idle workers is no swap.
        backend, time_limit_s, relative_gap, seed: of the solver, for each program.

    Raises:
        ValueError: naming the field.
    """

    tasks: tuple[Task, ...]
    demand: float
    workers: int
    slo_s: float
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    waiting_factor: float = 2.0
    communication_s: float = 0.0
    any_route: bool = True
    headroom_quantile: float | None = None
    headroom_period_s: float = 1.0
    fits_alone: bool = True
    path_accuracies: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    accuracy_floor: float = 0.0
    current: Mapping[tuple[str, str], int] | None = None
    swap_cost: float = 0.0
    max_swaps: int | None = None
    backend: Backend = "auto"
    time_limit_s: float = 10.0
    relative_gap: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("demand", "communication_s", "swap_cost", "accuracy_floor", "relative_gap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("slo_s", "headroom_period_s", "time_limit_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if not self.waiting_factor >= 1:
            raise ValueError(f"waiting_factor must be at least 1, got {self.waiting_factor}")
        if self.headroom_quantile is not None and not 0 < self.headroom_quantile < 1:
            raise ValueError(
                f"headroom_quantile must be between 0 and 1, got {self.headroom_quantile}"
            )
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be at least 1, got {self.batch_sizes}")
        if self.max_swaps is not None and self.max_swaps < 0:
            raise ValueError(f"max_swaps must be at least 0, got {self.max_swaps}")
        self._check_tree()
        if self.current is not None:
            known = {(t.name, v.name) for t in self.tasks for v in t.variants}
            if unknown := set(self.current) - known:
                raise ValueError(f"current: no such variants: {sorted(unknown)}")
            if min(self.current.values(), default=0) < 0:
                raise ValueError(f"current must count at least 0 workers, got {self.current}")

    def _check_tree(self) -> None:
        names = {t.name for t in self.tasks}
        if not names or len(names) < len(self.tasks):
            raise ValueError("tasks must be at least one, with names of their own")
        variants = [v.name for t in self.tasks for v in t.variants]
        if twice := sorted({v for v in variants if variants.count(v) > 1}):
            raise ValueError(f"variants must have names of their own in the pipeline: {twice}")
        roots = [t.name for t in self.tasks if t.parent is None]
        if len(roots) != 1:
            raise ValueError(f"tasks must have one root (a task without parent), got {roots}")
        for task in self.tasks:
            if task.parent is not None and task.parent not in names:
                raise ValueError(
                    f"parent of task {task.name!r} must be one of {sorted(names)}, "
                    f"got {task.parent!r}"
                )
            if not task.variants:
                raise ValueError(f"variants of task {task.name!r} must name at least one")
            children = {t.name for t in self.tasks if t.parent == task.name}
            for variant in task.variants:
                if unknown := set(variant.factors) - children:
                    raise ValueError(
                        f"factors of variant {variant.name!r}: no children of task "
                        f"{task.name!r}: {sorted(unknown)}"
                    )
                if min(variant.factors.values(), default=0.0) < 0:
                    raise ValueError(f"factors of variant {variant.name!r} must be at least 0")
                if not 0 <= variant.accuracy <= 100:
                    raise ValueError(
                        f"accuracy of variant {variant.name!r} must be 0 to 100 percent, "
                        f"got {variant.accuracy}"
                    )
        if len(self.order) < len(self.tasks):
            lost = sorted(names - {t.name for t in self.order})
            raise ValueError(f"tasks must be a tree: {lost} are in a cycle")

    @cached_property
    def order(self) -> tuple[Task, ...]:
        """The tasks, parents first."""
        found = [t for t in self.tasks if t.parent is None]
        for task in found:  # grows as it goes
            found += self.children(task)
        return tuple(found)

    def children(self, task: Task) -> list[Task]:
        return [t for t in self.tasks if t.parent == task.name]

    @cached_property
    def planned_demand(self) -> float:
        """The demand with its headroom, requests per second."""
        if self.headroom_quantile is None:
            return self.demand
        from scipy.stats import poisson  # 0.4 s to import, and every replica imports this module

        mean = self.demand * self.headroom_period_s
        return max(
            self.demand,
            float(poisson.ppf(self.headroom_quantile, mean)) / self.headroom_period_s,
        )


@dataclass(frozen=True)
class Assignment:
    """Workers with one variant and batch size.

    Attributes:
        workers: how many.
        load: requests per second that all of them get, by plan.
        throughput: requests per second of one of them, at most.
        latency_s: of a full batch: the latency budget of the task (§4.2), waiting not included.
    """

    task: str
    variant: str
    batch_size: int
    workers: int
    load: float
    throughput: float
    latency_s: float

    def to_json(self) -> dict[str, Any]:
        """For logs and status: what is asked of these workers."""
        names = ("task", "variant", "batch_size", "workers", "load")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PathShare:
    """A path from root to sink: share of the demand, accuracy (percent), and the longest sum of
    batch latencies on it, seconds, waiting not included."""

    variants: tuple[str, ...]
    share: float
    accuracy: float
    latency_s: float


@dataclass(frozen=True)
class Plan:
    """`accuracy`: percent, over the requests that are served, mean of the sinks. `shed_share`: of
    the planned demand. `swaps`: workers that now have another variant. `gap`: no other plan can
    improve the objective of `step` by more than this share of it. `shared`: each worker serves all
    tasks, and every assignment holds for each worker (`best_effort`)."""

    step: Step
    assignments: tuple[Assignment, ...]
    paths: tuple[PathShare, ...]
    accuracy: float
    planned_demand: float
    shed_share: float
    swaps: int
    gap: float
    explanation: str
    shared: bool = False

    @property
    def workers(self) -> int:
        counts = [a.workers for a in self.assignments]
        return max(counts, default=0) if self.shared else sum(counts)

    @property
    def loaded(self) -> dict[tuple[str, str], int]:
        """Workers by (task, variant): `current` of the next problem."""
        counts: dict[tuple[str, str], int] = {}
        for a in self.assignments:
            counts[a.task, a.variant] = counts.get((a.task, a.variant), 0) + a.workers
        return counts


def plan(problem: Problem, last: Plan | None = None) -> Plan | Infeasible[Plan]:
    """The plan of the first step that is feasible.

    Args:
        problem: what is to be planned.
        last: where the search starts, if the solver takes a start (Gurobi does). It does not change
            what is optimal; `problem.current` does.

    Returns:
        A plan that serves the planned demand, or `Infeasible` with the plan of step 3.
    """
    accurate = _Program(problem, most_accurate=True)
    solution = accurate.solve("hardware", last)
    if solution.found:
        return accurate.plan("hardware", solution)
    program = _Program(problem)
    solution = program.solve("accuracy", last)
    if solution.found:
        return program.plan("accuracy", solution)
    proven = solution.status == "infeasible"
    solution = program.solve("share", last)
    best = program.plan("share", solution)
    if solution.found and best.shed_share < 1:
        exact = program.solve("accuracy", last, served=(1 - best.shed_share) * (1 - _EPS))
        if exact.found:
            best = replace(program.plan("share", exact), gap=best.gap)
    if not proven:
        reason = _NO_PLAN
    elif not program.paths:
        reason = (
            f"slo_s {problem.slo_s:g} is too short: the fastest path takes "
            f"{fastest(problem):.4g} s, waiting and communication included"
        )
    else:
        limits = [f"{problem.workers} workers"]
        if problem.accuracy_floor:
            limits.append(f"an accuracy of at least {problem.accuracy_floor:g} %")
        if problem.max_swaps is not None:
            limits.append(f"at most {problem.max_swaps} swaps")
        reason = (
            f"demand {problem.planned_demand:.5g} req/s is out of reach with "
            f"{', '.join(limits)}: {100 * (1 - best.shed_share):.3g} % of it can be served"
        )
    return Infeasible(reason, best, proven)


def capacity(problem: Problem, *, most_accurate: bool = False) -> float:
    """The largest demand, requests per second, that all workers can serve: with the most accurate
    variants alone (the end of hardware scaling), or any at `problem.accuracy_floor`. Demand and
    headroom of the problem do not matter.

    Raises:
        RuntimeError: the solver found nothing within its time limit.
    """
    free = replace(problem, demand=1.0, headroom_quantile=None)
    solution = _Program(free, most_accurate, served=math.inf).solve("share", None)
    if not solution.found:
        raise RuntimeError(_NO_PLAN)
    return solution.objective


def fastest(problem: Problem) -> float:
    """The shortest time to the slowest sink, seconds, waiting and communication included."""
    return _rest(problem, problem.order)[problem.order[0].name]


def _cost(problem: Problem, latency_s: float) -> float:
    return problem.waiting_factor * latency_s + problem.communication_s


def _rest(problem: Problem, tasks: Sequence[Task]) -> dict[str, float]:
    """Least time from entering a task to the last of its sinks."""
    rest: dict[str, float] = {}
    for task in reversed(tasks):
        own = min(
            v.profile.latency(min(min(problem.batch_sizes), v.profile.max_batch_size))
            for v in task.variants
        )
        below = max((rest[child.name] for child in problem.children(task)), default=0.0)
        rest[task.name] = _cost(problem, own) + below
    return rest


@dataclass(frozen=True)
class _Config:
    task: int
    variant: Variant
    batch_size: int
    latency_s: float
    throughput: float


@dataclass(frozen=True)
class _Path:
    """From the root to `config`. `arrivals`: m(p), requests that reach it per request at the root;
    `cost`: time so far; `latency_s`: of its batches."""

    parent: int  # −1 at the root
    config: int
    names: tuple[str, ...]
    arrivals: float
    cost: float
    latency_s: float
    product: float  # of the accuracies, 0 to 1


class _Program:
    """Configurations, paths and constraints of one problem."""

    def __init__(self, problem: Problem, most_accurate: bool = False, served: float = 1.0) -> None:
        self.problem, self.limit = problem, served
        self.tasks = [replace(t, variants=_best(t)) if most_accurate else t for t in problem.order]
        self.configs: list[_Config] = []
        self.paths: list[_Path] = []
        self.of_task: list[range] = []  # paths that end in a task
        self.too_slow: list[tuple[list[int], list[int]]] = []  # a path, and what it cannot go on to
        self.splits: list[dict[str, int]] = []
        if problem.any_route:
            self.splits = self._splits()
        self._enumerate()
        sinks = [i for i, t in enumerate(self.tasks) if not problem.children(t)]
        self.sinks = [j for i in sinks for j in self.of_task[i]]
        self.at_once, self.takes = self._alone()
        self.accuracy = np.zeros(len(self.paths))  # contribution of a path's share
        for j in self.sinks:
            self.accuracy[j] = self.path_accuracy(self.paths[j]) / len(sinks)

    def path_accuracy(self, path: _Path) -> float:
        return self.problem.path_accuracies.get(path.names, 100 * path.product)

    def _splits(self) -> list[dict[str, int]]:
        """Batch sizes by variant, for every split of the time between the root and its children
        that no other dominates. None where a child has children."""
        root, *below = self.tasks
        if any(task.parent != root.name for task in below):
            return []
        costs = {
            v.name: [(_cost(self.problem, c.latency_s), c.batch_size) for c in self._options(i, v)]
            for i, task in enumerate(self.tasks)
            for v in task.variants
        }
        found: list[dict[str, int]] = []
        for slowest in sorted({cost for v in root.variants for cost, _ in costs[v.name]}):
            rest = self.problem.slo_s - slowest
            if rest < -1e-12:
                break
            split = {
                v.name: max((b for cost, b in costs[v.name] if cost <= room + 1e-12), default=0)
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
        rest = _rest(problem, self.tasks)
        for task in self.tasks:
            below = [rest[c.name] for c in problem.children(task)]
            start, room = len(self.paths), problem.slo_s + 1e-12 - max(below, default=0.0)
            prefixes: Sequence[tuple[int, _Path | None]] = [(-1, None)]
            if task.parent is not None:
                prefixes = [(j, self.paths[j]) for j in self.of_task[index[task.parent]]]
            for variant in task.variants:
                options = self._options(index[task.name], variant)
                costs = [_cost(problem, c.latency_s) for c in options]
                left = [room - (p.cost if p else 0.0) for _, p in prefixes]
                fits = [sum(c <= x for c in costs) for x in left]  # costs rise
                # At a sink only those that are the fastest in the time that some prefix leaves.
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
        """The configurations on a path."""
        found = []
        while j >= 0:
            found.append(self.paths[j].config)
            j = self.paths[j].parent
        return found

    def _options(self, task: int, variant: Variant) -> list[_Config]:
        """Configurations by rising latency and throughput."""
        profile, found = variant.profile, list[_Config]()
        for b in sorted({min(b, profile.max_batch_size) for b in self.problem.batch_sizes}):
            config = _Config(task, variant, b, profile.latency(b), profile.throughput(b))
            if not found or config.throughput > found[-1].throughput:
                if found and config.latency_s <= found[-1].latency_s:
                    found.pop()
                found.append(config)
        if self.splits:
            used = {split[variant.name] for split in self.splits}
            return [config for config in found if config.batch_size in used]
        return found

    def _extend(
        self, j: int, p: _Path | None, task: Task, variant: Variant, config: _Config, cost: float
    ) -> _Path:
        c = len(self.configs) - 1
        if p is None:
            product = variant.accuracy / 100
            return _Path(-1, c, (variant.name,), 1.0, cost, config.latency_s, product)
        factor = self.configs[p.config].variant.factors.get(task.name, 1.0)
        return _Path(
            j,
            c,
            (*p.names, variant.name),
            p.arrivals * factor,
            p.cost + cost,
            p.latency_s + config.latency_s,
            p.product * variant.accuracy / 100,
        )

    def solve(self, step: Step, last: Plan | None, served: float = 1.0) -> Solution:
        """One step; in step "accuracy", at least the share `served`."""
        m, x, c = self.program(step, served)
        start = None
        if last is not None:
            counts = {(a.task, a.variant, a.batch_size): a.workers for a in last.assignments}
            start = (x, np.array([float(counts.get(self._key(k), 0)) for k in self.configs]))
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

    def _key(self, config: _Config) -> tuple[str, str, int]:
        return self.tasks[config.task].name, config.variant.name, config.batch_size

    def program(self, step: Step, served: float = 1.0) -> tuple[Milp, Indices, Indices]:
        """The program of a step, x (configurations,) and c (paths,)."""
        problem, paths = self.problem, self.paths
        m = Milp("min" if step == "hardware" else "max")
        least, most = (0.0, self.limit) if step == "share" else (served, served)
        x = m.variables("x: workers", len(self.configs), upper=self._useful(most), integer=True)
        share = m.variables("share served", 1, least, most)
        c = m.variables("c: shares of paths", len(paths))
        arrivals = np.zeros((len(self.configs), len(paths)))
        for j, p in enumerate(paths):
            throughput = self.configs[p.config].throughput
            arrivals[p.config, j] = problem.planned_demand * p.arrivals / throughput
        if self.configs:
            m.block(
                "(2) throughput",
                (arrivals, np.broadcast_to(c, arrivals.shape)),
                (-1, x[:, None]),
                upper=0,
            )
            of_task = np.array(
                [[k.task == i for k in self.configs] for i in range(len(self.tasks))], float
            )
            per_task = m.variables("workers of tasks", len(self.tasks), integer=True)
            m.block(
                "workers of tasks",
                (of_task, np.broadcast_to(x, of_task.shape)),
                (-1, per_task[:, None]),
                lower=0,
                upper=0,
            )
            m.block("(3) cluster size", (1, x), upper=problem.workers)
            self._fit_alone(m, x, of_task)
        root = self.of_task[0]
        m.block("demand", (1, c[root.start : root.stop]), (-1, share), lower=0, upper=0)
        for i, task in enumerate(self.tasks):
            for child in problem.children(task):
                k = next(k for k, t in enumerate(self.tasks) if t.name == child.name)
                if self.of_task[i]:
                    self._conserve(m, c, self.of_task[i], self.of_task[k], child.name)
        if problem.accuracy_floor:
            m.block(
                "accuracy floor",
                (self.accuracy, c),
                (-problem.accuracy_floor, share),
                lower=0,
            )
        if problem.any_route and self.configs:
            if self.splits:
                self._one_split(m, x, most)
            else:
                self._any_route(m, x)
        swaps = self._swaps(m, x)
        if step == "hardware":
            m.objective((1, x), (1 / (problem.workers + 1), swaps))
        elif step == "accuracy":
            m.objective((self.accuracy / max(served, _EPS), c), (-problem.swap_cost, swaps))
        else:
            m.objective((1, share))
        return m, x, c

    def _alone(self) -> tuple[Floats, Floats]:
        """What one request at the root makes of each task at once, 0 where any worker is enough for
        it; and what a worker of each configuration takes of that in time.

        In the time that the program leaves a task, a worker takes `waiting_factor` batches. A lone
        request waits nowhere before, so 1 − 1 / waiting_factor of the SLO is left for a task if the
        others on its paths have but one request to serve.
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

    def _fit_alone(self, m: Milp, x: Indices, of_task: Floats) -> None:
        """What one request makes of a task is taken in time by the task's workers."""
        many = self.at_once > 0
        if many.any():
            takes = of_task[many] * self.takes
            m.block(
                "room for one request",
                (takes, np.broadcast_to(x, takes.shape)),
                lower=self.at_once[many] * (1 - _EPS),
            )

    def _conserve(self, m: Milp, c: Indices, above: range, below: range, child: str) -> None:
        """The share on a path equals that on its continuations to a child."""
        matrix = np.zeros((len(above), len(below)))
        for j in below:
            matrix[self.paths[j].parent - above.start, j - below.start] = 1
        continued = np.broadcast_to(c[below.start : below.stop], matrix.shape)
        through = c[above.start : above.stop, None]
        m.block(f"paths to {child}", (matrix, continued), (-1, through), lower=0, upper=0)

    def _useful(self, served: float) -> Floats:
        """Workers per configuration, at most: those that could do all that there is to do."""
        problem, arrivals = self.problem, np.zeros(len(self.configs))
        for p in self.paths:
            arrivals[p.config] = max(arrivals[p.config], p.arrivals)
        throughput = np.array([k.throughput for k in self.configs])
        if not math.isfinite(served):
            return np.full(len(self.configs), float(problem.workers))
        enough: Floats = np.ceil(problem.planned_demand * served * arrivals / throughput - _EPS)
        at_once = np.array([self.at_once[k.task] for k in self.configs])
        enough = np.maximum(enough, np.ceil(at_once / np.maximum(self.takes, _EPS) - _EPS))
        return np.minimum(enough, float(problem.workers)).astype(float)

    def _one_split(self, m: Milp, x: Indices, served: float) -> None:
        """(4), (6), (7): what is hosted is of one split."""
        chosen = m.variables("splits", len(self.splits), upper=1, integer=True)
        m.block("one split", (1, chosen), lower=1, upper=1)
        most = self._useful(served)
        useful = [
            [n * (split[k.variant.name] == k.batch_size) for split in self.splits]
            for k, n in zip(self.configs, most, strict=True)
        ]
        m.block(
            "(7) configurations of the split",
            (1, x[:, None]),
            (-np.array(useful), np.broadcast_to(chosen, (len(x), len(chosen)))),
            upper=0,
        )

    def _any_route(self, m: Milp, x: Indices) -> None:
        """(4) One batch size per variant; (6), (7) for all paths that hosted ones could form."""
        hosted = m.variables("hosted", len(self.configs), upper=1, integer=True)
        m.block(
            "workers of the hosted",
            (1, x[:, None]),
            (-self.problem.workers, hosted[:, None]),
            upper=0,
        )
        names = list(dict.fromkeys(k.variant.name for k in self.configs))
        of = np.array([[k.variant.name == name for k in self.configs] for name in names], float)
        m.block("(4) batch size", (of, np.broadcast_to(hosted, of.shape)), upper=1)
        if self.too_slow:
            both = np.zeros((len(self.too_slow), len(self.configs)))
            for row, (path, late) in enumerate(self.too_slow):
                both[row, path + late] = 1
            lengths = [len(path) for path, _ in self.too_slow]
            m.block("(7) any path", (both, np.broadcast_to(hosted, both.shape)), upper=lengths)

    def _swaps(self, m: Milp, x: Indices) -> Indices:
        """Workers that have another variant now: what is loaded beyond the idle workers."""
        problem, current = self.problem, self.problem.current
        swaps = m.variables(
            "swaps", 1, upper=math.inf if problem.max_swaps is None else problem.max_swaps
        )
        if current is None or not self.configs:
            return swaps
        keys = list(dict.fromkeys(self._key(k)[:2] for k in self.configs))
        of = np.array([[self._key(k)[:2] == key for k in self.configs] for key in keys], float)
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
        """What a solution says, without workers that it has no use for."""
        problem = self.problem
        c, hosted = np.zeros(len(self.paths)), np.zeros(len(self.configs), int)
        load = np.zeros(len(self.configs))
        if solution.found:
            hosted = solution[self.x].round().astype(int)
            c = np.maximum(solution[self.c], 0.0)
        for j, p in enumerate(self.paths):
            # A solver's rounding may let a trickle through what has no workers.
            if not hosted[p.config] or (p.parent >= 0 and not c[p.parent]):
                c[j] = 0.0
            load[p.config] += problem.planned_demand * c[j] * p.arrivals
        assignments = []
        for config, most, of_config in zip(self.configs, hosted, load.tolist(), strict=True):
            useful = math.ceil(of_config / config.throughput - _EPS)
            if self.at_once[config.task]:
                useful = int(most)  # a lone request needs them all
            if workers := min(int(most), useful):
                key = self._key(config)
                assignments.append(
                    Assignment(*key, workers, of_config, config.throughput, config.latency_s)
                )
        root = self.of_task[0]
        served = min(float(c[root.start : root.stop].sum()), 1.0)
        shed = 1 - served if step == "share" and served < 1 - _EPS else 0.0
        accuracy = float(self.accuracy @ c) / served if served else 0.0
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
        swaps = _swaps_of(problem, made.loaded)
        return replace(made, swaps=swaps, explanation=_explain(problem, made, swaps))

    def _shares(self, c: Floats) -> tuple[PathShare, ...]:
        shares: dict[tuple[str, ...], PathShare] = {}
        for j in self.sinks:
            if c[j] > 0:
                p = self.paths[j]
                other = shares.get(p.names, PathShare(p.names, 0.0, self.path_accuracy(p), 0.0))
                latency_s = max(other.latency_s, p.latency_s)
                share = other.share + float(c[j])
                shares[p.names] = replace(other, share=share, latency_s=latency_s)
        return tuple(sorted(shares.values(), key=lambda s: (-s.accuracy, s.variants)))


def _best(task: Task) -> tuple[Variant, ...]:
    """The most accurate variants (Eqs. 8–10)."""
    top = max(v.accuracy for v in task.variants)
    return tuple(v for v in task.variants if v.accuracy == top)


def _swaps_of(problem: Problem, loaded: Mapping[tuple[str, str], int]) -> int:
    if problem.current is None:
        return 0
    loads = sum(max(n - problem.current.get(key, 0), 0) for key, n in loaded.items())
    return max(loads - max(problem.workers - sum(problem.current.values()), 0), 0)


def _explain(problem: Problem, made: Plan, swaps: int) -> str:
    said = {
        "hardware": "Hardware scaling: the most accurate variants suffice.",
        "accuracy": "Accuracy scaling: the most accurate variants do not suffice.",
        "share": f"Not all demand can be served: {100 * made.shed_share:.3g} % is shed.",
    }[made.step]
    margin = ""
    if problem.headroom_quantile is not None:
        margin = f" (average {problem.demand:.5g}, quantile {problem.headroom_quantile:g} of "
        margin += f"{problem.headroom_period_s:g} s)"
    parts = [
        said,
        f"{made.planned_demand:.5g} req/s{margin} on {made.workers} of {problem.workers} workers, "
        f"accuracy {made.accuracy:.4g} %.",
    ]
    if problem.current is not None:
        parts.append(f"{swaps} workers change their variant.")
    return " ".join(parts)
