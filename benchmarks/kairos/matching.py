"""Time of a matching, scipy alone and end to end in the policy.

*Policy*: requests arrive all at once, and the decision is made. The time is from the call of
`requests_arrived` to the returned actions. *scipy*: `linear_sum_assignment` on a cost matrix of the
same size. Times are the shortest of several runs, as other programs may run on the machine. The
paper gives 0.05 ms for 20 × 20, network included, and "well within 1 ms" for hundreds of queries.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import Case, quickest_ms
from ray_slo.core import Cluster, Request
from ray_slo.policies.kairos import Kairos

SOURCE = "Kairos §5.1, §6"
ASKED = [
    ("20 requests × 20 workers", "policy, pick=urgent", "≤", 0.1),
    ("500 requests × 100 workers", "policy, pick=urgent", "≤", 5),
]
SHAPES = ((1, 10), (5, 10), (20, 20), (100, 100), (500, 100))
PAPER = {(20, 20): 0.05}


def run(quick: bool, seed: int) -> list[Row]:
    repeats = 50 if quick else 500
    rng = np.random.default_rng(seed)
    case = Case("WND")
    rows = []
    for requests, workers in SHAPES:
        quarter = dict.fromkeys(("g4dn.xlarge", "c5n.2xlarge", "r5n.large"), workers // 4)
        counts = {**quarter, "t3.xlarge": workers - sum(quarter.values())}
        cluster = case.cluster(counts)
        sizes = case.sizes.draw(requests, rng).tolist()
        queries = [Request(i, "WND", 0.0, case.slo_s, s) for i, s in enumerate(sizes)]
        label = f"{requests} requests × {workers} workers"
        profiles = [case.profiles()[w.hardware] for w in cluster.workers.values()]
        costs = np.array([[p.latency(s) for p in profiles] for s in sizes])
        scipy_ms = quickest_ms(repeats, partial(linear_sum_assignment, costs))
        rows.append(Row(label, "scipy alone", "ms", scipy_ms))
        for pick in ("urgent", "cheapest"):
            ms = quickest_ms(repeats, partial(_decide, queries), partial(_policy, pick, cluster))
            paper = PAPER.get((requests, workers)) if pick == "urgent" else None
            rows.append(Row(label, f"policy, pick={pick}", "ms", ms, paper))
    return rows


def _policy(pick: Any, cluster: Cluster) -> tuple[Kairos]:
    made = Kairos(pick=pick)
    made.cluster_changed(0.0, cluster)
    return (made,)


def _decide(queries: list[Request], policy: Kairos) -> None:
    policy.requests_arrived(0.0, queries)
    policy.decide(0.0)
