"""The part of `live-pipeline` that needs no Ray: the ramp, what is made of a run, and its plot."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.live import pipeline
from benchmarks.live.pipeline import (
    BIN_S,
    SLO_S,
    Glance,
    Seen,
    capacities,
    largest,
    ramp,
    rows,
    simulated,
    why,
)
from ray_slo.core import LatencyProfile
from ray_slo.serve.errors import RefusedEarly


def test_the_ramp_rises_to_the_peak_and_falls_as_it_rose():
    for quick in (True, False):
        rates = ramp(6.0, quick)
        assert rates == rates[::-1]
        assert max(rates) == 6.0 and rates[0] == pipeline.TRICKLE
        steps = np.diff(rates[: rates.index(6.0) + 1])
        assert (steps >= 0).all() and steps.max() < 6.0


def test_largest_is_found_to_a_twentieth():
    assert largest(lambda demand: demand <= 7.3) == pytest.approx(7.3, abs=0.05)
    assert largest(lambda demand: False) == pytest.approx(0.0, abs=0.05)


def run_of(rates):
    """In every bin an answer, one that is late, a refusal and a failure."""
    seen, glances = [], []
    for i in range(len(rates)):
        at = i * BIN_S + 1
        seen += [
            Seen(at, "answered", 0.5, accuracy=90.0, wrong=1, written=10),
            Seen(at, "answered", SLO_S + 0.1, accuracy=80.0, wrong=0, written=10),
            Seen(at, "refused", 0.1, why="would_miss in detect"),
            Seen(at, "error", 0.1, why="KeyError()"),
        ]
        glances.append(Glance(at, 3, 2, Counter({"det480": 1, "rec48": 1})))
    return rows((3.0, 7.0), rates, seen, glances)


def test_rows_by_phase_and_over_time():
    rates = [1.0, 2.0, 1.0]
    made = {(row.case, row.metric): row.ours for row in run_of(rates)}
    assert made["capacity", "most accurate"] == 3.0
    for case in ("phases · rising", "phases · at the peak", "phases · all", "over time · 10 s"):
        assert made[case, "demand"] == 4 / BIN_S
        assert made[case, "accuracy, of variants"] == 90.0  # of the one in time
        assert made[case, "accuracy, of characters"] == pytest.approx(90.0)
        assert made[case, "violations"] == 75.0
        assert made[case, "workers wanted"] == 3.0 and made[case, "workers running"] == 2.0
        assert made[case, "variants in use"] == 2.0
    assert made["workers by variant, over time · 5 s", "det480"] == 1.0
    assert made["not answered", "would_miss in detect"] == made["not answered", "KeyError()"] == 3
    assert made["phases · all", "failed"] == 3.0
    assert made["phases · all", "late"] == 3.0


def test_why_says_the_reason_and_the_task():
    refused = RefusedEarly("no", reason="would_miss", task="detect")
    assert why(refused) == "would_miss in detect"
    assert why(RefusedEarly("no", reason="shed")) == "shed"
    assert why(KeyError("x")) == "KeyError('x')"


def test_capacity_and_prediction_follow_the_latencies():
    names = ("det320", "det480", "det736", "det960", *pipeline.READERS)
    times = np.arange(0.0, 20.0, 0.5)
    known, slow = (
        {name: LatencyProfile.linear(alpha, 0.0, 4) for name in names} for alpha in (0.05, 0.15)
    )
    best, floor = capacities(known)
    assert 1.0 < best <= floor
    assert capacities(slow)[0] < best
    (accuracy, violations, workers) = (row.ours for row in simulated(known, times))
    assert accuracy > 95.0 and violations < 5.0 and 2.0 <= workers <= pipeline.WORKERS
    assert simulated(slow, times)[1].ours > violations
