"""Check whether the machine was disturbed: CPU time of other processes, CPU time that the host of a
virtual machine took (steal time), and a late client.

It reads /proc, so it works only on Linux. Every process that the demo starts has a mark in its
environment. A process without the mark is not the demo's.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ray_slo.load.report import LATE_GENERATOR_S

MARK = "DEMO_RUN_OF_RAY_SLO"  # without the prefix RAY_SLO_, which would make it a setting
OTHERS = 0.10  # share of the CPU time that other processes may take in a quiet run
STOLEN = 0.03  # share of the CPU time that the host may take in a quiet run


@dataclass(frozen=True)
class Reading:
    """CPU times since the machine and its processes started, in seconds.

    Attributes:
        at_s: time of the reading on the monotonic clock.
        busy_s, stolen_s: busy and stolen time of all cores together.
        ours_s: CPU time of each of the demo's processes, by its ID and start.
    """

    at_s: float
    busy_s: float
    stolen_s: float
    ours_s: Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Use:
    """Shares of the machine's CPU time in a part of a run.

    Attributes:
        others: share that processes of others took. None if the system does not report it.
        stolen: share that the machine's host took. None if the system does not report it.
        late_s: 99th percentile of the time by which the client sent its requests too late. None
            if it was not measured.
    """

    others: float | None
    stolen: float | None
    late_s: float | None = None

    def complaints(self) -> list[str]:
        """The disturbances of the machine, in words. Empty if there were none."""
        found = []
        if self.others is not None and self.others > OTHERS:
            found.append(f"other programs took {100 * self.others:.0f} % of the CPU time")
        if self.stolen is not None and self.stolen > STOLEN:
            found.append(f"the machine's host took {100 * self.stolen:.0f} % of the CPU time")
        if self.late_s is not None and self.late_s > LATE_GENERATOR_S:
            found.append(f"the client sent up to {1e3 * self.late_s:.0f} ms late (p99)")
        return found


def used(readings: Sequence[Reading], cores: int) -> tuple[float | None, float | None]:
    """Return the shares of the CPU time that others took and that were stolen, between the first
    and the last reading.

    A process that ended between two readings counts up to the earlier one.
    """
    if len(readings) < 2 or readings[-1].at_s <= readings[0].at_s:
        return None, None
    ours_s = 0.0
    for before, after in itertools.pairwise(readings):
        # A new process has used all its CPU time since the previous reading.
        ours_s += sum(s - before.ours_s.get(one, 0.0) for one, s in after.ours_s.items())
    first, last = readings[0], readings[-1]
    whole = cores * (last.at_s - first.at_s)
    others = max(last.busy_s - first.busy_s - ours_s, 0.0) / whole
    return others, (last.stolen_s - first.stolen_s) / whole


class Watch:
    """Context manager that reads the machine's CPU times twice per second, in a thread."""

    def __init__(self, period_s: float = 0.5, proc: Path = Path("/proc")) -> None:
        self._period_s, self._proc = period_s, proc
        self._readings: list[Reading] = []
        self._is_ours: dict[tuple[int, int], bool] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._mark = f"{MARK}={os.getpid()}".encode()
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01

    def __enter__(self) -> Watch:
        os.environ[MARK] = str(os.getpid())  # processes that start from now on inherit it
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        os.environ.pop(MARK, None)

    def use(self, from_s: float, to_s: float, late_s: float | None = None) -> Use:
        """Return the use of the machine by others between two times on the monotonic clock."""
        inside = [r for r in self._readings if from_s <= r.at_s <= to_s]
        others, stolen = used(inside, os.cpu_count() or 1)
        return Use(others, stolen, late_s)

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            if (reading := self.read()) is None:
                return
            self._readings.append(reading)

    def read(self) -> Reading | None:
        """Return the present CPU times, or None if there is no /proc."""
        at_s = time.monotonic()
        try:
            fields = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _, _, _, _, stolen = (int(field) for field in fields[:8])
        seen = {
            int(folder.name): found
            for folder in self._proc.iterdir()
            if folder.name.isdecimal() and (found := _process(folder)) is not None
        }
        ours = {
            (pid, process.start): process.ticks * self._tick_s
            for pid, process in seen.items()
            if self._ours(pid, seen)
        }
        busy_s = (user + nice + system) * self._tick_s
        return Reading(at_s, busy_s, stolen * self._tick_s, ours)

    def _ours(self, pid: int, seen: Mapping[int, _Process]) -> bool:
        """Return whether a process is the demo's: it has the mark, or a parent that is the demo's.
        Ray's workers overwrite their environment with their title, so they lose the mark."""
        if pid not in seen:
            return False
        one = pid, seen[pid].start
        if one not in self._is_ours:
            self._is_ours[one] = pid == os.getpid() or self._has_mark(pid)
            self._is_ours[one] |= self._ours(seen[pid].parent, seen)
        return self._is_ours[one]

    def _has_mark(self, pid: int) -> bool:
        try:
            return self._mark in (self._proc / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # the process is another user's, or has ended
            return False


class _Process(NamedTuple):
    parent: int
    start: int  # clock ticks from the machine's start; it differs if an ID is reused
    ticks: int  # CPU time in clock ticks


def _process(folder: Path) -> _Process | None:
    try:
        # The name in parentheses may contain spaces.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Process(int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12]))
    except (OSError, IndexError):  # it has ended
        return None
