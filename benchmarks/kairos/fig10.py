"""Evaluations that every scheme needs to find its best configuration.

All schemes search as Kairos+ does: by falling upper bound, with pruning. `evaluated` is the share
of the space that was evaluated until no candidate was left. *Kairos+* stops with a margin of 1 %
(see `ray_slo.papers.kairos.search`). *Kairos+, certain* continues until the true bounds prove the
optimum. Peers search with certainty, as their policies reach no fixed share of a bound. `margin
loss` is the throughput lost by the margin. Then every configuration of the space is tried at 1 %
more than Kairos+ found. DeepRecSys' threshold is the size that the weakest rented auxiliary type
can serve in time. Peers search for RM2 only, because they evaluate most of the space. With
`--quick`, the budget is $1.3/h.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.kairos import systems
from ray_slo.papers.kairos import Configuration

SOURCE = "Kairos Figure 10"
ASKED = [("*space of 331 · Kairos+", "evaluated", "≤", 1)]
PEERS_ON = "RM2"


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 400 if quick else 2000, "tolerance": 0.03 if quick else 0.01, "seed": seed}
    rows = []
    for model in ("RM2",) if quick else systems.MODELS:
        case = systems.Case(model, budget=1.3 if quick else 2.5)
        problem = case.problem()
        own = systems.once_each(case, **how)
        plus = systems.searched(problem, own, margin=0.01)
        certain = systems.searched(problem, own)
        schemes = {"Kairos+": plus, "Kairos+, certain": certain}
        if model == PEERS_ON:
            schemes |= {
                "Ribbon": systems.searched(
                    problem, partial(systems.throughput, case, policy=systems.RIBBON, **how)
                ),
                "CLKWRK": systems.searched(
                    problem, partial(systems.throughput, case, policy=systems.CLKWRK, **how)
                ),
                "DRS": systems.searched(problem, partial(_drs, case, how)),
            }
        for name, found in schemes.items():
            label = f"{model}, space of {found.space} · {name}"
            rows += [
                Row(label, "evaluations", "", float(len(found.evaluated))),
                Row(label, "evaluated", "% of the space", 100 * len(found.evaluated) / found.space),
            ]
        loss = 100 * (1 - plus.throughput / certain.throughput)
        limits = {"requests": how["requests"], "seed": seed}
        others = sum(
            systems.sustains(case, c, 1.01 * plus.throughput, **limits)
            for c in systems.space(case)[0]
        )
        label = f"{model}, Kairos+ · margin of 1 %"
        rows += [
            Row(label, "margin loss", "%", loss),
            Row(label, "others that sustain 1 % more", "", float(others)),
        ]
    return rows


def _drs(case: systems.Case, how: dict[str, Any], counts: Configuration) -> float:
    budget = 0.98 * case.slo_s
    reach = [case.profiles()[n].max_batch_within(budget) for n in counts if n != systems.BASE]
    return systems.throughput(case, counts, systems.drs(min(reach, default=0)), **how)
