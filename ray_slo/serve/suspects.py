"""Which requests were in users' hooks when their frontend ended: one of them may be why.

A process that calls `os._exit`, or crashes, says nothing any more. So it writes beforehand which
requests' hooks it runs, into a file in memory that outlives it. Whoever would send a request again
whose frontend has ended looks there first (`is_suspect`). Proxies see the frontends of their own
machine; of others they know nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from uuid import uuid4

ATTEMPT_HEADER = "x-slo-attempt"  # of requests: names this sending of it, by a proxy of ours
ATTEMPT: ContextVar[str] = ContextVar("ray_slo_attempt_id", default="")

_SLOTS, _BYTES = 1024, 16
_KEPT = 16  # files of processes that are gone


def new_attempt() -> str:
    return uuid4().hex


def _folder() -> Path:
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() else Path(tempfile.gettempdir())
    folder = base / f"ray-slo-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class Marks:
    """Of this process. `folder`: for tests."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or _folder()
        _sweep(folder)
        self._path = folder / f"{os.getpid()}-{uuid4().hex}"
        with self._path.open("xb+") as file:
            file.truncate(_SLOTS * _BYTES)
            self._memory = mmap.mmap(file.fileno(), _SLOTS * _BYTES)
        self._free = list(range(_SLOTS))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """A hook runs for the request of this context (`ATTEMPT`)."""
        mark = _bytes(ATTEMPT.get())
        if mark is None or not self._free:
            yield
            return
        begin = self._free.pop() * _BYTES
        self._memory[begin : begin + _BYTES] = mark
        try:
            yield
        finally:
            self._memory[begin : begin + _BYTES] = bytes(_BYTES)
            self._free.append(begin // _BYTES)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def is_suspect(attempt: str, folder: Path | None = None) -> bool:
    """Whether a hook ran for that sending of a request when its process ended."""
    mark = _bytes(attempt)
    if mark is None:
        return False
    for path in (folder or _folder()).iterdir():
        with contextlib.suppress(OSError):
            if mark in path.read_bytes():
                return True
    return False


def _bytes(attempt: str) -> bytes | None:
    """None for what is no attempt of ours."""
    try:
        mark = bytes.fromhex(attempt)
    except ValueError:
        return None
    return mark if len(mark) == _BYTES else None


def _sweep(folder: Path) -> None:
    """Remove the files of processes that are gone, but for the latest."""
    gone = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.name.partition("-")[0])
            if not Path(f"/proc/{pid}").exists():
                gone.append((path.stat().st_mtime, path))
    for _, path in sorted(gone)[:-_KEPT]:
        path.unlink(missing_ok=True)
