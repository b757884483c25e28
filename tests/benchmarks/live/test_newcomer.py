"""What `live-newcomer` makes of its streams, and its models."""

import numpy as np
import pytest

from benchmarks.harness.registry import PROGRAMS
from benchmarks.live.newcomer import BATCH, OURS, PLAIN, SYSTEMS, Seen, full, plot, rows_of
from ray_slo.load.report import LoadResult, Sample
from ray_slo.load.workload import Payloads, Recorded

STATUSES = dict.fromkeys(("ok", "late", "refused", "expired", "timeout", "error"), 0)


def test_a_stream_says_what_its_batches_took():
    times = np.array([0.0, 0.2, 0.4, 0.6])
    workload = Recorded.record(times, Payloads([b""]), duration_s=1.0, warmup_s=0.1, seed=0)
    samples = [
        Sample(0.0, 0.05, "answered", 200, answer=b'{"label": "9:1.0"}'),  # in the warm-up
        Sample(0.2, 0.25, "answered", 200, answer=b'{"label": "2:40.0"}'),
        Sample(0.4, 0.59, "answered", 200, answer=b'{"label": "1:30.0"}'),
        Sample(0.6, 0.61, "refused", 503),
    ]
    seen = Seen.of(LoadResult.from_samples(samples, workload, None, slo_s=0.1, cpu_s=0.0))
    assert seen.batches == [(2, 0.04), (1, 0.03)]
    assert (seen.sent, seen.late) == (3, 0.5)
    assert seen.goodput == pytest.approx(1 / 0.9)


def test_the_workers_rate_is_that_of_the_best_size_with_enough_batches():
    batches = [(1, 0.1)] * 5 + [(4, 0.2)] * 12 + [(8, 0.1)] * 8
    assert full(batches) == pytest.approx(20.0)  # one batch of eight says nothing
    assert full([]) == 0


def some(ok):
    return Seen({**STATUSES, "ok": ok, "late": 10, "refused": 90 - ok}, 10.0, [(4, 0.2)] * 60)


def test_rows_and_plot(tmp_path):
    found = {
        (share, system): some(ok)
        for share in (0.7, 2.0)
        for system, ok in {PLAIN: 40, BATCH: 60, OURS: 80}.items()
    }
    rows = rows_of("ordinary, text, 2 replicas, alone", 50.0, 2, found)
    by = {(row.case.rpartition(", ")[2], row.metric): row.ours for row in rows}
    ours = f"2 × · {SYSTEMS[OURS]}"
    assert by[ours, "in time"] == 80 and by[ours, "goodput"] == 8
    assert by[ours, "goodput / workers"] == pytest.approx(8 / 40)
    assert by[ours, "goodput / plain"] == 2
    assert by[ours, "late"] == pytest.approx(100 / 9)
    assert by[ours, "refused"] == 10
    asked = PROGRAMS["live-newcomer"].asked
    assert all(ask.rows([row.to_json() for row in rows]) for ask in asked)
    (path,) = plot(rows, tmp_path)
    assert path.stat().st_size > 10_000
