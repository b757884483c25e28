"""Targeted routing: send a call to the very replica that the scheduler granted.

`ray.serve.request_router` is an alpha API; this module is its only user. A caller names the
replica (`serve.get_replica_context().replica_tag`, as read by the replica itself) in the
keyword argument `worker` of the call. Read for Ray 2.60: what `choose_replicas` returns is probed
and retried for ever, so an absent replica must be answered by failing the pending request.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ray_slo.serve.errors import WorkerLost

# A worker can register with the scheduler before Serve has told this process about it.
_UNSEEN_WAIT_S = 2.0


class _Direct(RunningReplica):
    """A replica that is sent a call in one message each way, and may not reject it.

    Serve 2.60 asks nobody for `supports_rejection_protocol`. It leaves the protocol away for what
    it takes for a replica of another language. With it every call is a stream, at whose end Ray
    holds the replica's event loop until the caller has heard it all: a caller that hangs then
    hangs the replica.
    """

    @property
    def is_cross_language(self) -> bool:
        return True


class TargetedRouter(RequestRouter):
    """Routes a call to the replica named by its `worker` argument."""

    _seen: set[str]
    _running: set[str]
    _changed: asyncio.Event | None = None

    @property
    def supports_rejection_protocol(self) -> bool:
        # The scheduler never overcommits a worker; without the protocol a call is one message
        # each way instead of a stream.
        return False

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return _Direct(replica_info)

    def initialize_state(self, **kwargs: object) -> None:
        self._seen, self._running = set(), set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        # Where the last one went, Serve would not ask us and have calls wait for another, which
        # may never come, while all that it had named are gone: so it goes on with the last ones.
        if replicas or not self._seen:
            super().update_replicas(replicas)
        self._running = {r.replica_id.unique_id for r in replicas}
        self._seen |= self._running
        if self._changed is not None:
            self._changed.set()

    def _find(self, worker: str) -> RunningReplica | None:
        for replica in self.curr_replicas.values():
            if replica.replica_id.unique_id == worker and worker in self._running:
                return replica
        return None

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        worker = pending_request.kwargs.get("worker") if pending_request else None
        if pending_request is None or worker is None:
            return [candidate_replicas]
        replica = self._find(worker)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _UNSEEN_WAIT_S
        while replica is None and worker not in self._seen and loop.time() < give_up_at:
            self._changed = self._changed or asyncio.Event()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), give_up_at - loop.time())
            except asyncio.TimeoutError:
                break
            replica = self._find(worker)
        if replica is not None:
            return [[replica]]
        if not pending_request.future.done():
            pending_request.future.set_exception(
                WorkerLost(f"worker {worker} is not among the running replicas")
            )
        return [candidate_replicas]
