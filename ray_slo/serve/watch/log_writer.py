"""Writes a scheduler's or planner's decision log without delaying a decision.

The event loop appends one object per decision to a bounded queue. A thread turns them into rows, a
few at a time, so that it never holds the interpreter for long. Every few seconds it replaces the
current file, completely or not at all. So a crash costs only those seconds. If the queue is full,
decisions are not logged, and the log says how many rows are missing. So it does after a disk
failed: the thread tries again with every flush, and keeps the rows of one file meanwhile.

A planner runs in another process, so its log is a separate table (`plans`). Both name the clock of
their times. If a planner is on another machine than a scheduler, it also writes how far that clock
is ahead of its own (`Clocks`).
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ray_slo.core import Policy
from ray_slo.core.files import HALF
from ray_slo.record.encode import Encoder
from ray_slo.record.plans import FOLDER, PLANS, PlanEncoder, Planned
from ray_slo.record.rows import (
    DECISIONS,
    Recording,
    Round,
    Row,
    Start,
    file_name,
    to_arrow,
    write_file,
)

logger = logging.getLogger(__name__)

_QUEUE_ROWS = 50_000  # about 20 MB of requests and actions at worst
_FILE_ROWS = 20_000  # about half a megabyte: little to write anew
_PLAN_FILE_ROWS = 1000  # for a planner, whose rows are longer
_CHUNK_ROWS = 1000
_POLL_S = 0.1
_SLICE_S = 0.0005  # the thread encodes, then releases the interpreter for the event loop
_PAUSE_S = 0.001
_CLOSE_S = 5.0
_READINGS = 120  # of a clock: a minute's; clocks drift


@functools.cache
def clock_id() -> str:
    """Name of the clock that `time.monotonic` reads. All processes of a machine share one until the
    machine restarts; if that is not known, the name is of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return uuid.uuid4().hex


class Clocks:
    """How far the clocks of other machines are ahead of ours.

    A message contains the reading of its sender's clock. Then it travels for an unknown time, so
    the clock is at least this far ahead. Of many messages, the fastest gives the best value.
    """

    def __init__(self) -> None:
        self._ahead: dict[str, deque[float]] = {}

    def heard(self, clock: str, reading: float, now: float) -> None:
        """A message came that was sent when `clock` showed `reading`."""
        if clock != clock_id():
            self._ahead.setdefault(clock, deque(maxlen=_READINGS)).append(reading - now)

    def ahead(self) -> dict[str, float]:
        """Seconds by clock; too small by the travel time of the fastest message."""
        return {clock: max(seen) for clock, seen in self._ahead.items()}


