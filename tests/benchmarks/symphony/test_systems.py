"""Parts of the Symphony programs. The programs themselves run in `test_front_door`."""

from __future__ import annotations

import pytest

from benchmarks.symphony.fig6 import SloTimeout
from benchmarks.symphony.fig7 import MIXED, grid
from benchmarks.symphony.fig9 import upper_bound
from benchmarks.symphony.fig10 import _fewest
from benchmarks.symphony.systems import SYSTEMS, goodput
from benchmarks.zoos import ZooModel
from ray_slo.core import Cluster, LatencyProfile, Model, Request, Variant
from ray_slo.simulation import Workload
from tests.policies.harness import Host

RESNET = ZooModel("ResNet50", 1.053, 5.072, 25)


def test_a_timeout_can_be_a_share_of_each_models_slo():
    profile = LatencyProfile.linear(1.0, 5.0, 12)
    models = [
        Model(name, slo, (Variant(name, {"default": profile}),))
        for name, slo in (("tight", 20.0), ("loose", 100.0))
    ]
    host = Host(lambda: SloTimeout(0.1), Cluster.uniform(models, 2))
    host.run([Request(0, "tight", 0.0, 20.0), Request(1, "loose", 0.0, 100.0)])
    assert [(s.at, s.ids) for s in host.sent] == [(2.0, [0]), (10.0, [1])]


def test_nobody_exceeds_the_upper_bound():
    bound = upper_bound([RESNET], 4)
    assert bound == pytest.approx(4 * 18 / (18 * 1.053e-3 + 5.072e-3))
    for system in SYSTEMS.values():
        found = goodput(
            system,
            Cluster.uniform([RESNET.model()], 4),
            Workload.poisson(bound),
            start_rate=bound / 2,
            duration_s=1.0,
            warmup_s=0.2,
            tolerance=0.1,
            seed=0,
        )
        assert 0.2 * bound < found.rate < bound


def test_the_fewest_gpus_suffice_and_one_less_does_not():
    from benchmarks.symphony.fig10 import RATE
    from benchmarks.symphony.systems import run_at

    light = ZooModel("light", 0.3, 2.0, 20)
    fewest = _fewest(SYSTEMS["deferred"], [light], 1, True, 0)
    worst = [
        run_at(
            SYSTEMS["deferred"],
            Cluster.uniform([light.model()], gpus),
            Workload.poisson(RATE),
            warmup_s=0.5,
            duration_s=1.5,
            seed=0,
        ).worst_bad_rate
        for gpus in (int(fewest) - 1, int(fewest))
    ]
    assert worst[0] > 0.01 >= worst[1]


def test_the_grid_has_every_dimension_and_only_feasible_slos():
    cases = grid()
    assert len(cases) == len(set(cases))
    assert sum(c.model == MIXED for c in cases) == 42
    for case in cases[::97]:
        for model in case.models:
            profile = model.model().variants[0].profiles["default"]
            assert 2 * profile(1) <= model.model().latency_slo_s + 1e-9 or case.model == MIXED
