import pytest

from ray_slo.core.quantile import Quantile


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
