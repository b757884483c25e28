"""The writer of the decision log has bounded memory, never blocks, and reports what it lost."""

import errno
import time

import pytest

from ray_slo.core import BatchOutcome, Cluster, Decision, LatencyProfile, Model, Request, Variant
from ray_slo.policies import make_policy
from ray_slo.record.decode import read
from ray_slo.record.plans import Planned
from ray_slo.record.plans import read as read_plans
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.watch import log_writer as decision_log
from ray_slo.serve.watch.log_writer import (
    Clocks,
    DecisionLog,
    PlanLog,
    clock_id,
)
from ray_slo.serve.watch.logs import open_log, open_plan_log
from ray_slo.simulation.replay import recorded, replay, tape, what_if
from tests.waiting import until

CLUSTER = Cluster.uniform(
    [Model("m", 1.0, (Variant("v", {"default": LatencyProfile([0.1, 0.15])}),))], 2
)


def decide(policy, count, begin=0):
    """So many requests, each on its own, one batch after the other."""
    if not begin:
        policy.cluster_changed(0.0, CLUSTER)
    for i in range(begin, begin + count):
        policy.requests_arrived(float(i), [Request(i, "m", float(i), i + 1.0)])
        (sent,) = policy.decide(float(i)).actions
        outcome = BatchOutcome(sent.batch_id, sent.requests, float(i), i + 0.1)
        policy.batch_finished(i + 0.2, sent.worker, outcome)
        assert policy.decide(i + 0.2) == Decision()


def logged(folder, count, **options):
    log = DecisionLog(folder, "test", **options)
    decide(log.recorded(make_policy("eager"), "eager", {}, 0.0), count)
    log.close(60.0)
    assert not log._thread.is_alive()
    return log.status()


def test_what_was_decided_is_on_disk(tmp_path):
    status = logged(tmp_path / "new" / "folder", 50, models=["m"])
    assert (status["rows_lost"], status["error"]) == (0, "")
    (life,) = read(tmp_path / "new" / "folder")
    assert life.whole
    assert life.start.about["models"] == ["m"]
    assert life.start.about["wall_at"] == pytest.approx(time.time(), abs=60)
    assert replay(life).identical
    assert recorded(life).count("good") == 50
    assert (
        status["rows"] == 1 + 2 + 50 * 5
    )  # start, cluster; arrived, decide, dispatch, finished, decide


def test_the_file_is_whole_while_it_is_written(tmp_path):
    log = DecisionLog(tmp_path, "test", flush_s=0.01)
    policy = log.recorded(make_policy("eager"), "eager", {}, 0.0)
    seen = [0]

    def look():
        if files := list(tmp_path.glob("*.parquet")):
            assert len(files) == 1
            (life,) = read(tmp_path)
            assert replay(life).identical
            if any(name == "requests_arrived" for r in life.rounds() for name, _ in r.events):
                seen.append(recorded(life).count())
        return seen[-1]

    for i in range(5):
        decide(policy, 10, 10 * i)
        until(lambda n=10 * (i + 1): look() >= n)
    log.close(60.0)
    assert sorted(seen) == seen


def test_old_files_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(decision_log._Log, "_file_rows", 500)
    monkeypatch.setattr(decision_log, "_SLICE_S", 1e-4)  # or one slice has it all
    elsewhere = tmp_path / "notes.parquet"
    elsewhere.write_bytes(b"not ours")
    status = logged(tmp_path, 1500, max_mb=0.08)
    assert status["rows_lost"] == 0
    files = list(tmp_path.glob("*.decisions.parquet"))
    assert len(files) > 1
    assert sum(f.stat().st_size for f in files) <= 80_000
    assert elsewhere.exists()
    (life,) = read(tmp_path)
    assert (life.begins, life.lost) == (False, ())
    with pytest.raises(ValueError, match="the beginning is gone"):
        replay(life)
    left = tape(life)
    assert 0 < len(left.requests) < 1500
    assert recorded(left).count("good") >= len(left.requests) - 1
    assert what_if(left, "deferred").count("good") == len(left.requests)


