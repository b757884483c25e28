"""Sizes of requests: the planned distribution, and the test whether it has changed."""

import numpy as np
import pytest

from ray_slo.planning.brains.sizes import Sizes


def counted(sizes, values):
    for chunk in np.array_split(np.asarray(values), max(len(values) // 10, 1)):
        sizes.counted(
            {int(s): int(n) for s, n in zip(*np.unique(chunk, return_counts=True), strict=True)}
        )


def drawn(rng, median, count):
    return np.maximum(median * np.exp(0.8 * rng.standard_normal(count)), 1).astype(int)


@pytest.mark.slow
def test_the_same_distribution_is_no_change():
    rng = np.random.default_rng(0)
    false = 0
    for _ in range(8):
        sizes = Sizes()
        counted(sizes, drawn(rng, 50, 1000))
        sizes.planned()
        for _ in range(40):
            counted(sizes, drawn(rng, 50, 50))
            false += sizes.differ()
        assert len(sizes) == 2000
    assert false == 0


def test_another_distribution_is_found_and_what_was_before_is_forgotten():
    rng = np.random.default_rng(1)
    sizes = Sizes()
    counted(sizes, drawn(rng, 50, 1000))
    sizes.planned()
    seen = 0
    while not sizes.differ():
        counted(sizes, drawn(rng, 100, 10))
        seen += 10
    assert seen <= 200
    counted(sizes, drawn(rng, 100, 200))
    assert np.median(sizes.values()) == pytest.approx(100, rel=0.15)
    sizes.planned()
    assert sizes.changes == 1
    assert len(sizes) == 200
    assert not sizes.differ()


def test_a_report_of_many_requests_is_not_taken_for_a_change():
    sizes = Sizes()
    for _ in range(10):
        sizes.counted({5: 400, 100: 100})  # more than are tested
        sizes.planned()
        assert not sizes.differ()
    sizes.counted({5: 100, 100: 400})
    assert sizes.differ()


def test_a_change_that_makes_no_difference_is_none():
    sizes = Sizes(p_value=0.5, share=0.1)
    counted(sizes, [10] * 950 + [20] * 50)
    sizes.planned()
    counted(sizes, [10] * 180 + [20] * 20)
    assert not sizes.differ()  # 5 % more large ones


def test_nothing_differs_before_there_is_a_plan():
    sizes = Sizes()
    counted(sizes, [1] * 200)
    counted(sizes, [9] * 200)
    assert not sizes.differ()
