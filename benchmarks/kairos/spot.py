"""Beyond Kairos: spot and on-demand instances, with interruptions.

We assume that spot instances (`ray_slo.planning.spot`) cost 35 % of the on-demand price, and are
interrupted at the rate of the case. A replacement is there after 3 minutes. The budget is $2.5/h:

* *on demand*: the plan of `kairos` without spot instances.
* *spot*: the planner's choice. Its bound includes interruptions, and it has enough on-demand
  instances for large requests. In overload, the policy prefers these requests (`pick="scarce"`).
* *careless*: the same planner under the default policy. It assumes that nothing is interrupted, and
  that nothing must survive.

*Undisturbed*: simulated throughput without interruptions. *Interrupted*: with them, including all
requests that are lost or late because of them (at most 1 %). *Large in time*: considers the
requests that only the base serves in time. It is the share answered in time while all spot
instances are gone at once, under the load that the pool otherwise sustains. The simulation's clock
is fast: a replacement takes 30 SLOs. The time between interruptions is scaled by the same factor.
The cost of an interruption itself, one request that is served again, weighs more than in reality.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import KAIROS, TYPES, Case, Policy, planned, text, throughput
from ray_slo.planning import kairos, spot
from ray_slo.planning.kairos import Configuration
from ray_slo.policies import make_policy
from ray_slo.simulation import WorkerEvent, simulate

SOURCE = "ray-slo"
PRICE, REPLACEMENT_S = 0.35, 180.0
PER_HOUR = (0.1, 1.0, 5.0)
REPLACEMENT_SLOS, STORM_SLOS = 30, 150
SCARCE: Policy = ("kairos", {"pick": "scarce"})


def run(quick: bool, seed: int) -> list[Row]:
    requests = 1000 if quick else 8000
    how = {"requests": requests, "tolerance": 0.03 if quick else 0.01, "seed": seed}
    rows = []
    for model in ("RM2",) if quick else ("RM2", "WND"):
        case = Case(model)
        on_demand = planned(case.problem())
        base = throughput(case, on_demand.counts, **how)
        label = f"{model} · on demand {text(on_demand.counts)}"
        rows += [
            Row(label, "bound", "req/s", on_demand.bound),
            Row(label, "undisturbed", "req/s", base),
        ]
        for per_hour in PER_HOUR[1:2] if quick else PER_HOUR:
            problem = market(case, per_hour)
            calm = market(case, 0.0)
            there = problem.types[0].availability(REPLACEMENT_S)
            for name, policy, chosen in (
                ("spot", SCARCE, spot.plan(problem, replacement_s=REPLACEMENT_S)),
                ("careless", KAIROS, spot.plan(calm, large_size=1000)),
            ):
                assert isinstance(chosen, spot.SpotPlan)
                label = (
                    f"{model}, {per_hour:g} interruptions/h · {name} "
                    f"{text(chosen.on_demand)} + {text(chosen.spot)}"
                )
                undisturbed = throughput(case, chosen.counts, policy, **how)
                span = requests / undisturbed * 2
                events = interruptions(case, chosen, there, span, seed)
                got = throughput(case, chosen.counts, policy, worker_events=events, **how)
                rows += [
                    Row(label, "bound", "req/s", chosen.bound),
                    Row(label, "undisturbed", "req/s", undisturbed),
                    Row(label, "interrupted", "req/s", got),
                    Row(label, "over on demand", "×", got / base),
                    Row(
                        label,
                        "large in time",
                        "%",
                        100 * storm(case, chosen, policy, got, quick, seed),
                    ),
                ]
    return rows


def market(case: Case, per_hour: float) -> kairos.Problem:
    """Return the problem of a case, with spot instances of every type."""
    spot_too = {"interruptions_per_hour": per_hour}
    types = [
        t.model_copy(update={**spot_too, "spot_price_per_hour": PRICE * t.price_per_hour})
        for t in TYPES
    ]
    return replace(case.problem(), types=types)


def interruptible(chosen: spot.SpotPlan) -> list[str]:
    """Return the ids of the workers in the case's cluster that are spot instances."""
    return [
        f"{name}-{chosen.on_demand.get(name, 0) + i}"
        for name, n in chosen.spot.items()
        for i in range(n)
    ]


def interruptions(
    case: Case, chosen: spot.SpotPlan, there: float, span_s: float, seed: int
) -> list[WorkerEvent]:
    """Return events: every spot instance leaves at random, and joins when it is replaced."""
    rng = np.random.default_rng([seed, 1])
    away = REPLACEMENT_SLOS * case.slo_s
    events = []
    for worker in interruptible(chosen):
        at = 0.0 if rng.random() < there else float(rng.uniform(0, away))
        if at > 0:
            events.append(WorkerEvent(at, worker, "join"))
        while (at := at + float(rng.exponential(away * there / (1 - there)))) < span_s:
            events += [WorkerEvent(at, worker, "leave"), WorkerEvent(at + away, worker, "join")]
            at += away
    return events


def storm(
    case: Case, chosen: spot.SpotPlan, policy: Policy, rate: float, quick: bool, seed: int
) -> float:
    """Return the share in time of large requests that arrive while all spot instances are gone.

    The first few SLOs, in which queues change, are left out.
    """
    begin = 20 * case.slo_s
    end = begin + STORM_SLOS * case.slo_s / (3 if quick else 1)
    events = [
        WorkerEvent(at, worker, action)
        for worker in interruptible(chosen)
        for at, action in ((begin, "leave"), (end, "join"))
    ]
    report = simulate(
        make_policy(*policy),
        case.cluster(chosen.counts),
        case.workload(rate),
        duration_s=end,
        seed=seed,
        worker_events=events,
    )
    seen = report.requests
    mine = seen[(seen["arrival_s"] > begin + 3 * case.slo_s) & (seen["size"] > reach(case, chosen))]
    return float((mine["outcome"] == "good").mean())


def reach(case: Case, chosen: spot.SpotPlan) -> int:
    """Return the size of the largest request that an auxiliary instance can serve in time."""
    within: Configuration = {
        n: case.profiles()[n].max_batch_within(0.98 * case.slo_s) for n in chosen.counts
    }
    return max((size for size in within.values() if size < 1000), default=0)
