"""Output of a planner for people: its status, a dry run, and the rows of its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ray_slo.planning.brains.brain import Brain, Seen, Verdict, Wanted, WorkerSays
from ray_slo.record.plans import Outline
from ray_slo.serve.watch.log_writer import PlanLog

Replicas = Mapping[str, tuple[int | None, int]]  # wanted and running, by kind of worker


def status(
    brain: Brain, now: float, seen: Seen, wanted: Mapping[str, Wanted], replicas: Replicas
) -> dict[str, Any]:
    """The part of `ray-slo status` about a plan, without its age and errors."""
    changing = any(
        name in wanted and not _does(says, wanted[name]) for name, says in seen.workers.items()
    )
    outcome = brain.outcome()
    return {
        **({"state": "changing"} if outcome and changing else {}),
        "targets": {kind: target for kind, (target, _) in replicas.items()},
        "running": {kind: running for kind, (_, running) in replicas.items()},
        "workers": {
            name: {
                "ready": says.ready,
                "loaded": sorted(says.loaded),
                "assigned": {a.variant: a.batch_size for a in says.assigned},
                "wanted": _variants(wanted.get(name)),
            }
            for name, says in seen.workers.items()
        },
        **brain.inputs(now, seen),
        **outcome,
        **brain.status(seen),
    }


def trial(
    brain: Brain, verdict: Verdict, now: float, seen: Seen, replicas: Replicas
) -> dict[str, Any]:
    """What a brain would do after adopting a plan, beside what runs now."""
    wanted = brain.wanted(now, seen, False)
    workers = {}
    for name, says in seen.workers.items():
        new = wanted[name].assigned if name in wanted else says.assigned
        workers[name] = {
            "kind": says.kind,
            "does": [asdict(a) for a in says.assigned],
            "would": [asdict(a) for a in new],
            "load": sorted(set(wanted[name].keep) - says.loaded) if name in wanted else [],
        }
    return {
        "why": verdict.why,
        "shortfall": verdict.shortfall,
        "replicas": {
            kind: {"running": running, "target": target, "would": brain.target(kind)}
            for kind, (target, running) in replicas.items()
        },
        "workers": workers,
        "plan": {**brain.inputs(now, seen), **brain.outcome()},
    }


def log(
    to: PlanLog,
    brain: Brain,
    asked: tuple[float, str],
    seen: Seen,
    wanted: Mapping[str, Wanted],
    replicas: Replicas,
    inputs: Mapping[str, Any],
    verdict: Verdict | None,
    **rest: Any,
) -> None:
    """Log a question to the planner.

    Args:
        asked: time and trigger of the question.
        verdict: None if the last plan stays.
    """
    outline = None
    running = [a for says in seen.workers.values() for a in says.assigned]
    if running and to.outline == Outline():  # from another planner
        there = {kind: n for kind, (_, n) in replicas.items()}
        assigned = [(a.variant, a.batch_size, 1) for a in running]
        to.outline = Outline.of_assignments(there, assigned)
    if verdict is not None:
        plan = brain.outcome()
        targets = plan.get("sizes") or {kind: target for kind, (target, _) in replicas.items()}
        parts = [(a["variant"], a["batch_size"], a["workers"]) for a in plan.get("assignments", ())]
        groups = plan.get("groups", {})
        outline = replace(Outline.of_assignments(targets, parts), groups=groups)
        workers = {name: w.group or ", ".join(_variants(w)) or None for name, w in wanted.items()}
        rest |= {"targets": targets, "plan": plan, "workers": workers}
        rest |= {"why": verdict.why, "shortfall": verdict.shortfall}
    about = {key: value for key, value in inputs.items() if key != "demand"}
    to.planned(*asked, outline, demand=inputs.get("demand"), inputs=about, **rest)


def _does(says: WorkerSays, wanted: Wanted) -> bool:
    return says.assigned == wanted.assigned and says.loaded == frozenset(wanted.keep)


def _variants(wanted: Wanted | None) -> list[str]:
    return [a.variant for a in wanted.assigned] if wanted is not None else []
