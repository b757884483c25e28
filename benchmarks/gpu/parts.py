"""Runs the parts, each in a process of its own: `python -m benchmarks.gpu.parts NAME …`.

A part writes its rows to a file as it measures them. So they remain whatever happens to it or to
the device: an error on a GPU often spoils the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from benchmarks.harness.data import Missing
from benchmarks.harness.rows import Row
from benchmarks.live.shipped import session_of

PARTS = {  # by name: (module and function, weight of its share of the time)
    "profiles": ("benchmarks.gpu.profiles:rows", 2.0),
    "exit points": ("benchmarks.gpu.preemption:exit_points", 2.5),
    "two streams": ("benchmarks.gpu.preemption:two_streams", 1.5),
    "one process": ("benchmarks.gpu.serving:one_process", 1.0),
    "memory": ("benchmarks.gpu.memory:memory", 0.7),
    "serving": ("benchmarks.gpu.serving:serving", 3.0),
    "variants": ("benchmarks.gpu.serving:variants", 1.5),
    "out of memory": ("benchmarks.gpu.memory:out_of_memory", 1.0),
}
_OF_LIMIT = 0.8
"""Share of the time after its imports that a part may plan with, as it cannot plan exactly."""
_END_S = 5.0  # a process that was asked to end is killed after this


def held(
    tiny: bool,
    seed: int,
    seconds: float,
    folder: Path,
    parts: Mapping[str, tuple[str, float]] = PARTS,
) -> tuple[list[Row], list[str]]:
    """Run the parts one after the other within a time.

    Args:
        folder: folder for their output.

    Returns:
        The rows of all parts, and a complaint for each part that failed or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds
    rows: list[Row] = []
    complaints: list[str] = []
    left = sum(weight for _, weight in parts.values())
    for name, (where, weight) in parts.items():
        limit_s = max((until - time.monotonic()) * weight / left, 0.0)
        left -= weight
        print(f"{name}: {limit_s:.0f} s at most …", file=sys.stderr, flush=True)
        begin = time.monotonic()
        found, complaint = _part(where, tiny, seed, limit_s, folder / name.replace(" ", "-"))
        rows += found
        if complaint is not None:
            complaints.append(f"{name}: {complaint}")
            rows.append(Row(f"parts that failed · {name}: {complaint}"[:300], "failed", "", 1))
        print(
            f"  {complaint or 'done'} after {time.monotonic() - begin:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return rows, complaints


def _part(
    where: str, tiny: bool, seed: int, limit_s: float, stem: Path
) -> tuple[list[Row], str | None]:
    lines, log = stem.with_suffix(".jsonl"), stem.with_suffix(".txt")
    lines.write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.gpu.parts", where, "--rows", str(lines)]
    until = time.monotonic() + limit_s  # the clock is common to all processes of the machine
    command += ["--seed", str(seed), "--until", str(until), *["--tiny"] * tiny]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    rows = [Row(**json.loads(line)) for line in lines.read_text(encoding="utf-8").splitlines()]
    if code == 0:
        return rows, None
    if code is None:
        return rows, f"stopped after {limit_s:.0f} s; what it had measured is kept"
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return rows, (said or [f"exit code {code}"])[-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and everything that it started, such as a Ray cluster."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    for pid in session_of(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.parts")
    parser.add_argument("where", help="the part, as module:function")
    parser.add_argument("--rows", type=Path, required=True, help="file for the rows")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--until",
        type=float,
        required=True,
        help="when the part must end, on the clock of time.monotonic()",
    )
    parser.add_argument("--tiny", action="store_true", help="run tiny networks on the CPU")
    options = parser.parse_args(args)
    from benchmarks.gpu.setting import Setting

    module, _, function = options.where.partition(":")
    rows_of = getattr(import_module(module), function)
    seconds = _OF_LIMIT * max(options.until - time.monotonic(), 0.0)
    setting = Setting(options.tiny, options.seed, seconds)
    if options.tiny:
        import torch

        torch.set_num_threads(1)  # on a busy machine, several threads would wait for one another
    with options.rows.open("a", encoding="utf-8") as file:
        try:
            for row in rows_of(setting):
                file.write(json.dumps(row.to_json(), ensure_ascii=False) + "\n")
                file.flush()
        except Missing as error:
            row = Row(f"left out · {options.where}: {error}"[:300], "measured", "", 0)
            file.write(json.dumps(row.to_json(), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
