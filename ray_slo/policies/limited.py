"""In overload, a pipeline admits at its root what can be done by the deadline.

A request that is dropped below the root has used workers for nothing. Without a limit the root
takes the time that the tasks below need, because its requests come first. So the *work* of a
request is estimated: that of its task and of all tasks below it, in seconds of a worker. A client's
request is admitted if the workers can do its own work, and that of all requests of its tree with no
later deadline, by its deadline. Below capacity this is nearly always so. Work with later deadlines
does not count: a class with a long SLO may have much more of it than a short SLO has room for.

The work of an item is measured: the time of a task's batches, divided by their items. Batches are
smaller if fewer requests are admitted, so the least of the last measurements counts.

Worked example: 10 workers, SLO 0.5 s, a root of 20 ms per item, and 2 items of 40 ms each below. A
client's request is 100 ms of work, so 50 of them may wait at the root. One whose root is done, and
whose two items wait below, counts 80 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Decision, Dispatch, Drop, DropReason
from ray_slo.core.policy import InFlight, Policy, PolicyWrapper, wrapper
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, RequestId, WorkerId
from ray_slo.core.trees import Tree, TreeTask

_MEASURED = 50  # items of a measurement
_PARTS = 8  # of the shortest SLO: deadlines in the same part are equal here
_MAX_PARTS = 256  # of the longest SLO
_FORGET = 1.02  # times the least work, per measurement: batches may have become slower


class Limited(PolicyWrapper):
    """A policy for pipelines that limits what their roots admit.

    Args:
        policy: serves trees of tasks.
        trees: of the application; those of one task have no limit.
    """

    def __init__(self, policy: Policy, trees: Iterable[Tree]) -> None:
        super().__init__(policy)
        known = [_Tree(tree) for tree in trees if len(tree.tasks) > 1]
        self._tree_of = {task: tree for tree in known for task in tree.tasks}
        self._present: dict[RequestId, Request] = {}
        self._flights: dict[WorkerId, dict[int, Sequence[Request]]] = {}
        self._again: set[RequestId] = set()  # admitted, and will arrive again
        self._adopted_at = -math.inf
        self._refused: list[Request] = []
        self._workers = 0

    # -- events --------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self.policy.requests_arrived(now, [r for r in requests if self._admits(now, r)])

    def _admits(self, now: float, r: Request) -> bool:
        tree = self._tree_of.get(r.task)
        if tree is None:
            return True
        new = r.arrival > self._adopted_at and r.id not in self._again
        self._again.discard(r.id)
        if new and self._workers and tree.refuses(now, r, self._workers):
            self._refused.append(r)
            return False
        self._came(r)
        return True

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        self._left(requests)
        gone = {r.id for r in requests}
        self._again -= gone
        self._refused = [r for r in self._refused if r.id not in gone]
        self.policy.requests_cancelled(now, requests)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self._left(self._flights.get(worker, {}).pop(outcome.batch_id, ()))
        if outcome.status is BatchStatus.FINISHED:
            took_s = outcome.finished_at - outcome.started_at
            each_s = took_s / max(sum(r.size for r in outcome.requests), 1)
            for r in outcome.requests:
                if (tree := self._tree_of.get(r.task)) is not None:
                    tree.ran(r, each_s)
        elif outcome.status is not BatchStatus.FAILED:
            self._again.update(r.id for r in outcome.requests)
        self.policy.batch_finished(now, worker, outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._workers = len(cluster.workers)
        for worker in self._flights.keys() - cluster.workers.keys():
            for requests in self._flights.pop(worker).values():
                self._left(requests)
        self.policy.cluster_changed(now, cluster)

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over from another policy, before the first event. It admits what arrived before."""
        self._adopted_at = now
        for d in (flight.dispatch for flight in flights):
            self._flights.setdefault(d.worker, {})[d.batch_id] = d.requests
            for r in d.requests:
                self._came(r)
        if (limited := wrapper(former, Limited)) is not None:
            for task, tree in self._tree_of.items():
                if (known := limited._tree_of.get(task)) is not None:
                    tree.learn(known)
            self._again |= limited._again
        self.policy.adopt(now, flights, batch_id, former)  # type: ignore[attr-defined]

    def decide(self, now: float) -> Decision:
        decision = self.policy.decide(now)
        for action in decision.actions:
            if isinstance(action, Dispatch):
                self._flights.setdefault(action.worker, {})[action.batch_id] = action.requests
            elif isinstance(action, Drop):
                self._left(action.requests)
        if not self._refused:
            return decision
        refused, self._refused = self._refused, []
        return Decision([*decision.actions, Drop(refused, DropReason.SHED)], decision.wake_at)

    def _came(self, r: Request) -> None:
        tree = self._tree_of.get(r.task)
        if tree is not None and r.id not in self._present:
            self._present[r.id] = r
            tree.add(r, r.size)

    def _left(self, requests: Iterable[Request]) -> None:
        for r in requests:
            if (came := self._present.pop(r.id, None)) is not None:
                self._tree_of[came.task].add(came, -came.size)


