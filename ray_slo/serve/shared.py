"""Memory that a process shares with others of its machine, for large bytes on their way to them.

The sender copies the bytes into its memory, and the receiver copies them out. A socket makes two
copies as well, but of a few hundred kilobytes at a time: both processes wake up for each of these.

The memory is an anonymous file. A receiver opens it through `/proc`, which the kernel allows to
processes of the same user. A process that is killed leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import mmap
import os
from typing import NamedTuple

SIZE = 64 * 2**20  # bytes; what finds no room goes over the socket
_PAGE = 4096
_KEEP_S = 10.0  # seconds for which unused memory is kept; new pages take longer than the copy


class Offer(NamedTuple):
    """Sender → receiver: the sender's memory, which the receiver may open."""

    file: int
    size: int


class Lent:
    """The memory of a sender.

    Raises:
        OSError: the system gives no such memory.
    """

    def __init__(self, size: int = SIZE) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("only Linux has anonymous files")
        self._file = os.memfd_create("ray-slo")
        try:
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)  # needs a second descriptor
        except OSError:
            os.close(self._file)
            raise
        self._gaps = [(0, size)]  # begin and end of free parts, in ascending order
        self._taken: dict[int, int] = {}  # end of a part that is in use, by its begin
        self._timer: asyncio.TimerHandle | None = None
        self.offer = Offer(self._file, size)

    def put(self, data: memoryview) -> int | None:
        """Copy bytes into the memory. Return their place, or None if there is no room for them,
        or the system has no memory."""
        size = data.nbytes
        room = -(-size // _PAGE) * _PAGE
        found = next((i for i, (a, b) in enumerate(self._gaps) if b - a >= room), None)
        if found is None:
            return None
        begin, end = self._gaps[found]
        if not self._is_written(data, begin):
            if not self._taken:
                self._give_back()
            return None
        self._gaps[found : found + 1] = [(begin + room, end)] if end - begin > room else []
        self._taken[begin] = begin + room
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return begin

    def _is_written(self, data: memoryview, begin: int) -> bool:
        """Write bytes, and return whether the system had memory for them."""
        # A write into mapped memory would end the process (SIGBUS) if it has none.
        try:
            return os.pwrite(self._file, data, begin) == data.nbytes
        except OSError:
            return False

    def free(self, begin: int) -> None:
        """Note that the receiver no longer needs the bytes at a place."""
        if self._memory.closed:
            return
        bisect.insort(self._gaps, (begin, self._taken.pop(begin)))
        merged: list[tuple[int, int]] = []
        for start, end in self._gaps:
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, end))
        self._gaps = merged
        if not self._taken:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_KEEP_S, self._give_back)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # the system may need memory to free memory
            self._memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Free the memory. Receivers that have opened it keep it until they close it."""
        if self._timer is not None:
            self._timer.cancel()
        self._memory.close()
        with contextlib.suppress(OSError):
            os.close(self._file)


def opened(process: int, offer: Offer) -> mmap.mmap | None:
    """Return the memory of another process, for reading. None if it cannot be opened.

    Args:
        process: the other process's ID, as the kernel says it. 0 if it is in another container.
    """
    try:
        file = os.open(f"/proc/{process}/fd/{offer.file}", os.O_RDONLY)
        try:
            return mmap.mmap(file, offer.size, prot=mmap.PROT_READ)
        finally:
            os.close(file)
    except (OSError, ValueError):  # ValueError: the file is smaller
        return None
