"""Parts and rows of Figure 14. The program itself runs in `test_front_door`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.own.deferred_objectives import RESNET, staggered_bound
from benchmarks.symphony import fig14
from benchmarks.symphony.fig14 import GPUS, TCP_MEDIAN_MS, bound, delayed, lost_from, tcp
from ray_slo.core import DispatchDelay
from ray_slo.policies import make_policy
from ray_slo.simulation import Workload, simulate


def test_the_bound_without_a_network_is_the_staggered_one():
    for slo in (20, 100):
        assert bound(slo, 0) == pytest.approx(staggered_bound(RESNET.profile, slo / 1e3, GPUS)[1])


def test_the_bound_falls_with_the_latency_until_nothing_is_in_time():
    rates = [bound(20, d) for d in (0.0, 0.033, 3.0, 6.0, 10.0, 12.0)]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0
    alone_ms = 1e3 * RESNET.profile.latency(1)
    assert bound(20, 20 - alone_ms - 0.01) == pytest.approx(GPUS / alone_ms * 1e3)
    assert bound(20, 20 - alone_ms + 0.01) == 0


def test_one_batch_ahead_costs_where_the_latency_is_longer_than_the_batch():
    assert bound(20, 6, one_ahead=True) == bound(20, 6)
    assert bound(50, 36, one_ahead=True) < 0.7 * bound(50, 36)


def test_tcp_has_the_papers_median_and_tail():
    delay = tcp(0)
    assert 1e3 * delay.percentile(50) == pytest.approx(TCP_MEDIAN_MS)
    assert 1e3 * delay.percentile(99.99) == pytest.approx(12 * TCP_MEDIAN_MS)
    drawn = [delay(1) for _ in range(10_000)]
    for p in (50, 90, 99):
        assert np.percentile(drawn, p) == pytest.approx(delay.percentile(p), rel=0.1)
    again = tcp(0)
    assert drawn[:5] == [again(1) for _ in range(5)]


def bad_rate(slo_ms, planned_ms, rate, actual=None, policy="deferred"):
    planned = delayed(slo_ms, DispatchDelay(planned_ms / 1e3))
    return simulate(
        policy,
        planned,
        Workload.poisson(rate),
        duration_s=0.8,
        warmup_s=0.5,
        truth=replace(planned, delay=actual) if actual else None,
    ).bad_rate()


def test_a_slow_network_hurts_tight_slos_and_not_loose_ones():
    rate = 10_000.0
    assert bad_rate(20, 0.033, rate) < 0.01
    assert bad_rate(20, 10, rate) > 0.1
    assert bad_rate(100, 10, rate) < 0.01


def test_who_waits_until_frontrun_and_plans_with_the_median_is_late_in_the_tail():
    consolidate = fig14.COMPARED["deferred, as Algorithm 1"]
    bad = {
        p: bad_rate(50, 1e3 * tcp(0).percentile(p), 10_000.0, tcp(0), make_policy(*consolidate))
        for p in (50, 99)
    }
    assert bad[50] > 0.03 > 0.005 > bad[99]


def test_the_latency_that_costs_a_share_is_interpolated():
    assert lost_from({0.0: 100.0, 4.0: 50.0, 8.0: 10.0}, 70) == pytest.approx(6.0)
    assert lost_from({0.0: 100.0, 4.0: 50.0}, 70) is None
