"""`python -m benchmarks`: what it lists and refuses, and that its programs can be run.

`python -m benchmarks all --quick` runs all of them.
"""

import importlib
import inspect
import json
import subprocess
import sys

import pytest

from benchmarks.__main__ import in_words, main
from benchmarks.harness.registry import PROGRAMS


def test_lists_every_program(capsys):
    main([])
    listed = capsys.readouterr().out
    assert all(name in listed for name in PROGRAMS)


@pytest.mark.parametrize("args", [["fig99"], ["symphony-fig5", "--seed", "-1"]])
def test_mistakes_end_with_code_2(args, capsys):
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2
    assert args[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, option", [("live-ceiling", "--policy"), ("policy-grid", "--cell"), ("all", "--but")]
)
def test_help_has_the_programs_own_options(name, option, capsys):
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert exit.value.code == 0
    assert option in shown and "--save" in shown


def test_from_a_shell():
    command = [sys.executable, "-m", "benchmarks", "symphony-fig5", "--quick", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "symphony-fig5"


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_can_be_imported(name):
    """So names that it uses are there. Its run takes too long for a test."""
    if name == "gpu":
        pytest.importorskip("torch")
    run = importlib.import_module(PROGRAMS[name].module).run
    assert {"quick", "seed"} <= inspect.signature(run).parameters.keys()


# Of some folders, one whose quick run takes a second or two.
QUICK = ["kairos-bounds", "loki-fig1", "ramsis-fig11"]


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_run_prints_saves_and_plots_its_rows(name, tmp_path, capsys):
    main([name, "--quick", "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path)])
    body = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    said = {"name", "source", "quick", "seed", "options", "rows", "cpu_s", "wall_s"}
    assert set(body) == said
    assert body["wall_s"] > 0
    assert (body["name"], body["quick"], body["seed"]) == (name, True, 0)
    assert body["rows"]
    for row in body["rows"]:
        assert set(row) == {"case", "metric", "unit", "ours", "paper", "peers"}
    assert any(tmp_path.glob("*.png"))
    printed = capsys.readouterr().out
    assert all(part in printed for part in body["rows"][0]["case"].split(" · "))


def test_options_of_a_program_are_written_down():
    given = {"mode": "haproxy", "systems": ["plain", "batch"], "again_all": True, "jobs": 2}
    said = "--mode haproxy --systems plain,batch --again-all --jobs 2"
    assert in_words(given) == said
    assert in_words({}) == ""
