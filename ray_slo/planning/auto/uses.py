"""Which configurations a solution uses, for what rate, and how long their requests may wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray_slo.core.trees import root_and_class
from ray_slo.planning.auto.graph import NO_TIME, Config
from ray_slo.planning.auto.problem import Size
from ray_slo.planning.auto.program import EPS, Program
from ray_slo.planning.milp import Solution


@dataclass(frozen=True)
class Use:
    """A configuration that is in use.

    Attributes:
        rate: requests per second.
        dispersion: of the counts of its arrivals.
        nodes: (stream, task), whose requests these are.
        wait_s: how long a request may wait before its batch starts: the time that the task has
            beyond the batch itself, and its part of what the SLO leaves over.
    """

    config: Config
    rate: float
    dispersion: float
    nodes: tuple[tuple[str, str], ...]
    wait_s: float = 0.0

    @property
    def pair(self) -> tuple[str, str]:
        return self.config.variant, self.config.kind

    @property
    def busy(self) -> float:
        """Workers that it keeps busy."""
        return self.rate / self.config.throughput


Key = tuple[str, str, Size | None]  # variant, kind, class of sizes


def together(uses: Sequence[Use]) -> list[Use]:
    """One for each variant and kind, whatever the sizes: a worker that has it serves all."""
    by_pair: dict[tuple[str, str], list[Use]] = {}
    for use in uses:
        by_pair.setdefault(use.pair, []).append(use)
    return [its[0] if len(its) == 1 else _one(its) for its in by_pair.values()]


def _one(uses: Sequence[Use]) -> Use:
    rate, busy = sum(use.rate for use in uses), sum(use.busy for use in uses)
    configs = [use.config for use in uses]
    config = replace(
        configs[0],
        batch_size=max(c.batch_size for c in configs),
        latency_s=max(c.latency_s for c in configs),
        throughput=rate / busy,
        time_s=max(c.time_s for c in configs),
        size=None,
    )
    dispersion = sum(use.rate * use.dispersion for use in uses) / rate
    nodes = tuple(dict.fromkeys(node for use in uses for node in use.nodes))
    # Requests of one variant wait for each other, whatever their sizes: they have one deadline.
    return Use(config, rate, dispersion, nodes, max(use.wait_s for use in uses))


def uses_of(program: Program, solution: Solution) -> list[Use]:
    """One for each variant, kind and class of sizes, with the largest batch that is in time for all
    its users: the smaller ones, which the program may choose where it has time to spare, do no
    more.

    A request at the root makes m at a task, and they come together: counts that are m times those
    of the root have m times its dispersion.
    """
    g, problem = program.graph, program.problem
    parts: dict[Key, list[tuple[float, float, tuple[str, str], Config]]] = {}
    for node, of in g.nodes.items():
        stream = problem.demand[node[0]]
        for k, busy in zip(of.configs, solution[program.w[node]].tolist(), strict=True):
            config = g.configs[k]
            rate = busy * config.throughput
            if rate > EPS * stream.rate:  # less is the solver's rounding
                together = stream.dispersion * max(of.most, 1.0)
                key = config.variant, config.kind, config.size
                parts.setdefault(key, []).append((rate, together, node, config))
    found = []
    for of_pair in parts.values():
        rate = sum(part[0] for part in of_pair)
        dispersion = sum(part[0] * part[1] for part in of_pair) / rate
        nodes = tuple(dict.fromkeys(part[2] for part in of_pair))
        found.append(
            Use(_largest(program, solution, of_pair[0][3], nodes), rate, dispersion, nodes)
        )
    left = _left_s(program, found)
    return [Use(u.config, u.rate, u.dispersion, u.nodes, _wait_s(program, u, left)) for u in found]


def _largest(
    program: Program, solution: Solution, like: Config, nodes: Sequence[tuple[str, str]]
) -> Config:
    """The largest batch of this variant and kind that keeps the budgets of the nodes."""
    g = program.graph
    budget_s = min(program.budget_s(node, solution) for node in nodes) + NO_TIME
    return max(
        (
            config
            for config in (g.configs[k] for k in g.nodes[nodes[0]].configs)
            if (config.variant, config.kind) == (like.variant, like.kind)
            and (config.time_s <= budget_s or config is like)
        ),
        key=lambda config: config.batch_size,
    )


def _wait_s(program: Program, use: Use, left: dict[tuple[str, str], float]) -> float:
    own = (program.problem.waiting_factor - 1) * use.config.latency_s
    return own + min(left[node] for node in use.nodes)


def _left_s(program: Program, uses: Sequence[Use]) -> dict[tuple[str, str], float]:
    """By node, what the SLO leaves beyond the slowest path through it, shared among its tasks."""
    problem, g = program.problem, program.graph
    left: dict[tuple[str, str], float] = {}
    for stream in g.streams:
        tree = problem.tree_of(stream)
        own = times_of(program, uses, stream)
        after = g.rest_s(tree, own)
        depth = max(len(tree.path(task.name)) for task in tree.order)
        for task in tree.order:
            before = sum(own[name] for name in tree.path(task.name)[:-1])
            spare = problem.slo_s(stream) - before - after[task.name]
            left[stream, task.name] = max(spare, 0.0) / depth
    return left


def times_of(program: Program, uses: Sequence[Use], stream: str) -> dict[str, float]:
    """Time in each task of a stream: the slowest batches that it uses; the fastest there are where
    it uses none."""
    tree = program.problem.tree_of(stream)
    least = program.graph.least_s(stream)
    return {
        task.name: max(
            (u.config.time_s for u in uses if (stream, task.name) in u.nodes),
            default=least[task.name],
        )
        for task in tree.order
    }


def rest_of(program: Program, uses: Sequence[Use]) -> dict[str, dict[str, float]]:
    """Time that the rest of a path needs after each task, by class."""
    rest: dict[str, dict[str, float]] = {}
    for tree in program.problem.trees:
        for stream, _ in tree.streams():
            own = times_of(program, uses, stream)
            after = program.graph.rest_s(tree, own)
            for name, own_s in own.items():
                below = after[name] - own_s if math.isfinite(after[name]) else 0.0
                rest.setdefault(name, {})[root_and_class(stream)[1]] = below
    return rest
