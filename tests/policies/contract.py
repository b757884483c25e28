"""Random sequences of events for policies, with the arguments of each one and its cluster."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from ray_slo.core import (
    Assigned,
    BatchStatus,
    Cluster,
    DispatchDelay,
    LatencyProfile,
    Model,
    Request,
    Upstream,
    Variant,
    Worker,
)
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.policies import POLICIES, make_policy
from ray_slo.policies.registry import COMPOSE
from tests.policies.harness import Host

SEQUENCES = int(os.environ.get("RAY_SLO_SEQUENCES", "0"))
TREE = {"a": None, "b": "a", "c": "b"}


RULE = "tests.policies.tables:solve"


KWARGS: dict[str, list[dict[str, Any]]] = {
    "auto": [{}, {"preempt": True}, {"candidates": ["eager", "price"], "fairness": 0.5}],
    "deferred": [
        {"rate_window_s": 0.2},
        {"objective": "consolidate", "target_batch_size": 4},
        {"gathering": "prefix", "max_batch_size": 3, "jitter_ms": 1.0},
        {"objective": "consolidate", "gathering": "prefix", "margin_ms": 3.0},
        {"exact": True},
        {"exact": True, "gathering": "drop_head", "target_batch_size": 3, "jitter_ms": 1.0},
    ],
    "deferred_flex": [
        {"rate_window_s": 0.2},
        {"rate_window_s": 0.2, "objective": "consolidate"},
        {"gathering": "prefix", "margin_ms": 3.0},
    ],
    "eager": [{}, {"max_batch_size": 2}],
    "flex": [
        {"lambda_": 1.5},
        {"lambda_": 2.0, "margin_ms": 2.0},
        {"preemption": False, "max_batch_size": 3},
        {"lambda_": 1.01, "preempt_delay_ms": 3.0},
        {"exact": True, "lambda_": 1.5},
        {"exact": True, "preempt_delay_ms": 3.0, "max_batch_size": 3},
    ],
    "kairos": [
        {},
        {"late": "serve", "pick": "cheapest"},
        {"learn": True, "xi": 0.9, "batch": True},
        {"exact": True},
        {"exact": True, "learn": True, "xi": 0.9},
    ],
    "pipeline": [
        {"parents": TREE},
        {"parents": TREE, "drop": "opportunistic", "queues": "worker", "rebalance_s": 0.01},
        {"parents": TREE, "drop": "per_task", "factors": {"a0": {"b": 2.0}}},
        {"parents": {"b": None, "a": "b", "c": "b"}, "drop": "last_task", "queues": "worker"},
        {"parents": TREE, "drop": "none", "communication_s": 0.001},
    ],
    "price": [{}, {"max_batch_size": 3, "margin_ms": 2.0, "violation_cost": 10.0}],
    "ramsis": [
        {"solver": RULE},
        {"solver": RULE, "balancing": "shortest_queue", "margin_ms": 2.0, "deal_every_s": 0.01},
        {"solver": None, "monitor": "peak", "window_ms": 50.0},
        {"solver": RULE, "late": "serve", "load_rps": 100.0},
        {"solver": RULE, "slos_ms": {"a": [20.0, 60.0], "c": [60.0]}, "monitor": "ewma"},
    ],
    "timeout": [{"timeout_ms": 10.0}, {"timeout_ms": 30.0, "margin_ms": 2.0}],
}


CASES = [(name, kwargs) for name in sorted(POLICIES) for kwargs in KWARGS.get(name, [{}])]


# Policies in applications that they were not made for: with these, by "composed NAME".
ALONE = tuple(Tree.of_model(m, {"": 0.06}) for m in "abc")
CHAIN = (Tree("a", tuple(TreeTask(t, t, parent) for t, parent in TREE.items()), {"": 0.06}),)
SHARED = (
    Tree("a", (TreeTask("a", "a"), TreeTask("b2", "b", "a")), {"": 0.06, "gold": 0.04}),
    *ALONE[1:],
)
COMPOSED: list[tuple[str, dict[str, Any]]] = [
    (f"composed {name}", {**kwargs, "trees": trees})
    for name, of in KWARGS.items()
    if name not in ("auto", "pipeline")  # which are told of the application
    for kwargs, trees in zip(of[:2] * 3, (CHAIN, SHARED, ALONE), strict=False)
]
CASES += COMPOSED


def recipe(name: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What `make_policy` takes for a case."""
    if not name.startswith("composed "):
        return name, kwargs
    inner = {k: v for k, v in kwargs.items() if k != "trees"}
    trees = [tree.to_json() for tree in kwargs["trees"]]
    return COMPOSE, {"policy": name.removeprefix("composed "), "kwargs": inner, "trees": trees}


