"""Conversion of a solution of the program to a plan: slots of workers, shares, times, texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ray_slo.planning.auto.headroom import Pool, late_by_stream, pools_of
from ray_slo.planning.auto.hosts import apart, least_workers, shared
from ray_slo.planning.auto.limits import Found, Limits, Pair, Room
from ray_slo.planning.auto.plan import Plan, Prices, Slot, Step
from ray_slo.planning.auto.prices import prices_of
from ray_slo.planning.auto.problem import Problem
from ray_slo.planning.auto.program import EPS, Program
from ray_slo.planning.auto.taken import both, most_busy, room
from ray_slo.planning.auto.uses import Use, hosts_alone, idle_uses, together, uses_of
from ray_slo.planning.milp import Solution

_AGAIN = 0.8
"""If a pool's room for bursts turns out too small, the next one is computed for this share of the
allowed bad rate. The room depends on the uses, and these differ a little between programs."""


@dataclass(frozen=True)
class Built:
    """A plan and its origin.

    Attributes:
        unpriced: the plan without prices.
        program, solution: the program and the solution that it comes from.
        late: share of each stream's requests that bursts make late.
        pools: the pools of workers that the plan makes.
        workers: number of workers in each pool.
        most: largest allowed number of workers in each pool.
    """

    unpriced: Plan
    program: Program
    solution: Solution
    late: Mapping[str, float]
    pools: Mapping[Pair, Pool]
    workers: Mapping[Pair, int]
    most: Mapping[Pair, int]

    @property
    def limits(self) -> Limits:
        return self.program.limits

    @property
    def plan(self) -> Plan:
        """The plan with its prices."""
        prices = prices_of(self.program, self.solution)
        found = Found.of(self.program.problem, self.limits)
        return replace(self.unpriced, prices=prices, found=found)

    def too_full(self, target: float) -> dict[Pair, Room]:
        """Return the room that pools with too little room need. Room is for interruptions of spot
        workers, and for bursts if these make more than the share `target` of a stream's requests
        late."""
        rooms = {pair: self._room(pair, pool, target) for pair, pool in self.pools.items()}
        return {pair: room for pair, room in rooms.items() if room is not None}

    def _room(self, pair: Pair, pool: Pool, target: float) -> Room | None:
        problem, workers, most = self.program.problem, self.workers[pair], self.most[pair]
        there = problem.kind[pair[1]].there
        if there >= 1:
            late = problem.headroom and max(self.late.values(), default=0.0) > target
            if not late or not pool.too_full(workers, target):
                return None
            asked = _AGAIN * target if pair in self.limits.rooms else target
            return pool.allowed(workers, most, asked)
        bursts = Room()
        if problem.headroom:
            bursts = pool.allowed(math.ceil(max(pool.busy, 1.0)), most, target)
        needed = (pool.busy + bursts.reserve) / bursts.slope  # number of present workers
        if most_busy(workers, there, target) >= needed * (1 - EPS):
            return None
        return both(bursts, room(needed, there, target, most))


def build(program: Program, step: Step, solution: Solution) -> Built:
    """Return the plan of a solution, without workers that it does not need.

    Raises:
        Unpacked: the variants do not fit into the time and memory of the planned workers.
        Blocked: some requests cannot wait for the batches of others.
    """
    problem = program.problem
    uses = uses_of(program, solution) if solution.found else []
    alone = hosts_alone(program, solution) if solution.found else {}
    idle = {kind.name: idle_uses(program, kind.name, alone, uses) for kind in problem.kinds}
    slots: list[Slot] = []
    workers: dict[str, int] = {}
    for i, kind in enumerate(problem.kinds):
        of_kind = together([use for use in uses if use.config.kind == kind.name])
        most = round(float(solution[program.n][i])) if solution.found else kind.min_workers
        if problem.sharing:
            made = shared(program, kind, of_kind, most)
        else:
            made = apart(program, kind, [*of_kind, *idle[kind.name]], most, alone)
        slots += made
        workers[kind.name] = max(len(made), least_workers(program, kind))
    built = _pools(program, uses, slots)
    shares = dict.fromkeys(problem.streams, 1.0) | dict.fromkeys(program.graph.too_slow, 0.0)
    accuracy = 0.0
    if solution.found:
        found = solution[program.share].tolist()
        shares |= {s: _share(x) for s, x in zip(program.graph.streams, found, strict=False)}
        accuracy = _accuracy(program, solution)
    gap = abs(solution.bound - solution.objective) / max(abs(solution.objective), 1e-9)
    late = late_by_stream(built[0], built[1], uses, problem.sharing)
    plan = Plan(
        workers=workers,
        slots=tuple(slots),
        accuracy=accuracy,
        served=shares,
        bad_rate=_bad(problem, shares, late),
        cost_per_hour=sum(kind.price_per_hour * workers[kind.name] for kind in problem.kinds),
        prices=Prices(),
        step=step,
        explanation=_explain(problem, step, workers, shares, accuracy),
        swaps=round(float(solution[program.swaps][0])) if solution.found else 0,
        gap=gap if math.isfinite(gap) else math.inf,
        group_of=dict(problem.group_of),
        paths=_paths(program, solution) if solution.found else {},
    )
    return Built(plan, program, solution, late, *built)


def _pools(
    program: Program, uses: list[Use], slots: list[Slot]
) -> tuple[dict[Pair, Pool], dict[Pair, int], dict[Pair, int]]:
    problem = program.problem
    trees = {stream: problem.tree_of(stream) for stream in program.graph.streams}
    depths = {s: max(len(t.path(task.name)) for task in t.order) for s, t in trees.items()}
    pools = pools_of(uses, problem.sharing, depths)
    workers = {
        (variant, kind): sum(
            s.kind == kind and (not variant or variant in s.variants) for s in slots
        )
        for variant, kind in pools
    }
    most = {(variant, kind): program.most[kind] for variant, kind in pools}
    return pools, workers, most


def _share(found: float) -> float:
    return 1.0 if found > 1 - 2 * EPS else max(found, 0.0)


def _accuracy(program: Program, solution: Solution) -> float:
    """Return the mean accuracy over the served requests, in percent."""
    problem = program.problem
    total = served = 0.0
    for i, stream in enumerate(program.graph.streams):
        rate = problem.rate(stream)
        total += rate * float(program.accuracy(stream) @ solution[program.c[stream]])
        served += rate * float(solution[program.share][i])
    return total / served if served > 0 else 0.0


def _paths(program: Program, solution: Solution) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the share of each path to a last task, by stream."""
    g, found = program.graph, dict[str, dict[tuple[str, ...], float]]()
    for stream in g.streams:
        tree = program.problem.tree_of(stream)
        of_path = zip(g.paths[tree.name], solution[program.c[stream]].tolist(), strict=True)
        sinks = g.sinks(tree)
        found[stream] = {p.variants: c for p, c in of_path if p.task in sinks and c > EPS}
    return found


