"""Headroom for bursts: the formula at its limits, and compared with the simulator."""

import math

import pytest

from ray_slo.core import Cluster, Model, Variant
from ray_slo.core.profiles import LatencyProfile
from ray_slo.planning.auto.headroom import Pool, bad_rate, occupancy
from ray_slo.planning.auto.limits import Room
from ray_slo.simulation import Poisson, Workload, simulate


def test_limits():
    assert bad_rate(0.0, 1, 1.0, 1.0) == 0.0
    assert bad_rate(4.0, 1, 1.0, 0.1) == pytest.approx(0.75, abs=1e-6)  # 1 − n/B
    assert bad_rate(1.0, 1, 1.0, 0.1) == pytest.approx(0.05)  # σ²/(2·B·K)
    assert bad_rate(0.999999, 1, 1.0, 0.1) == pytest.approx(0.05, rel=1e-3)
    assert bad_rate(0.9, 1, 1.0, 0.0) == 0.0
    assert bad_rate(1.0, 0, 1.0, 1.0) == 1.0


def test_more_of_anything_good_is_better():
    base = bad_rate(1.8, 2, 1.0, 0.3)
    assert bad_rate(1.7, 2, 1.0, 0.3) < base
    assert bad_rate(1.8, 3, 1.0, 0.3) < base
    assert bad_rate(1.8, 2, 1.2, 0.3) < base
    assert bad_rate(1.8, 2, 1.0, 0.4) > base


@pytest.mark.parametrize("target", [0.001, 0.01, 0.03])
def test_the_occupancy_attains_the_target(target):
    share = occupancy(3, 2.0, 0.3, target)
    assert bad_rate(3 * share, 3, 2.0, 0.9 * share) == pytest.approx(target, rel=1e-3)


def test_room_is_enough_where_it_is_needed_and_for_more_workers():
    pool = Pool(busy=1.9, wait_s=1.0, half_s=0.4, variance=0.1)
    room = pool.allowed(2, 50, 0.01)
    needed = next(n for n in range(2, 50) if not pool.too_full(n, 0.01))
    assert pool.busy <= room.busy(needed)
    assert room.busy(needed + 1) > room.busy(needed) + 0.9
    for n in range(needed, 50):
        assert room.busy(n) <= pool.most_busy(n, 0.01) * (1 + 1e-6)
    assert room.workers(pool.busy) == needed


def test_room_in_part():
    room = Room(0.9, 0.2)
    assert room.part(0.0) == Room()
    assert room.part(1.0).busy(5) == pytest.approx(room.busy(5))
    assert room.busy(5) < room.part(0.5).busy(5) < 5
    assert Room().workers(2.0) == 2


@pytest.mark.parametrize(("workers", "batch", "load"), [(1, 8, 0.9), (2, 4, 0.9), (4, 4, 0.95)])
def test_the_simulator_agrees(workers, batch, load):
    """Within a factor of 1.5, where bursts cost between 1 and 10 %."""
    profile = LatencyProfile.linear(0.001, 0.004, batch)
    latency_s = profile.latency(batch)
    model = Model("m", 2 * latency_s, (Variant("v", {"default": profile}, 90.0),))
    rate = load * workers * batch / latency_s
    cluster, poisson = Cluster.uniform([model], workers), Workload(arrivals=Poisson(rate=rate))
    report = simulate("deferred", cluster, poisson, duration_s=15_000 / rate, seed=1)
    half_s = (latency_s - latency_s / batch) / 2
    pool = Pool(load * workers, latency_s, half_s, latency_s / batch)
    said, measured = pool.bad_rate(workers), report.bad_rate()
    assert 0.01 < measured < 0.1
    assert abs(math.log(said / measured)) < math.log(1.5)
