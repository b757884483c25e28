"""Memory of a process: what it holds, and how the system gets it back.

glibc keeps freed memory that lies between memory in use. After thousands of requests at once, that
is hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable

from ray_slo.models.memory import resident_mb, trimmer

_LOOK_S = 10.0
_GROWN, _GROWN_MB = 1.1, 16.0  # than after the last time: then it is worth a try


class Trim:
    """Trims when this process has grown since the last time.

    Args:
        trim: see `trimmer`.
        resident: MB.
    """

    def __init__(
        self, trim: Callable[[], object], resident: Callable[[], float] = resident_mb
    ) -> None:
        self._trim, self._resident = trim, resident
        self._kept_mb = resident()

    def look(self) -> bool:
        """Whether it was time."""
        now_mb = self._resident()
        self._kept_mb = min(self._kept_mb, now_mb)
        if not now_mb > max(_GROWN * self._kept_mb, self._kept_mb + _GROWN_MB):
            return False
        self._trim()
        self._kept_mb = self._resident()
        return True


_started = threading.Lock()


def give_back() -> None:
    """Have this process give memory back from now on, from a thread of its own; once is enough."""
    trim = trimmer()
    if trim is None or not _started.acquire(blocking=False):
        return
    trims = Trim(trim)

    def watch() -> None:
        never = threading.Event()
        while not never.wait(_LOOK_S):
            trims.look()

    threading.Thread(target=watch, name="ray-slo-memory", daemon=True).start()


def vitals(**tables: int) -> dict[str, int]:
    """What a process holds, so that a soak can see whether it grows: its id, asyncio tasks of the
    running loop, and memory blocks that Python has allocated.

    Args:
        tables: lengths of the caller's own tables; all of them are 0 when nothing is to be done.
    """
    return {
        "pid": os.getpid(),
        "tasks": len(asyncio.all_tasks()),
        "blocks": sys.getallocatedblocks(),
        **tables,
    }
