"""Parts of the RAMSIS programs, on made-up profiles; and the published data."""

from __future__ import annotations

import csv
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.data import FOLDER, published
from benchmarks.peers.central import Offered
from benchmarks.peers.jellyfish import Jellyfish
from benchmarks.peers.model_switching import ModelSwitching, Static, profile_responses
from benchmarks.ramsis.fig5 import fewer
from benchmarks.ramsis.systems import (
    HARDWARE,
    JELLYFISH,
    RAMSIS,
    SWITCHING,
    cluster,
    constant,
    figures,
    front,
    gains,
    greedy,
    image_task,
    interpolated,
    measure,
    ours,
    ramsis,
    read_variants,
    rows_of,
    twitter,
)
from ray_slo.core import LatencyProfile, Request, Variant
from ray_slo.policies import make_policy
from ray_slo.simulation import simulate
from tests.policies.contract import Script, make_cluster, operation, worker_kind
from tests.policies.harness import Host

FAST = LatencyProfile.linear(0.01, 0.01, 16)
SLOW = LatencyProfile.linear(0.02, 0.02, 16)
VARIANTS = [Variant("fast", {HARDWARE: FAST}, 70.0), Variant("slow", {HARDWARE: SLOW}, 80.0)]
HERE = cluster(VARIANTS, 0.2, 2)

CSV = """model,accuracy,batch_size,p50_ms,p95_ms,p99_ms,mean_ms,std_ms
good,80,1,20,30,40,21,1
good,80,2,30,25,50,31,1
quick,70,1,10,12,13,10,1
quick,70,2,15,99,20,15,1
quick,70,3,20,22,23,21,1
worse,60,1,15,16,17,15,1
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    folder = tmp_path / "ramsis"
    folder.mkdir()
    (folder / "image_profiles.csv").write_text(CSV)
    (folder / "twitter_trace_raw.csv").write_text("time_s,qps\n0,100\n10,300\n20,200\n")
    monkeypatch.setattr("benchmarks.harness.data.FOLDER", tmp_path)
    return folder


def test_profiles_lose_their_wild_tails(data):
    variants = read_variants(data / "image_profiles.csv")
    tables = {v.name: v.profiles[HARDWARE].table for v in variants}
    assert list(tables) == ["worse", "quick", "good"]
    assert tables["good"] == pytest.approx([0.025, 0.025])  # no slower than two
    assert tables["quick"] == pytest.approx([0.012, 0.022, 0.022])
    medians = read_variants(data / "image_profiles.csv", "p50")
    assert medians[2].profiles[HARDWARE].table == pytest.approx([0.02, 0.03])


def test_the_front_is_of_accuracy_and_the_latency_of_one(data):
    assert [v.name for v in image_task()] == ["quick", "good"]
    assert [v.name for v in front(VARIANTS)] == ["fast", "slow"]


def test_interpolated_models_lie_between(data):
    made = interpolated(VARIANTS, 2.5)
    assert [v.accuracy for v in made] == [70.0, 72.5, 75.0, 77.5, 80.0]
    middle = made[2].profiles[HARDWARE].table
    assert middle == pytest.approx(
        [(a + b) / 2 for a, b in zip(FAST.table, SLOW.table, strict=True)]
    )


def test_the_trace_can_be_cut_and_shortened(data):
    assert twitter().rate == 200.0
    cut = twitter(1, 3, interval_s=2.0)
    assert (cut.rate, cut.length_s) == (250.0, 4.0)


def test_a_wrong_name_is_told_the_right_ones():
    with pytest.raises(FileNotFoundError, match=r"'x/y\.csv'; there are .*loki/branching\.csv, "):
        published("x/y.csv")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*/*.csv")), ids=lambda file: file.stem)
def test_published_figures_are_whole(file):
    """No empty cell, no negative figure, and the README says where they are from."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    for row in rows:
        assert all(row.values())
        figures = [v for column, v in row.items() if column.endswith(("_ms", "_s", "qps"))]
        assert all(float(figure) >= 0 for figure in figures)
    assert f"`{file.parent.name}/{file.name}`" in (FOLDER / "README.md").read_text()


