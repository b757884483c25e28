"""How users name weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_slo.models.loading import weights_source


def test_words_and_paths(tmp_path):
    for word in ("none", "local", "download"):
        assert weights_source(word, "a file") == word
    assert weights_source(str(tmp_path), "a file") == weights_source(tmp_path, "a file") == tmp_path


def test_without_the_argument_the_environment_decides(tmp_path, monkeypatch):
    assert weights_source(None, "a file") == "download"
    for given, source in (
        ("none", "none"),
        ("local", "local"),
        ("download", "download"),
        (str(tmp_path), tmp_path),
        ("", "download"),  # as if it were not set
    ):
        monkeypatch.setenv("RAY_SLO_WEIGHTS", given)
        assert weights_source(None, "a file") == source


def test_the_argument_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_SLO_WEIGHTS", "none")
    assert weights_source("local", "a file") == "local"
    assert weights_source(tmp_path, "a file") == tmp_path
    monkeypatch.setenv("RAY_SLO_WEIGHTS", "nonsense")
    assert weights_source("none", "a file") == "none"


def test_a_path_may_start_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "w.pth").touch()
    assert weights_source("~/w.pth", "a file") == tmp_path / "w.pth"


@pytest.mark.parametrize("weights", ["default", "nnone", "", 3, True, Path("no/such/file")])
def test_anything_else_is_refused_with_the_choices(weights):
    with pytest.raises(ValueError, match=r"^weights: got .*") as caught:
        weights_source(weights, "a state dict of resnet18")
    for choice in ("'none'", "'local'", "'download'", "the path of a state dict of resnet18"):
        assert choice in str(caught.value)
    assert repr(str(weights) if isinstance(weights, Path) else weights) in str(caught.value)


@pytest.mark.parametrize("given", ["default", "nnone", "no/such/file"])
def test_the_environment_is_named_where_it_is_wrong(monkeypatch, given):
    monkeypatch.setenv("RAY_SLO_WEIGHTS", given)
    with pytest.raises(ValueError, match=rf"^RAY_SLO_WEIGHTS: got '{given}',.* wanted 'none' "):
        weights_source(None, "a file")


def test_a_path_may_be_on_another_machine_only(monkeypatch):
    path = Path("no/such/file")
    assert weights_source(path, "a file", anywhere=True) == path
    for weights in ("default", "", 3):
        with pytest.raises(ValueError, match=r"^weights: got .*'local'"):
            weights_source(weights, "a file", anywhere=True)


def test_a_missing_path_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        weights_source("w.pth", "a file")
    assert f"no file or folder here ({tmp_path})" in str(caught.value)
