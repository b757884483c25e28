"""Who may be why a process ended.

A process that calls `os._exit`, or crashes, says nothing any more. So it writes beforehand, into
files in memory that outlive it. A frontend writes which requests' hooks it runs: whoever would send
a request again whose frontend has ended looks there first (`is_suspect`). A worker writes that it
ends itself, while it does (`note_own_end`), and frontends look there before they send its requests
to another (`ended_itself`); one that is killed writes nothing. All this is seen on the same machine
only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

ATTEMPT_HEADER = "x-slo-attempt"  # of requests: names this sending of it, by a proxy of ours
ATTEMPT: ContextVar[str] = ContextVar("ray_slo_attempt_id", default="")

_SLOTS, _BYTES = 1024, 16
_ENDED = "ended"
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


def note_own_end(name: str, folder: Path | None = None) -> None:
    """Have this process write down that it ends itself: `os._exit`, or a crash. For a worker, once;
    of a crash, Python's part of the stack goes there instead of to stderr.

    Args:
        name: of the worker.
        folder: for tests.
    """
    folder = folder or _folder()
    _sweep(folder)
    file = (folder / f"{os.getpid()}-{_ENDED}-{name}").open("w")
    faulthandler.enable(file, all_threads=False)
    end = os._exit

    def write_and_end(status: int) -> NoReturn:
        with contextlib.suppress(OSError):
            file.write(f"os._exit({status})")
            file.flush()
        end(status)

    os._exit = write_and_end


def ended_itself(name: str, folder: Path | None = None) -> str:
    """What a worker wrote when it ended itself; empty where it wrote nothing here."""
    for path in (folder or _folder()).glob(f"*-{_ENDED}-{name}"):
        with contextlib.suppress(OSError):
            return path.read_text(errors="replace").strip()
    return ""


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
