"""On a full disk, every file that a command writes is the whole new one or the old one."""

import contextlib
import resource
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from ray_slo.core.profiles import LatencyProfile, save_profiles
from ray_slo.demo import plots
from ray_slo.load.report import LoadResult
from ray_slo.load.workload import Recorded
from ray_slo.record.rows import COLUMNS, to_arrow, write_file

LEAST_BYTES = 200  # a file larger than this does not fit on the disk
CLUSTER = "cluster: {workers: 2, models: {a: {latency_slo_ms: 9, profile: {alpha_ms: 1}}}}\n"
RUN = (
    "policy: {name: eager}\n"
    + CLUSTER
    + "workload: {arrivals: {kind: constant, rate: 100}}\nduration_s: 1\n"
)
TABLES = """
latency_slo_ms: 150
num_workers: 1
num_slacks: 10
variants: {fast: {accuracy: 60, profile: {alpha_ms: 6, beta_ms: 12, max_batch_size: 4}}}
loads: {rates: [10]}
"""


@contextlib.contextmanager
def full_disk():
    """No file of this process can be larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LEAST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a document for each command, and what it reads."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "run.yaml").write_text(RUN)
    (folder / "tables.yaml").write_text(TABLES)
    return folder


COMMANDS = {  # arguments, with {} for the folder to write to, and what writes that folder's files
    "simulate": ("simulate", "{given}/run.yaml", "--report", "{}"),
    "solve": ("solve", "{given}/tables.yaml", "--out", "{}/tables.npz"),
    "dashboards": ("dashboards", "--out", "{}"),
    "report": ("report", "{given}/report", "--out", "{}/page.html"),
    "policy": ("policy", "show", "{given}/tables.npz", "--plot", "{}/plot.svg"),
    "profile": (
        *("profile", "tests.cli.toys:Toy", "--seconds", "0.1", "--max-batch", "64"),
        *("--out", "{}/profile.json"),
    ),
    "plot": (
        *("profile", "tests.cli.toys:Toy", "--seconds", "0.1", "--max-batch", "1"),
        *("--plot", "{}/profile.png"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command(run, given, tmp_path, name):
    if name == "report":
        run("simulate", given / "run.yaml", "--report", given / "report")
    if name == "policy":
        run("solve", given / "tables.yaml", "--out", given / "tables.npz")
    words = [word.format(tmp_path, given=given) for word in COMMANDS[name]]
    code, _, err = run(*words)
    assert code == 0, err
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert any(len(content) > LEAST_BYTES for content in before.values())
    with full_disk():
        code, _, err = run(*words)
    assert code == 2
    assert f"{tmp_path}/" in err.replace("\n", "") and "File too large" in " ".join(err.split())
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert all(after[n] == before[n] or len(after[n]) <= LEAST_BYTES for n in after)


def test_new(run, tmp_path):
    with full_disk():
        code, _, err = run("new", tmp_path / "app")
    assert code == 2
    assert "File too large" in err
    assert all(p.stat().st_size < LEAST_BYTES for p in (tmp_path / "app").iterdir())
    assert not list((tmp_path / "app").glob(".*"))


def rows():
    return [(1, 1, 0.1 * i, "decide", *[None] * (len(COLUMNS) - 4)) for i in range(1000)]


def requests():
    return pd.DataFrame(
        {
            "intended_s": [0.1, 0.2],
            "sent_s": [0.1, 0.2],
            "latency_s": [0.01, 0.02],
            "status": ["ok", "late"],
            "error": [None, None],
            "measured": [True, True],
            "correct": [True, None],
        }
    )


def write_log(folder: Path):
    write_file(folder / "s-000000.decisions.parquet", to_arrow(rows()), "s", 0)


def write_bench(folder: Path):
    LoadResult(requests(), 0.1, 3.0, 0.0, 0.1).save(folder)


def write_stream(folder: Path):
    Recorded(np.arange(1000.0), np.zeros(1000, int), 1e4).save(folder / "stream.npz")


def write_profiles(folder: Path):
    save_profiles(folder / "p.json", {"v": LatencyProfile.linear(0.01, 0.02, 64)})


def write_figure(folder: Path):
    from matplotlib.figure import Figure

    plots.save(Figure, folder, "demo")


@pytest.mark.parametrize(
    "write", [write_log, write_bench, write_stream, write_profiles, write_figure]
)
@pytest.mark.parametrize("there", [False, True])
def test_a_file(tmp_path, write, there):
    if there:
        write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_disk(), pytest.raises((OSError, pa.ArrowException)) as caught:
        write(tmp_path)
    assert caught.value.errno is None or str(tmp_path) in str(caught.value.filename)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        assert len(content) <= LEAST_BYTES or content == before[path.name]
        assert ".tmp" not in path.name
