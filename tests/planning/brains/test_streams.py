"""Demand per stream: dispersion in spite of a step in the rate, trends, and bad requests."""

import numpy as np
import pytest

from ray_slo.planning.brains.brain import Counts
from ray_slo.planning.brains.streams import Burstiness, Stream, Streams
from ray_slo.planning.brains.targets import Target


def arrivals(rng, rate, shape, seconds, step=0.5):
    """Counts per half second; gaps are Gamma distributed: 1 is Poisson, less is burstier."""
    gaps = rng.gamma(shape, 1 / (shape * rate), size=int(2 * rate * seconds) + 50)
    times = np.cumsum(gaps)
    return np.histogram(times, bins=np.arange(0, seconds + step / 2, step))[0]


@pytest.mark.parametrize(("shape", "low", "high"), [(1.0, 1.0, 1.0), (0.25, 2.5, 6.0)])
def test_poisson_is_1_and_bursts_are_more(shape, low, high):
    rng = np.random.default_rng(1)
    found = []
    for _ in range(8):
        one = Burstiness()
        for count in arrivals(rng, 100, shape, 120):
            one.counted(0.5, int(count))
        found.append(one.value)
    assert low <= np.mean(found) <= high
    assert np.mean([f > 1.6 for f in found]) in (0.0, 1.0)


def test_a_step_of_the_rate_is_no_burst():
    rng = np.random.default_rng(2)
    one = Burstiness()
    assert one.value == 1.0
    for rate in (10, 200, 20):
        for count in rng.poisson(rate / 2, 40):
            one.counted(0.5, int(count))
    assert one.value < 2.5


def test_a_rise_is_followed_ahead_and_noise_is_not():
    rng = np.random.default_rng(3)
    steady, rising = Stream(1.0), Stream(1.0)
    assert steady.rate(0.0, 30.0) == 1.0
    ahead = []
    for i in range(120):
        now = 0.5 * (i + 1)
        steady.counted(now, 0.5, int(rng.poisson(50)), 0)
        rising.counted(now, 0.5, int(rng.poisson(5 + 0.5 * i)), 0)
        ahead.append(steady.rate(now, 30.0) - steady.rate(now))
    assert max(ahead[20:]) == 0.0
    # It rises by 2 requests/s each second: 30 s from now there are about 60 more.
    assert 30 < rising.rate(60.0, 30.0) - rising.rate(60.0) < 120


def test_streams_that_nobody_knows_count_for_the_default_class():
    streams = Streams({"m": 1.0, "m@gold": 1.0}, "ewma", 0.0, None)
    for i in range(20):
        counts = {"m": 5, "m@gold": 10, "m@silver": 5, "other": 7}
        streams.counted(0.5 * i, 0.5, Counts(counts))
    assert streams["m"].rate(9.5) == pytest.approx(20, rel=0.1)
    assert streams["m@gold"].rate(9.5) == pytest.approx(20, rel=0.1)
    assert list(streams) == ["m", "m@gold"]


def test_a_target_waits_before_it_goes_down_and_up_if_asked():
    slow = Target(2, up_s=5.0, down_s=10.0)
    slow.wants(0.0, 2)
    slow.wants(10.0, 6)
    slow.wants(12.0, 4)
    assert [slow.at(t) for t in (10.0, 14.0, 15.0, 17.0)] == [2, 2, 4, 4]
    slow.wants(18.0, 1)
    slow.wants(19.0, 3)
    assert [slow.at(t) for t in (20.0, 27.9, 29.0)] == [4, 4, 3]
    slow.wants(30.0, 0, at_once=True)
    assert slow.at(30.0) == 0


def test_a_stream_without_a_request_is_idle_once_it_has_waited():
    streams = Streams({"m": 1.0}, "ewma", 0.0, idle_s=10.0)
    streams.counted(5.0, 0.5, Counts({}))
    assert not streams.is_idle("m", 15.0)
    assert streams.is_idle("m", 15.1)
    streams.counted(15.1, 0.5, Counts({"m": 1}))
    assert not streams.is_idle("m", 25.0)
