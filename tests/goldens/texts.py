"""Compares lines with those that a test expects."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def lines_of(text: str) -> list[str]:
    """The lines of a text, without what follows a "#" and without blank lines."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def compare(what: str, text: str, found: Sequence[str]) -> None:
    """Compare what was found with a text. Of a line that ends with "…", only the beginning counts.

    Raises:
        AssertionError: they differ. The message says `what`, and shows the lines that differ, with
            the reasons that the text gives after a "#".
    """
    expected, found = lines_of(text), list(found)
    cut = [line for line in expected if line.endswith("…")]
    found = [
        next((c for c in cut if line.startswith(c.removesuffix("…").rstrip())), line)
        for line in found
    ]
    if expected == found:
        return
    noted = {line.partition("#")[0].strip(): line.strip() for line in text.splitlines()}
    files = "expected, and why", "as it is"
    differs = difflib.unified_diff(expected, found, *files, n=3, lineterm="")
    shown = [
        line if line.startswith(("---", "+++", "@@", "+")) else line[0] + noted[line[1:]]
        for line in differs
    ]
    raise AssertionError(f"{what}\n" + "\n".join(shown))
