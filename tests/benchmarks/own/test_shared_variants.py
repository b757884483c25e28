"""What `shared-variants` compares."""

import pytest

from benchmarks.own import shared_variants as program
from benchmarks.own.shared_variants import ALONE, SUBJECT, Point


def test_capacity_is_that_of_the_fluid_limit():
    assert program.capacity() == pytest.approx(16 * 94 / 0.1)  # ℓ(94) is the SLO
    assert program.limit(0.99 * program.capacity()).bad == pytest.approx(0, abs=1e-9)
    assert program.limit(1.25 * program.capacity()).bad == pytest.approx(0.2)


def test_the_limit_is_as_accurate_as_time_allows():
    accuracies = [program.limit(load * program.capacity()).accuracy for load in (0.2, 0.6, 1.0)]
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] > 79 and accuracies[-1] == pytest.approx(70, abs=0.01)


def test_deferral_on_the_fast_variant_serves_half_the_capacity():
    point = program.measure(ALONE, 0.5 * program.capacity(), 1.0, 4000, 1)
    assert point == Point(0.0, 70.0) and point.value == 70


def test_summary_has_the_largest_differences():
    points = {
        SUBJECT: {0.2: Point(0.0, 75.0), 0.9: Point(0.1, 72.0), 1.4: Point(0.5, 70.0)},
        ALONE: {0.2: Point(0.0, 70.0), 0.9: Point(0.0, 70.0), 1.4: Point(0.3, 70.0)},
    }
    bad, value, limit = (row.ours for row in program.summary("summary", points))
    assert bad == pytest.approx(20)
    assert value == pytest.approx(0.2 * 70)
    high = program.limit(0.2 * program.capacity()).value - 75
    assert limit == pytest.approx(
        max(high, program.limit(0.9 * program.capacity()).value - 0.9 * 72)
    )
