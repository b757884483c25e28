"""Beyond Kairos: hardware and variants in one plan, compared with hardware first.

Accuracy tiers under a cost budget of $2.5/h (`ray_slo.planning.tiers`). Each model has three
**made-up** variants: the model of `zoos/kairos_ec2.csv`, and two that take half and a quarter of
its time per item. (The fixed part stays.) These have 99 and 97 % of its accuracy. Demand is in
multiples of what the best pool for the full model can be planned for.

* *hardware first*: the pool that `kairos` plans for the full model. Then the best variant for each
  of its instances is chosen, by the same program with the instances given.
* *together*: instances and variants in one plan. *with batches*: with batches of up to 8, too.

*Accuracy*, *cost* and *served* are those of the plan. *Simulated* and *bad* are the accuracy of the
good requests, and the share that is late or dropped. They are simulated under the `kairos` policy,
which ignores accuracies. So it follows a plan only where the rented instances leave no choice.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import KAIROS, TYPES, Case, Policy, planned
from ray_slo.core import Cluster, LatencyProfile, Model, Variant, Worker
from ray_slo.planning import Infeasible, tiers
from ray_slo.planning.catalogue import CATALOGUE
from ray_slo.policies import make_policy
from ray_slo.simulation import simulate

SOURCE = "ray-slo"
BATCHING: Policy = ("kairos", {"batch": True})
TIERS = (("full", 1.0, 100.0), ("half", 0.5, 99.0), ("quarter", 0.25, 97.0))
FACTORS = (0.6, 1.0, 1.3, 1.7, 2.2)


def run(quick: bool, seed: int) -> list[Row]:
    requests = 1500 if quick else 20_000
    rows, took = [], []
    for model in ("RM2",) if quick else ("RM2", "WND", "DIEN"):
        case = Case(model)
        first = planned(case.problem())
        for factor in FACTORS[2:3] if quick else FACTORS:
            demand = factor * 0.9 * first.bound
            problem = tiered(case, demand)
            batched = tiered(case, demand, batch_sizes=(1, 2, 4, 8))
            for name, policy, asked, counts in (
                ("hardware first", KAIROS, problem, first.counts),
                ("together", KAIROS, problem, None),
                ("together, with batches", BATCHING, batched, None),
            ):
                began = time.process_time()
                made = tiers.plan(asked, counts)
                took.append(time.process_time() - began)
                plan = made.best_effort if isinstance(made, Infeasible) else made
                accuracy, bad = simulated(case, asked, plan, policy, requests, seed)
                label = f"{model}, {factor:g} × ({demand:.3g} req/s) · {name} {text(plan)}"
                rows += [
                    Row(label, "accuracy", "%", plan.accuracy),
                    Row(label, "cost", "$/h", plan.cost_per_hour),
                    Row(label, "served", "%", 100 * (1 - plan.shed_share)),
                    Row(label, "simulated", "%", accuracy),
                    Row(label, "bad", "%", 100 * bad),
                ]
    rows.append(Row("all plans", "CPU time", "ms, median", 1e3 * float(np.median(took))))
    return rows


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


def tiered(case: Case, demand: float, **kwargs: Any) -> tiers.Problem:
    sizes = case.problem().sizes
    return tiers.Problem(TYPES, variants(case), demand, case.slo_s, sizes, case.budget, **kwargs)


def simulated(
    case: Case,
    problem: tiers.Problem,
    plan: tiers.Plan,
    policy: Policy,
    requests: int,
    seed: int,
) -> tuple[float | None, float]:
    """Simulate; return the accuracy of good requests in percent, and the share of the others."""
    workers = [
        Worker(f"{a.type}-{a.variant}-{i}", a.type, frozenset({a.variant}))
        for a in plan.assignments
        for i in range(a.instances)
    ]
    model = Model(case.model, case.slo_s, tuple(problem.variants))
    duration = requests / problem.demand
    report = simulate(
        make_policy(*policy),
        Cluster.of([model], workers),
        case.workload(problem.demand),
        duration_s=duration,
        warmup_s=0.05 * duration,
        seed=seed,
    )
    return report.accuracy, report.bad_rate()


def text(plan: tiers.Plan) -> str:
    """Return the number of full/half/quarter instances of each rented type of Table 4."""
    return " ".join(
        f"{name.split('.')[0]} "
        + "/".join(
            str(sum(a.instances for a in plan.assignments if (a.type, a.variant) == (name, v)))
            for v, _, _ in TIERS
        )
        for name in CATALOGUE
        if name in plan.counts
    )
