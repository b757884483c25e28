"""Batches on one worker: it receives their pieces, and runs one batch after the other."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray_slo.core import BatchStatus
from ray_slo.core.recent import Recent
from ray_slo.core.seldom import Seldom
from ray_slo.models.checkpoint import Preempted, PreemptionFlag, preemption_scope
from ray_slo.models.memory import is_out_of_memory, let_go
from ray_slo.serve import user_code
from ray_slo.serve.errors import OutOfMemory
from ray_slo.serve.messages import AGAIN, BatchReport, Piece, PieceResult, epoch_of
from ray_slo.serve.watch import tracing
from ray_slo.serve.watch.metrics import WorkerMetrics
from ray_slo.serve.worker.failures import Failures
from ray_slo.serve.worker.models import Loaded, Models

logger = logging.getLogger(__name__)
logger.addFilter(Seldom(10))

# A batch that runs longer than this, and than 20 × its profile, makes the replica unhealthy.
_HUNG_S = 60.0
_Results = list[tuple[bool | None, Any]]
_KEPT = 64  # finished batches, and preemptions of batches that have not arrived


class _Item(NamedTuple):
    """An item as its client sent it, and its size. User code never gets the list of them."""

    value: Any
    size: int


def _load(items: list[_Item]) -> int:
    """Return the size of a batch of these items, in the unit of its profile."""
    return sum(item.size for item in items)


@dataclass
class _Batch:
    """Pieces of one batch, collected until all are there."""

    id: str
    variant: str
    num_pieces: int
    received_at: float
    late_at: float = math.inf  # time of its first deadline
    pieces: dict[int, Piece] = field(default_factory=dict)
    waiters: dict[int, asyncio.Future[PieceResult]] = field(default_factory=dict)
    closed: bool = False  # the batch runs or ran, so a piece that arrives now is too late
    stop_asked_at: float | None = None
    flag: PreemptionFlag | None = None  # flag of the current or last call of the user's method
    measured: list[tuple[int, float]] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)  # of its requests
    caller: Any = None  # caller of the first traced request
    trace: tracing.BatchTrace = tracing.BATCH_NOT_TRACED
    staged: asyncio.Future[Any] | None = None  # the staged batch, while another one runs
    over: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def items(self) -> list[_Item]:
        found: list[_Item] = []
        for i in sorted(self.pieces):
            piece = self.pieces[i]
            sizes = piece.sizes or (1,) * len(piece.items)
            found += map(_Item, piece.items, sizes)
        return found

    def scope(self) -> AbstractContextManager[None]:
        """Scope of a call of the user's method: stops it if the batch must stop."""
        self.flag = PreemptionFlag()
        if self.stop_asked_at is not None:
            self.flag.set()
        return preemption_scope(self.flag)

    def stop(self, now: float) -> None:
        if self.stop_asked_at is None:
            self.stop_asked_at = now
            if self.flag is not None:
                self.flag.set()


