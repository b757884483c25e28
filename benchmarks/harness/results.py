"""Saved runs, a JSON file per program: `python -m benchmarks NAME --save` writes them, and
`python -m benchmarks page` makes docs/benchmarks.md of them."""

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


def origin(module: str) -> dict[str, Any]:
    """Where and of what code a program is about to run: `commit` and the mark `code` among others.
    To be asked before the run, as files may change meanwhile."""
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
    """Write a run beside what it takes to judge and repeat it, in place of the one before.

    None, and nothing is written, where a full run is saved and this is a quick one.

    Args:
        body: name, source, quick, seed and rows, as `--json` has them.
        origin: of `origin`.
        cpu_s: CPU seconds that the run took, those of ended child processes included.
        wall_s: seconds on the clock.
    """
    path = folder / f"{body['name']}.json"
    if body["quick"] and path.exists() and not json.loads(path.read_text("utf-8"))["quick"]:
        return None
    run = origin | {"cpu_s": round(cpu_s, 1), "wall_s": round(wall_s, 1)}
    path.write_text(_text(body | run), encoding="utf-8")
    return path


def load(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """The saved run of a program; None where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def _text(run: dict[str, Any]) -> str:
    """JSON with a line per row, so that a new run reads well as a diff."""
    head = {k: v for k, v in run.items() if k != "rows"}
    rows = ",\n  ".join(json.dumps(_rounded(row), ensure_ascii=False) for row in run["rows"])
    return (
        json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n'
    )


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Six digits of what was measured: tables show four."""
    ours = row["ours"]
    return row | {"ours": float(f"{ours:.6g}") if isinstance(ours, float) else ours}


def _commit() -> str | None:
    """The commit that ran; "+" behind it where the checkout differs from it."""

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
