import json
import subprocess
import sys

import pytest

from benchmarks.__main__ import main
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


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow
def test_every_program_runs_quickly_and_prints_its_rows(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--quick", "--json", "-", "--plot", tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert set(body) == {"name", "source", "quick", "seed", "rows"}
    assert (body["name"], body["quick"], body["seed"]) == (name, True, 0)
    assert body["rows"]
    for row in body["rows"]:
        assert set(row) == {"case", "metric", "unit", "ours", "paper", "peers"}
    assert any(tmp_path.glob("*.png"))
    assert all(part in done.stderr for part in body["rows"][0]["case"].split(" · "))
