"""Mixed pools compared with the best homogeneous one, under first come, first served.

Mixed pools are not always better. The model is RM2, the budget $2.5/h. Pools are (g4dn.xlarge,
c5n.2xlarge, r5n.large), as in the paper. It prints that (3, 1, 3) has 15 % more throughput than the
homogeneous pool, scaled up to the budget. The two others have less. (1, 4, 2) exceeds the budget.
The same pools are also run under Kairos' policy. Each figure is relative to the homogeneous pool
under the same policy.

First come, first served ignores sizes, so auxiliary instances get requests for which they are too
slow. *At risk* is the share of the requests that go to such an instance if all instances are always
busy. 1 % may be late. Above that, a pool cannot use its auxiliary instances; then a pool with fewer
base instances serves less. Late requests are rare, so `--quick` runs are too short to compare
pools.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.kairos import systems
from ray_slo.papers.kairos import Configuration

SOURCE = "Kairos Figure 1"
ASKED = [
    (
        "RM2 · (3, 1, 3,*",
        "over homogeneous, first come, first served",
        "≥",
        1.15,
        "RM2's latencies were fitted to this figure, so this is no evidence",
    ),
    (
        "RM2 · ([12],*",
        "over homogeneous, first come, first served",
        "≤",
        1,
        "RM2's latencies were fitted to this figure, so this is no evidence",
    ),
]
POOLS: tuple[tuple[Configuration, float | None], ...] = (
    ({"g4dn.xlarge": 4}, None),
    ({"g4dn.xlarge": 3, "c5n.2xlarge": 1, "r5n.large": 3}, 1.15),
    ({"g4dn.xlarge": 2, "r5n.large": 9}, None),
    ({"g4dn.xlarge": 1, "c5n.2xlarge": 4, "r5n.large": 2}, None),
)
POLICIES: dict[str, systems.Policy] = {
    "first come, first served": systems.RIBBON,
    "Kairos": systems.KAIROS,
}


def run(quick: bool, seed: int) -> list[Row]:
    how = {
        "requests": 3000 if quick else 20_000,
        "tolerance": 0.03 if quick else 0.005,
        "seed": seed,
    }
    case = systems.Case("RM2")
    base = {
        name: systems.homogeneous(case, [policy], **how)[0] for name, policy in POLICIES.items()
    }
    rows = []
    for counts, paper in POOLS:
        label = f"RM2 · {systems.text(counts)}, ${systems.cost(counts):.2f}/h"
        for name, policy in POLICIES.items():
            got = systems.throughput(case, counts, policy, **how) / base[name]
            printed = paper if policy is systems.RIBBON else None
            rows.append(Row(label, f"over homogeneous, {name}", "×", got, printed))
        rows.append(
            Row(label, "at risk, first come, first served", "%", 100 * at_risk(case, counts))
        )
    return rows


def at_risk(case: systems.Case, counts: Configuration) -> float:
    """Return the share of the requests that are too large for the instance that they go to.

    Assumes that chance chooses the instance, and that every instance is always busy.
    """
    sizes = case.sizes.quantiles((np.arange(2000) + 0.5) / 2000)
    served, late = 0.0, 0.0
    for name, n in counts.items():
        profile = case.profiles()[name]
        latency = np.array([profile(int(s)) for s in sizes])
        rate = n / latency.mean()
        served += rate
        late += rate * float(np.mean(latency > case.slo_s)) if name != systems.BASE else 0.0
    return late / served
