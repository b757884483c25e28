"""Every registered policy against random event sequences: the contract of core/policy.py.

`RAY_SLO_SEQUENCES=1000 pytest --timeout=0 tests/policies/test_contract.py` runs 1000 of each.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core import (
    Request,
    Upstream,
)
from ray_slo.policies import POLICIES
from ray_slo.policies.batching import BatchingPolicy
from ray_slo.policies.timeout import Eager
from tests.policies.contract import (
    CASES,
    SEQUENCES,
    VARIANTS,
    Script,
    budget,
    make,
    make_cluster,
    operation,
    seconds,
    worker_kind,
)
from tests.policies.harness import EPS, Host


def idle_though_useful(host: Host) -> list[tuple[str, Request]]:
    """Idle workers beside requests that they could serve in time, which eager must not have."""
    cluster, found = host.cluster, []
    for w, worker in cluster.workers.items():
        for r in host.waiting.values():
            loaded = [v for v in cluster.models[r.model].variants if v.name in worker.loaded]
            if loaded and not host.flights[w]:
                time = cluster.delay(1) + cluster.profile(loaded[0].name, w)(r.size)
                if host.now + time + EPS < r.deadline:
                    found.append((w, r))
    return found


ARGUMENTS = {name: [kwargs for of, kwargs in CASES if of == name] for name, _ in CASES}
"""Of every policy. All meet the same events, because it takes long to draw them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
@settings(max_examples=SEQUENCES or 8)
@given(
    kinds=st.lists(worker_kind, max_size=3),
    control_s=st.sampled_from([0.0, 0.004, 0.015]),
    operations=st.lists(operation, min_size=10, max_size=60),
    hung=st.booleans(),
    sized=st.booleans(),
)
def test_contract(name: str, **events: Any) -> None:
    for kwargs in ARGUMENTS[name]:
        keeps_the_contract(name, kwargs, **events)


def keeps_the_contract(
    name: str,
    kwargs: dict[str, Any],
    kinds: list[tuple[str, int]],
    control_s: float,
    operations: list[tuple[Any, ...]],
    hung: bool,
    sized: bool,
) -> None:
    policy = make(name, kwargs)
    host = Host(
        lambda: make(name, kwargs),
        make_cluster(kinds, control_s=control_s),
        now=1000.0,
        strict=isinstance(policy, BatchingPolicy) and "exact" not in kwargs,
        margin_s=kwargs.get("margin_ms", 0.0) / 1e3,
    )
    script = Script(host, sized and not getattr(policy, "counts_requests", False))
    for op in operations:
        script.do(*op)
        if isinstance(policy, Eager):
            assert not idle_though_useful(host)
    # Liveness: a host that honours wake_at sees everything leave, even if no batch ever ends.
    last = max((r.deadline for r in script.requests), default=0.0)
    if policy.serves_late:  # … but late requests wait for a worker, however long
        host.advance(max(host.now, last + 1e3))
    host.advance(max(host.now, last + 1e-5), ends=not hung)
    assert not host.waiting
    host.check_replay()


def test_every_registered_policy_is_covered() -> None:
    assert {name for name, _ in CASES if " " not in name} == set(POLICIES)


@pytest.mark.parametrize("name", ARGUMENTS)
@settings(max_examples=SEQUENCES or 12)
@given(
    kinds=st.lists(worker_kind, min_size=1, max_size=3),
    control_s=st.sampled_from([0.0, 0.004]),
    model=st.sampled_from(list(VARIANTS)),
    spare_s=st.one_of(st.sampled_from([1e-6, 1e-4, 0.001]), st.floats(1e-6, 0.1)),
    before=st.lists(st.tuples(st.sampled_from(list(VARIANTS)), budget, seconds), max_size=6),
    pause_s=st.sampled_from([0.0, 0.5, 100.0]),
)
def test_an_idle_system_refuses_nothing_that_it_could_serve(name: str, **events: Any) -> None:
    for kwargs in ARGUMENTS[name]:
        serves_a_lone_request(name, kwargs, **events)


def serves_a_lone_request(
    name: str,
    kwargs: dict[str, Any],
    kinds: list[tuple[str, int]],
    control_s: float,
    model: str,
    spare_s: float,
    before: list[tuple[str, float, float]],
    pause_s: float,
) -> None:
    margin_s = kwargs.get("margin_ms", 0.0) / 1e3
    cluster = make_cluster(kinds, control_s=control_s)
    host = Host(lambda: make(name, kwargs), cluster, now=1000.0, strict=False)
    parents = kwargs.get("parents", dict.fromkeys(VARIANTS))
    model_of = dict(zip(parents, parents, strict=True))
    for tree in kwargs.get("trees", ()):
        parents |= tree.parents
        model_of |= {task.name: task.model for task in tree.tasks}
    for i, (other, budget_s, dt) in enumerate(before):  # whatever it has learned from these
        host.arrive([Request(i, other, host.now, host.now + budget_s)])
        host.advance(host.now + dt)
    host.advance(host.now + 10.0 + pause_s)
    path = path_from(model, parents)
    alone_s = sum(host.soonest(model_of[task]) - host.now + margin_s for task in path)
    if alone_s == math.inf:
        return  # no worker has it
    deadline, upstream = host.now + alone_s + spare_s, None
    slack_rule = kwargs.get("drop", "slack") == "slack"  # the paper's promise nothing later on
    for i, task in enumerate(path if slack_rule else path[:1]):
        entered, model_name = host.now, model_of[task]
        lone = Request(900 + i, model_name, entered, deadline, task=task, upstream=upstream)
        host.arrive([lone])
        host.advance(deadline + 1.0, until_idle=True)
        assert lone.id not in host.dropped
        assert not host.waiting
        (sent,) = (s for s in host.sent if lone.id in s.ids)
        upstream = Upstream(sent.worker, sent.variant, host.now - entered)


def path_from(task: str, parents: dict[str, str | None]) -> list[str]:
    """A task and all below it, where no task has two children that matter here."""
    path = [task]
    while below := [t for t, parent in parents.items() if parent == path[-1]]:
        path.append(below[-1])
    return path
