"""A rehearsal simulates recent requests with each setting, and compares the results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ray_slo.core import Cluster, LatencyProfile, Model, Request, Variant
from ray_slo.core.rehearsal import Rehearsal, Rehearsed, Setting, Traffic
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto as planning
from ray_slo.policies.auto import Auto
from ray_slo.policies.registry import policy_for
from ray_slo.record.decode import read
from ray_slo.record.encode import Lines
from ray_slo.record.rows import Recording, Start
from ray_slo.simulation import Gamma, Poisson, Workload, simulate, simulate_application
from ray_slo.simulation.rehearsal import rehearse
from ray_slo.simulation.replay import replay

LINE = LatencyProfile.linear(0.002, 0.01, 16)
DEFERRED, EAGER = Setting("deferred", {}), Setting("eager", {})


def a_model(name: str, slo_s: float = 0.08, *accuracies: float) -> Model:
    """The i-th variant takes 1 + i / 2 times as long."""
    variants = tuple(
        Variant(
            f"{name}{i}",
            {"default": LatencyProfile([(1 + i / 2) * t for t in LINE.table])},
            accuracy,
        )
        for i, accuracy in enumerate(accuracies or (None,))
    )
    return Model(name, slo_s, variants)


def traffic(cluster: Cluster, rate: float, duration_s: float, seed: int = 0) -> Traffic:
    drawn = Workload(arrivals=Gamma(rate=rate, shape=0.3)).generate(
        cluster, duration_s, np.random.default_rng(seed)
    )
    roots = tuple((m, m) for m in drawn.models)
    return Traffic(roots, drawn.model, drawn.arrival + 50, drawn.deadline + 50)


def problem(rate: float = 300.0, **changes: Any) -> Rehearsal:
    cluster = Cluster.uniform([a_model("x"), a_model("y")], 2)
    made = Rehearsal(1, cluster, traffic(cluster, rate, 6.0), [DEFERRED, EAGER])
    return replace(made, **changes)


def test_it_gives_what_a_simulation_gives() -> None:
    asked = problem(900.0)
    found = rehearse(asked)
    assert sum(found.stretches) == sum(found.arrived) == len(asked.traffic)
    assert found.roots == ("x", "y")
    assert found.at == asked.traffic.arrival[-1]
    for name, score in found.scores.items():
        workload = Workload(arrivals=Gamma(rate=900.0, shape=0.3))
        report = simulate(name, asked.cluster, workload, duration_s=6.0)
        assert not score.error
        assert sum(score.good) == pytest.approx(sum(score.value))
        bad = 1 - sum(score.good) / sum(found.stretches[: len(score.value)])
        # Other arrivals of the same process.
        assert bad == pytest.approx(report.summary()["bad_rate"], abs=0.05), name
    whole = found.scores["deferred"]
    assert len(whole.value) == len(found.stretches) == 12
    assert whole.p50_s is not None and 0.012 < whole.p50_s < 0.08


def test_the_last_request_counts_too() -> None:
    """A request comes every second and takes 12 ms of an idle worker, less than the rise leaves."""
    cluster = Cluster.uniform([a_model("x")], 1)
    arrival = np.arange(24.0)
    calm = Traffic((("x", "x"),), np.zeros(24, np.int64), arrival, arrival + 0.08)
    found = rehearse(Rehearsal(1, cluster, calm, [DEFERRED, EAGER]))
    assert found.stretches == (6,) * 12  # it is played three times
    assert found.arrived == (72,)
    assert (found.at, found.rate) == (23.0, 24 / 23)
    for score in found.scores.values():
        assert (score.value, score.good, score.accuracy) == ((6.0,) * 12, (72,), (100.0,))
        assert score.p50_s == pytest.approx(0.012)
    assert found.scores["eager"].fall == 0.0


def test_what_came_before_warms_up_and_does_not_count() -> None:
    """A calm load that follows an overload has its queues for a while."""
    asked = problem(600.0)
    calm, crowd = asked.traffic, traffic(asked.cluster, 4000.0, 0.5, seed=1)
    both = Traffic(
        calm.roots,
        np.concatenate([crowd.root, calm.root]),
        np.concatenate([crowd.arrival - 0.5, calm.arrival]),
        np.concatenate([crowd.deadline - 0.5, calm.deadline]),
        before=len(crowd),
    )
    after = rehearse(replace(asked, traffic=both))
    alone = rehearse(asked)
    assert sum(after.stretches) == sum(after.arrived) == sum(alone.stretches)
    assert (after.at, after.rate) == (alone.at, alone.rate)
    queued, calm_value = (
        found.scores["eager"].value[0] / found.stretches[0] for found in (after, alone)
    )
    assert queued < calm_value - 0.1


def test_the_last_requests_do_not_find_idle_workers() -> None:
    """In an overload the last stretch is as bad as those before it."""
    found = rehearse(problem(3000.0, settings=[DEFERRED]))
    shares = [s / n for s, n in zip(found.scores["deferred"].value, found.stretches, strict=True)]
    assert shares[-1] < np.mean(shares[3:-1]) + 0.08


def test_the_hopeless_are_given_up_but_not_the_one_in_force() -> None:
    """Eager collapses in overload. Far behind, it is not tried under a rise of the load."""
    found = rehearse(problem(1800.0))
    assert len(found.scores["deferred"].value) == 12
    assert len(found.scores["eager"].value) < 12
    assert found.scores["eager"].p50_s is found.scores["eager"].fall is None
    found = rehearse(problem(1800.0, settings=[EAGER, DEFERRED]))
    assert len(found.scores["eager"].value) == 12


def test_a_calm_system_is_rehearsed_with_a_part_of_the_traffic() -> None:
    """As long as the current setting loses nothing in that part."""
    asked = problem(100.0, calm=True)
    calm = rehearse(asked)
    whole = rehearse(replace(asked, calm=False))
    assert (len(calm.stretches), len(whole.stretches)) == (4, 12)
    assert calm.stretches == whole.stretches[:4]
    assert sum(calm.arrived) == sum(calm.stretches)
    assert (calm.rate, calm.at) == (whole.rate, whole.at)
    for label, score in calm.scores.items():
        assert score.value == whole.scores[label].value[:4]
        assert sum(score.good) == sum(score.value)
        assert score.p50_s == pytest.approx(whole.scores[label].p50_s, rel=0.2)
    busy = rehearse(replace(problem(1800.0), calm=True))
    assert len(busy.stretches) == 12


def test_variants_that_are_not_the_best_are_a_loss() -> None:
    cluster = Cluster.uniform([a_model("x", 0.1, 60.0, 80.0)], 4)
    for setting, stretches in (
        (Setting("price", {}), 4),
        (Setting("eager", {}, quickest=True), 12),
    ):
        asked = Rehearsal(1, cluster, traffic(cluster, 50.0, 8.0), [setting], calm=True)
        assert len(rehearse(asked).stretches) == stretches


@pytest.mark.slow
def test_settings_that_may_collapse_are_tried_under_a_rise_of_the_load() -> None:
    """Eager has 1.5 times the load at 100 requests/s and loses nothing, and much at 500."""
    few, many = (rehearse(problem(rate)).scores for rate in (100.0, 500.0))
    assert few["eager"].fall == pytest.approx(0.0, abs=0.005)
    assert many["eager"].fall > 0.05
    assert few["deferred"].fall is None
    # It is not tried where there is nothing to compare it with.
    assert rehearse(problem(100.0, settings=[EAGER])).scores["eager"].fall is None


def test_accuracy_counts() -> None:
    """What runs the better variant has more value at low load; all is in time either way."""
    cluster = Cluster.uniform([a_model("x", 0.1, 60.0, 80.0)], 4)
    settings = [Setting("price", {}), Setting("eager", {}, quickest=True)]
    found = rehearse(Rehearsal(1, cluster, traffic(cluster, 100.0, 4.0), settings))
    price, quickest = found.scores.values()
    assert price.accuracy[0] == pytest.approx(80.0, abs=1.0)
    assert quickest.accuracy[0] == pytest.approx(60.0)
    assert sum(price.value) / sum(price.good) == pytest.approx(price.accuracy[0] / 100)


def test_a_setting_that_fails_is_reported() -> None:
    found = rehearse(problem(settings=[DEFERRED, Setting("deferred", {"objective": "none"})]))
    assert "objective must be one of" in found.scores["deferred objective=none"].error
    assert found.scores["deferred objective=none"].value == ()
    assert len(found.scores["deferred"].value) == 12


def test_measured_pace_and_noise() -> None:
    """Workers twice as slow as their profiles make requests late."""
    told = rehearse(problem(400.0)).scores["deferred"]
    pace = {(f"{m}0", "default"): 2.0 for m in "xy"}
    slow = rehearse(problem(400.0, pace=pace)).scores["deferred"]
    noisy = rehearse(problem(400.0, noise=0.3)).scores["deferred"]
    assert sum(told.good) > sum(noisy.good) > sum(slow.good)


def test_sizes() -> None:
    cluster = Cluster.uniform([a_model("x")], 2)
    asked = traffic(cluster, 100.0, 4.0)
    asked = replace(asked, size=np.arange(len(asked)) % 5 + 1)
    settings = [DEFERRED, Setting("kairos", {"batch": True})]
    found = rehearse(Rehearsal(1, cluster, asked, settings))
    assert all(len(s.value) == 12 and not s.error for s in found.scores.values())


TREE = Tree(
    "pages",
    (TreeTask("find", "find", None, {"find0": {"read": 2.0}}), TreeTask("read", "read", "find")),
    {"": 0.2},
)


@pytest.mark.slow
def test_pipelines_and_models_beside_them() -> None:
    """By what clients asked for; a page is in time when all that it made is."""
    cluster = Cluster.uniform([a_model("find"), a_model("read"), a_model("z")], 3)
    n = 300
    arrival = np.arange(n) / 150
    roots = (("find", "find"), ("z", "z"))
    asked = Rehearsal(
        1,
        cluster,
        Traffic(roots, np.arange(n) % 2, arrival, arrival + 0.2),
        [DEFERRED, EAGER],
        [TREE.to_json()],
    )
    found = rehearse(asked)
    assert found.arrived == (450, 450)  # few requests are played three times
    calm = found.scores["deferred"]
    assert not calm.error and min(calm.good) > 290
    # A page makes far more than the tree says.
    crowded = rehearse(replace(asked, factors={("find0", "read"): 30.0})).scores["deferred"]
    assert crowded.good[0] < calm.good[0]


def test_it_is_a_pure_function() -> None:
    one, other = (rehearse(problem(100.0, noise=0.1)) for _ in range(2))
    assert one == other
    assert Rehearsed.from_json(json.loads(json.dumps(one.to_json()))) == one


# -- hosted by the engine ----------------------------------------------------------------------

OVERLOAD = Workload(arrivals=Gamma(rate=2500.0, shape=0.3))
UNLIKE = Cluster.uniform(
    [
        Model("a", 0.04, (Variant("a", {"default": LatencyProfile.linear(0.0005, 0.009, 64)}),)),
        Model("c", 0.06, (Variant("c", {"default": LatencyProfile.linear(0.002, 0.02, 64)}),)),
    ],
    3,
)


@pytest.mark.slow
def test_the_engine_hosts_it_and_a_log_replays_it(tmp_path: Any) -> None:
    """Rehearsals are in the log, so nothing need be rehearsed again."""
    auto, times = Auto(), {"duration_s": 3.0, "warmup_s": 1.0}
    report = simulate(auto, UNLIKE, OVERLOAD, **times)
    guess = simulate("deferred", UNLIKE, OVERLOAD, **times)
    told = auto.story()
    assert told[0]["at"] == pytest.approx(0.6, abs=0.35)  # 4 SLOs, 200 requests, then 0.3 s
    assert told[-1]["setting"] != "deferred"
    assert report.summary()["bad_rate"] < guess.summary()["bad_rate"] - 0.02
    lines = Lines(tmp_path, "auto", Start.of("auto", {}))
    recording = Recording(Auto(), lines)
    again = simulate(recording, UNLIKE, OVERLOAD, **times)
    assert again.requests.equals(report.requests)
    lines.close()
    (life,) = read(tmp_path)
    found = replay(life)
    assert found.identical and found.rounds > 1000
    events = [name for r in life.rounds() for name, _ in r.events]
    assert events.count("solved") == len(recording.story()) == len(told)


@pytest.mark.slow
def test_predictions_are_what_is_measured() -> None:
    """Under a steady load, in the mean."""
    auto = Auto()
    workload = Workload(arrivals=Poisson(rate=2500.0))
    simulate(auto, UNLIKE, workload, duration_s=5.0, latency_noise=0.1)
    told = [t for t in auto.story() if t["measured_bad"] is not None][1:]
    predicted = float(np.mean([t["predicted_bad"] for t in told]))
    assert predicted == pytest.approx(float(np.mean([t["measured_bad"] for t in told])), abs=0.03)


@pytest.mark.slow
def test_pipelines_are_hosted() -> None:
    models = [
        planning.Model(m, (planning.Variant(f"{m}0", 80.0, {"default": LINE}),))
        for m in ("find", "read")
    ]
    asked = planning.Problem(tuple(models), (TREE,), {}, (planning.Kind("default", 3, 3),))
    auto: Any = policy_for("auto", {}, (TREE,))
    found = simulate_application(
        asked,
        {"pages": Workload(arrivals=Poisson(rate=120.0))},
        policy=auto,
        planner=None,
        duration_s=3.0,
    )
    assert found.value() > 0.64  # 0.8², and 0.8 of pages without anything to read
    tried = auto.story()[-1]["tried"]
    assert len(tried) > 2 and not any("error" in t for t in tried.values())
    assert auto.expected()["pages"].accuracy == pytest.approx(66.0, abs=1.0)


def test_requests_keep_nothing_alive() -> None:
    """Traffic is bounded, however long it goes on."""
    auto = Auto(candidates=["eager"])  # nothing to rehearse
    auto.cluster_changed(0.0, UNLIKE)
    for i in range(10_000):
        now = i / 1000
        auto.requests_arrived(now, [Request(i, "a", now, now + 0.04)])
        auto.decide(now)
    assert auto._recent._came - auto._recent._gone <= 4_501
