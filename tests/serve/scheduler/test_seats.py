"""Seats: batches run on the node of their payloads, without a change of the policy."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core import Assigned, BatchStatus, LatencyProfile, Request
from ray_slo.policies import make_policy
from ray_slo.record.rows import Recording
from ray_slo.serve.scheduler.seats import NearPayloads
from tests.policies.contract import Script, make_cluster, operation, worker_kind
from tests.policies.harness import Host, one_model

FLAT = LatencyProfile([0.01] * 8)


def seated(policy="eager", nodes=None, sink=lambda _round: None, **kwargs):
    """Workers are on the nodes given, else on that of their name; payloads on that of the model."""
    return NearPayloads(
        Recording(make_policy(policy, kwargs), sink),
        lambda worker: (nodes or {}).get(worker, worker[-1]),
        lambda request: "01"[request.id % 2],
    )


def ask(host, *ids):
    """Requests arrive: those with an even id on node "0", the others on node "1"."""
    host.arrive([Request(i, "m", host.now, host.now + 1.0) for i in ids])
    return [(s.worker, s.ids) for s in host.sent]


def names(host):
    return list(host.cluster.workers)


def test_a_free_worker_of_the_same_node_takes_the_batch():
    nodes = {"w0": "0", "w1": "1", "w2": "1"}
    host = Host(lambda: seated(nodes=nodes), one_model(FLAT, 1.0, 3))
    assert names(host) == ["w0", "w1", "w2"]
    assert ask(host, 1, 3, 2) == [("w1", [1, 3, 2])]  # where most of them are
    assert ask(host, 4)[1:] == [("w0", [4])]
    assert ask(host, 6)[2:] == [("w2", [6])]  # none free over there: any will do
    host.advance(host.now + 1.0)  # seats have changed, workers end as they should
    assert ask(host, 5, 7)[3:] in ([("w1", [5, 7])], [("w2", [5, 7])])


def test_nodes_that_are_not_known_or_all_the_same_change_nothing():
    for node in ("", "0"):
        host = Host(lambda n=node: seated(nodes=dict.fromkeys(["w0", "w1"], n)), cluster(2))
        assert ask(host, 1) == [("w0", [1])]
        assert ask(host, 3)[1:] == [("w1", [3])]


def cluster(workers):
    return one_model(FLAT, 1.0, workers)


@pytest.mark.parametrize("change", [{"hardware": "other"}, {"assigned": (Assigned("v", 4),)}])
def test_workers_that_differ_do_not_change_seats(change):
    two = cluster(2)
    variant = two.models["m"].variants[0]
    model = replace(
        two.models["m"], variants=(replace(variant, profiles={"default": FLAT, "other": FLAT}),)
    )
    workers = {**two.workers, "w1": replace(two.workers["w1"], **change)}
    two = replace(two, models={"m": model}, workers=workers)
    host = Host(lambda: seated(nodes={"w0": "0", "w1": "1"}), two)
    assert ask(host, 1) == [("w0", [1])]


def test_a_worker_that_comes_back_finds_a_seat():
    host = Host(lambda: seated(nodes={"w0": "0", "w1": "1"}), cluster(2))
    both = host.cluster
    assert ask(host, 1) == [("w1", [1])]  # they have changed seats
    host.advance(host.now + 1.0)
    for gone in ("w0", "w1"):
        rest = {name: w for name, w in both.workers.items() if name != gone}
        host.change(replace(both, workers=rest))
        host.change(both)
    before = len(host.sent)
    assert sorted(ask(host, 2, 3)[before:] + ask(host, 5)[before + 1 :]) == [
        ("w0", [2, 3]),
        ("w1", [5]),
    ]
    host.finish("w1", BatchStatus.FAILED)
    assert ask(host, 7)[before + 2 :] == [("w1", [7])]


CASES = [
    ("eager", {}),
    ("deferred", {"objective": "consolidate"}),
    ("flex", {"lambda_": 1.5}),
    ("deferred_flex", {"rate_window_s": 0.2}),
    ("kairos", {}),
    ("ramsis", {"solver": "tests.policies.tables:solve"}),
]


@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=[name for name, _ in CASES])
@settings(max_examples=10)
@given(
    kinds=st.lists(worker_kind, min_size=2, max_size=5),
    operations=st.lists(operation, min_size=10, max_size=50),
)
def test_the_contract_holds_and_the_log_replays(name, kwargs, kinds, operations):
    """`Host` checks what reaches the workers; the log is of what the policy saw and said."""
    rounds = []
    host = Host(
        lambda: seated(name, sink=lambda r: rounds.append(copy.copy(r)), **kwargs),
        make_cluster(kinds, control_s=0.004),
        now=1000.0,
        strict=False,
    )
    script = Script(host)
    for op in operations:
        script.do(*op)
    logged = list(rounds)
    host.check_replay()
    plain = make_policy(name, kwargs)
    for turn in logged:
        for event, args in turn.events:
            getattr(plain, event)(*args)
        again = plain.decide(turn.now)
        assert (again.actions, again.wake_at) == (turn.decision.actions, turn.decision.wake_at)
