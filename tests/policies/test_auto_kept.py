"""What `auto` tries, chooses and says is what it was when this was recorded (`tests/kept.py`)."""

import itertools

import pytest

from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.core.trees import Tree
from ray_slo.policies.auto_settings import Shape, candidates, make
from ray_slo.simulation import Gamma, LogNormal, Poisson, Workload, simulate
from tests.kept import condensed, kept
from tests.policies.contract import CHAIN

LINE = LatencyProfile.linear(0.002, 0.01, 16)
SMALL = LatencyProfile.linear(0.0008, 0.004, 16)
LARGE = LatencyProfile.linear(0.004, 0.02, 16)


def test_the_settings_of_every_shape():
    alone, every = [Tree.of_model("m", {"": 0.1})], {}
    for models, variants, kinds, sizes, tree, preempt in itertools.product(
        (1, 3), (1, 2), (1, 2), (False, True), (False, True), (False, True)
    ):
        shape = Shape(models, variants, kinds, sizes)
        found = [one.label for one in candidates(shape, CHAIN if tree else alone, preempt)]
        assert len(set(found)) == len(found)
        every[f"{tuple(shape)}, tree {tree}, preempt {preempt}"] = found
    kept("policies/auto", "settings", condensed(every))


def a_model(name, slo_s, *variants):
    made = tuple(Variant(f"{name}{i}", {"default": p}, a) for i, (p, a) in enumerate(variants))
    return Model(name, slo_s, made)


def cluster_of(case, workers):
    models = {
        "one": [a_model("m", 0.08, (LINE, None))],
        "two": [a_model("m", 0.08, (LINE, 80.0)), a_model("n", 0.2, (LARGE, 80.0))],
        "variants": [a_model("m", 0.08, (LARGE, 90.0), (LINE, 85.0), (SMALL, 70.0))],
    }
    return Cluster.uniform(models[case], workers)


def test_the_quickest_variant_is_the_fastest_that_is_loaded():
    cluster = cluster_of("variants", 2)
    for setting in candidates(Shape.of(cluster, False), [], False):
        if not setting.quickest:
            continue
        policy = make(setting, cluster, [], False, {})
        report = simulate(policy, cluster, Workload(arrivals=Poisson(rate=100)), duration_s=1)
        batches = report.batches if hasattr(report, "batches") else report.requests
        assert set(batches["variant"].dropna()) == {"m2"}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one", "two", "variants"])
def test_a_run_with_rehearsals(case, load=250):
    popularity = {"m": 3, "n": 1} if case == "two" else None
    workload = Workload(arrivals=Gamma(rate=load, shape=0.4), popularity=popularity)
    report = simulate("auto", cluster_of(case, 3), workload, duration_s=8, seed=11)
    kept("policies/auto", f"run {case}, {load}/s", report.summary())


def test_a_run_with_sizes():
    workload = Workload(
        arrivals=Poisson(rate=60), sizes=LogNormal(median=3, sigma=0.8, max_size=16)
    )
    report = simulate("auto", cluster_of("one", 3), workload, duration_s=8, seed=12)
    kept("policies/auto", "run with sizes", report.summary())