class Batches:
    """Receives batches, and runs one at a time.

    Args:
        worker: the worker's id.
        report: called when a batch is over.
        smaller: called when a variant's batches must be smaller from now on.
        isolate_errors: run the items of a failed batch one by one.
        failures: told of batches that have failed, and of those that have not.
    """

    def __init__(
        self,
        worker: str,
        models: Models,
        report: Callable[[BatchReport], None],
        *,
        smaller: Callable[[], None] = lambda: None,
        isolate_errors: bool,
        failures: Failures | None = None,
    ) -> None:
        self._worker = worker
        self._models = models
        self._report = report
        self._smaller = smaller
        self._isolate_errors = isolate_errors
        self.failures = failures or Failures()
        self._loop = asyncio.get_running_loop()
        self._here: dict[str, _Batch] = {}
        self._over: Recent[str, None] = Recent(_KEPT)  # for pieces that arrive too late
        self._refused: Recent[str, None] = Recent(_KEPT)  # schedulers that are not obeyed any more
        self._stops: Recent[str, float] = Recent(
            _KEPT
        )  # times of preemptions of batches that have not arrived
        self._to_run: asyncio.Queue[_Batch] = asyncio.Queue()
        self._running: tuple[float, Loaded, int] | None = None  # since when, size of the batch
        self._metrics = WorkerMetrics()

    @property
    def ids(self) -> list[str]:
        """Ids of the batches on this worker, running or waiting."""
        return list(self._here)

    @property
    def waiting(self) -> int:
        return self._to_run.qsize()

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def runs_since(self) -> float:
        """When the running batch began; infinite without one."""
        return math.inf if self._running is None else self._running[0]

    def check_hung(self) -> None:
        """Check that no batch has been running for far too long.

        Raises:
            RuntimeError: one has.
        """
        if self._running is not None:
            since, loaded, load = self._running
            ran_s, expected_s = time.monotonic() - since, loaded.expected_s(load)
            if ran_s > max(_HUNG_S, 20 * expected_s if math.isfinite(expected_s) else 0.0):
                raise RuntimeError(f"a batch has been running for {ran_s:.0f} s")

    async def finish(self, variants: Iterable[str]) -> None:
        """Wait until there is no batch of these variants."""
        keys = set(variants)
        while here := [b for b in self._here.values() if b.variant in keys]:
            await asyncio.wait([batch.over for batch in here])

    def refuse(self, epoch: str) -> list[asyncio.Future[None]]:
        """Begin no more batches of a scheduler. Return futures of the ends of those that are here.

        Args:
            epoch: id of the scheduler.
        """
        self._refused[epoch] = None
        return [b.over for b in self._here.values() if epoch_of(b.id) == epoch]

    async def execute(self, piece: Piece) -> PieceResult:
        """Run one piece of a batch, together with its other pieces."""
        batch = self._here.get(piece.batch_id)
        if batch is None:
            if piece.batch_id in self._over or epoch_of(piece.batch_id) in self._refused:
                return PieceResult(None)
            if piece.variant not in self._models.loaded:  # unloaded while the batch was on its way
                return PieceResult(None, self._report_lost(piece.batch_id, piece.variant))
            batch = self._begin(piece)
        if batch.closed:
            return PieceResult(None)
        waiter: asyncio.Future[PieceResult] = self._loop.create_future()
        if piece.traces:
            batch.caller = batch.caller or tracing.caller()
            batch.traces += piece.traces
        batch.pieces[piece.piece] = piece
        batch.waiters[piece.piece] = waiter
        if len(batch.pieces) == batch.num_pieces or batch.stop_asked_at is not None:
            self._close(batch)
        return await waiter

    def _begin(self, piece: Piece) -> _Batch:
        now = time.monotonic()
        late_at = now + piece.late_in_s
        batch = _Batch(piece.batch_id, piece.variant, piece.num_pieces, now, late_at)
        self._here[batch.id] = batch
        if batch.id in self._stops:
            batch.stop(self._stops.pop(batch.id))
        if piece.num_pieces > 1:
            self._loop.call_later(max(piece.start_by_s, 0.0), self._close, batch)
        return batch

    def preempt(self, batch_id: str) -> None:
        """Stop a batch at its next exit point, or before it starts.

        A batch that is over, or past its last exit point, is not affected, and keeps its results.
        """
        now = time.monotonic()
        batch = self._here.get(batch_id)
        if batch is not None:
            batch.stop(now)
            self._close(batch)  # wait no longer for other pieces
        elif batch_id not in self._over:  # it arrived before the payloads
            self._stops[batch_id] = now

    def _close(self, batch: _Batch) -> None:
        if not batch.closed:
            batch.closed = True
            loaded = self._models.loaded.get(batch.variant)
            if self._running is not None and loaded is not None and loaded.stage is not None:
                batch.staged = self._models.stage(loaded, [item.value for item in batch.items])
            self._to_run.put_nowait(batch)

    def _report_lost(self, batch_id: str, variant: str) -> BatchReport:
        lost = BatchStatus.LOST
        report = BatchReport(batch_id, self._worker, variant, lost, 0, 0.0, 0.0)
        self._report(report)
        return report

    # -- running ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Run batches forever."""
        while True:
            batch = await self._to_run.get()
            try:
                await self._run(batch)
            except BaseException as error:  # never let one batch end the worker
                if is_end := isinstance(error, asyncio.CancelledError):
                    error = RuntimeError("the worker is being stopped")
                else:
                    logger.exception("batch %s failed inside the worker", batch.id)
                self._report_lost(batch.id, batch.variant)
                for waiter in batch.waiters.values():
                    if not waiter.done():
                        waiter.set_exception(user_code.as_exception(error))
                if is_end:
                    raise
            finally:
                self._running = None
                self._here.pop(batch.id, None)
                self._over[batch.id] = None
                batch.over.set_result(None)

    async def _run(self, batch: _Batch) -> None:
        loaded = self._models.loaded[batch.variant]
        items = batch.items
        start = time.monotonic()
        load = _load(items)
        self._running = (start, loaded, load)
        if batch.traces:
            about = {
                "slo.decision": batch.id,
                "slo.worker": self._worker,
                "slo.model": loaded.ref.model,
                "slo.variant": loaded.ref.name,
                "slo.batch_size": len(items),
                "slo.predicted_ms": 1e3 * loaded.expected_s(load),
                "slo.wait_ms": 1e3 * (start - batch.received_at),
            }
            batch.trace = tracing.batch(batch.traces, batch.caller, about)
        results: _Results = []
        try:
            status, results = await self._results(batch, loaded, items)
        except Preempted:
            status = BatchStatus.PREEMPTED
        end = time.monotonic()
        self._running = None
        batch.trace.ended(status, end - start)
        for run_load, seconds in batch.measured:
            loaded.profile.observe(run_load, seconds)
        if status is not BatchStatus.PREEMPTED:
            self._metrics.batch(loaded.ref, len(items), end - start)
        if batch.stop_asked_at is not None:
            self._metrics.preemption(loaded.ref, status.value, end - batch.stop_asked_at)
        report = BatchReport(
            batch_id=batch.id,
            worker=self._worker,
            variant=batch.variant,
            status=status,
            batch_size=len(items),
            held_s=end - batch.received_at,
            exec_s=end - start,
            measured=batch.measured,
        )
        self._answer(batch, start - batch.received_at, report, results)

    def _answer(self, batch: _Batch, wait_s: float, report: BatchReport, results: _Results) -> None:
        """Report that a batch is over, and return its results by piece."""
        self._report(report)
        preempted = report.status is BatchStatus.PREEMPTED
        first = 0
        for i in sorted(batch.pieces):
            last = first + len(batch.pieces[i].items)
            share = None if preempted else results[first:last]
            first = last
            if not batch.waiters[i].done():
                answer = PieceResult(share, report, wait_s, batch.trace.context)
                batch.waiters[i].set_result(answer)

    async def _results(
        self, batch: _Batch, loaded: Loaded, items: list[_Item]
    ) -> tuple[BatchStatus, _Results]:
        """Return the status of the batch, and (True, result), (False, error) or `AGAIN` per item.

        Raises:
            Preempted: the batch was stopped.
        """
        if not items:
            return BatchStatus.FINISHED, []
        found = await self._part(batch, loaded, items)
        if isinstance(found, Exception):
            return await self._in_parts(batch, loaded, items, found)
        return found

    async def _in_parts(
        self, batch: _Batch, loaded: Loaded, items: list[_Item], error: Exception
    ) -> tuple[BatchStatus, _Results]:
        """Run a batch that does not fit in memory in halves, recursively.

        After its first deadline, the items that are left go back to the scheduler. Later batches of
        the variant are smaller, unless a single item did not fit.
        """
        self._metrics.out_of_memory(loaded.ref)
        results: _Results = []
        largest, is_item = 0, False
        todo, smallest = [items], _load(items)
        while todo:
            part = todo.pop()
            if part is not items:
                if time.monotonic() > batch.late_at:
                    results += [AGAIN] * len(part)
                    continue
                found = await self._part(batch, loaded, part)
                if not isinstance(found, Exception):
                    results += found[1]
                    largest = max(largest, _load(part))
                    continue
                error, smallest = found, min(smallest, _load(part))
            let_go(error)
            if len(part) > 1:
                half = (len(part) + 1) // 2
                todo += [part[half:], part[:half]]
                continue
            is_item = True
            said = f"the worker has not enough memory for it: {user_code.in_words(error)}"
            results.append((False, OutOfMemory(said, model=loaded.ref.model)))
        if not is_item:
            self._models.profiles.cut(loaded.key, largest or max(smallest // 2, 1))
            self._smaller()
        failed = any(ok is False for ok, _ in results)
        return (BatchStatus.FAILED if failed else BatchStatus.FINISHED), results

    async def _part(
        self, batch: _Batch, loaded: Loaded, items: list[_Item]
    ) -> tuple[BatchStatus, _Results] | Exception:
        """Return the status and the results of a batch, or of a part of one. If it did not fit in
        memory, return the error."""
        try:
            results = await self._call(batch, loaded, items)
            return BatchStatus.FINISHED, [(True, result) for result in results]
        except Exception as error:
            if is_out_of_memory(error):
                return error
            if self._isolate_errors and len(items) > 1:
                one_by_one = [await self._alone(batch, loaded, item) for item in items]
                return BatchStatus.FAILED, one_by_one
            return BatchStatus.FAILED, [(False, user_code.sendable(error))] * len(items)

    async def _alone(self, batch: _Batch, loaded: Loaded, item: _Item) -> tuple[bool | None, Any]:
        try:
            return True, (await self._call(batch, loaded, [item]))[0]
        except Exception as error:
            return False, user_code.sendable(error)

    async def _call(self, batch: _Batch, loaded: Loaded, items: list[_Item]) -> list[Any]:
        scope = batch.scope() if self._models.preempts else nullcontext()
        load, values = _load(items), [item.value for item in items]
        start = time.perf_counter()
        try:
            around = batch.trace.around(scope)
            ahead, batch.staged = batch.staged, None  # for the first call, which is for all items
            staged = None if ahead is None else await ahead
            results = await self._models.run(loaded, values, around, load=load, staged=staged)
        except Preempted as stopped:
            if stopped.flag is not batch.flag:
                raise RuntimeError("Preempted came out of a scope of the batch method") from stopped
            raise
        except Exception as error:
            self.failures.failed(loaded, batch.id, error)
            raise
        seconds = time.perf_counter() - start
        self.failures.worked(loaded)
        if 1 <= load <= loaded.profile.prior.max_batch_size:
            batch.measured.append((load, max(seconds, 1e-7)))
        return results
