"""Kairos Figure 1: mixed pools are not always better. RM2, $2.5/h, first come, first served.

Pools are (g4dn.xlarge, c5n.2xlarge, r5n.large) as in the paper, which prints that (3, 1, 3) has
15 % more throughput than the homogeneous pool (scaled up to the budget) and that the two others
have less. (1, 4, 2) is over the budget. Beside it the same pools under Kairos' policy.
"""

from __future__ import annotations

from benchmarks.kairos_systems import (
    KAIROS,
    RIBBON,
    Case,
    Policy,
    cost,
    homogeneous,
    text,
    throughput,
)
from benchmarks.rows import Row
from ray_slo.planning.kairos import Configuration

POOLS: tuple[tuple[Configuration, float | None], ...] = (
    ({"g4dn.xlarge": 4}, None),
    ({"g4dn.xlarge": 3, "c5n.2xlarge": 1, "r5n.large": 3}, 1.15),
    ({"g4dn.xlarge": 2, "r5n.large": 9}, None),
    ({"g4dn.xlarge": 1, "c5n.2xlarge": 4, "r5n.large": 2}, None),
)
POLICIES: dict[str, Policy] = {"first come, first served": RIBBON, "Kairos": KAIROS}


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 600 if quick else 6000, "tolerance": 0.03 if quick else 0.005, "seed": seed}
    case = Case("RM2")
    base, _ = homogeneous(case, **how)
    rows = []
    for counts, paper in POOLS:
        label = f"RM2 · {text(counts)}, ${cost(counts):.2f}/h"
        for name, policy in POLICIES.items():
            got = throughput(case, counts, policy, **how) / base
            printed = paper if policy is RIBBON else None
            rows.append(Row(label, f"over homogeneous, {name}", "×", got, printed))
    return rows
