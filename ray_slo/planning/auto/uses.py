"""The configurations that a solution uses, with their rates and allowed waiting times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ray_slo.planning.auto.graph import NO_TIME, Config
from ray_slo.planning.auto.problem import Size
from ray_slo.planning.auto.program import EPS, Program
from ray_slo.planning.milp import Solution


@dataclass(frozen=True)
class Use:
    """A configuration that is in use.

    Attributes:
        rate: requests per second.
        dispersion: index of dispersion of its arrivals.
        nodes: pairs (stream, task) of the requests.
        wait_s: time that a request may wait before its batch starts, in seconds. It is the wait
            that the plan counts for the task, plus a part of the SLO that no task needs.
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
        """Mean number of workers that it keeps busy."""
        return self.rate / self.config.throughput


Key = tuple[str, str, Size | None]  # variant, kind, class of sizes


def together(uses: Sequence[Use]) -> list[Use]:
    """Return one use for each variant and kind, for all sizes together: a worker with the variant
    serves all sizes."""
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
    # Requests of one variant may wait for each other, of whatever size: their SLO is the same.
    return Use(config, rate, dispersion, nodes, max(use.wait_s for use in uses))


def uses_of(program: Program, solution: Solution) -> list[Use]:
    """Return one use for each variant, kind and size class. It has the largest batch that is in
    time for all its nodes. The program may choose smaller batches if workers have time left, but
    these have no advantage.

    A request at the root makes m requests at a task, which arrive together. So their counts have m
    times the dispersion of those at the root.
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


def hosts_alone(program: Program, solution: Solution) -> dict[tuple[str, str], int]:
    """Return the number of workers that host each variant of the tasks to which `fits_alone`
    applies."""
    g = program.graph
    configs = [g.configs[k] for node in program.crowds for k in g.nodes[node].configs]
    pairs = {(config.variant, config.kind) for config in configs}
    hosts = zip(program.pairs, solution[program.x].tolist(), strict=False)
    return {pair: round(n) for pair, n in hosts if pair in pairs}


def idle_uses(
    program: Program, kind: str, hosts: Mapping[tuple[str, str], int], uses: Sequence[Use]
) -> list[Use]:
    """Return uses without requests, for variants of a kind that are hosted only for the requests
    that one request at the root makes at once (`fits_alone`)."""
    busy = {use.pair for use in uses}
    g, found = program.graph, list[Use]()
    for pair, workers in hosts.items():
        if workers and pair[1] == kind and pair not in busy:
            node, of = next(n for n in g.nodes.items() if pair[0] in n[1].paths)
            configs = [g.configs[k] for k in of.configs]
            config = [c for c in configs if (c.variant, c.kind) == pair][-1]
            found.append(Use(config, 0.0, 1.0, (node,)))
    return found


def _largest(
    program: Program, solution: Solution, like: Config, nodes: Sequence[tuple[str, str]]
) -> Config:
    """Return the configuration with the largest batch of this variant and kind that keeps the
    budgets of the nodes."""
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
    """Return the part of the SLO that the slowest path through a node leaves, divided by the number
    of its tasks, in seconds, by node."""
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
    """Return the time in each task of a stream, in seconds: that of its slowest batch in use. If
    none is in use, it is that of the fastest configuration."""
    tree = program.problem.tree_of(stream)
    least = program.graph.least_s(stream)
    return {
        task.name: max(
            (u.config.time_s for u in uses if (stream, task.name) in u.nodes),
            default=least[task.name],
        )
        for task in tree.order
    }
