"""The programs: each module of these folders that has a `SOURCE`. They are read, not imported.

A program's module opens with a line that says what it shows. Its constants are

* `SOURCE`: the figure or table of the paper that it answers;
* `ASKED`, where figures were asked for before they were measured, by an issue or by a paper that
  claims them: (case, metric, sign, value), met or not, and a note where there is something to say;
* `NAME`, where the name is not made of the folder's and the module's.

It has `run(quick, seed) -> list[Row]`, and may have `plot(rows, directory) -> list[Path]` and
`add_arguments(parser)` for arguments of its own, which `run` then takes.
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
"""Folders whose name is no part of a program's."""


class Ask(NamedTuple):
    """Every row of `case` and `metric` (shell patterns) should be on this side of `value`.

    `note`: why it is not met, or what it is worth.
    """

    case: str
    metric: str
    sign: str  # "≥" or "≤"
    value: float
    note: str = ""

    def rows(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that are meant and have a figure, the worst first."""
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
        """Whether it starts Ray and takes its time."""
        return self.module.startswith("benchmarks.live.")


def read(path: Path) -> Program | None:
    """The program in a module; None where the module is none."""
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
    """By name; in a folder, Figure 2 stands before Figure 10."""
    root = Path(__file__).parents[1]
    paths = [p for f in FOLDERS for p in sorted((root / f).glob("*.py"), key=_natural)]
    return {program.name: program for path in paths if (program := read(path))}


def _natural(path: Path) -> list[tuple[str, int]]:
    return [(text, int(n or 0)) for text, n in re.findall(r"(\D*)(\d*)", path.stem)]


PROGRAMS = programs()
