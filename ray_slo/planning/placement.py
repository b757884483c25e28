"""Which worker gets which part of a plan, with the fewest swaps.

A worker that has the right variant keeps it; what is still wanted goes to idle workers, and only
then are others reloaded (a *swap*). That is minimal by counting: a worker has one variant, so the
variants' matches do not compete, as many workers as possible keep theirs and as many idle ones as
possible are used; the rest must be swaps, in whatever order.

Worked example: the plan wants two large recognisers and a small one; "a" and "b" have the small
one, "c" is idle.

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
    """What each worker is to do; workers that the plan has no use for are left out.

    Args:
        plan: how many workers with which variant and batch size.
        workers: the variant that each has (or is loading), None where it is idle. Of equal ones
            the first are taken, so name those that are up before those that would have to start.

    Returns:
        Assignments by worker, the load per worker as planned. Where there are fewer workers than
        the plan wants, those assignments are made that serve the largest share of its demand at
        all tasks alike, each task's most loaded workers first.
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
    placed.update(zip(idle + others, missing, strict=False))  # there are enough of them
    return placed


def _most_valuable(plan: Plan, count: int) -> list[Assignment]:
    """An entry per worker, at most `count`: next comes the task with the least of its load covered,
    as a request needs them all."""
    slots: dict[str, list[Assignment]] = {}
    load: dict[str, float] = {}
    for a in plan.assignments:
        slots.setdefault(a.task, []).extend([a] * a.workers)
        load[a.task] = load.get(a.task, 0.0) + a.load
    if sum(map(len, slots.values())) <= count:
        return [a for of_task in slots.values() for a in of_task]
    for of_task in slots.values():
        of_task.sort(key=lambda a: a.load / a.workers)  # the last is the next
    covered = dict.fromkeys(slots, 0.0)
    chosen: list[Assignment] = []
    while len(chosen) < count:
        task = min((t for t in slots if slots[t]), key=lambda t: covered[t])
        a = slots[task].pop()
        chosen.append(a)
        covered[task] += a.load / a.workers / load[task] if load[task] else 1.0
    return chosen
