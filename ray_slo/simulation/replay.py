"""Decision logs, replayed: the same policy step by step, or any in the simulator ("what if").

`replay` feeds a policy exactly what the recorded one was fed, at the recorded times, and compares
every decision; a policy is a pure state machine, so they must be the same to the last bit.

`what_if` runs a policy in virtual time on the recorded requests (arrival, deadline, size, cancels)
and the recorded cluster (workers that came and went, profiles as they were learned). How long a
batch takes is what batches took: the usual for its size (`fit`), times what the recorded batch
nearest in time deviated from it, so that a slow minute of the machine is slow in the simulation,
too. Dispatch and report delays likewise. `recorded` makes the same kind of `Report` of the log
itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.cluster import Cluster, Worker
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason, Preempt
from ray_slo.core.names import import_attr
from ray_slo.core.policy import Policy
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, WorkerId
from ray_slo.policies.registry import POLICIES, make_policy, refuse_sizes
from ray_slo.record.rows import Life, Logged
from ray_slo.simulation.engine import Batch, Event, Run, Slot
from ray_slo.simulation.report import Report
from ray_slo.simulation.workloads import Requests

_LEAST_SPREAD = 0.01  # of how long equal batches take

# -- the same policy -------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where a replay first decided otherwise.

    Attributes:
        round: number of the decision in its life, from 0.
        at: seconds in the recorded clock.
        recorded, replayed: what was decided, in words; None where the other decided more.
    """

    round: int
    at: float
    recorded: str
    replayed: str


@dataclass(frozen=True)
class Replayed:
    """What came of a replay.

    Attributes:
        rounds, actions: decisions compared, and what they held.
        difference: None: all were the same.
        error: what the recorded policy raised in the end, and the replayed one too.
    """

    rounds: int
    actions: int
    difference: Difference | None
    error: str = ""

    @property
    def identical(self) -> bool:
        return self.difference is None


def replay(life: Life, make: Callable[[], Policy] | None = None) -> Replayed:
    """Feed the recorded events to a policy and compare decisions, until the first difference.

    Args:
        make: makes the policy; default: what the log says.

    Raises:
        ValueError: the log does not hold the beginning, lost rows, or does not say which policy.
    """
    if not life.begins:
        raise ValueError(
            f"{life.scheduler}: the beginning is gone (max_mb was reached), so what the policy "
            "knew is not known; only `--policy` (what if) can be asked of it"
        )
    if life.lost:
        raise ValueError(
            f"{life.scheduler}: {sum(n for n in life.lost if n > 0)} rows were not kept and "
            f"{life.lost.count(-1)} files are missing, so what the policy knew is not known; only "
            "`--policy` (what if) can be asked of it"
        )
    policy = make() if make else policy_of(life)
    rounds = actions = 0
    for r in life.rounds():
        error, decided = "", Decision()
        try:
            for name, args in r.events:
                if name == "tables_solved" and None in args[1]:
                    raise _NotHeld(f"{life.scheduler}: the policy was given tables of its own kind")
                getattr(policy, name)(*args)
            decided = policy.decide(r.now)
        except _NotHeld:
            raise
        except Exception as raised:  # as the recorded one may have
            error = f"{type(raised).__name__}: {raised}"
        difference = _difference(rounds, r.now, r.decision, r.error, decided, error)
        if difference is not None:
            return Replayed(rounds, actions, difference)
        if r.decision is None:
            return Replayed(rounds, actions, None, r.error)
        rounds += 1
        actions += len(decided.actions)
    return Replayed(rounds, actions, None)


class _NotHeld(ValueError):
    """An event that a log cannot hold."""


def policy_of(life: Life) -> Policy:
    """A new policy like the recorded one.

    Raises:
        ValueError: the log does not say which it was.
    """
    name, kwargs = policy_arguments(life)
    return make_policy(name, kwargs)


def policy_arguments(life: Life) -> tuple[str, Mapping[str, Any]]:
    """(name, kwargs) of the recorded policy. Raises ValueError where they are not known."""
    start = life.start
    if start is None or start.policy is None:
        raise ValueError(
            f"{life.scheduler}: the policy was a ready-made object, which a log cannot hold; "
            "only `--policy` (what if) can be asked of it"
        )
    if start.kwargs is None:
        raise ValueError(
            f"{life.scheduler}: arguments of policy {start.policy!r} are nothing that a log can "
            "hold; only `--policy` (what if) can be asked of it"
        )
    if start.policy not in POLICIES and not _is_policy_class(import_attr(start.policy)):
        raise ValueError(f"{life.scheduler}: {start.policy!r} is no class of a policy")
    return start.policy, start.kwargs


def _is_policy_class(target: Any) -> bool:
    """Whether it may be called: a log may come from anywhere, and so may the name in it."""
    methods = ("requests_arrived", "requests_cancelled", "batch_finished", "cluster_changed")
    return isinstance(target, type) and all(hasattr(target, m) for m in (*methods, "decide"))


