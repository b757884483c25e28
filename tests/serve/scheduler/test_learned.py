"""What is believed of a profile, when a policy hears of it, and which workers are left alone."""

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.recent import Recent
from ray_slo.serve.scheduler.learned import Belief
from ray_slo.serve.scheduler.roster import Quarantine


def test_a_policy_hears_of_what_matters():
    belief = Belief(LatencyProfile.linear(0.001, 0.01, 8))
    assert belief.is_news()
    assert belief.tell().latency(1) == pytest.approx(0.011)
    belief.observe([(1, 0.0111)], now=1.0)
    assert not belief.is_news()  # within 2 %
    belief.observe([(1, 0.03), (1, 0.03), (99, 5.0)], now=2.0)  # the last one cannot be
    assert (belief.is_news(), belief.samples, belief.measured_at) == (True, 3, 2.0)


def test_a_doubted_profile_is_lower_and_learned_anew():
    belief = Belief(LatencyProfile.linear(0.001, 0.01, 8))
    belief.observe([(1, 1.1)], now=1.0)
    belief.doubt(0.01)
    assert (belief.samples, belief.profile.latency(1)) == (0, pytest.approx(0.011))
    belief.observe([(1, 0.02)], now=2.0)
    assert belief.profile.latency(1) == pytest.approx(0.02)
    belief.forget()
    assert belief.profile.latency(1) == pytest.approx(0.011)


def test_a_worker_is_left_alone_for_longer_each_time_until_it_is_reached():
    quarantine, now, lasted = Quarantine(), 0.0, []
    for _ in range(5):
        quarantine.add("w", now)
        since = now
        while quarantine.holds("w", now):
            now += 0.25
        lasted.append(now - since)
    assert lasted == [0.5, 1, 2, 4, 5]
    quarantine.reached("w")
    quarantine.add("w", now)
    assert not quarantine.holds("w", now + 0.5)
    quarantine.forget(now + 10)
    quarantine.add("w", now)
    assert not quarantine.holds("w", now + 0.5)


def test_only_the_newest_entries_are_kept():
    recent = Recent(2)
    recent["a"], recent["b"] = 1, 2
    recent["a"] = 3
    recent["c"] = 4
    assert recent == {"a": 3, "c": 4}
