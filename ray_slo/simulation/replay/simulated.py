"""Simulate any policy on the requests of a decision log.

`what_if` runs a policy on the recorded requests (arrival, deadline, size, cancellation) and on the
recorded cluster (workers that came and went, profiles as they were learned). A simulated batch
takes the usual time for its size (`fit`), times a deviation: the ratio of actual to usual time of
the recorded batch that started nearest in time. So a minute in which the machine was slow is slow
in the simulation, too. The dispatch delay also is the recorded one that is nearest in time. The
report delay is the median of the recorded ones.
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

_LEAST_SPREAD = 0.01  # least relative standard deviation that times of equal batches have


class Nearest:
    """Finds the recorded value that is nearest to a given time, in O(log n)."""

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
    """Recorded execution times and delays.

    Attributes:
        profiles: usual execution times, by (variant, hardware).
        deviations: actual over usual execution time of each batch, by (variant, hardware).
        dispatch: seconds from a decision until its batch starts on an idle worker.
        report_s: median of the seconds from the end of a batch until the policy is told of it.
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
        # Take the first profile. Later profiles contain what the scheduler learned. That is a high
        # percentile, and only for some batch sizes.
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
    """Estimate the execution time of every batch size from the batches that ran.

    The estimate is the prior times a factor. The factor's logarithm is a line over the logarithm of
    the size, plus a correction for each octave of sizes. From the slope and from each correction,
    two standard errors are subtracted, as that much may be chance. So a size that hardly ran
    follows the shape of the prior, and where many batches contradict that shape, it is corrected.

    Args:
        prior: the profile before; its shape was measured, or is a guess.
        sizes: batch sizes, shape (n,), from 1 to the prior's largest.
        seconds: execution time of each of these batches, shape (n,).
    """
    logs = np.log(sizes)
    ratios = np.log(seconds / np.array(prior.table)[sizes - 1])
    level = float(np.median(ratios))
    spread = max(1.4826 * float(np.median(np.abs(ratios - level))), _LEAST_SPREAD)
    # Clip outliers at three standard deviations: the machine may have been busy with other work.
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
    # A larger batch must not take less time than a smaller one. Where it does, take the mean of two
    # corrections: the larger batch's time raised, and the smaller one's lowered.
    up, down = np.maximum.accumulate(fitted), np.minimum.accumulate(fitted[::-1])[::-1]
    return LatencyProfile(((up + down) / 2).tolist())


def _sure(estimate: float, error: float) -> float:
    """The estimate, moved towards 0 by two standard errors, but not past 0."""
    return math.copysign(max(abs(estimate) - 2 * error, 0.0), estimate)


def what_if(
    life: Life | Tape,
    policy: str | Policy,
    policy_kwargs: Mapping[str, Any] | None = None,
    *,
    warmup_s: float = 0.0,
) -> Report:
    """Simulate `policy` on the recorded requests, workers and delays.

    Raises:
        ValueError: no request arrived, or an argument is wrong.
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
    """A simulator run whose cluster and execution times are the recorded ones."""

    def __init__(
        self, policy: Policy, t: Tape, requests: Requests, index_of: Mapping[int, int]
    ) -> None:
        clusters = [(at - t.zero, c) for at, c in t.clusters]
        first = clusters[0][1]
        # The simulator needs every model and worker of the whole log from the start.
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
        """Tell the policy of a recorded change of the cluster. Batches of workers that left are
        lost."""
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
        # If no such batch ever ran, the only known time is that which the policy expects.
        believed = self.cluster.variants[key[0]].profiles[key[1]]
        profile = self.times.profiles.get(key, believed)
        dispatched = self.b_dispatched[batch.index]
        ready = dispatched + self.times.dispatch(dispatched, self.cluster.delay(batch.items))
        start = max(ready, self.now)
        deviation = self.times.deviations.get(key, Nearest(()))(start, 1.0)
        time = profile.latency(min(batch.items, profile.max_batch_size)) * deviation
        self.run(slot, batch, start, start + time)


class _Watched(PolicyWrapper):
    """A policy whose waiting requests are known, because only these can be cancelled."""

    def __init__(self, policy: Policy, waiting: dict[int, Request]) -> None:
        super().__init__(policy)
        self._waiting = waiting

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._waiting.update((r.id, r) for r in requests)
        super().requests_arrived(now, requests)
