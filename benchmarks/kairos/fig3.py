"""Four pools under every query distribution, and ORACLE.

The model is RM2. Figures are relative to the homogeneous pool's throughput. DeepRecSys has its best
threshold in each pool.
"""

from __future__ import annotations

from benchmarks.harness.rows import Row
from benchmarks.kairos import systems
from benchmarks.kairos.fig1 import POOLS

SOURCE = "Kairos Figure 3"


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 500 if quick else 5000, "tolerance": 0.05 if quick else 0.01, "seed": seed}
    case = systems.Case("RM2")
    base, _ = systems.homogeneous(case, **how)
    rows = []
    for counts, _ in POOLS[1:3] if quick else POOLS:
        label = f"RM2, over homogeneous · {systems.text(counts)}"
        for name, policy in (
            ("Ribbon", systems.RIBBON),
            ("CLKWRK", systems.CLKWRK),
            ("Kairos", systems.KAIROS),
            ("Kairos, as printed", systems.PRINTED),
        ):
            rows.append(
                Row(label, name, "×", systems.throughput(case, counts, policy, **how) / base)
            )
        value, _, _ = systems.drs_best(case, [counts], **how)
        rows.append(Row(label, "DRS", "×", value / base))
        rows.append(Row(label, "ORACLE", "×", systems.oracle(case, counts) / base))
    return rows
