"""Targeted routing: sends a call to exactly the replica that the scheduler granted.

`ray.serve.request_router` is an alpha API; this module is its only user. A caller names the
replica (`serve.get_replica_context().replica_tag`, as read by the replica itself) in the
keyword argument `worker` of the call. In Ray 2.60, the result of `choose_replicas` is probed and
retried forever, so for an absent replica the pending request must be failed. A replica that hangs
must not be probed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ray_slo.serve.errors import WorkerLost

# A worker can register with the scheduler before Serve has told this process about it.
_UNSEEN_WAIT_S = 2.0
_NO_REQUEST_WAIT_S = 0.005


class _Direct(RunningReplica):
    """A replica that gets a call as one message in each direction, and may not reject it.

    Serve 2.60 never reads `supports_rejection_protocol`. It skips the protocol only for replicas
    that it believes to be of another language. With the protocol every call is a stream. At its
    end, Ray blocks the replica's event loop until the caller has read everything. So a caller that
    hangs also blocks the replica.
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
        # The scheduler never overcommits a worker. Without the protocol, a call is one message in
        # each direction instead of a stream.
        return False

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return _Direct(replica_info)

    def initialize_state(self, **kwargs: object) -> None:
        self._seen, self._running = set(), set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        # If the last replica is gone, Serve would not ask us, and calls would wait for another one,
        # which may never come. So keep the last replicas.
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
        if pending_request is None:
            await self._route_again()
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
            # Without a recent length of its queue, Serve would ask the replica for it first, and
            # again until it answers. There are few such askers, and other calls need one, too.
            self.replica_queue_len_cache.update(replica.replica_id, 0)
            return [[replica]]
        if not pending_request.future.done():
            pending_request.future.set_exception(
                WorkerLost(f"worker {worker} is not among the running replicas")
            )
        return [candidate_replicas]

    async def _route_again(self) -> None:
        """Put the requests without a replica back in line.

        Before Ray 2.60, a routing task could end without its request, which then had no task. The
        next task has no request, and asks again and again while one has no replica: it would keep
        the event loop busy for ever. A request that has a task too is routed twice, and the first
        one counts.
        """
        await asyncio.sleep(_NO_REQUEST_WAIT_S)
        line = self._pending_requests_to_route
        waiting = {id(request) for request in line}
        for request in self._pending_requests_to_fulfill:
            if not request.future.done() and id(request) not in waiting:
                line.append(request)
