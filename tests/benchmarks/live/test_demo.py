"""What `live-demo` makes of the demo's figures."""

import json

import pytest

from benchmarks.harness.registry import PROGRAMS
from benchmarks.live import demo
from ray_slo.demo import report
from ray_slo.demo.stream import PARTS
from ray_slo.demo.systems import SYSTEMS
from tests.demo.made_up import found


def test_rows_of_a_run():
    figures = report.figures(found())
    rows = demo.rows_of("run 1", figures)
    by = {(row.case, row.metric): row.ours for row in rows}
    assert by["run 1 · setting", "SLO"] == 600 and by["run 1 · setting", "other CPU"] == 1
    for system in SYSTEMS:
        for part in PARTS:
            case = f"run 1 · {part}, {demo.NAMES[system.key]}"
            parts = figures["parts"]
            assert by[case, "in time"] == parts[system.key][part]["goodput"]
            assert by[case, "bad"] == 100 * parts[system.key][part]["bad"]
    assert by["run 1 · calm, @ray_slo.batch", "in time / tuned"] == 1.0
    assert by["run 1 · overload, @ray_slo.batch", "in time / tuned"] is None  # tuned has none
    assert {system.key: system.name for system in SYSTEMS} == demo.NAMES
    asked = PROGRAMS["live-demo"].asked
    assert all(len(ask.rows([row.to_json() for row in rows])) == 2 for ask in asked)


def test_runs_that_were_made_before(tmp_path):
    figures = report.figures(found())
    (tmp_path / "found.json").write_text(json.dumps(figures))
    rows = demo.run(False, 0, found=[str(tmp_path / "found.json")] * 3)
    assert rows == [row for title in demo.RUNS for row in demo.rows_of(title, figures)]
    with pytest.raises(ValueError, match="zip"):
        demo.run(False, 0, found=[str(tmp_path / "found.json")])
