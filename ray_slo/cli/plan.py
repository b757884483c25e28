"""`ray-slo plan`: the workers that a load needs, or the plan that a live planner would make now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_slo.cli._output import (
    in_document,
    mistakes_in,
    number,
    percent,
    print_json,
    read_document,
    say_read,
    table,
)
from ray_slo.cli.plan_application import plan_application

if TYPE_CHECKING:
    from rich.console import Console

    from ray_slo.simulation.sizing import Answer, Question


_EXAMPLE = "configs/plan-resnet50.yaml"

_Spec = Annotated[
    Path | None,
    typer.Argument(
        help="YAML spec with models, load and SLOs, or with an application.", show_default=False
    ),
]
_WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CHANGE",
        help="Also answer for a changed spec: load=+20%, slo=80ms, latency=1.2x or budget=3. "
        "Commas combine changes; repeatable.",
    ),
]
_Policy = Annotated[
    list[str] | None, typer.Option(help="Policy, instead of those in the spec; repeatable.")
]
_Live = Annotated[
    str | None,
    typer.Option(metavar="APP", help="Ask the planner of this application for its present plan."),
]


def plan(
    spec: _Spec = None,
    what_if: _WhatIf = None,
    policy: _Policy = None,
    live: _Live = None,
    address: Annotated[str, typer.Option(help="Address of the Ray cluster, with --live.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Find the fewest workers, the cheapest pool and the variants for a load, by simulation.

    For an application (a spec with `workloads`), show what the planner "auto" would run. With
    --live, show what the planner of a running application would do now, and why. Nothing is
    changed.

    Example: ray-slo plan configs/plan-resnet50.yaml --what-if load=+20% --what-if slo=80ms
    """
    from rich.console import Console

    if (spec is None) == (live is None):
        raise ValueError("give either a SPEC or --live APP")
    if live is not None:
        if what_if or policy:
            raise ValueError("--what-if and --policy go with a SPEC, not with --live")
        _live(live, address, as_json)
        return
    assert spec is not None
    data = read_document(spec, _EXAMPLE, "plan", "simulation", "application")
    if "workloads" in data:
        if what_if or policy:
            raise ValueError(
                "--what-if and --policy go with a spec of one cluster (`workload`); this spec is "
                "of an application (`workloads`), which 'auto' plans"
            )
        plan_application(spec, data, as_json)
        return
    base, answers = _answers(spec, data, policy, what_if or ())
    if as_json:
        print_json(
            {
                "load_per_s": base.workload.rate,
                "bad_rate": base.bad_rate,
                "answers": [a.to_json() for a in answers.pop("")],
                "what_if": {change: [a.to_json() for a in of] for change, of in answers.items()},
            }
        )
        return
    console = Console()
    title = f"{number(base.workload.rate)} requests/s, at most {percent(base.bad_rate)} bad"
    _print(console, title, answers[""])
    if len(answers) > 1:
        _print_beside(console, answers)


def _answers(
    spec: Path, data: dict[str, Any], policies: list[str] | None, changes: Iterable[str]
) -> tuple[Question, dict[str, list[Answer]]]:
    """Return the question and its answers, by change. The answers to the unchanged question have
    the key ""."""
    from rich.console import Console

    from ray_slo.simulation import sizing

    if policies:
        data.pop("policy", None)
        data["policies"] = policies
    document = in_document(spec, sizing.PlanSpec, data)
    say_read([document.workload], document.duration_s)
    named = None if policies else spec  # with --policy, mistakes are not the spec's
    with mistakes_in(named, sizing.PlanSpec):
        base = document.build(spec.parent)
    questions = {"": base} | {change: sizing.what_if(base, change) for change in changes}
    answers: dict[str, list[Answer]] = {}
    with Console(stderr=True).status("simulating") as progress:
        for change, question in questions.items():
            progress.update(f"simulating {change}")
            with mistakes_in(named, sizing.PlanSpec):
                answers[change] = sizing.size(question)
    return base, answers


