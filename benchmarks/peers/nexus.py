"""Nexus (Shen et al., SOSP 2019), as Symphony §2.2 and SHEPHERD §7 describe it.

Every `period_s`, a plan is made from the measured rates by *squishy bin packing*. A session is a
model with its SLO and rate. It first gets as many workers of its own as it saturates with the batch
B = max{b : 2·ℓ(b) ≤ SLO}. (A request waits for one batch, and runs in the next.) The rest of each
session runs on a duty cycle d with a batch b = d·rate, such that d + ℓ(b) ≤ SLO. Nodes are merged,
best fit first, while the shorter of their cycles still holds a batch of every session.

Frontends distribute requests to the planned workers in proportion to the plan, each with its own
round robin. A worker runs its sessions round robin, as soon as it is free. Heads of the queue that
allow less than the planned batch are dropped. With `grow`, a batch takes more than planned if its
head allows it. The papers have at most the planned size (`grow=False`). With many models, each
planned in batches of 1 or 2, this gives only a fifth to a third of the goodput on Symphony's zoos.
So the better way is the default.

The plan is made for the largest multiple of the measured rates that the workers can hold. With a
load that does not fit, the rest is shed. With a smaller load, all workers are used, as the eager
systems in Symphony Figure 2 leave none idle. Sessions that never fit go to the node with the lowest
occupancy.

Worked example: ℓ(b) = b + 5 and SLO 24, so B = 7 and a worker serves 7/12 per unit of time. Two
workers and one model: both are saturated. Two models of equal rates on one worker: d = 15 allows
each batches up to 2, as 2·ℓ(2) = 14 ≤ 15 < 2·ℓ(3).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.peers.base import TOLERANCE_S, Kind, Peer, PeerQueue, PeerWorker, Served
from ray_slo.core import Cluster, LatencyProfile, Request


@dataclass(frozen=True)
class Session:
    """A model with its SLO (seconds) and rate (requests per second)."""

    model: str
    rate: float
    slo_s: float
    profile: LatencyProfile


@dataclass
class Node:
    """The work of one worker: (session, planned batch, rate) of each, over a duty cycle."""

    cycle_s: float
    parts: list[tuple[Session, int, float]] = field(default_factory=list)

    @property
    def occupancy(self) -> float:
        """Share of the cycle in which the worker is busy."""
        return sum(s.profile.latency(b) for s, b, _ in self.parts) / self.cycle_s

    def merged(self, other: Node) -> Node | None:
        """Merge both on one worker; None if the shorter cycle does not hold a batch of each."""
        cycle_s = min(self.cycle_s, other.cycle_s)
        node = Node(cycle_s)
        for session, _, rate in (*self.parts, *other.parts):
            batch = max(1, math.ceil(cycle_s * rate - 1e-9))
            node.parts.append((session, batch, rate))
        return node if node.occupancy <= 1 + 1e-9 else None


def squishy_bin_packing(sessions: Sequence[Session]) -> list[Node]:
    """Return nodes that serve the sessions' rates (Nexus Algorithm 1)."""
    nodes: list[Node] = []
    rest: list[Node] = []
    for session in sessions:
        profile, slo_s = session.profile, session.slo_s
        batch = max(1, profile.max_batch_within(slo_s / 2 + 1e-9))
        cycle_s = profile.latency(batch)
        # A worker that is nearly saturated counts as saturated: rates are not known more exactly.
        full = int(session.rate * cycle_s / batch * 1.002)
        nodes += [Node(cycle_s, [(session, batch, batch / cycle_s)]) for _ in range(full)]
        if (rate := session.rate - full * batch / cycle_s) > 1e-9 * session.rate:
            rest.append(_residual(session, rate))
    rest.sort(key=lambda node: -node.occupancy)
    shared: list[Node] = []
    for node in rest:
        fits = [(m.occupancy, i, m) for i, old in enumerate(shared) if (m := old.merged(node))]
        if fits:
            _, i, merged = max(fits, key=lambda fit: (fit[0], -fit[1]))
            shared[i] = merged
        else:
            shared.append(node)
    return nodes + shared


