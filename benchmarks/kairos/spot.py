"""Beyond Kairos: spot instances in the plan, with interruptions.

We assume that spot instances cost 35 % of the on-demand price, and are interrupted at the rate of
the case. A replacement is there after 3 minutes. The planner `auto` rents the cheapest instances
for the demand, which is 90 % of what `kairos` plans on demand for $2.5/h:

* *on demand*: without spot instances.
* *spot*: with spot instances, and with spare ones for the time in which some are gone.
* *careless*: the same, but the plan assumes that nothing is interrupted.

*Undisturbed* and *interrupted*: simulated share of requests that are late or dropped, without and
with interruptions. The simulation's clock is fast: a replacement takes 30 SLOs. The time between
interruptions is scaled by the same factor. The cost of an interruption itself, one request that is
served again, weighs more than in reality.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import TYPES, Case, planned, planned_by_auto, report_of
from ray_slo.core import Variant
from ray_slo.planning import auto
from ray_slo.simulation import WorkerEvent

SOURCE = "ray-slo"
PRICE = 0.35
PER_HOUR = (0.1, 1.0, 5.0)
REPLACEMENT_SLOS = 30
SPOT = " spot"
ON_DEMAND = [auto.Kind(t.name, 0, 50, t.price_per_hour) for t in TYPES]


def run(quick: bool, seed: int) -> list[Row]:
    requests = 1000 if quick else 50_000
    rows = []
    for model in ("RM2",) if quick else ("RM2", "WND"):
        case = Case(model)
        demand = 0.9 * planned(case.problem()).bound
        known = case.profiles()
        profiles = known | {name + SPOT: profile for name, profile in known.items()}
        systems = [("on demand", ON_DEMAND, 0.0)]
        for per_hour in PER_HOUR[1:2] if quick else PER_HOUR:
            for name, known_of in (("spot", per_hour), ("careless", 0.0)):
                kinds = [*ON_DEMAND, *spot_kinds(known_of)]
                systems.append((f"{name}, {per_hour:g} interruptions/h:", kinds, per_hour))
        for name, kinds, per_hour in systems:
            variants = [Variant(model, {kind.name: profiles[kind.name] for kind in kinds})]
            plan = planned_by_auto(case, demand, variants, kinds)
            label = f"{model}, {demand:.4g} req/s · {name} {text(plan)}"
            rows.append(Row(label, "cost", "$/h", plan.cost_per_hour))
            there = spot_kinds(per_hour)[0].there
            events = interruptions(case, plan, there, requests / demand, seed)
            for said, of in (("undisturbed", []), ("interrupted", events)):
                report = report_of(
                    case, demand, variants, plan, requests=requests, seed=seed, worker_events=of
                )
                rows.append(Row(label, said, "% bad", 100 * report.bad_rate()))
    return rows


def spot_kinds(per_hour: float) -> list[auto.Kind]:
    """Return the types of Table 4 as spot instances."""
    return [
        auto.Kind(t.name + SPOT, 0, 50, PRICE * t.price_per_hour, interruptions_per_hour=per_hour)
        for t in TYPES
    ]


def text(plan: auto.Plan) -> str:
    """Return the number of instances of each type of Table 4, on demand and spot."""
    return " + ".join(
        str(tuple(plan.workers.get(t.name + end, 0) for t in TYPES)) for end in ("", SPOT)
    )


def interruptions(
    case: Case, plan: auto.Plan, there: float, span_s: float, seed: int
) -> list[WorkerEvent]:
    """Return events: every spot instance leaves at random, and joins when it is replaced."""
    rng = np.random.default_rng([seed, 1])
    away = REPLACEMENT_SLOS * case.slo_s
    events = []
    for kind, count in plan.workers.items():
        for worker in (f"{kind}-{i}" for i in range(count) if kind.endswith(SPOT)):
            at = 0.0 if rng.random() < there else float(rng.uniform(0, away))
            if at > 0:
                events.append(WorkerEvent(at, worker, "join"))
            while (at := at + float(rng.exponential(away * there / (1 - there)))) < span_s:
                events += [WorkerEvent(at, worker, "leave"), WorkerEvent(at + away, worker, "join")]
                at += away
    return events
