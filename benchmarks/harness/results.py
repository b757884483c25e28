"""Saved runs: one JSON file per program.

`python -m benchmarks NAME --save` writes the file. `python -m benchmarks page` makes
docs/benchmarks.md of all files.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.harness.code import code_of

FOLDER = Path(__file__).parents[1] / "results"
CHANGED, NOT_COMPARED = "code changed since", "code not compared"


def origin(module: str) -> dict[str, Any]:
    """Return where a program runs and which code: `commit`, the mark `code`, the machine.

    Call this before the run, because files may change during it.
    """
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "commit": _commit(),
        "code": code_of(module),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def save(
    body: dict[str, Any],
    origin: dict[str, Any],
    cpu_s: float,
    wall_s: float,
    folder: Path = FOLDER,
) -> Path | None:
    """Write a run with what is needed to judge and repeat it; it replaces the previous run.

    A quick run does not replace a full one: then nothing is written, and None is returned.

    Args:
        body: name, source, quick, seed and rows, as in the file of `--json`.
        origin: the result of `origin`.
        cpu_s: CPU seconds of the run, with those of child processes that have ended.
        wall_s: elapsed seconds.
    """
    path = folder / f"{body['name']}.json"
    if body["quick"] and path.exists() and not json.loads(path.read_text("utf-8"))["quick"]:
        return None
    run = origin | {"cpu_s": round(cpu_s, 1), "wall_s": round(wall_s, 1)}
    path.write_text(_text(body | run), encoding="utf-8")
    return path


def load(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Return the saved run of a program; None if there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def age(run: dict[str, Any], module: str) -> str:
    """Return CHANGED if a program's code is not the one of its saved run; "" if it is."""
    release, _, _ = platform.python_version().rpartition(".")
    if "code" not in run or run["python"].rpartition(".")[0] != release:
        return NOT_COMPARED  # other releases of Python have other marks
    return "" if run["code"] == code_of(module) else CHANGED


def _text(run: dict[str, Any]) -> str:
    """Return JSON with one line per row, so that a new run makes a readable diff."""
    head = {k: v for k, v in run.items() if k != "rows"}
    rows = ",\n  ".join(json.dumps(_rounded(row), ensure_ascii=False) for row in run["rows"])
    return (
        json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n'
    )


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Round our figure to six digits; tables show four."""
    ours = row["ours"]
    return row | {"ours": float(f"{ours:.6g}") if isinstance(ours, float) else ours}


def _commit() -> str | None:
    """Return the commit that runs, with a "+" if the checkout differs from it."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(FOLDER), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", ":/ray_slo", ":/benchmarks/*.py"
        )
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