@functools.cache
def _warm_up() -> None:
    """Import the file writer now: later it would block the event loop for a third of a second."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    encoder = Encoder()
    encoder.start(Start(None, None, {}), 0.0)
    pq.write_table(to_arrow(encoder.rows), pa.BufferOutputStream(), compression="zstd")


class _Log:
    """A log of one writer.

    Args:
        folder: folder of all logs.
        name: unique name of the writer; several writers may share a folder.
        max_mb: limit of the folder's logs of all writers, MB; the oldest files are deleted first.
        flush_s: a crash loses at most this many seconds.
        about: information for the reader: application, group, …
    """

    _kind = DECISIONS
    _subfolder = ""
    _file_rows = _FILE_ROWS
    _encodes: type[Encoder | PlanEncoder] = Encoder

    def __init__(
        self,
        folder: str | Path,
        name: str,
        *,
        max_mb: float = 64.0,
        flush_s: float = 5.0,
        **about: Any,
    ) -> None:
        _warm_up()
        self._root = Path(folder)
        self._folder = self._root / self._subfolder
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
        self._name = f"{stamp}-{name}"  # names sort by age
        self._max_bytes = max_mb * 1e6
        self._flush_s = flush_s
        self._about = {**about, "clock": clock_id()}
        self._queue: deque[tuple[str, Any, float]] = deque()
        self._queued = self._taken = 0  # rows; one counter per thread
        self._lost = self._lost_in_all = 0
        self._rows = self._rows_before = 0  # rows in files; rows in full files
        self._unwritten = 0  # rows that the thread could not write
        self._gap = 0  # lost rows of which no file tells yet
        self._cpu_s = 0.0  # of the thread
        self._error = ""
        self._has_ended = False
        self._sequence = 0
        self._encoder = self._encodes()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()
        atexit.register(self.close, _CLOSE_S)

    def begin(self, name: Any, kwargs: Mapping[str, Any], now: float) -> None:
        """Log the policy or planner that decides from now on, and its arguments."""
        start = Start.of(name, kwargs, wall_at=time.time(), **self._about)
        self._queue.append(("start", start, now))

    def close(self, wait_s: float = 0.0) -> None:
        """Let the thread write the rest and end; wait for it at most `wait_s`."""
        self._closing.set()
        self._thread.join(wait_s)

    def status(self) -> dict[str, Any]:
        """Path, rows written, rows lost because the queue was full or the disk failed, CPU seconds
        of the thread, and the error of the last write, if it failed."""
        return {
            "folder": str(self._folder),
            "name": self._name,
            "rows": self._rows,
            "rows_lost": self._lost_in_all + self._unwritten,
            "cpu_s": self._cpu_s,
            "error": self._error,
        }

    # On the event loop.

    def _put(self, what: Any, rows: int, now: float) -> None:
        if self._has_ended:
            self._lost_in_all += rows
            return
        if self._queued - self._taken + rows > _QUEUE_ROWS:
            self._lost += rows
            self._lost_in_all += rows
            return
        if self._lost:
            self._queue.append(("lost", self._lost, now))
            self._lost = 0
        self._queued += rows
        self._queue.append(("add", what, rows))

    # On the thread.

    def _run(self) -> None:
        try:
            self._write_until_closed()
        except Exception as error:  # an error of ours must not cost a request
            self._error = f"{type(error).__name__}: {error}"
            logger.exception("the decision log in %s ends here", self._folder)
            self._has_ended = True
            self._unwritten += self._queued - self._taken
            self._queue.clear()
        atexit.unregister(self.close)

    def _write_until_closed(self) -> None:
        encoder = self._encoder
        chunks: list[Any] = []  # Arrow tables of the current file
        rows = saved = 0  # of the current file; those of them on the disk
        flushed_at = time.monotonic()
        dirty = False
        while True:
            closing = self._closing.is_set()  # before the queue is looked at
            self._encode_some()
            waiting = len(encoder.rows)
            now = time.monotonic()
            due = (closing and not self._queue) or now - flushed_at > self._flush_s
            full = rows + waiting >= self._file_rows
            if waiting >= _CHUNK_ROWS or (waiting and (due or full)):
                taken: list[Row] = encoder.rows[:]
                encoder.rows.clear()
                chunks.append(to_arrow(taken, self._breathe, self._kind))
                rows += len(taken)
                dirty = True
            if dirty and (due or full):
                flushed_at = now
                if self._tries_to_write(chunks):
                    dirty, saved = False, rows
                    self._rows = self._rows_before + rows
            if full:
                self._rows_before += saved
                self._sequence += saved > 0
                encoder.new_file()
                if rows > saved:
                    self._unwritten += rows - saved
                    self._gap += rows - saved
                    encoder.lost(self._gap, chunks[-1]["at"][-1].as_py())
                chunks, rows, saved, dirty = [], 0, 0, False
            self._cpu_s = time.thread_time()
            if self._queue:
                time.sleep(_PAUSE_S)
            elif closing:
                self._unwritten += rows - saved
                return
            else:
                self._closing.wait(_POLL_S)

    def _encode_some(self) -> None:
        until = time.perf_counter() + _SLICE_S
        queue, encoder = self._queue, self._encoder
        while queue and time.perf_counter() < until:
            kind, what, extra = queue.popleft()
            if kind == "add":
                self._taken += int(extra)
                encoder.add(what)
            elif kind == "start":
                encoder.start(what, extra)
            else:
                self._gap += what
                encoder.lost(what, extra)

    def _breathe(self) -> None:
        if not self._closing.is_set():
            time.sleep(0)  # lets the event loop have the interpreter

    def _tries_to_write(self, chunks: list[Any]) -> bool:
        try:
            self._write(chunks)
        except OSError as error:
            if not self._error:
                logger.warning("the decision log cannot be written, and is tried again: %s", error)
            self._error = f"{type(error).__name__}: {error}"
            return False
        if self._error:
            lost = self._unwritten
            logger.warning("the decision log in %s goes on; %d rows lost", self._folder, lost)
        self._error, self._gap = "", 0
        return True

    def _write(self, chunks: list[Any]) -> None:
        import pyarrow as pa

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / file_name(self._name, self._sequence, self._kind)
        write_file(path, pa.concat_tables(chunks), self._name, self._sequence, self._kind)
        self._prune(path)

    def _prune(self, keep: Path) -> None:
        # By the time of the last write and not by name: a writer's current file is never among the
        # oldest, even if it is long in use.
        files: list[tuple[float, Path, int]] = []
        ours = [(self._root, DECISIONS), (self._root / FOLDER, PLANS)]
        found = (
            path
            for folder, kind in ours
            for pattern in (f"*{kind.suffix}", f".*{kind.suffix}.*{HALF}")  # of killed writers, too
            for path in folder.glob(pattern)
        )
        for path in found:
            try:
                stat = path.stat()
            except OSError:  # another writer deleted it too
                continue
            files.append((stat.st_mtime, path, stat.st_size))
        total = sum(size for _, _, size in files)
        for _, path, size in sorted(files):
            if total <= self._max_bytes:
                break
            if path != keep:
                with suppress(OSError):  # what we may not delete stays
                    path.unlink(missing_ok=True)
                    total -= size


class DecisionLog(_Log):
    """The log of one scheduler; arguments as for any log (`folder`, `name`, `max_mb`, `flush_s`,
    about)."""

    def recorded(self, policy: Policy, name: Any, kwargs: Mapping[str, Any], now: float) -> Policy:
        """`policy`, made from `name` and `kwargs`, with a log of every round."""
        self.begin(name, kwargs, now)
        return Recording(policy, self._decided)

    def _decided(self, round: Round) -> None:
        rows = 1 + len(round.events)
        for name, args in round.events:
            if name == "requests_arrived":
                rows += len(args[1])
        self._put(round, rows, round.now)


class PlanLog(_Log):
    """The log of one planner; arguments as for any log.

    Attributes:
        clocks: known clocks of the schedulers.
    """

    _kind = PLANS
    _subfolder = FOLDER
    _file_rows = _PLAN_FILE_ROWS
    _encodes = PlanEncoder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clocks = Clocks()
        super().__init__(*args, **kwargs)

    def planned(self, planned: Planned) -> None:
        """Log one question to the planner, without clocks and wall-clock time. Does not wait, nor
        raise."""
        try:
            row = replace(planned, wall_at=time.time(), clocks=self.clocks.ahead())
            self._put(row, 1, row.at)
        except Exception:
            logger.exception("a plan could not be logged")
