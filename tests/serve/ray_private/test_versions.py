"""The line at start that says what the installed release of Ray lacks."""

import logging
import re
from pathlib import Path

import pytest
import ray

from ray_slo.serve.ray_private import versions


def test_ray_changed_here():
    """Since 2.59, a release lacks nothing: where this fails, Ray has changed."""
    found = versions.lacks()
    numbers = tuple(map(int, ray.__version__.split(".")[:2]))
    assert versions.OLDEST <= numbers <= versions.NEWEST
    assert bool(found) == (numbers < (2, 59))


def test_the_package_asks_for_what_was_tested():
    wanted = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    (ray_wanted,) = re.findall(r'^  "ray\[serve\](.+)",$', wanted, re.MULTILINE)
    least, most = re.findall(r"(\d+)\.(\d+)", ray_wanted)
    assert tuple(map(int, least)) == versions.OLDEST
    assert tuple(map(int, most)) == (versions.NEWEST[0], versions.NEWEST[1] + 1)


def test_what_is_missing_is_said_in_one_line_once(monkeypatch, caplog):
    monkeypatch.setattr(versions.tracing, "IS_CONFIGURED", False)
    versions.say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        versions.say_once()
        versions.say_once()
    (record,) = caplog.records
    assert "RAY_SERVE_TRACING_*" in record.message
    assert "\n" not in record.message
    versions.say_once.cache_clear()


@pytest.mark.parametrize("version", ["2.55.1", "2.61.0", "3.0.0rc1"])
def test_another_release_is_named(version):
    assert versions.about(version) == (
        f"Ray {version} was not tested with this release of ray-slo; 2.56 to 2.60 were"
    )


def test_of_the_newest_nothing_is_said(monkeypatch):
    monkeypatch.setattr(versions, "lacks", list)
    assert versions.about("2.60.0") is None
