"""The registry of programs: each module in `FOLDERS` that has a `SOURCE`.

Modules are read, not imported. The first line of a program's docstring says what it shows. Its
constants are

* `SOURCE`: the figure or table of the paper that it reproduces.
* `ASKED`: figures that an issue or a paper asked for before they were measured, met or not. Each is
  (case, metric, sign, value), with a note if there is something to explain.
* `NAME`: the program's name, if it is not made of the folder's and the module's name.

A program has `run(quick, seed) -> list[Row]`. It may have `plot(rows, directory) -> list[Path]`. It
may also have `add_arguments(parser)`, for arguments that `run` gets in addition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

FOLDERS = ("symphony", "shepherd", "ramsis", "loki", "kairos", "live", "gpu", "own", "costs")
UNNAMED = ("own", "costs")
"""Folders whose names are not part of the names of their programs."""


class Ask(NamedTuple):
    """A figure that was asked for: `value` is its lower (≥) or upper (≤) limit.

    `case` and `metric` are shell patterns, and the limit holds for every row that they match.
    `note` says why it is not met, or how much it is worth.
    """

    case: str
    metric: str
    sign: str  # "≥" or "≤"
    value: float
    note: str = ""

    def rows(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the matching rows that have a figure, the worst first."""
        found = [
            row
            for row in rows
            if row["ours"] is not None
            and fnmatchcase(row["case"], self.case)
            and fnmatchcase(row["metric"], self.metric)
        ]
        return sorted(found, key=lambda row: row["ours"], reverse=self.sign == "≤")

    def met(self, figure: float) -> bool:
        return figure >= self.value if self.sign == "≥" else figure <= self.value


@dataclass(frozen=True)
class Program:
    name: str
    module: str
    source: str
    shows: str
    asked: tuple[Ask, ...]

    @property
    def live(self) -> bool:
        """Whether it starts Ray and runs in real time."""
        return self.module.startswith("benchmarks.live.")


def read(path: Path) -> Program | None:
    """Return the program in a module; None if the module is not a program."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    if "SOURCE" not in constants:
        return None
    said = {key: ast.literal_eval(constants[key]) for key in _CONSTANTS if key in constants}
    folder, stem = path.parent.name, path.stem.replace("_", "-")
    return Program(
        name=said.get("NAME", stem if folder in UNNAMED else f"{folder}-{stem}"),
        module=f"benchmarks.{folder}.{path.stem}",
        source=said["SOURCE"],
        shows=(ast.get_docstring(tree) or "").partition("\n")[0].removesuffix("."),
        asked=tuple(Ask(*ask) for ask in said.get("ASKED", ())),
    )


_CONSTANTS = ("NAME", "SOURCE", "ASKED")


def programs() -> dict[str, Program]:
    """Return all programs by name; in a folder, Figure 2 comes before Figure 10."""
    root = Path(__file__).parents[1]
    paths = [p for f in FOLDERS for p in sorted((root / f).glob("*.py"), key=_natural)]
    return {program.name: program for path in paths if (program := read(path))}


def _natural(path: Path) -> list[tuple[str, int]]:
    return [(text, int(n or 0)) for text, n in re.findall(r"(\D*)(\d*)", path.stem)]


PROGRAMS = programs()
