"""Live on Ray Serve: three runs of the demo, the third beside other work.

These are the figures of `ray-slo demo`. It sends the same recorded stream of digit images to three
systems. They are plain Serve with the best wait that a search finds, `@ray_slo.batch`, and
`@ray_slo.deployment` with smaller networks as variants. The stream is calm at first (half of what
tuned plain Serve holds). It rises to 1.3 × of that, has bursts of 2.6 ×, and is calm again. SLO and
rates are calibrated anew in every run.

*In time*: answers within the SLO, per second. *Bad*: share of requests without such an answer. The
client gives up a request after 10 s, so a p99 of 10,000 ms means at least that. *Accuracy*: share
of right answers among those in time. */ tuned*: as a multiple of tuned plain Serve's figure.
*Other CPU*: share of the machine's CPU time that other programs than the demo took. It is the
largest of the three systems' runs.

The other work in the third run is a process that computes without a pause. Reports and plots of the
runs stay in `out/live-demo`. README has the table and the plot of the first run:

    python -m benchmarks live-demo --save --plot docs && python -m benchmarks page
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.live.cluster import importable

SOURCE = "ray-slo"
ASKED = [
    ("* · whole run, @ray_slo.*", "in time / tuned", "≥", 1.3),
    (
        "* · calm, @ray_slo.*",
        "in time / tuned",
        "≥",
        0.98,
        "run 1: @ray_slo.batch refused 2.7 %, probably because its batches stayed small",
    ),
]

ALONE, BESIDE = "alone", "beside other work"
RUNS = {"run 1": ALONE, "run 2": ALONE, "run 3, beside other work": BESIDE}
NAMES = {
    "tuned": "@serve.batch, tuned",
    "batch": "@ray_slo.batch",
    "deployment": "@ray_slo.deployment",
}
BUSY = "while True: pass"
OUT = "out/live-demo"


def run(quick: bool, seed: int, found: Sequence[str] = ()) -> list[Row]:
    rows: list[Row] = []
    if found:
        made = [json.loads(Path(file).read_text(encoding="utf-8")) for file in found]
        return [row for title, one in zip(RUNS, made, strict=True) for row in rows_of(title, one)]
    for i, (title, kind) in enumerate(RUNS.items()):
        with other_work(kind == BESIDE):
            found = demo(Path(OUT) / str(i + 1), quick, seed + i)
        rows += rows_of(title, found)
        if quick:
            break
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--found",
        nargs=len(RUNS),
        default=(),
        metavar="FILE",
        help="read outputs of `ray-slo demo --json`, one per run, instead of running it",
    )


def plot(rows: list[Row], directory: Path, out: str = OUT) -> list[Path]:
    """Copy the first run's plot, which the demo drew."""
    return [Path(shutil.copyfile(Path(out) / "1" / "demo.svg", directory / "demo.svg"))]


def demo(out: Path, quick: bool, seed: int) -> dict[str, Any]:
    """Run the demo in a process of its own, and return its figures."""
    command = [sys.executable, "-m", "ray_slo.demo", "--json", "--seed", str(seed)]
    command += ["--out", str(out), *(["--quick"] if quick else [])]
    environ = {**os.environ, "PYTHONPATH": importable()}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    (out / "figures.json").write_text(done.stdout, encoding="utf-8")
    return found


@contextmanager
def other_work(wanted: bool) -> Iterator[None]:
    """If wanted, run a process that computes without a pause until the end of the block."""
    if not wanted:
        yield
        return
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def rows_of(title: str, found: dict[str, Any]) -> list[Row]:
    """Return the rows of one run.

    Args:
        found: what `ray-slo demo --json` printed.
    """
    rows = [
        Row(f"{title} · setting", "SLO", "ms", found["slo_ms"]),
        Row(f"{title} · setting", "tuned plain Serve holds", "1/s", found["held"]),
        Row(f"{title} · setting", "wait", "ms", 1e3 * found["way"]["wait_s"]),
        Row(f"{title} · setting", "whole demo", "s", found["seconds"]),
    ]
    others = [use["others"] for use in found["uses"].values() if use["others"] is not None]
    if others:
        rows.append(Row(f"{title} · setting", "other CPU", "%", 100 * max(others)))
    for part in found["parts"]["tuned"]:
        for key, parts in found["parts"].items():
            one, tuned = parts[part], found["parts"]["tuned"][part]
            case = f"{title} · {part}, {NAMES[key]}"
            rows += [
                Row(case, "offered", "1/s", one["offered"]),
                Row(case, "in time", "1/s", one["goodput"]),
                Row(case, "bad", "%", 100 * one["bad"]),
                Row(case, "p50", "ms", one["p50_ms"]),
                Row(case, "p99", "ms", one["p99_ms"]),
                Row(case, "accuracy", "%", percent(one["accuracy"])),
                Row(case, "in time / tuned", "", ratio(one["goodput"], tuned["goodput"])),
            ]
    return rows


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def ratio(ours: float, tuned: float) -> float | None:
    """Return ours / tuned; None if tuned plain Serve answered nothing in time."""
    return ours / tuned if tuned else None
