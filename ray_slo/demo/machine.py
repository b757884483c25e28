"""Was the machine disturbed? CPU that other processes took, CPU that was stolen, a late client.

Reads /proc, so it knows this on Linux only. Every process that this one starts has a mark in its
environment; whatever has no mark is somebody else's.
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

MARK = "DEMO_RUN_OF_RAY_SLO"  # no setting: a name with our prefix would be taken for one
OTHERS = 0.10  # of the machine's CPU time: what other processes may take in a quiet run
STOLEN = 0.03  # of the machine's CPU time: what its host may take


@dataclass(frozen=True)
class Reading:
    """CPU seconds since the machine and its processes started.

    Attributes:
        at_s: on the monotonic clock.
        busy_s, stolen_s: of all cores.
        ours_s: of each of our processes, by its id and start.
    """

    at_s: float
    busy_s: float
    stolen_s: float
    ours_s: Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Use:
    """Shares of the machine's CPU time in a part of a run.

    Attributes:
        others, stolen: taken by processes that are not the demo's, and by the machine's host.
            None where the system does not tell.
        late_s: by which the client sent its requests too late, 99th percentile.
    """

    others: float | None
    stolen: float | None
    late_s: float

    def complaints(self) -> list[str]:
        """How the machine was disturbed; empty if it was not."""
        found = []
        if self.others is not None and self.others > OTHERS:
            found.append(f"other programs took {100 * self.others:.0f} % of the CPU time")
        if self.stolen is not None and self.stolen > STOLEN:
            found.append(f"the machine's host took {100 * self.stolen:.0f} % of the CPU time")
        if self.late_s > LATE_GENERATOR_S:
            found.append(f"the client sent up to {1e3 * self.late_s:.0f} ms late (p99)")
        return found


def used(readings: Sequence[Reading], cores: int) -> tuple[float | None, float | None]:
    """(others' share, stolen share) of the CPU time between the first reading and the last.

    A process that ended between two readings counts up to the first of them.
    """
    if len(readings) < 2 or readings[-1].at_s <= readings[0].at_s:
        return None, None
    ours_s = 0.0
    for before, after in itertools.pairwise(readings):
        # A process that is new has spent all its time since the reading before.
        ours_s += sum(s - before.ours_s.get(one, 0.0) for one, s in after.ours_s.items())
    first, last = readings[0], readings[-1]
    whole = cores * (last.at_s - first.at_s)
    others = max(last.busy_s - first.busy_s - ours_s, 0.0) / whole
    return others, (last.stolen_s - first.stolen_s) / whole


class Watch:
    """Reads the machine's CPU times twice a second, on a thread, while it is entered."""

    def __init__(self, period_s: float = 0.5, proc: Path = Path("/proc")) -> None:
        self._period_s, self._proc = period_s, proc
        self._readings: list[Reading] = []
        self._is_ours: dict[tuple[int, int], bool] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._mark = f"{MARK}={os.getpid()}".encode()
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01

    def __enter__(self) -> Watch:
        os.environ[MARK] = str(os.getpid())  # inherited by all that is started from now on
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        os.environ.pop(MARK, None)

    def use(self, from_s: float, to_s: float, late_s: float = 0.0) -> Use:
        """What was taken from the demo between two times on the monotonic clock."""
        inside = [r for r in self._readings if from_s <= r.at_s <= to_s]
        others, stolen = used(inside, os.cpu_count() or 1)
        return Use(others, stolen, late_s)

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            if (reading := self.read()) is None:
                return
            self._readings.append(reading)

    def read(self) -> Reading | None:
        """The CPU times now; None where there is no /proc."""
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
        """Whether a process has the mark, or a parent of ours: Ray's workers overwrite their
        environment with their title."""
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
        except OSError:  # another user's, or ended
            return False


class _Process(NamedTuple):
    parent: int
    start: int  # ticks since the machine started; tells processes with the same id apart
    ticks: int  # of CPU


def _process(folder: Path) -> _Process | None:
    try:
        # The name in parentheses may have spaces of its own.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Process(int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12]))
    except (OSError, IndexError):  # it has ended
        return None
