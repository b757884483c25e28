"""Cells of `policy-grid`, and the summary of their figures."""

import math

import numpy as np
import pytest

from benchmarks.own import grid_run, policy_grid
from benchmarks.own.grid_cells import LEARNED, SIZES, cell
from benchmarks.own.grid_run import code_of, keep, kept, kept_at, measure
from benchmarks.own.grid_settings import SETTINGS
from ray_slo.policies.shared import fluid
from ray_slo.simulation.arrivals import Mmpp, Trace

SOME = [cell(3, k) for k in range(80)]


def size(c):
    return len(c.models) * sum(k.count for k in c.kinds)


def test_a_cell_follows_from_seed_and_number():
    assert [cell(3, k).says for k in range(10)] == [c.says for c in SOME[:10]]
    assert cell(4, 0).says != SOME[0].says
    again = cell(3, 7)
    assert again.models[0].variants[0].name == SOME[7].models[0].variants[0].name
    assert again.bound == SOME[7].bound


def test_all_that_is_to_be_drawn_is_drawn():
    seen = {
        "pipelines": sum(c.tree is not None for c in SOME),
        "sizes": sum(c.sized for c in SOME),
        "variants": sum(c.variants > 1 for c in SOME),
        "kinds": sum(len(c.kinds) > 1 for c in SOME),
        "noise": sum(bool(c.noise) for c in SOME),
        "preemption": sum(c.preemption for c in SOME),
        "overload": sum(c.load > 1 for c in SOME),
        "calm": sum(c.load < 0.7 for c in SOME),
        "changing": sum(len(c.arriving.levels) > 1 for c in SOME),
        "bursts": sum(c.arriving.burst is not None for c in SOME),
    }
    assert all(3 < n < 60 for n in seen.values()), seen
    assert all(0.3 <= c.load <= 2.5 for c in SOME)
    assert all(1 <= len(c.models) <= 40 for c in SOME)
    assert all(1 <= sum(k.count for k in c.kinds) <= 64 for c in SOME)


@pytest.mark.parametrize("number", range(10))
def test_a_cell_holds_what_it_says(number):
    c = SOME[number]
    for model in c.models:
        accuracies = [v.accuracy for v in model.variants]
        assert accuracies == sorted(accuracies, reverse=True)
        tables = [[v.profiles["fast"].latency(b) for b in range(1, 9)] for v in model.variants]
        assert all(t == sorted(t) for t in tables)
        alone = [t[0] for t in tables]
        assert alone == sorted(alone, reverse=True)  # the quickest variant is the last
        if c.tree is None:
            typical_s = math.exp(np.mean([math.log(t[7]) for t in tables]))
            assert 1.3 <= model.latency_slo_s / typical_s * (1 + 1e-9) <= 4 * (1 + 1e-6)
    assert math.isclose(sum(c.shares.values()), 1)
    assert set(c.shares) == {m.name for m in c.models}


@pytest.mark.parametrize("number", [k for k in range(10) if SOME[k].tree is None])
def test_the_bound_is_what_the_fluid_limit_serves(number):
    c = SOME[number]
    items = np.mean(SIZES.draw(20_000, np.random.default_rng(0))) if c.sized else 1.0
    workers = {kind.name: kind.count for kind in c.kinds}
    for factor, feasible in ((0.99, True), (1.01, False)):
        rates = {m: factor * c.bound * items * share for m, share in c.shares.items()}
        assert fluid.solve(fluid.Problem(c.models, rates, workers)).feasible is feasible


def test_the_load_is_the_mean_however_it_changes():
    for c in SOME:
        process = c.arriving.process(100.0, 30.0)
        assert process.rate == pytest.approx(100.0)
        if isinstance(process, Trace):
            assert process.length_s == pytest.approx(30.0)
        if isinstance(process, Mmpp):
            assert process.burst.peak * process.burst.share < 1


def test_with_noise_policies_are_told_what_a_host_learns():
    noisy = next(c for c in SOME if c.noise and c.tree is None)
    told, real = noisy.cluster(noisy.learned), noisy.cluster()
    worker, variant = next(iter(told.workers)), noisy.models[0].variants[0].name
    assert told.profile(variant, worker).latency(3) == pytest.approx(
        LEARNED * real.profile(variant, worker).latency(3)
    )
    exact = next(c for c in SOME if not c.noise)
    assert exact.learned == 1
    assert "jitter_ms" in grid_run._arguments(noisy, SETTINGS["deferred"])
    assert not grid_run._arguments(exact, SETTINGS["deferred"])


