"""The code of the README, the examples and the configs, run as a reader would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray import serve

import ray_slo
from ray_slo.serve import build_app

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CONFIGS = [p for what in ("digits", "pipeline") for p in (ROOT / "configs").glob(f"{what}-*.yaml")]

pytestmark = pytest.mark.live


def names():
    """What a reader has imported by then."""
    return {"__name__": "readme", "ray_slo": ray_slo, "serve": serve}


def test_there_is_something_to_run():
    assert len(PYTHON) == 4 and len(EXAMPLES) >= 3 and len(CONFIGS) >= 5


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_readme_python_runs(ray_cluster, number):
    before = set(serve.status().applications)
    try:
        # A module that cannot be imported: its classes travel by value, as those of a script do.
        exec(compile(PYTHON[number], f"README.md[{number}]", "exec"), names())
    finally:
        for name in set(serve.status().applications) - before:
            serve.delete(name)


def test_readme_config_is_one(tmp_path):
    (text,) = [code for language, code in BLOCKS if language == "yaml"]
    for application in yaml.safe_load(text)["applications"]:
        assert application["import_path"] == "ray_slo.serve:build_app"
        assert build_app(application["args"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_config_builds(path):
    for application in yaml.safe_load(path.read_text())["applications"]:
        assert application["import_path"] == "ray_slo.serve:build_app"
        assert build_app(application["args"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path):
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=200, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
