"""Batches that a scheduler has granted and that have not ended."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

from ray_slo.core import BatchStatus, Dispatch, Preempt, Request
from ray_slo.serve.messages import Grant, Submit

# A worker is freed from a batch that its heartbeats have not named for this time. Before that, the
# batch's pieces, or the report of its end, may be on their way.
_UNCLAIMED_S = 3.0


class OwnedRequest(Request):
    """A request, its frontend, and the node of its payload ("" if unknown)."""

    __slots__ = ("client", "client_id", "node")

    def __init__(self, id: int, submit: Submit, now: float, client: str, node: str) -> None:
        deadline = now + submit.budget_s
        _, model, _, size, upstream, _, task = submit
        super().__init__(id, model, now, deadline, size, task, upstream)
        self.client = client
        self.client_id = submit.request_id
        self.node = node


class Flight:
    """A batch from its grant to its end.

    Attributes:
        pieces: number of the frontends' shares that may reach the worker.
    """

    def __init__(self, batch_id: str, dispatch: Dispatch, granted_at: float) -> None:
        self.batch_id = batch_id
        self.dispatch = dispatch
        self.granted_at = granted_at
        self.worker = dispatch.worker
        self.preempted_at: float | None = None
        self._record: dict[str, Any] = {}  # record of its preemption
        self._shares: dict[str, list[int]] = {}  # request ids by frontend
        for request in cast(Sequence[OwnedRequest], dispatch.requests):
            self._shares.setdefault(request.client, []).append(request.client_id)
        self.pieces = len(self._shares)
        self._was_there = False  # whether its worker has named it
        self._unclaimed_since = math.inf  # time of its worker's first heartbeat without it

    @property
    def clients(self) -> list[str]:
        """The frontends that have a piece of the batch."""
        return list(self._shares)

    def grants(self, kind: str) -> Iterator[tuple[str, Grant]]:
        """Yield the grants for all frontends with a piece.

        Args:
            kind: kind of the worker.
        """
        dispatch = self.dispatch
        for piece, (client, request_ids) in enumerate(self._shares.items()):
            yield (
                client,
                Grant(
                    batch_id=self.batch_id,
                    worker=dispatch.worker,
                    kind=kind,
                    model=dispatch.requests[0].model,
                    variant=dispatch.variant,
                    request_ids=tuple(request_ids),
                    piece=piece,
                    num_pieces=len(self._shares),
                    batch_size=len(dispatch.requests),
                    start_in_s=dispatch.start_at - self.granted_at,
                    finish_in_s=dispatch.finish_at - self.granted_at,
                    slack_s=dispatch.slack_s,
                ),
            )

    def preempt(self, preempt: Preempt, now: float) -> dict[str, Any]:
        """Note that the policy stops the batch. Return a record for people, which changes when the
        batch ends. Its `delay_ms` is the time until the scheduler knew that the worker is free. The
        `outcome` "finished" means that the batch was past its last exit point, or has none."""
        self.preempted_at = now
        self._record = {
            "worker": self.worker,
            "victim": self.dispatch.variant,
            "victim_size": len(self.dispatch.requests),
            "by": preempt.variant,
            "gain": preempt.gain if math.isfinite(preempt.gain) else None,
            "reason": preempt.reason,
            "outcome": "asked",
            "unix_time": time.time(),
            "delay_ms": None,
        }
        return self._record

    def told(self, now: float) -> dict[str, Any]:
        """Return the batch's state for `ray-slo status`. Times are since the grant."""
        dispatch = self.dispatch
        return {
            "variant": dispatch.variant,
            "batch_size": len(dispatch.requests),
            "for_ms": 1e3 * (now - self.granted_at),
            "expected_ms": 1e3 * (dispatch.finish_at - self.granted_at),
        }

    def ended(self, status: BatchStatus, now: float) -> None:
        """Note that the batch is over: its worker is free or gone."""
        if self.preempted_at is not None:
            delay_ms = 1e3 * (now - self.preempted_at)
            self._record.update(outcome=status.value, delay_ms=delay_ms)

    def heard(self, worker: str, held: Collection[str], now: float) -> None:
        """Take a worker's list of its batches."""
        if self.batch_id in held:
            self._was_there, self._unclaimed_since = True, math.inf
        elif self.worker == worker:
            # The time does not count from the grant, because one heartbeat may be older.
            self._unclaimed_since = min(self._unclaimed_since, now)

    def is_unclaimed(self, seen_at: float) -> bool:
        """Return whether the worker has not had the batch for a while.

        Args:
            seen_at: time of the worker's last heartbeat. A silent worker may be computing.
        """
        return seen_at - self._unclaimed_since > _UNCLAIMED_S

    def lost(self, now: float) -> str:
        """Return the log message for a batch that no process has any more."""
        clients = ", ".join(sorted(self.clients)) or "the only frontend"
        since_s = now - self.granted_at
        where = "is not there, and no report of it came"
        if self._was_there:
            where = "is over there, and its report was lost"
        return f"batch {self.batch_id}, granted {since_s:.1f} s ago to {clients}, {where}"
