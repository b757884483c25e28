"""The same pools under every query distribution.

The pools are Kairos' best configurations for RM2. Figures are in percent of ORACLE's best
throughput (the dashed line in the paper). A configuration is only good with a policy that uses it.
"""

from __future__ import annotations

from benchmarks.harness.rows import Row
from benchmarks.kairos import systems

SOURCE = "Kairos Figure 14"
POLICIES: dict[str, systems.Policy] = {
    "Ribbon": systems.RIBBON,
    "CLKWRK": systems.CLKWRK,
    "Kairos": systems.KAIROS,
    "Kairos, as printed": systems.PRINTED,
}


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 500 if quick else 5000, "tolerance": 0.05 if quick else 0.01, "seed": seed}
    case = systems.Case("RM2")
    named, _, bounds = systems.space(case)
    best, _ = systems.best_oracle(case, 500 if quick else 4000)
    rows = []
    for i in range(2 if quick else 8):
        label = f"RM2, of ORACLE · {systems.text(named[i])}"
        rows.append(Row(label, "fluid bound", "%", 100 * float(bounds[i]) / best))
        for name, policy in POLICIES.items():
            got = systems.throughput(case, named[i], policy, **how)
            rows.append(Row(label, name, "%", 100 * got / best))
        value, _, _ = systems.drs_best(case, [named[i]], **how)
        rows.append(Row(label, "DRS", "%", 100 * value / best))
    return rows
