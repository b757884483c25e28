"""An application's screen as plain text, for `ray-slo status` and `ray-slo top --once`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ray_slo.serve.watch.screen import Line, Screen, Section

_NO_TERMINAL = 400  # width in characters; so a table's row stays one line for scripts
STYLES = {"": "", "warn": "yellow", "error": "red"}


def console_for_tables() -> Console:
    """Return a console that does not fold the rows of tables if the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_NO_TERMINAL)


def print_screen(console: Console, screen: Screen) -> None:
    """Print the whole screen. Names that users chose are printed as text, without markup and
    control characters."""
    head = Text.assemble((screen.application, "bold"), "  ", screen.head)
    console.print(head, soft_wrap=True)
    for line in screen.lines:
        console.print(styled(line), soft_wrap=True)
    for section in screen.sections:
        for line in section.lines:
            console.print(styled(line), soft_wrap=True)
        if section.rows:
            console.print(Group(Text(section.title, style="italic"), _table(section)))


def styled(line: Line) -> Text:
    return Text(line.text, style=STYLES[line.level])


def header(column: str) -> tuple[str, Any]:
    """Return the title of a column, and its alignment."""
    return (column[1:], "right") if column.startswith("#") else (column, "left")


def _table(section: Section) -> Table:
    table = Table()
    for column in section.columns:
        said, justify = header(column)
        table.add_column(Text(said), justify=justify, overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row.cells), style="yellow" if row.warn else None)
    return table
