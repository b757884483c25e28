"""Notes that survive a process. They tell which request may have ended it.

A process that calls `os._exit`, or crashes, cannot report anything afterwards. So it writes notes
before, into files in memory that survive it.

* A frontend notes the requests whose hooks it runs. These notes are read before a request of a dead
  frontend is sent again (`is_suspect`).
* A worker writes a note when it ends itself (`note_own_end`). Frontends read it before they send
  the worker's requests to another one (`ended_itself`). A worker that is killed writes nothing.
* A worker that asks to be replaced, because all its batches fail, notes that (`note_sick`). Later
  workers then wait longer before they ask (`sick_lately`).

The files are visible only on the same machine. If they cannot be written or read, the process
continues without them, and there are no suspects.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import logging
import mmap
import os
import tempfile
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

from ray_slo.core.files import own_folder

logger = logging.getLogger(__name__)

ATTEMPT: ContextVar[str] = ContextVar("ray_slo_attempt_id", default="")

_SLOTS, _BYTES = 1024, 16
_NOTE_BYTES = 4096  # room for the note of a worker that ends itself
_ENDED, _SICK = "ended", "sick"
_TICK_S = 0.05  # longer than a tick of a file system's clock
_KEPT = 16  # number of files of ended processes that are kept


def new_attempt() -> str:
    return uuid4().hex


def _folder() -> Path:
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return own_folder(base / f"ray-slo-{os.getuid()}")


class Marks:
    """A file of this process with the requests whose hooks it runs.

    Args:
        folder: folder of the file. The default is a folder of this user, in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._path: Path | None = None
        self._free: list[int] = []  # slots; none while there is no file
        try:
            folder = folder or _folder()
            _sweep(folder)
            path = folder / f"{os.getpid()}-{uuid4().hex}"
            with path.open("xb+") as file:
                self._path = path
                # Write zeros, so that the file has no hole. If the disk is full when a hole must be
                # filled, the process ends (SIGBUS).
                file.write(bytes(_SLOTS * _BYTES))
                file.flush()
                self._memory = mmap.mmap(file.fileno(), _SLOTS * _BYTES)
        except OSError as error:
            _warn(error)
            with contextlib.suppress(OSError):
                self.close()
            return
        self._free = list(range(_SLOTS))

    def inside(self) -> _Mark:
        """Return the context of a call. It notes that a hook runs for the request of this context
        (`ATTEMPT`)."""
        return _Mark(self)

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class _Mark:
    """The time of a hook's call. A generator of `contextlib` would cost more."""

    __slots__ = ("_marks", "_slot")

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._slot: int | None = None

    def __enter__(self) -> None:
        mark = _bytes(ATTEMPT.get())
        if mark is not None and self._marks._free:
            self._slot = self._marks._free.pop()
            self._write(mark)

    def __exit__(self, *raised: object) -> None:
        if self._slot is not None:
            self._write(bytes(_BYTES))
            self._marks._free.append(self._slot)

    def _write(self, mark: bytes) -> None:
        assert self._slot is not None
        begin = self._slot * _BYTES
        self._marks._memory[begin : begin + _BYTES] = mark


