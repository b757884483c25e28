"""The load monitor: windows, low rates, rises and falls."""

from __future__ import annotations

import numpy as np
import pytest

from ray_slo.core.load import LoadMonitor


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
