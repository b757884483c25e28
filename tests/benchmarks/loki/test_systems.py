"""Figures of a day of Loki and its peers, on a small made-up pipeline."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from benchmarks.loki.systems import (
    Day,
    compare,
    figures,
    planned_for,
    plot_days,
    problem,
    windows,
)
from benchmarks.loki.terms import Task, Variant
from ray_slo.core import LatencyProfile
from ray_slo.simulation import ApplicationReport

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


def test_workers_that_break_before_they_make_lose_more():
    day = Day("small", problem(TASKS, 0, workers=5), [60.0, 120.0, 60.0, 120.0], 8.0)
    made, broken = (
        day.run("ours", 0, make_before_break=first, load_s=2.0) for first in (True, False)
    )
    assert broken.plans.swaps.sum() > 0
    assert broken.value() < made.value() - 0.01


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


def test_windows_of_a_run():
    """Frames: ok, late, dropped, pending, and ok without any request below the root."""
    report = ApplicationReport(
        {"duration_s": 20.0},
        {
            "arrival_s": np.array([0.0, 2.0, 4.0, 12.0, 14.0]),
            "deadline_s": np.array([5.0, 7.0, 9.0, 17.0, 19.0]),
            "end_s": np.array([5.0, 7.5, 6.0, np.nan, 15.0]),
            "dropped": np.array([False, False, True, False, False]),
        },
        {},
        {"started_s": np.array([1.0, 8.0]), "finished_s": np.array([5.0, 14.0])},
        {"frame": np.array([0, 0, 1, 4]), "accuracy": np.array([80.0, 50.0, 80.0, 90.0])},
        [],
        {"cpu": [(0.0, 1), (10.0, 3)], "gpu": [(0.0, 2), (4.0, 0)]},
    )
    assert windows(report, 15.0).fillna(-1).to_numpy().tolist() == [
        pytest.approx([0, 5 / 15, 3 / 5, 77.5, (12 + 6 + 15) / 15, 10 / 15]),
        pytest.approx([15, 0, -1, -1, 3, 0]),
    ]
