"""Output of a planner for people: its status and a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray_slo.planning.brains.brain import Brain, Seen, Verdict, Wanted, WorkerSays

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


def work(wanted: Mapping[str, Wanted]) -> dict[str, str | None]:
    """Return the group or the variants of each worker, for the log."""
    return {name: w.group or ", ".join(_variants(w)) or None for name, w in wanted.items()}


def _does(says: WorkerSays, wanted: Wanted) -> bool:
    return says.assigned == wanted.assigned and says.loaded == frozenset(wanted.keep)


def _variants(wanted: Wanted | None) -> list[str]:
    return [a.variant for a in wanted.assigned] if wanted is not None else []
