"""Code that the programs about preemption share."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch

from benchmarks.live.sleeper import Sleeper
from benchmarks.shepherd.networks import resnet
from benchmarks.shepherd.two_streams import serve, streams
from ray_slo.core import LatencyProfile
from ray_slo.policies import make_policy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("depth", "millions"), [(18, 11.690), (50, 25.557), (152, 60.193)])
def test_resnets_have_as_many_parameters_as_published(depth, millions):
    with torch.device("meta"):
        module = resnet(depth)
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(millions, abs=1e-3)


def test_unknown_depth():
    with pytest.raises(ValueError, match=r"depth must be one of 18, 34, .* got 20"):
        resnet(20)


def test_two_streams_answer_every_request_once():
    """Bursts for a quick model meet long batches of another, on one worker thread; slow enough for
    a machine that stalls."""
    profiles = {
        "quick": LatencyProfile.linear(0.0001, 0.002, 64),
        "slow": LatencyProfile.linear(0.002, 0.1, 4),
    }
    runs = {"quick": Sleeper(0.0001, 0.002, 50).run, "slow": Sleeper(0.002, 0.1, 50).run}
    arrivals = streams("quick", "slow", 3, 1.5)
    policy = make_policy("flex", {"preemption": True})
    result = asyncio.run(serve(policy, profiles, runs, arrivals, 1.0))
    assert Counter(i for i, _ in result.outcomes) == Counter(
        range(sum(len(times) for times in arrivals.values()))
    )
    assert {outcome for _, outcome in result.outcomes} <= {"good", "late", "dropped"}
    assert sum(result.good.values()) == sum(o == "good" for _, o in result.outcomes) > 0
    assert len(result.delays_s) + result.too_late > 0
