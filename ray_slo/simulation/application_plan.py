"""The plan of `auto` for an application's document, without a run: for `ray-slo plan`.

The demand of a stream is the mean rate of its workload; for a trace, the largest rate. Its
dispersion is the median of several random draws, measured like the live planner's. The mean size of
its requests is that of the draws.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ray_slo.core.cluster import Cluster, Model, Variant
from ray_slo.core.policy import Expected
from ray_slo.planning import auto
from ray_slo.planning.auto.expected import expected
from ray_slo.planning.brains.auto import assignments
from ray_slo.planning.brains.streams import Burstiness
from ray_slo.planning.result import Infeasible, best
from ray_slo.simulation.application_spec import ApplicationSpec
from ray_slo.simulation.arrivals import Trace
from ray_slo.simulation.workloads import Requests, Workload

_MEASURED_S = 130.0  # time of arrivals that never end; `Burstiness` keeps no longer time
_REPORT_S = 0.5
_DRAWS = 9


@dataclass(frozen=True)
class ApplicationPlan:
    """A plan, and its problem.

    Attributes:
        problem: the problem, with the demand of every stream that has a workload.
        plan: the plan to carry out.
        shortfall: what the plan does not serve, and why. None if it serves everything.
        expected: predictions for clients' requests, by root.
    """

    problem: auto.Problem
    plan: auto.Plan
    shortfall: str | None
    expected: Mapping[str, Expected]

    @property
    def assignments(self) -> list[dict[str, Any]]:
        """What workers serve. Workers with the same work are one entry with these fields: `task` (a
        model), `variant`, `kind`, `batch_size`, `workers` (their number), `load` in requests per
        second, and `share` of the model's load."""
        model_of = {v.name: m.name for m in self.problem.models for v in m.variants}
        rows = assignments(self.plan.slots, model_of)
        total: dict[str, float] = {}
        for row in rows:
            total[row["task"]] = total.get(row["task"], 0.0) + row["load"]
        return [row | {"share": row["load"] / (total[row["task"]] or 1.0)} for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        plan = self.plan
        return {
            "demand": {stream: asdict(of) for stream, of in self.problem.demand.items()},
            "workers": dict(plan.workers),
            "cost_per_hour": plan.cost_per_hour,
            "assignments": self.assignments,
            "served": dict(plan.served),
            "expected": {root: of._asdict() for root, of in self.expected.items()},
            "prices": asdict(plan.prices),
            "step": plan.step,
            "why": plan.explanation,
            "shortfall": self.shortfall,
        }


def plan_application(spec: ApplicationSpec, base: str | Path = ".") -> ApplicationPlan:
    """Plan for the document's workloads; profile files are relative to `base`.

    Raises:
        ValueError: the document names no planner, or has mistakes.
    """
    if spec.planner is None:
        raise ValueError(
            "planner: null runs all workers, and there is nothing to plan; give 'auto'"
        )
    problem = spec.problem(Path(base))
    rngs = np.random.default_rng(spec.seed).spawn(len(spec.workloads))
    drawn = {
        stream: [_drawn(workload, problem.slo_s(stream), spec, rng) for rng in its.spawn(_DRAWS)]
        for (stream, workload), its in zip(spec.workloads.items(), rngs, strict=True)
    }
    demand = {stream: _demand(spec.workloads[stream], drawn[stream]) for stream in drawn}
    sizes: dict[str, list[int]] = {}  # of the requests for each model that clients ask for
    for stream, draws in drawn.items():
        tree = problem.tree_of(stream)
        found = [size for requests in draws if requests.size is not None for size in requests.size]
        sizes.setdefault(tree[tree.root].model, []).extend(found)
    models = tuple(
        replace(model, items=float(np.mean(its))) if (its := sizes.get(model.name)) else model
        for model in problem.models
    )
    problem = replace(problem, models=models, demand=demand)
    made = auto.plan(problem)
    shortfall = made.reason if isinstance(made, Infeasible) else None
    return ApplicationPlan(problem, best(made), shortfall, expected(problem, best(made)))


def _drawn(
    workload: Workload, slo_s: float, spec: ApplicationSpec, rng: np.random.Generator
) -> Requests:
    """Drawn arrivals of a stream."""
    lasts_s = workload.length_s or min(spec.duration_s or _MEASURED_S, _MEASURED_S)
    cluster = Cluster.of([Model("m", slo_s, (Variant("any", {}),))], [])
    return workload.generate(cluster, lasts_s, rng)


def _demand(workload: Workload, draws: Sequence[Requests]) -> auto.Demand:
    process = workload.arrivals
    rate = max(process.rates) if isinstance(process, Trace) else workload.rate
    return auto.Demand(rate, statistics.median(_dispersion(requests) for requests in draws))


def _dispersion(requests: Requests) -> float:
    burstiness = Burstiness()
    until = float(requests.arrival.max(initial=0.0))
    for count in np.histogram(requests.arrival, np.arange(0.0, until, _REPORT_S))[0].tolist():
        burstiness.counted(_REPORT_S, count)
    return burstiness.value
