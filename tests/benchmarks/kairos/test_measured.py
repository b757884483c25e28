"""Kairos on latencies that are measured: the clock, the pools and the comparison."""

import hashlib
import threading
import time

import pytest

from benchmarks.harness.data import Missing
from benchmarks.kairos import latencies
from benchmarks.kairos.latencies import Samples, sizes
from benchmarks.kairos.measured import (
    BASE,
    TYPES,
    best_homogeneous,
    best_of,
    case_of,
    compared,
    cost,
    latency_rows,
    peer,
    space,
    throughput,
)
from benchmarks.kairos.systems import KAIROS, sustains

HOW = {"requests": 400, "tolerance": 0.1, "seed": 0}


def sample(*ms):
    return Samples([t / 1e3 for t in ms], [2 * t / 1e3 for t in ms])


@pytest.fixture
def samples():
    """One thread takes 1 + 0.03 n ms, two threads 1 + 0.015 n; every third sample is disturbed."""
    return {
        ("NCF", threads, n): sample(t := 1 + 0.03 / threads * n, t, 3 * t)
        for threads in (1, 2)
        for n in sizes("NCF")
    }


def test_the_busiest_thread_counts_and_waiting_does_not():
    def elsewhere():
        work = threading.Thread(
            target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 400_000)
        )  # without Python's lock
        work.start()
        work.join()

    start = time.process_time()
    busiest, wall = latencies.timed(elsewhere)
    assert 0.5 * (time.process_time() - start) < busiest <= 1.5 * wall
    busiest, wall = latencies.timed(lambda: time.sleep(0.05))
    assert wall >= 0.05 and busiest < 0.025


def test_without_torch_or_cores_it_is_skipped(monkeypatch):
    monkeypatch.setattr(latencies, "find_spec", lambda name: None)
    with pytest.raises(Missing, match="torch is not installed"):
        latencies.measure(["NCF"], 1)
    monkeypatch.setattr(latencies, "find_spec", lambda name: name)
    monkeypatch.setattr(latencies.os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(Missing, match="2 threads need as many cores, there are 1"):
        latencies.measure(["NCF"], 1)


def test_latencies_are_rows_and_profiles_are_their_medians(samples):
    rows = {(r.case, r.metric): r for r in latency_rows(samples)}
    assert {r.unit for r in rows.values()} == {"ms"}
    case = "latency by size, NCF · "
    assert rows[f"{case}1 thread, median", "1000"].ours == pytest.approx(31)
    assert rows[f"{case}2 threads, median", "1000"].ours == pytest.approx(16)
    assert rows[f"{case}2 threads, p95", "1000"].ours == pytest.approx(16 + 0.9 * 32)
    assert rows[f"{case}2 threads, least elapsed", "1000"].ours == pytest.approx(32)
    made = case_of("NCF", 1.25, samples)
    assert made.slo_s == pytest.approx(0.020)
    assert made.profiles()["1 thread"].latency(500) == pytest.approx(0.016)
    assert made.profiles()["1 thread"].max_batch_within(made.slo_s) == 633


def test_pools_are_within_the_budget_by_falling_bound(samples):
    case = case_of("NCF", 1.25, samples)
    named, bounds = space(case)
    assert all(cost(c) <= case.budget and c[BASE] for c in named)  # one thread alone is too slow
    assert len(named) == sum(1 + int((2.5 - 0.216 * u) / 0.108) for u in range(1, 12))
    fluid = bounds["fluid"]
    assert len(fluid) == len(bounds["Eq. 15"]) == len(named)
    assert (fluid[:-1] >= fluid[1:]).all() and fluid[-1] > 0


def test_throughput_is_between_what_is_sustained_and_what_is_not(samples):
    case, counts = case_of("NCF", 2.0, samples), {BASE: 2, "1 thread": 3}
    rate = throughput(case, counts, KAIROS, **HOW)
    assert sustains(case, counts, rate, requests=400)
    assert not sustains(case, counts, 1.15 * rate, requests=400)
    assert throughput(case, counts, KAIROS, **HOW, above=1.2 * rate) == 0
    more = {BASE: 4, "1 thread": 3}
    value, chosen = best_of(case, [counts, more, counts], peer("clkwrk:Clkwrk"), HOW)
    assert chosen == more and value > rate


def test_one_kind_alone_serves_only_what_it_can_in_time(samples):
    tight, kind = best_homogeneous(case_of("NCF", 1.25, samples), HOW)
    assert kind == {BASE: 11}
    loose, kind = best_homogeneous(case_of("NCF", 2.0, samples), HOW)
    assert kind == {"1 thread": 23} and loose > tight


def test_the_comparison_has_a_row_of_every_scheme(samples):
    rows = {
        (r.case, r.metric): r.ours
        for r in compared(case_of("NCF", 1.25, samples), HOW | {"requests": 100})
    }
    over = {c.split(" · ")[1].split(" (")[0]: v for (c, m), v in rows.items() if m[:4] == "over"}
    assert over["homogeneous, scaled"] == 1
    assert over["largest fluid bound"] > over["Kairos, best"] >= over["Kairos"] > 1
    assert over.keys() > {"Ribbon", "CLKWRK", "DRS", "Kairos, as in the paper"}
    ranks = {m: v for (c, m), v in rows.items() if c.startswith("ranking")}
    assert 1 <= ranks["rank of the best by fluid"] <= rows["setting · SLO 1.25 ×, NCF", "pools"]
    assert -1 <= ranks["correlation, Eq. 15"] <= 1
    assert TYPES[0].price_per_hour == 2 * TYPES[1].price_per_hour
