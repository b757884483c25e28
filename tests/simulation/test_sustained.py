"""The rate that workers sustain under the deployed policy."""

import pytest

from ray_slo.core.profiles import LatencyProfile
from ray_slo.policies.auto import Auto
from ray_slo.simulation.sustained import of_one_worker

SLO_S = 0.1
ONE = {"m": LatencyProfile.linear(0.005, 0.01, 64)}
BOTH = ONE | {"quick": LatencyProfile.linear(0.002, 0.005, 64)}


def goodput(policy, profiles, **kwargs):
    accuracies = {"m": 81.0, "quick": 80.0}
    return of_one_worker(policy, kwargs, accuracies, "m", profiles, SLO_S, 150.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "deferred", "price"])
def test_one_worker_sustains_more_with_a_quick_variant(policy, monkeypatch):
    """`auto` is tried as it begins."""

    def wanted(_self):
        raise AssertionError("a rehearsal for every rate that is tried takes too long")

    monkeypatch.setattr(Auto, "wanted", wanted)
    full = 1e3 * 18 / 100  # in batches that take all of the SLO
    assert 100 < goodput(policy, ONE) < full < goodput(policy, BOTH)


def test_arguments_of_the_policy_count():
    assert goodput("eager", ONE, max_batch_size=1) < 1e3 / 15 < goodput("eager", ONE)
