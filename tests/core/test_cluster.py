"""Clusters, workers and delays; wrong ones are refused."""

from __future__ import annotations

import pytest

from ray_slo.core import Cluster, DispatchDelay, LatencyProfile, Model, Variant, Worker

FAST, SLOW = LatencyProfile([1.0]), LatencyProfile([2.0])


def model(name: str = "m", *variants: str) -> Model:
    names = variants or (name,)
    return Model(name, 0.1, tuple(Variant(v, {"gpu": FAST, "cpu": SLOW}) for v in names))


def test_uniform_loads_everything_in_rank_order():
    cluster = Cluster.uniform([model("a", "a0", "a1"), model("b")], 3, "gpu")
    assert list(cluster.workers) == ["w0", "w1", "w2"]
    assert {w.loaded for w in cluster.workers.values()} == {frozenset({"a0", "a1", "b"})}
    assert list(cluster.variants) == ["a0", "a1", "b"]
    assert cluster.delay(5) == 0.0


def test_profile_is_that_of_the_worker_s_hardware():
    workers = [Worker("x", "gpu", frozenset("m")), Worker("y", "cpu", frozenset("m"))]
    cluster = Cluster.of([model()], workers)
    assert cluster.profile("m", "x") is FAST
    assert cluster.profile("m", "y") is SLOW


def test_dispatch_delay():
    delay = DispatchDelay(control_s=0.001, per_request_s=0.0005)
    assert [delay(b) for b in (1, 2, 10)] == pytest.approx([0.0015, 0.002, 0.006])


def test_variant_names_are_unique_in_a_cluster():
    with pytest.raises(ValueError, match=r"variant 'v' is named by models 'a' and 'b'"):
        Cluster.of([model("a", "v"), model("b", "v")], [])


@pytest.mark.parametrize("slo", [0.0, -1.0, float("nan")])
def test_model_needs_a_positive_slo(slo):
    with pytest.raises(ValueError, match="model 'm': latency_slo_s must be positive"):
        Model("m", slo, (Variant("v", {}),))


def test_model_needs_a_variant():
    with pytest.raises(ValueError, match="at least one variant"):
        Model("m", 1.0, ())
