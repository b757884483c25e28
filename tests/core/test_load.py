"""The load monitor (windows, low rates, rises and falls), and the index of dispersion."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ray_slo.core.load import Dispersion, LoadMonitor


def every(monitor: LoadMonitor, gap_s: float, start_s: float, end_s: float) -> float:
    """Arrivals at start, start + gap, …; the rate at the end."""
    for t in np.arange(start_s, end_s, gap_s):
        monitor.arrived(float(t))
    return monitor.rate(end_s)


@pytest.mark.parametrize("kind", ["mean", "ewma", "peak"])
def test_a_steady_load_is_found_within_a_window(kind):
    monitor = LoadMonitor(kind)
    assert monitor.rate(3.0) == 0.0
    assert every(monitor, 0.005, 3.0, 3.1) == pytest.approx(200, rel=0.06)
    assert every(monitor, 0.005, 3.1, 6.0) == pytest.approx(200, rel=0.02)


@pytest.mark.parametrize(("kind", "later"), [("mean", 50), ("ewma", 50), ("peak", 400)])
def test_a_fall_is_followed_or_held(kind, later):
    monitor = LoadMonitor(kind, 0.5, min_arrivals=8)
    assert every(monitor, 0.0025, 0.0, 2.0) == pytest.approx(400, rel=0.02)
    assert every(monitor, 0.02, 2.0, 4.0) == pytest.approx(later, rel=0.2)
    assert every(monitor, 0.02, 4.0, 14.0) == pytest.approx(50, rel=0.05)


def test_a_low_rate_is_measured_over_enough_arrivals():
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / 20, 2000))
    spread = {}
    for least in (1, 64):
        monitor, seen = LoadMonitor(min_arrivals=least), []
        for t in times:
            monitor.arrived(float(t))
            seen.append(monitor.rate(float(t)))
        assert np.mean(seen[100:]) == pytest.approx(20, rel=0.12)
        spread[least] = np.std(seen[100:])
    assert spread[64] < 0.5 * spread[1]


def test_a_rise_from_a_low_rate_shows_at_once():
    monitor = LoadMonitor()
    assert every(monitor, 0.05, 0.0, 10.0) == pytest.approx(20, rel=0.05)
    assert every(monitor, 0.002, 10.0, 10.5) == pytest.approx(500, rel=0.05)


def test_silence_lowers_the_rate():
    monitor = LoadMonitor()
    every(monitor, 0.005, 0.0, 2.0)
    assert monitor.rate(4.0) < 40
    assert monitor.rate(60.0) < 2


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"kind": "median"}, "kind must be one of mean, ewma, peak, got 'median'"),
        ({"window_s": 0.0}, "window_s"),
        ({"min_arrivals": 0}, "min_arrivals"),
        ({"hold_windows": 0.5}, "hold_windows"),
    ],
)
def test_mistakes_are_named(kwargs, named):
    with pytest.raises(ValueError, match=named):
        LoadMonitor(**kwargs)


def gaps(shape: float, rate: float, seed: int = 0, count: int = 8000) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).gamma(shape, 1 / shape / rate, count))


@pytest.mark.parametrize("rate", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("shape", [1.0, 0.25])
def test_the_index_of_dispersion_is_that_of_the_gaps_at_any_rate(shape, rate):
    found = []
    for seed in range(4):
        dispersion = Dispersion(0.1)
        for at in gaps(shape, rate, seed):
            dispersion.arrived(float(at))
        found.append(dispersion.value)
    assert np.mean(found) == pytest.approx(1 / shape, rel=0.2)
    assert dispersion.error < 0.15


def test_a_load_that_rises_is_no_burst():
    rng, now, dispersion, counts = np.random.default_rng(0), 0.0, Dispersion(0.1), []
    while now < 100:
        now += rng.exponential(1 / (20 + 3 * now))
        dispersion.arrived(now)
        counts.append(int(now / 0.1))
    assert dispersion.value < 1.3
    seen = np.bincount(counts)
    assert seen.var() / seen.mean() > 3  # what the variance would say


def test_counts_by_the_caller():
    dispersion = Dispersion()
    for count in (4, 0, 4, 0, 4):
        dispersion.counted(count)
    assert dispersion.value == 4
    steady = Dispersion()
    for _ in range(20):
        steady.counted(5)
    assert steady.value == 0


def test_windows_last_a_second_unless_they_have_few_arrivals():
    dispersion = Dispersion()
    for i in range(500):
        dispersion.arrived(i / 100)
    assert dispersion.windows == 3  # of five, the last is not over, and a difference takes two


def test_nothing_is_known_at_first():
    dispersion = Dispersion()
    assert (dispersion.value, dispersion.error) == (1.0, math.inf)
    dispersion.counted(100)
    dispersion.counted(0)
    assert dispersion.value == 1.0


def test_windows_are_short_again_when_the_load_comes_back():
    dispersion = Dispersion(0.1)
    for at in gaps(1.0, 0.01, count=200):
        dispersion.arrived(float(at))
    began = float(at)
    for at in gaps(0.25, 300.0):
        dispersion.arrived(began + float(at))
    assert dispersion.value == pytest.approx(4, rel=0.35)


def test_what_is_older_than_the_window_counts_no_more():
    monitor = LoadMonitor("mean", 0.5, min_arrivals=8)
    every(monitor, 0.001, 0.0, 1.0)
    assert monitor.rate(1.4) == pytest.approx(200, rel=0.02)  # 100 in the last 0.5 s
