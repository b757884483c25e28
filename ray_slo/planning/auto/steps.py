"""The steps of a plan, each a program over the same constraints; the first that has a plan counts.

1. *hardware*: all demand with the most accurate variants, at the least cost;
2. *accuracy*: where no workers suffice for that, the highest mean accuracy at all demand;
3. *share*: where no variants suffice, the largest share of the demand, the stream that is served
   least first, and the highest accuracy at that. It comes as `Infeasible` and says why.

With the objective "cost" one step takes the place of the first two: the least cost at which all
demand is answered with at least the accuracy floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ray_slo.planning.auto.build import Unpacked, build
from ray_slo.planning.auto.plan import Plan, Step
from ray_slo.planning.auto.problem import Problem
from ray_slo.planning.auto.program import EPS, Objective, Program
from ray_slo.planning.milp import Solution
from ray_slo.planning.result import Infeasible

_TRIES = 8
"""At packing variants into less and less of the memory."""


def plan(problem: Problem, last: Plan | None = None) -> Plan | Infeasible[Plan]:
    """Plan all stages.

    Args:
        problem: what is to be planned.
        last: the plan in force, where the search starts. It does not change what is optimal;
            `problem.current` does.

    Returns:
        A plan that serves all demand, or `Infeasible` with the reason and the plan that serves the
        largest share of it.
    """
    return _plan(problem, {})


def _plan(problem: Problem, occupancy: Mapping[str, float]) -> Plan | Infeasible[Plan]:
    ways: list[tuple[Step, Objective, bool]] = [
        ("hardware", "cost", True),
        ("accuracy", "accuracy", False),
    ]
    if problem.objective == "cost":
        ways = [("cost", "cost", False)]
    proven = True
    for step, objective, most_accurate in ways:
        made, solution = _solved(problem, occupancy, step, objective, most_accurate)
        if made is not None:
            return made
        proven = solution.status == "infeasible"
    return _best_effort(problem, occupancy, proven)


def _solved(
    problem: Problem,
    occupancy: Mapping[str, float],
    step: Step,
    objective: Objective,
    most_accurate: bool = False,
    served: Mapping[str, float] | None = None,
) -> tuple[Plan | None, Solution]:
    """The plan of a step, with less of the memory where variants were not packed into all of it."""
    memory: dict[str, float] = {}
    for _ in range(_TRIES):
        program = Program(problem, most_accurate, occupancy, memory)
        if served is None and program.graph.too_slow:
            return None, Solution("infeasible", math.nan, math.nan, program.weight[:0])
        solution = program.solve(objective, served)
        if not solution.found:
            return None, solution
        try:
            return build(program, step, solution), solution
        except Unpacked as failed:
            memory[failed.kind] = 0.85 * memory.get(failed.kind, 1.0)
    return None, solution


def _best_effort(
    problem: Problem, occupancy: Mapping[str, float], proven: bool
) -> Infeasible[Plan]:
    """The largest share of the demand, and the highest accuracy at that."""
    least, _ = _solved(problem, occupancy, "share", "share", served={})
    if least is None:
        nothing = build(Program(replace(problem, demand={})), "share", _none())
        reason = "the solver stopped at its time limit without a plan"
        return Infeasible(reason, nothing, False)
    shares = {stream: share * (1 - EPS) for stream, share in least.served.items()}
    better, _ = _solved(problem, occupancy, "share", "accuracy", served=shares)
    best = better or least
    return Infeasible(_reason(problem, best, proven), best, proven)


def _none() -> Solution:
    import numpy as np

    return Solution("unknown", math.nan, math.nan, np.zeros(0))


def _reason(problem: Problem, best: Plan, proven: bool) -> str:
    if not proven:
        return "the solver stopped at its time limit without a plan"
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
        said.append(
            f"demand {demand:.5g} req/s is out of reach with {_limits(problem)}: "
            f"{100 * (1 - best.bad_rate):.3g} % of it can be served"
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
