"""The rows of a benchmark, and the JSON and tables made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rich import box
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One figure of ours, with the figures that the paper prints for itself and for its peers."""

    case: str
    metric: str
    unit: str
    ours: float | None
    paper: float | None = None
    peers: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["ours"] = None if self.ours is None or math.isnan(self.ours) else self.ours
        return row

    @property
    def heading(self) -> str:
        metric = self.metric.replace(" at ", "\nat ")
        return f"{metric}\n({self.unit})" if self.unit else metric


def series(
    title: str,
    points: Mapping[str, Mapping[float, float | None]],
    metric: str,
    unit: str,
    paper: Mapping[tuple[str, float], float] | None = None,
) -> list[Row]:
    """Return one row for each line of a plot and each x.

    Args:
        points: y by the name of the line, and x.
        metric: a format with a place for x, such as "goodput at {:g}/s".
        paper: the paper's figures by (name of the line, x).
    """
    return [
        Row(f"{title} · {name}", metric.format(x), unit, y, (paper or {}).get((name, x)))
        for name, of_x in points.items()
        for x, y in of_x.items()
    ]


class Failed(Exception):
    """A program finished, but its result is not acceptable. Has complaints, and the rows."""

    def __init__(self, rows: Sequence[Row], complaints: Sequence[str]) -> None:
        super().__init__(*complaints)
        self.rows, self.complaints = rows, complaints


T = TypeVar("T")


def titled(of: Iterable[tuple[str, T]]) -> Iterator[tuple[str, str, list[T]]]:
    """Group items by their case; yield (title, label, items) of each case.

    The part of a case before the first " · " is the title of its table, the rest the label.
    """
    cases: dict[str, list[T]] = {}
    for case, one in of:
        cases.setdefault(case, []).append(one)
    for case, found in cases.items():
        title, dot, label = case.partition(" · ")
        yield (title, label, found) if dot else ("", case, found)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Make tables with a line per case and a column per metric.

    Cases with other metrics get another table. The paper's own figures stand below ours, and those
    of its peers below the table.
    """
    made: dict[tuple[str, ...], Table] = {}
    for title, label, of_case in titled((row.case, row) for row in rows):
        headings = [row.heading for row in of_case]
        if (key := (title, *headings)) not in made:
            made[key] = table = Table(box=box.SIMPLE_HEAD, title=title or None)
            table.add_column("", no_wrap=True)
            for heading in headings:
                table.add_column(heading, justify="right")
        made[key].add_row(label, *(_cell(r) for r in of_case))
        for row in of_case:
            if row.peers:
                peers = ", ".join(f"{name} {number(value)}" for name, value in row.peers.items())
                made[key].caption = f"{row.metric} in the paper: {peers}"
    return list(made.values())


def _cell(row: Row) -> str:
    paper = "" if row.paper is None else f"\n[dim]paper {number(row.paper)}[/dim]"
    return number(row.ours) + paper


def number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
