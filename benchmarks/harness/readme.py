"""Writes the figures of the saved `live-demo` into README (`python -m benchmarks page`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.results import load
from benchmarks.harness.rows import number, titled

README = Path(__file__).parents[2] / "README.md"
PLOT = README.with_name("docs") / "demo.svg"
IMAGE = "![Requests over time: offered, and answered in time by each system](docs/demo.svg)\n\n"
BEGIN = "<!-- Made by `python -m benchmarks page` from the saved live-demo: begin -->\n"
END = "<!-- Made by `python -m benchmarks page`: end -->\n"
COLUMNS = {"offered": "{} /s", "in time": "{} /s", "bad": "{} %"}
COLUMNS |= {"p50": "{} ms", "p99": "{} ms", "accuracy": "{} %"}
GIVEN_UP_MS = 10_000
RUN = "run 1"  # the run whose plot is in docs/demo.svg


def demo(rows: Sequence[dict[str, Any]]) -> str:
    """Return the paragraph and the table about the first run."""
    setting: dict[str, float] = {}
    lines: list[tuple[str, str, dict[str, float | None]]] = []
    for title, label, of_case in titled((row["case"], row) for row in rows):
        if title != RUN:
            continue
        found = {row["metric"]: row["ours"] for row in of_case}
        if label == "setting":
            setting = {name: value or 0.0 for name, value in found.items()}
        else:
            part, _, system = label.partition(", ")
            lines.append((part, system, found))
    ahead = [
        f"`{system}` {found['in time / tuned']:.2f} ×"
        for part, system, found in lines
        if part == "whole run" and system.startswith("@ray_slo") and found["in time / tuned"]
    ]
    return (
        f"This run had two replicas of one core each, and an SLO of {number(setting['SLO'])} ms. "
        f"Tuned plain Serve\nheld {setting['tuned plain Serve holds']:.0f} requests/s. "
        f"In time, over the whole run and against it: {' and '.join(ahead)}.\n\n" + _table(lines)
    )


def _table(lines: Sequence[tuple[str, str, dict[str, float | None]]]) -> str:
    names = {"in time": "answered in time"}
    head = ["part of the run", "system", *(names.get(name, name) for name in COLUMNS)]
    text = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    for part, system, found in lines:
        cells = [cell(form, name, found[name]) for name, form in COLUMNS.items()]
        # A name such as "@serve.batch, tuned" has code before the comma.
        code, comma, rest = system.partition(",")
        text += f"| {part} | `{code}`{comma}{rest} | {' | '.join(cells)} |\n"
    return text


def cell(form: str, name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if (name == "p99" and value >= GIVEN_UP_MS) or (name == "p50" and value >= GIVEN_UP_MS):
        return form.format(f"> {GIVEN_UP_MS}")
    return form.format(f"{value:.0f}" if name in ("p50", "p99") else f"{value:.1f}")


def filled(text: str) -> str:
    """Return README with the figures of the saved run, or unchanged if no run is saved."""
    if (run := load("live-demo")) is None:
        return text
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    plot = IMAGE if PLOT.exists() else ""
    return before + BEGIN + "\n" + plot + demo(run["rows"]) + "\n" + END + after


def write(path: Path = README) -> None:
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
