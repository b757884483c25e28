"""Random mutants of the code that decides, and how many of them the tests of their room catch.

A *mutant* is a copy of the code with one small change: a comparison turned, a plus made a minus, a
number one larger, a condition negated, a call left out. Mutants are drawn from all places of the
Ray-free code with the same chance. Each is tried with the test file of the same name, and then with
all quick tests of its room, and the goldens. It is *caught* if one fails or does not end. A
survivor may be caught by a slow test, or change nothing that matters.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.rows import Row

SOURCE = "ray-slo"
ROOT = Path(__file__).parents[2]
ROOMS = ["policies", "simulation", "serve", "planning", "papers", "core"]
LIMITED = 'ulimit -d 8000000; exec timeout -s KILL 3600 "$@"'  # a mutant may not end
PYTEST = "-m pytest -x -q -p no:cacheprovider --timeout 120 -m".split()  # noqa: SIM905
SWAPPED: dict[Any, Any] = {
    **{ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot},
    **{ast.Add: ast.Sub, ast.Mult: ast.Div, ast.And: ast.Or, "min": "max", "any": "all"},
}
SWAPPED |= {after: before for before, after in SWAPPED.items()} | {ast.FloorDiv: ast.Mult}
SAID = ast.Raise | ast.Assert | ast.JoinedStr  # what errors say
TYPES = ("annotation", "returns", "decorator_list", "bases", "type_params")


class Mutant(NamedTuple):
    """A change of a file. `place` are its first byte and the one after its last."""

    file: str
    line: int
    place: slice
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.before.split())} → {self.after}"


def mutants(file: str, root: Path = ROOT) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    raw = (root / file).read_bytes()
    lines = [0]
    for line in raw.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node, changed in _changes(ast.parse(raw)):
        start = lines[node.lineno - 1] + node.col_offset
        place = slice(start, lines[node.end_lineno - 1] + node.end_col_offset)
        after = ast.unparse(changed)
        after = f"({after})" if isinstance(changed, ast.expr) else after
        yield Mutant(file, node.lineno, place, raw[place].decode(), after)


def _changes(node: Any) -> Iterator[tuple[Any, ast.AST]]:
    """Yield each node that may be changed, and what replaces it."""
    test = getattr(node, "test", None)
    if isinstance(node, SAID) or getattr(test, "id", "") == "TYPE_CHECKING":
        return
    old, new = node, copy.copy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new.ops = [SWAPPED[type(node.ops[0])]()]
    elif type(getattr(node, "op", None)) in SWAPPED:
        new.op = SWAPPED[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        new = node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        is_bool = isinstance(node.value, bool)
        new = ast.Constant(not node.value if is_bool else node.value + 1)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in SWAPPED:
        new.func = ast.Name(SWAPPED[node.func.id])
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        new = ast.Pass()
    elif isinstance(test, ast.Name | ast.Attribute | ast.Call):
        old, new = test, ast.UnaryOp(ast.Not(), test)
    else:
        new = None
    if new is not None:
        yield old, new
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name not in TYPES and isinstance(child, ast.AST):
                yield from _changes(child)


def sample(rooms: Sequence[str], count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Draw mutants from all files of rooms that do not import Ray, each with the same chance."""
    every = []
    for path in (p for room in rooms for p in sorted((root / "ray_slo" / room).rglob("*.py"))):
        if not re.search(r"^\s*(import ray\b|from ray[ .])", path.read_text("utf-8"), re.M):
            every += mutants(path.relative_to(root).as_posix(), root)
    return random.Random(seed).sample(every, min(count, len(every)))


def passes(tests: Sequence[str], root: Path) -> bool:
    """Return whether no test fails that is not slow."""
    done = subprocess.run(
        ["bash", "-c", LIMITED, "-", sys.executable, *PYTEST, "not slow", *tests],
        cwd=root,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.returncode in (0, 5)  # 5: no such test


def caught(mutant: Mutant, root: Path) -> bool:
    """Return whether a test of the mutant's room notices it."""
    target = root / mutant.file
    raw, tests = target.read_bytes(), root / "tests" / mutant.file.split("/")[1]
    target.write_bytes(raw[: mutant.place.start] + mutant.after.encode() + raw[mutant.place.stop :])
    first = [str(path) for path in tests.rglob(f"test_{target.stem}.py")] or [str(tests)]
    every = [str(path) for path in (tests, root / "tests/goldens") if path.exists()]
    found = not (passes(first, root) and passes(every, root))
    target.write_bytes(raw)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mutants", type=int, metavar="N", help="how many; default: 50")


def run(quick: bool, seed: int, mutants: int | None = None) -> list[Row]:
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "out"))
        drawn = sample(ROOMS[-1:] if quick else ROOMS, mutants or (2 if quick else 50), seed, root)
        for tests in {f"tests/{one.file.split('/')[1]}" for one in drawn}:
            if not passes([tests], root):
                raise SystemExit(f"{tests}: a test fails on the unchanged code")
        for one in drawn:
            survivors += [] if (found := caught(one, root)) else [one]
            print("caught" if found else "SURVIVED", one, file=sys.stderr, flush=True)
    share = 100 - 100 * len(survivors) / len(drawn)
    rows = [Row(f"survivors · {one}", "line", "", one.line) for one in survivors]
    return [Row("all rooms", "caught", f"% of {len(drawn)}", share), *rows]
