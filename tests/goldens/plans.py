"""Plans as text, from the documents that users write.

    3 gpu, 9 per hour
    large on 2 gpu: 200/s in batches of 1
    accuracy 90 %
    short: demand 1000 req/s is out of reach with 4 gpu: 80 % of it can be served

Accuracies are those of the served requests. A worker that serves two variants counts in both lines.
The last line is there if the problem has no solution, and the plan is the best effort.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_slo.core import LatencyProfile
from ray_slo.planning.brains.brain import Seen, WorkerSays
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.plugin import make_brain
from ray_slo.simulation.application_plan import plan_application
from ray_slo.simulation.application_spec import ApplicationSpec
from tests.goldens.texts import compare


def of_simulation(document: Mapping[str, Any]) -> list[str]:
    """The plan of `ray-slo plan` for the document of an application."""
    found = plan_application(ApplicationSpec.model_validate(document)).to_json()
    lines = [f"{_count(found['workers'])}, {found['cost_per_hour']:g} per hour"]
    lines += _assignments(found["assignments"])
    lines += [
        f"accuracy of {root} {of['accuracy']:.4g} %"
        for root, of in found["expected"].items()
        if of["accuracy"] is not None
    ]
    lines += [
        f"serves {100 * share:.4g} % of {stream}"
        for stream, share in found["served"].items()
        if share < 1 - 1e-6
    ]
    return lines + _short(found["shortfall"])


def of_live(document: Mapping[str, Any], measured: Mapping[tuple[str, str], Any]) -> list[str]:
    """The first plan of a live planner, for the arguments of `ray_slo.serve:build_app`.

    Args:
        measured: (alpha, beta) in milliseconds, and the largest batch, by variant and kind of
            worker: what the workers have measured.
    """
    spec = parse_spec(document)
    brain = make_brain(spec)
    there = {
        f"{kind}{i}": WorkerSays(f"{kind}{i}", kind)
        for kind, of in document["workers"].items()
        for i in range(of.get("num_replicas", 1))
    }
    lines = {
        key: LatencyProfile.linear(alpha / 1e3, beta / 1e3, most)
        for key, (alpha, beta, most) in measured.items()
    }
    seen = Seen(there, lines)
    brain.begin(1.0, seen)
    problem = brain.problem(1.0, seen)
    verdict = brain.adopt(problem, brain.solve(problem))
    plan = brain.outcome()
    brain.due(3600.0, seen)  # some planners stop workers after a while
    if "groups" in plan:  # their names mean nothing
        models = [
            ([m for m, g in plan["groups"].items() if g == group], n)
            for group, n in plan["sizes"].items()
        ]
        found = sorted(f"{', '.join(sorted(of))} on {n} workers" for of, n in models)
    else:
        found = [_count({kind: brain.target(kind) for kind in document["workers"]})]
        found += _assignments(plan.get("assignments", ()))
        if "accuracy" in plan:
            found.append(f"accuracy {plan['accuracy']:.4g} %")
    return found + _short(verdict.shortfall)


def _count(workers: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in workers.items())


def _assignments(rows: Any) -> list[str]:
    return sorted(
        f"{row['variant']} on {row['workers']} {row.get('kind', 'workers')}: {row['load']:.4g}/s "
        f"in batches of {row['batch_size']}"
        for row in rows
    )


def _short(said: str | None) -> list[str]:
    """What a plan lacks, without the description of the best effort."""
    return [] if said is None else ["short: " + said.removeprefix("infeasible: ").split(";")[0]]


def check(what: str, found: list[str], text: str) -> None:
    """Compare a plan with a text.

    Raises:
        AssertionError: they differ; the message shows the lines that differ.
    """
    compare(f"{what}: the plan is another one", text, found)
