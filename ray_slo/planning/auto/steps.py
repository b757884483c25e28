"""The steps of a plan. Each is a program with the same constraints, and the first one with a
solution counts.

1. *hardware*: all demand with the most accurate variants, at the least cost.
2. *accuracy*: if there are too few workers for that, all demand with the highest mean accuracy.
3. *share*: if no variants are fast enough, the largest share of the demand, and then the highest
   accuracy. The smallest share of a stream is made as large as possible first. The result is
   `Infeasible`, with the reason.

With the objective "cost", one step replaces the first two: all demand with at least the accuracy
floor, at the least cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ray_slo.planning.auto.build import Built, build
from ray_slo.planning.auto.groups import in_groups
from ray_slo.planning.auto.hosts import Blocked, Unpacked
from ray_slo.planning.auto.limits import Limits, Pair, Room
from ray_slo.planning.auto.plan import Plan, Step
from ray_slo.planning.auto.problem import Problem
from ray_slo.planning.auto.program import EPS, Objective, Program
from ray_slo.planning.auto.sizes import by_size, together
from ray_slo.planning.milp import Solution
from ray_slo.planning.result import Infeasible

_ROUNDS, _HALVES = 6, 3
"""Largest number of plans until there is room for bursts; number of bisection steps if there cannot
be enough room."""

_NO_PLAN = "the solver stopped at its time limit without a plan"

_TRIES = 8
"""Number of attempts to pack variants, each with tighter limits on time, memory or batches."""

_NONE = Solution("unknown", math.nan, math.nan, np.zeros(0))
_IMPOSSIBLE = replace(_NONE, status="infeasible")


def plan(problem: Problem, last: Plan | None = None) -> Plan | Infeasible[Plan]:
    """Plan an application.

    Args:
        problem: the planning problem.
        last: the plan in force. It has limits, such as the largest load of a worker and the longest
            batch. If the demand is within 20 % of that for which they were found, the search starts
            from them. Then one program is solved instead of several. The plan may leave a little
            more room than it must.

    Returns:
        A plan that serves all demand, or `Infeasible` with the reason and the plan that serves the
        largest share of it.
    """
    problem = in_groups(problem)
    return together(_planned(by_size(problem), last), problem)


def _planned(problem: Problem, last: Plan | None) -> Plan | Infeasible[Plan]:
    begin = last.found if last is not None else None
    if begin is not None and begin.holds_for(problem):
        built, proven = _all_served(problem, begin.limits)
        if built is not None:
            made, same = _with_room(problem, built)
            return replace(made, found=begin) if same and isinstance(made, Plan) else made
    built, proven = _all_served(problem, Limits())
    if built is None:
        return _best_effort(problem, proven)
    return _with_room(problem, built)[0]


def _with_room(problem: Problem, built: Built) -> tuple[Plan | Infeasible[Plan], bool]:
    """Return a plan with enough room for bursts, and whether it is the given one. The given plan
    may have too little room."""
    keeps = problem.headroom or any(kind.there < 1 for kind in problem.kinds)
    for tries in range(_ROUNDS if keeps else 0):
        more = built.too_full(problem.target_bad)
        if not more:
            return built.plan, not tries
        rooms = {**built.limits.rooms, **more}
        roomy, _ = _all_served(problem, replace(built.limits, rooms=rooms), built.unpriced.step)
        if roomy is None:
            return _fuller(problem, built, rooms), False
        built = roomy
    return built.plan, not keeps


def _fuller(problem: Problem, built: Built, rooms: Mapping[Pair, Room]) -> Infeasible[Plan]:
    """Return the plan with the most possible room for bursts, if there cannot be enough."""
    low, high = 0.0, 1.0  # bounds on the share of the wanted room
    for _ in range(_HALVES):
        part = (low + high) / 2
        some = {pair: room.part(part) for pair, room in rooms.items()}
        roomy, _ = _all_served(problem, replace(built.limits, rooms=some), built.unpriced.step)
        if roomy is None:
            high = part
        else:
            low, built = part, roomy
    late = 100 * built.unpriced.bad_rate
    spot = any(kind.there < 1 for kind in problem.kinds)
    what = "bursts and interruptions" if spot else "bursts"
    reason = (
        f"no room for {what} with {_limits(problem)}: {late:.3g} % are expected to be late, "
        f"{100 * problem.target_bad:g} % may be"
    )
    return Infeasible(reason, built.plan)


_WAYS: Mapping[str, tuple[tuple[Step, Objective, bool], ...]] = {
    "accuracy": (("hardware", "cost", True), ("accuracy", "accuracy", False)),
    "cost": (("cost", "cost", False),),
}
"""Steps by objective. Each has an objective of the program, and says whether only the most accurate
variants are used."""


def _all_served(
    problem: Problem, limits: Limits, first: Step | None = None
) -> tuple[Built | None, bool]:
    """Return the plan of the first step that serves all demand, or None. Also return False if the
    solver could neither find such a plan nor prove that there is none.

    Args:
        first: the step to begin with. The steps before it had no plan even within looser limits.
    """
    ways = _WAYS[problem.objective]
    begin = next((i for i, way in enumerate(ways) if way[0] == first), 0)
    proven = True
    for step, objective, most_accurate in ways[begin:]:
        built, solution = _solved(problem, limits, step, objective, most_accurate)
        if built is not None:
            return built, True
        proven = solution.status == "infeasible"
    return None, proven


def _solved(
    problem: Problem,
    limits: Limits,
    step: Step,
    objective: Objective,
    most_accurate: bool = False,
    served: Mapping[str, float] | None = None,
) -> tuple[Built | None, Solution]:
    """Return the plan of a step, or None. If the variants of a solution cannot be packed, try again
    with less time and memory. If some requests cannot wait for the batches of others, try shorter
    batches or more workers."""
    blocked: Blocked | None = None
    for _ in range(_TRIES):
        program = Program(problem, most_accurate, limits)
        solution = _IMPOSSIBLE
        if served is not None or not program.graph.too_slow:
            solution = program.solve(objective, served)
        if not solution.found:
            other = blocked and _other_way(problem, limits, blocked)
            if not other or (other.mixed and step == "hardware"):
                return None, solution
            limits = other
            continue
        try:
            return build(program, step, solution), solution
        except Unpacked as failed:
            limits = limits.unpacked(failed.kind, failed.workers)
        except Blocked as failed:
            blocked = failed
            shorter = {failed.kind: failed.longest_s}
            limits = replace(limits, longest_s={**limits.longest_s, **shorter})
    return None, solution


def _other_way(problem: Problem, limits: Limits, blocked: Blocked) -> Limits | None:
    """Return other limits if shorter batches give no plan: first one more worker, and if that gives
    none, requests wait longer. None if both were tried."""
    kind = problem.kind[blocked.kind]
    if kind.name in limits.mixed:
        return None
    longest_s = {k: v for k, v in limits.longest_s.items() if k != kind.name}
    least = {k: v for k, v in limits.least.items() if k != kind.name}
    fixed = problem.present is not None or blocked.workers >= kind.max_workers
    if fixed or kind.name in limits.least:
        mixed = limits.mixed | {kind.name}
        return replace(limits, longest_s=longest_s, least=least, mixed=mixed)
    return replace(limits, longest_s=longest_s, least={**least, kind.name: blocked.workers + 1})


def _best_effort(problem: Problem, proven: bool) -> Infeasible[Plan]:
    """Return the plan with the largest share of the demand, and the highest accuracy for it."""
    program = Program(problem)
    if not program.graph.streams:
        return Infeasible(_reason(problem, _nothing(problem)), _nothing(problem))
    least, solution = _solved(problem, Limits(), "share", "share", served={})
    if least is None:
        reason = _NO_PLAN
        if solution.status == "infeasible":
            reason = f"the fewest workers that must be there are more than {_limits(problem)} allow"
        return Infeasible(reason, _nothing(problem), solution.status == "infeasible")
    shares = {stream: share * (1 - EPS) for stream, share in least.unpriced.served.items()}
    better, _ = _solved(problem, least.limits, "share", "accuracy", served=shares)
    best = (better or least).plan
    return Infeasible(_reason(problem, best) if proven else _NO_PLAN, best, proven)


def _nothing(problem: Problem) -> Plan:
    """Return the plan that serves no requests."""
    idle = build(Program(replace(problem, demand={})), "share", _NONE).plan
    rates = {stream: problem.rate(stream) for stream in problem.streams}
    served = {stream: float(not rate) for stream, rate in rates.items()}
    return replace(idle, served=served, bad_rate=float(any(rates.values())))


def _reason(problem: Problem, best: Plan) -> str:
    program = Program(problem)
    said = []
    for stream, fastest_s in program.graph.too_slow.items():
        slo_s = problem.slo_s(stream)
        said.append(
            f"the SLO of {stream}, {slo_s:g} s, is too short: the fastest path takes "
            f"{fastest_s:.4g} s, waiting and communication included"
            if math.isfinite(fastest_s)
            else f"no kind of worker runs a variant for every task of {stream}"
        )
    said += list(program.graph.excluded.values()) if said else []
    if any(best.served[s] < 1 - EPS for s in program.graph.streams):
        demand = sum(problem.rate(s) for s in problem.streams)
        served = sum(problem.rate(s) * best.served[s] for s in problem.streams) / demand
        said.append(
            f"demand {demand:.5g} req/s is out of reach with {_limits(problem)}: "
            f"{100 * served:.3g} % of it can be served"
        )
    return "; ".join(said)


def _limits(problem: Problem) -> str:
    if problem.present is not None:
        counts = [f"{n} {kind}" for kind, n in problem.present.items()]
        limits = [f"the workers that are there ({', '.join(counts) or 'none'})"]
    else:
        limits = [", ".join(f"{kind.max_workers} {kind.name}" for kind in problem.kinds)]
        if problem.budget_per_hour is not None:
            limits.append(f"a budget of {problem.budget_per_hour:g} per hour")
    if problem.accuracy_floor:
        limits.append(f"an accuracy of at least {problem.accuracy_floor:g} %")
    if problem.max_swaps is not None:
        limits.append(f"at most {problem.max_swaps} swaps")
    return ", ".join(limits)
