"""`ray-slo docs`: the documentation that comes with the package, in the terminal."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

from ray_slo.core.names import listed, nearest

_HEADING = re.compile(r"^(#+) (.+)$")
_FENCE = ("```", "~~~")


def register(app: typer.Typer) -> None:
    app.command("docs")(docs)


def docs(
    page: Annotated[
        str | None,
        typer.Argument(help="Page or section, as a message names it; default: list the pages."),
    ] = None,
) -> None:
    """Show a page of the documentation, or a section of it.

    Example: ray-slo docs docs/reference/config.md#models
    """
    from rich.console import Console
    from rich.markdown import Markdown

    from ray_slo.cli.docs_made import filled_in

    root = folder()
    pages = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.md"))}
    if page is None:
        for name, path in pages.items():
            typer.echo(f"{name:36} {_title(path)}")
        return
    name, _, anchor = page.partition("#")
    text = filled_in(pages[_found(name, list(pages))].read_text(encoding="utf-8"))
    if anchor:
        text = section(text, anchor)
    text = text.replace("\n<br>", "  ")
    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        typer.echo(text)


def folder() -> Path:
    """Return the folder of the documentation: in a clone of the repository, or as installed with
    the package.

    Raises:
        ValueError: there is none.
    """
    clone = Path(__file__).parents[2] / "docs"
    installed = Path(sysconfig.get_path("data")) / "share" / "doc" / "ray-slo"
    for found in (clone, installed):
        if (found / "index.md").is_file():
            return found
    raise ValueError(f"the documentation is neither in {clone} nor in {installed}")


def section(text: str, anchor: str) -> str:
    """Return the section of a page with this anchor, and its subsections.

    Raises:
        ValueError: there is none. The message names the page's anchors.
    """
    lines, found, level, is_code = text.splitlines(), [], 0, False
    anchors = []
    for line in lines:
        if line.startswith(_FENCE):
            is_code = not is_code
        heading = None if is_code else _HEADING.match(line)
        if heading:
            anchors.append(slug(heading[2]))
            if level and len(heading[1]) <= level:
                break
            if not level and anchors[-1] == anchor:
                level = len(heading[1])
        if level:
            found.append(line)
    if not level:
        raise ValueError(
            f"page: no section #{anchor}; they are {listed(anchors, 40)}{nearest(anchor, anchors)}"
        )
    return "\n".join(found) + "\n"


def slug(heading: str) -> str:
    """Return the anchor that MkDocs and code hosts give a heading."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def _found(name: str, pages: list[str]) -> str:
    name = name.removeprefix("docs/").removesuffix(".md")
    for wanted in (f"{name}.md", f"{name}/index.md"):
        if wanted in pages:
            return wanted
    same = [path for path in pages if Path(path).stem == name]
    if len(same) == 1:
        return same[0]
    if same:
        both = " and ".join(path.removesuffix(".md") for path in same)
        raise ValueError(f"page: several pages are named {name!r}: {both}")
    names = [path.removesuffix(".md") for path in pages]
    raise ValueError(f"page: no page {name!r}; they are {listed(names, 60)}{nearest(name, names)}")


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next((line[2:].strip() for line in lines if line.startswith("# ")), "")
