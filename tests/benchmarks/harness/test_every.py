"""`python -m benchmarks all`."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import every as module

NAMES = ["symphony-fig1", "symphony-fig2", "symphony-fig5"]
ONLY = [part for name in NAMES for part in ("--only", name)]


@pytest.fixture
def held(monkeypatch, tmp_path):
    """Programs that were run, each with its flags; `ends` and `runs` say how, and what is saved."""
    started, ends, runs = [], {}, {}

    def process(args, output):
        started.append(args)
        output.write(f"words\nlast words of {args[0]}\n")
        return ends.get(args[0], 0)

    monkeypatch.setattr(module, "_process", process)
    monkeypatch.setattr(module, "load", runs.get)
    monkeypatch.setattr(module, "code_of", lambda program: f"code of {program}")
    monkeypatch.setattr(module, "OUTPUT", tmp_path)
    return started, ends, runs


def saved(name, wall_s=10.0, quick=False, seed=0, code=None):
    return {"name": name, "wall_s": wall_s, "quick": quick, "seed": seed, "code": code}


def test_the_longest_is_last_and_a_quick_run_says_little_of_a_full_one(held):
    started, _, runs = held
    runs |= {name: saved(name, took) for name, took in zip(NAMES, [30, 10, 20], strict=True)}
    runs["symphony-fig5"]["quick"] = True
    main(["all", "--save", *ONLY])
    assert [args[0] for args in started] == ["symphony-fig2", "symphony-fig1", "symphony-fig5"]
    assert all(args[1:] == ["--seed", "0", "--save"] for args in started)


def test_what_is_saved_from_this_code_is_not_run_again(held, capsys):
    started, _, runs = held
    code = "code of benchmarks.symphony.fig1"
    runs["symphony-fig1"] = saved("symphony-fig1", code=code)
    runs["symphony-fig2"] = saved("symphony-fig2", code="other")
    main(["all", "--save", *ONLY])
    assert {args[0] for args in started} == {"symphony-fig2", "symphony-fig5"}
    assert "2 programs to run, 1 saved" in capsys.readouterr().out
    part = saved("", code=code) | {"options": "--case one"}
    for other in (saved("", code=code, quick=True), saved("", code=code, seed=1), part):
        started.clear()
        runs["symphony-fig1"] = other
        main(["all", "--save", *ONLY])
        assert len(started) == 3
    started.clear()
    runs["symphony-fig1"] = saved("symphony-fig1", code=code)
    main(["all", "--quick", *ONLY])  # to see whether everything runs
    assert len(started) == 3 and started[0][1:] == ["--seed", "0", "--quick"]


def test_a_failure_stops_nothing_and_is_told(held, capsys):
    started, ends, _ = held
    ends |= {"symphony-fig1": 1, "symphony-fig2": module.SKIPPED}
    with pytest.raises(SystemExit) as exit:
        main(["all", *ONLY])
    assert len(started) == 3
    assert "1 failed: symphony-fig1;" in str(exit.value)
    out = capsys.readouterr().out
    assert "FAILED (1): last words of symphony-fig1" in out
    assert "skipped: last words of symphony-fig2" in out


def test_only_and_but(held, capsys):
    started, _, _ = held
    main(["all", "--only", "symphony-*", "--but", "*fig*"])
    assert [args[0] for args in started] == ["symphony-table2"]
    with pytest.raises(SystemExit):
        main(["all", "--only", "fig99*"])
    assert "no program matches 'fig99*'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["all", "--json", "-"])
    assert "for one program" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_it_can_be_stopped_and_its_program_with_it(tmp_path):
    script = f"""
import runpy, sys
from pathlib import Path
from benchmarks.harness import every
every.OUTPUT = Path({str(tmp_path)!r})
of = every.subprocess.Popen
def sleeper(command, **kwargs):
    process = of([sys.executable, "-c", "import time; time.sleep(300)"], **kwargs)
    Path({str(tmp_path)!r}, "pid").write_text(str(process.pid))
    return process
every.subprocess.Popen = sleeper
sys.argv = ["benchmarks", "all", "--only", "symphony-fig5"]
runpy.run_module("benchmarks", run_name="__main__")
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "stopped; the same command goes on" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
