"""Configurations, the nodes that they serve, and the ways to split an SLO among a path's tasks.

A *configuration* is a variant on a kind of worker with a batch size. Its latency and its throughput
are constants. A *node* is a task of a stream. A *path* is a sequence of variants from the root.
Shares of requests and accuracies depend only on paths. The program does not need paths of
configurations, of which there are many more. A request may meet any of the hosted configurations,
so all their combinations must be fast enough (Loki's `any_route`). This is so exactly if every node
has a time *budget*, such that the budgets on a path sum to at most the SLO and all configurations
of a node keep its budget.

If all children of the root are last tasks, the budget of the root leaves the rest of the SLO for
the others. Then there are few *splits* of the SLO that no other split dominates. In deeper trees, a
budget is chosen for each node.

Dominated configurations are left out: batches that are no faster per request than smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning.auto.problem import Problem, Size, Variant
from ray_slo.planning.auto.sizes import size_of
from ray_slo.planning.milp import Floats

NO_TIME = 1e-12
"""Tolerance for rounding errors in sums of latencies, in seconds."""


@dataclass(frozen=True)
class Config:
    """A variant on a kind of worker with a batch size.

    Attributes:
        latency_s: latency of a full batch, in seconds.
        throughput: requests per second of one worker.
        time_s: time of a request in the task, with waiting and communication, in seconds.
        size: size class of the requests, if the model's demand is known by size.
    """

    variant: str
    kind: str
    batch_size: int
    latency_s: float
    throughput: float
    time_s: float
    size: Size | None = None


@dataclass(frozen=True)
class Path:
    """A sequence of variants from the root to a task.

    Attributes:
        parent: index of the path without its last task. −1 at the root.
        task: the last task.
        variants: one variant for each task on the path.
        arrivals: number of requests at `task` per request at the root, if all take this path.
        product: product of the variants' accuracies, 0 to 1.
    """

    parent: int
    task: str
    variants: tuple[str, ...]
    arrivals: float
    product: float


@dataclass(frozen=True)
class Node:
    """A task of a stream.

    Attributes:
        configs: indices of the configurations that are fast enough if the other tasks on the paths
            take the least time.
        paths: indices of the tree's paths that end here, by variant.
        most: largest number of requests at this task per request at the root.
    """

    stream: str
    task: TreeTask
    configs: tuple[int, ...]
    paths: dict[str, tuple[int, ...]]
    most: float


class Graph:
    """The configurations, paths and nodes of the program of one problem.

    Args:
        problem: the planning problem.
        most_accurate: whether only the most accurate variants are used.
        longest_s: longest allowed batch, in seconds, by kind.

    Attributes:
        variants: the variants that are used, by model.
        configs: configurations of all models. For a variant and a kind, the batch size rises.
        streams: streams with a demand whose fastest path is fast enough.
        too_slow: time of the fastest path, in seconds, of the other streams with a demand.
        paths: paths by tree.
        nodes: nodes by stream and task, parents first.
        splits: the splits of the SLO that no other dominates, by stream. A split is a budget in
            seconds for each task. None if a child of the root has children.
    """

    def __init__(
        self,
        problem: Problem,
        most_accurate: bool = False,
        longest_s: Mapping[str, float] | None = None,
    ) -> None:
        self.problem, self.longest_s = problem, longest_s or {}
        self.excluded: dict[tuple[str, str], str] = {}
        self.variants = {
            model.name: best(model.variants) if most_accurate else model.variants
            for model in problem.models
        }
        self.configs: list[Config] = []
        self.of_model: dict[str, list[int]] = {}
        for model in problem.models:
            first = len(self.configs)
            for size in (None, *model.sizes):
                for variant in self.variants[model.name]:
                    for kind in problem.kinds:
                        self.configs += self._options(model.name, variant, kind.name, size)
            self.of_model[model.name] = list(range(first, len(self.configs)))
        self.paths = {tree.name: self._paths(tree) for tree in problem.trees}
        self.streams: list[str] = []
        self.too_slow: dict[str, float] = {}
        self.nodes: dict[tuple[str, str], Node] = {}
        for stream in problem.streams:
            if problem.rate(stream) > 0:
                self._add_stream(stream)
        self.splits = {stream: self._splits(stream) for stream in self.streams}
        self._leave_out_short()

    def _leave_out_short(self) -> None:
        """Leave out batch sizes that are not the largest in time for any budget. If a model has
        several nodes, a batch size stays if it is the largest for one of them, because all of them
        may need the same."""
        keep: dict[str, set[int]] = {model.name: set() for model in self.problem.models}
        for (stream, task), node in self.nodes.items():
            splits = self.splits[stream]
            if splits is None:
                keep[node.task.model].update(node.configs)
                continue
            for budget_s in {split[task] for split in splits}:
                in_time = [k for k in node.configs if self.configs[k].time_s <= budget_s + NO_TIME]
                largest = {(self.configs[k].variant, self.configs[k].kind): k for k in in_time}
                keep[node.task.model].update(largest.values())
        for key, node in self.nodes.items():
            kept = tuple(k for k in node.configs if k in keep[node.task.model])
            self.nodes[key] = replace(node, configs=kept)

    def _options(
        self, model: str, variant: Variant, kind_name: str, size: Size | None
    ) -> list[Config]:
        """Return the configurations of a variant on a kind. Each batch size is faster per request
        than the smaller ones."""
        problem, kind = self.problem, self.problem.kind[kind_name]
        profile = variant.profiles.get(kind_name)
        if profile is None or not problem.most(kind):
            return []
        needs_mb = variant.memory_mb.get(kind_name, 0.0)
        if needs_mb > kind.memory_mb:
            self.excluded[variant.name, kind_name] = (
                f"{variant.name} needs {needs_mb:g} MB, {kind_name} has {kind.memory_mb:g} MB"
            )
            return []
        if problem.group_of.get(model, kind.group) != kind.group:
            return []
        items = problem.model[model].items if size is None else size.items
        more = 0.0 if size is None else size.largest - items  # the largest request's extra items
        most = max(int((profile.max_batch_size - more) / items + NO_TIME), 1)
        found: list[Config] = []
        for b in sorted({min(b, most) for b in problem.batch_sizes}):
            usual, largest = (math.ceil(b * items + n - 1e-9) for n in (0.0, more))
            throughput = b / profile.latency(min(usual, profile.max_batch_size))
            latency_s = profile.latency(min(largest, profile.max_batch_size))
            if largest > profile.max_batch_size and size is not None:
                break
            if latency_s > self.longest_s.get(kind_name, math.inf) * (1 + NO_TIME):
                break
            if found and throughput <= found[-1].throughput:
                continue
            if found and latency_s <= found[-1].latency_s:
                found.pop()
            time_s = problem.waiting_factor * latency_s + problem.communication_s
            found.append(Config(variant.name, kind_name, b, latency_s, throughput, time_s, size))
        return found

    def _paths(self, tree: Tree) -> list[Path]:
        found: list[Path] = []
        for task in tree.order:
            above = [(j, p) for j, p in enumerate(found) if p.task == task.parent]
            for variant in self.variants[task.model]:
                accuracy = variant.accuracy / 100
                if task.parent is None:
                    found.append(Path(-1, task.name, (variant.name,), 1.0, accuracy))
                for j, p in above:
                    factor = tree[p.task].factor(p.variants[-1], task.name)
                    names = (*p.variants, variant.name)
                    found.append(
                        Path(j, task.name, names, p.arrivals * factor, p.product * accuracy)
                    )
        return found

    def _add_stream(self, stream: str) -> None:
        tree, slo_s = self.problem.tree_of(stream), self.problem.slo_s(stream)
        least = self.least_s(stream)
        below = {t: x - least[t] for t, x in self.rest_s(tree, least).items()}
        longest_s = least[tree.root] + below[tree.root]
        if longest_s > slo_s + NO_TIME:
            self.too_slow[stream] = longest_s
            return
        self.streams.append(stream)
        for task in tree.order:
            above_s = sum(least[t] for t in tree.path(task.name)[:-1])
            room_s = slo_s - above_s - below[task.name] + NO_TIME
            of_variant: dict[str, tuple[int, ...]] = {}
            arrivals = [0.0]
            for j, path in enumerate(self.paths[tree.name]):
                if path.task == task.name:
                    name = path.variants[-1]
                    of_variant[name] = (*of_variant.get(name, ()), j)
                    arrivals.append(path.arrivals)
            able = self.able(stream, task)
            fast = [i for i in able if self.configs[i].time_s <= room_s]
            self.nodes[stream, task.name] = Node(
                stream, task, tuple(fast), of_variant, max(arrivals)
            )

    def able(self, stream: str, task: TreeTask) -> list[int]:
        """Return the configurations for a task of a stream, and for the size class of its
        requests."""
        size = size_of(self.problem, stream) if task.parent is None else None
        return [i for i in self.of_model[task.model] if self.configs[i].size == size]

    def least_s(self, stream: str) -> dict[str, float]:
        """Return the least time in each task of a stream, in seconds."""
        return {
            task.name: min(
                (self.configs[i].time_s for i in self.able(stream, task)), default=math.inf
            )
            for task in self.problem.tree_of(stream).order
        }

    def rest_s(self, tree: Tree, own_s: dict[str, float]) -> dict[str, float]:
        """Return the time from entering a task to the end of its last descendant, in seconds, by
        task. `own_s` is the time in each task."""
        rest: dict[str, float] = {}
        for task in reversed(tree.order):
            below = [rest[child] for child in tree.children(task.name)]
            rest[task.name] = own_s[task.name] + max(below, default=0.0)
        return rest

    def times_s(self, stream: str, task: str) -> list[float]:
        """Return the different times of a node's configurations, in seconds, ascending."""
        return sorted({self.configs[i].time_s for i in self.nodes[stream, task].configs})

    def _splits(self, stream: str) -> list[dict[str, float]] | None:
        tree, slo_s = self.problem.tree_of(stream), self.problem.slo_s(stream)
        root, *below = [task.name for task in tree.order]
        if not below:
            return [{root: slo_s}]
        if any(tree.parents[name] != root for name in below):
            return None
        times = {name: self.times_s(stream, name) for name in (root, *below)}
        found: list[tuple[list[int], dict[str, float]]] = []
        for mine in times[root]:
            budgets = {root: mine} | dict.fromkeys(below, slo_s - mine)
            # The number of a node's times within its budget identifies the allowed batch sizes.
            kept = [
                sum(t <= budgets[name] + NO_TIME for t in of_node)
                for name, of_node in times.items()
            ]
            if not all(kept):
                continue
            found = [
                other for other in found if any(a > b for a, b in zip(other[0], kept, strict=True))
            ]
            if not any(all(a >= b for a, b in zip(k, kept, strict=True)) for k, _ in found):
                found.append((kept, budgets))
        return [budgets for _, budgets in found]

    def at_once(self, node: tuple[str, str]) -> float:
        """Return the largest number of requests that one request at the root makes at a task, on
        paths that are fast enough."""
        stream, name = node
        tree, least = self.problem.tree_of(stream), self.least_s(stream)
        below_s = self.rest_s(tree, least)[name] - least[name]
        fastest = {
            self.configs[k].variant: self.configs[k].time_s
            for task in tree.order
            for k in sorted(self.able(stream, task), key=lambda k: -self.configs[k].time_s)
        }
        room_s = self.problem.slo_s(stream) - below_s + NO_TIME
        paths = [p for p in self.paths[tree.name] if p.task == name]
        in_time = [p for p in paths if sum(fastest.get(v, math.inf) for v in p.variants) <= room_s]
        return max((p.arrivals for p in in_time), default=0.0)

    def throughput(self, node: tuple[str, str]) -> Floats:
        """Return the requests per second of one worker, for each configuration of a node."""
        return np.array([self.configs[k].throughput for k in self.nodes[node].configs])

    def accuracy(self, tree: Tree, path: Path) -> float:
        """Return the accuracy of a path, in percent."""
        return tree.path_accuracies.get(path.variants, 100 * path.product)

    def sinks(self, tree: Tree) -> list[str]:
        return [task.name for task in tree.order if not tree.children(task.name)]


def best(variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Return the most accurate variants."""
    top = max(v.accuracy for v in variants)
    return tuple(v for v in variants if v.accuracy == top)