@pytest.mark.parametrize("piped", [False, True])
def test_only_the_quickest_variant_is_left(piped):
    c = min((c for c in SOME if c.variants > 1 and piped == bool(c.tree)), key=size)
    cluster = c.quickest().cluster()
    for model in c.models:
        (left,) = cluster.models[model.name].variants
        assert left.accuracy == min(v.accuracy for v in model.variants)
        assert all(left.name in w.loaded and len(w.loaded) <= 40 for w in cluster.workers.values())
    if piped:  # it was refused for the factors of variants that are not there
        assert measure(c.seed, c.number, "deferred, quickest variant", 200)["value"] > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_takes_part_somewhere_and_runs(name):
    fits = [c for c in SOME if SETTINGS[name].takes_part(c)]
    assert fits
    if SETTINGS[name].preempts:
        assert all(c.preemption for c in fits)
    c = min(fits, key=size)
    figures = measure(c.seed, c.number, name, 100)
    assert "error" not in figures
    assert 0 < figures["value"] <= 1 - figures["bad"] + 1e-9
    assert figures["bad"] <= figures["worst"] + 1e-9 <= 1 + 1e-9
    assert figures["value"] == pytest.approx(
        figures["accuracy"] / 100 * (1 - figures["bad"]), rel=1e-6
    )


def test_a_draw_changes_the_arrivals_but_not_the_cell():
    c = min(SOME, key=size)
    first, again, other = (measure(c.seed, c.number, "eager", 200, draw) for draw in (0, 0, 1))
    assert first["p99_s"] == again["p99_s"] != other["p99_s"]


def test_rare_models_count_as_one():
    arrived, bad = np.array([1000, 100, 100, 100]), np.array([10, 50, 0, 0])
    assert grid_run._worst(arrived, bad) == pytest.approx(50 / 300)
    assert grid_run._worst(np.array([1000, 0]), np.array([10, 0])) == 0.01


def test_what_is_kept_counts_for_its_code_alone(tmp_path):
    path = kept_at(0, 3, "Symphony, as printed", 100, tmp_path)
    assert kept(path, "a") is None and kept(path, None) is None
    keep(path, "a", {"value": 0.5, "p50_s": math.nan})
    assert kept(path, "a") == {"value": 0.5, "p50_s": None}
    assert kept(path, "b") is None and kept(path, None) is not None
    assert path != kept_at(0, 3, "deferred", 100, tmp_path)
    assert path != kept_at(0, 3, "Symphony, as printed", 100, tmp_path, draw=1)


def test_the_code_of_a_policy_is_its_own():
    assert code_of("deferred") == code_of("deferred, consolidate") != code_of("eager")
    assert code_of("deferred", piped=True) != code_of("deferred")
    assert code_of("deferred", composed=True) != code_of("deferred")
    assert len({code_of(name) for name in ("deferred", "flex", "price", "kairos")}) == 4


def test_shares_regret_and_what_is_asked():
    made = dict(enumerate(SOME[:2]))
    figures = {
        0: {
            "eager": {"value": 0.8, "worst": 0.005, "p50_s": 1.0},
            "deferred": {"value": 0.4, "worst": 0.02, "p50_s": 2.0},
        },
        1: {"eager": {"value": 0.0}, "deferred": {"value": 0.5, "worst": 0.0, "p50_s": 0.5}},
    }
    shares = {k: policy_grid.shares_of(f) for k, f in figures.items()}
    assert shares[0] == {"eager": 1.0, "deferred": 0.5} and shares[1]["eager"] == 0
    rows = {r.metric: r.ours for r in policy_grid.regret_rows("deferred", shares)}
    assert rows["mean share of the best"] == 75 and rows["within 1 %"] == 50
    assert rows["least"] == 50 and rows["5th percentile"] == pytest.approx(52.5)
    asked = {r.metric: r.ours for r in policy_grid.asked_rows("deferred", made, figures, shares)}
    assert asked["cells within 1 % of the best"] == 50 and asked["least share of the best"] == 50
    assert asked["every model under 1 % bad, of the cells where any policy does"] == 50
    worst = list(policy_grid.worst_rows("deferred", made, shares))
    assert [row.ours for row in worst] == [50, 100]
    assert "--seed 3 --cell 0" in worst[0].case and "best: eager" in worst[0].case
    assert policy_grid.shares_of({"eager": {"value": 0.0}}) == {}


def test_a_wrong_name_is_refused():
    with pytest.raises(SystemExit, match="no setting 'defered'"):
        policy_grid.run(quick=True, seed=0, policies="defered")