class _MarkFiles:
    """The files of marks in a folder. They stay open, because under load every request asks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._changed = -1  # the folder's time of change when it was listed
        self._seen_at = 0.0  # when this change was first seen
        self._is_complete = False  # whether nothing more can come with this time of change
        self._lock = threading.Lock()

    def have(self, mark: bytes) -> bool:
        """Return whether any file has this mark now.

        Raises:
            OSError: the folder cannot be read.
        """
        with self._lock:
            self._look()
            size = _SLOTS * _BYTES
            return any(mark in os.pread(file, size, 0) for file in self._open.values())

    def _look(self) -> None:
        """Open new files, and close those that were removed."""
        changed, now = self._folder.stat().st_mtime_ns, time.monotonic()
        if changed != self._changed:
            self._changed, self._seen_at, self._is_complete = changed, now, False
        elif self._is_complete:
            return
        names = {path.name for path in self._folder.iterdir()}
        # A worker's notes have no marks.
        names = {name for name in names if _ENDED not in name and _SICK not in name}
        for name in self._open.keys() - names:
            os.close(self._open.pop(name))
        for name in names - self._open.keys():
            with contextlib.suppress(OSError):
                self._open[name] = os.open(self._folder / name, os.O_RDONLY)
        # Another file may come within the same tick of the file system's clock, and one that could
        # not be opened may be opened later.
        self._is_complete = now - self._seen_at > _TICK_S and names <= self._open.keys()


@functools.cache
def _files_in(folder: Path) -> _MarkFiles:
    return _MarkFiles(folder)


@functools.cache
def _own_files() -> _MarkFiles:
    return _files_in(_folder())


def is_suspect(attempt: str, folder: Path | None = None) -> bool:
    """Return whether a hook ran for this attempt of a request when its process ended."""
    mark = _bytes(attempt)
    if mark is None:
        return False
    with contextlib.suppress(OSError):
        return (_own_files() if folder is None else _files_in(folder)).have(mark)
    return False


def note_own_end(name: str, folder: Path | None = None) -> None:
    """Make this process write a note when it ends itself: `os._exit`, or a crash. A worker calls
    this once. After a crash, Python's part of the stack goes there and not to stderr. Processes
    that it forks write nothing: when they end, the worker continues.

    Args:
        name: of the worker.
        folder: where the file is; default: one of this user's, in memory.
    """
    try:
        folder = folder or _folder()
        _sweep(folder)
        note = folder / f"{os.getpid()}-{_ENDED}-{name}"
        # Take room for the note now. The disk may be full when it is needed.
        note.write_bytes(bytes(_NOTE_BYTES))
        file = note.open("r+")
    except OSError as error:
        _warn(error)
        return
    end, told_of_crashes = os._exit, faulthandler.is_enabled()
    faulthandler.enable(file, all_threads=False)

    def write_and_end(status: int) -> NoReturn:
        with contextlib.suppress(OSError):
            file.write(f"os._exit({status})")
            file.flush()
        end(status)

    def restore() -> None:
        os._exit = end
        faulthandler.disable()
        # stderr may not be a file.
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            if told_of_crashes:
                faulthandler.enable(all_threads=False)

    os._exit = write_and_end
    os.register_at_fork(after_in_child=restore)


def ended_itself(name: str, folder: Path | None = None) -> str:
    """Return the note that a worker wrote when it ended itself. It is empty if there is none on
    this machine."""
    with contextlib.suppress(OSError):
        for path in (folder or _folder()).glob(f"*-{_ENDED}-{name}"):
            with contextlib.suppress(OSError):
                return path.read_text(errors="replace").strip("\0 \n")
    return ""


def note_sick(workers: str) -> None:
    """Note that this process, one of these workers, asks to be replaced."""
    with contextlib.suppress(OSError):
        note = _folder() / f"{os.getpid()}-{_SICK}-{_digest(workers)}"
        note.write_text(str(time.monotonic()))  # the same clock for all processes of this machine


def sick_lately(workers: str, within_s: float) -> int:
    """Return how many of these workers, on this machine, have lately asked to be replaced."""
    found = 0
    for path in _folder().glob(f"*-{_SICK}-{_digest(workers)}"):
        with contextlib.suppress(OSError, ValueError):
            found += 0 <= time.monotonic() - float(path.read_text()) < within_s
    return found


def _digest(text: str) -> str:
    """Return a name for a file that stands for a text of any length."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _warn(error: OSError) -> None:
    logger.warning("requests that end this process will not be known as such: %s", error)


def _bytes(attempt: str) -> bytes | None:
    """Return the bytes of an attempt. None if ray-slo did not make it."""
    try:
        mark = bytes.fromhex(attempt.replace("-", ""))  # HAProxy's have hyphens
    except ValueError:
        return None
    return mark if len(mark) == _BYTES else None


def _sweep(folder: Path) -> None:
    """Remove the files of ended processes, except the latest ones."""
    gone = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.name.partition("-")[0])
            if not Path(f"/proc/{pid}").exists():
                gone.append((path.stat().st_mtime, path))
    for _, path in sorted(gone)[:-_KEPT]:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
