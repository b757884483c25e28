"""MostAccurateFirst: routing tables of a pipeline (Loki §5.1, Algorithm 1).

Tasks are processed parents first. Each worker's outgoing requests go to the most accurate workers
of the child task that have capacity left, then to less accurate ones. The capacity that is left at
the end makes the backup tables, from which opportunistic rerouting chooses (§5.2).

Worked example: one detector makes 4 requests per frame. A large recogniser takes 100 requests per
second, a small one 200. At 60 frames per second, 100 of 240 requests go to the large one.

    >>> workers = [
    ...     Worker("d", "detect", 90.0, capacity=100, execution_s=0.02, factors={"name": 4.0}),
    ...     Worker("l", "name", 90.0, capacity=100, execution_s=0.02),
    ...     Worker("s", "name", 80.0, capacity=200, execution_s=0.01),
    ... ]
    >>> r = most_accurate_first({"detect": None, "name": "detect"}, workers, demand=60)
    >>> [(e.worker, round(e.probability, 3)) for e in r.tables["d"]["name"]]
    [('l', 0.417), ('s', 0.583)]
    >>> r.frontend[0].worker, [(b.worker, b.leftover) for b in r.backup["name"]]
    ('d', [('s', 60.0)])
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_EPS = 1e-9


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker in a plan.

    Args:
        id: unique among the workers.
        task: task that it serves.
        accuracy: accuracy of its variant alone, percent.
        capacity: requests per second at its configured batch size.
        execution_s: time of a batch of this size, in seconds. It is the latency budget of the task,
            and y in §5.2.
        factors: number of requests of each child task per request: the multiplicative factor times
            the branch ratio, as planned or learned. A missing child has 1.
        planned: planned requests per second. None means its capacity. Workers are first filled up
            to this rate. A plan need not use all capacity of accurate workers, because these may
            make more requests than the child tasks can take. Up to this rate, no child task gets
            more than planned.
    """

    id: Hashable
    task: str
    accuracy: float
    capacity: float
    execution_s: float
    factors: Mapping[str, float] = field(default_factory=dict)
    planned: float | None = None


class Entry(NamedTuple):
    """A request goes to `worker` with `probability`. If all workers of the child task are
    saturated, the probabilities of a table sum to less than 1: there is no capacity for the
    rest."""

    worker: Hashable
    probability: float


class Backup(NamedTuple):
    """A worker with unused capacity, in requests per second."""

    worker: Hashable
    accuracy: float
    execution_s: float
    leftover: float


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing tables.

    Attributes:
        frontend: table of the frontend, to the workers of the root.
        tables: tables by worker and child task.
        backup: workers with unused capacity, by task. The most accurate come first; of equally
            accurate ones, the fastest.
        incoming: requests per second that each worker gets.
        unrouted: requests per second for which there is no capacity, by task.
    """

    frontend: tuple[Entry, ...]
    tables: Mapping[Hashable, Mapping[str, tuple[Entry, ...]]]
    backup: Mapping[str, tuple[Backup, ...]]
    incoming: Mapping[Hashable, float]
    unrouted: Mapping[str, float]


def most_accurate_first(
    parents: Mapping[str, str | None], workers: Iterable[Worker], demand: float
) -> Routing:
    """Return the routing tables for a demand. This takes O(n log n) for n workers.

    Workers of the same accuracy are filled in the given order.

    Args:
        parents: parent of each task. Parents come before their children; the root's parent is None.
        workers: the workers of all tasks.
        demand: requests per second at the root.

    Raises:
        ValueError: `parents` is not a tree in that order; or a worker has an unknown task; or two
            workers have the same ID; or the demand is below 0.
    """
    if not demand >= 0:
        raise ValueError(f"demand must be at least 0, got {demand}")
    children = _children(parents)
    of_task = _by_task(children, workers)
    left = {w.id: w.capacity for members in of_task.values() for w in members}
    if len(left) < sum(map(len, of_task.values())):
        raise ValueError("workers must have ids of their own")
    incoming = dict.fromkeys(left, 0.0)
    unrouted = dict.fromkeys(of_task, 0.0)
    slots = {task: _slots(members) for task, members in of_task.items()}

    def route(task: str, total: float) -> tuple[Entry, ...]:
        outgoing, enough, of_child = total, total * _EPS, slots[task]
        shares: dict[Hashable, float] = {}
        while of_child and outgoing > enough:
            to, room = of_child[-1]
            routed = outgoing if outgoing < room else room
            outgoing -= routed
            left[to] -= routed
            incoming[to] += routed
            shares[to] = shares.get(to, 0.0) + routed / total
            if routed < room:
                of_child[-1] = to, room - routed
            else:
                of_child.pop()
        if outgoing > enough:
            unrouted[task] += outgoing
        return tuple(Entry(to, share) for to, share in shares.items())

    root = next(iter(children))
    frontend = route(root, demand) if demand else ()
    tables: dict[Hashable, Mapping[str, tuple[Entry, ...]]] = {}
    for task, below in children.items():
        for w in of_task[task]:
            tables[w.id] = {
                child: route(child, outgoing)
                for child in below
                if (outgoing := incoming[w.id] * w.factors.get(child, 1.0)) > 0
            }
    backup = {
        task: tuple(
            Backup(w.id, w.accuracy, w.execution_s, left[w.id])
            for w in sorted(members, key=lambda w: (-w.accuracy, w.execution_s))
            if left[w.id] > _EPS * w.capacity
        )
        for task, members in of_task.items()
    }
    return Routing(frontend, tables, backup, incoming, unrouted)


def _children(parents: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return the child tasks of each task.

    Raises:
        ValueError: `parents` is not a tree with the root first.
    """
    children: dict[str, list[str]] = {}
    for task, parent in parents.items():
        if (parent is None) != (not children) or (parent is not None and parent not in children):
            raise ValueError(
                f"parents must be a tree, root first, parents before children; got {dict(parents)}"
            )
        children[task] = []
        if parent is not None:
            children[parent].append(task)
    return children


def _by_task(tasks: Iterable[str], workers: Iterable[Worker]) -> dict[str, list[Worker]]:
    """Return the workers of each task, the most accurate first.

    Raises:
        ValueError: a worker has an unknown task.
    """
    of_task: dict[str, list[Worker]] = {task: [] for task in tasks}
    for worker in workers:
        if worker.task not in of_task:
            raise ValueError(
                f"task of worker {worker.id!r} must be one of {sorted(of_task)}, "
                f"got {worker.task!r}"
            )
        of_task[worker.task].append(worker)
    for members in of_task.values():
        members.sort(key=lambda worker: -worker.accuracy)
    return of_task


def _slots(members: list[Worker]) -> list[tuple[Hashable, float]]:
    """Return the rates that workers can take, in reverse order: first the planned rates, then the
    rest of the capacities."""
    planned, beyond = [], []
    for w in members:
        room = w.capacity if w.planned is None else min(w.planned, w.capacity)
        if room > 0:
            planned.append((w.id, room))
        if w.capacity > room:
            beyond.append((w.id, w.capacity - room))
    return (planned + beyond)[::-1]
