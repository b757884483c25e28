"""`exact: true` beside naive transcriptions of the papers' pseudo code, over random arrivals.

The transcriptions know nothing of the policies: they keep lists, go through all of them at every
event, and are written from the papers line by line. No two requests have one deadline, as the
papers do not say which goes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from ray_slo.core import (
    Cluster,
    DispatchDelay,
    LatencyProfile,
    Model,
    Request,
    Variant,
    Worker,
)
from ray_slo.core.decisions import Preempt
from ray_slo.policies import make_policy
from ray_slo.policies.exact.deferred import ExactDeferred
from ray_slo.policies.registry import live_arguments, name_of, refuse_sizes
from tests.policies.harness import Host
from tests.policies.pools import pool, request

EPS = 5e-7  # by which a policy lets a deadline pass
MOST = 6

Sent = tuple[float, str, list[int]]


class Task(NamedTuple):
    id: int
    model: str
    arrival: float
    deadline: float


LATENCY: dict[str, Callable[[int], float]] = {
    "a": lambda b: (8 + 2 * b) / 1024,
    "b": lambda b: (4 + 5 * b) / 1024,
    "c": lambda b: (20 + b) / 1024,
}

tasks = st.lists(
    st.tuples(
        st.sampled_from("aabc"),
        st.integers(0, 12),  # time since the one before, in 1/1024 s
        st.integers(8, 80),  # budget, in 1/1024 s
    ),
    min_size=1,
    max_size=50,
)


def tasks_of(drawn: list[tuple[str, int, int]]) -> list[Task]:
    made, now = [], 0
    for i, (model, gap, budget) in enumerate(drawn):
        now += gap
        made.append(Task(i, model, now / 1024, (now + budget) / 1024 + i * 2.0**-15))
    return made


def ran(
    policy: str, kwargs: dict[str, Any], arrivals: list[Task], gpus: int, delay_s: float = 0.0
) -> Host:
    """The policy, on as many workers."""
    models = []
    for name, of in LATENCY.items():
        profile = LatencyProfile([of(b) for b in range(1, MOST + 1)])
        models.append(Model(name, 0.05, (Variant(name, {"default": profile}),)))
    cluster = Cluster.uniform(models, gpus, delay=DispatchDelay(delay_s))
    host = Host(lambda: make_policy(policy, {**kwargs, "exact": True}), cluster, strict=False)
    host.run([Request(t.id, t.model, t.arrival, t.deadline) for t in arrivals])
    host.check_replay()
    return host


def same(host: Host, transcribed: list[Sent]) -> None:
    mine = [(at, ids) for at, _, ids in host.timeline()]
    assert mine == [(pytest.approx(at, abs=EPS), ids) for at, _, ids in transcribed]
    assert [worker for _, worker, _ in host.timeline()] == [worker for _, worker, _ in transcribed]


# Symphony, Algorithm 1; the delay, and the timer at a deadline, are Appendix D's --------------


def algorithm_1(arrivals: list[Task], gpus: int, delay: float, target: int) -> list[Sent]:
    sent: list[Sent] = []
    queue: dict[str, list[Task]] = {m: [] for m in LATENCY}
    candidate: dict[str, tuple[list[Task], float, float] | None] = dict.fromkeys(LATENCY)
    free = [-math.inf] * gpus
    coming = sorted(arrivals, key=lambda t: t.arrival)
    now = 0.0

    def latency(m: str, b: int) -> float:
        return LATENCY[m](b) if b <= MOST else math.inf

    def fits(m: str, b: int, head: Task) -> bool:
        return now + delay + latency(m, b) <= head.deadline + EPS

    def get_batch(m: str) -> list[Task]:
        q = queue[m]
        while q:
            b = 0
            while b < len(q) and fits(m, b + 1, q[0]):
                b += 1
            if b >= max(1, min(target, len(q), MOST)):
                return q[:b]
            q.pop(0)
        return []

    def update_candidate(m: str) -> None:
        batch = get_batch(m)
        candidate[m] = None
        if batch:
            d = min(r.deadline for r in batch)
            due = max(now + delay, d - latency(m, len(batch) + 1))
            candidate[m] = batch, due, d - latency(m, len(batch))

    def dispatch(m: str, g: int) -> None:
        update_candidate(m)
        batch, due, _ = candidate[m]  # type: ignore[misc]
        sent.append((now, f"w{g}", [r.id for r in batch]))
        free[g] = max(due, free[g]) + latency(m, len(batch))
        queue[m] = [r for r in queue[m] if r not in batch]
        update_candidate(m)

    def match() -> bool:
        idle = [g for g in range(gpus) if free[g] <= now + EPS]
        soon = sorted((free[g], g) for g in range(gpus) if free[g] <= now + delay + EPS)
        if not soon:
            return False
        g = idle[0] if idle else soon[0][1]
        valid = [
            (latest, m)
            for m, (_, due, latest) in ((m, c) for m, c in candidate.items() if c)
            if due - delay <= now + EPS and max(now + delay, free[g]) <= latest + EPS
        ]
        if valid:
            dispatch(min(valid)[1], g)
        return bool(valid)

    while True:
        timers = [coming[0].arrival] if coming else []
        timers += [c[1] - delay for c in candidate.values() if c and c[1] - delay > now + EPS]
        timers += [at - delay for at in free if at - delay > now + EPS]
        timers += [at for at in free if at > now + EPS]
        dropped_at = {m: q[0].deadline + 2 * EPS for m, q in queue.items() if q}
        timers += dropped_at.values()
        if not timers:
            return sent
        now = min(timers)
        for m, at in dropped_at.items():
            if at <= now:
                update_candidate(m)
        while coming and coming[0].arrival <= now:
            r = coming.pop(0)
            queue[r.model] = sorted([*queue[r.model], r], key=lambda r: r.deadline)
            update_candidate(r.model)
        while match():
            pass


@settings(max_examples=100)
@given(
    drawn=tasks,
    gpus=st.integers(1, 4),
    delay=st.sampled_from([0.0, 0.0, 3.0 / 1024]),
    target=st.sampled_from([1, 1, 3]),
)
def test_deferred_is_algorithm_1(drawn, gpus, delay, target):
    arrivals = tasks_of(drawn)
    kwargs = {"gathering": "drop_head", "target_batch_size": target} if target > 1 else {}
    same(ran("deferred", kwargs, arrivals, gpus, delay), algorithm_1(arrivals, gpus, delay, target))


# SHEPHERD, Algorithms 1 and 2 -----------------------------------------------------------------


def flex(arrivals: list[Task], gpus: int, lambda_: float) -> tuple[list[Sent], int]:
    """What is sent, and how many batches are preempted."""
    sent: list[Sent] = []
    preempted = 0
    queue: dict[str, list[Task]] = {m: [] for m in LATENCY}
    running: list[tuple[str, list[Task], float] | None] = [None] * gpus
    coming = sorted(arrivals, key=lambda t: t.arrival)
    now = 0.0

    def batch_gen(n: int, models: set[str]) -> tuple[str, list[Task]]:
        best: tuple[str, list[Task]] = "", []
        for m in sorted(models):
            queue[m] = [r for r in queue[m] if now + LATENCY[m](1) <= r.deadline + EPS]
            candidates = list(queue[m])
            if running[n] is not None and running[n][0] == m:
                candidates += [r for r in running[n][1] if now + LATENCY[m](1) <= r.deadline + EPS]
            batch: list[Task] = []
            for r in sorted(candidates, key=lambda r: r.deadline):
                earliest = [*batch, r][0].deadline
                if len(batch) == MOST or now + LATENCY[m](len(batch) + 1) > earliest + EPS:
                    break
                batch.append(r)
            by_size = len(batch) - len(best[1])
            if by_size > 0 or (batch and not by_size and quicker(m, best[0], len(batch))):
                best = m, batch
        return best

    def quicker(m: str, other: str, size: int) -> bool:
        return LATENCY[m](size) < LATENCY[other](size)

    def execute(n: int, m: str, batch: list[Task]) -> None:
        queue[m] = [r for r in queue[m] if r not in batch]
        running[n] = m, batch, now + LATENCY[m](len(batch))
        sent.append((now, f"w{n}", [r.id for r in batch]))

    while coming or any(running):
        ends = [of[2] for of in running if of]
        now = min([r.arrival for r in coming[:1]] + ends)
        running = [None if of and of[2] <= now else of for of in running]
        new: set[str] = set()
        while coming and coming[0].arrival <= now:
            r = coming.pop(0)
            queue[r.model].append(r)
            new.add(r.model)
        for n in range(gpus):  # events of completion; idle ones have nothing else to do
            if running[n] is None:
                m, batch = batch_gen(n, set(LATENCY))
                if batch:
                    execute(n, m, batch)
        n = 0
        while new and n < gpus:
            if running[n] is not None:
                own, current, _ = running[n]
                m, batch = batch_gen(n, new | {own})
                if len(batch) >= lambda_ * len(current):
                    execute(n, m, batch)
                    preempted += 1
                    queue[own] += [r for r in current if r not in batch]
                    new.add(own)
                    n = -1  # go to line 11
            n += 1
    return sent, preempted


@settings(max_examples=100)
@given(drawn=tasks, gpus=st.integers(1, 4), lambda_=st.sampled_from([1.1, 1.5, 2.0, 3.03]))
def test_flex_is_algorithms_1_and_2(drawn, gpus, lambda_):
    arrivals = tasks_of(drawn)
    host = ran("flex", {"lambda_": lambda_}, arrivals, gpus)
    sent, preempted = flex(arrivals, gpus, lambda_)
    same(host, sent)
    actions = [action for decision in host.decisions for action in decision.actions]
    assert sum(isinstance(action, Preempt) for action in actions) == preempted


# Kairos, Equations 2 to 8 ---------------------------------------------------------------------

ALPHA = {"strong": 0.5, "middle": 0.9, "weak": 1.3}
LARGEST, XI = 20, 0.98


def kairos(queries: list[tuple[float, int, float]], kinds: list[str]) -> list[Sent]:
    """queries: arrival, size, T_qos."""
    sent: list[Sent] = []
    latency = {
        kind: [0.0] + [1.0 + ALPHA[kind] * b for b in range(1, LARGEST + 1)] for kind in kinds
    }
    base = min(latency[kind][LARGEST] for kind in kinds)
    coefficient = [base / latency[kind][LARGEST] for kind in kinds]
    free = [0.0] * len(kinds)
    waiting: list[int] = []
    events = {arrival for arrival, _, _ in queries}
    now = -1.0
    while later := [at for at in events if at > now]:
        now = min(later)
        waiting += [i for i, q in enumerate(queries) if q[0] == now]
        if not waiting or not any(at <= now for at in free):
            continue  # whatever is matched would be to a busy instance
        cost = np.zeros((len(waiting), len(kinds)))
        for row, i in enumerate(waiting):
            arrival, size, qos = queries[i]
            for j, kind in enumerate(kinds):
                takes, waited = max(free[j] - now, 0.0) + latency[kind][size], now - arrival
                in_time = takes + waited <= XI * qos + EPS
                cost[row, j] = coefficient[j] * (takes if in_time else 10 * qos)
        pairs = zip(*linear_sum_assignment(cost), strict=True)
        for i, j in [(waiting[row], j) for row, j in pairs if free[j] <= now]:
            free[j] = now + latency[kinds[j]][queries[i][1]]
            events.add(free[j])
            waiting.remove(i)
            sent.append((now, f"{kinds[j]}{j}", [i]))
    return sent


@settings(max_examples=100)
@given(
    drawn=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, LARGEST), st.integers(10, 80)),
        min_size=1,
        max_size=40,
    ),
    kinds=st.lists(st.sampled_from(list(ALPHA)), min_size=1, max_size=4),
)
def test_kairos_is_its_equations(drawn, kinds):
    queries, now = [], 0.0
    for gap, size, qos in drawn:
        now += gap
        queries.append((now, size, qos / 2))
    profiles = {k: LatencyProfile.linear(ALPHA[k], 1.0, LARGEST) for k in ALPHA}
    model = Model("m", 20.0, (Variant("v", profiles),))
    workers = [Worker(f"{k}{i}", k, frozenset({"v"})) for i, k in enumerate(kinds)]
    host = Host(
        lambda: make_policy("kairos", {"exact": True}), Cluster.of([model], workers), strict=False
    )
    host.run([Request(i, "m", at, at + qos, n) for i, (at, n, qos) in enumerate(queries)])
    same(host, kairos(queries, kinds))
    assert not host.dropped


# What is said of them ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kwargs", "message"),
    [
        ("deferred", {"objective": "responsive"}, "objective contradicts it: it always waits"),
        ("deferred", {"headroom": 0.9}, "headroom contradicts it: it aims at no utilisation"),
        ("deferred", {"rate_window_s": 1.0}, "rate_window_s contradicts it: it measures no load"),
        ("deferred", {"gathering": "drop_head"}, "target_batch_size go together"),
        ("deferred", {"wait": 1}, "with exact: true has no argument wait; it takes gathering"),
        ("kairos", {"late": "drop"}, "late contradicts it: it drops nothing"),
        ("kairos", {"pick": "urgent"}, "pick contradicts it: the matching alone decides"),
        ("kairos", {"batch": True}, "batch contradicts it: a request is a batch"),
        ("price", {}, "'price' has no exact mode.*deferred, flex, kairos have one"),
    ],
)
def test_what_contradicts_the_paper_is_refused(policy, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_policy(policy, {**kwargs, "exact": True})


def test_exact_is_true_or_false():
    with pytest.raises(ValueError, match="exact must be true or false, got 1"):
        make_policy("deferred", {"exact": 1})
    assert type(make_policy("kairos", {"exact": False})) is type(make_policy("kairos"))


def test_it_goes_by_the_same_name_and_takes_what_a_live_host_gives():
    for policy in ("deferred", "flex", "kairos"):
        kwargs = {**live_arguments(policy, 200.0), "exact": True}
        assert name_of(make_policy(policy, kwargs)) == policy
    with pytest.raises(ValueError, match="policy 'flex' counts requests"):
        refuse_sizes("flex", {"exact": True})


class Mine(ExactDeferred):
    def __init__(self, exact: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.exact = exact


def test_a_class_of_ones_own_may_have_the_argument():
    assert make_policy(Mine, {"exact": "mine"}).exact == "mine"


def test_kairos_serves_late_what_the_improved_one_refuses():
    for exact, dropped in ((True, 0), (False, 1)):
        kwargs = {"exact": True} if exact else {}
        host = Host(lambda k=kwargs: make_policy("kairos", k), pool("w"), strict=False)
        host.run([request(1, 12)])
        assert len(host.dropped) == dropped
