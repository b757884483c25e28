"""Assignment of the parts of a plan to workers, with the fewest swaps.

A worker that has a planned variant keeps it. The missing variants go to idle workers first, and
then to workers that have another variant (a *swap*). The number of swaps is minimal: each worker
has only one variant, so as many workers as possible keep theirs, and all idle workers are used
before any swap.

Worked example: the plan wants two large recognisers and a small one. "a" and "b" have the small
one, and "c" is idle.

    >>> from ray_slo.planning.loki import Assignment, Plan
    >>> large = Assignment("name", "large", 2, 2, load=160, throughput=100, latency_s=0.02)
    >>> small = Assignment("name", "small", 2, 1, load=150, throughput=200, latency_s=0.01)
    >>> wanted = Plan("accuracy", (large, small), (), 85.0, 60, 0.0, 0, 0.0, "")
    >>> placed = place(wanted, {"a": "small", "b": "small", "c": None})
    >>> {worker: assigned.variant for worker, assigned in placed.items()}
    {'a': 'small', 'c': 'large', 'b': 'large'}
"""

from __future__ import annotations

from collections.abc import Mapping

from ray_slo.core.cluster import Assigned
from ray_slo.core.requests import WorkerId
from ray_slo.planning.loki import Assignment, Plan


def place(plan: Plan, workers: Mapping[WorkerId, str | None]) -> dict[WorkerId, Assigned]:
    """Return the assignment of each worker. Workers that the plan does not need are left out.

    Args:
        plan: number of workers with each variant and batch size.
        workers: the variant that each worker has or is loading. None if it is idle. Of equal
            workers the first are taken, so running workers should come before starting ones.

    Returns:
        Assignments by worker, with the planned load of each. If there are fewer workers than
        planned, the assignments serve the largest share of the demand that is the same at all
        tasks. In each task, the workers with the largest load come first.
    """
    wanted = _most_valuable(plan, len(workers))
    idle = [w for w, variant in workers.items() if variant is None]
    having: dict[str, list[WorkerId]] = {}
    for worker, variant in workers.items():
        if variant is not None:
            having.setdefault(variant, []).append(worker)
    placed: dict[WorkerId, Assigned] = {}
    missing: list[Assigned] = []
    for assignment in wanted:
        assigned = Assigned(
            assignment.variant, assignment.batch_size, assignment.load / assignment.workers
        )
        if have := having.get(assignment.variant):
            placed[have.pop(0)] = assigned
        else:
            missing.append(assigned)
    others = [w for w in workers if workers[w] is not None and w not in placed]
    placed.update(zip(idle + others, missing, strict=False))  # there are enough workers
    return placed


def _most_valuable(plan: Plan, count: int) -> list[Assignment]:
    """Return at most `count` assignments, one per worker. The next one is always for the task with
    the smallest covered share of its load, because a request needs all tasks."""
    slots: dict[str, list[Assignment]] = {}
    load: dict[str, float] = {}
    for a in plan.assignments:
        slots.setdefault(a.task, []).extend([a] * a.workers)
        load[a.task] = load.get(a.task, 0.0) + a.load
    if sum(map(len, slots.values())) <= count:
        return [a for of_task in slots.values() for a in of_task]
    for of_task in slots.values():
        of_task.sort(key=lambda a: a.load / a.workers)  # assignments are taken from the end
    covered = dict.fromkeys(slots, 0.0)
    chosen: list[Assignment] = []
    while len(chosen) < count:
        task = min((t for t in slots if slots[t]), key=lambda t: covered[t])
        a = slots[task].pop()
        chosen.append(a)
        covered[task] += a.load / a.workers / load[task] if load[task] else 1.0
    return chosen
