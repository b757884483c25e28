"""`ray-slo new` writes an application whose own tests pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ray_slo.cli import main

ROOT = Path(__file__).parents[2]


def new(*args):
    with pytest.raises(SystemExit) as left:
        main(["new", *map(str, args)])
    return left.value.code


@pytest.mark.slow
def test_what_is_written_passes_its_own_tests(tmp_path):
    folder = tmp_path / "my-first_model"
    assert new(folder, "--slo-ms", 150) == 0
    files = {path.name for path in folder.iterdir()}
    code = {"model.py", "test_model.py", "pytest.ini"}
    assert files == code | {"README.md", "config.yaml", "requests.jsonl"}
    (application,) = yaml.safe_load((folder / "config.yaml").read_text())["applications"]
    assert application["name"] == "my-first_model"
    model = application["args"]["models"]["my-first_model"]
    assert model == {"callable": "model:MyFirstModel", "latency_slo_ms": 150}
    assert "{{" not in "".join(path.read_text() for path in folder.iterdir())
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        tests, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert "warning" not in done.stdout  # Ray's own would hide those of a newcomer's code


def test_every_request_of_the_file_is_valid(tmp_path, monkeypatch):
    assert new(tmp_path / "one") == 0
    monkeypatch.syspath_prepend(str(tmp_path / "one"))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    from model import One

    lines = (tmp_path / "one" / "requests.jsonl").read_text().splitlines()
    vectors = [One.preprocess(yaml.safe_load(line)) for line in lines]
    assert len(set(One()(vectors))) > 1
    del sys.modules["model"]


@pytest.mark.parametrize("name", ["9lives", "a b", "naïve"])
def test_a_name_that_names_no_application(name, tmp_path, capsys):
    assert new(tmp_path / name) == 2
    assert f"{name!r} cannot name an application" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.py").write_text("mine")
    assert new(tmp_path / "full") == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert (tmp_path / "full" / "model.py").read_text() == "mine"


def test_an_slo_of_nothing_is_refused(tmp_path, capsys):
    assert new(tmp_path / "fast", "--slo-ms", 0) == 2
    assert "--slo-ms must be positive and finite, got 0" in capsys.readouterr().err
