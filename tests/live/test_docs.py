"""Run the pages whose code needs Ray, the examples and the configs, as a reader would."""

import runpy
import subprocess
import sys
from unittest.mock import Mock

import pytest
import ray
import yaml
from ray import serve
from waiting import eventually

from ray_slo.serve import build_app
from ray_slo.serve.config.app import AppConfig
from tests.docs.log import write
from tests.docs.pages import PAGES, ROOT, Reader, at, needs_ray

LIVE = [path for path in PAGES if needs_ray(path)]
PROGRAM = ROOT / "examples" / "composition.py"  # on a port of its own
TESTED = ROOT / "examples" / "one_pool.py"  # by `test_showcase`
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {PROGRAM, TESTED})
CONFIGS = [p for what in ("digits", "pipeline") for p in (ROOT / "configs").glob(f"{what}*.yaml")]


def test_there_is_something_to_run():
    assert len(LIVE) >= 5 and len(EXAMPLES) >= 3 and len(CONFIGS) >= 5


@pytest.fixture
def measured_briefly():
    """Workers measure variants for a shorter time, unless the config sets one."""

    def by_default(seconds):
        AppConfig.model_fields["profile_seconds"].default = seconds
        AppConfig.model_rebuild(force=True)

    before = AppConfig.model_fields["profile_seconds"].default
    by_default(0.4)
    try:
        yield
    finally:
        by_default(before)


@pytest.mark.usefixtures("measured_briefly")
@pytest.mark.timeout(400)  # the tutorial deploys three applications
@pytest.mark.parametrize("path", LIVE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_page_does_what_it_says(ray_cluster, path, tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    write(log)

    def read():
        reader = Reader(path, ray_cluster.folder, log, ray_cluster)
        reader.before = set(serve.status().applications)
        try:
            reader.read()
        finally:
            reader.leave()

    with at(ray_cluster.folder):
        tried(read)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_config_builds(path):
    for application in yaml.safe_load(path.read_text())["applications"]:
        assert application["import_path"] == "ray_slo.serve:build_app"
        assert build_app(application["args"])


SHORTER = {
    "SECONDS = 8\n": "SECONDS = 2\n",
    "SECONDS = 5\n": "SECONDS = 2\n",
    "profile_seconds=1.5": "profile_seconds=0.4",
    '{"calm": (2, 5), "busy": (18, 14)}': '{"calm": (2, 2), "busy": (18, 4)}',
}


def shortened(code):
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    return code


def tried(run):
    """Try up to twice: the SLOs of pages and examples are for a machine that is not busy."""
    try:
        run()
    except Exception as error:
        print("once more, after:", repr(error))
        run()


@pytest.mark.usefixtures("measured_briefly")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(ray_cluster, path, monkeypatch, tmp_path):
    """Run an example on the tests' Ray, with less load than a reader's run has."""
    example = tmp_path / "examples" / path.name
    example.parent.mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    example.write_text(shortened(path.read_text("utf-8")), "utf-8")
    asked = Mock()
    for module, name in ((ray, "init"), (serve, "start"), (serve, "shutdown"), (ray, "shutdown")):
        monkeypatch.setattr(module, name, getattr(asked, f"{module.__name__}.{name}"))
    before = set(serve.status().applications)

    def run():
        asked.reset_mock()
        assert eventually(lambda: set(serve.status().applications) <= before)
        try:
            runpy.run_path(str(example), run_name="__main__")
        finally:
            for name in set(serve.status().applications) - before:
                serve.delete(name, _blocking=False)

    tried(run)
    began, *_, ended = asked.mock_calls
    assert (began[0], began.kwargs["address"], ended[0]) == ("ray.init", "local", "ray.shutdown")


def test_an_example_is_a_program_of_its_own():
    def run():
        command = [sys.executable, PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr

    tried(run)
