"""Every figure that README and docs quote was saved by a full run."""

import re
from pathlib import Path

import pytest

from benchmarks.harness import results
from benchmarks.harness.registry import PROGRAMS

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

WAITING = {
    "benchmarks/README.md": {"gpu"},
}
"""Pages and programs on them whose full run is still to be saved: nothing may be added."""


def quoted(text):
    """Programs that a paragraph, a table's row or a list's item names beside a figure."""
    found = set()
    for part in re.split(r"\n\s*\n|\n(?=[|*-] ?)", text):
        names = re.findall(r"`(?:python -m benchmarks )?([a-z0-9-]+)(?: --quick)?`", part)
        if re.search(r"\d", re.sub(r"`[^`]*`", "", part)):
            found |= PROGRAMS.keys() & names
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_figures_that_are_quoted_were_saved_by_a_full_run(page):
    if page == ROOT / "docs" / "benchmarks.md":
        pytest.skip("it has every saved run, and says which is quick")
    runs = {name: results.load(name) for name in quoted(page.read_text(encoding="utf-8"))}
    unsaved = {name for name, run in runs.items() if run is None or run["quick"]}
    # Otherwise: python -m benchmarks NAME --save
    assert unsaved <= WAITING.get(page.relative_to(ROOT).as_posix(), set())


def test_what_is_a_quotation():
    text = "`flat-top` is a program.\n\n| `kairos-fig1` | 2 × |\n| `kairos-fig2` | `3` |\n\n"
    assert quoted(text + "`python -m benchmarks loki-fig1 --quick`\ntakes 4 s.") == {
        "kairos-fig1",
        "loki-fig1",
    }
