"""Beyond Kairos: hardware and variants in one plan, compared with hardware first.

Accuracy tiers under a cost budget of $2.5/h (the planner `auto`). Each model has three **made-up**
variants: the model of `zoos/kairos_ec2.csv`, and two that take half and a quarter of its time per
item. (The fixed part stays.) These have 99 and 97 % of its accuracy. Demand is in multiples of what
the best pool for the full model can be planned for.

* *hardware first*: the pool that `kairos` plans for the full model. Then `auto` chooses the best
  variant for each of its instances.
* *together*: `auto` plans instances and variants. *with batches*: with batches of up to 8, too.

*Accuracy*, *cost* and *served* are those of the plan. *Simulated* and *bad* are the accuracy of the
good requests, and the share that is late or dropped. They are simulated under the `kairos` policy,
which ignores accuracies. So it follows a plan only where the rented instances leave no choice.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import (
    KAIROS,
    TYPES,
    Case,
    Policy,
    planned,
    planned_by_auto,
    report_of,
)
from ray_slo.core import LatencyProfile, Variant
from ray_slo.planning import auto
from ray_slo.planning.catalogue import CATALOGUE

SOURCE = "ray-slo"
BATCHING: Policy = ("kairos", {"batch": True})
TIERS = (("full", 1.0, 100.0), ("half", 0.5, 99.0), ("quarter", 0.25, 97.0))
FACTORS = (0.6, 1.0, 1.3, 1.7, 2.2)
KINDS = [auto.Kind(t.name, 0, 50, t.price_per_hour) for t in TYPES]


def run(quick: bool, seed: int) -> list[Row]:
    requests = 1500 if quick else 20_000
    rows, took = [], []
    for model in ("RM2",) if quick else ("RM2", "WND", "DIEN"):
        case = Case(model)
        first = planned(case.problem())
        every = variants(case)
        systems: tuple[tuple[str, Policy, dict[str, Any]], ...] = (
            ("hardware first", KAIROS, {"present": first.counts}),
            ("together", KAIROS, {}),
            ("together, with batches", BATCHING, BATCHES),
        )
        for factor in FACTORS[2:3] if quick else FACTORS:
            demand = factor * 0.9 * first.bound
            for name, policy, how in systems:
                began = time.process_time()
                plan = planned_by_auto(
                    case, demand, every, KINDS, budget_per_hour=case.budget, **how
                )
                took.append(time.process_time() - began)
                report = report_of(case, demand, every, plan, policy, requests=requests, seed=seed)
                label = f"{model}, {factor:g} × ({demand:.3g} req/s) · {name} {text(plan)}"
                rows += [
                    Row(label, "accuracy", "%", plan.accuracy),
                    Row(label, "cost", "$/h", plan.cost_per_hour),
                    Row(label, "served", "%", 100 * plan.served[model]),
                    Row(label, "simulated", "%", report.accuracy),
                    Row(label, "bad", "%", 100 * report.bad_rate()),
                ]
    rows.append(Row("all plans", "CPU time", "ms, median", 1e3 * float(np.median(took))))
    return rows


BATCHES = {"batch_sizes": (1, 2, 4, 8), "waiting_factor": 2.0}


def variants(case: Case) -> list[Variant]:
    """Return the model's variants, the most accurate first."""
    lines = {name: profile.fit_linear() for name, profile in case.profiles().items()}
    return [
        Variant(
            name,
            {k: LatencyProfile.linear(part * a, b, 1000) for k, (a, b) in lines.items()},
            accuracy,
        )
        for name, part, accuracy in TIERS
    ]


def text(plan: auto.Plan) -> str:
    """Return the number of full/half/quarter instances of each rented type of Table 4."""
    count = Counter((slot.kind, slot.variants[0]) for slot in plan.slots)
    return " ".join(
        f"{name.split('.')[0]} " + "/".join(str(count[name, v]) for v, _, _ in TIERS)
        for name in CATALOGUE
        if any(kind == name for kind, _ in count)
    )
