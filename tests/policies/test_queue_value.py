import doctest

import numpy as np
import pytest

from ray_slo.core import LatencyProfile, Model, Variant
from ray_slo.policies.shared import fluid, queue_value
from ray_slo.policies.shared.queue_value import arrivals, solve
from tests.planning.examples.queue_value import VARIANTS, columns


def test_the_worked_example():
    assert doctest.testmod(queue_value).failed == 0


@pytest.mark.parametrize("dispersion", [1.0, 3.0])
def test_counts_have_the_mean_and_variance_asked_for(dispersion):
    mean = np.array([0.2, 4.0, 40.0])
    p = arrivals(mean, dispersion)
    k = np.arange(p.shape[1])
    assert p.sum(axis=1) == pytest.approx(1.0)
    assert p @ k == pytest.approx(mean, rel=1e-3)
    assert p @ k**2 - (p @ k) ** 2 == pytest.approx(dispersion * mean, rel=2e-2)


@pytest.mark.parametrize("rate", [100.0, 400.0, 900.0])
def test_the_gain_is_a_little_below_the_fluid_limit(rate):
    slo_s, workers = 0.15, 10
    profiles = [
        Variant(f"v{i}", {"d": LatencyProfile([first + more * b for b in range(8)])}, accuracy)
        for i, (accuracy, first, more) in enumerate(VARIANTS)
    ]
    limit = fluid.solve(
        fluid.Problem([Model("m", slo_s, tuple(profiles))], {"m": rate}, {"d": workers})
    )
    value = solve(columns(workers, slo_s, *VARIANTS), rate, slo_s)
    assert limit.accuracy - 4 < value.gain / rate < limit.accuracy


def test_the_longer_the_queue_the_quicker_the_batch():
    slo_s = 0.15
    offered = columns(10, slo_s, *VARIANTS)
    value = solve(offered, 400.0, slo_s)
    pace = [
        offered.size[best] / offered.latency_s[best]
        for best in (value.columns(offered, queue).argmax() for queue in (1, 8, 40))
    ]
    assert pace == sorted(pace)
    assert pace[0] < pace[-1]


def test_in_overload_what_is_served_is_what_workers_can():
    slo_s = 0.15
    offered = columns(2, slo_s, *VARIANTS)
    most = 2 * (offered.size / offered.latency_s).max()
    value = solve(offered, 1.5 * most, slo_s, violation_cost=1000.0)
    served = most / (1.5 * most)
    assert value.gain / value.rate == pytest.approx(60 * served - 1000 * (1 - served), rel=0.02)
    # Any higher load is the same.
    assert solve(offered, 100 * most, slo_s).rate == pytest.approx(2 * most)


def test_bursts_cost_accuracy():
    slo_s = 0.15
    offered = columns(10, slo_s, *VARIANTS)
    poisson, bursty = (solve(offered, 900.0, slo_s, dispersion=d).gain for d in (1.0, 8.0))
    assert bursty < poisson


@pytest.mark.slow
def test_an_slo_of_minutes_needs_few_lengths_of_the_queue(monkeypatch):
    """`solve` finds the values of all queues at once, `columns` those of one, from the same h."""
    widths = []

    def counted(spectrum, width):
        widths.append(width)
        return irfft(spectrum, width)

    irfft = np.fft.irfft
    monkeypatch.setattr(np.fft, "irfft", counted)
    offered = columns(10, 0.15, *VARIANTS)
    solve(offered, 400.0, 3.6)
    few = max(widths)
    value = solve(offered, 400.0, 720.0)
    assert len(value.h) > 200_000  # requests in twelve minutes
    assert max(widths) <= 8 * few
    for queue in (3, 30, 2130, 232_323):  # lengths at which h is held
        best = value.columns(offered, queue).max()
        assert value.at(np.array(queue)) == pytest.approx(best, rel=1e-6)
