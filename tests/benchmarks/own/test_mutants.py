"""Which mutants a file has, and that a test which fails catches one."""

import ast

import pytest

from benchmarks.own.mutants import caught, mutants, passes, sample

CODE = '''
from typing import TYPE_CHECKING

LIMIT: int = 3


def most(values: list[int] | None, strict=True):
    """Not 5."""
    if values is None or not values:
        raise ValueError(f"values: got {1 + 1}")
    values.sort()
    best = max(values) * 2
    best += 4
    return "ä" + str(best) if strict and best < LIMIT else -best
'''
TESTS = """
from ray_slo.core.most import most


def test_large():
    assert most([1, 5]) == -14


def test_small():
    assert most([-3]) == "ä-2"
"""
FILE = "ray_slo/core/most.py"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "ray_slo" / "core").mkdir(parents=True)
    (tmp_path / "ray_slo" / "__init__.py").touch()
    (tmp_path / FILE).write_text(CODE, encoding="utf-8")
    (tmp_path / "ray_slo" / "core" / "with_ray.py").write_text("import ray\na = 1")
    (tmp_path / "tests" / "core").mkdir(parents=True)
    (tmp_path / "tests" / "core" / "test_most.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  live\n  slow\n")
    return tmp_path


def test_every_place_has_its_mutants(root):
    assert {(one.before, one.after) for one in mutants(FILE, root)} == {
        ("3", "(4)"),
        ("True", "(False)"),
        ("values is None or not values", "(values is None and (not values))"),
        ("values is None", "(values is not None)"),
        ("not values", "(values)"),
        ("values.sort()", "pass"),
        ("max(values) * 2", "(max(values) / 2)"),
        ("max(values)", "(min(values))"),
        ("2", "(3)"),
        ("best += 4", "best -= 4"),
        ("4", "(5)"),
        ('"ä" + str(best)', "('ä' - str(best))"),
        ("strict and best < LIMIT", "(strict or best < LIMIT)"),
        ("best < LIMIT", "(best <= LIMIT)"),
        ("-best", "(best)"),
    }


def test_the_same_seed_draws_the_same_mutants(root):
    one, again, other = (sample(["core"], 3, seed, root) for seed in (1, 1, 2))
    assert one == again != other
    every = sample(["core"], 99, 0, root)
    assert len(every) == 15
    assert {str(one) for one in every if one.before == "2"} == {f"{FILE}:12: 2 → (3)"}
    for one in every:
        text = CODE.encode()
        ast.parse(text[: one.place.start] + one.after.encode() + text[one.place.stop :])


@pytest.mark.slow
def test_a_mutant_that_a_test_notices_is_caught(root):
    assert passes(["tests/core"], root)
    found = {
        one.before: caught(one, root)
        for one in mutants(FILE, root)
        if one.before in ("4", "best < LIMIT")
    }
    assert found == {"4": True, "best < LIMIT": False}
    assert (root / FILE).read_text(encoding="utf-8") == CODE
    (root / "tests" / "core" / "test_most.py").write_text("def test(): assert 0")
    assert not passes(["tests/core"], root)
