"""Logs with content that no log has: `report` and `replay` name the file and what is wrong."""

import json
import math
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ray_slo.cli import app
from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.policies import make_policy
from ray_slo.record.encode import Lines
from ray_slo.record.plans import PlanLines, Planned
from ray_slo.record.rows import Recording, Start
from ray_slo.simulation import simulate
from ray_slo.simulation.workloads import Workload

CLUSTER = Cluster.uniform(
    [Model("m", 0.1, (Variant("v", {"default": LatencyProfile.linear(0.001, 0.01, 16)}),))], 2
)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The folder of a log, whose rows tests change."""
    folder = tmp_path_factory.mktemp("log")
    start = Start.of("eager", {}, wall_at=1e9, application="a", clock="c")
    lines = Lines(folder, "s", start)
    recording = Recording(make_policy("eager"), lines)
    simulate(recording, CLUSTER, Workload.poisson(300), duration_s=0.2)
    lines.close()
    plans = PlanLines(folder, "p", Start.of("auto", {}, application="a", clock="c"))
    plans(Planned(0.1, "first plan", 300.0, targets={"default": 2}, changes=["more"], wall_at=1e9))
    plans.close()
    return folder


def told(path):
    """What each command says of it."""
    for command in (
        ("report", path, "--out", path.parent / "page.html"),
        ("replay", path),
        ("replay", path, "--policy", "deferred"),
    ):
        shown = CliRunner().invoke(app, [str(word) for word in command])
        if shown.exception is not None and not isinstance(shown.exception, SystemExit):
            raise shown.exception
        yield shown.exit_code, shown.output.replace("\n", "")


def changed(file, change):
    """Write the file anew with other rows."""
    table = pq.read_table(file)
    rows = table.to_pylist()
    change(rows)
    made = pa.Table.from_pylist(rows, table.schema)
    pq.write_table(made, file)


def copied(log, tmp_path, what="s-000000.decisions.parquet"):
    for file in log.rglob("*.parquet"):
        target = tmp_path / "log" / file.relative_to(log)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    return next((tmp_path / "log").rglob(what))


def every(kind, **values):
    """Set fields of all rows of a kind."""

    def change(rows):
        for row in rows:
            if row["what"] == kind:
                row.update(values)

    return change


def said(what, alter):
    """Change the JSON in the detail of the first row of a kind."""

    def change(rows):
        row = next(row for row in rows if row["what"] == what)
        body = json.loads(row["detail"])
        row["detail"] = json.dumps(alter(body))

    return change


def without(*kinds):
    def change(rows):
        rows[:] = [row for row in rows if row["what"] not in kinds]

    return change


ROWS = {
    "arrived at NaN": (every("arrived", arrival=math.nan), "arrival must be a time in seconds"),
    "a huge deadline": (every("arrived", deadline=1e300), "deadline must be a time in seconds"),
    "no time": (every("decide", at=None), "at must be a time in seconds, got None"),
    "an infinite end": (every("dispatch", finish_at=math.inf), "finish_at must be a time"),
    "no model": (every("arrived", model=None), "a number, a model and a size of at least 1"),
    "no items": (every("arrived", size=-3), "a size of at least 1"),
    "no number": (every("arrived", request=None), "a number, a model and a size of at least 1"),
    "requests without numbers": (every("dispatch", requests=[None]), "request without a number"),
    "an empty batch": (every("dispatch", requests=[]), "a batch has a number, a worker"),
    "requests are missing": (every("finished", requests=None), "not what a log contains"),
    "an unknown worker": (every("dispatch", worker="w9"), "on 'w9', which no cluster has"),
    "an unknown variant": (every("dispatch", variant="x"), "is of 'x' on"),
    "an unknown model": (
        every("arrived", model="x", task="x"),
        "no request arrived for a model of",
    ),
    "an unknown status": (every("finished", reason="fine"), "'fine' is not a valid BatchStatus"),
    "an unknown row": (every("finished", what="odd"), "what must be a kind of row, got 'odd'"),
    "a profile of NaN": (every("profile", table_s=[math.nan]), "latencies_s must be positive"),
    "no profiles": (without("profile"), "not what a log contains (KeyError"),
    "no clusters": (without("cluster", "profile"), ""),
    "no arrivals": (without("arrived"), "no request arrived for a model of the cluster"),
    "batches first": (without("decide"), "a dispatch before the first decision"),
    "nothing": (lambda rows: rows.clear(), ""),
    "backwards": (lambda rows: rows.reverse(), ""),
    "no JSON": (every("cluster", detail='{"models":'), "Expecting value"),
    "a start of a list": (every("start", detail="[]"), "a start has policy, kwargs and about"),
    "no kwargs": (said("start", lambda b: {**b, "kwargs": 7}), "kwargs of a start cannot be 7"),
    "no about": (said("start", lambda b: {**b, "about": []}), "about of a start cannot be []"),
    "a date": (said("start", lambda b: {**b, "about": {"wall_at": 1e300}}), "about.wall_at must"),
    "a clock": (said("start", lambda b: {**b, "about": {"clock": []}}), "about.clock of a start"),
    "models": (said("start", lambda b: {**b, "about": {"models": [[]]}}), "must be names, got"),
    "a deep cluster": (every("cluster", detail="[" * 9000), "it is nested too deeply"),
    "a policy": (said("start", lambda b: {**b, "policy": {}}), "policy of a start cannot be {}"),
    "workers": (said("cluster", lambda b: {**b, "workers": 7}), "not what a log contains"),
    "names": (said("cluster", lambda b: {**b, "workers": [[7, "g", [], []]]}), "must be text"),
    "delays": (said("cluster", lambda b: {**b, "delay_s": "xy"}), "delay_s must be a time"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_no_log_has(log, tmp_path, name):
    change, wrong = ROWS[name]
    file = copied(log, tmp_path)
    changed(file, change)
    answers = list(told(file))
    assert all(code in (0, 1) or str(file) in text for code, text in answers)
    if wrong:
        assert any(code == 2 and wrong in text for code, text in answers), answers


@pytest.mark.parametrize("column", ["at", "requests", "detail", "deadline"])
def test_columns_that_are_missing_or_of_another_type(log, tmp_path, column):
    file = copied(log, tmp_path)
    table = pq.read_table(file)
    at = table.column_names.index(column)
    for made, wrong in (
        (table.drop_columns([column]), f"there is no column {column}"),
        (table.set_column(at, column, pa.array([True] * len(table))), f"column {column} must be "),
    ):
        pq.write_table(made, file)
        for code, text in told(file):
            assert code == 2
            assert f"{file}: {wrong}" in text


PLANS = {
    "no plan's start": (without("start"), "row 0: it comes before the start of its planner"),
    "targets": (every("plan", targets="[]"), "row 1: targets must be a mapping, got []"),
    "clocks": (every("plan", clocks='{"c": "x"}'), "clocks.'c' must be a time in seconds"),
    "no reason": (every("plan", why=None), "why is missing"),
    "a date": (every("plan", wall_at=1e18), "wall_at must be a time"),
    "no text": (every("plan", changes=[None]), "a change has no text"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_no_log_has(log, tmp_path, name):
    change, wrong = PLANS[name]
    file = copied(log, tmp_path, "*.plans.parquet")
    changed(file, change)
    shown = CliRunner().invoke(
        app, ["report", str(tmp_path / "log"), "--out", str(tmp_path / "page.html")]
    )
    assert shown.exit_code == 2
    assert f"{file}: " in shown.output.replace("\n", "")
    assert wrong in shown.output.replace("\n", "")


@pytest.mark.slow
def test_bytes_that_are_cut_or_flipped(log, tmp_path):
    file = copied(log, tmp_path)
    whole, rng = file.read_bytes(), random.Random(0)
    damaged = [whole[: rng.randrange(len(whole))] for _ in range(3)]
    for _ in range(12):
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    for body in damaged:
        file.write_bytes(body)
        for code, text in told(file):
            assert code in (0, 1) or str(file) in text
    file.write_bytes(whole)
    assert [code for code, _ in told(file)] == [0, 0, 0]


def test_a_lost_row_may_have_told_of_the_worker(log, tmp_path):
    """A log that misses rows is reported without the batches that it cannot place."""
    file = copied(log, tmp_path)

    def change(rows):
        every("dispatch", worker="w9")(rows)
        rows.append({**dict.fromkeys(rows[0]), "round": 0, "event": 0, "at": 1.0, "what": "lost"})
        rows[-1]["size"] = 12

    changed(file, change)
    (code, _), (replayed, text), _ = told(file)
    assert (code, replayed) == (0, 2)
    assert "12 rows were not kept" in text
