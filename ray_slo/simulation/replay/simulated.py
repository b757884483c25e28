"""A policy in virtual time on the requests of a decision log.

`what_if` runs a policy on the recorded requests (arrival, deadline, size, cancels) and the recorded
cluster (workers that came and went, profiles as they were learned). A batch takes the usual time
for its size (`fit`), times the deviation of the recorded batch nearest in time. So a slow minute of
the machine is slow in the simulation, too. The same holds for dispatch and report delays.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Dispatch, Drop
from ray_slo.core.policy import Policy, PolicyWrapper
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import Request
from ray_slo.policies.registry import make_policy, refuse_sizes
from ray_slo.record.decode import Life
from ray_slo.simulation.engine import Batch, Event, Run, Slot
from ray_slo.simulation.replay.tapes import (
    Tape,
    all_models,
    all_workers,
    checked_warmup_s,
    columns,
    duration_s,
    tape,
)
from ray_slo.simulation.report import Report
from ray_slo.simulation.workloads import Requests

_LEAST_SPREAD = 0.01  # of how long equal batches take


class Nearest:
    """Values seen at times; asked for the one nearest to a time. O(log n)."""

    def __init__(self, seen: Sequence[tuple[float, float]]) -> None:
        self._times = [t for t, _ in seen]
        self._values = [v for _, v in seen]

    def __call__(self, at: float, default: float) -> float:
        if not self._times:
            return default
        i = bisect_left(self._times, at)
        if i and (i == len(self._times) or at - self._times[i - 1] < self._times[i] - at):
            i -= 1
        return self._values[i]


@dataclass
class Truth:
    """How long things took.

    Attributes:
        profiles: usual execution time by (variant, hardware).
        deviations: actual over usual of each batch, by (variant, hardware).
        dispatch: from a decision to the start on an idle worker, seconds.
        report_s: from a batch's end until the policy heard, seconds (median).
    """

    profiles: dict[tuple[str, str], LatencyProfile] = field(default_factory=dict)
    deviations: dict[tuple[str, str], Nearest] = field(default_factory=dict)
    dispatch: Nearest = field(default_factory=lambda: Nearest(()))
    report_s: float = 0.0


def truth_of(t: Tape) -> Truth:
    """Learn from every batch that ran to its end."""
    ran: dict[tuple[str, str], list[tuple[float, int, float]]] = {}
    prior: dict[tuple[str, str], LatencyProfile] = {}
    delays, heard = [], []
    for b in t.batches.values():
        if (o := b.ran) is None:
            continue
        key = (b.dispatch.variant, b.cluster.workers[b.dispatch.worker].hardware)
        # The first, as what a policy learns on top is of some sizes only, and of the slow ones.
        prior.setdefault(key, b.cluster.variants[key[0]].profiles[key[1]])
        items = sum(r.size for r in b.dispatch.requests)
        seconds = max(o.finished_at - o.started_at, 1e-9)
        ran.setdefault(key, []).append((o.started_at - t.zero, items, seconds))
        heard.append(max(b.heard_at - o.finished_at, 0.0))
        if b.idle:
            delays.append((b.at - t.zero, max(o.started_at - b.at, 0.0)))
    truth = Truth(dispatch=Nearest(delays), report_s=float(np.median(heard)) if heard else 0.0)
    for key, batches in ran.items():
        at, loads, took = (np.array(column) for column in zip(*batches, strict=True))
        sizes = np.minimum(loads, prior[key].max_batch_size)
        fitted = truth.profiles[key] = fit(prior[key], sizes, took)
        off = took / np.array(fitted.table)[sizes - 1]
        truth.deviations[key] = Nearest(sorted(zip(at.tolist(), off.tolist(), strict=True)))
    return truth


def fit(
    prior: LatencyProfile, sizes: NDArray[np.int64], seconds: NDArray[np.float64]
) -> LatencyProfile:
    """What a batch of each size takes, from those that ran: the prior times a factor. The factor is
    a line over the logarithm of the size, then, by octave of sizes, what is left; of both only what
    is more than chance (two standard errors). So sizes that hardly ran are told by the prior's
    shape and those that did, and a wrong shape is mended where it shows.

    Args:
        prior: its shape was measured, or is a guess.
        sizes: shape (n,), from 1 to the prior's largest.
        seconds: shape (n,), what each took.
    """
    logs = np.log(sizes)
    ratios = np.log(seconds / np.array(prior.table)[sizes - 1])
    level = float(np.median(ratios))
    spread = max(1.4826 * float(np.median(np.abs(ratios - level))), _LEAST_SPREAD)
    # Outliers count as much as three standard deviations do: a batch that waited for the machine.
    held = np.clip(ratios, level - 3 * spread, level + 3 * spread)
    middle, width = logs.mean(), float(((logs - logs.mean()) ** 2).sum())
    slope = 0.0
    if width > 0:
        slope = _sure(float((logs - middle) @ (held - held.mean())) / width, spread / width**0.5)
    grid = np.log(np.arange(1, prior.max_batch_size + 1))
    residuals = held - slope * (logs - middle)
    level = float(np.median(residuals))
    octaves = np.ceil(np.log2(sizes)).astype(int)
    seen = np.unique(octaves)
    left = [
        _sure(float(np.median(mine)) - level, 1.25 * spread / len(mine) ** 0.5)
        for mine in (residuals[octaves == octave] for octave in seen)
    ]
    where = [float(logs[octaves == octave].mean()) for octave in seen]
    factor = level + slope * (grid - middle) + np.interp(grid, where, left)
    fitted = np.array(prior.table) * np.exp(factor)
    # A larger batch takes no less: half way between raising the larger and lowering the smaller.
    up, down = np.maximum.accumulate(fitted), np.minimum.accumulate(fitted[::-1])[::-1]
    return LatencyProfile(((up + down) / 2).tolist())


def _sure(estimate: float, error: float) -> float:
    """The part of an estimate that is beyond two standard errors."""
    return math.copysign(max(abs(estimate) - 2 * error, 0.0), estimate)


def what_if(
    life: Life | Tape,
    policy: str | Policy,
    policy_kwargs: Mapping[str, Any] | None = None,
    *,
    warmup_s: float = 0.0,
) -> Report:
    """What `policy` would have made of the recorded requests, workers and delays.

    Raises:
        ValueError: no request arrived, or bad arguments.
        PolicyError: the policy broke its contract.
    """
    t = life if isinstance(life, Tape) else tape(life)
    requests, index_of = columns(t)
    end = duration_s(t, requests)
    warmup_s = checked_warmup_s(warmup_s, end)
    if requests.size is not None and (requests.size != 1).any():
        refuse_sizes(policy, policy_kwargs)
    run = _Replay(make_policy(policy, policy_kwargs), t, requests, index_of)
    run.loop()
    report = run.report({"duration_s": end, "warmup_s": warmup_s, "seed": None})
    if isinstance(policy, str):
        report.meta["policy"] = policy
    return report


class _Replay(Run):
    """The simulator, with the recorded cluster and times instead of constant ones."""

    def __init__(
        self, policy: Policy, t: Tape, requests: Requests, index_of: Mapping[int, int]
    ) -> None:
        clusters = [(at - t.zero, c) for at, c in t.clusters]
        first = clusters[0][1]
        # Every model and worker that is ever there, for the simulator's books.
        everything = replace(
            clusters[-1][1], models=all_models(clusters), workers=all_workers(clusters)
        )
        self.times = truth_of(t)
        super().__init__(
            policy,
            first,
            everything,
            requests,
            None,
            self.times.report_s,
            everything.preempt_delay_s,
            [],
        )
        self.now = min(clusters[0][0], 0.0)
        self.workers = dict(everything.workers)
        self.index_of = {w: i for i, w in enumerate(self.workers)}
        for slot in self.slots.values():
            slot.index = self.index_of[slot.worker.id]
        for at, cluster in clusters[1:]:
            self.at(at, Event.CLUSTER, self._recorded, cluster)
        self.waiting: dict[int, Request] = {}
        cancels = [(at - t.zero, index_of.get(t.first_of.get(n, -1))) for at, n in t.cancels]
        if known := [(at, index) for at, index in cancels if index is not None]:
            self.policy = _Watched(policy, self.waiting)
            for at, index in known:
                self.at(at, Event.WITHDRAW, self._withdraw, index)

    def _withdraw(self, index: int) -> None:
        request = self.waiting.pop(index, None)
        if request is not None:
            self.policy.requests_cancelled(self.now, [request])

    def _recorded(self, cluster: Cluster) -> None:
        """The policy is told this cluster; what left takes its batches along."""
        left = [self.slots.pop(w) for w in list(self.slots) if w not in cluster.workers]
        lost = self.lose(*left)
        for w in cluster.workers.values():
            if w.id in self.slots:
                self.slots[w.id].worker = w
            else:
                self.slots[w.id] = Slot(w, self.index_of[w.id])
        self.become(cluster, lost)

    def dispatch(self, d: Dispatch) -> None:
        super().dispatch(d)
        for r in d.requests:
            self.waiting.pop(r.id, None)

    def drop(self, drop: Drop) -> None:
        super().drop(drop)
        for r in drop.requests:
            self.waiting.pop(r.id, None)

    def start(self, slot: Slot, batch: Batch) -> None:
        key = (batch.dispatch.variant, slot.worker.hardware)
        # What the policy believes is what there is where no such batch ever ran.
        believed = self.cluster.variants[key[0]].profiles[key[1]]
        profile = self.times.profiles.get(key, believed)
        dispatched = self.b_dispatched[batch.index]
        ready = dispatched + self.times.dispatch(dispatched, self.cluster.delay(batch.items))
        start = max(ready, self.now)
        deviation = self.times.deviations.get(key, Nearest(()))(start, 1.0)
        time = profile.latency(min(batch.items, profile.max_batch_size)) * deviation
        self.run(slot, batch, start, start + time)


class _Watched(PolicyWrapper):
    """A policy, and what waits in it: only that can be cancelled."""

    def __init__(self, policy: Policy, waiting: dict[int, Request]) -> None:
        super().__init__(policy)
        self._waiting = waiting

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._waiting.update((r.id, r) for r in requests)
        super().requests_arrived(now, requests)