def make(name: str, kwargs: dict[str, Any]) -> Any:
    """The policy of a case."""
    return make_policy(*recipe(name, kwargs))


def id_of(value: Any) -> str:
    """A case's name, in a test's."""
    if isinstance(value, dict) and "trees" in value:
        tasks = ",".join(tree.name + "/" * len(tree.tasks[1:]) for tree in value["trees"])
        return f"{ {k: v for k, v in value.items() if k != 'trees'} } for {tasks}"
    return str(value)


VARIANTS = {"a": ("a0", "a1"), "b": ("b0",), "c": ("c0",)}


LOADS = [frozenset({"a0", "a1", "b0", "c0"}), frozenset({"a1", "b0"}), frozenset({"c0"})]


MADE_BY = [None, Upstream("w0", "a0", 0.02), Upstream("w1", "b0", 0.04), Upstream("?", "?", 0.0)]


HARDWARE = {"fast": 1.0, "slow": 2.5}


def make_cluster(
    kinds: list[tuple[str, int]], scale: float = 1.0, control_s: float = 0.0
) -> Cluster:
    def variant(i: int, name: str) -> Variant:
        profiles = {
            hardware: LatencyProfile.linear(0.002 * f * scale, (0.008 + 0.004 * i) * f * scale, 6)
            for hardware, f in HARDWARE.items()
        }
        return Variant(name, profiles)

    models = [
        Model(m, 0.06, tuple(variant(i, v) for i, v in enumerate(names)))
        for m, names in VARIANTS.items()
    ]
    workers = [Worker(f"w{i}", kind, LOADS[load]) for i, (kind, load) in enumerate(kinds)]
    return Cluster.of(models, workers, DispatchDelay(control_s, control_s / 10))


seconds = st.sampled_from([0.0, 1e-4, 0.002, 0.005, 0.01, 0.013, 0.02, 0.05])


worker_kind = st.tuples(st.sampled_from(list(HARDWARE)), st.sampled_from([0, 0, 1, 2]))


budget = st.one_of(
    st.just(0.06), st.sampled_from([0.0, 0.005, 0.012, 0.02, 0.1]), st.floats(0.001, 0.2)
)


arrive = st.tuples(
    st.just("arrive"),
    st.lists(st.tuples(st.sampled_from("aaabc"), budget), min_size=1, max_size=10),
)


run = st.tuples(st.just("run"), seconds)  # batches end as predicted


