"""The code of docs/kairos.md, run from top to bottom, prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "kairos.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def run(blocks, folder):
    """What each Python block prints; a YAML block is the file that its first line names."""
    names, printed = {"__name__": "page"}, []
    for language, code in blocks:
        if language == "yaml":
            (folder / re.match(r"# (\S+):", code)[1]).write_text(code)
        elif language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, "docs/kairos.md", "exec"), names)
            printed.append(out.getvalue())
    return printed


def test_the_page_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = [text for language, text in BLOCKS if language == "text"]
    assert len(said) >= 6
    assert run(BLOCKS, tmp_path) == said
