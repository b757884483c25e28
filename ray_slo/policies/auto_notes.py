"""Reasons for batches, in words, as far as they are visible outside the policy."""

from __future__ import annotations

import math

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Dispatch
from ray_slo.core.requests import WorkerId

_WORTH_SAYING = 0.02  # of the batch's time: shorter waits are not mentioned


class Notes:
    """Notes on dispatches: about waits while a worker is idle, and about fast variants."""

    def __init__(self) -> None:
        self._idle_since: dict[WorkerId, float] = {}

    def idle(self, now: float, worker: WorkerId) -> None:
        """A worker has become idle."""
        self._idle_since[worker] = now

    def of(self, now: float, d: Dispatch, cluster: Cluster, *, idle: bool) -> str:
        """The note on one dispatch; "" if there is none.

        Args:
            idle: nothing ran on its worker.
        """
        told = [self._wait(now, d) if idle else "", _variant(d, cluster)]
        return "; ".join(filter(None, told))

    def _wait(self, now: float, d: Dispatch) -> str:
        idle_since = self._idle_since.pop(d.worker, -math.inf)
        waited_s = now - max(min(r.arrival for r in d.requests), idle_since)
        if waited_s < _WORTH_SAYING * (d.finish_at - d.start_at):
            return ""
        return f"waited {1e3 * waited_s:.3g} ms beside this idle worker for a larger batch"


def _variant(d: Dispatch, cluster: Cluster) -> str:
    """For a variant that is not the most accurate one: whether that one would have been late."""
    model = cluster.models.get(d.requests[0].model)
    worker = cluster.workers[d.worker]
    if model is None or len(model.variants) < 2:
        return ""
    able = [
        (variant.accuracy, variant.name, profile)
        for variant, profile in model.runnable(*worker.kind)
        if variant.accuracy is not None
    ]
    if not able or (best := max(able, key=lambda one: one[0]))[1] == d.variant:
        return ""
    items = sum(r.size for r in d.requests)
    if items > best[2].max_batch_size:
        return f"{best[1]!r} does not take {items}"
    late_s = d.start_at + best[2].latency(items) - min(r.deadline for r in d.requests)
    if late_s <= 0:
        return (
            f"{best[1]!r} would have been in time, and taken {1e3 * best[2].latency(items):.3g} ms"
        )
    return f"{best[1]!r} would have been {1e3 * late_s:.3g} ms late"
