"""The part of `live-pipeline` that needs no Ray: the ramp, what is made of a run, and its plot."""

import asyncio
import math
import time
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
    drive,
    largest,
    plot,
    ramp,
    resting,
    rows,
    simulated,
    why,
)
from deployments.ocr.pages import pages
from ray_slo.core import LatencyProfile
from ray_slo.serve.errors import RefusedEarly
from ray_slo.serve.frontend.answer import Answer


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


def test_a_resting_batch_takes_its_share_of_a_core(monkeypatch):
    monkeypatch.setattr(pipeline, "share", lambda: 0.25)

    def work(self, network, items):
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return [network(item) for item in items]

    start = time.perf_counter()
    assert resting(work)(None, str, [1, 2]) == ["1", "2"]
    assert time.perf_counter() - start >= 0.02 / 0.25


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
        glances.append(Glance(at, 1.0, 3, 2, Counter({"det480": 1, "rec48": 1})))
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


class Replies:
    """Stands for a Serve handle: reads every page but the second perfectly."""

    def __init__(self):
        self.asked = 0
        self.slo_status = self

    def remote(self, png=None, response_metadata=False):
        return self.status() if png is None else self.read(png)

    async def status(self):
        worker = {"assigned": {"det480": 1}}
        return {
            "plan": {
                "workers": {"a": worker, "b": {"assigned": {}}},
                "targets": {"default": 3},
                "running": {"default": 2},
                "demand": 1.5,
            }
        }

    async def read(self, png):
        self.asked += 1
        if self.asked == 2:
            raise RefusedEarly("no", reason="would_miss", task="detect")
        (truth,) = [p for p in pages(2, 1000) if p.png == png]
        text = "\n".join(truth.lines)
        return Answer({"text": text}, "ocr", "det480/rec48", 91.0, 1, 1.0, 1.0, 2.0, 100.0)


def test_pages_are_sent_and_what_comes_of_each_is_kept(monkeypatch):
    monkeypatch.setattr(pipeline, "SLO_S", 600.0)  # a busy machine draws pages slowly
    times = np.array([0.05, 0.1, 0.15])
    seen, glances = asyncio.run(drive(Replies(), times, 1.0, count=2, seed=0))
    assert [s.status for s in seen] == ["answered", "refused", "answered"]
    assert [s.in_time for s in seen] == [True, False, True]
    assert [s.failed for s in seen] == [False, False, False]
    assert [s.why for s in seen] == ["", "would_miss in detect", ""]
    assert [(s.wrong, s.accuracy) for s in seen if s.in_time] == [(0, 91.0)] * 2
    (glance,) = glances
    assert (glance.demand, glance.wanted, glance.running) == (1.5, 3, 2)
    assert glance.variants == {"det480": 1}


def test_why_says_the_reason_and_the_task():
    refused = RefusedEarly("no", reason="would_miss", task="detect")
    assert why(refused) == "would_miss in detect"
    assert why(RefusedEarly("no", reason="shed")) == "shed"
    assert why(KeyError("x")) == "KeyError('x')"


def test_a_bin_without_requests_has_no_figures_and_is_plotted_all_the_same(tmp_path):
    made = rows((3.0, 7.0), [1.0, 2.0, 1.0], [], [Glance(1.0, 0.1, 2, 2)])
    by_metric = {row.metric: row.ours for row in made if row.case == "over time · 0 s"}
    assert math.isnan(by_metric["violations"]) and by_metric["failed"] == 0
    (path,) = plot(made, tmp_path)
    assert path.stat().st_size > 10_000


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
