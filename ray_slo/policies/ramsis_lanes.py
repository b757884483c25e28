"""Queues per worker and group, and the distribution of workers to groups.

Requests are distributed in proportion to speed. A worker with the share w gets every (1/w)-th
arrival, as one of 1/w equal workers would. (The paper distributes evenly, in turn, §3.2.1.)
Worked example: speeds 3 and 1. Of four requests the first worker gets three; its table is for one
worker at 3/4 of the load. The other gets every fourth; its table is for one of four workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from ray_slo.core.cluster import Cluster, Kind
from ray_slo.core.load import Dispersion, LoadMonitor
from ray_slo.core.policy import Expected
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import WorkerId
from ray_slo.policies.ramsis_tables import Served, ServedKey

Dealt = dict[WorkerId, tuple[Kind, list[tuple[str, float]]]]
"""The kind of each worker, and the groups (model, SLO) that it serves."""

_RESPEED = 0.1  # shares are kept if a worker's speed changed by less


@dataclass(eq=False, repr=False, slots=True)
class Lane:
    """The queue of a worker for one group, or of a group without workers.

    Attributes:
        speed: speed of its worker, in proportion to which it gets requests; 1 for all if none can
            be in time.
        stride: requests that the group's fastest lane gets for one request of this lane.
        equals: number of workers like this lane's that equals all workers of the group.
        filed: its key in the group's heap of shortest queues.
        timer_at: when the head can no longer be served, seconds.
    """

    group: Group
    worker: Worker | None
    served: Served | None
    queue: DeadlineQueue = field(default_factory=DeadlineQueue)
    speed: float = 1.0
    stride: float = 1.0
    equals: int = 1
    filed: tuple[float, bool, int] = (0.0, False, 0)
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
        in_turn: requests are distributed round robin, otherwise to the shortest queue.
        look_s: seconds between two measurements of the load.

    Attributes:
        lanes: one per worker.
        speed: total speed of its workers; one that serves several groups counts in part.
        burst: 4 to the power of this is the index of dispersion of its arrivals.
        homeless: queue for requests while no worker serves the group.
        shortest: heap of the queues, if requests go to the shortest one.
    """

    def __init__(
        self, model: str, slo_s: float, monitor: LoadMonitor, in_turn: bool, look_s: float
    ) -> None:
        self.model = model
        self.slo_s = slo_s
        self.monitor = monitor
        self._dispersion = Dispersion(min(slo_s, 1.0))
        self.burst = 0
        self.lanes: list[Lane] = []
        self.speed = 0.0
        self.homeless = Lane(self, None, None)
        self._in_turn = in_turn
        self._turns: list[tuple[float, int, Lane]] = []  # heap of turns, in strides
        self.shortest: list[tuple[tuple[float, bool, int], Lane]] = []
        self._serial = 0
        self._load: float | None = None
        self._look_s, self._look_at = look_s, -math.inf

    def arrived(self, now: float) -> None:
        """A request arrived."""
        self.monitor.arrived(now)
        self._dispersion.arrived(now)

    def load(self, now: float) -> float | None:
        """Predicted requests/s; None before the first measurement."""
        if self._look_at == -math.inf:  # the first request says nothing about the load
            self._look_at = now + self._look_s
        elif now >= self._look_at:
            self._load = self.monitor.rate(now)
            self._look_at = now + self._look_s
        return self._load

    def look_for_bursts(self) -> None:
        """Follow the dispersion of arrivals; ignore differences that may be chance."""
        measured = 0.5 * math.log2(max(self._dispersion.value, 1.0))
        if abs(measured - self.burst) > 0.5 + 1.5 * self._dispersion.error:
            self.burst = round(measured)

    def next(self, now: float) -> Lane:
        """The lane for the next request."""
        if not self.lanes:
            return self.homeless
        if self._in_turn:
            return self._next_in_turn(now)
        heap = self.shortest
        while heap[0][0] != heap[0][1].filed:
            heappop(heap)
        return heap[0][1]

    def _next_in_turn(self, now: float) -> Lane:
        """The lane whose turn it is; a worker that hangs is skipped."""
        turns = self._turns
        for _ in range(len(turns)):
            at, rank, lane = turns[0]
            heapreplace(turns, (at + lane.stride, rank, lane))
            worker = lane.worker
            assert worker is not None
            if worker.running is None or worker.free_at + self.slo_s >= now:
                break
        return lane

    def file(self, lane: Lane) -> None:
        """Update the heap of shortest queues. Its order is the time until one more request would be
        served, then idle workers, then the least recently changed."""
        if self._in_turn or lane.worker is None:
            return
        self._serial += 1
        waits = (len(lane.queue) + 1) * lane.stride
        lane.filed = (waits, lane.worker.running is not None, self._serial)
        heap = self.shortest
        if len(heap) > 4 * len(self.lanes) + 64:
            heap[:] = sorted((one.filed, one) for one in self.lanes)
        else:
            heappush(heap, (lane.filed, lane))

    def leave(self) -> None:
        """The group has lost all its workers."""
        self.lanes, self.shortest, self._turns, self.speed = [], [], [], 0.0
        self.homeless.timer_at = math.inf

    def begin(self) -> None:
        """Distribute requests by the workers' speeds. The first turn is an idle worker's, if there
        is one. A worker that is too slow for the SLO gets none, unless all are too slow."""
        self._weigh()
        lanes = self.lanes
        idle = (i for i, one in enumerate(lanes) if one.worker and one.worker.running is None)
        first = next(idle, 0)
        ranked = ((i - first) % len(lanes) for i in range(len(lanes)))
        turns = ((0.0, rank, lane) for rank, lane in zip(ranked, lanes, strict=True))
        self._turns = sorted(turn for turn in turns if turn[2].stride < math.inf)
        for lane in lanes:
            self.file(lane)

    def weigh_again(self) -> None:
        """Distribute requests anew if a worker's speed has changed."""
        able = any(_speed(lane) for lane in self.lanes)
        if able and any(abs(_speed(x) - x.speed) > _RESPEED * x.speed for x in self.lanes):
            self.begin()

    def _weigh(self) -> None:
        able = any(_speed(lane) for lane in self.lanes)
        parts = []
        for lane in self.lanes:
            assert lane.worker is not None
            lane.speed = _speed(lane) if able else 1.0
            parts.append(lane.speed / len(lane.worker.lanes))
        self.speed, together = sum(parts), sum(lane.speed for lane in self.lanes)
        for lane, part in zip(self.lanes, parts, strict=True):
            lane.stride = max(parts) / part if part else math.inf
            lane.equals = max(int(together / lane.speed + 1e-9), 1) if part else 1


