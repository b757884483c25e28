"""Sub-clusters, at the size that runs in seconds."""

import numpy as np

from benchmarks.symphony import fig16
from ray_slo.papers import partition


def test_the_planner_beats_the_random_solver_by_far():
    rng = np.random.default_rng(5)
    problem = fig16.instance(200, 5, rng)
    plan = partition.plan(problem)
    assert isinstance(plan, partition.Plan)
    load, memory = fig16.random_solver(problem, rng, 0.2)
    ours = fig16.imbalances(plan)
    assert 10 * ours[0] < load
    assert 10 * ours[1] < memory
