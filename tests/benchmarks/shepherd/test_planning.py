"""What the planning programs show, at the size that runs in seconds."""

import pytest

from benchmarks.shepherd import table5
from ray_slo.papers import herd


@pytest.mark.parametrize("options", [{}, {"sets": 4}, {"limit": 10}])
def test_table5_instances_are_planned_close_to_the_bound(options):
    problem, _ = table5.instance(100, seed=3, **options)
    plan = herd.plan(problem)
    assert isinstance(plan, herd.Plan)
    assert plan.gap < 0.1
    assert plan.unplaced == ()