def _difference(
    number: int, at: float, was: Decision | None, was_error: str, now: Decision, error: str
) -> Difference | None:
    if was is None or error:
        recorded = f"raised {was_error}" if was is None else "raised nothing"
        replayed = f"raised {error}" if error else "raised nothing"
        same = was is None and bool(error) and was_error == error
        return None if same else Difference(number, at, recorded, replayed)
    for i in range(max(len(was.actions), len(now.actions))):
        then_, now_ = (_in_words(d.actions[i : i + 1]) for d in (was, now))
        if then_ != now_:
            return Difference(number, at, then_, now_)
    if was.wake_at != now.wake_at:
        return Difference(number, at, f"wake at {was.wake_at!r}", f"wake at {now.wake_at!r}")
    return None


def _in_words(actions: Sequence[Action]) -> str:
    """An action with all that counts, times to the last bit."""
    if not actions:
        return "nothing"
    a = actions[0]
    if isinstance(a, Dispatch):
        return (
            f"dispatch batch {a.batch_id} of {a.variant} to {a.worker}: requests "
            f"{[r.id for r in a.requests]}, from {a.start_at!r} to {a.finish_at!r}"
        )
    if isinstance(a, Drop):
        return f"drop {[r.id for r in a.requests]}: {a.reason.value}, finish {a.finish_at!r}"
    return f"preempt {a.worker}: {a.reason}, for {a.variant}, gain {float(a.gain)!r}"


# -- what was --------------------------------------------------------------------------------


@dataclass
class Tape:
    """A life as columns: what the simulator needs of it, and what happened.

    Attributes:
        zero: the log's clock at the report's time 0; all other times here count from it.
        clusters: (time, cluster), as the policy was told.
        requests: by id, those that arrived; one that was submitted again counts once.
        first_of: id of the first try, by the id of each.
        batches: dispatched, by id, in order.
        cancels: (time, id).
    """

    zero: float
    end: float
    clusters: list[tuple[float, Cluster]]
    requests: dict[int, Request]
    first_of: dict[int, int]
    batches: dict[int, TapeBatch]
    drops: dict[int, tuple[float, DropReason]]
    cancels: list[tuple[float, int]]
    preempts: list[tuple[float, Preempt]]
    errors: list[tuple[float, str]]


@dataclass
class TapeBatch:
    dispatch: Dispatch
    at: float
    cluster: Cluster
    idle: bool  # its worker had nothing to do
    outcome: BatchOutcome | None = None
    heard_at: float = math.nan
    lost_at: float = math.nan  # when its worker left

    @property
    def ran(self) -> BatchOutcome | None:
        """Its outcome, if it ran to the end."""
        done = self.outcome is not None and self.outcome.status is BatchStatus.FINISHED
        return self.outcome if done else None


def tape(life: Life) -> Tape:
    """Read a life once.

    Raises:
        ValueError: it holds no request.
    """
    made = Tape(math.nan, -math.inf, [], {}, {}, {}, {}, [], [], [])
    origins: dict[tuple[str, int], int] = {}
    held: dict[WorkerId, int] = {}
    running: dict[int, TapeBatch] = {}
    for r in life.rounds():
        for name, args in r.events:
            if name == "cluster_changed":
                made.clusters.append(args)
                for b in running.values():
                    if b.dispatch.worker not in args[1].workers:
                        b.lost_at = args[0]
                running = {n: b for n, b in running.items() if math.isnan(b.lost_at)}
                held = {w: n for w, n in held.items() if w in args[1].workers}
            elif name == "requests_arrived":
                for request in args[1]:
                    origin = request.origin if isinstance(request, Logged) else None
                    first = request.id if origin is None else origins.setdefault(origin, request.id)
                    made.first_of[request.id] = first
                    made.requests.setdefault(first, request)
            elif name == "requests_cancelled":
                made.cancels += [(args[0], q.id) for q in args[1]]
            elif name == "batch_finished":
                now, worker, outcome = args
                held[worker] = max(held.get(worker, 0) - 1, 0)
                if (ended := running.pop(outcome.batch_id, None)) is not None:
                    ended.outcome, ended.heard_at = outcome, now
        if r.decision is None:
            made.errors.append((r.now, r.error))
            continue
        for action in r.decision.actions:
            if isinstance(action, Dispatch):
                idle = not held.get(action.worker)
                held[action.worker] = held.get(action.worker, 0) + 1
                batch = TapeBatch(action, r.now, made.clusters[-1][1], idle)
                made.batches[action.batch_id] = running[action.batch_id] = batch
            elif isinstance(action, Drop):
                for q in action.requests:
                    made.drops[q.id] = (r.now, action.reason)
            else:
                made.preempts.append((r.now, action))
        made.end = r.now
    if not made.requests:
        raise ValueError(f"{life.scheduler}: no request arrived in this log")
    made.zero = next(iter(made.requests.values())).arrival
    return made


def _all_models(clusters: Sequence[tuple[float, Cluster]]) -> dict[str, Any]:
    return {m.name: m for _, c in clusters for m in c.models.values()}


def _all_workers(clusters: Sequence[tuple[float, Cluster]]) -> dict[WorkerId, Worker]:
    return {w.id: w for _, c in clusters for w in c.workers.values()}