# Peers -------------------------------------------------------------------------------------------


PEERS: list[tuple[str, dict[str, Any]]] = [
    ("benchmarks.peers.jellyfish:Jellyfish", {}),
    ("benchmarks.peers.jellyfish:Jellyfish", {"load": 50.0}),
    ("benchmarks.peers.greedy:Greedy", {}),
    ("benchmarks.peers.model_switching:ModelSwitching", {"limits": {"a1": 20.0, "b0": 5.0}}),
]


@pytest.mark.parametrize(("name", "kwargs"), PEERS, ids=str)
@settings(max_examples=10)
@given(
    kinds=st.lists(worker_kind, max_size=3),
    control_s=st.sampled_from([0.0, 0.004]),
    operations=st.lists(operation, min_size=10, max_size=60),
)
def test_contract(
    name: str,
    kwargs: dict[str, Any],
    kinds: list[tuple[str, int]],
    control_s: float,
    operations: list[tuple[Any, ...]],
) -> None:
    host = Host(
        lambda: make_policy(name, kwargs),
        make_cluster(kinds, control_s=control_s),
        now=1000.0,
        strict=False,
    )
    script = Script(host)
    for op in operations:
        script.do(*op)
    host.advance(host.now + 1e3)  # they serve late
    assert not host.waiting
    host.check_replay()


def offered(workers: int = 1) -> Offered:
    (model,) = HERE.models.values()
    return Offered(model, HARDWARE, frozenset(["fast", "slow"]), workers)


@pytest.mark.parametrize(
    ("load", "choice"),
    [
        (30.0, ("slow", 4)),  # 20 + 20·b ms ≤ 100 ms allows 4, and 4 / 0.1 s = 40/s
        (38.0, ("slow", 4)),
        (39.0, ("fast", 9)),  # 5 % above it is not covered any more; 9 / 0.1 s = 90/s
        (200.0, ("fast", 16)),  # nothing covers it: as large as it can
    ],
)
def test_jellyfish_worked_example(load, choice):
    assert Jellyfish()._choose(offered(), load, 1, 0.2) == choice


def test_workers_share_the_load():
    assert Jellyfish()._choose(offered(4), 150.0, 1, 0.2) == ("slow", 4)


@cache
def limits():
    return profile_responses(HERE, loads=range(10, 201, 10), requests=1_000)


def test_profiling_finds_the_largest_load_that_meets_the_slo():
    for variant, limit in limits().items():
        late = {}
        for load in (limit, limit + 10):
            seconds = max(1_000 / load, 100 * 0.2)
            report = simulate(Static(variant), HERE, constant(load), duration_s=seconds)
            late[load] = report.bad_rate()
        assert late[limit] < 0.01 <= late[limit + 10]
    assert limits()["slow"] < limits()["fast"]


def test_a_model_that_is_too_slow_sustains_nothing():
    slow = cluster(VARIANTS, 0.03, 2)
    limits = profile_responses(slow, loads=(1, 2), requests=200)
    assert limits == {"fast": 2.0, "slow": 0.0}


def test_model_switching_follows_the_limits():
    for load, expected in ((20.0, "slow"), (50.0, "fast"), (500.0, "fast")):
        policy = ModelSwitching({"slow": 30.0, "fast": 100.0}, load=load)
        report = simulate(policy, HERE, constant(load), duration_s=1.0)
        assert set(report.batches.variant) == {expected}


def test_a_measured_load_switches_models():
    policy = ModelSwitching({"slow": 30.0, "fast": 100.0})
    host = Host(lambda: policy, HERE, strict=False)
    host.run([Request(i, "m", 0.1 * i, 0.1 * i + 0.2) for i in range(50)])
    host.run([Request(50 + i, "m", t, t + 0.2) for i in range(200) for t in [5.0 + 0.02 * i]])
    variants = [a.variant for d in host.decisions for a in d.actions]
    # 10/s and then 50/s, which a window of 64 arrivals knows after about a second.
    assert Counter(variants[:50]) == {"slow": 50}
    assert set(variants[-100:]) == {"fast"}


