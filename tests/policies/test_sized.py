"""Requests with sizes under policies that batch: a batch takes as long as its items."""

from __future__ import annotations

import pytest

from ray_slo.core import DropReason, LatencyProfile, Request
from ray_slo.policies import make_policy
from ray_slo.simulation.simulator import simulate
from ray_slo.simulation.workloads import Workload
from tests.policies.harness import Host, one_model


def sized(*sizes: int, slo_s: float = 12.0) -> list[Request]:
    return [Request(i, "m", 0.0, slo_s, size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("policy", ["deferred", "eager", "deferred_flex"])
def test_a_batch_takes_as_long_as_its_items(policy: str) -> None:
    cluster = one_model(LatencyProfile.linear(1.0, 2.0, 8), 12.0, 2)
    host = Host(lambda: make_policy(policy), cluster)
    host.arrive(sized(3, 4, 2, 6, 9))
    host.advance(30.0)
    # 3 + 4 items fit a batch of 8, and take 9 s; then 2 + 6. 9 are too many for any batch.
    assert [(s.ids, s.finish_at) for s in host.sent] == [([0, 1], 9.0), ([2, 3], 10.0)]
    assert host.dropped == {4: (0.0, DropReason.WOULD_MISS)}


def test_flex_takes_the_most_items() -> None:
    host = Host(
        lambda: make_policy("flex"),
        one_model(LatencyProfile.linear(1.0, 2.0, 8), 12.0, 2),
        strict=False,
    )
    host.arrive(sized(3, 4, 2, 6, 9))
    host.advance(30.0)
    assert [(s.ids, s.finish_at) for s in host.sent] == [([2, 3], 10.0), ([0, 1], 9.0)]
    assert {i: why for i, (_, why) in host.dropped.items()} == {4: DropReason.WOULD_MISS}


def test_a_request_alone_may_be_larger_than_the_policys_bound() -> None:
    cluster = one_model(LatencyProfile.linear(1.0, 2.0, 8), 12.0, 1)
    host = Host(lambda: make_policy("eager", {"max_batch_size": 2}), cluster)
    host.arrive(sized(6, 1, 1))
    host.advance(30.0)
    assert [(s.ids, s.finish_at) for s in host.sent] == [([0], 8.0), ([1, 2], 12.0)]


def test_load_is_measured_in_items() -> None:
    cluster = one_model(LatencyProfile.linear(0.001, 0.005, 64), 0.1, 4)
    found = {}
    for mean in (1, 8):
        sizes = {"kind": "gaussian", "mean": mean, "std": 0.01}
        workload = Workload.poisson(2400 / mean, sizes=sizes)
        report = simulate(make_policy("deferred"), cluster, workload, duration_s=3)
        found[mean] = report.bad_rate(), report.batches["size"].mean() * mean
    assert found[1][0] < 0.002
    assert found[8][0] < 0.002
    assert 0.5 < found[8][1] / found[1][1] < 2.5
