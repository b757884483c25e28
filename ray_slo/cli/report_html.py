"""A self-contained HTML page with text, tables, plots and charts. It needs no network, and has a
light and a dark theme.

A plot is an SVG figure that does not change. A chart is drawn by the page's script from its `data`,
and can be filtered and zoomed. A page without `data` has no charts.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_slo.core.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Plots are drawn in this colour. The page replaces it by its text colour, light or dark.
_INK = "#010203"
_STYLE: dict[str, object] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "savefig.transparent": True,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    ),
}
_numbers = itertools.count(1)  # of the figures, for their ids


@dataclass(frozen=True)
class Table:
    """A table of texts. The first column has the names of the rows.

    If `kinds` is given, the table can be searched by text and by the kind of a row ("": none). If
    the page has charts, it also shows only rows whose time is in the chosen range. On a phone, each
    row is then a card.

    Attributes:
        strong: rows that are emphasised.
        prose: whether the last column has sentences.
        kinds: kind of each row.
        times: time of each row, in seconds.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: Sequence[int] = ()
    prose: bool = False
    kinds: Sequence[str] = ()
    times: Sequence[float | None] = ()


@dataclass(frozen=True)
class Details:
    """A line that opens to numbered steps. Filters use its `tags` ("model", "outcome")."""

    head: str
    steps: Sequence[str]
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A section of a page: a heading, paragraphs, a table, details, charts and figures.

    Charts have names that `templates/report.js` knows. Figures are SVG texts from `svg`. Both have
    captions.
    """

    heading: str
    text: Sequence[str] = ()
    table: Table | None = None
    charts: Sequence[tuple[str, str]] = ()
    figures: Sequence[tuple[str, str]] = ()
    details: Sequence[Details] = ()
    code: str = ""


@dataclass(frozen=True)
class Page:
    """A page. `facts` are short pairs (name, value) under the title. `data` is the charts' data."""

    title: str
    lead: str = ""
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = field(default_factory=list)
    data: Mapping[str, Any] | None = None

    def render(self) -> str:
        """Return the HTML. All text is escaped; only SVG is not."""
        # In a script element, only the end tag and comments have a meaning.
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
        """Write the page, and make its folder if needed. Return the path.

        Raises:
            OSError: it cannot be written. What was there before is still there.
        """
        target, text = Path(path), self.render()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)
        return target


def svg(make: Callable[[], Figure]) -> str:
    """Return the figure of `make` as inline SVG that scales with the page and has its text
    colour."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        make().savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    # Scale by the viewBox; ids must not clash between the figures of one page.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    prefix = f"f{next(_numbers)}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'href="#', f'href="#{prefix}', text)
    return re.sub(r"url\(#", f"url(#{prefix}", text)
