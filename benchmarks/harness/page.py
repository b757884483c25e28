"""Makes docs/benchmarks.md of the saved runs (`python -m benchmarks page`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.registry import PROGRAMS, Program
from benchmarks.harness.results import FOLDER, age, load
from benchmarks.harness.rows import number, titled

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"

SYSTEMS = ("Symphony", "SHEPHERD", "RAMSIS", "Loki", "Kairos", "Live", "ray-slo")

_LONG = 14
"""Tables with more lines than this are folded."""

_HEAD = """\
<!-- Made by `python -m benchmarks page` from benchmarks/results: edit those, or the program. -->
# Benchmarks

A program of this repository printed every figure here. Each run was saved with its machine, date
and commit. `python -m benchmarks NAME --save` runs a program again, and `python -m benchmarks page`
makes this page. [benchmarks/README.md](../benchmarks/README.md) explains the figures, and why they
differ from the papers'.

* *full* or *quick*: a quick run is shorter, so its figures differ by a few percent.
* **paper**: the paper's figure for its own system, or for the system of that line. It was measured
  on the authors' hardware. Our figures are simulated, except CPU times and live programs.
* Kairos does not publish the latencies of its models. Ours were fitted to statements of the paper;
  those of RM2 were fitted to its Figure 1. So agreement with that figure is no evidence.
* A commit with "+" means that the checkout had uncommitted changes.
* **code changed since**: code that the program uses has changed after the run, so a new run may
  have other figures. For a live program, all code of ray-slo counts.
* **code not compared**: the run has no hash of its code, or one of another release of Python. Its
  code has probably changed, too.
* These words were right when this page was made. Code may have changed after that, too.
"""


def page(folder: Path = FOLDER) -> str:
    """Return the whole page as Markdown."""
    runs = {name: load(name, folder) for name in PROGRAMS}
    parts = [_HEAD, _asked(runs)]
    for system in SYSTEMS:
        parts.append(f"## {system}\n")
        parts += [_program(p, runs[p.name]) for p in PROGRAMS.values() if _system(p) == system]
    return "\n".join(parts)


def _system(program: Program) -> str:
    if program.live:
        return "Live"
    name, source = program.name, program.source
    return next(s for s in SYSTEMS if name.startswith(s.lower()) or source.startswith(s))


def _asked(runs: Mapping[str, dict[str, Any] | None]) -> str:
    """Return the table of figures that were asked for, beside what was measured."""
    lines = []
    for name, program in PROGRAMS.items():
        run = runs[name]
        length = "none" if run is None else "quick" if run["quick"] else "full"
        if run is not None and (old := age(run, program.module)):
            length += f", {old}"
        for ask in program.asked:
            unit, met = "", "–"
            measured = "no saved run" if run is None else "not in the saved run"
            if run is not None and (found := ask.rows(run["rows"])):
                worst, what = found[0], "least" if ask.sign == "≥" else "most"
                of = "" if len(found) == 1 else f", the {what} of {len(found)}"
                unit, measured = worst["unit"], f"{number(worst['ours'])}{of}"
                met = "yes" if ask.met(worst["ours"]) else "**no**"
            lines.append(
                [
                    f"[`{name}`](#{name})",
                    f"{ask.case.replace('*', '…')}: {ask.metric.replace('*', '…')}",
                    f"{ask.sign} {number(ask.value)} {unit}".strip(),
                    measured,
                    met,
                    length,
                    ask.note,
                ]
            )
    head = "## Asked and measured\n\nThe project's plan, or a paper that claims them, asked for "
    head += "these figures before they were measured.\n\n"
    return head + _table(
        ["program", "figure", "asked", "measured", "met", "run", "note"], lines, left=2
    )


def _program(program: Program, run: dict[str, Any] | None) -> str:
    name = program.name
    parts = [f"### {name}\n", f"{program.shows} ({program.source}).\n"]
    if run is None:
        return "\n".join([*parts, f"`python -m benchmarks {name}`: no saved run.\n"])
    options = (" --quick" if run["quick"] else "") + (f" --seed {s}" if (s := run["seed"]) else "")
    options += f" {own}" if (own := run.get("options")) else ""
    how = [
        f"`python -m benchmarks {name}{options}`",
        "quick" if run["quick"] else "full",
        f"seed {run['seed']}",
        run["date"],
        f"commit {run['commit']}" if run.get("commit") else "commit not recorded",
    ]
    if old := age(run, program.module):
        how[-1] += f", **{old}**"
    if "cores" in run:
        live = name.startswith("live-")
        took = f"{number(run['wall_s'])} s" if live else f"{number(run['cpu_s'])} s of CPU"
        how += [f"{run['cores']} cores, Python {run['python']}", took]
    return "\n".join([*parts, " · ".join(how) + "\n", *tables_of(run["rows"])])


def tables_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return tables with a line per case and a column per metric, as the program prints them."""
    made: dict[tuple[str, ...], list[list[str]]] = {}
    notes: dict[tuple[str, ...], dict[str, None]] = {}
    for title, label, of_case in titled((row["case"], row) for row in rows):
        key = (title, *(_heading(row) for row in of_case))
        made.setdefault(key, []).append([label, *(_cell(row) for row in of_case)])
        for row in of_case:
            if row["peers"]:
                peers = ", ".join(f"{peer} {number(v)}" for peer, v in row["peers"].items())
                notes.setdefault(key, {})[f"{row['metric']} in the paper: {peers}"] = None
    parts = []
    for (title, *headings), lines in made.items():
        text = _table(["", *headings], lines)
        text += "".join(f"\n{note}.\n" for note in notes.get((title, *headings), ()))
        if len(lines) > _LONG:
            summary = f"{title or lines[0][0] + ' …'}: {len(lines)} lines"
            text = f'<details markdown="1"><summary>{summary}</summary>\n\n{text}\n</details>\n'
        elif title:
            text = f"*{title}*\n\n{text}"
        parts.append(text)
    return parts


def _heading(row: dict[str, Any]) -> str:
    return f"{row['metric']} ({row['unit']})" if row["unit"] else row["metric"]


def _cell(row: dict[str, Any]) -> str:
    paper = "" if row["paper"] is None else f"<br>paper {number(row['paper'])}"
    return number(row["ours"]) + paper


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table; all columns after the first `left` are aligned right."""
    if not lines:
        return ""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in [head, *lines]]
    rule = [*["---"] * left, *["---:"] * (len(head) - left)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [cells[0], rule, *cells[1:]])


def write(path: Path = PAGE) -> Path:
    path.write_text(page(), encoding="utf-8")
    return path
