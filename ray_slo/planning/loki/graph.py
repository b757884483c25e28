"""Configurations, and the paths that they form.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ray_slo.planning.loki.problem import Problem, Task, Variant, cost, least_rest
from ray_slo.planning.milp import Floats


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

    def __init__(self, problem: Problem, most_accurate: bool = False) -> None:
        self.problem = problem
        self.tasks = [replace(t, variants=best(t)) if most_accurate else t for t in problem.order]
        self.configs: list[Config] = []
        self.paths: list[Path] = []
        self.of_task: list[range] = []
        self.too_slow: list[tuple[list[int], list[int]]] = []
        self.splits: list[dict[str, int]] = []
        if problem.any_route:
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
