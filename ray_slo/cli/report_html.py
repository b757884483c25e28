"""A self-contained HTML page with text, tables, plots and charts: no network, light and dark.

Plots are figures drawn once, as SVG; charts are drawn by the page's own script from its data, can
be filtered and zoomed, and are there only where a page has `data`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Drawn in this colour, which the page then replaces by its text colour, light or dark.
_INK = "#010203"
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "savefig.transparent": True,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    ),
}


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is a row's name. `strong` rows are emphasised; the last
    column may hold `prose`.

    With `kinds` it can be searched: by text, by the kind of a row (its words; "" for none), and, if
    the page has charts, by the `times` chosen there. On a phone a row is then a card, not a line.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: Sequence[int] = ()
    prose: bool = False
    kinds: Sequence[str] = ()
    times: Sequence[float | None] = ()


@dataclass(frozen=True)
class Details:
    """A line that opens to numbered steps; a filter goes by its `tags` ("model", "outcome")."""

    head: str
    steps: Sequence[str]
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, a table, details, charts (names that `templates/report.js` knows) and
    figures as SVG (from `svg`), both with captions."""

    heading: str
    text: Sequence[str] = ()
    table: Table | None = None
    charts: Sequence[tuple[str, str]] = ()
    figures: Sequence[tuple[str, str]] = ()
    details: Sequence[Details] = ()
    code: str = ""


@dataclass(frozen=True)
class Page:
    """A page; `facts` are short (name, value) pairs under the title, `data` is what charts show."""

    title: str
    lead: str = ""
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = field(default_factory=list)
    data: Mapping[str, Any] | None = None

    def render(self) -> str:
        """The HTML. All text is escaped; only SVG goes in as it is."""
        # Inside a script element only its end tag and comments mean something.
        data = self.data and json.dumps(self.data, separators=(",", ":")).replace("<", "\\u003c")
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("ray_slo.cli", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return environment.get_template("report.html.j2").render(page=self, data=data)

    def write(self, path: str | Path) -> Path:
        """Write it, creating folders; the path."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.render(), encoding="utf-8")
        return target


def style() -> dict[str, object]:
    """matplotlib settings for figures made for a page: `with matplotlib.rc_context(style()): …`."""
    return dict(_STYLE)


def svg(figure: Figure) -> str:
    """The figure as inline SVG that scales with the page and takes on its text colour.

    Make the figure inside `matplotlib.rc_context(style())`; else its text stays black.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(style()):  # type: ignore[arg-type]
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    # Scale by the viewBox; ids must not clash between the figures of one page.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return _unique_ids(text)


_counter = 0


def _unique_ids(text: str) -> str:
    global _counter
    _counter += 1
    prefix = f"f{_counter}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'href="#', f'href="#{prefix}', text)
    return re.sub(r"url\(#", f"url(#{prefix}", text)
