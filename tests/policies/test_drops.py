"""Two errors of other systems that no policy here has. They refuse an expired request only when the
running batch ends, and their dispatch gets slower and slower in a long overload."""

import numpy as np
import pytest

from ray_slo.core import DropReason, LatencyProfile, Request
from ray_slo.policies import make_policy
from ray_slo.simulation import simulate
from ray_slo.simulation.workloads import Workload
from tests.policies.harness import Host, one_model

PROFILE = LatencyProfile.linear(0.002, 0.01, 16)  # 16 requests in 42 ms
KWARGS = {"timeout": {"timeout_ms": 5.0}}
DROPPING = ["deferred", "deferred_flex", "eager", "flex", "price", "timeout"]


@pytest.mark.parametrize("name", DROPPING)
def test_a_long_overload_is_served_as_well_at_its_end_as_at_its_start(name):
    report = simulate(
        name,
        one_model(PROFILE, 0.1, 2),
        Workload.poisson(1500.0),  # twice what the two can do
        duration_s=6.0,
        seed=1,
        policy_kwargs=KWARGS.get(name, {}),
    )
    good = report.requests.query("outcome == 'good'")["arrival_s"]
    by_fifth, _ = np.histogram(good, bins=5, range=(0.0, 6.0))
    assert by_fifth.sum() < 0.6 * len(report.requests)
    later = by_fifth[1:]  # the queue fills in the first
    assert later.min() > 0.9 * later.max() > 0


@pytest.mark.parametrize("name", DROPPING)
def test_time_is_up_although_the_running_batch_never_ends(name):
    host = Host(
        lambda: make_policy(name, KWARGS.get(name, {})), one_model(PROFILE, 0.1, 1), strict=False
    )
    host.arrive([Request(1, "m", 0.0, 0.05)])
    host.advance(0.04, ends=False)
    assert [s.ids for s in host.sent] == [[1]]
    host.arrive([Request(2, "m", 0.04, 0.2)])
    host.advance(0.2, ends=False)
    at, reason = host.dropped[2]
    assert at == pytest.approx(0.2 - PROFILE(1), abs=1e-4)  # it could have been served until then
    assert reason is DropReason.WOULD_MISS
