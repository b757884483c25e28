"""Read the events of a decision log, and make a `Report` of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.cluster import Cluster, Model, Worker
from ray_slo.core.decisions import Dispatch, Drop, DropReason, Preempt
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, WorkerId
from ray_slo.core.text import quoted
from ray_slo.record.decode import Life
from ray_slo.record.rows import Logged
from ray_slo.simulation.report import Report
from ray_slo.simulation.workloads import Requests


@dataclass
class Tape:
    """The events of one life of a scheduler, from its start to its end, as tables.

    All times are seconds of the log's clock.

    Attributes:
        zero: time of the first arrival, which is time 0 of the report.
        end: time of the last decision.
        clusters: (time, cluster) of each change that the policy was told of.
        requests: requests that arrived, by id. A request that was submitted again is there once,
            with its first id.
        first_of: first id of each request, by every id that it had.
        batches: dispatched batches by id, in order of dispatch.
        drops: (time, reason), by request id.
        cancels: (time, request id).
        preempts: (time, action).
        errors: (time, error) of each decision in which the policy raised.
        settings: (time, (setting of `auto`, why)).
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
    settings: list[tuple[float, tuple[str, str]]]


@dataclass
class TapeBatch:
    dispatch: Dispatch
    at: float
    cluster: Cluster
    idle: bool  # whether the worker had no other batch then
    outcome: BatchOutcome | None = None
    heard_at: float = math.nan
    lost_at: float = math.nan  # when its worker left

    @property
    def ran(self) -> BatchOutcome | None:
        """The batch's outcome if it ran to its end, else None."""
        done = self.outcome is not None and self.outcome.status is BatchStatus.FINISHED
        return self.outcome if done else None


def tape(life: Life) -> Tape:
    """Read the events of a life.

    Raises:
        ValueError: no request arrived in it.
    """
    made = Tape(math.nan, -math.inf, [], {}, {}, {}, {}, [], [], [], [])
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
        if r.setting is not None:
            made.settings.append((r.now, r.setting))
        if r.decision is None:
            made.errors.append((r.now, r.error))
            continue
        for action in r.decision.actions:
            if isinstance(action, Dispatch):
                if not _is_known(action, made.clusters):
                    if life.whole:
                        raise ValueError(
                            f"{life.path}: batch {action.batch_id} is of {quoted(action.variant)} "
                            f"on {quoted(action.worker)}, which no cluster has"
                        )
                    continue  # the row that told of it is lost
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
    if not made.requests.keys() or not columns(made)[1]:
        raise _NoRequest(f"{life.path}: no request arrived for a model of the cluster")
    made.zero = next(iter(made.requests.values())).arrival
    return made


class _NoRequest(ValueError):
    """There is nothing to report."""


def _is_known(sent: Dispatch, clusters: Sequence[tuple[float, Cluster]]) -> bool:
    """Return whether the cluster has the worker and the variant of a batch."""
    if not clusters:
        return False
    cluster = clusters[-1][1]
    return sent.worker in cluster.workers and sent.variant in cluster.variants


def newest(lives: Sequence[Life]) -> tuple[Life, Tape]:
    """The newest life in which a request arrived.

    Raises:
        ValueError: there is none.
    """
    for life in reversed(lives):
        try:
            return life, tape(life)
        except _NoRequest:
            if life is lives[0]:
                raise
    raise ValueError("no scheduler is in the log")


def all_models(clusters: Sequence[tuple[float, Cluster]]) -> dict[str, Model]:
    """Return the models of all clusters, by name. If a model changed, return the last version."""
    return {m.name: m for _, c in clusters for m in c.models.values()}


def all_workers(clusters: Sequence[tuple[float, Cluster]]) -> dict[WorkerId, Worker]:
    """Return all workers that any of the clusters has, by id."""
    return {w.id: w for _, c in clusters for w in c.workers.values()}


