"""Four times the budget; SLOs 20 % longer.

(a) has a budget of $10/h. (b) has SLOs 20 % longer, at $2.5/h. The rows have the throughput of the
chosen pool over the homogeneous one, scaled up to the budget.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import MODELS, Case, homogeneous, planned, text, throughput

SOURCE = "Kairos Figure 15"
CASES: dict[str, dict[str, Any]] = {
    "$2.5/h": {},
    "$10/h": {"budget": 10.0},
    "SLO + 20 %": {"slo_factor": 1.2},
}


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 800 if quick else 8000, "tolerance": 0.03 if quick else 0.01, "seed": seed}
    rows = []
    for model in MODELS[:1] if quick else MODELS:
        for name, changes in CASES.items():
            case = Case(model, **changes)
            base, _ = homogeneous(case, **how)
            plan = planned(case.problem())
            got = throughput(case, plan.counts, **how)
            label = f"{model} · {name} {text(plan.counts)}"
            rows += [
                Row(label, "over homogeneous", "×", got / base),
                Row(label, "of the fluid bound", "%", 100 * got / plan.bound),
            ]
    return rows
