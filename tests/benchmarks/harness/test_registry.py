"""Programs are found by reading their modules, without importing them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.harness.registry import FOLDERS, PROGRAMS, Ask, read

ROOT = Path(benchmarks.__file__).parent


def test_a_program_says_what_it_shows_and_what_was_asked(tmp_path):
    (tmp_path / "loki").mkdir()
    path = tmp_path / "loki" / "fig_5.py"
    path.write_text(
        '"""A day of traffic.\n\nMore."""\nSOURCE = "Loki Figure 5"\n'
        'ASKED = [("day *", "violations", "≤", 1)]\nOTHER = print("imported")\n',
        encoding="utf-8",
    )
    program = read(path)
    assert (program.name, program.module) == ("loki-fig-5", "benchmarks.loki.fig_5")
    assert (program.source, program.shows) == ("Loki Figure 5", "A day of traffic")
    assert program.asked == (Ask("day *", "violations", "≤", 1),) and not program.live


def test_a_module_without_a_source_is_no_program(tmp_path):
    path = tmp_path / "systems.py"
    path.write_text('"""What programs share."""\n', encoding="utf-8")
    assert read(path) is None


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_with_a_run_is_a_program(folder):
    modules = {program.module for program in PROGRAMS.values()}
    for path in (ROOT / folder).glob("*.py"):
        names = {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
        assert ("run" in names) == (f"benchmarks.{folder}.{path.stem}" in modules), path


def test_names_and_order():
    names = list(PROGRAMS)
    assert names.index("symphony-fig2") < names.index("symphony-fig10")
    assert {"shipped", "gpu", "flat-top", "live-chaos", "tracing-cost"} < set(names)
    assert PROGRAMS["shipped"].live and PROGRAMS["live-soak"].live
    assert not PROGRAMS["gpu"].live
    assert all(program.shows and program.source for program in PROGRAMS.values())


def test_listing_imports_no_program():
    code = "import sys, benchmarks.harness.registry; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {program.module for program in PROGRAMS.values()}
    assert not loaded & {"numpy", "ray", "torch"}
