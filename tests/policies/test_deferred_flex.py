"""Preemption by predicted gain: the worked example, and where it must not happen."""

from __future__ import annotations

import pytest

from ray_slo.core import Cluster, LatencyProfile, Model, Request, Variant
from ray_slo.policies.deferred_flex import DeferredFlex
from tests.policies.harness import Host

SLOW = LatencyProfile.linear(4.37, 74.20)  # ResNet269 and ResNet18, ms as seconds
QUICK = LatencyProfile.linear(0.22, 3.74)


def make_host(slo: float, workers: int = 1) -> Host:
    models = [
        Model(name, slo, (Variant(name, {"default": profile}),))
        for name, profile in (("slow", SLOW), ("quick", QUICK))
    ]
    return Host(DeferredFlex, Cluster.uniform(models, workers))


def some(count: int, model: str, at: float, slo: float) -> list[Request]:
    start = 0 if model == "slow" else 1000
    return [Request(start + i, model, at, at + slo) for i in range(count)]


def test_a_burst_that_cannot_wait_preempts():
    host = make_host(90.0)
    host.run(some(1, "slow", 0.0, 90.0) + some(1024, "quick", 5.0, 90.0))
    assert [s.at for s in host.sent] == pytest.approx([0.0, 5.0, 36.9, 68.8])
    assert [len(s.ids) for s in host.sent] == [1, 128, 128, 102]
    # The preempted request waits as long as it could be served.
    assert host.dropped[0][0] == pytest.approx(90 - SLOW(1), abs=1e-3)


def test_a_burst_that_fits_in_afterwards_does_not():
    host = make_host(300.0)
    host.run(some(1, "slow", 0.0, 300.0) + some(300, "quick", 20.0, 300.0))
    assert host.sent[0].ids == [0]
    assert host.sent[1].at == pytest.approx(host.sent[0].finish_at)
    assert not host.dropped


def test_another_worker_that_is_free_in_time_prevents_it():
    host = make_host(100.0, workers=2)
    host.run(some(1, "slow", 0.0, 100.0) + some(250, "quick", 20.0, 100.0))
    assert not host.dropped
    assert [s.worker for s in host.sent] == ["w0", "w1", "w1"]


def test_the_own_model_is_never_preempted():
    host = make_host(90.0)
    host.run(some(1, "slow", 0.0, 90.0) + some(1024, "slow", 10.0, 90.0)[1:])
    sent = [i for s in host.sent for i in s.ids]
    assert len(sent) == len(set(sent))