def _residual(session: Session, rate: float) -> Node:
    """Return a node with the largest batch that can be gathered and run within the SLO."""
    latency, slo_s = session.profile.latency, session.slo_s + 1e-9
    low, high = 1, session.profile.max_batch_size + 1
    while high - low > 1:  # ℓ(b) + b / rate grows in b
        middle = (low + high) // 2
        if latency(middle) + middle / rate <= slo_s:
            low = middle
        else:
            high = middle
    cycle_s = max(min(low / rate, slo_s - latency(low)), latency(low))
    return Node(cycle_s, [(session, low, rate)])


def plan(sessions: Sequence[Session], workers: int) -> list[Node]:
    """Return one node per worker: the packing of the largest multiple of the rates that fits."""

    def packed(factor: float) -> list[Node]:
        return squishy_bin_packing(
            [Session(s.model, s.rate * factor, s.slo_s, s.profile) for s in sessions]
        )

    if not sessions:
        return []
    # An upper limit: a worker serves at most 1 / α per second of one session.
    high = 2 * workers * max(s.profile.throughput(s.profile.max_batch_size) for s in sessions)
    high /= min(s.rate for s in sessions)
    low = high * 1e-9
    nodes = packed(low)
    if len(nodes) <= workers:
        for _ in range(40):
            middle = math.sqrt(low * high)
            if len(tried := packed(middle)) <= workers:
                low, nodes = middle, tried
            else:
                high = middle
            if high <= low * 1.001:
                break
        busiest = sorted(nodes, key=lambda node: -node.occupancy)
        nodes = nodes + [busiest[i % len(busiest)] for i in range(workers - len(nodes))]
    else:
        nodes.sort(key=lambda node: -node.occupancy)
        nodes, over = nodes[:workers], nodes[workers:]
        for node in over:
            least = min(nodes, key=lambda n: n.occupancy)
            least.cycle_s = min(least.cycle_s, node.cycle_s)
            least.parts += node.parts
    return nodes


class _Slot(PeerQueue):
    """A session on a worker."""

    __slots__ = ("batch", "part", "rate", "worker")

    part: Served
    worker: PeerWorker
    batch: int
    rate: float


class _Route:
    """How one frontend distributes the requests of a model: weighted round robin."""

    __slots__ = ("credits", "slots", "weights")

    def __init__(self, slots: list[_Slot], rng: random.Random | None) -> None:
        total = sum(s.rate for s in slots)
        self.slots = slots
        self.weights = [s.rate / total for s in slots]
        # Frontends are independent, so each begins at another place in its round.
        self.credits = [rng.random() if rng else 0.0 for _ in slots]

    def next(self) -> _Slot:
        if len(self.slots) == 1:
            return self.slots[0]
        credits = self.credits = [c + w for c, w in zip(self.credits, self.weights, strict=True)]
        i = credits.index(max(credits))
        credits[i] -= 1
        return self.slots[i]


