"""What the planning programs show, at the size that runs in seconds."""

import numpy as np
import pytest

from benchmarks.shepherd import fig2, table5
from ray_slo.papers import herd


def test_groups_of_poisson_streams_vary_as_theory_says():
    """CV = 1 / √(requests in a window)."""
    counts = np.random.default_rng(0).poisson(2.0, (200, 4096))
    for size in (1, 10):
        for window in (1, 4, 16):
            grouped = counts.reshape(-1, size, 4096).sum(axis=1)
            expected = 1 / np.sqrt(2.0 * size * window)
            measured = np.mean(fig2.variation(grouped, window))
            assert measured == pytest.approx(expected, rel=0.03)


def test_bursts_have_mean_one_and_calm_down_with_the_rate():
    factors = fig2.bursts(np.repeat([0.1, 100.0], 100), 2000, np.random.default_rng(0))
    assert factors[:100].mean() == pytest.approx(1, rel=0.1)
    assert factors[100:].mean() == pytest.approx(1, rel=0.02)
    assert set(np.unique(factors[:100])) == {0.25, 4.0}
    assert factors[100:].std(axis=1).mean() < 0.2 * factors[:100].std(axis=1).mean()


def test_variation_falls_with_window_and_group():
    rows = fig2.run(quick=True, seed=1)
    for population in {r.case.split(" · ")[0] for r in rows}:
        table = np.array([r.ours for r in rows if r.case.startswith(population)])
        table = table.reshape(len(fig2.GROUP_SIZES), len(fig2.WINDOWS_MIN))
        assert (np.diff(table[:3], axis=0) < 0).all()
        assert (table[3] < 1.02 * table[2]).all()  # what they share does not average out
        assert (np.diff(table, axis=1) < 0).all()


@pytest.mark.parametrize("options", [{}, {"sets": 4}, {"limit": 10}])
def test_table5_instances_are_planned_close_to_the_bound(options):
    problem, _ = table5.instance(100, seed=3, **options)
    plan = herd.plan(problem)
    assert isinstance(plan, herd.Plan)
    assert plan.gap < 0.1
    assert plan.unplaced == ()
