"""Lanes of `price`: the batches that a worker may run, and the action by queue and slack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from ray_slo.core.cluster import Variant
from ray_slo.core.profiles import LatencyProfile
from ray_slo.policies.shared.lanes import Lane, ModelState, Pool
from ray_slo.policies.shared.queue_value import Columns, QueueValue

WAIT, SHED = -1, -2
"""Actions of a row that do not run a batch."""

_IDLE_MAX = 32  # idle workers; more make no difference
_MAX_SIZES = 24  # batch sizes per variant; with more, some in between are left out


def accuracy_of(variant: Variant) -> float:
    """Accuracy of a variant. Unknown ones are equal, so the fastest variant is chosen."""
    return 100.0 if variant.accuracy is None else variant.accuracy


class Offer(NamedTuple):
    variant: str
    profile: LatencyProfile
    accuracy: float


class PriceLane(Lane):
    """A model on a pool, with all batches that the pool may run for it.

    Attributes:
        runs: (variant, profile, batch size), the fastest first.
        latency_s, accuracy: latency and accuracy of each run; accuracy_of: accuracy by variant.
        limits: slack that each run needs from its start, seconds, non-decreasing.
        quickest: (variant, profile) of the fastest batch of b, at index b − 1.
        throughput: the largest throughput, requests per second and worker.
        columns, counts, value: inputs of the prices; None before the first load.
        rows: see `row`.
    """

    __slots__ = (
        "accuracy",
        "accuracy_of",
        "columns",
        "counts",
        "largest_run",
        "latency_s",
        "limits",
        "quickest",
        "rows",
        "runs",
        "throughput",
        "top",
        "value",
        "wanted",
    )

    def __init__(
        self,
        order: int,
        model: ModelState,
        pool: Pool,
        offers: Sequence[Offer],
        slo_s: float,
        max_batch_size: int | None,
    ) -> None:
        largest = max(offer.profile.max_batch_size for offer in offers)
        largest = min(largest, max_batch_size or largest)
        by_size = [min(offers, key=lambda o: o.profile.latency(b)) for b in range(1, largest + 1)]
        self.quickest = [(o.variant, o.profile) for o in by_size]
        envelope = LatencyProfile([p.latency(b) for b, (_, p) in enumerate(self.quickest, 1)])
        super().__init__(order, model, pool, by_size[0].variant, envelope)
        runs = _front(offers, slo_s, largest) or [(by_size[0], 1)]
        self.runs = [(offer.variant, offer.profile, size) for offer, size in runs]
        self.accuracy_of = {offer.variant: offer.accuracy for offer in offers}
        self.accuracy = np.array([offer.accuracy for offer, _ in runs])
        self.latency_s = np.array([p.latency(b) for _, p, b in self.runs])
        self.throughput = max(b / p.latency(b) for _, p, b in self.runs)
        self.limits: list[float] = []
        self.columns: Columns | None = None
        self.counts = np.empty(0)
        self.value: QueueValue | None = None
        self.largest_run = max(b for _, _, b in self.runs)
        self.top = 2**31
        self.rows: dict[tuple[int, int], Row] = {}
        self.wanted: dict[int, int] = {}

    def set_limits(self, margin: float, margin_s: float) -> None:
        self.limits = (self.latency_s * margin + margin_s).tolist()
        self.rows = {}

    def row(self, queue: int, idle: int) -> Row:
        """The actions for `queue` waiting requests and `idle` other idle workers."""
        queue = min(queue, self.top)
        key = queue, min(idle, _IDLE_MAX) if queue <= self.largest_run else 0
        if (row := self.rows.get(key)) is None:
            row = self.rows[key] = self._row(*key)
        return row

    def _row(self, queue: int, idle: int) -> Row:
        assert self.value is not None
        assert self.columns is not None
        # Other idle workers wait too, and take the next requests.
        virtual = queue
        for _ in range(idle):
            virtual -= self._wanted(virtual)
        values = self.value.columns(self.columns, virtual, self.counts)
        missing = np.maximum(self.columns.size - queue, 0)
        limits = np.array(self.limits) + missing / self.value.rate
        shed = self.value.shed(virtual) if queue > self.largest_run else -math.inf
        row = Row([], [SHED if shed > -math.inf else WAIT], [-1])
        best = run = -1
        for i in np.argsort(limits, kind="stable").tolist():
            if best < 0 or values[i] > values[best]:
                best = i
            if not missing[i] and (run < 0 or values[i] > values[run]):
                run = i
            row.limits.append(float(limits[i]))
            row.acts.append(SHED if shed > values[best] else WAIT if missing[best] else best)
            row.runs.append(run)
        return row

    def _wanted(self, queue: int) -> int:
        """Size of the best batch for `queue` waiting requests with unlimited slack."""
        if (size := self.wanted.get(queue)) is None:
            assert self.value is not None
            assert self.columns is not None
            values = self.value.columns(self.columns, queue, self.counts)
            size = self.wanted[queue] = int(self.columns.size[int(np.argmax(values))])
        return size

    def reprice(self, columns: Columns) -> None:
        self.columns = columns
        self.rows, self.wanted = {}, {}


class Row(NamedTuple):
    """Actions, indexed by the number of `limits` that the slack exceeds: a run, or to wait or shed.
    And the run if it must start now (−1: none is possible)."""

    limits: list[float]
    acts: list[int]
    runs: list[int]


def _front(offers: Sequence[Offer], slo_s: float, largest: int) -> list[tuple[Offer, int]]:
    """Offers that meet the SLO, without dominated ones at each batch size; the fastest first."""
    sizes = sorted(
        {round(b) for b in np.geomspace(1, largest, _MAX_SIZES)}
        | set(range(1, min(largest, 12) + 1))
    )
    kept: list[tuple[Offer, int]] = []
    for b in sizes:
        best = -math.inf
        for offer in sorted(offers, key=lambda o: (o.profile.latency(b), -o.accuracy)):
            if offer.accuracy > best and offer.profile.latency(b) <= slo_s:
                best = offer.accuracy
                kept.append((offer, b))
    return sorted(kept, key=lambda run: run[0].profile.latency(run[1]))


class Choice(NamedTuple):
    """The batch `queue[first : first + size]` of a lane; size 0: none before `wake_at`."""

    lane: PriceLane
    first: int
    variant: str
    profile: LatencyProfile
    size: int
    wake_at: float = math.inf

    def worth(self) -> float:
        """Points per second of a worker's time."""
        lane = self.lane
        assert lane.value is not None
        queue = len(lane.model.queue) - self.first
        after, before = lane.value.at(np.array([queue - self.size, queue]))
        gained = float(after - before)
        return (self.size * lane.accuracy_of[self.variant] + gained) / self.profile.latency(
            self.size
        )


def lanes_of(of: ModelState | Pool) -> list[PriceLane]:
    """All lanes of a model or a pool."""
    return cast("list[PriceLane]", of.lanes)
