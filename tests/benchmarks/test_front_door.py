import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.__main__ import SKIPPED, main
from benchmarks.programs import PROGRAMS


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


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Every program that a selected test asks for, a core each; by name, as they finish."""

    directory = tmp_path_factory.mktemp("plots")  # its names are not for threads to make

    def run(name):
        plots = directory / name
        plots.mkdir()
        command = ["-m", "benchmarks", name, "--quick", "--json", "-", "--plot", plots]
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=200
        )
        return done, plots

    asked = dict.fromkeys(
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and "name" in getattr(item, "fixturenames", ())
    )
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield {name: pool.submit(run, name) for name in asked}
        pool.shutdown(cancel_futures=True)


# Live programs start a Ray of their own and load it for a minute: tests/live covers what they use.
SIMULATED = [name for name in PROGRAMS if not name.startswith("live-")]


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.slow
def test_every_program_runs_quickly_and_prints_its_rows(name, runs):
    done, plots = runs[name].result()
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert set(body) == {"name", "source", "quick", "seed", "rows"}
    assert (body["name"], body["quick"], body["seed"]) == (name, True, 0)
    assert body["rows"]
    for row in body["rows"]:
        assert set(row) == {"case", "metric", "unit", "ours", "paper", "peers"}
    assert any(plots.glob("*.png"))
    assert all(part in done.stderr for part in body["rows"][0]["case"].split(" · "))
