"""The wheel and the sdist contain what an installation needs, and nothing of a working folder."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", folder],
        check=True,
        cwd=ROOT,
        capture_output=True,
    )
    return folder


def tracked(*under):
    """Paths of git; else those of the folders, where there is no repository."""
    done = subprocess.run(["git", "ls-files", *under], cwd=ROOT, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_the_docs(built):
    (path,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(path).namelist())
    files = tracked("ray_slo")
    if not files:
        pytest.skip("no git repository")
    assert names >= set(files)
    (data,) = {name.split("/")[0] for name in names if ".data/" in name}
    pages = {f"{data}/data/share/doc/ray-slo/{p.removeprefix('docs/')}" for p in tracked("docs")}
    assert names >= pages
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ray_slo"}
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    said = zipfile.ZipFile(path).read(metadata).decode()
    assert "Requires-Python: >=3.10" in said
    assert "Provides-Extra: digits" in said
    (scripts,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "ray-slo = ray_slo.cli:main" in zipfile.ZipFile(path).read(scripts).decode()


def test_the_sdist_has_nothing_of_a_working_folder(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    files = tracked()
    if not files:
        pytest.skip("no git repository")
    assert {"pyproject.toml", "README.md", "ray_slo/__init__.py", "docs/index.md"} <= set(names)
    strange = [n for n in names if n.split("/")[0] in (".venv", "out", "dist", ".ci", ".git")]
    assert not strange