# Heading of each column, and the function that gives its text for an answer.
_COLUMNS: Mapping[str, Any] = {
    "workers": lambda a: "none" if a.workers is None else str(a.workers),
    "which": lambda a: _which(a),
    "per hour": lambda a: number(a.cost_per_hour) if a.cost_per_hour is not None else "",
    "bad": lambda a: percent(a.figures.bad_rate) if a.figures else "",
    "p99 ms": lambda a: number(1e3 * a.figures.p99_s) if a.figures else "",
    "busy": lambda a: percent(a.figures.busy) if a.figures else "",
    "accuracy %": lambda a: (
        number(a.figures.accuracy, 4) if a.figures and a.figures.accuracy is not None else ""
    ),
    "at least": lambda a: str(a.least) if a.least is not None else "",
    "carries /s": lambda a: number(a.carries, 4) if a.carries is not None else "",
}


def _which(answer: Answer) -> str:
    """Return the number of workers by kind, if there is more than one kind."""
    if answer.counts is None or set(answer.counts) == {"default"}:
        return ""
    return "\n".join(f"{n} {kind}" for kind, n in answer.counts.items())


def _print(console: Console, title: str, answers: Sequence[Answer]) -> None:
    cells = {heading: [show(a) for a in answers] for heading, show in _COLUMNS.items()}
    shown = {heading: column for heading, column in cells.items() if any(column)}
    rows = [
        (a.name, *row) for a, row in zip(answers, zip(*shown.values(), strict=True), strict=True)
    ]
    console.print(table(title, ("", *shown), rows))
    for a in answers:
        if a.figures and a.figures.variants:
            mix = ", ".join(f"{percent(share)} {v}" for v, share in a.figures.variants.items())
            console.print(f"{a.name}: {mix}", markup=False, highlight=False)
        if a.why:
            console.print(f"{a.name}: {a.why}", markup=False, highlight=False)


def _print_beside(console: Console, answers: Mapping[str, Sequence[Answer]]) -> None:
    """Print one column for the unchanged question, and one for each change."""
    rows = [(of[0].name, *(_short(a) for a in of)) for of in zip(*answers.values(), strict=True)]
    columns = ("what if", *(change or "as it is" for change in answers))
    console.print(table("workers · bad · p99", columns, rows))


def _short(answer: Answer) -> str:
    if answer.counts is None or answer.figures is None:
        return "none"
    cost = f" at {number(answer.cost_per_hour)}" if answer.cost_per_hour is not None else ""
    bad, p99 = percent(answer.figures.bad_rate), number(1e3 * answer.figures.p99_s)
    return f"{answer.workers}{cost} · {bad} · {p99} ms"


def _live(application: str, address: str, as_json: bool) -> None:
    from rich.console import Console

    from ray_slo.serve.watch.status import read_dry_run

    found = read_dry_run(address, application)
    if as_json:
        print_json(found)
    else:
        print_dry_run(Console(), application, found)


def print_dry_run(console: Console, application: str, found: Mapping[str, Any]) -> None:
    """Print what a planner would do, beside what runs now."""
    plan = found["plan"]
    demand = number(plan.get("demand"), suffix="/s")
    console.print(
        f"{application}: {found['planner']} would plan for {demand} now "
        f"({found['took_s']:.2f} s). Nothing was changed.",
        markup=False,
        highlight=False,
    )
    console.print(f"why: {found['why']}", markup=False, highlight=False)
    if found["why"] != found["why_in_force"]:
        console.print(f"in force: {found['why_in_force']}", markup=False, highlight=False)
    console.print(
        table(
            "workers",
            ("kind", "running", "wanted", "would want"),
            [
                (kind, str(of["running"]), _count(of["target"]), _count(of["would"]))
                for kind, of in found["replicas"].items()
            ],
        )
    )
    changes = [
        (name, w["kind"], _does(w["does"]), _does(w["would"]), ", ".join(w["load"]))
        for name, w in found["workers"].items()
        # Another load with the same variants and batch sizes is not a change.
        if w["load"] or _does(w["does"]) != _does(w["would"])
    ]
    if changes:
        console.print(table("changes", ("worker", "kind", "does", "would do", "loads"), changes))
    else:
        console.print("no present worker would change")


def _count(workers: int | None) -> str:
    return "as many as there are" if workers is None else str(workers)


def _does(assigned: Sequence[Mapping[str, Any]]) -> str:
    parts = [f"{a['variant']}, batches of {a['batch_size']}" for a in assigned]
    return "; ".join(parts) or "all requests"


def register(app: typer.Typer) -> None:
    app.command()(plan)
