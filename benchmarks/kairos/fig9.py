"""Every scheme at its best configuration, and ORACLE.

Peers have the best of all configurations to which the budget allows no addition. DeepRecSys also
has its best threshold, and Ribbon may have any configuration. Kairos has the planner's choice
without trying it, Kairos+ the result of its search. "As printed" is the paper's exact query
distribution on Kairos' pool. ORACLE knows all requests beforehand (§7). With `--quick`, peers
choose among a few.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.rows import Row
from benchmarks.kairos import systems

SOURCE = "Kairos Figure 9"
ASKED = [
    (
        "* · Kairos (*",
        "of ORACLE",
        "≥",
        92,
        "for DIEN; Kairos+, which measures a few pools, finds one with 94 %",
    )
]


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 600 if quick else 4000, "tolerance": 0.03 if quick else 0.01, "seed": seed}
    rows = []
    for model in ("WND",) if quick else systems.MODELS:
        case = systems.Case(model)
        base, count = systems.homogeneous(case, **how)
        candidates = (
            [*systems.space(case)[0][:3], {systems.BASE: count}] if quick else systems.maximal(case)
        )
        found: dict[str, tuple[float, str]] = {}
        # Under Ribbon, more instances may serve less, because too slow ones get requests, too.
        every = candidates if quick else systems.space(case)[0]
        for name, policy, among in (
            ("Ribbon", systems.RIBBON, every),
            ("CLKWRK", systems.CLKWRK, candidates),
        ):
            value, chosen = systems.best_of(case, among, policy, **how)
            found[name] = value, systems.text(chosen)
        value, chosen, threshold = systems.drs_best(case, candidates, **how)
        found["DRS"] = value, f"{systems.text(chosen)}, threshold {threshold}"
        plan = systems.planned(case.problem())
        found["Kairos"] = systems.throughput(case, plan.counts, **how), systems.text(plan.counts)
        value = systems.throughput(case, plan.counts, systems.PRINTED, **how)
        found["Kairos, as printed"] = value, systems.text(plan.counts)
        plus = systems.searched(
            case.problem(), partial(systems.throughput, case, **how), margin=0.01
        )
        found["Kairos+"] = plus.throughput, systems.text(plus.counts)
        value, chosen = systems.best_oracle(case, 500 if quick else 4000)
        found["ORACLE"] = value, systems.text(chosen)
        for name, (value, where) in found.items():
            label = f"{model} · {name} {where}"
            rows += [
                Row(label, "throughput", "req/s", value),
                Row(label, "over homogeneous", "×", value / base),
                Row(label, "of ORACLE", "%", 100 * value / found["ORACLE"][0]),
            ]
    return rows