def test_a_full_queue_loses_rows_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(decision_log, "_QUEUE_ROWS", 100)
    monkeypatch.setattr(DecisionLog, "_encode_some", lambda self: time.sleep(0.01))  # it is stuck
    log = DecisionLog(tmp_path, "test")
    policy = log.recorded(make_policy("eager"), "eager", {}, 0.0)
    decide(policy, 100)
    lost = log.status()["rows_lost"]
    assert 200 < lost < 500
    monkeypatch.undo()
    until(lambda: log._queued == log._taken)
    decide(policy, 10, 100)
    log.close(60.0)
    (life,) = read(tmp_path)
    assert life.lost == (lost,)
    with pytest.raises(ValueError, match=f"{lost} rows were not kept"):
        replay(life)


def test_a_disk_that_fails_costs_no_decision(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    status = logged(in_the_way / "folder", 200)
    assert "NotADirectoryError" in status["error"]
    assert (status["rows"], status["rows_lost"]) == (0, 1 + 2 + 200 * 5)


@pytest.mark.parametrize("file_rows", [500, 20_000])
def test_a_log_goes_on_when_the_disk_is_back(tmp_path, monkeypatch, caplog, file_rows):
    """A folder that is gone, and a disk that is full for a while: what fits is kept until then."""
    monkeypatch.setattr(decision_log._Log, "_file_rows", file_rows)
    folder, away = tmp_path / "log", tmp_path / "away"
    log = DecisionLog(folder, "test", flush_s=0.01)
    policy = log.recorded(make_policy("eager"), "eager", {}, 0.0)
    decide(policy, 20)
    until(lambda: log.status()["rows"] == 3 + 20 * 5)
    folder.rename(away)
    folder.write_text("in the way")
    decide(policy, 300, 20)
    until(lambda: log._queued == log._taken)
    until(lambda: log.status()["error"])
    assert log.status()["rows"] == 3 + 20 * 5
    folder.unlink()
    away.rename(folder)
    decide(policy, 20, 320)
    until(lambda: not log.status()["error"])
    log.close(60.0)
    assert len([r for r in caplog.records if "is tried again" in r.message]) == 1
    status = log.status()
    assert status["error"] == ""
    (life,) = read(folder)
    arrivals = [a for r in life.rounds() for n, a in r.events if n == "requests_arrived"]
    if file_rows > 3 + 340 * 5:
        assert (status["rows_lost"], life.lost) == (0, ())
        assert replay(life).identical
        assert len(arrivals) == 340
    else:
        assert life.lost == (status["rows_lost"],)
        assert 500 <= status["rows_lost"] <= 1600
        assert [now for now, _ in arrivals][-20:] == [float(i) for i in range(320, 340)]
    assert not list(folder.glob("*.tmp"))


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    def full(table, path, **options):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    log = DecisionLog(tmp_path, "test", flush_s=0.01)
    policy = log.recorded(make_policy("eager"), "eager", {}, 0.0)
    decide(policy, 5)
    until(lambda: "No space left" in log.status()["error"])
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    log.close(60.0)
    assert replay(*read(tmp_path)).identical
    assert log.status()["rows_lost"] == 0


def test_the_specification(tmp_path):
    model = {"callable": "tests.serve.scheduler.test_scheduler:Fifo", "latency_slo_ms": 100}
    assert open_log(parse_spec({"models": {"m": model}}), "e") is None
    asked = {"dir": str(tmp_path), "max_mb": 3}
    spec = parse_spec({"models": {"m": model}, "decision_log": asked, "name": "digits"})
    assert parse_spec({"models": {"m": model}, "decision_log": "d"}).decision_log.dir == "d"
    log = open_log(spec, "e0e0")
    log.close(60.0)
    assert log.status()["name"].endswith("-digits-e0e0")
    for wrong, match in (
        ({"dir": ""}, r"decision_log\.dir"),
        ({"dir": "d", "max_mb": 0}, r"decision_log\.max_mb"),
        ({"dir": "d", "max_gb": 1}, r"decision_log\.max_gb: unknown key.*valid keys are dir"),
        ({}, r"decision_log\.dir: required"),
    ):
        with pytest.raises(ValueError, match=match):
            parse_spec({"models": {"m": model}, "decision_log": wrong})


def plans_of(folder):
    return [p for planner in read_plans(folder) for p in planner.plans]


def test_a_planners_table_is_beside_the_log(tmp_path):
    logged(tmp_path, 5)
    log = PlanLog(tmp_path, "plan", models=["m"])
    log.begin("loki", {}, 1.0)
    log.planned(Planned(2.0, "first plan", 7.0, changes=["cpu: – → 2 workers"], why="so"))
    log.planned(Planned(3.0, "period", error="no licence"))
    log.planned(Planned(4.0, "period", inputs={"odd": {1.5}}))
    log.close(60.0)
    assert log.status()["error"] == ""
    first, failed, more = plans_of(tmp_path)
    assert (first.at, first.demand, first.changes) == (2.0, 7.0, ("cpu: – → 2 workers",))
    assert first.wall_at == pytest.approx(time.time(), abs=60)
    assert (failed.error, failed.changes) == ("no licence", ())
    assert more.inputs == {"odd": "{1.5}"}
    assert len(read(tmp_path)) == 1
    assert read(tmp_path)[0].start.about["clock"] == clock_id()


def test_the_planners_table_is_bounded_and_readable_file_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(decision_log.PlanLog, "_file_rows", 20)
    log = PlanLog(tmp_path, "plan", max_mb=0.06, flush_s=0.0)
    log.begin("loki", {}, 0.0)
    for i in range(60):
        log.planned(Planned(float(i), "period", why="x" * 50))
        if i % 20 == 19:
            until(lambda n=i + 1: log.status()["rows"] > n)
    log.close(60.0)
    files = sorted((tmp_path / "_plans").glob("*.plans.parquet"))
    assert sum(f.stat().st_size for f in files) <= 60_000
    (planner,) = read_plans(tmp_path)
    assert planner.start.policy == "loki"
    assert [p.at for p in planner.plans][-1] == 59.0
    # One bound for all that is in the folder.
    monkeypatch.setattr(decision_log._Log, "_file_rows", 500)
    monkeypatch.setattr(decision_log, "_SLICE_S", 1e-4)
    logged(tmp_path, 1500, max_mb=0.05)
    assert sum(f.stat().st_size for f in tmp_path.rglob("*.parquet")) <= 50_000
    assert len(plans_of(tmp_path)) < len(planner.plans)


def test_a_planner_goes_on_without_a_log(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    log = PlanLog(in_the_way / "folder", "plan", flush_s=0.1)
    log.begin("loki", {}, 0.0)
    until(lambda: log.status()["error"])
    log.planned(Planned(1.0, "period"))
    assert "NotADirectoryError" in log.status()["error"]
    log.close(60.0)
    assert log.status()["rows_lost"] == 2
    model = {"callable": "tests.serve.scheduler.test_scheduler:Fifo", "latency_slo_ms": 100}
    assert open_plan_log(parse_spec({"models": {"m": model}}), "e") is None


def test_clocks_of_other_machines():
    clocks = Clocks()
    clocks.heard(clock_id(), 5.0, 5.2)
    assert clocks.ahead() == {}  # our own
    # It is 100 s ahead; messages took 30, 2 and 10 ms.
    for sent, way in ((1.0, 0.03), (2.0, 0.002), (3.0, 0.01)):
        clocks.heard("other", sent + 100.0, sent + way)
    assert clocks.ahead() == {"other": pytest.approx(99.998)}
