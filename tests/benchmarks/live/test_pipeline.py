"""The part of `live-pipeline` that needs no Ray: the ramp, what is made of a run, and its plot."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.live import pipeline
from benchmarks.live.pipeline import BIN_S, SLO_S, Glance, Seen, capacities, ramp, rows, why
from ray_slo.serve.errors import RefusedEarly


def test_the_ramp_rises_above_what_the_best_variants_do_and_falls_again():
    best, quickest = capacities()
    for quick in (True, False):
        rates = ramp(best, quick)
        assert rates[0] < best / pipeline.WORKERS < best < max(rates) < quickest
        top = rates.index(max(rates))
        steps = np.diff(rates[: top + 1])
        assert (steps >= 0).all() and steps.max() < best
        assert rates[-1] == rates[0]


def run_of(rates):
    """In every bin an answer, one that is late, a refusal and a failure."""
    seen, glances = [], []
    for i, rate in enumerate(rates):
        at = i * BIN_S + 1
        seen += [
            Seen(at, "answered", 0.5, accuracy=90.0 if rate < 3 else 80.0),
            Seen(at, "answered", SLO_S + 0.1, accuracy=70.0),
            Seen(at, "refused", 0.1, why="would_miss in detect"),
            Seen(at, "error", 0.1, why="KeyError()"),
        ]
        glances.append(Glance(at, 4 if rate > 1 else 1, 2, Counter({"detect-l": 1, "who-s": 1})))
    return rows((3.0, 7.0), rates, seen, glances)


def test_rows_by_phase_and_over_time():
    rates = [1.0, 2.0, 3.0, 2.0, 1.0]
    made = {(row.case, row.metric): row.ours for row in run_of(rates)}
    assert made["capacity", "most accurate"] == 3.0
    for case, accuracy, wanted in (
        ("phases · quiet", 90.0, 1.0),
        ("phases · rising", 90.0, 4.0),
        ("phases · at the peak", 80.0, 4.0),
        ("phases · all", 88.0, 2.8),
        ("over time · 10 s", 80.0, 4.0),
    ):
        assert made[case, "demand"] == 4 / BIN_S
        assert made[case, "accuracy"] == pytest.approx(accuracy)  # of those in time
        assert made[case, "violations"] == 75.0
        assert made[case, "workers wanted"] == pytest.approx(wanted)
        assert made[case, "workers running"] == made[case, "variants in use"] == 2.0
    assert made["workers by variant, over time · 5 s", "detect-l"] == 1.0
    assert made["not answered", "would_miss in detect"] == made["not answered", "KeyError()"] == 5
    assert made["phases · all", "failed"] == made["phases · all", "late"] == 5.0
    assert made["order", "accuracy falls after all workers are wanted by"] == BIN_S
    assert made["order", "workers leave after accuracy is back by"] == BIN_S


def test_why_says_the_reason_and_the_task():
    refused = RefusedEarly("no", reason="would_miss", task="detect")
    assert why(refused) == "would_miss in detect"
    assert why(RefusedEarly("no", reason="shed")) == "shed"
    assert why(KeyError("x")) == "KeyError('x')"
