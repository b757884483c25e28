"""`ray-slo plan` for an application: what the planner `auto` would run for its workloads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_slo.cli._output import (
    in_document,
    mistakes_in,
    number,
    percent,
    print_json,
    say_read,
    table,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ray_slo.simulation.application_plan import ApplicationPlan


def plan_application(spec: Path, data: Mapping[str, Any], as_json: bool) -> None:
    """Make the plan and print it."""
    from rich.console import Console

    from ray_slo.simulation import application_plan
    from ray_slo.simulation.application_spec import ApplicationSpec

    document = in_document(spec, ApplicationSpec, data)
    say_read(document.workloads.values(), None)
    with mistakes_in(spec, ApplicationSpec):
        made = application_plan.plan_application(document, spec.parent)
    if as_json:
        print_json(made.to_json())
        return
    _print(Console(), made)


def _print(console: Console, made: ApplicationPlan) -> None:
    problem, plan = made.problem, made.plan
    kinds = [
        (
            kind.name,
            f"{plan.workers[kind.name]} of {kind.min_workers}–{kind.max_workers}",
            number(plan.workers[kind.name] * kind.price_per_hour),
            number(plan.prices.worker_s.get(kind.name, 0.0)),
        )
        for kind in problem.kinds
    ]
    console.print(table("workers", ("kind", "workers", "per hour", "value of 1 s"), kinds))
    serves = [
        (
            row["variant"],
            row["task"],
            row["kind"],
            str(row["workers"]),
            str(row["batch_size"]),
            percent(row["share"]),
            number(row["load"], suffix="/s"),
        )
        for row in made.assignments
    ]
    heads = ("variant", "model", "kind", "workers", "batch", "share", "requests")
    console.print(table("what they serve", heads, serves))
    streams = [
        (
            stream,
            number(of.rate, suffix="/s"),
            number(of.dispersion),
            number(1e3 * problem.slo_s(stream), suffix=" ms"),
            percent(plan.served.get(stream, 1.0)),
        )
        for stream, of in problem.demand.items()
    ]
    console.print(
        table("demand", ("stream", "requests", "dispersion", "SLO", "planned for"), streams)
    )
    roots = [
        (root, number(of.accuracy, 4, " %"), percent(of.bad_rate))
        for root, of in made.expected.items()
    ]
    console.print(table("expected", ("root", "accuracy", "bad"), roots))
    worth = {
        task: value for task, value in plan.prices.request.items() if not math.isclose(value, 0)
    }
    if worth:
        told = ", ".join(f"{task} {number(value)}" for task, value in worth.items())
        console.print(
            f"value of one more request, in points of accuracy: {told}",
            markup=False,
            highlight=False,
        )
    if made.shortfall is not None:
        console.print(f"best effort, as {made.shortfall}", markup=False, highlight=False)
    console.print(plan.explanation, markup=False, highlight=False)
