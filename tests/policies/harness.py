"""A host for tests: feeds a policy, checks the contract of `ray_slo.core.policy` at every step.

`Host` itself records what waits and what runs. Tests move it by hand (`arrive`, `finish`,
`change`, `advance`), so they control every instant; `timeline` is for asserting a whole run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ray_slo.core import (
    BatchOutcome,
    BatchStatus,
    Cluster,
    Decision,
    Dispatch,
    DispatchDelay,
    Drop,
    DropReason,
    LatencyProfile,
    Model,
    Policy,
    Preempt,
    Request,
    Variant,
    WorkerId,
)

EPS = 2e-6


def one_model(
    profile: LatencyProfile, slo_s: float, workers: int, delay: DispatchDelay | None = None
) -> Cluster:
    """Model "m" with variant "v" on `workers` equal workers."""
    model = Model("m", slo_s, (Variant("v", {"default": profile}),))
    return Cluster.uniform([model], workers, delay=delay)


@dataclass
class Flight:
    dispatch: Dispatch
    sent_at: float
    here_at: float
    end_at: float  # as predicted; the host ends batches then unless a test says otherwise


@dataclass
class Sent:
    """One line of a timeline."""

    at: float
    worker: WorkerId
    ids: list[int]
    finish_at: float
    variant: str = ""


class Host:
    """Feeds events to a policy and checks what it decides.

    Args:
        make: makes the policy (a second one replays the log).
        strict: check also what `BatchingPolicy` promises: refusals are provable, nothing waits
            that cannot be served.
        margin_s: of the policy, for the strict checks.
    """

    def __init__(
        self,
        make: Callable[[], Policy],
        cluster: Cluster,
        *,
        now: float = 0.0,
        strict: bool = True,
        margin_s: float = 0.0,
    ) -> None:
        self.make = make
        self.policy = make()
        self.strict = strict
        self.margin_s = margin_s
        self.now = now
        self.wake_at = math.inf
        self.waiting: dict[int, Request] = {}
        self.flights: dict[WorkerId, list[Flight]] = {}
        self.sent: list[Sent] = []
        self.dropped: dict[int, tuple[float, DropReason]] = {}
        self.last_batch_id = 0
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.decisions: list[Decision] = []
        self.cluster = cluster
        self.change(cluster)

    # Events

    def _feed(self, event: str, *args: Any) -> None:
        self.log.append((event, (self.now, *args)))
        getattr(self.policy, event)(self.now, *args)

    def arrive(self, requests: Sequence[Request], decide: bool = True) -> None:
        for r in requests:
            assert r.id not in self.waiting
            self.waiting[r.id] = r
        self._feed("requests_arrived", list(requests))
        if decide:
            self.decide()

    def cancel(self, requests: Sequence[Request]) -> None:
        """Some may not be waiting any more, which the policy must ignore."""
        for r in requests:
            self.waiting.pop(r.id, None)
        self._feed("requests_cancelled", list(requests))
        self.decide()

    def finish(
        self,
        worker: WorkerId,
        status: BatchStatus = BatchStatus.FINISHED,
        *,
        index: int = 0,
        again: bool = False,
        decide: bool = True,
    ) -> None:
        """The running batch (or the one sent ahead, `index` 1) is over now."""
        flights = self.flights[worker]
        flight = flights.pop(index)
        started_at = min(self.now, max(flight.here_at, flight.dispatch.start_at))
        d = flight.dispatch
        outcome = BatchOutcome(d.batch_id, d.requests, started_at, self.now, status)
        if flights and index == 0:
            rest = flights[0]
            latency_s = rest.dispatch.finish_at - rest.dispatch.start_at
            rest.end_at = max(self.now, rest.here_at) + latency_s
        self._feed("batch_finished", worker, outcome)
        if again:
            self.arrive(d.requests, decide=False)
        if decide:
            self.decide()

    def change(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.flights = {w: self.flights.get(w, []) for w in cluster.workers}
        self._feed("cluster_changed", cluster)
        self.decide()

    # Time

    def advance(self, until: float, *, ends: bool = True, until_idle: bool = False) -> None:
        """Honour `wake_at` up to `until`; with `ends`, batches end when they were predicted to.

        `until_idle`: stop as soon as nothing waits and nothing runs.
        """
        steps = 0
        while True:
            if until_idle and not self.waiting and not any(self.flights.values()):
                return
            end_at = min((f[0].end_at for f in self.flights.values() if f), default=math.inf)
            at = max(min(end_at if ends else math.inf, self.wake_at), self.now)
            if at > until:
                break
            self.now = at
            if ends:
                self._end_batches()
            self.decide()
            steps += 1
            assert steps < 100_000, f"no progress at {self.now}, wake_at {self.wake_at}"
        self.now = until

    def _end_batches(self) -> None:
        due = sorted((f[0].end_at, w) for w, f in self.flights.items() if f)
        for end_at, worker in due:
            if end_at <= self.now:
                self.finish(worker, decide=False)

    def run(self, requests: Iterable[Request], *, at: dict[int, float] | None = None) -> None:
        """Requests arrive at their arrival times (or at[id]); then until nothing is left."""
        times: dict[float, list[Request]] = {}
        for r in requests:
            times.setdefault((at or {}).get(r.id, r.arrival), []).append(r)
        for t in sorted(times):
            self.advance(math.nextafter(t, -math.inf))
            self.now = t
            self._end_batches()  # what happens at one instant is decided on together
            self.arrive(times[t])
        self.advance(self.now + 1e6)
        assert not self.waiting

    # Decisions

    def decide(self) -> Decision:
        self.log.append(("decide", (self.now,)))
        decision = self.policy.decide(self.now)
        self.decisions.append(decision)
        preempted = []
        for action in decision.actions:
            if isinstance(action, Dispatch):
                self._dispatch(action)
            elif isinstance(action, Drop):
                self._drop(action)
            else:
                assert isinstance(action, Preempt)
                assert self.flights[action.worker], f"{action} but the worker is idle"
                preempted.append(action.worker)
        self.log.append(("decide", (self.now,)))
        again = self.policy.decide(self.now)
        self.decisions.append(again)
        assert not again.actions, f"asked twice at {self.now}: {again.actions}"
        assert decision.wake_at > self.now
        self.wake_at = again.wake_at
        if self.strict:
            self._check_waiting()
        for worker in preempted:
            self.finish(worker, BatchStatus.PREEMPTED, again=True)
        return decision

    def _dispatch(self, d: Dispatch) -> None:
        now, size = self.now, sum(r.size for r in d.requests)
        if getattr(self.policy, "counts_requests", False):
            size = len(d.requests)
        worker = self.cluster.workers[d.worker]
        assert d.variant in worker.loaded
        profile = self.cluster.profile(d.variant, d.worker)
        assert 1 <= size <= profile.max_batch_size
        for r in d.requests:
            assert d.variant in [v.name for v in self.cluster.models[r.model].variants]
            assert self.waiting.pop(r.id, None) is r, f"{r} does not wait"
        assert d.batch_id > self.last_batch_id
        self.last_batch_id = d.batch_id
        assert d.start_at >= now
        assert d.finish_at >= d.start_at
        assert self.policy.serves_late or d.slack_s >= -EPS, f"{d} at {now} would be late"
        delay = self.cluster.delay(len(d.requests))
        flights = self.flights[d.worker]
        assert len(flights) < 2
        if flights:
            assert flights[0].end_at - delay - EPS <= now <= flights[0].end_at, "sent ahead too far"
        self.sent.append(Sent(now, d.worker, [r.id for r in d.requests], d.finish_at, d.variant))
        flights.append(Flight(d, now, now + delay, d.finish_at))

    def _drop(self, drop: Drop) -> None:
        assert drop.requests
        for r in drop.requests:
            assert self.waiting.pop(r.id, None) is r, f"{r} does not wait"
            self.dropped[r.id] = (self.now, drop.reason)
            if self.strict:
                soonest = self.soonest(r.model, r.size)
                if drop.reason is DropReason.NO_WORKER:
                    assert math.isinf(soonest)
                    assert r.deadline <= self.now
                elif drop.reason is DropReason.EXPIRED:
                    assert r.deadline <= self.now
                elif drop.reason is DropReason.WOULD_MISS:
                    assert soonest > r.deadline > self.now, f"{r} could be served by {soonest}"

    def soonest(self, model: str, size: int = 1) -> float:
        """When a request could be done at the earliest, by what was predicted."""
        ends = [math.inf]
        if model in self.cluster.models:
            for w, worker in self.cluster.workers.items():
                start = self.now + self.cluster.delay(1)
                if flights := self.flights[w]:
                    start = max(start, flights[-1].end_at)
                ends += [
                    start + self.cluster.profile(v.name, w)(size) + self.margin_s
                    for v in self.cluster.models[model].variants
                    if v.name in worker.loaded
                ]
        return min(ends)

    def _check_waiting(self) -> None:
        """Nothing waits longer than it could be served, even by a worker free now."""
        for r in self.waiting.values():
            latest = r.deadline
            if not math.isinf(self.soonest(r.model)):
                latest -= self.margin_s + self.cluster.delay(1)
                latest -= min(
                    self.cluster.profile(v.name, w)(1)
                    for v in self.cluster.models[r.model].variants
                    for w, worker in self.cluster.workers.items()
                    if v.name in worker.loaded
                )
            assert self.now <= latest + EPS, f"{r} still waits at {self.now}"

    # At the end

    def check_replay(self) -> None:
        """The same events give the same decisions."""
        policy, decisions = self.make(), []
        for event, args in self.log:
            if event == "decide":
                decisions.append(policy.decide(*args))
            else:
                getattr(policy, event)(*args)
        assert decisions == self.decisions

    def timeline(self) -> list[tuple[float, WorkerId, list[int]]]:
        return [(s.at, s.worker, s.ids) for s in self.sent]
