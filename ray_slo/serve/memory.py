"""Returns free memory of a process to the system, keeps its garbage collections short, and counts
the memory.

glibc keeps freed memory that lies between memory in use. After thousands of requests at once, this
can be hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable

from ray_slo.models.memory import resident_mb, trimmer

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options in glibc's malloc.h
_LARGEST_BLOCK = 32 * 2**20  # bytes; glibc takes no more
_KEPT_FREE = 64 * 2**20  # bytes at the end of a heap
_LOOK_S = 10.0
_NEW_OBJECTS = 10_000  # between two collections of the youngest; Python's default is 700
# Free memory from which an attempt is useful: the larger of a share of the process and MB.
_FREE, _FREE_MB = 0.1, 16.0


class Trim:
    """Returns free memory when this process keeps more of it than after the last time.

    Args:
        trim: function that returns free memory, from `trimmer`.
        resident: function that returns the resident memory, in MB.
        used: function that returns the memory in use, in MB. What is free may have been in use
            at the last time.
    """

    def __init__(
        self,
        trim: Callable[[], object],
        resident: Callable[[], float] = resident_mb,
        used: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._trim, self._resident, self._used = trim, resident, used
        self._kept_mb = resident() - used()

    def look(self) -> bool:
        """Return free memory if this is useful. Return whether it was."""
        resident_mb = self._resident()
        now_mb = resident_mb - self._used()
        self._kept_mb = min(self._kept_mb, now_mb)
        if not now_mb - self._kept_mb > max(_FREE * resident_mb, _FREE_MB):
            return False
        self._trim()
        self._kept_mb = self._resident() - self._used()
        return True


def used_mb() -> float:
    """Return the memory that glibc has given out and not got back, in MB. 0 if it does not say:
    glibc does since 2.33."""
    try:
        info = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0.0
    info.restype = _Mallinfo
    said = info()
    return float(said.uordblks + said.hblkhd) / 2**20


class _Mallinfo(ctypes.Structure):
    """The `struct mallinfo2` of glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_started = threading.Lock()


def keep_blocks() -> None:
    """Make glibc use the memory of large bodies again.

    By default, glibc returns a block of megabytes to the system when it is freed. The next body
    then needs new pages, and each page costs more time than the body's bytes in it.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
        set_option(_M_TRIM_THRESHOLD, _KEPT_FREE)


def give_back() -> None:
    """Make this process return free memory from time to time, in a separate thread, and not after
    every large block. Call this once."""
    trim = trimmer()
    if trim is None or not _started.acquire(blocking=False):
        return
    keep_blocks()
    trims = Trim(trim, used=used_mb)

    def watch() -> None:
        never = threading.Event()
        while not never.wait(_LOOK_S):
            trims.look()

    threading.Thread(target=watch, name="ray-slo-memory", daemon=True).start()


def settle() -> None:
    """Collect garbage once, and leave what exists now out of later collections.

    What a process has loaded stays until its end. Without this, a full collection walks through all
    of it, and its event loop stops meanwhile. Collections are rarer, too: a burst of requests makes
    thousands of objects that stay for a moment, and few circles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def vitals(**tables: int) -> dict[str, int]:
    """Return sizes in a process, so that a soak test can see growth: the process's ID, the number
    of asyncio tasks of the running loop, and the number of memory blocks of Python.

    Args:
        tables: lengths of the caller's tables. All are 0 when there is nothing to do.
    """
    return {
        "pid": os.getpid(),
        "tasks": len(asyncio.all_tasks()),
        "blocks": sys.getallocatedblocks(),
        **tables,
    }
