"""The hash of the code that made a figure."""

import pytest

from benchmarks.harness import code
from benchmarks.harness.registry import PROGRAMS

POLICIES = "ray_slo.policies."


def of(name):
    return code.modules(PROGRAMS[name].module)


def test_a_program_follows_from_what_it_imports_and_the_policies_that_it_names():
    found = of("symphony-fig5")
    assert "benchmarks.symphony.fig5" in found
    assert {"ray_slo.simulation.engine", "ray_slo.core.profiles"} <= found  # through a package
    assert {POLICIES + "deferred", POLICIES + "exact.deferred", POLICIES + "batching"} <= found
    assert not found & {POLICIES + "auto", POLICIES + "kairos", POLICIES + "exact.kairos"}
    assert "benchmarks.peers.nexus" in of("symphony-fig2")  # named as "benchmarks.peers:Nexus"
    assert POLICIES + "exact.kairos" in of("kairos-fig3")


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A repository with one program; returns what writes it anew and tells its mark."""
    monkeypatch.setattr(code, "ROOT", tmp_path)

    def mark(text, shared="def f(): return 1\n", table="1,2\n"):
        for cached in (code.code_of, code._parsed, code._essence, code._imported, code._strings):
            cached.cache_clear()
        for path, content in (
            ("benchmarks/own/one.py", text),
            ("benchmarks/own/shared.py", shared),
            ("benchmarks/zoos/__init__.py", "def load(): ...\n"),
            ("benchmarks/zoos/zoo.csv", table),
        ):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content, encoding="utf-8")
        return code.code_of("benchmarks.own.one")

    yield mark
    for cached in (code.code_of, code._parsed, code._essence, code._imported, code._strings):
        cached.cache_clear()


PROGRAM = '''"""One."""
from benchmarks.own.shared import f
from benchmarks.zoos import load

ASKED = [("a", "b", "≥", 1)]


def run():
    """Run it."""
    return f() + 1  # more
'''


def test_words_do_not_count_and_code_does(room):
    mark = room(PROGRAM)
    assert room(PROGRAM.replace("One", "Two").replace("Run it", "Do").replace("# more", "")) == mark
    assert room(PROGRAM.replace('"≥", 1', '"≥", 2')) == mark
    assert room(PROGRAM.replace("+ 1", "+ 2")) != mark
    assert room(PROGRAM, shared="def f(): return 2\n") != mark
    assert room(PROGRAM, table="1,3\n") != mark
    assert room(PROGRAM) == mark
