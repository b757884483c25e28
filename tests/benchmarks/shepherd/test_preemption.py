"""Programs about preemption: what needs a GPU is run on a pretended one, with tiny networks."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.live.sleeper import Sleeper
from benchmarks.shepherd import gpu_preemption
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


@pytest.mark.parametrize("preemption", [True, False])
def test_two_streams_answer_every_request_once(preemption):
    """Bursts for a quick model meet long batches of another, on one worker thread; slow enough for
    a machine that stalls."""
    profiles = {
        "quick": LatencyProfile.linear(0.0001, 0.002, 64),
        "slow": LatencyProfile.linear(0.002, 0.1, 4),
    }
    runs = {"quick": Sleeper(0.0001, 0.002, 50).run, "slow": Sleeper(0.002, 0.1, 50).run}
    arrivals = streams("quick", "slow", 3, 2.5)
    policy = make_policy("flex", {"preemption": preemption})
    result = asyncio.run(serve(policy, profiles, runs, arrivals, 1.0))
    assert Counter(i for i, _ in result.outcomes) == Counter(
        range(sum(len(times) for times in arrivals.values()))
    )
    assert {outcome for _, outcome in result.outcomes} <= {"good", "late", "dropped"}
    assert sum(result.good.values()) == sum(o == "good" for _, o in result.outcomes) > 0
    assert (len(result.delays_s) + result.too_late > 0) is preemption


def test_says_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (row,) = gpu_preemption.run(quick=True, seed=0)
    assert row.case.startswith("skipped: torch ")
    assert row.ours == 0


def test_the_gpu_program_runs_on_a_pretended_gpu(monkeypatch):
    randn = torch.randn
    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda: "Pretended",
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "randn", lambda *shape, device=None: randn(3, 8, 8))
    monkeypatch.setattr(nn.Module, "cuda", lambda self: self)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)  # as where it is missing
    tiny = {}

    def network(depth):
        layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(depth // 9)]
        tiny[depth] = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return tiny[depth]

    monkeypatch.setattr(gpu_preemption, "resnet", network)
    monkeypatch.setattr(gpu_preemption, "MAX_BATCH", 8)
    for name in ("profile_preemption", "profile_callable"):
        short = partial(_with_budget, getattr(gpu_preemption, name))
        monkeypatch.setattr(gpu_preemption, name, short)
    rows = gpu_preemption.run(quick=True, seed=0)
    cases = {row.case for row in rows}
    assert {"Pretended · ResNet18", "Pretended · ResNet50"} <= cases
    assert "Pretended, SLO 90 ms, many bursts · flex, no preemption" in cases
    assert set(tiny) == {18, 50, 269}
    assert all(row.ours is not None for row in rows)


def _with_budget(measure, *args, budget_s, **kwargs):
    return measure(*args, budget_s=0.05, **kwargs)
