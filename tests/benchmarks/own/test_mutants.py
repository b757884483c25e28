"""Which mutants a file has, and that a test which fails catches one."""

import ast

import pytest

from benchmarks.__main__ import main
from benchmarks.own import mutants as program
from benchmarks.own import mutation
from benchmarks.own.mutation import Bench, RoomTests, Trials, mutants, sample

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
from ray_slo.room import most


def test_large():
    assert most([1, 5]) == -14


def test_small():
    assert most([-3]) == "ä-2"


def test_without_a_call():
    assert True
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "ray_slo").mkdir()
    (tmp_path / "ray_slo" / "__init__.py").touch()
    (tmp_path / "ray_slo" / "room.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_room.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "benchmarks").mkdir()
    for name in ("own/mutation.py", "own/mutation_watch.py", "own/__init__.py", "__init__.py"):
        target = tmp_path / "benchmarks" / name
        target.parent.mkdir(exist_ok=True)
        source = program.ROOT / "benchmarks" / name
        target.write_bytes(source.read_bytes() if source.exists() else b"")
    return tmp_path


def test_every_place_has_its_mutants(root):
    found = {(one.within, one.before, one.after) for one in mutants("ray_slo/room.py", root)}
    assert found == {
        ("module", "3", "(4)"),
        ("most", "True", "(False)"),
        ("most", "values is None or not values", "(values is None and (not values))"),
        ("most", "values is None", "(values is not None)"),
        ("most", "not values", "(values)"),
        ("most", "values.sort()", "pass"),
        ("most", "max(values) * 2", "(max(values) / 2)"),
        ("most", "max(values)", "(min(values))"),
        ("most", "2", "(3)"),
        ("most", "best += 4", "best -= 4"),
        ("most", "4", "(5)"),
        ("most", "strict and best < LIMIT", "(strict or best < LIMIT)"),
        ("most", "best < LIMIT", "(best <= LIMIT)"),
        ("most", "-best", "(best)"),
    }


def test_a_mutant_says_its_place(root):
    said = {str(one) for one in mutants("ray_slo/room.py", root) if one.before == "2"}
    assert said == {"ray_slo/room.py, most: best = max(values) * ⟦2⟧ → (3)"}


def test_a_mutant_changes_one_place_and_is_code(root):
    for one in mutants("ray_slo/room.py", root):
        text = one.text(root).decode()
        ast.parse(text)
        assert text.replace(one.after, one.before, 1) != text or one.after == one.before
        assert len(text.encode()) - len(CODE.encode()) == len(one.after) - len(one.before)


def test_the_same_seed_draws_the_same_mutants(root):
    one, again, other = (sample(["ray_slo/room.py"], 3, seed, root) for seed in (1, 1, 2))
    assert one == again != other
    assert len(sample(["ray_slo/room.py"], 99, 0, root)) == 14


def test_tests_of_a_line_are_the_fastest_first_and_bounded(root):
    mutant = next(one for one in mutants("ray_slo/room.py", root) if one.before == "4")
    tests = RoomTests(
        {"a": 50.0, "b": 1.0, "c": 30.0}, {"ray_slo/room.py": {mutant.line: list("abc")}}
    )
    assert tests.of(mutant) == ["b", "c"]
    imported = RoomTests({"a": 1.0}, {"ray_slo/room.py": {1: ["a"], mutant.line: []}})
    assert imported.of(mutant) == ["a"]
    assert RoomTests({}, {}).of(mutant) == []
    # A program that the tests start.
    beside, other = "tests/deep/test_room.py::test_a", "tests/test_rooms.py::test_b"
    assert RoomTests({beside: 1.0, other: 1.0}, {}).of(mutant) == [beside]
    assert RoomTests({beside: 1.0}, {}, [beside]).of(mutant) == []


@pytest.mark.slow
def test_a_mutant_that_a_test_notices_is_caught(root):
    with Bench(root) as bench:
        tests = bench.watched("ray_slo", "tests")
        assert len(tests.took_s) == 3
        caught = {
            one.before: bench.caught(one, tests)
            for one in mutants("ray_slo/room.py", root)
            if one.before in ("4", "values.sort()")
        }
        assert caught == {"4": True, "values.sort()": False}
        assert (bench.folder / "ray_slo" / "room.py").read_text(encoding="utf-8") == CODE
        (bench.folder / "tests" / "test_room.py").write_text("def test(): assert 0")
        with pytest.raises(RuntimeError, match="the tests of tests fail on the unchanged code"):
            bench.watched("ray_slo", "tests")
    assert not bench.folder.exists()


def test_a_run_goes_on_where_it_was_stopped(root, tmp_path):
    one, other, *_ = mutants("ray_slo/room.py", root)
    log = tmp_path / "trials.jsonl"
    trials = Trials(log)
    trials.add(one, True)
    trials.add(other, False)
    assert Trials(log).known == {Trials.key(one): True, Trials.key(other): False}
    assert Trials(tmp_path / "none").known == {}
    assert Trials(log).watched("ray_slo/core") == tmp_path / "trials.jsonl.core"
    assert Trials().watched("ray_slo/core") is None


def test_what_tests_run_is_read_again(root, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text('{"took_s": {"t": 1.5}, "failed": [], "lines": {"f": {"3": ["t"]}}}')
    with Bench(root) as bench:
        tests = bench.watched("ray_slo", "tests", kept)
    assert (tests.took_s, tests.lines, tests.failed) == ({"t": 1.5}, {"f": {3: ["t"]}}, [])


@pytest.mark.slow
@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(900)"])
def test_what_does_not_end_is_stopped(root, monkeypatch, code):
    monkeypatch.setattr(mutation, "IDLE_S", 3)
    with Bench(root) as bench:
        assert bench._python(3.0, "-c", code) is None
        done = bench._python(30.0, "-c", "print('it ends')")
        assert done is not None and b"it ends" in done.stdout


def test_rows_count_what_survived(monkeypatch):
    def room(trials, name, of):
        return {one: number > 0 for number, one in enumerate(of)}

    monkeypatch.setattr(program, "_room", room)
    rows = program.run(quick=False, seed=1, mutants=40, rooms="ray_slo/core,ray_slo/policies")
    of = {(row.case, row.metric): row.ours for row in rows}
    assert of["all rooms", "mutants"] == 40
    assert of["all rooms", "survived"] == 2
    assert of["all rooms", "caught"] == 95
    assert sum(row.metric == "may live" for row in rows) == 2


def test_rooms_are_without_ray_and_a_wrong_one_is_named():
    assert "ray_slo/core/profiles.py" in program.files("ray_slo/core")
    assert "ray_slo/serve/direct.py" not in program.files("ray_slo/serve")
    with pytest.raises(SystemExit, match="--rooms: got ray_slo/cli; valid are ray_slo/policies"):
        main(["mutants", "--rooms", "ray_slo/cli"])
