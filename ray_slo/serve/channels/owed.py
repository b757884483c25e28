"""Batches that workers owe to a frontend.

A worker whose node is lost, frozen or cut off says nothing, and Ray takes many seconds to notice.
So a worker that owes a batch longer than predicted is asked whether it is alive. If it does not
answer, its batches are given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ray_slo.core.seldom import Seldom
from ray_slo.serve.messages import Grant

if TYPE_CHECKING:
    from ray_slo.serve.frontend.workers import Workers

logger = logging.getLogger(__name__)
logger.addFilter(Seldom(10))

# A worker is asked when its batch is late by the larger of these: seconds, share of the predicted
# time.
_LATE = (0.05, 0.25)
# An answer may take this long, or as long as the batch, because code that holds Python's lock lets
# nobody answer. In seconds, at least and at most.
_PATIENCE_S = (0.2, 2.0)
# The time is waited for in so many parts. If this process itself stands still, it uses up one part.
_PARTS = 5
_AGAIN_S = 0.5  # time after an answer until the worker is asked again, in seconds


class Silent(Exception):
    """A worker is late with a batch, and does not answer."""


class _Debt:
    """A batch that a worker owes to the current task. The task must wait for it inside.

    Attributes:
        due_at: its predicted end.
        timer: timer of the next question. None while the worker is asked.

    Raises:
        Silent: it is late, and its worker does not answer.
    """

    __slots__ = ("_call", "_debts", "_is_given_up", "due_at", "grant", "timer")

    def __init__(self, debts: dict[str, _Debt], grant: Grant, due_at: float) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._call, self._debts, self._is_given_up = call, debts, False
        self.grant, self.due_at = grant, due_at
        self.timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._debts[self.grant.batch_id] = self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self._debts.pop(self.grant.batch_id, None)
        if self._is_given_up and kind is asyncio.CancelledError:
            if sys.version_info >= (3, 11) and self._call.uncancel():
                return  # somebody else has cancelled it, too
            raise Silent(f"worker {self.grant.worker} does not answer") from None

    def give_up(self) -> None:
        self._is_given_up = True
        self._call.cancel()


class Owed:
    """The batches that workers owe.

    Args:
        clock: the frontend's clock, in seconds.
        spawn: function that runs a coroutine as a task.
        overhead_s: function that returns how long a call may take without its batch, in seconds.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], Any],
        overhead_s: Callable[[], float],
    ) -> None:
        self._workers = workers
        self._clock = clock
        self._spawn = spawn
        self._overhead_s = overhead_s
        self._loop = asyncio.get_running_loop()
        self._debts: dict[str, _Debt] = {}  # by batch
        self._asked: set[str] = set()  # workers that are being asked

    def late_s(self, model: str, now: float) -> float:
        """Return how late the last batch of a model is, or of all models if there is none of it."""
        debts = self._debts.values()
        due = [d.due_at for d in debts if d.grant.model == model] or [d.due_at for d in debts]
        return max(now - max(due, default=now), 0.0)

    def owes(self, grant: Grant) -> _Debt:
        """Return the context in which the current task waits for a batch."""
        debt = _Debt(self._debts, grant, self._clock() + grant.finish_in_s)
        least_s, share = _LATE
        late_in_s = grant.finish_in_s + max(least_s, share * grant.finish_in_s)
        if grant.num_pieces > 1:  # the worker may wait for the other pieces
            late_in_s += grant.start_by_s - grant.start_in_s
        debt.timer = self._loop.call_later(late_in_s, self._look, debt)
        return debt

    def _of(self, worker: str) -> list[_Debt]:
        return [debt for debt in self._debts.values() if debt.grant.worker == worker]

    def _look(self, debt: _Debt) -> None:
        """Ask the worker of a late batch, if it is not being asked already."""
        debt.timer = None
        worker = debt.grant.worker
        if worker not in self._asked:
            self._asked.add(worker)
            self._spawn(self._ask(debt.grant.kind, worker))

    async def _ask(self, kind: str, worker: str) -> None:
        try:
            is_silent = not await self._answers(kind, worker)
        finally:
            self._asked.discard(worker)
        debts = self._of(worker)
        gone = [d for d in debts if is_silent and self._workers.may_be_gone(d.grant.model, worker)]
        for debt in debts:
            if debt in gone:
                debt.give_up()
            elif debt.timer is None:
                debt.timer = self._loop.call_later(_AGAIN_S, self._look, debt)
        if gone:
            said = "worker %s is late and does not answer; what it owes is granted anew"
            logger.warning(said, worker)

    async def _answers(self, kind: str, worker: str) -> bool:
        """Return whether a worker answers, or owes nothing any more."""
        least_s, most_s = _PATIENCE_S
        # Its batch may have ended since.
        longest_s = max((debt.grant.finish_in_s for debt in self._of(worker)), default=0.0)
        patience_s = max(least_s, min(max(longest_s, self._overhead_s()), most_s))
        answer = asyncio.ensure_future(self._heard(kind, worker))
        try:
            for _ in range(_PARTS):
                await asyncio.wait({answer}, timeout=patience_s / _PARTS)
                if answer.done() or not self._of(worker):
                    return True
            return False
        finally:
            answer.cancel()

    async def _heard(self, kind: str, worker: str) -> None:
        # If the question does not reach it, the call of the batch says the same in its own words.
        with contextlib.suppress(Exception):
            await self._workers.alive(kind, worker)
