"""`python -m benchmarks all`: run every program in a process of its own, the shortest first.

You can stop it at any time. With `--save`, the same command continues: it skips programs with a
saved full run of the present code (`harness.code`). `out/benchmarks` keeps the output of each
program.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.harness.code import code_of
from benchmarks.harness.registry import PROGRAMS, Program
from benchmarks.harness.results import load

OUTPUT = Path(__file__).parents[2] / "out" / "benchmarks"
SKIPPED = 77
"""Exit code of a program that needs something that is not installed; Automake uses the same."""
_QUICK_S, _LIVE_S = 30.0, 120.0  # assumed time of a quick run
_FULL = 20.0  # assumed ratio of the times of a full and a quick run
_PATIENCE_S = 60.0  # a program that was told to stop is killed after this


def every(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> None:
    """Run the programs that the arguments name; exit with 1 if any failed."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="with all: run only programs whose name matches, such as 'kairos-*'",
    )
    parser.add_argument(
        "--but",
        action="append",
        metavar="PATTERN",
        help="with all: leave out programs whose name matches",
    )
    options = parser.parse_args(args)
    if options.json or options.plot:
        parser.error("--json and --plot are for one program, not for all")
    chosen = _chosen(options.only, options.but, parser)
    waiting = chosen
    if options.save and not options.quick:
        waiting = [p for p in chosen if not is_saved(p, options.seed)]
    waiting = sorted(waiting, key=lambda p: expected_s(p, options.quick))
    print(f"{len(waiting)} programs to run, {len(chosen) - len(waiting)} saved from this code")
    flags = ["--seed", str(options.seed)]
    flags += ["--quick"] * options.quick + ["--save"] * options.save
    try:
        failed = _run(waiting, flags, options.quick)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    if failed:
        sys.exit(f"{len(failed)} failed: {', '.join(failed)}; {OUTPUT} has what they printed")


def _chosen(
    only: Sequence[str] | None, but: Sequence[str] | None, parser: argparse.ArgumentParser
) -> list[Program]:
    for pattern in [*(only or ()), *(but or ())]:
        if not any(fnmatchcase(name, pattern) for name in PROGRAMS):
            parser.error(f"no program matches {pattern!r}; there are {', '.join(PROGRAMS)}")
    return [
        program
        for name, program in PROGRAMS.items()
        if any(fnmatchcase(name, p) for p in only or ["*"])
        and not any(fnmatchcase(name, p) for p in but or [])
    ]


def is_saved(program: Program, seed: int = 0) -> bool:
    """Tell whether a full run of the present code with this seed is saved."""
    run = load(program.name)
    if run is None or run["quick"] or run["seed"] != seed or run.get("options"):
        return False
    return bool(run.get("code") == code_of(program.module))


def expected_s(program: Program, quick: bool) -> float:
    """Return the expected duration of a run in seconds, from the saved run if there is one."""
    run: dict[str, Any] = load(program.name) or {}
    short = run.get("quick", True)
    took_s: float = run.get("wall_s", 0.0)
    if not took_s or (quick and not short):
        took_s = (_LIVE_S if program.live else _QUICK_S) * (1 if quick or short else _FULL)
    return took_s * (_FULL if short and not quick else 1)


def _run(programs: Sequence[Program], flags: Sequence[str], quick: bool) -> list[str]:
    """Run the programs one after the other; return the names of those that failed."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    failed = []
    left = [expected_s(p, quick) for p in programs]
    expected = took = 1.0
    for i, program in enumerate(programs):
        to_go = _clock(sum(left[i:]) * took / expected)
        print(f"[{i + 1}/{len(programs)}] {program.name} … {to_go} left", flush=True)
        start = time.monotonic()
        path = OUTPUT / f"{program.name}.txt"
        with path.open("w", encoding="utf-8") as output:
            code = _process([program.name, *flags], output)
        wall_s = time.monotonic() - start
        expected, took = expected + left[i], took + wall_s
        print(f"    {_ended(code, path)} after {_clock(wall_s)}", flush=True)
        if code not in (0, SKIPPED):
            failed.append(program.name)
    return failed


def _process(args: Sequence[str], output: Any) -> int:
    """Run a program and return its exit code. If interrupted, let it stop what it started."""
    command = [sys.executable, "-m", "benchmarks", *args]
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def _ended(code: int, path: Path) -> str:
    if code == 0:
        return "done"
    lines = path.read_text(encoding="utf-8").strip().splitlines() or [""]
    return f"{'skipped' if code == SKIPPED else f'FAILED ({code})'}: {lines[-1].strip()},"


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
