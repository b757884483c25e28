"""Figures of a day of Loki and its peers, on a small made-up pipeline."""

from dataclasses import replace

import pandas as pd
import pytest

from benchmarks.loki.systems import Day, compare, figures, planned_for, plot_days, problem
from benchmarks.loki.terms import Task, Variant
from ray_slo.core import LatencyProfile

TASKS = (
    Task("detect", (Variant("d", 90.0, LatencyProfile.linear(0.01, 0.01, 8), {"name": 2.0}),)),
    Task(
        "name",
        (
            Variant("large", 90.0, LatencyProfile.linear(0.02, 0.01, 8)),
            Variant("small", 60.0, LatencyProfile.linear(0.004, 0.01, 8)),
        ),
        "detect",
    ),
)


def test_headroom_leaves_room_in_the_capacity():
    asked = problem(TASKS, 0)
    most = planned_for(asked, 100.0)
    assert replace(asked, demand=most).planned_demand <= 100
    assert replace(asked, demand=most + 1.5).planned_demand > 100
    assert planned_for(replace(asked, headroom_quantile=None), 100.0) == pytest.approx(100)


def test_figures_weigh_frames_by_demand_and_accuracy_by_what_was_in_time():
    windows = pd.DataFrame(
        {
            "demand": [10.0, 30.0, 99.0],
            "violation_ratio": [0.0, 0.5, 1.0],
            "accuracy": [90.0, 60.0, 0.0],
            "workers": [2.0, 4.0, 9.0],
        }
    )
    made = figures(windows, windows.index < 2)
    assert made["demand"] == 20
    assert made["violations"] == pytest.approx(100 * 15 / 40)
    assert made["accuracy"] == pytest.approx((10 * 90 + 15 * 60) / 25)
    assert made["servers"] == 3


def test_a_day(tmp_path):
    asked = problem(TASKS, 0, workers=5)
    day = Day("small", asked, [15.0, 120.0, 120.0, 15.0], 10.0)
    rows = compare(day, 0, {"Proteus: servers, up to": 2.67})
    value = {(r.case, r.metric): r.ours for r in rows}
    for phase in ("whole day", "hardware scaling suffices", "accuracy scaling"):
        for system in ("ours", "InferLine", "Proteus"):
            assert value[f"small: {phase} · {system}", "demand"] > 0
    peak = "small: peak, at least 90 %"
    assert value[f"{peak} · InferLine", "violations"] > value[f"{peak} · ours", "violations"]
    # 81 %, and 90 % for the frames without items, one in e².
    assert value[f"{peak} · InferLine", "accuracy"] == pytest.approx(82.2, abs=0.5)
    assert value[f"{peak} · ours", "accuracy"] < 80
    assert value["small: whole day · Proteus", "servers"] == 5
    assert value["small: peers over ours · Proteus", "servers, off-peak"] > 1
    paper = [r.paper for r in rows if r.metric == "servers, up to"]
    assert paper == [None, 2.67]
    assert [p.name for p in plot_days(rows, tmp_path)] == ["small.png"]
