"""Hosts a policy on an asyncio event loop. It passes events to the policy, carries out the
decisions, and has one timer.

All events in one turn of the event loop belong to one round of the policy. They are collected and
passed to the policy in a fixed order. Then `decide` is called once. There is no Ray and there are
no threads. Call a `PolicyHost` only from its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context
from typing import Any, TypeVar, cast

from ray_slo.core import (
    Action,
    BatchOutcome,
    Cluster,
    Dispatch,
    Drop,
    Policy,
    Preempt,
    Request,
    WorkerId,
)
from ray_slo.core.policy import Expected, unwrapped

logger = logging.getLogger(__name__)
_A = TypeVar("_A")

# The least pause. Without it, a policy that always wants to be woken at once would block the loop.
_SHORTEST_NAP_S = 1e-4


class PolicyHost:
    """Runs `policy` on the running event loop.

    The callbacks may call the host (a request submitted again, a batch that could not be sent).
    These events belong to the next round, in the next turn of the loop.

    Args:
        cluster: the policy's first view. `set_cluster` changes it.
        on_dispatch, on_drop: carry out one action. An exception is logged, and the other actions
            still run.
        on_preempt: the same. A policy that preempts cannot be hosted without it.
        on_error: called when the policy raised. The host continues with the next event, but the
            policy's state may be wrong, so the owner should end it.
        clock: function that returns monotonic seconds. All deadlines are on this clock. Default:
            the loop's clock.
        settle_turns: number of further turns of the loop in which to wait for events before a
            round. Events that waited while the loop was blocked need a few turns to arrive.
        context: context in which the callbacks run. Without it they would see the context variables
            of the request that woke the host.
    """

    def __init__(
        self,
        policy: Policy,
        cluster: Cluster,
        *,
        on_dispatch: Callable[[Dispatch], None],
        on_drop: Callable[[Drop], None],
        on_preempt: Callable[[Preempt], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
        clock: Callable[[], float] | None = None,
        settle_turns: int = 0,
        context: Context | None = None,
    ) -> None:
        self.policy = policy
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._settle_turns = settle_turns
        self._context = Context() if context is None else context
        self._on_dispatch = on_dispatch
        self._on_drop = on_drop
        self._on_preempt = on_preempt
        self._on_error = on_error
        self._workers = frozenset(cluster.workers)
        self._cluster: Cluster | None = cluster  # the cluster that the policy does not know yet
        self._finished: list[tuple[WorkerId, BatchOutcome]] = []
        self._deaf: list[tuple[WorkerId, int]] = []
        self._arrived: list[Request] = []
        self._cancelled: list[Request] = []
        self._solved: list[Any] = []
        self._now = -math.inf
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._poke()

    def submit(self, request: Request) -> None:
        """Note that a request arrived, or came back."""
        self._arrived.append(request)
        self._poke()

    def cancel(self, request: Request) -> None:
        """Note that a request's client left. This is ignored if the request was already dispatched
        or dropped."""
        self._cancelled.append(request)
        self._poke()

    def finished(self, worker: WorkerId, outcome: BatchOutcome) -> None:
        """Note that a dispatched batch is over. This is ignored if its worker left the cluster."""
        self._finished.append((worker, outcome))
        self._poke()

    def preempt_failed(self, worker: WorkerId, batch_id: int) -> None:
        """Note that a preempted batch does not stop, so its worker is still busy."""
        self._deaf.append((worker, batch_id))
        self._poke()

    def set_cluster(self, cluster: Cluster) -> None:
        """Note that workers, variants, profiles or delays changed."""
        self._cluster = cluster
        self._poke()

    def solved(self, answers: Iterable[Any]) -> None:
        """Take answers to the problems that the policy `wanted`."""
        self._solved.extend(answers)
        self._poke()

    def expected(self) -> Mapping[str, Expected]:
        """Return the policy's predictions for requests, by model."""
        method = getattr(self.policy, "expected", None)
        try:
            return {} if method is None else method()
        except Exception:  # decisions do not depend on it
            logger.exception("policy %r cannot say what it expects", type(self.policy).__name__)
            return {}

    def close(self) -> None:
        """Stop: no callback runs after this, and events are ignored."""
        self._closed = True
        for handle in (self._turn, self._timer):
            if handle is not None:
                handle.cancel()
        self._turn = self._timer = None

    def _poke(self) -> None:
        if self._turn is None and not self._closed:
            self._settle(self._settle_turns)

    def _settle(self, turns: int) -> None:
        if turns:
            self._turn = self._loop.call_soon(self._settle, turns - 1, context=self._context)
        else:
            self._turn = self._loop.call_soon(self._round, context=self._context)

    def _wake(self) -> None:
        self._timer = None
        self._poke()

    def _round(self) -> None:
        self._turn = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # The policy never sees the time go back.
        now = self._now = max(self._now, self._clock())
        try:
            self._feed(now)
            decision = self.policy.decide(now)
        except Exception as error:
            logger.exception("policy %r failed", type(unwrapped(self.policy)).__name__)
            if self._on_error is not None:
                self._on_error(error)
            return
        # Dispatches come first, because they start workers.
        for action in sorted(decision.actions, key=_is_drop):
            if self._closed:
                return
            if isinstance(action, Dispatch):
                self._carry_out(self._on_dispatch, action)
            elif isinstance(action, Drop):
                self._carry_out(self._on_drop, action)
            elif self._on_preempt is not None:
                self._carry_out(self._on_preempt, action)
            else:
                logger.error("this host cannot carry out %r", action)
        if decision.wake_at < math.inf and not self._closed:
            nap = max(decision.wake_at - self._clock(), _SHORTEST_NAP_S)
            self._timer = self._loop.call_later(nap, self._wake, context=self._context)

    def _feed(self, now: float) -> None:
        # Batches finished on the old cluster, arrivals may need the new one, and cancelled requests
        # may have arrived in this turn.
        finished, self._finished = self._finished, []
        deaf, self._deaf = self._deaf, []
        arrived, self._arrived = self._arrived, []
        cancelled, self._cancelled = self._cancelled, []
        solved, self._solved = self._solved, []
        cluster, self._cluster = self._cluster, None
        policy = self.policy
        for worker, outcome in finished:
            if worker in self._workers:
                policy.batch_finished(now, worker, outcome)
        if deaf and hasattr(policy, "preempt_failed"):
            for worker, batch_id in deaf:
                policy.preempt_failed(now, worker, batch_id)
        if cluster is not None:
            self._workers = frozenset(cluster.workers)
            policy.cluster_changed(now, cluster)
        if solved:
            cast(Any, policy).solved(now, solved)
        if arrived:
            policy.requests_arrived(now, arrived)
        if cancelled:
            policy.requests_cancelled(now, cancelled)

    @staticmethod
    def _carry_out(callback: Callable[[_A], None], action: _A) -> None:
        try:
            callback(action)
        except Exception:
            logger.exception("could not carry out %r", action)


def _is_drop(action: Action) -> bool:
    return isinstance(action, Drop)
