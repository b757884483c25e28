"""What the programs of SHEPHERD §7.1 are made of; the programs run in `test_front_door`."""

import pytest

from benchmarks.shepherd_systems import BURST, OVERHEADS, compared, run_system, traces, zoo

INTERVAL_S = 0.4


def run(name, rate, *, slo_ms=250.0, burst=None, workers=12, intervals=3):
    models = zoo(slo_ms)
    arrivals = traces([m.name for m in models], rate, intervals, INTERVAL_S, burst)
    return run_system(name, models, workers, arrivals, interval_s=INTERVAL_S, seed=1)


def test_traces_have_the_rate_that_was_asked_for():
    arrivals = traces(["a", "b", "c"], 600.0, 4, 2.0, BURST)
    assert sum(t.rate for t in arrivals.values()) == pytest.approx(600)
    assert all(t.length_s == 8.0 and t.burst == BURST for t in arrivals.values())
    others = traces(["a", "b", "c"], 600.0, 4, 2.0, None, population_seed=1)
    assert others["a"].rates != arrivals["a"].rates


@pytest.mark.parametrize("name", ["SHEPHERD", "Clockwork", "deferred"])
def test_half_the_capacity_is_served(name):
    assert run(name, 3_000).bad_rate() < 0.001


def test_in_overload_large_batches_first_win():
    goodput = {
        name: run(name, 24_000).goodput for name in ("SHEPHERD", "Clockwork", "Nexus, as planned")
    }
    assert goodput["SHEPHERD"] > 2 * goodput["Nexus, as planned"] > 2 * goodput["Clockwork"]


def test_bursts_hurt_a_static_plan_most():
    shepherd, nexus = (
        run(name, 4_000, burst=BURST, intervals=20).bad_rate()
        for name in ("SHEPHERD", "Nexus, as planned")
    )
    assert nexus > 0.1 > shepherd


def test_overheads_slow_every_batch():
    plain, slowed = (run(name, 500, workers=6) for name in ("SHEPHERD", OVERHEADS))
    assert slowed.latency_s(50) > 1.03 * plain.latency_s(50)


def test_rows_compare_with_shepherd():
    rows = compared("T", {"SHEPHERD": {1: 6.0}, "P": {1: 2.0}}, "{}/s", {("P", 1): 4.6})
    assert [(r.case, r.ours, r.paper) for r in rows] == [
        ("T · SHEPHERD", 6.0, None),
        ("T · P", 2.0, None),
        ("T, SHEPHERD over · P", 3.0, 4.6),
    ]