class Nexus(Peer):
    """Periodic squishy bin packing, and round robin on workers.

    Args:
        frontends: number of frontends; each distributes its part of the requests on its own.
        grow: whether batches may be larger than planned.
        period_s: period of the plan. The first plan assumes equal rates.
        seed: determines which frontend a request comes to.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, frontends: int = 1, *, grow: bool = True, period_s: float = 10.0, seed: int = 0
    ) -> None:
        super().__init__()
        if frontends < 1:
            raise ValueError(f"frontends must be at least 1, got {frontends}")
        if not (math.isfinite(period_s) and period_s > 0):
            raise ValueError(f"period_s must be positive, got {period_s}")
        self._frontends = frontends
        self._grow = grow
        self._period_s = period_s
        self._rng = random.Random(seed)
        self._cluster = Cluster.of([], [])
        self._next_plan_at = math.inf
        self._rates: dict[str, float] = {}
        self._arrived: dict[str, int] = {}
        self._of_worker: dict[PeerWorker, list[_Slot]] = {}
        self._turn: dict[PeerWorker, int] = {}
        self._routes: dict[str, list[_Route]] = {}
        self._where: dict[int, PeerQueue] = {}
        self._stranded: dict[str, PeerQueue] = {}  # queues of models that no worker serves
        self._ready: dict[PeerWorker, None] = {}  # idle workers with new requests

    def _enqueue(self, now: float, request: Request) -> None:
        self._arrived[request.model] = self._arrived.get(request.model, 0) + 1
        self._route(request)

    def _route(self, request: Request) -> None:
        queue: PeerQueue
        if routes := self._routes.get(request.model):
            one = len(routes) == 1
            slot = routes[0 if one else self._rng.randrange(len(routes))].next()
            if slot.worker.running is None:
                self._ready[slot.worker] = None
            queue = slot
        else:
            queue = self._stranded.get(request.model) or self._queue(request.model, [])
            self._stranded[request.model] = queue
        self._push(queue, request)
        self._where[request.id] = queue

    def _cancel(self, request: Request) -> None:
        if (queue := self._where.pop(request.id, None)) is not None:
            queue.queue.remove(request)

    def _freed(self, worker: PeerWorker) -> None:
        self._ready[worker] = None

    def _changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        if math.isinf(self._next_plan_at):
            self._next_plan_at = now + self._period_s
        self._replan()

    def _replan(self) -> None:
        """Make new nodes and routes, and distribute the waiting requests again."""
        of_worker: dict[PeerWorker, list[_Slot]] = {w: [] for w in self._workers.values()}
        of_model: dict[str, list[_Slot]] = {}
        for kind, served in self._served.items():
            workers = [w for w in self._workers.values() if w.kind == kind]
            sessions = [
                Session(m, self._rates.get(m, 1.0), self._slo(m), s.profile)
                for m, s in served.items()
            ]
            for worker, node in zip(workers, plan(sessions, len(workers)), strict=False):
                for session, batch, rate in node.parts:
                    slot = self._slot(session.model, kind, worker, batch, rate)
                    of_worker[worker].append(slot)
                    of_model.setdefault(session.model, []).append(slot)
        waiting = [r for slots in self._of_worker.values() for s in slots for r in s.queue]
        waiting += [r for q in self._stranded.values() for r in q.queue]
        self._of_worker, self._stranded, self._where = of_worker, {}, {}
        self._timers.clear()
        self._turn = dict.fromkeys(of_worker, 0)
        many = self._frontends > 1
        self._routes = {
            model: [_Route(slots, self._rng if many else None) for _ in range(self._frontends)]
            for model, slots in of_model.items()
        }
        self._ready = {w: None for w in self._workers.values() if w.running is None}
        for request in sorted(waiting, key=lambda r: (r.arrival, r.id)):
            self._route(request)

    def _slo(self, model: str) -> float:
        return self._cluster.models[model].latency_slo_s

    def _slot(self, model: str, kind: Kind, worker: PeerWorker, batch: int, rate: float) -> _Slot:
        self._serial += 1
        served = self._served[kind][model]
        slot = _Slot(model, self._serial, served.reach[0], True)
        slot.part, slot.worker, slot.batch, slot.rate = served, worker, batch, rate
        return slot

    def _act(self, now: float) -> float:
        if now >= self._next_plan_at:
            for model in self._cluster.models:
                # A model without requests keeps a place in the plan.
                self._rates[model] = max(self._arrived.get(model, 0), 0.5) / self._period_s
            self._arrived = {}
            self._next_plan_at += self._period_s
            while self._next_plan_at <= now:
                self._next_plan_at += self._period_s
            self._replan()
        ready, self._ready = self._ready, {}
        for worker in ready:
            if worker.running is None:
                self._run(worker, now)
        return self._next_plan_at if self._where else math.inf

    def _run(self, worker: PeerWorker, now: float) -> None:
        """Run the next session in turn that has a batch."""
        slots = self._of_worker[worker]
        for i in range(len(slots)):
            turn = (self._turn[worker] + i) % len(slots)
            if requests := self._gather(slots[turn], now):
                self._turn[worker] = turn + 1
                self._dispatch(worker, slots[turn].part, requests, now)
                return

    def _gather(self, slot: _Slot, now: float) -> list[Request]:
        """Drop heads that allow less than the planned batch, and return the batch.

        It is smaller if fewer requests wait, and larger if `grow` allows it.
        """
        queue, reach = slot.queue, slot.part.reach
        dropped = []
        size = 0
        while queue:
            size = min(slot.batch, len(queue))
            slack = queue.head.deadline + TOLERANCE_S - now
            if slack >= reach[size - 1]:
                if self._grow:
                    size = min(len(queue), bisect_right(reach, slack))
                break
            dropped.append(queue.pop())
        if dropped:
            self._drop(dropped, now)
        taken = queue.take(size)
        for request in (*dropped, *taken):
            self._where.pop(request.id, None)
        return taken

    def _drop(self, requests: Sequence[Request], now: float, served: bool = True) -> None:
        for request in requests:
            self._where.pop(request.id, None)
        super()._drop(requests, now, served)
