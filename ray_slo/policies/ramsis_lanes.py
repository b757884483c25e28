"""Who waits where: a queue per worker and group, and how workers are dealt out to groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ray_slo.core.cluster import Cluster, Kind
from ray_slo.core.load import LoadMonitor
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import WorkerId
from ray_slo.policies.ramsis_tables import Served, ServedKey

Dealt = dict[WorkerId, tuple[Kind, list[tuple[str, float]]]]
"""The kind of each worker, and the groups (model, SLO) that it serves."""


@dataclass(eq=False, repr=False, slots=True)
class Lane:
    """The queue of a worker for one group; or of a group that no worker serves.

    Attributes:
        filed: its key in the group's heap of shortest queues.
        timer_at: when the head can be served no more, seconds.
    """

    group: Group
    worker: Worker | None
    served: Served | None
    queue: DeadlineQueue = field(default_factory=DeadlineQueue)
    filed: tuple[int, bool, int] = (0, False, 0)
    timer_at: float = math.inf


@dataclass(eq=False, repr=False, slots=True)
class Worker:
    """A worker runs one batch at a time. `free_at`: predicted, seconds."""

    id: WorkerId
    lanes: list[Lane] = field(default_factory=list)
    running: int | None = None  # batch id
    free_at: float = -math.inf


class Group:
    """A model and an SLO, and the workers that serve it.

    Args:
        in_turn: requests are dealt out round robin, else to the shortest queue.
        look_s: the load is measured anew this often, seconds.

    Attributes:
        lanes: one per worker, in the order in which requests are dealt out.
        share: workers, where one that serves several groups counts as a part.
        homeless: where requests wait while no worker serves them.
        shortest: heap of the queues, where requests go to the shortest.
    """

    def __init__(
        self, model: str, slo_s: float, monitor: LoadMonitor, in_turn: bool, look_s: float
    ) -> None:
        self.model = model
        self.slo_s = slo_s
        self.monitor = monitor
        self.lanes: list[Lane] = []
        self.share = 0.0
        self.homeless = Lane(self, None, None)
        self._in_turn, self._turn = in_turn, 0
        self.shortest: list[tuple[tuple[int, bool, int], Lane]] = []
        self._serial = 0
        self._load: float | None = None
        self._look_s, self._look_at = look_s, -math.inf

    def load(self, now: float) -> float | None:
        """Anticipated, requests/s; None before the first look."""
        if self._look_at == -math.inf:  # the first request says nothing of a load
            self._look_at = now + self._look_s
        elif now >= self._look_at:
            self._load = self.monitor.rate(now)
            self._look_at = now + self._look_s
        return self._load

    def next(self, now: float) -> Lane:
        """Where the next request goes."""
        if not self.lanes:
            return self.homeless
        if self._in_turn:
            return self._next_in_turn(now)
        heap = self.shortest
        while heap[0][0] != heap[0][1].filed:
            heappop(heap)
        return heap[0][1]

    def _next_in_turn(self, now: float) -> Lane:
        """Whose turn it is; a worker that hangs is passed over."""
        for _ in self.lanes:
            lane = self.lanes[self._turn]
            self._turn = (self._turn + 1) % len(self.lanes)
            worker = lane.worker
            assert worker is not None
            if worker.running is None or worker.free_at + self.slo_s >= now:
                break
        return lane

    def file(self, lane: Lane) -> None:
        """Keep the heap of shortest queues: the number that waits, then idle workers, then the one
        that was touched longest ago."""
        if self._in_turn or lane.worker is None:
            return
        self._serial += 1
        lane.filed = (len(lane.queue), lane.worker.running is not None, self._serial)
        heap = self.shortest
        if len(heap) > 4 * len(self.lanes) + 64:
            heap[:] = sorted((one.filed, one) for one in self.lanes)
        else:
            heappush(heap, (lane.filed, lane))

    def leave(self) -> None:
        """No worker serves it any more."""
        self.lanes, self.shortest, self._turn, self.share = [], [], 0, 0.0
        self.homeless.timer_at = math.inf

    def begin(self) -> None:
        """The first turn is an idle worker's, if there is one."""
        idle = (i for i, one in enumerate(self.lanes) if one.worker and one.worker.running is None)
        self._turn = next(idle, 0)


def deal(
    cluster: Cluster,
    served: dict[ServedKey, Served],
    load_of: Callable[[str, float], float | None],
) -> Dealt:
    """Groups of each worker: those without a worker first, then in proportion to their work.

    Args:
        load_of: requests/s of a group; asked where there are several.
    """
    keys = list(dict.fromkeys((model, slo_s) for model, slo_s, _ in served))
    able = {
        worker.id: [key for key in keys if (*key, worker.kind) in served]
        for worker in cluster.workers.values()
    }
    chances = {key: sum(key in of for of in able.values()) for key in keys}
    work = dict.fromkeys(keys, 1e-9)
    for (model, slo_s, _), by in served.items():
        load = load_of(model, slo_s) if len(keys) > 1 else None
        work[model, slo_s] = max(work[model, slo_s], (load or 0.0) / by.most)
    count = dict.fromkeys(keys, 0)
    dealt: Dealt = {}
    for worker in cluster.workers.values():
        first = min(
            able[worker.id],
            key=lambda k: (1, (count[k] + 1) / work[k]) if count[k] else (0, chances[k]),
            default=None,
        )
        dealt[worker.id] = (worker.kind, [first] if first else [])
        if first:
            count[first] += 1
    for key in (k for k in keys if not count[k]):
        _, theirs = dealt[min((w for w in able if key in able[w]), key=lambda w: len(dealt[w][1]))]
        theirs.append(key)
    return dealt


def settle(
    dealt: Dealt,
    groups: Iterable[Group],
    known: dict[WorkerId, Worker],
    served: dict[ServedKey, Served],
) -> dict[WorkerId, Worker]:
    """Workers with the lanes that they were dealt; their queues are empty."""
    by_key = {(g.model, g.slo_s): g for g in groups}
    for group in by_key.values():
        group.leave()
    workers = {}
    for id, (kind, keys) in dealt.items():
        worker = workers[id] = known.get(id) or Worker(id)
        worker.lanes = [
            Lane(by_key[model, slo_s], worker, served[model, slo_s, kind]) for model, slo_s in keys
        ]
        for lane in worker.lanes:
            lane.group.lanes.append(lane)
            lane.group.share += 1 / len(keys)
            lane.group.file(lane)
    for group in by_key.values():
        group.begin()
    return workers