def _columns(t: Tape) -> tuple[Requests, dict[int, int]]:
    """Requests in order of arrival, and the index of each by id."""
    models = list(_all_models(t.clusters))
    ordered = sorted(t.requests.values(), key=lambda r: (r.arrival, r.id))
    ordered = [r for r in ordered if r.model in models]
    number = {m: i for i, m in enumerate(models)}
    return Requests(
        models,
        np.array([number[r.model] for r in ordered], dtype=np.int64),
        np.array([r.arrival - t.zero for r in ordered]),
        np.array([r.deadline - t.zero for r in ordered]),
        np.array([r.size for r in ordered], dtype=np.int64),
    ), {r.id: i for i, r in enumerate(ordered)}


def recorded(life: Life | Tape, warmup_s: float = 0.0) -> Report:
    """What happened, as a `Report`; time 0 is the first arrival.

    A request that was tried again (its worker died, its batch was preempted) counts once.

    Raises:
        ValueError: no request arrived.
    """
    t = life if isinstance(life, Tape) else tape(life)
    requests, index_of = _columns(t)
    last = t.clusters[-1][1]
    models, workers = _all_models(t.clusters), _all_workers(t.clusters)
    variants = {v.name: v for m in models.values() for v in m.variants}
    worker_of = {w: i for i, w in enumerate(workers)}
    variant_of = {v: i for i, v in enumerate(variants)}
    n = len(requests)
    batch_of, reason, dropped = np.full(n, -1), np.full(n, -1), np.full(n, np.nan)
    statuses, reasons = list(BatchStatus), list(DropReason)
    rows = []
    for i, b in enumerate(t.batches.values()):
        d, o = b.dispatch, b.outcome
        # Of a batch that nobody heard of again: until its worker left, or the log ends.
        gone = t.end if math.isnan(b.lost_at) else b.lost_at
        rows.append(
            (
                worker_of[d.worker],
                variant_of[d.variant],
                len(d.requests),
                statuses.index(o.status if o else BatchStatus.LOST),
                b.at - t.zero,
                d.start_at - t.zero,
                d.finish_at - t.zero,
                (o.started_at if o else min(d.start_at, gone)) - t.zero,
                (o.finished_at if o else gone) - t.zero,
                math.nan if d.price is None else d.price,
            )
        )
        for q in d.requests:
            at = index_of.get(t.first_of.get(q.id, -1))
            if at is not None:
                batch_of[at] = i
    for number, (when, why) in t.drops.items():
        at = index_of.get(t.first_of.get(number, -1))
        if at is not None:
            batch_of[at], reason[at], dropped[at] = -1, reasons.index(why), when - t.zero
    names = (
        *("worker", "variant", "size", "status", "dispatched_s"),
        *("predicted_start_s", "predicted_finish_s", "started_s", "finished_s", "price"),
    )
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    end = _duration_s(t, requests)
    return Report(
        {
            "duration_s": end,
            "warmup_s": _checked(warmup_s, end),
            "seed": None,
            "policy": "recorded",
            "models": list(requests.models),
            "slo_s": {m.name: m.latency_slo_s for m in models.values()},
            "variants": list(variants),
            "accuracy": {v.name: v.accuracy for v in variants.values()},
            "workers": list(workers),
            "delay_s": last.delay.control_s,
        },
        {
            "model": requests.model,
            "size": np.ones(n, np.int64) if requests.size is None else requests.size,
            "arrival_s": requests.arrival,
            "deadline_s": requests.deadline,
            "batch": batch_of,
            "drop_reason": reason,
            "dropped_s": dropped,
        },
        {
            name: np.array(column, dtype=np.int64 if i < 4 else float)
            for i, (name, column) in enumerate(zip(names, columns, strict=True))
        },
    )


def _duration_s(t: Tape, requests: Requests) -> float:
    """How long requests arrived; of a single one, as long as the log goes on."""
    last = float(requests.arrival[-1])
    return last + 1e-9 if last > 0 else max(t.end - t.zero, 1e-3)


def _checked(warmup_s: float, end: float) -> float:
    if not 0 <= warmup_s < end:
        raise ValueError(
            f"warmup_s must be at least 0 and less than the {end:.3g} s that requests arrived in, "
            f"got {warmup_s:g}"
        )
    return warmup_s


# -- what would have been --------------------------------------------------------------------


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
    requests, index_of = _columns(t)
    end = _duration_s(t, requests)
    if requests.size is not None and (requests.size != 1).any():
        refuse_sizes(policy, policy_kwargs)
    run = _Replay(make_policy(policy, policy_kwargs), t, requests, index_of)
    run.loop()
    report = run.report({"duration_s": end, "warmup_s": _checked(warmup_s, end), "seed": None})
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
            clusters[-1][1], models=_all_models(clusters), workers=_all_workers(clusters)
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
            self.policy = cast(Policy, _Watched(policy, self.waiting))
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


class _Watched:
    """A policy, and what waits in it: only that can be cancelled."""

    def __init__(self, policy: Policy, waiting: dict[int, Request]) -> None:
        self._policy, self._waiting = policy, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._waiting.update((r.id, r) for r in requests)
        self._policy.requests_arrived(now, requests)
