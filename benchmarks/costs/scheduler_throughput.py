"""Requests per second of CPU time that the scheduling core alone decides on.

There is no Ray, no network and no report. A minimal host (arrivals, ends of batches, `wake_at`)
runs the policy once, and records the events that it passes to it. Then a new policy gets the same
events, and only this is timed. So the figure is that of the policy alone. Policies are
deterministic, so the decisions are the same.

* one by one: every request is an event, with a decision of its own.
* bunches: requests are passed every 0.2 ms, as by a host that collects those that arrived
  meanwhile.

All models are alike (ResNet50 of Symphony's Table 2) and equally popular. The load is 75 % of the
staggered bound. Many models on few workers get small batches, and a batch costs more than a
request. So compare rows with equal mean batch. Policies are timed in turn. `auto` is timed between
its rehearsals, which run elsewhere.

Symphony's C++ simulator as a whole takes about 140,000 requests per second with 100 models × 1000
workers on one core of such a machine. Its model threads alone take 300,000 each.
"""

from __future__ import annotations

import gc
import math
import time
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.symphony.systems import alike
from ray_slo.core import (
    BatchOutcome,
    Cluster,
    Decision,
    Dispatch,
    LatencyProfile,
    Policy,
    Request,
    WorkerId,
)
from ray_slo.policies import make_policy

SOURCE = "ray-slo"
ASKED = [
    ("auto · 10 models × 100 workers", "over deferred, *", "≤", 1.5),
    ("auto · 100 models × 1000 workers", "over deferred, *", "≤", 1.5),
    ("deferred · 1000 models × 4096 workers", "in bunches", "≥", 200_000),
    (
        "auto · 1000 models × 4096 workers",
        "in bunches",
        "≥",
        200_000,
        "`auto` keeps a list of what waits and runs, so that another policy can take over",
    ),
]
ALPHA_S, BETA_S, SLO_S = 1.053e-3, 5.072e-3, 0.025
LOAD_PER_WORKER = 550.0  # requests per second, 75 % of the staggered bound
BUNCH_S = 2e-4
WARMUP_S = 0.25  # until queues are filled and the load is measured
SIZES = ((1, 8), (1, 64), (10, 100), (100, 100), (100, 1000), (1000, 1000), (1000, 4096))
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {}),
    "deferred": ("deferred", {}),
    "deferred, consolidate": ("deferred", {"objective": "consolidate"}),
    "auto": ("auto", {}),
}


class Instant(NamedTuple):
    """The events that a policy gets at one time, before it decides."""

    now: float
    ends: list[tuple[WorkerId, BatchOutcome]]
    arrivals: list[Request]


class Events(NamedTuple):
    """Instants during and after the warm-up; `requests` and `batches` count those after it."""

    cluster: Cluster
    warmup: list[Instant]
    timed: list[Instant]
    requests: int
    batches: int


def record(policy: Policy, cluster: Cluster, requests: int, bunch_s: float, seed: int) -> Events:
    """Host `policy` for `requests` Poisson arrivals after the warm-up, and record the events."""
    rng = np.random.default_rng(seed)
    rate = LOAD_PER_WORKER * len(cluster.workers)
    before = round(rate * WARMUP_S)
    arrivals = np.cumsum(rng.exponential(1 / rate, before + requests))
    fed = np.ceil(arrivals / bunch_s) * bunch_s if bunch_s else arrivals
    names = list(cluster.models)
    rows = zip(
        rng.integers(len(names), size=len(arrivals)).tolist(), arrivals.tolist(), strict=True
    )
    waiting = [Request(i, names[m], at, at + SLO_S) for i, (m, at) in enumerate(rows)]
    fed_at = [*fed.tolist(), math.inf]

    log: list[Instant] = []
    ends: list[tuple[float, int, WorkerId, Dispatch]] = []
    position = batches = 0
    warmup, wake_at = 0, math.inf
    policy.cluster_changed(0.0, cluster)
    while position < len(waiting):
        now = min(fed_at[position], ends[0][0] if ends else math.inf, wake_at)
        finished = []
        while ends and ends[0][0] <= now:
            at, _, worker, d = heappop(ends)
            finished.append((worker, BatchOutcome(d.batch_id, d.requests, d.start_at, at)))
        first = position
        while fed_at[position] <= now:
            position += 1
        instant = Instant(now, finished, waiting[first:position])
        if position <= before:
            warmup = len(log) + 1
        log.append(instant)
        decision = _feed(policy, instant)
        for action in decision.actions:
            if isinstance(action, Dispatch):
                heappush(ends, (action.finish_at, action.batch_id, action.worker, action))
                batches += position > before
        wake_at = decision.wake_at
    return Events(cluster, log[:warmup], log[warmup:], requests, batches)


def _feed(policy: Policy, instant: Instant) -> Decision:
    now, ends, arrivals = instant
    for worker, outcome in ends:
        policy.batch_finished(now, worker, outcome)
    if arrivals:
        policy.requests_arrived(now, arrivals)
    return policy.decide(now)


def replay_s(policy: Policy, events: Events) -> float:
    """Return the CPU seconds that a new policy takes for the events after the warm-up."""
    policy.cluster_changed(0.0, events.cluster)
    for instant in events.warmup:
        _feed(policy, instant)
    gc.collect()
    gc.freeze()  # the log belongs to the host; only the policy's own garbage is collected
    began = time.process_time()
    for instant in events.timed:
        _feed(policy, instant)
    taken = time.process_time() - began
    gc.unfreeze()
    return taken


def run(quick: bool, seed: int) -> list[Row]:
    sizes, requests, repeats = (SIZES[:4], 10_000, 1) if quick else (SIZES, 200_000, 3)
    rows: dict[str, list[Row]] = {name: [] for name in POLICIES}
    for models, workers in sizes:
        cluster = alike(LatencyProfile.linear(ALPHA_S, BETA_S), SLO_S, models, workers)
        size = f"{models} model{'s' * (models > 1)} × {workers} workers"
        of_size: dict[str, list[Row]] = {name: [] for name in POLICIES}
        batches = {}
        for how, bunch_s in (("one by one", 0.0), ("in bunches", BUNCH_S)):
            events = {
                name: record(make_policy(*policy), cluster, requests, bunch_s, seed)
                for name, policy in POLICIES.items()
            }
            batches = {name: of.batches for name, of in events.items()}
            taken: dict[str, list[float]] = {name: [] for name in POLICIES}
            for _ in range(repeats):  # in turn, so that changes of the machine affect all alike
                for name, policy in POLICIES.items():
                    taken[name].append(replay_s(make_policy(*policy), events[name]))
            for name, of in taken.items():
                case, best = f"{name} · {size}", min(of)
                of_size[name] += [
                    Row(case, how, "requests per s of CPU", requests / best),
                    Row(case, f"cost {how}", "µs per request", 1e6 * best / requests),
                ]
            over = min(taken["auto"]) / min(taken["deferred"])
            of_size["auto"].append(Row(f"auto · {size}", f"over deferred, {how}", "×", over))
        for name, count in batches.items():
            mean = requests / max(count, 1)
            rows[name] += [*of_size[name], Row(f"{name} · {size}", "mean batch", "", mean)]
    return [row for of in rows.values() for row in of]
