"""A minimal policy for tests of the host, and a cluster in the units of Symphony §3.3."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest

from ray_slo.core import (
    Cluster,
    DeadlineQueue,
    Decision,
    Dispatch,
    DispatchDelay,
    Drop,
    DropReason,
    LatencyProfile,
    Model,
    Variant,
)


class Greedy:
    """Eager, earliest deadline first over models, drops what would be late even alone."""

    serves_late: ClassVar[bool] = False

    def __init__(self, max_batch: int = 8) -> None:
        self.max_batch = max_batch
        self.queues: dict[str, DeadlineQueue] = {}
        self.busy: dict[str, int] = {}
        self.next_id = 0
        self.log: list[tuple] = []

    def requests_arrived(self, now, requests):
        self.log.append((now, "arrived", [r.id for r in requests]))
        for r in requests:
            self.queues[r.model].push(r)

    def requests_cancelled(self, now, requests):
        for r in requests:
            self.queues[r.model].remove(r)

    def batch_finished(self, now, worker, outcome):
        self.log.append((now, outcome.status.value, [r.id for r in outcome.requests]))
        if self.busy.get(worker) == outcome.batch_id:
            del self.busy[worker]

    def cluster_changed(self, now, cluster):
        self.log.append((now, "workers", list(cluster.workers)))
        self.cluster = cluster
        self.busy = {w: b for w, b in self.busy.items() if w in cluster.workers}
        for model in cluster.models:
            self.queues.setdefault(model, DeadlineQueue())

    def decide(self, now):
        actions = []
        for worker in self.cluster.workers:
            if worker in self.busy:
                continue
            while waiting := [m for m, q in self.queues.items() if len(q)]:
                model = min(waiting, key=lambda m: self.queues[m].head.deadline)
                queue = self.queues[model]
                variant = self.cluster.models[model].variants[0].name
                profile = self.cluster.profile(variant, worker)
                budget = queue.head.deadline - now + 1e-9
                size = 1
                while (
                    size < min(len(queue), self.max_batch)
                    and now + self.cluster.delay(size + 1) + profile(size + 1)
                    <= queue.head.deadline
                ):
                    size += 1
                start = now + self.cluster.delay(size)
                if start - now + profile(size) > budget:
                    actions.append(Drop([queue.pop()], DropReason.WOULD_MISS, start + profile(1)))
                    continue
                batch = Dispatch(
                    self.next_id, worker, variant, queue.take(size), start, start + profile(size)
                )
                self.busy[worker] = self.next_id
                self.next_id += 1
                actions.append(batch)
                break
        return Decision(actions, math.inf)


@pytest.fixture
def greedy():
    """The class, so that a test can make as many as it wants."""
    return Greedy


@pytest.fixture
def make_cluster():
    """ℓ(b) = b + 5 s on every worker, SLO 12 s, model and variant "m"."""

    def make(workers=1, slo_s=12.0, delay=None, models=("m",), accuracy=None):
        profile = LatencyProfile.linear(1.0, 5.0, 64)
        return Cluster.uniform(
            [Model(m, slo_s, (Variant(m, {"default": profile}, accuracy),)) for m in models],
            workers,
            delay=delay or DispatchDelay(),
        )

    return make
