import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.core import demand
from ray_slo.core.demand import Factors, Holt, Rate, changed
from ray_slo.core.load import LoadMonitor


def source(kind="ewma", window_s=1.0, *, hold_windows=10.0, horizon_s=0.0):
    """What `Rate` uses for a window."""
    if kind == "holt":
        return Holt(window_s, horizon_s=horizon_s)
    return LoadMonitor(kind, window_s, min_arrivals=1, hold_windows=hold_windows)


def drive(estimator, rates, bin_s=1.0, per_bin=50):
    """Arrivals evenly in bins at these rates; the estimate after each bin."""
    seen = []
    for i, rate in enumerate(rates):
        for j in range(per_bin):
            estimator.arrived(bin_s * (i + j / per_bin), rate * bin_s / per_bin)
        seen.append(estimator.rate(bin_s * (i + 1)))
    return seen


def test_doctest():
    assert doctest.testmod(demand).failed == 0


@pytest.mark.parametrize("kind", ["ewma", "peak", "holt"])
def test_a_constant_rate_is_found(kind):
    assert drive(source(kind, 1.0), [200] * 20)[-1] == pytest.approx(200, rel=0.03)
    assert source(kind).rate(5.0) == 0


def test_bins_of_any_length_count_requests_per_second():
    assert drive(source("holt", 0.5), [200] * 20, bin_s=0.5)[-1] == pytest.approx(200, rel=0.03)


def test_ewma_halves_as_its_time_constant_says():
    estimator = source("ewma", 2.0)
    before = drive(estimator, [100] * 40)[-1]
    assert estimator.rate(40 + 2 * math.log(2)) == pytest.approx(before / 2, rel=0.01)


def test_peak_holds():
    rates = drive(source("peak", 1.0, hold_windows=5), [100] * 5 + [300] + [100] * 10)
    assert rates[5] == pytest.approx(300, rel=0.05)
    assert rates[9] == pytest.approx(300, rel=0.05)
    assert rates[-1] == pytest.approx(100, rel=0.05)


def test_holt_foretells_a_ramp():
    ramp = [100 + 10 * i for i in range(60)]
    ahead = drive(source("holt", 1.0, horizon_s=10.0), ramp)[-1]
    behind = drive(source("ewma", 1.0), ramp)[-1]
    assert ahead == pytest.approx(ramp[-1] + 100, rel=0.02)
    assert behind < ramp[-1] + 10


def test_holt_is_the_textbook_recursion():
    rates = np.random.default_rng(1).uniform(50, 150, 30).round().tolist()
    level, trend = rates[0], 0.0
    for rate in rates[1:]:
        before = level
        level = 0.4 * rate + 0.6 * (level + trend)
        trend = 0.2 * (level - before) + 0.8 * trend
    holt = Holt(1.0, alpha=0.4, beta=0.2)
    for i, rate in enumerate(rates):
        holt.arrived(float(i), int(rate))
    assert holt.rate(30.0, 5.0) == pytest.approx(level + 5 * trend)


def test_holt_never_foretells_less_than_nothing():
    falling = drive(source("holt", 1.0, horizon_s=1000.0), [200 - 5 * i for i in range(30)])
    assert falling[-1] == 0


def test_changes_are_more_than_chance():
    """At a steady Poisson rate a new plan is almost never called for; at a new rate it is."""
    rng = np.random.default_rng(0)
    for rate in (2.0, 50.0, 2000.0):
        steady = [changed(rate, int(n), 1.0) for n in rng.poisson(rate, 2000)]
        # Three standard deviations: 0.3 % if normal, a little more for a few arrivals.
        assert np.mean(steady) < 0.01
        moved = [changed(rate, int(n), 20.0) for n in rng.poisson(40 * rate, 200)]
        assert np.mean(moved) > 0.95
    assert changed(0.0, 1, 1.0)
    assert not changed(0.0, 0, 1.0)


def steady(rate, start, stop, into, step=0.5):
    for now in np.arange(start + step, stop + step / 2, step):
        into.counted(float(now), step, round(rate * step))


def test_a_steady_rate_is_measured_and_is_no_news():
    rate = Rate()
    assert rate.value(0.0) == 0.1
    steady(20, 0, 30, rate)
    assert rate.value(30.0) == pytest.approx(20, rel=0.1)
    assert not rate.differs(30.0, 20.0)


def test_a_rise_shows_at_once_and_a_fall_in_a_while():
    rate = Rate()
    steady(20, 0, 30, rate)
    steady(100, 30, 31, rate)
    assert rate.differs(31.0, 20.0)
    assert rate.value(31.0) == 100  # in one second; the average is at 43
    steady(100, 31, 40, rate)
    steady(0, 40, 43, rate)
    assert rate.differs(43.0, 100.0)
    assert 10 < rate.value(43.0) < 60
    steady(0, 43, 60, rate)
    assert rate.value(60.0) < 10
    steady(0, 60, 120, rate)
    assert rate.value(120.0) == 0.1


