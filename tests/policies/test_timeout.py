"""Eager deteriorates as in Figure 5a; a timeout counts from the earliest arrival."""

from __future__ import annotations

import pytest

from ray_slo.core import Cluster, DropReason, LatencyProfile, Model, Request, Variant
from ray_slo.policies.timeout import Eager, Timeout
from tests.policies.harness import Host, one_model

PAPER = one_model(LatencyProfile.linear(1.0, 5.0, 12), 12.0, 3)


def arrivals(*times: float, slo: float = 12.0) -> list[Request]:
    return [Request(i, "m", t, t + slo) for i, t in enumerate(times, start=1)]


def test_eager_deteriorates_after_three_missing_requests():
    """Figure 5a. Up to R12 the batches are those of the staggered pattern, so R1–R12 are handed
    over four at a time, when deferred scheduling would have sent them."""
    requests = [
        Request(i, "m", 0.75 * (i - 1), 0.75 * (i - 1) + 12.0)
        for i in range(1, 40)
        if i not in (13, 14, 15)
    ]
    at = {i: 0.75 * (4 * ((i + 3) // 4) - 1) for i in range(1, 13)}
    host = Host(Eager, PAPER)
    host.run(requests, at=at)
    sent = [(at, ids) for at, _, ids in host.timeline()]
    assert sent[:3] == [(2.25, [1, 2, 3, 4]), (5.25, [5, 6, 7, 8]), (8.25, [9, 10, 11, 12])]
    assert sent[3:] == [
        (11.25, [16]),  # alone, as GPU 1 falls idle
        (14.25, [17, 18, 19, 20]),
        (17.25, [21, 22, 23, 24]),
        (18.0, [25]),  # alone again
        (23.25, [26, 27]),  # 7 wait, but R26 is due at 30.75
        (24.0, [28, 29, 30]),
        (26.25, [31, 32, 33]),
        (30.25, [34]),
        (32.0, [36]),
        (34.25, [39]),
    ]
    assert sorted(host.dropped) == [35, 37, 38]
    assert {reason for _, reason in host.dropped.values()} == {DropReason.WOULD_MISS}
    # Refused when the last worker that was free in time had been taken, not when one falls free.
    assert host.dropped[35][0] == 30.25
    assert host.dropped[37][0] == host.dropped[38][0] == 32.0


def test_timeout_when_the_oldest_is_not_the_most_urgent():
    host = Host(lambda: Timeout(2000.0), PAPER)
    host.run([Request(1, "m", 0.0, 30.0), Request(2, "m", 1.0, 13.0)])
    assert host.timeline() == [(2.0, "w0", [2, 1])]


def test_margin():
    host = Host(lambda: Eager(margin_ms=500.0), PAPER, margin_s=0.5)
    host.arrive(arrivals(0.0, slo=6.4))
    assert host.dropped == {1: (0.0, DropReason.WOULD_MISS)}


def test_several_models_take_turns_by_urgency():
    models = [Model(m, 20.0, (Variant(m, {"default": LatencyProfile([6.0])}),)) for m in "ab"]
    host = Host(Eager, Cluster.uniform(models, 1))
    host.arrive([Request(1, "a", 0.0, 19.0), Request(2, "b", 0.0, 18.0)])
    host.advance(30.0)
    assert host.timeline() == [(0.0, "w0", [2]), (6.0, "w0", [1])]


@pytest.mark.parametrize(
    ("timeout_ms", "must"), [(-1.0, "be at least 0"), (float("inf"), "be a finite number")]
)
def test_bad_timeout(timeout_ms, must):
    with pytest.raises(ValueError, match=f"timeout_ms must {must}, got {timeout_ms}"):
        Timeout(timeout_ms)
