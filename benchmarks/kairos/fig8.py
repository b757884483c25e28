"""Throughput of the chosen pool over the best homogeneous one, five models.

The budget is $2.5/h. *Kairos* is the configuration that the planner picks without trying any. The
homogeneous pool's throughput is scaled up to the whole budget; Kairos' is not (§8.1). The paper
prints 1.25 as the smallest gain of its five models, and 2 for RM2. "As in the paper" has Equation
15 and the paper's query distribution as printed.
"""

from __future__ import annotations

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import (
    KAIROS,
    MODELS,
    PRINTED,
    Case,
    homogeneous,
    planned,
    text,
    throughput,
)

SOURCE = "Kairos Figure 8"
ASKED = [
    ("* · Kairos (*", "over homogeneous", "≥", 1.25),
    (
        "RM2 · Kairos (*",
        "over homogeneous",
        "≥",
        2.0,
        "RM2's latencies were fitted to the paper's Figure 1, so this is no evidence",
    ),
]
PAPER = {"RM2": 2.0}


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 800 if quick else 8000, "tolerance": 0.02 if quick else 0.005, "seed": seed}
    rows = []
    for model in MODELS[:3] if quick else MODELS:
        case = Case(model)
        base, count = homogeneous(case, **how)
        rows.append(Row(f"{model} · {count} × g4dn.xlarge, scaled", "throughput", "req/s", base))
        for name, bound, policy in (
            ("Kairos", "fluid", KAIROS),
            ("Kairos, as in the paper", "paper", PRINTED),
        ):
            plan = planned(case.problem(), bound)
            got = throughput(case, plan.counts, policy, **how)
            label = f"{model} · {name} {text(plan.counts)}"
            paper = PAPER.get(model) if name == "Kairos" else None
            rows += [
                Row(label, "throughput", "req/s", got),
                Row(label, "over homogeneous", "×", got / base, paper),
            ]
    return rows