def _bad(problem: Problem, shares: Mapping[str, float], late: Mapping[str, float]) -> float:
    """Return the share of all demand that is not planned for, or that bursts make late."""
    total = sum(problem.rate(s) for s in problem.streams)
    good = sum(problem.rate(s) * shares[s] * (1 - late.get(s, 0.0)) for s in problem.streams)
    return max(1 - good / total, 0.0) if total else 0.0


_SAID = {
    "hardware": "The most accurate variants suffice.",
    "accuracy": "The most accurate variants do not suffice for all requests.",
    "cost": "The cheapest workers that keep the accuracy floor.",
    "share": "Not all demand can be served",
}
_LOKIS = {"hardware": "Hardware scaling", "accuracy": "Accuracy scaling"}
"""Loki's names of its steps."""


def _explain(
    problem: Problem,
    step: Step,
    workers: Mapping[str, int],
    shares: Mapping[str, float],
    accuracy: float,
) -> str:
    said = _SAID[step]
    if not problem.headroom and step in _LOKIS:
        said = f"{_LOKIS[step]}: {said[0].lower()}{said[1:]}"
    if step == "share":
        said += f": {100 * _bad(problem, shares, {}):.3g} % is shed."
    rate = sum(problem.rate(s) for s in problem.streams)
    counts = ", ".join(f"{n} {kind}" for kind, n in workers.items() if n) or "no workers"
    return f"{said} {rate:.5g} req/s on {counts}, accuracy {accuracy:.4g} %."
