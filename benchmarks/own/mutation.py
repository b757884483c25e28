"""Mutants: small changes of the code, one at a time, and whether tests notice them.

A *mutant* is a copy of the package with one expression or statement changed: a comparison turned, a
plus made a minus, a number one larger, a condition negated, a call left out. `mutants` finds all of
them in a file. `Bench` first runs a room's tests once, and notes which lines each test runs. A
mutant is then tried with the tests that run its line, the fastest first, until one fails.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "ray_slo",
    "tests",
    "benchmarks",
    "configs",
    "deployments",
    "policies",
    "docs",
    "examples",
    "deploy",
)
TRIED_S = 60.0  # CPU time that tests of a mutant take together at most, on the unchanged code
IDLE_S = 60.0  # tests that use no CPU time for this long do not end
MEMORY_BYTES = 8 * 2**30  # a mutant may allocate without an end
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
NAMED = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_PYTEST = ("-p", "no:cacheprovider", "--timeout", "0")  # `Bench` has limits of CPU time


class Mutant(NamedTuple):
    """A change of one expression or statement.

    Attributes:
        file: relative to the root.
        line: of the expression, from 1.
        within: name of the innermost function or class around it.
        start, end: its place in the file's text, in bytes.
        before, after: source text.
        was: the source line, with the place in brackets: ⟦ ⟧.
    """

    file: str
    line: int
    within: str
    start: int
    end: int
    before: str
    after: str
    was: str

    def __str__(self) -> str:
        return f"{self.file}, {self.within}: {self.was} → {' '.join(self.after.split())}"

    def text(self, root: Path = ROOT) -> bytes:
        """Return the text of the file with the change."""
        raw = (root / self.file).read_bytes()
        return raw[: self.start] + self.after.encode() + raw[self.end :]


def mutants(file: str, root: Path = ROOT) -> list[Mutant]:
    """Return every mutant of a file, by its place."""
    raw = (root / file).read_bytes()
    lines = [0]
    for line in raw.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    for node, within, changed in _changes(ast.parse(raw), "module"):
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        after = ast.unparse(changed)
        if isinstance(changed, ast.expr):
            after = f"({after})"
        line_end = raw.find(b"\n", end)
        parts = (raw[lines[node.lineno - 1] : start], raw[start:end], raw[end:line_end])
        head, before, tail = (part.decode() for part in parts)
        was = " ".join(f"{head}⟦{before}⟧{tail}".split())
        found.append(Mutant(file, node.lineno, within, start, end, before, after, was))
    return sorted(found, key=lambda one: (one.start, one.end, one.after))


def _changes(node: ast.AST, within: str) -> Iterator[tuple[Any, str, ast.AST]]:
    """Yield (node, function or class around it, the node that replaces it)."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
        return  # what errors say
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        within = node.name
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield from ((node, within, changed) for changed in _changed(node))
    test = getattr(node, "test", None)
    if isinstance(node, (ast.If, ast.IfExp)) and isinstance(
        test, (ast.Name, ast.Attribute, ast.Call)
    ):
        yield test, within, ast.UnaryOp(ast.Not(), test)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child, within)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield _with(node, ops=[COMPARED[type(node.ops[0])]()])
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        if not isinstance(node.left, (ast.Constant, ast.JoinedStr)) or not isinstance(
            getattr(node.left, "value", 0), str
        ):
            yield _with(node, op=COMPUTED[type(node.op)]())
    elif isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED:
        yield _with(node, op=COMPUTED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMED:
        yield _with(node, func=ast.Name(NAMED[node.func.id]))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def sample(files: Sequence[str], count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Draw mutants from all files, each with the same chance, in the order of their places."""
    every = [one for file in sorted(files) for one in mutants(file, root)]
    return sorted(random.Random(seed).sample(every, min(count, len(every))))


@dataclass
class RoomTests:
    """What the tests of a room run.

    Attributes:
        took_s: seconds of CPU time by test.
        lines: by file: by line: tests that run it. A line that is run at import has none.
        failed: tests that fail on the unchanged code, in the copy; `lines` does not have them.
    """

    took_s: dict[str, float]
    lines: dict[str, dict[int, list[str]]]
    failed: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> RoomTests:
        """Read what `mutation_watch` wrote."""
        said = json.loads(path.read_text(encoding="utf-8"))
        lines = {
            name: {int(line): tests for line, tests in of.items()}
            for name, of in said["lines"].items()
        }
        return cls(said["took_s"], lines, said["failed"])

    def of(self, mutant: Mutant) -> list[str]:
        """Return tests that run a mutant's line, the fastest first, for at most `TRIED_S`.

        For a line that is only run at import, these are the tests that run any line of the file. If
        there is no such test, the code may run in processes that tests start. Then these are the
        tests in the file of the same name: `test_a.py` for `a.py`.
        """
        by_line = self.lines.get(mutant.file, {})
        found = set(by_line.get(mutant.line, ()))
        if not found:
            found = {test for tests in by_line.values() for test in tests}
        if not found:
            name = f"/test_{Path(mutant.file).stem}.py::"
            found = {test for test in self.took_s if name in test}.difference(self.failed)
        chosen, total = [], 0.0
        for test in sorted(found, key=lambda test: (self.took_s.get(test, 0.0), test)):
            total += self.took_s.get(test, 0.0)
            if chosen and total > TRIED_S:
                break
            chosen.append(test)
        return chosen


@dataclass
class Bench:
    """A copy of the repository, in which mutants are tried out. Use it as a context."""

    root: Path = ROOT
    folder: Path = field(init=False)

    def __enter__(self) -> Bench:
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        for name in FOLDERS:
            if (self.root / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(self.root / name, self.folder / name, ignore=ignored)
        for path in self.root.iterdir():
            if path.is_file():
                shutil.copy(path, self.folder / path.name)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def watched(
        self, room: str, tests: str, keep: Path | None = None, limit_s: float = 3600.0
    ) -> RoomTests:
        """Run a room's tests once, and return what each of them runs.

        Args:
            keep: file of the result. If it exists, the tests do not run again.

        Raises:
            RuntimeError: the tests do not run, or not one of them passes.
        """
        file = keep or self.folder / "watched.json"
        if keep is None or not keep.exists():
            command = "-m", "benchmarks.own.mutation_watch", room, tests, str(file.absolute())
            done = self._python(limit_s, *command)
            said = RoomTests({}, {})
            if done is not None and not done.returncode:
                said = RoomTests.load(file)
            if len(said.failed) >= len(said.took_s):
                file.unlink(missing_ok=True)
                why = "they ran out of time" if done is None else done.stdout.decode()[-3000:]
                raise RuntimeError(f"the tests of {tests} fail on the unchanged code: {why}")
        return RoomTests.load(file)

    def caught(self, mutant: Mutant, tests: RoomTests) -> bool:
        """Return whether a test notices a mutant: it fails, or does not end."""
        chosen = tests.of(mutant)
        if not chosen:
            return False
        target = self.folder / mutant.file
        unchanged = target.read_bytes()
        (self.folder / "chosen.txt").write_text("\n".join(chosen))
        limit_s = 60 + 5 * sum(tests.took_s.get(test, 0.0) for test in chosen)
        try:
            target.write_bytes(mutant.text(self.folder))
            done = self._python(limit_s, "-m", "pytest", "-x", "-q", *_PYTEST, "@chosen.txt")
        finally:
            target.write_bytes(unchanged)
        return done is None or done.returncode != 0

    def _python(self, limit_s: float, *command: str) -> subprocess.CompletedProcess[bytes] | None:
        """Run Python in the copy; None if it did not end.

        The limits are of CPU time. So a machine that is busy, or stands still, changes nothing.
        """
        environ = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_limit_memory,
        )
        used_s, idle = 0.0, 0
        while used_s < limit_s and idle < IDLE_S:
            try:
                out, _ = process.communicate(timeout=1.0)
                return subprocess.CompletedProcess(command, process.returncode, out)
            except subprocess.TimeoutExpired:
                before, used_s = used_s, _cpu_s(process.pid)
                idle = idle + 1 if used_s <= before else 0
        os.killpg(process.pid, 9)
        process.communicate()
        return None


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of its ended children, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


@dataclass
class Trials:
    """Mutants that were tried, and whether they were caught; kept in a file, if there is one.

    A run that was stopped goes on with the same file, as long as the code is the same. Beside it
    are files of what the tests of each room run.
    """

    path: Path | None = None
    known: dict[str, bool] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                key, caught = json.loads(line)
                self.known[key] = caught

    def watched(self, room: str) -> Path | None:
        """Return the file of what the tests of a room run."""
        name = room.rpartition("/")[2]
        return self.path and self.path.with_name(f"{self.path.name}.{name}")

    @staticmethod
    def key(mutant: Mutant) -> str:
        return f"{mutant.file}:{mutant.start}:{mutant.after}"

    def add(self, mutant: Mutant, caught: bool) -> None:
        self.known[self.key(mutant)] = caught
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([self.key(mutant), caught]) + "\n")
