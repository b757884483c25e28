"""Pages whose code needs Ray; the examples and the configs, run as a reader would."""

import runpy
import subprocess
import sys
from unittest.mock import Mock

import pytest
import ray
import yaml
from ray import serve

from ray_slo.serve import build_app
from tests.docs.log import write
from tests.docs.pages import PAGES, ROOT, Reader, at, needs_ray

LIVE = [path for path in PAGES if needs_ray(path)]
PROGRAM = ROOT / "examples" / "composition.py"  # on a port of its own
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {PROGRAM})
CONFIGS = [p for what in ("digits", "pipeline") for p in (ROOT / "configs").glob(f"{what}-*.yaml")]

pytestmark = pytest.mark.live


def test_there_is_something_to_run():
    assert len(LIVE) >= 5 and len(EXAMPLES) >= 3 and len(CONFIGS) >= 5


@pytest.mark.timeout(400)  # the tutorial deploys three applications
@pytest.mark.parametrize("path", LIVE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_page_does_what_it_says(ray_cluster, path, tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    with at(ray_cluster.folder):
        reader = Reader(path, ray_cluster.folder, write(log), ray_cluster)
        reader.before = set(serve.status().applications)
        try:
            reader.read()
        finally:
            reader.leave()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_config_builds(path):
    for application in yaml.safe_load(path.read_text())["applications"]:
        assert application["import_path"] == "ray_slo.serve:build_app"
        assert build_app(application["args"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(ray_cluster, path, monkeypatch):
    """On the Ray that is there, and not on one of its own."""
    asked = Mock()
    for module, name in ((ray, "init"), (serve, "start"), (serve, "shutdown"), (ray, "shutdown")):
        monkeypatch.setattr(module, name, getattr(asked, f"{module.__name__}.{name}"))
    before = set(serve.status().applications)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        for name in set(serve.status().applications) - before:
            serve.delete(name, _blocking=False)
    began, *_, ended = asked.mock_calls
    assert (began[0], began.kwargs["address"], ended[0]) == ("ray.init", "local", "ray.shutdown")


def test_an_example_is_a_program_of_its_own():
    done = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, timeout=200, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