def columns(t: Tape) -> tuple[Requests, dict[int, int]]:
    """Requests in order of arrival, and their index by request id."""
    models = list(all_models(t.clusters))
    ordered = sorted(t.requests.values(), key=lambda r: (r.arrival, r.id))
    ordered = [r for r in ordered if r.model in models]
    number = {m: i for i, m in enumerate(models)}
    tasks = list(dict.fromkeys(r.task for r in ordered))
    task = {name: i for i, name in enumerate(tasks)}
    return Requests(
        models,
        np.array([number[r.model] for r in ordered], dtype=np.int64),
        np.array([r.arrival - t.zero for r in ordered]),
        np.array([r.deadline - t.zero for r in ordered]),
        np.array([r.size for r in ordered], dtype=np.int64),
        np.array([task[r.task] for r in ordered], dtype=np.int64),
        tasks,
    ), {r.id: i for i, r in enumerate(ordered)}


def recorded(life: Life | Tape, warmup_s: float = 0.0) -> Report:
    """Make a `Report` of what happened; time 0 is the first arrival.

    A request that was submitted again (its worker died, its batch was preempted) counts once.

    Raises:
        ValueError: no request arrived.
    """
    t = life if isinstance(life, Tape) else tape(life)
    requests, index_of = columns(t)
    models, workers = all_models(t.clusters), all_workers(t.clusters)
    variants = {v.name: v for m in models.values() for v in m.variants}
    n, end = len(requests), duration_s(t, requests)
    return Report(
        {
            "duration_s": end,
            "warmup_s": checked_warmup_s(warmup_s, end),
            "seed": None,
            "policy": "recorded",
            "models": list(requests.models),
            "slo_s": {m.name: m.latency_slo_s for m in models.values()},
            "variants": list(variants),
            "accuracy": {v.name: v.accuracy for v in variants.values()},
            "workers": list(workers),
            "delay_s": t.clusters[-1][1].delay.control_s,
        },
        {
            "model": requests.model,
            "size": np.ones(n, np.int64) if requests.size is None else requests.size,
            "arrival_s": requests.arrival,
            "deadline_s": requests.deadline,
            **_answers(t, index_of),
        },
        _batches(t, list(workers), list(variants)),
    )


_BATCHES = (
    *("worker", "variant", "size", "status", "dispatched_s"),
    *("predicted_start_s", "predicted_finish_s", "started_s", "finished_s", "price"),
)


def _batches(t: Tape, workers: list[str], variants: list[str]) -> dict[str, NDArray[Any]]:
    """Columns of the report's table of batches, with their prices."""
    worker_of = {w: i for i, w in enumerate(workers)}
    variant_of = {v: i for i, v in enumerate(variants)}
    statuses = list(BatchStatus)
    rows = []
    for b in t.batches.values():
        d, o = b.dispatch, b.outcome
        # A batch without an outcome counts as running until its worker leaves, or the log ends.
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
    made = list(zip(*rows, strict=True)) or [()] * len(_BATCHES)
    return {
        name: np.array(column, dtype=np.int64 if i < 4 else float)
        for i, (name, column) in enumerate(zip(_BATCHES, made, strict=True))
    }


def _answers(t: Tape, index_of: Mapping[int, int]) -> dict[str, NDArray[Any]]:
    """Return columns of the report's table of requests: their batch, or the reason and time of
    their drop."""
    n = len(index_of)
    batch_of, reason, dropped = np.full(n, -1), np.full(n, -1), np.full(n, np.nan)
    reasons = list(DropReason)
    for i, b in enumerate(t.batches.values()):
        for q in b.dispatch.requests:
            if (at := index_of.get(t.first_of.get(q.id, -1))) is not None:
                batch_of[at] = i
    for number, (when, why) in t.drops.items():
        if (at := index_of.get(t.first_of.get(number, -1))) is not None:
            batch_of[at], reason[at], dropped[at] = -1, reasons.index(why), when - t.zero
    return {"batch": batch_of, "drop_reason": reason, "dropped_s": dropped}


def duration_s(t: Tape, requests: Requests) -> float:
    """Return the time from the first to the last arrival, in seconds. With only one arrival, return
    the time until the log's end."""
    last = float(requests.arrival[-1])
    return last + 1e-9 if last > 0 else max(t.end - t.zero, 1e-3)


def checked_warmup_s(warmup_s: float, end: float) -> float:
    """Return `warmup_s`.

    Raises:
        ValueError: it is negative, or not before the last arrival.
    """
    if not 0 <= warmup_s < end:
        raise ValueError(
            f"warmup_s must be at least 0 and less than the {end:.3g} s that requests arrived in, "
            f"got {warmup_s:g}"
        )
    return warmup_s
