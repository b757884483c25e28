"""What MkDocs runs beside its plugins: parts made of the code, and files that pages link to.

* `ray_slo.cli.docs_made` replaces markers such as `<!-- errors -->`.
* A link out of docs/, `../configs/digits.yaml`, works on the code host as it stands. On
  the site it leads to a page with that file; one that is not there fails `mkdocs build --strict`.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from ray_slo.cli.docs_made import filled_in

ROOT = Path(__file__).parents[1]
FILES = "files"  # folder of the site with what is outside docs/
# A link's target, without its fragment; nothing that has a scheme.
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(?=[)#])")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
log = logging.getLogger("mkdocs.hooks")


# -- files outside docs/ -----------------------------------------------------------------------


def outside(source: str, link: str) -> str | None:
    """Path from the repository's root that a link of a page in docs/ means; None if it is inside.

    Args:
        source: the page's path in docs/, or below `FILES`.
    """
    if source.startswith(f"{FILES}/"):
        home = posixpath.dirname(source.removeprefix(f"{FILES}/"))
    else:
        home = posixpath.join("docs", posixpath.dirname(source))
    path = posixpath.normpath(posixpath.join(home, link))
    if path.startswith("docs/"):
        return None
    return posixpath.join(path, "README.md") if (ROOT / path).is_dir() else path


def page_of(path: str) -> str:
    """Where the site has the page for a file outside docs/."""
    return f"{FILES}/{path}" + ("" if path.endswith(".md") else ".md")


def shown(path: str) -> str:
    """A file as a page."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = {".yaml": "yaml", ".py": "python", ".proto": "protobuf"}.get(Path(path).suffix, "")
    return f"# {path}\n\n````{language}\n{text}````\n"


def links(markdown: str) -> Iterator[str]:
    for match in LINK.finditer(FENCE.sub("", markdown)):
        yield match[1]


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every file outside docs/ that a page, or such a file, links to."""
    todo = [(f.src_uri, f.content_string) for f in files.documentation_pages()]
    while todo:
        source, markdown = todo.pop()
        for path in {outside(source, link) for link in links(markdown)} - {None}:
            if (ROOT / path).is_file() and files.get_file_from_path(page_of(path)) is None:
                content = shown(path)
                files.append(File.generated(config, page_of(path), content=content))
                if path.endswith(".md"):
                    todo.append((page_of(path), content))
    return files


def rewritten(markdown: str, source: str) -> str:
    """The page with links that lead out of docs/ (or, in a file shown, back into it) mended."""
    here = posixpath.dirname(source)

    def mend(match: re.Match[str]) -> str:
        path = outside(source, match[1])
        if path is not None:
            return posixpath.relpath(page_of(path), here or ".")
        if not source.startswith(f"{FILES}/"):
            return match[1]
        home = posixpath.dirname(source.removeprefix(f"{FILES}/"))
        inside = posixpath.normpath(posixpath.join(home, match[1])).removeprefix("docs/")
        return posixpath.relpath(inside, here)

    return LINK.sub(mend, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in what is made of the code, and mends links."""
    return rewritten(filled_in(markdown), page.file.src_uri)