# Figures -----------------------------------------------------------------------------------------


def point(accuracy: float, late: float = 0.0) -> dict[str, float]:
    return {"accuracy": accuracy, "violation_rate": late}


def test_points_with_many_violations_are_left_out_and_shown_apart():
    points = {"a": {1: point(80.0), 2: point(70.0, 0.06)}, "b": {1: point(75.0, 0.05)}}
    rows = rows_of("t", points, "{:g}/s", {"a": {2: 1.5}})
    found = {(r.case, r.metric): r.ours for r in rows}
    assert found["t · a", "accuracy at 1/s"] == 80.0
    assert found["t · a", "accuracy at 2/s"] is None
    assert found["t · b", "accuracy at 1/s"] == 75.0
    assert found["t, violations · a", "late at 2/s"] == pytest.approx(6.0)
    assert found["t, points left out above · a", "accuracy, not shown, at 2/s"] == 70.0
    assert not any("left out" in case and case.endswith("b") for case, _ in found)
    assert [r.paper for r in rows if r.paper is not None] == [1.5]


def test_gains_and_saved_workers():
    points = {
        RAMSIS: {20: point(70.0, 0.5), 30: point(75.0), 40: point(80.0), 60: point(82.0)},
        JELLYFISH: {20: point(60.0, 0.5), 30: point(70.0), 40: point(72.0), 60: point(80.0)},
        SWITCHING: {60: point(83.0)},
    }
    found = {(r.case, r.metric): r.ours for r in gains("t", [points], {})}
    assert found[f"t, RAMSIS over · {JELLYFISH}", "largest gain"] == 8.0
    assert found[f"t, RAMSIS over · {JELLYFISH}", "mean gain"] == 5.0
    assert found[f"t, RAMSIS over · {SWITCHING}", "least gain"] == -1.0
    paper = {JELLYFISH: (0.0, 0.0), SWITCHING: (0.0, 0.0)}
    found = {(r.case, r.metric): r.ours for r in fewer("t", [points], paper)}
    assert found[f"t · {JELLYFISH}", "at most"] == pytest.approx(100 / 3)  # 40 for 60 workers
    assert found[f"t · {JELLYFISH}", "mean"] == pytest.approx((0 + 25 + 100 / 3) / 3)
    assert not any(SWITCHING in case for case, _ in found)


def test_measure_reports_what_satisfied_requests_got():
    measured = measure(greedy(), HERE, constant(10.0), duration_s=20.0)
    assert 79.0 < measured["accuracy"] <= 80.0
    assert measured["violation_rate"] < 0.02
    assert measured["mean_batch"] >= 1
    none = simulate(Static("slow"), cluster(VARIANTS, 0.03, 1), constant(10.0), duration_s=1.0)
    assert math.isnan(figures(none)["accuracy"])
    assert figures(none)["violation_rate"] == 1.0


@pytest.mark.parametrize("load", [40.0, 90.0])
def test_ramsis_beats_its_peers_and_keeps_its_promise(load):
    """What Figures 6 and 7 show, small: 2 workers, 2 variants, one real table per load."""
    run = {}
    for name, system in {
        "ramsis": ramsis(load),
        "ours": ours(load),
        "jellyfish": ("benchmarks.peers.jellyfish:Jellyfish", {"load": load}),
        "switching": (
            "benchmarks.peers.model_switching:ModelSwitching",
            {"limits": limits(), "load": load},
        ),
    }.items():
        run[name] = measure(system, HERE, constant(load), duration_s=30.0)
    for mine in ("ramsis", "ours"):
        assert run[mine]["violation_rate"] < 0.01
        for peer in ("jellyfish", "switching"):
            assert run[mine]["accuracy"] >= run[peer]["accuracy"] - 0.05
