"""One system for every pair of features, compared with single-purpose set-ups on a split pool.

The features are several models, variants, a pipeline, unlike kinds of workers, a budget, groups,
preemption, autoscaling, sizes and SLO classes. There are 45 pairs and ten triples. Each is a
simulated application; `applications.py` has its networks and load. The load is near capacity. The
demands of several parts swing against each other, as those of real users do.

Ours is one application on the whole pool with the planner `auto`, as it would be deployed. It
plans every 5 s, and needs 0.1 s to solve, 2 s to start a worker, and 0.5 s to load a variant. It is
compared with what was possible before ray-slo could combine features: the best single-purpose
set-ups, on the best split of the pool by hand. Both are searched on these same requests
(`split.py`).

The value is the mean accuracy over all requests; one that is not answered in time counts 0. The
ratio is our value divided by the split's, under the default policy. `named` is the same ratio under
the best policy that a user might name, the default included.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.rows import Row
from benchmarks.own.applications import (
    AUTOSCALING,
    BUDGET,
    CLASSES,
    FEATURES,
    PIPELINE,
    PREEMPTION,
    SEVERAL,
    SIZES,
    UNLIKE,
    VARIANTS,
    Application,
    application,
)
from benchmarks.own.split import Hand, pools
from ray_slo.policies.registry import DEFAULT
from ray_slo.simulation import ApplicationReport, simulate_application

SOURCE = "ray-slo"
ASKED = [
    ("all cases", "least ratio", "≥", 0.98),
    (
        "all cases",
        "share above 1.05",
        "≥",
        50,
        "in most cases a split by hand, searched on the same requests, is as good",
    ),
    ("all cases", "refused", "≤", 4),
]
TRIPLES = (
    (SEVERAL, VARIANTS, PIPELINE),
    (SEVERAL, VARIANTS, UNLIKE),
    (SEVERAL, PIPELINE, UNLIKE),
    (VARIANTS, PIPELINE, UNLIKE),
    (SEVERAL, VARIANTS, AUTOSCALING),
    (VARIANTS, PIPELINE, AUTOSCALING),
    (SEVERAL, VARIANTS, SIZES),
    (SEVERAL, VARIANTS, CLASSES),
    (SEVERAL, UNLIKE, BUDGET),
    (SEVERAL, PREEMPTION, CLASSES),
)
QUICK = (
    (SEVERAL, VARIANTS),
    (SEVERAL, PIPELINE),
    (VARIANTS, PIPELINE),
    (UNLIKE, BUDGET),
    (PREEMPTION, CLASSES),
    (AUTOSCALING, SIZES),
)
TIMES = {"interval_s": 5.0, "solve_s": 0.1, "load_s": 0.5, "start_s": 2.0}
PREEMPT_DELAY_S = 0.002


@dataclass(frozen=True)
class Outcome:
    """Figures of one case.

    Attributes:
        ours, named: values under the default policy, and under the best that a user might name.
        hand: value of the best split.
        refused: why ours does not serve the case; empty if it does.
    """

    case: str
    ours: float
    named: float
    hand: float
    refused: str = ""
    expected_bad: float = 0.0
    bad: float = 0.0


def one_system(case: Application, policy: str, seed: int) -> ApplicationReport:
    """Run the whole application on the whole pool.

    Where batches can be preempted, the default policy may do that, as it may live.
    """
    stops = policy == DEFAULT and PREEMPTION in case.features
    return simulate_application(
        case.problem,
        case.workloads,
        policy=policy,
        policy_kwargs={"preempt": True} if stops else {},
        duration_s=case.duration_s,
        preempt_delay_s=PREEMPT_DELAY_S,
        seed=seed,
        **TIMES,
    )


def policies(case: Application) -> Sequence[str]:
    """Return the default policy, then those that a user might name instead."""
    named = ["deferred", "eager" if SIZES in case.features else "price"]
    if VARIANTS in case.features and "price" not in named:
        named.append("price")
    if PREEMPTION in case.features:
        named.append("deferred_flex")
    return DEFAULT, *named


def measure(features: Sequence[str], quick: bool, seed: int) -> Outcome:
    """Run one case with ours and split by hand."""
    duration_s = 15.0 if quick else 40.0
    case = application(features, duration_s, seed)
    try:
        runs = [one_system(case, policy, seed) for policy in policies(case)]
    except ValueError as error:
        return Outcome(case.name, 0.0, 0.0, 0.0, str(error))
    first = runs[0]
    used: Mapping[str, float] | None = None
    if AUTOSCALING in features:
        hours = duration_s / 3600
        used = {k.name: first.worker_hours(kind=k.name) / hours for k in case.problem.kinds}
    hand = Hand(case, seed)
    best = max(hand.best(pool) for pool in pools(case, used))
    table = first.expected
    expected = float(
        (table.expected_bad.astype(float) * table.requests).sum() / table.requests.sum()
    )
    return Outcome(
        case.name,
        first.value(),
        max(run.value() for run in runs),
        best,
        expected_bad=expected,
        bad=first.bad_rate(),
    )


def run(quick: bool, seed: int) -> list[Row]:
    chosen = QUICK if quick else (*itertools.combinations(FEATURES, 2), *TRIPLES)
    with ProcessPoolExecutor(2) as pool:  # cases are independent: two at a time change nothing
        found = list(pool.map(partial(measure, quick=quick, seed=seed), chosen))
    rows = []
    for o in found:
        if o.refused:
            continue
        rows += [
            Row(o.case, "ratio", "×", o.ours / o.hand),
            Row(o.case, "named", "×", o.named / o.hand),
            Row(o.case, "value", "of 1", o.ours),
            Row(o.case, "split by hand", "of 1", o.hand),
            Row(o.case, "bad", "%", 100 * o.bad),
            Row(o.case, "bad as planned", "%", 100 * o.expected_bad),
        ]
    rows += [Row(f"refused · {o.case}: {o.refused}", "refused", "", 1) for o in found if o.refused]
    ratios = [o.ours / o.hand for o in found if not o.refused]
    return [
        *rows,
        Row("all cases", "least ratio", "×", min(ratios)),
        Row("all cases", "share above 1.05", "%", 100 * sum(r > 1.05 for r in ratios) / len(found)),
        Row(
            "all cases",
            "share of at least 0.98",
            "%",
            100 * sum(r >= 0.98 for r in ratios) / len(found),
        ),
        Row("all cases", "refused", "", len(found) - len(ratios)),
    ]
