"""Faults under load, with the code of `python -m benchmarks live-chaos`, over HTTP: no request is
lost or answered twice. No assertion depends on time."""

import numpy as np
import pytest
from ray import serve

from benchmarks.live.chaos import FAULTS
from benchmarks.live.ground import Ground, args, strike


@pytest.fixture(scope="module")
def ground(ray_cluster, tmp_path_factory):
    """The application of `live-chaos`, on the Ray cluster that all live tests share."""
    folder = tmp_path_factory.mktemp("chaos")
    (folder / "runs").mkdir()
    made = Ground(ray_cluster, folder, np.random.default_rng(0), quick=True)
    made.deploy(args(made, num_replicas=2))
    made.deployed = args.__name__
    try:
        yield made
    finally:
        serve.delete("chaos")


@pytest.mark.parametrize("name", ["pause", "frontend"])
def test_nothing_is_lost_and_nothing_answered_twice(ground, name):
    seen, asked = strike(ground, FAULTS[name])
    assert seen.fault == FAULTS[name].says
    assert seen.sent == len(asked) > 50
    assert seen.answered > 0
    assert (seen.lost, seen.unheard if seen.lost else []) == (0, [])
    assert seen.duplicated == 0
    assert seen.sent == seen.answered + sum(seen.reasons.values())