class Expecting:
    """The predictions of the current tables."""

    _groups: dict[str, list[Group]]

    def expected(self) -> dict[str, Expected]:
        """Predictions by model (RAMSIS §5.1); workers count by their speed. A model is left out if
        one of its workers has no table."""
        found = {}
        for model, groups in self._groups.items():
            weight = bad = accuracy = 0.0
            lanes = [lane for group in groups for lane in group.lanes]
            for lane in lanes:
                table = lane.served.table if lane.served is not None else None
                if table is None:
                    break
                of_lane = table.rate * lane.speed / lane.group.speed
                in_time = of_lane * (1 - table.violation_rate)
                weight += of_lane
                bad += of_lane - in_time
                accuracy += in_time * table.expected_accuracy
            else:
                if weight > 0:
                    known = accuracy / (weight - bad) if weight > bad else None
                    found[model] = Expected(known, bad / weight)
        return found


def _speed(lane: Lane) -> float:
    return lane.served.speed if lane.served is not None else 0.0


def deal(
    cluster: Cluster,
    served: dict[ServedKey, Served],
    load_of: Callable[[str, float], float | None],
) -> Dealt:
    """Groups of each worker: those without a worker first, then in proportion to their work.

    Args:
        load_of: requests/s of a group; called only if there are several groups.
    """
    keys = list(dict.fromkeys((model, slo_s) for model, slo_s, _ in served))
    able = {
        worker.id: [key for key in keys if (*key, worker.kind) in served]
        for worker in cluster.workers.values()
    }
    chances = {key: sum(key in of for of in able.values()) for key in keys}
    load = dict.fromkeys(keys, 1e-9)
    if len(keys) > 1:
        load = {key: max(load_of(*key) or 0.0, 1e-9) for key in keys}
    count, has = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0.0)
    dealt: Dealt = {}
    for worker in cluster.workers.values():
        speeds = {(m, s): served[m, s, worker.kind].most for m, s in able[worker.id]}
        first = min(
            speeds,
            key=lambda k: (1, (has[k] + speeds[k]) / load[k]) if count[k] else (0, chances[k]),
            default=None,
        )
        dealt[worker.id] = (worker.kind, [first] if first else [])
        if first:
            count[first] += 1
            has[first] += speeds[first]
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
    """The workers, with lanes for the groups that they were given; the queues are empty."""
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
    for group in by_key.values():
        group.begin()
    return workers
