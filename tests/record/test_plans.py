"""The planners' table of a decision log: rows are read as they were written, in order of time."""

import json
from functools import partial

import pyarrow.parquet as pq
import pytest

from benchmarks.loki import terms as loki
from benchmarks.loki.terms import Problem, Task, Variant
from ray_slo.core import LatencyProfile
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.record import decode as decision_log
from ray_slo.record.plans import FOLDER, Outline, PlanLines, Planned, Planner, read
from ray_slo.record.rows import Start
from ray_slo.simulation import Trace, Workload, simulate_application
from ray_slo.simulation.application import auto_brain
from ray_slo.simulation.replay import replay

STEP = LatencyProfile.linear(0.01, 0.02, 8)
TASKS = (
    Task("find", (Variant("f", 90.0, STEP, {"name": 1.0}),)),
    Task("name", (Variant("n", 80.0, STEP),), "find"),
)
PROBLEM = Problem(TASKS, demand=20.0, workers=4, slo_s=0.4)


class Fails(AutoBrain):
    """Fails to answer the second question."""

    asked = 0

    @property
    def solve(self):
        self.asked += 1
        if self.asked == 2:
            raise RuntimeError("no licence")
        return super().solve


def test_a_simulated_planner_is_logged_and_the_run_replays(tmp_path):
    report = simulate_application(
        loki.as_auto(PROBLEM),
        {"find": Workload(arrivals=Trace(rates=[20, 150, 150, 20], interval_s=3.0))},
        policy="pipeline",
        planner=partial(auto_brain, brain=Fails),
        interval_s=4.0,
        solve_s=0.25,
        load_s=0.3,
        start_s=0.2,
        log=tmp_path,
    )
    assert (report.meta["policy"], report.meta["planner"]) == ("Pipeline", "Fails")
    (planner,) = read(tmp_path)
    assert planner.start.policy == "Fails"
    asked = report.plans
    assert [p.at for p in planner.plans] == asked.asked_s.tolist()
    assert [p.demand for p in planner.plans] == asked.demand.tolist()
    first, failed, *later = planner.plans
    rise = next(p for p in later if p.changes)
    assert first.trigger == "first plan"
    assert list(first.changes) == ["worker: – → 2 workers", "f: 0 → 1 workers", "n: 0 → 1 workers"]
    assert failed.error == "planning failed: RuntimeError: no licence"
    assert (failed.plan, failed.changes) == ({}, ())
    assert failed.took_s is None
    assert rise.trigger == "period"  # after a failure, only that
    assert rise.took_s == pytest.approx(0.25)
    assert "worker: 2 → " in rise.changes[0]
    assert rise.targets == {"worker": len(rise.workers)}
    assert set(rise.workers.values()) == {"f", "n"}
    assert rise.plan["assignments"][0]["task"] == "find"
    assert rise.inputs["workers"] == {"worker": 2}
    assert rise.inputs["factors"] == {"f": {"name": pytest.approx(1.0, abs=0.3)}}
    assert "req/s on" in rise.why
    # The policy was told of workers that came, and what they are to run, as it happened.
    (life,) = decision_log.read(tmp_path)
    assert life.start.about["clock"] == planner.start.about["clock"]
    replayed = replay(life)
    assert replayed.identical, replayed.difference
    assert replayed.actions > 200


def test_what_is_written_is_read(tmp_path):
    start = Start("loki", {}, {"clock": "c"})
    lines = PlanLines(tmp_path, "p", start)
    plans = [
        Planned(
            *(1.0, "period", 3.5, {"workers": {"cpu": 2}}, {"cpu": 3}, {"step": "accuracy"}),
            *({"w": "v", "u": None}, ("cpu: 2 → 3 workers",), "so", "a lot", "", 0.5, 1e9),
            {"d": -2.0},
        ),
        Planned(2.0, "worker lost", error="no licence"),
    ]
    for plan in plans:
        lines(plan)
    path = lines.close()
    assert path.parent.name == FOLDER
    (planner,) = read(tmp_path)
    assert (planner.name, planner.start, planner.plans) == ("p", start, plans)
    with pytest.raises(ValueError, match="no decision log here"):
        decision_log.read(tmp_path)
    assert read(tmp_path / "elsewhere") == []
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"\.plans\.parquet: no plan log, or cut short"):
        read(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = PlanLines(tmp_path, "p", Start(None, {}, {})).close()
    table = pq.read_table(path)
    about = json.dumps({"format": "else", "scheduler": "p", "sequence": 0})
    pq.write_table(table.replace_schema_metadata({"ray_slo": about}), path)
    with pytest.raises(ValueError, match="must be 'ray-slo/plan-log/1', got 'else'"):
        read(tmp_path)


def test_changes_are_told_by_name():
    old = Outline.of_assignments({"gpu": 2}, [("s", 4, 1), ("t", 1, 1)])
    assert old.changes(old) == []
    new = Outline.of_assignments({"gpu": 3, "cpu": None}, [("s", 8, 1), ("l", 2, 1), ("l", 4, 1)])
    assert new.changes(old) == [
        "gpu: 2 → 3 workers",
        "l: 0 → 2 workers",
        "t: 1 → 0 workers",
        "s: batches of 4 → 8",
    ]
    moved = Outline({"a": 1}, groups={"m": "a", "n": "b"})
    assert moved.changes(Outline({"a": 1}, groups={"m": "b", "n": "b"})) == ["m: b → a"]


def test_times_are_put_on_the_schedulers_axis_or_left_alone():
    plans = [Planned(10.0, "period", clocks={"other": 5.0}), Planned(90.0, "period", clocks={})]
    plans.append(Planned(100.0, "period", clocks={"other": 5.1}))
    planner = Planner("p", Start("loki", {}, {"clock": "mine"}), plans)
    assert planner.shift("mine", 50.0) == 0.0
    assert planner.shift("other", 20.0) == 5.0
    assert planner.shift("other", 85.0) == 5.1  # nearer, as clocks drift
    assert planner.shift("third", 20.0) is None
    assert planner.shift(None, 20.0) is None  # a log from before there were plans in it
