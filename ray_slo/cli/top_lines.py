"""A screen as lines of a terminal, for `ray-slo top`: sorted rows, aligned columns, a chosen row.

Pure. While the same tables are shown, columns get wider but never narrower. So a new reading
changes few characters, and a slow connection transfers only those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ray_slo.cli.top_text import STYLES, header
from ray_slo.serve.watch.screen import Row, Screen, Section

_GAP = "  "


@dataclass
class Sorting:
    """The order of a table's rows: sorted by a column, or as received if the column is None."""

    column: int | None = None
    down: bool = False

    def next(self, columns: Sequence[str], step: int) -> None:
        """Sort by the column `step` further on. Columns of numbers begin with the largest."""
        places = [None, *range(len(columns))]
        self.column = places[(places.index(self.column) + step) % len(places)]
        self.down = self.column is not None and columns[self.column].startswith("#")

    def of(self, rows: Sequence[Row]) -> list[Row]:
        if self.column is None:
            return list(rows)
        column = self.column

        def key(row: Row) -> tuple[bool, float | str]:
            found = row.keys[column]
            return isinstance(found, str), found

        return sorted(rows, key=key, reverse=self.down)


@dataclass
class Layout:
    """Lays out screens. It remembers the chosen row, and the widths of columns.

    Attributes:
        section: key of the table that the sorting keys apply to.
        chosen: name of the model or pipeline that `enter` opens.
    """

    section: str = "models"
    chosen: str | None = None
    sorts: dict[str, Sorting] = field(default_factory=dict)
    _widths: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    def sorting(self) -> Sorting:
        """Order of the table that the sorting keys apply to."""
        return self.sorts.setdefault(self.section, Sorting())

    def choose(self, screen: Screen, step: int) -> None:
        """Choose the model `step` rows further down."""
        names = self._names(screen)
        if names:
            at = names.index(self.chosen) + step if self.chosen in names else max(step, 0)
            self.chosen = names[min(max(at, 0), len(names) - 1)]

    def next_section(self, screen: Screen) -> None:
        """Let the sorting keys apply to the next table."""
        keys = [section.key for section in screen.sections if section.rows]
        if keys:
            at = keys.index(self.section) if self.section in keys else -1
            self.section = keys[(at + 1) % len(keys)]

    def lines(self, screen: Screen) -> list[Text]:
        """Return all lines of the screen below its head."""
        if (names := self._names(screen)) and self.chosen not in names:
            self.chosen = names[0]
        found = [Text(line.text, STYLES[line.level]) for line in screen.lines]
        for section in screen.sections:
            found.append(Text())
            found.append(Text(section.title, "bold underline" if self._sorts(section) else "bold"))
            found += [Text(line.text, STYLES[line.level]) for line in section.lines]
            if section.rows:
                found += self._table(section)
        return found

    def chosen_line(self, screen: Screen) -> int | None:
        """Return the index of the chosen model's line, or None."""
        marked = [line.style == "reverse" for line in self.lines(screen)]
        return marked.index(True) if True in marked else None

    def _names(self, screen: Screen) -> list[str]:
        """Return the names of models and pipelines, in the order on the screen."""
        models = next((s for s in screen.sections if s.key == "models"), None)
        if models is None:
            return []
        return [row.cells[0] for row in self.sorts.get("models", Sorting()).of(models.rows)]

    def _sorts(self, section: Section) -> bool:
        return section.key == self.section

    def _table(self, section: Section) -> list[Text]:
        sorting = self.sorts.get(section.key, Sorting())
        heads = [header(column) for column in section.columns]
        titles = [said for said, _ in heads]
        if sorting.column is not None:
            titles[sorting.column] += "▼" if sorting.down else "▲"
        rows = sorting.of(section.rows)
        widths = self._widths.setdefault((section.key, *section.columns), [0] * len(heads))
        for cells in (titles, *(row.cells for row in rows)):
            for i, cell in enumerate(cells):
                widths[i] = max(widths[i], cell_len(cell))

        def line(cells: Sequence[str], style: str) -> Text:
            parts = [
                _set(cell, width, justify)
                for cell, width, (_, justify) in zip(cells, widths, heads, strict=True)
            ]
            said = _GAP.join(parts)
            # The background of the chosen row is as wide as the table.
            return Text(said if style == "reverse" else said.rstrip(), style)

        found = [line(titles, "dim")]
        for row in rows:
            style = "yellow" if row.warn else ""
            if section.key == "models" and row.cells[0] == self.chosen:
                style = "reverse"
            found.append(line(row.cells, style))
        return found


def _set(cell: str, width: int, justify: str) -> str:
    if justify == "right":
        return " " * (width - cell_len(cell)) + cell
    return set_cell_size(cell, width)
