"""Four pools under every query distribution, and ORACLE.

The model is RM2. Over the homogeneous pool's throughput. DeepRecSys has its best threshold in each
pool.
"""

from __future__ import annotations

from benchmarks.harness.rows import Row
from benchmarks.kairos.fig1 import POOLS
from benchmarks.kairos.systems import (
    CLKWRK,
    KAIROS,
    RIBBON,
    Case,
    drs_best,
    homogeneous,
    oracle,
    text,
    throughput,
)

SOURCE = "Kairos Figure 3"


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 500 if quick else 5000, "tolerance": 0.05 if quick else 0.01, "seed": seed}
    case = Case("RM2")
    base, _ = homogeneous(case, **how)
    rows = []
    for counts, _ in POOLS[1:3] if quick else POOLS:
        label = f"RM2, over homogeneous · {text(counts)}"
        for name, policy in (("Ribbon", RIBBON), ("CLKWRK", CLKWRK), ("Kairos", KAIROS)):
            rows.append(Row(label, name, "×", throughput(case, counts, policy, **how) / base))
        value, _, _ = drs_best(case, [counts], **how)
        rows.append(Row(label, "DRS", "×", value / base))
        rows.append(Row(label, "ORACLE", "×", oracle(case, counts) / base))
    return rows
