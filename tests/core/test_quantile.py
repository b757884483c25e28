import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.core.quantile import Quantile, QuantileLine, quantile


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70), st.floats(0, 1) | st.just(0.95))
def test_a_quantile_is_numpys(samples, q):
    assert quantile(samples, q) == np.quantile(samples, q)


def test_quantile_of_a_window():
    q = Quantile(0.5, window=3)
    assert q.value(default=7.0) == 7.0
    for sample in (100.0, 1.0, 2.0, 3.0):
        q.add(sample)
    assert q.value(default=7.0) == 2.0
    q.forget()
    assert q.value(default=7.0) == 7.0


def test_a_single_sample_outweighs_no_prior():
    q = Quantile(0.9, prior=20)
    q.add(5.0)  # a cold start
    assert q.value(default=0.01) == pytest.approx(0.01)
    q.add(5.0)
    q.add(5.0)
    assert q.value(default=0.01) == pytest.approx(5.0)  # it is always like that


def line_of(sizes, values, q=0.95, **kwargs) -> tuple[float, float]:
    line = QuantileLine(q, **kwargs)
    for size, value in zip(sizes, values, strict=True):
        line.add(float(size), float(value))
    return line.line(default=0.01)


def test_a_delay_that_grows_with_the_batch():
    sizes = [1, 11] * 50
    values = [0.001 + 0.001 * b + (0.3 if i in (20, 51) else 0) for i, b in enumerate(sizes)]
    assert line_of(sizes, values) == (pytest.approx(0.001), pytest.approx(0.001))


def test_most_samples_are_not_above_the_line_and_outliers_do_not_turn_it():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 33, 256)
    values = 0.002 + 0.0005 * sizes + rng.exponential(0.003, 256)
    values[sizes > 28] += (rng.random((sizes > 28).sum()) < 0.3) * 5.0
    at_0, slope = line_of(sizes, values)
    assert slope == pytest.approx(0.0005, rel=0.4)
    share = np.mean(values <= at_0 + slope * sizes)
    assert share == pytest.approx(0.95, abs=0.01)


def test_noise_is_no_slope():
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 17, 200)
        found.append(line_of(sizes, rng.exponential(0.01, 200))[1])
    assert sum(slope > 0 for slope in found) <= 1
    assert line_of([4] * 100, np.linspace(0, 1, 100)) == (pytest.approx(0.95), 0.0)  # one size
    assert line_of([1, 2, 3] * 40, [0.03, 0.02, 0.01] * 40)[1] == 0  # never negative


def test_a_line_of_few_samples_is_the_default():
    line = QuantileLine(0.95, prior=20)
    assert line.line(default=0.01) == (0.01, 0.0)
    line.add(1, 5.0)  # a cold start
    assert line.line(default=0.01) == (pytest.approx(0.01 + 0.05 * (5 - 0.01)), 0.0)
    line.forget()
    assert line.line(default=0.02) == (0.02, 0.0)
