"""From a solution of the program to a plan: slots of workers, shares, times, words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ray_slo.core.cluster import Assigned
from ray_slo.core.trees import root_and_class
from ray_slo.planning.auto.graph import Config
from ray_slo.planning.auto.pack import Shares, pack
from ray_slo.planning.auto.plan import Plan, Prices, Slot, Step
from ray_slo.planning.auto.prices import prices_of
from ray_slo.planning.auto.problem import Kind, Problem
from ray_slo.planning.auto.program import EPS, Program
from ray_slo.planning.milp import Solution


@dataclass(frozen=True)
class Use:
    """A configuration that is in use, its requests per second, and the nodes that use it."""

    config: Config
    rate: float
    nodes: tuple[tuple[str, str], ...]

    @property
    def busy(self) -> float:
        return self.rate / self.config.throughput


def uses_of(program: Program, solution: Solution) -> list[Use]:
    """One for each variant and kind, with the largest batch that is in use: the smaller ones do no
    more in time."""
    g = program.graph
    rates: dict[tuple[str, str], float] = {}
    users: dict[tuple[str, str], list[tuple[str, str]]] = {}
    largest: dict[tuple[str, str], Config] = {}
    for node, of in g.nodes.items():
        for k, busy in zip(of.configs, solution[program.w[node]].tolist(), strict=True):
            config = g.configs[k]
            rate = busy * config.throughput
            if rate <= EPS * program.problem.rate(node[0]):
                continue  # rounding of the solver
            pair = config.variant, config.kind
            rates[pair] = rates.get(pair, 0.0) + rate
            users.setdefault(pair, []).append(node)
            if pair not in largest or largest[pair].batch_size < config.batch_size:
                largest[pair] = config
    return [
        Use(largest[pair], rate, tuple(dict.fromkeys(users[pair]))) for pair, rate in rates.items()
    ]


class Unpacked(Exception):
    """Variants do not fit on the workers of `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def build(program: Program, step: Step, solution: Solution) -> Plan:
    """The plan of a solution, without workers that it has no use for.

    Raises:
        Unpacked: the variants of a kind were not packed on its workers.
    """
    problem = program.problem
    uses = uses_of(program, solution) if solution.found else []
    slots: list[Slot] = []
    workers: dict[str, int] = {}
    for i, kind in enumerate(problem.kinds):
        of_kind = [use for use in uses if use.config.kind == kind.name]
        most = round(float(solution[program.n][i])) if solution.found else kind.min_workers
        rho = program.occupancy.get(kind.name, 1.0)
        made = (_shared if problem.sharing else _apart)(problem, kind, of_kind, most, rho)
        slots += made
        workers[kind.name] = max(len(made), _least(problem, kind))
    shares = dict.fromkeys(problem.streams, 1.0) | dict.fromkeys(program.graph.too_slow, 0.0)
    accuracy = 0.0
    if solution.found:
        found = solution[program.share].tolist()
        shares |= {s: _share(x) for s, x in zip(program.graph.streams, found, strict=False)}
        accuracy = _accuracy(program, solution)
    gap = abs(solution.bound - solution.objective) / max(abs(solution.objective), 1e-9)
    return Plan(
        workers=workers,
        slots=tuple(slots),
        accuracy=accuracy,
        served=shares,
        bad_rate=_shed(problem, shares),
        cost_per_hour=sum(kind.price_per_hour * workers[kind.name] for kind in problem.kinds),
        prices=prices_of(program, solution) if solution.found else Prices(),
        rest_s=rest_of(program, uses),
        step=step,
        explanation=_explain(problem, step, workers, shares, accuracy),
        swaps=round(float(solution[program.swaps][0])) if solution.found else 0,
        gap=gap if math.isfinite(gap) else math.inf,
    )


def _share(found: float) -> float:
    return 1.0 if found > 1 - EPS else max(found, 0.0)


def _least(problem: Problem, kind: Kind) -> int:
    """Workers that are there, whether they have a use or not."""
    present = problem.present
    return kind.min_workers if present is None else present.get(kind.name, 0)


def _shared(problem: Problem, kind: Kind, uses: list[Use], most: int, rho: float) -> list[Slot]:
    """Workers with several variants each: the fewest on which they can be packed."""
    by_name = {use.config.variant: use for use in uses}
    if not by_name:
        return []
    busy = {name: use.busy for name, use in by_name.items()}
    needs = {name: problem.variant[name].memory_mb.get(kind.name, 0.0) for name in busy}
    fewest = max(math.ceil(sum(busy.values()) / rho - EPS), _least(problem, kind), 1)
    for workers in range(min(fewest, most), most + 1):
        made = pack(busy, workers, needs, kind.memory_mb, rho)
        if made is not None:
            return [_slot(kind, by_name, shares) for shares in made if shares]
    raise Unpacked(kind.name)


def _apart(problem: Problem, kind: Kind, uses: list[Use], most: int, rho: float) -> list[Slot]:
    """Workers with one variant each; those to spare go where the load of a worker is highest."""
    if not uses:
        return []
    hosts = [max(math.ceil(use.busy / rho - EPS), 1) for use in uses]
    spare = min(most, _least(problem, kind)) - sum(hosts)
    for _ in range(spare):
        i = max(range(len(uses)), key=lambda i: uses[i].busy / hosts[i])
        hosts[i] += 1
    by_name = {use.config.variant: use for use in uses}
    return [
        _slot(kind, by_name, {use.config.variant: use.busy / n})
        for use, n in zip(uses, hosts, strict=True)
        for _ in range(n)
    ]


def _slot(kind: Kind, uses: Mapping[str, Use], shares: Shares) -> Slot:
    parts = tuple(
        Assigned(name, uses[name].config.batch_size, share * uses[name].config.throughput)
        for name, share in shares.items()
    )
    return Slot(kind.name, parts, tuple(shares))


def _accuracy(program: Program, solution: Solution) -> float:
    """Mean over the requests that are served, percent."""
    problem = program.problem
    total = served = 0.0
    for i, stream in enumerate(program.graph.streams):
        rate = problem.rate(stream)
        total += rate * float(program.accuracy(stream) @ solution[program.c[stream]])
        served += rate * float(solution[program.share][i])
    return total / served if served > 0 else 0.0


def _shed(problem: Problem, shares: Mapping[str, float]) -> float:
    """Share of all demand that is not planned for."""
    total = sum(problem.rate(s) for s in problem.streams)
    shed = sum(problem.rate(s) * (1 - shares[s]) for s in problem.streams)
    return shed / total if total else 0.0


def rest_of(program: Program, uses: list[Use]) -> dict[str, dict[str, float]]:
    """Time after each task, by class: the slowest batches in use below it, or the fastest there
    are where none is."""
    problem, g = program.problem, program.graph
    rest: dict[str, dict[str, float]] = {}
    for tree in problem.trees:
        least = g.least_s(tree)
        for stream, _ in tree.streams():
            own = {
                task.name: max(
                    (u.config.time_s for u in uses if (stream, task.name) in u.nodes),
                    default=least[task.name],
                )
                for task in tree.order
            }
            after = g.rest_s(tree, own)
            for name, own_s in own.items():
                below = after[name] - own_s if math.isfinite(after[name]) else 0.0
                rest.setdefault(name, {})[root_and_class(stream)[1]] = below
    return rest


_SAID = {
    "hardware": "The most accurate variants suffice.",
    "accuracy": "The most accurate variants do not suffice for all requests.",
    "cost": "The cheapest workers that keep the accuracy floor.",
    "share": "Not all demand can be served",
}


def _explain(
    problem: Problem,
    step: Step,
    workers: Mapping[str, int],
    shares: Mapping[str, float],
    accuracy: float,
) -> str:
    said = _SAID[step]
    if step == "share":
        said += f": {100 * _shed(problem, shares):.3g} % is shed."
    rate = sum(problem.rate(s) for s in problem.streams)
    counts = ", ".join(f"{n} {kind}" for kind, n in workers.items() if n) or "no workers"
    return f"{said} {rate:.5g} req/s on {counts}, accuracy {accuracy:.4g} %."
