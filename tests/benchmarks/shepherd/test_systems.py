"""Parts of the programs of SHEPHERD §7.1. The programs run in `test_front_door`."""

import pytest

from benchmarks.shepherd.fig10 import GROUP, PER_WORKER, Emulation, Limited
from benchmarks.shepherd.systems import BURST, OVERHEADS, compared, run_system, traces, zoo
from ray_slo.core import Cluster
from ray_slo.policies import make_policy
from ray_slo.simulation import Workload, simulate

INTERVAL_S = 0.4


def run(name, rate, *, slo_ms=250.0, burst=None, workers=6, intervals=3):
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
    assert run(name, 1_500).bad_rate() < 0.001


def test_in_overload_large_batches_first_win():
    goodput = {
        name: run(name, 12_000).goodput for name in ("SHEPHERD", "Clockwork", "Nexus, as planned")
    }
    assert goodput["SHEPHERD"] > 1.3 * goodput["Clockwork"] > 1.3 * goodput["Nexus, as planned"]


def test_bursts_hurt_a_static_plan_most():
    shepherd, nexus = (
        run(name, 2_000, burst=BURST, intervals=8).bad_rate()
        for name in ("SHEPHERD", "Nexus, as planned")
    )
    assert nexus > 0.1 > shepherd


def test_overheads_slow_every_batch():
    plain, slowed = (run(name, 500) for name in ("SHEPHERD", OVERHEADS))
    assert slowed.latency_s(50) > 1.03 * plain.latency_s(50)


def test_rows_compare_with_shepherd():
    rows = compared("T", {"SHEPHERD": {1: 6.0}, "P": {1: 2.0}}, "{}/s", {("P", 1): 4.6})
    assert [(r.case, r.ours, r.paper) for r in rows] == [
        ("T · SHEPHERD", 6.0, None),
        ("T · P", 2.0, None),
        ("T, SHEPHERD over · P", 3.0, 4.6),
    ]


def test_a_slow_scheduler_refuses_what_exceeds_its_speed():
    report = simulate(
        Limited(make_policy("flex"), 500),
        Cluster.uniform([m.model() for m in zoo()[:1]], 4),
        Workload.poisson(2_000),
        duration_s=3.0,
        warmup_s=1.0,
    )
    assert report.goodput == pytest.approx(500, rel=0.05)
    assert report.count("pending") == report.count("late") == 0


def test_groups_share_out_all_workers_and_requests():
    emulation = Emulation(24, None, per_scheduler=5_000, interval_s=0.3, intervals=2, seed=0)
    groups = emulation.plan(GROUP).groups
    assert sum(g.workers for g in groups) == 24 and max(g.workers for g in groups) == GROUP
    assert sorted(m for g in groups for m in g.models) == sorted(emulation.models)
    assert emulation.offered == pytest.approx(24 * PER_WORKER, rel=0.1)
    assert emulation.grouped() > 0.97 * emulation.offered
    assert emulation.central("Clockwork") == pytest.approx(5_000, rel=0.02)
    assert emulation.dealt_out() < 0.97 * emulation.grouped()