def test_several_who_count_add_up():
    rate = Rate()
    for i in range(1, 80):  # two, by turns, twice a second each, at 1000 a second in all
        rate.counted(0.25 * i, 0.25, 250)
    assert rate.value(20.0) == pytest.approx(1000, rel=0.06)
    assert not rate.differs(20.0, 1000.0)
    assert rate.differs(20.0, 880.0)


def test_what_is_counted_at_first_is_no_rate_yet():
    rate = Rate()
    rate.counted(1.0, 0.5, 10)
    assert rate.value(1.0) == pytest.approx(20, rel=0.15)
    assert not rate.differs(1.0, 1000.0)  # too early to say


def test_few_requests_are_averaged_for_longer():
    """At 2 a second, what is planned for is off by chance a third as often as over 3 s; and so few
    as 5 times as many are noticed in a few seconds all the same."""
    rng = np.random.default_rng(0)
    rate, short = Rate(), source("ewma", 3.0)
    off = np.zeros(2)
    for second in range(1, 1201):
        number = int(rng.poisson(2.0))
        rate.counted(float(second), 1.0, number)
        short.arrived(second - 0.5, number)
        if second > 30:
            found = rate.value(float(second)), short.rate(float(second))
            off += [abs(f - 2.0) > 0.5 for f in found]
    assert off[0] < off[1] / 3
    for second in range(1201, 1206):
        rate.counted(float(second), 1.0, 10)
    assert rate.differs(1205.0, 2.0)
    assert rate.value(1205.0) >= 8


def test_factors_follow_what_is_seen():
    factors = Factors({"d": {"car": 10.0, "face": 1.0}, "e": {}}, memory_requests=200)
    assert factors.of("d") == {"car": 10.0, "face": 1.0}
    for _ in range(50):
        factors.observe("d", 20, {"car": 80, "face": 20})
    assert factors.of("d") == pytest.approx({"car": 4.0, "face": 1.0}, rel=0.05)


def test_siblings_tell_of_a_variant_that_was_not_seen():
    prior = {"a": {"x": 2.0}, "b": {"x": 4.0}, "c": {"x": 0.0}, "other": {"y": 1.0}}
    factors = Factors(prior, prior_requests=10)
    assert [factors.of(v) for v in prior] == list(prior.values())
    factors.observe("a", 990, {"x": 990})  # half of what was expected
    assert factors.of("b")["x"] == pytest.approx(2.0, rel=0.05)
    assert factors.of("a")["x"] == pytest.approx(1.0, rel=0.02)  # nobody else was seen
    assert factors.of("c") == {"x": 0.0}
    assert factors.of("other") == {"y": 1.0}
    factors.observe("b", 10_000, {"x": 70_000})
    assert factors.of("b") == {"x": pytest.approx(7.0, rel=0.01)}  # its own count for more


def test_a_variant_that_makes_nothing():
    factors = Factors({"d": {"car": 0.0}})
    factors.observe("d", 10, {})
    assert factors.of("d") == {"car": 0.0}


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 3000)), max_size=20),
    st.floats(0, 20),
)
def test_factors_stay_between_what_was_said_and_seen(counts, prior):
    factors = Factors({"d": {"x": prior}}, memory_requests=100)
    for requests, made in counts:
        factors.observe("d", requests, {"x": made if requests else 0})
    ratios = [prior, *(made / requests for requests, made in counts if requests)]
    assert min(ratios) * (1 - 1e-9) <= factors.of("d")["x"] <= max(ratios) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: source("holt", horizon_s=-1), "horizon_s must be at least 0, got -1"),
        (lambda: source("holt", 0.0), "bin_s must be positive, got 0"),
        (lambda: source("ewma", 0.0), "window_s must be positive, got 0"),
        (lambda: Holt(alpha=0.0), r"alpha must be above 0 and at most 1, got 0"),
        (lambda: Holt(beta=1.5), r"beta must be above 0 and at most 1, got 1.5"),
        (lambda: Factors({"d": {"x": -1.0}}), "prior of 'd' must be at least 0"),
        (lambda: Factors({}, prior_requests=0), "prior_requests must be positive, got 0"),
        (lambda: Factors({}, memory_requests=0), "memory_requests must be positive, got 0"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("kind", "share"), [("ewma", 0.1), ("holt", 0.5), ("peak", 0.0)])
def test_one_silent_second_is_not_the_demand(kind, share):
    window_s = 1.0 if kind == "holt" else 10.0
    rates = drive(source(kind, window_s), [100] * 60 + [0])
    assert rates[-1] >= (1 - share) * rates[-2] - 1
    assert not changed(rates[-2], 0, 0.05)  # nor is a short silence a reason to plan