operation = st.one_of(
    *[arrive] * 6,
    *[run] * 6,
    st.tuples(st.just("hang"), seconds),  # no batch ends
    st.tuples(st.just("jump"), seconds),  # the host itself is late
    st.tuples(
        st.just("finish"), st.integers(0, 9), st.sampled_from(list(BatchStatus)), st.booleans()
    ),
    st.tuples(st.just("lose ahead"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("cancel"), st.lists(st.integers(0, 99), min_size=1, max_size=4)),
    st.tuples(st.just("add"), worker_kind),
    st.tuples(st.just("remove"), st.integers(0, 9)),
    st.tuples(st.just("reload"), st.integers(0, 9), st.integers(0, len(LOADS) - 1)),
    st.tuples(
        st.just("assign"),
        st.integers(0, 9),
        st.sampled_from([None, ("a0", 2), ("a1", 9), ("b0", 1), ("c0", 3)]),
    ),
    st.tuples(st.just("profiles"), st.sampled_from([0.5, 1.0, 1.7])),
    st.tuples(st.just("delay"), st.sampled_from([0.0, 0.001, 0.004, 0.015])),
)


SIZES = (1, 3, 1, 2, 6, 1, 7)  # the last is more than any batch may have


class Script:
    """Carries operations out on a host."""

    def __init__(self, host: Host, sized: bool = False) -> None:
        self.host, self.sized = host, sized
        self.requests: list[Request] = []
        self.added = 0

    def do(self, name: str, *args: Any) -> None:
        getattr(self, name.replace(" ", "_"))(*args)

    def arrive(self, bunch: list[tuple[str, float]]) -> None:
        now, n = self.host.now, len(self.requests)
        new = [
            Request(
                *(n + i, m, now, now + budget, SIZES[(n + i) % len(SIZES)] if self.sized else 1),
                task="b2" if m == "b" and i % 2 else None,
                upstream=MADE_BY[(n + i) % len(MADE_BY)],
            )
            for i, (m, budget) in enumerate(bunch)
        ]
        self.requests += new
        self.host.arrive(new)

    def run(self, dt: float) -> None:
        self.host.advance(self.host.now + dt)

    def hang(self, dt: float) -> None:
        self.host.advance(self.host.now + dt, ends=False)

    def jump(self, dt: float) -> None:
        self.host.now += dt
        self.host.decide()

    def finish(self, i: int, status: BatchStatus, again: bool) -> None:
        busy = [w for w, flights in self.host.flights.items() if flights]
        if busy:
            again = again and status is not BatchStatus.FINISHED
            self.host.finish(busy[i % len(busy)], status, again=again)

    def lose_ahead(self, i: int, again: bool) -> None:
        busy = [w for w, flights in self.host.flights.items() if len(flights) == 2]
        if busy:
            self.host.finish(busy[i % len(busy)], BatchStatus.LOST, index=1, again=again)

    def cancel(self, which: list[int]) -> None:
        if self.requests:
            self.host.cancel([self.requests[i % len(self.requests)] for i in which])

    def add(self, kind: tuple[str, int]) -> None:
        self.added += 1
        worker = Worker(f"new{self.added}", kind[0], LOADS[kind[1]])
        self.change(workers={**self.host.cluster.workers, worker.id: worker})

    def remove(self, i: int) -> None:
        workers = dict(self.host.cluster.workers)
        if workers:
            gone = list(workers)[i % len(workers)]
            del workers[gone]
            lost = [r for f in self.host.flights[gone] for r in f.dispatch.requests]
            self.change(workers=workers)
            if lost:
                self.host.arrive(lost)

    def reload(self, i: int, load: int) -> None:
        workers = dict(self.host.cluster.workers)
        if workers:
            w = list(workers)[i % len(workers)]
            workers[w] = replace(workers[w], loaded=LOADS[load])
            self.change(workers=workers)

    def assign(self, i: int, what: tuple[str, int] | None) -> None:
        workers = dict(self.host.cluster.workers)
        if workers:
            w = list(workers)[i % len(workers)]
            assigned = () if what is None else (Assigned(*what, load=20.0),)
            workers[w] = replace(workers[w], assigned=assigned)
            self.change(workers=workers)

    def profiles(self, scale: float) -> None:
        self.change(models=make_cluster([], scale).models)

    def delay(self, control_s: float) -> None:
        self.change(delay=DispatchDelay(control_s, control_s / 10))

    def change(self, **changes: Any) -> None:
        self.host.change(replace(self.host.cluster, **changes))
