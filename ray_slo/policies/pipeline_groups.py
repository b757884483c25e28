"""Groups of equal workers in a pipeline, their tasks, and the remaining time of a path."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from ray_slo.core.cluster import Cluster, DispatchDelay, Model, Worker
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import WorkerId
from ray_slo.core.trees import WAITING_FACTOR
from ray_slo.policies.shared.workers import Sent


class Tree:
    """Tasks by parent; the root first, parents before children."""

    def __init__(self, parents: Mapping[str, str | None]) -> None:
        self.parents = dict(parents)
        self.root = next(iter(parents), "")
        self.children: dict[str, list[str]] = {t: [] for t in parents}
        depth: dict[str, int] = {}
        for task, parent in parents.items():
            depth[task] = 1 if parent is None else depth[parent] + 1
            if parent is not None:
                self.children[parent].append(task)
        self.levels = max(depth.values(), default=0)


@dataclass(eq=False, repr=False, slots=True)
class Member:
    """A worker, in every group that it serves. `timer_at`: when a batch may be sent ahead."""

    id: WorkerId
    rank: int = 0
    flights: list[Sent] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    timer_at: float = math.inf

    @property
    def free_at(self) -> float:
        return self.flights[-1].end_at if self.flights else -math.inf

    def may_send_ahead(self, now: float, delay_s: float) -> bool:
        """Whether the predicted end of its only batch is within the delay."""
        if len(self.flights) != 1 or delay_s == 0:
            return False
        end_at = self.flights[0].end_at
        return end_at - delay_s <= now <= end_at


@dataclass(eq=False, repr=False, slots=True)
class Group:
    """Equal workers of a task, with a shared queue. Without members, it holds requests that wait
    for a worker. `timer_at`: when the head is checked, if nothing else happens."""

    task: str
    variant: str
    batch_size: int
    accuracy: float = 0.0
    latency_s: float = 0.0
    profile: LatencyProfile = field(init=False)
    queue: DeadlineQueue = field(default_factory=DeadlineQueue)
    timer_at: float = math.inf
    members: list[Member] = field(default_factory=list)
    # Heaps; stale entries are removed when they reach the top.
    _idle: list[tuple[int, Member]] = field(default_factory=list)
    _listed: set[Member] = field(default_factory=set)  # in `_idle`
    _busy: list[tuple[float, int, Member]] = field(default_factory=list)

    def clear(self, profile: LatencyProfile, accuracy: float) -> None:
        """Forget the members."""
        self.profile, self.accuracy = profile, accuracy
        self.latency_s = profile.latency(self.batch_size)
        self.members, self._idle, self._busy, self._listed = [], [], [], set()

    def list_idle(self, worker: Member) -> None:
        """A batch can be sent to a member."""
        if worker not in self._listed:
            self._listed.add(worker)
            heappush(self._idle, (worker.rank, worker))

    def list_busy(self, worker: Member) -> None:
        """A member was sent a batch."""
        self._first_busy()
        heappush(self._busy, (worker.free_at, worker.rank, worker))

    def _first_busy(self) -> float | None:
        """Predicted time when the first busy member becomes free."""
        busy = self._busy
        while busy and busy[0][2].free_at != busy[0][0]:
            heappop(busy)
        return busy[0][0] if busy else None

    def ready(self, now: float, delay_s: float) -> Member | None:
        """The first member that can be sent a batch."""
        idle = self._idle
        while idle:
            worker = idle[0][1]
            if not worker.flights or worker.may_send_ahead(now, delay_s):
                return worker
            heappop(idle)
            self._listed.discard(worker)
        return None

    def try_larger(self, worker: Member, now: float, delay: DispatchDelay, planned_s: float) -> int:
        """Size of a batch of up to twice the largest measured size, if even its assumed latency
        leaves the rest of the path its planned time. Larger sizes would never be measured
        otherwise, because plans use measured sizes."""
        queue, profile = self.queue, self.profile
        size = min(2 * profile.measured_to, len(queue), profile.max_batch_size)
        start_at = max(worker.free_at, now + delay(size))
        in_time = start_at + profile.latency(size) <= queue.head.deadline - planned_s
        return size if in_time else profile.measured_to

    def finish_at(self, now: float, delay_s: float) -> float:
        """Predicted end of one more request."""
        if not self.members:
            return math.inf
        waiting, size = len(self.queue), self.batch_size
        worker = self.ready(now, delay_s)
        if worker is not None and not worker.flights:
            start_at, last = now + delay_s, min(waiting + 1, size)
        else:
            free_at = self._first_busy()
            start_at, last = max(now if free_at is None else free_at, now + delay_s), size
        batches = waiting // size
        return start_at + batches * self.latency_s / len(self.members) + self.profile.latency(last)


class Service(NamedTuple):
    """A worker serves a task with a variant."""

    task: str
    worker: Worker
    variant: str
    profile: LatencyProfile
    accuracy: float
    batch_size: int
    load: float | None


def serving(cluster: Cluster, levels: int, communication_s: float) -> Iterator[Service]:
    """Services as assigned. A task without assigned workers is served by workers without
    assignment, each with all its variants, and gets an equal part of the SLO.

    Args:
        levels: number of levels of the tree.
    """

    def default_batch_size(model: Model, profile: LatencyProfile) -> int:
        share_s = model.latency_slo_s / levels - communication_s
        return max(profile.max_batch_within(share_s / WAITING_FACTOR), 1)

    by_name = {
        v.name: (m, v, -float(i) if v.accuracy is None else v.accuracy)
        for m in cluster.models.values()
        for i, v in enumerate(m.variants)
    }
    covered, free = set(), []
    for worker in cluster.workers.values():
        serves = False
        for assigned in worker.assigned:
            if assigned.variant not in worker.loaded:
                continue
            model, variant, accuracy = by_name[assigned.variant]
            if (profile := variant.profiles.get(worker.hardware)) is not None:
                serves = True
                covered.add(model.name)
                size = max(min(assigned.batch_size, profile.max_batch_size), 1)
                yield Service(
                    model.name, worker, variant.name, profile, accuracy, size, assigned.load
                )
        if not serves:
            free.append(worker)
    for worker in free:
        for model, variant, accuracy in by_name.values():
            profile = variant.profiles.get(worker.hardware)
            if model.name in covered or variant.name not in worker.loaded or profile is None:
                continue
            size = default_batch_size(model, profile)
            yield Service(model.name, worker, variant.name, profile, accuracy, size, None)


Key = tuple[str, str, str, str, str]
"""Key of a group: task, variant, batch size, hardware, and its worker if each has its own queue."""


def regroup(
    tree: Tree,
    services: Iterable[Service],
    workers: Mapping[WorkerId, Member],
    old: Mapping[Key, Group],
    own_queues: bool,
) -> tuple[dict[Key, Group], dict[str, list[Group]]]:
    """Groups of workers with the same service; and groups by task, the most accurate first.
    Existing groups keep their queues. A task without workers has a group without members."""
    groups: dict[Key, Group] = {}
    of_task: dict[str, list[Group]] = {task: [] for task in tree.parents}
    for s in services:
        owner = s.worker.id if own_queues else ""
        key = s.task, s.variant, str(s.batch_size), s.worker.hardware, owner
        group = groups.get(key)
        if group is None:
            group = groups[key] = old.get(key) or Group(s.task, s.variant, s.batch_size)
            group.clear(s.profile, s.accuracy)
            of_task[s.task].append(group)
        worker = workers[s.worker.id]
        group.members.append(worker)
        worker.groups.append(group)
    for task, found in of_task.items():
        found.sort(key=lambda g: (-g.accuracy, g.latency_s))
        if not found:
            key = task, "", "", "", ""
            limbo = groups[key] = old.get(key) or Group(task, "", 1)
            found.append(limbo)
    return groups, of_task


class Rest:
    """Time after each task until all later tasks are done.

    Args:
        of_task: groups by task, the most accurate first.

    Attributes:
        planned: planned time by task, seconds.
        least: time of a single request with the fastest variants, by task, seconds.
    """

    def __init__(
        self,
        tree: Tree,
        of_task: Mapping[str, list[Group]],
        communication_s: float,
    ) -> None:
        self._of_task, self._communication_s = of_task, communication_s
        self.planned: dict[str, float] = {}
        self.least: dict[str, float] = {}
        # Capacity of a task: requests per second, and in one batch of every worker.
        self._capacity: dict[str, float] = {}
        self._room: dict[str, int] = {}
        for task in reversed(tree.parents):
            groups = [g for g in of_task[task] if g.members]
            self._capacity[task] = sum(
                len(g.members) * g.profile.throughput(g.batch_size) for g in groups
            )
            self._room[task] = sum(len(g.members) * g.batch_size for g in groups)
            planned = least = 0.0
            for child in tree.children[task]:
                below = [g for g in of_task[child] if g.members]
                slowest = max((g.latency_s for g in below), default=0.0)
                alone = min((g.profile.latency(1) for g in below), default=0.0)
                planned_s = WAITING_FACTOR * slowest + self.planned[child]
                planned = max(planned, communication_s + planned_s)
                least = max(least, communication_s + alone + self.least[child])
            self.planned[task], self.least[task] = planned, least

    def after(
        self,
        factors: Mapping[str, Mapping[str, float]],
        coming: Mapping[str, float],
        ahead_s: float,
        variant: str,
        requests: float,
    ) -> float:
        """Least time after a task for requests that leave it `ahead_s` from now, after all that
        waits for the later tasks by then.

        Args:
            factors: requests made per request, by variant and child task.
            coming: requests that running batches will make, by task.
            variant, requests: variant and approximate number of the requests that leave the task.
        """
        rest_s = 0.0
        for child, factor in factors[variant].items():
            if not (capacity := self._capacity[child]):
                continue
            waiting = sum(len(g.queue) for g in self._of_task[child]) + coming[child]
            made = requests * factor
            ahead = max(waiting - capacity * ahead_s, 0.0) + made  # and itself
            room = self._room[child]
            waves = math.floor(max(ahead - 1e-9, 0.0) / room)  # batches of every worker
            # Factors are averages, so use the integer part: one more request may be too many.
            size = max(int(ahead - waves * room + 1e-9), 1)
            latency_s, fastest = min(
                (g.profile.latency(min(g.batch_size, size)), g.variant)
                for g in self._of_task[child]
                if g.members
            )
            own_s = self._communication_s + waves * room / capacity + latency_s
            rest_s = max(rest_s, own_s + self.after(factors, coming, ahead_s, fastest, made))
        return rest_s