class _Task:
    """A task of a tree.

    Attributes:
        made: items that each task below gets per item of this one, the mean over its variants.
        own_s: work of an item here, seconds of a worker; 0 before the first measurement.
        work_s: the same, with the work of all tasks below.
        ran, busy_s: items that ran since the last measurement, and the time that they took.
    """

    __slots__ = ("busy_s", "made", "own_s", "ran", "work_s")

    def __init__(self, task: TreeTask, children: Iterable[str]) -> None:
        made = list(task.factors.values())
        self.made = {
            child: sum(m.get(child, 1.0) for m in made) / len(made) if made else 1.0
            for child in children
        }
        self.own_s = self.work_s = self.busy_s = 0.0
        self.ran = 0


class _Due:
    """Requests with deadlines in one part of time.

    Attributes:
        items: that wait or run, by task.
        work_s: of all of them, seconds of a worker.
    """

    __slots__ = ("items", "work_s")

    def __init__(self) -> None:
        self.items: dict[str, int] = {}
        self.work_s = 0.0


class _Tree:
    """A tree with several tasks, and the work of its requests.

    Attributes:
        tasks: by name, every task before those below it.
        due: the requests that wait or run, by the part of time that has their deadline.
    """

    def __init__(self, tree: Tree) -> None:
        self._root = tree.root
        slos_s = tree.slos_s.values()
        self._part_s = max(min(slos_s) / _PARTS, max(slos_s) / _MAX_PARTS)
        self.tasks = {task.name: _Task(task, tree.children(task.name)) for task in tree.order}
        self.due: dict[int, _Due] = {}

    def _part(self, r: Request) -> int:
        return math.floor(r.deadline / self._part_s)

    def add(self, r: Request, items: int) -> None:
        """A request came with these items, or left with less than none."""
        part = self._part(r)
        due = self.due.setdefault(part, _Due())
        due.items[r.task] = due.items.get(r.task, 0) + items
        due.work_s += items * self.tasks[r.task].work_s
        if not due.items[r.task]:
            del due.items[r.task]
            if not due.items:
                del self.due[part]

    def refuses(self, now: float, r: Request, workers: int) -> bool:
        """Whether a new request is too much work for this many workers."""
        if r.task != self._root or not self.due:
            return False
        part = self._part(r)
        work_s = sum(due.work_s for before, due in self.due.items() if before <= part)
        own_s = r.size * self.tasks[r.task].work_s
        return work_s > 0 and work_s + own_s > workers * (r.deadline - now)

    def ran(self, r: Request, each_s: float) -> None:
        """A request ran, and took this time per item, seconds."""
        task = self.tasks[r.task]
        task.ran += r.size
        task.busy_s += r.size * each_s
        if task.ran >= _MEASURED:
            found = task.busy_s / task.ran
            task.own_s = min(found, _FORGET * task.own_s) if task.own_s else found
            task.ran, task.busy_s = 0, 0.0
            self._sum_up()

    def learn(self, former: _Tree) -> None:
        """Use the measurements of another policy."""
        for name, task in former.tasks.items():
            if name in self.tasks:
                self.tasks[name].own_s = task.own_s
        self._sum_up()

    def _sum_up(self) -> None:
        for task in reversed(self.tasks.values()):
            below_s = sum(n * self.tasks[child].work_s for child, n in task.made.items())
            task.work_s = task.own_s + below_s
        for due in self.due.values():
            due.work_s = sum(n * self.tasks[task].work_s for task, n in due.items.items())
