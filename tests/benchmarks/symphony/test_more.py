"""What Figures 11 to 15 and `responsive-grid` are made of; the programs themselves run in
`test_front_door`."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.own import responsive_grid
from benchmarks.own.responsive_grid import POLICIES, STRONG, worst_bad
from benchmarks.symphony.fig9 import upper_bound
from benchmarks.symphony.fig11 import cluster, systems
from benchmarks.symphony.fig15 import Advice, Autoscaled, changing_rates, least_gpus
from benchmarks.zoos import ZooModel
from ray_slo.core import Cluster
from ray_slo.policies import make_policy
from ray_slo.simulation import Report, Trace, Workload, simulate

MODELS = [ZooModel("a", 1.0, 5.0, 30), ZooModel("b", 2.0, 6.0, 50)]


@cache
def _run(rate: float, workers: int, *, follow: bool, until_s: float = 4.0):
    host = Autoscaled(
        make_policy("deferred", {"objective": "consolidate"}),
        16,
        workers,
        every_s=0.5,
        until_s=until_s,
        follow=follow,
    )
    all_there = Cluster.uniform([m.model() for m in MODELS], 16)
    report = simulate(host, all_there, Workload.poisson(rate), duration_s=until_s, seed=1)
    return host.samples, report


def _busy(report: Report) -> float:
    """GPUs that were busy, on average."""
    return sum(report.utilisation().values())


@pytest.mark.parametrize(("rate", "follow"), [(500.0, False), (5000.0, True)])
def test_samples_agree_with_the_report(rate, follow):
    samples, report = _run(rate, 8, follow=follow)
    assert [s.at_s for s in samples] == [0.5 * i for i in range(1, 9)]
    assert sum(s.busy for s in samples) / 8 == pytest.approx(_busy(report))
    arrived = sum(s.arrived for s in samples)
    assert arrived == report.count()
    # What had not been answered at the last advice is at most an SLO's worth of requests.
    assert 0 <= arrived - sum(s.good + s.bad for s in samples) < 3 * rate * 0.05
    bad = sum(s.bad for s in samples) / arrived
    assert bad == pytest.approx(report.bad_rate(), abs=0.01)


def test_the_worked_example_of_the_advice():
    advice = Advice(16)
    assert [advice.after(8, 0.2, 0.0), advice.after(8, 1.0, 0.0)] == [10, 16]
    assert [advice.after(8, 0.0, 0.3), advice.after(8, 0.0, 0.5)] == [8, 7]  # two periods in a row
    assert [advice.after(8, 0.0, 0.5), advice.after(8, 0.01, 0.15)] == [8, 8]
    assert [advice.after(8, 0.0, 0.5), advice.after(8, 0.0, 1.0)] == [8, 5]


def test_advice_that_is_not_followed_changes_nothing():
    samples, report = _run(500.0, 8, follow=False)
    assert {s.gpus for s in samples} == {8}
    assert min(s.advice for s in samples) < 8
    assert set(report.batches.worker) <= {str(w) for w in report.meta["workers"][:8]}


def test_a_followed_advice_takes_idle_workers_away_and_adds_missing_ones():
    fewer, report = _run(500.0, 12, follow=True)
    assert [b.gpus for b in fewer[1:]] == [a.advice for a in fewer[:-1]]
    assert fewer[-1].gpus < 6
    started = report.batches[report.batches.started_s > fewer[-2].at_s]
    assert started.worker.nunique() <= fewer[-1].gpus
    more, _ = _run(4000.0, 2, follow=True)
    assert more[0].bad > 0
    assert more[-1].gpus > 6


def test_the_least_gpus_are_those_of_the_upper_bound():
    rate = upper_bound(MODELS, 4) / len(MODELS)
    rates = {m.name: [rate, rate / 2] for m in MODELS}
    assert least_gpus(MODELS, rates) == pytest.approx([4, 2])


def test_a_changing_workload_follows_its_periods():
    names = [m.name for m in MODELS]
    rates = changing_rates(names, periods=5, mean_rate=400, rng=np.random.default_rng(0))
    assert sum(map(sum, rates.values())) / 5 == pytest.approx(400)
    workload = Workload(arrivals={m: Trace(rates=r, interval_s=10) for m, r in rates.items()})
    assert workload.length_s == 50
    cluster = Cluster.uniform([m.model() for m in MODELS], 1)
    drawn = workload.generate(cluster, 50.0, np.random.default_rng(0))
    for i, m in enumerate(names):
        counts = np.histogram(drawn.arrival[drawn.model == i], np.arange(0, 51, 10))[0]
        assert counts / 10 == pytest.approx(rates[m], rel=0.15, abs=2)


def test_nexus_plans_within_the_warm_up_and_the_others_are_as_ever():
    compared = systems(0.8)
    periods = {name: kwargs.get("period_s") for name, (_, kwargs) in compared.items()}
    assert {name for name, p in periods.items() if p == 0.8} == {
        "Nexus, 1 frontend",
        "Nexus, 8 frontends",
    }
    for name, kwargs in compared.values():
        make_policy(name, kwargs)  # takes its arguments


def test_figure_11_has_one_slo_for_all():
    made = cluster(35, gpus=3)
    assert len(made.workers) == 3
    assert {m.latency_slo_s for m in made.models.values()} == {0.035}
    assert len(made.models) == 20


def test_the_pool_with_a_strong_batching_effect_is_figure_6s():
    (model, *others) = STRONG[0].models
    assert len(others) == 9 and model.slo_ms == 46 == 2 * (8 * model.alpha_ms + model.beta_ms)


def test_consolidate_serves_that_pool_where_eager_collapses(monkeypatch):
    compared = {name: POLICIES[name] for name in ("eager", "consolidate")}
    monkeypatch.setattr(responsive_grid, "POLICIES", compared)
    monkeypatch.setattr(responsive_grid, "SHARES", (0.6, 0.76))
    rows = worst_bad(STRONG[0], quick=True, seed=0)
    bad = {}
    for row in rows:
        bad.setdefault(row.case.rpartition(" · ")[2], []).append(row.ours)
    assert set(bad) == set(compared)
    assert max(bad["consolidate"]) < 0.5
    assert bad["eager"][0] < 0.5 and 20 < bad["eager"][1] <= 100
