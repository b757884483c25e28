"""Rates and sizes of requests: what is planned for, and when it has changed."""

import numpy as np
import pytest

from ray_slo.serve.traffic import LEAST_RATE, Rate, Sizes


def steady(rate, start, stop, into, step=0.5):
    for now in np.arange(start + step, stop + step / 2, step):
        into.counted(float(now), step, round(rate * step))


def test_a_steady_rate_is_measured_and_is_no_news():
    rate = Rate()
    assert not rate.seen
    assert rate.value(0.0) == LEAST_RATE
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
    steady(0, 43, 80, rate)
    assert rate.value(80.0) == LEAST_RATE


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


def counted(sizes, values):
    for chunk in np.array_split(np.asarray(values), max(len(values) // 10, 1)):
        sizes.counted(
            {int(s): int(n) for s, n in zip(*np.unique(chunk, return_counts=True), strict=True)}
        )


def drawn(rng, median, count):
    return np.maximum(median * np.exp(0.8 * rng.standard_normal(count)), 1).astype(int)


def test_the_same_distribution_is_no_change():
    rng = np.random.default_rng(0)
    false = 0
    for _ in range(20):
        sizes = Sizes()
        counted(sizes, drawn(rng, 50, 1000))
        sizes.planned(sizes.values())
        for _ in range(40):
            counted(sizes, drawn(rng, 50, 50))
            false += sizes.differ()
        assert len(sizes) == 2000
    assert false == 0


def test_another_distribution_is_found_and_what_was_before_is_forgotten():
    rng = np.random.default_rng(1)
    sizes = Sizes()
    counted(sizes, drawn(rng, 50, 1000))
    sizes.planned(sizes.values())
    seen = 0
    while not sizes.differ():
        counted(sizes, drawn(rng, 100, 10))
        seen += 10
    assert seen <= 200
    counted(sizes, drawn(rng, 100, 200))
    assert np.median(sizes.values()) == pytest.approx(100, rel=0.15)
    sizes.planned(sizes.values())
    assert sizes.changes == 1
    assert len(sizes) == 200
    assert not sizes.differ()


def test_a_change_that_makes_no_difference_is_none():
    sizes = Sizes(p_value=0.5, share=0.1)
    counted(sizes, [10] * 950 + [20] * 50)
    sizes.planned(sizes.values())
    counted(sizes, [10] * 180 + [20] * 20)
    assert not sizes.differ()  # 5 % more large ones


def test_nothing_differs_before_there_is_a_plan():
    sizes = Sizes()
    counted(sizes, [1] * 200)
    counted(sizes, [9] * 200)
    assert not sizes.differ()
