"""SHEPHERD §7.2: who wins on the two streams, and by about how much."""

from functools import cache

import pytest

from benchmarks.shepherd.fig11 import POLICIES, run_streams
from ray_slo.policies import make_policy


@cache
def report(label, slo_ms, **kwargs):
    return run_streams(make_policy(*POLICIES[label]), slo_ms, **kwargs)


def test_at_250_ms_large_batches_first_win_without_preemption_too():
    flex, without, clockwork = (
        report(label, 250, periods=10).goodput
        for label in ("flex", "flex, no preemption", "clockwork")
    )
    assert without == pytest.approx(flex, rel=0.02)
    assert 3.7 < flex / clockwork < 6
    assert flex > 128 / 0.0319  # what batches of 128 of stream A allow


def test_at_90_ms_only_preemption_serves_the_bursts():
    flex, without, clockwork = (
        report(label, 90, periods=10).goodput
        for label in ("flex", "flex, no preemption", "clockwork")
    )
    assert flex > 2.3 * without > 2.3 * clockwork
    assert 6.2 < flex / clockwork < 8


def test_the_factor_6_2_is_that_of_a_burst_that_finds_stream_b_at_work():
    flex = report("flex", 90, periods=1, warmup=0)
    assert flex.count("good", "RN18") == 128 + 128 + 102  # in 90 ms
    assert (flex.batches.status == "preempted").sum() == 1
    without = report("flex, no preemption", 90, periods=1, warmup=0)
    assert without.count("good", "RN18") == 57  # in the 16.4 ms after 78.6 of ResNet269
    assert flex.goodput / without.goodput == pytest.approx(6.2, rel=0.05)


def test_preemption_pays_with_the_papers_overheads():
    args = {"periods": 10, "slowdown": 1.05, "preempt_delay_ms": 4.0}
    flex = report("SHEPHERD, with overheads", 90, **args)
    assert flex.goodput > 2.3 * report("flex, no preemption", 90, periods=10).goodput


@pytest.mark.parametrize(("slo_ms", "factor"), [(250, 1.0), (90, 2.0)])
def test_preemption_that_gains_rescues_deferred(slo_ms, factor):
    flex, gaining, deferred = (
        report(label, slo_ms, periods=10).goodput for label in ("flex", "deferred_flex", "deferred")
    )
    assert gaining > 0.97 * flex
    assert gaining > factor * deferred
