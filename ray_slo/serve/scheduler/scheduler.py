"""The scheduler: hosts a policy and turns its decisions into grants and refusals.

Plain asyncio, no Ray: the same class runs in the scheduler actor and in an only frontend. It sees
metadata, never a payload. Call everything from one event loop.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

from ray_slo.core import (
    BatchOutcome,
    BatchStatus,
    Dispatch,
    Drop,
    DropReason,
    Preempt,
)
from ray_slo.core.trees import tree_of_task
from ray_slo.policies.registry import live_arguments, make_policy, recipe_for
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.messages import (
    BatchReport,
    Cancel,
    Capacity,
    Event,
    Grant,
    Heartbeat,
    Message,
    Refusal,
    Stop,
    Submit,
    Unreachable,
    Withdrawn,
)
from ray_slo.serve.scheduler.flights import Flight, OwnedRequest
from ray_slo.serve.scheduler.host import PolicyHost
from ray_slo.serve.scheduler.learned import Learned
from ray_slo.serve.scheduler.roster import Quarantine, Roster, WorkerState
from ray_slo.serve.scheduler.seats import NearPayloads
from ray_slo.serve.scheduler.solver import Aside, Solver
from ray_slo.serve.scheduler.watch import Watch
from ray_slo.serve.watch.logs import open_log

logger = logging.getLogger(__name__)

_TICK_S = 0.25  # the policy's view changes with measured batches at most this often, in seconds
_RESTART_S = 0.5  # seconds until a policy that raised is started again
# A preempted batch must stop within the larger of these: seconds, multiples of the expected delay.
_PATIENCE = (0.1, 5.0)
_PREEMPTIONS_KEPT = 100


class Scheduler:
    """Hosts the policy of one application.

    Args:
        spec: the application.
        deliver: called with (client, messages) at most once per client and event-loop turn.
        aside: function that runs another function, which takes about a second, outside this event
            loop. Default: in a thread.
        heartbeat_timeout_s: a silent worker counts as dead after this time, in seconds.
        watch: object that gets the events for metrics.
    """

    def __init__(
        self,
        spec: AppSpec,
        deliver: Callable[[str, list[Message]], None],
        *,
        aside: Aside | None = None,
        heartbeat_timeout_s: float = 10.0,
        watch: Watch | None = None,
    ) -> None:
        self.epoch = uuid.uuid4().hex[:8]
        self._spec = spec
        self._variants = spec.variants()
        self._tasks = frozenset(tree_of_task(spec.trees))
        self._deliver = deliver
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._watch = watch or Watch()
        self._loop = asyncio.get_running_loop()
        self._clock = time.monotonic  # uvloop's loop.time() has a resolution of only 1 ms
        self._workers = Roster()
        self._client_nodes: dict[str, str] = {}
        self._quarantine = Quarantine()
        self._learned = Learned(spec, self._workers)
        self._solver = Solver(aside, self._watch)
        self._queued: dict[tuple[str, int], OwnedRequest] = {}
        self._in_flight: dict[str, Flight] = {}
        self._outbox: dict[str, list[Message]] = {}
        self._next_id = self._generation = 0  # of a request, and of the policy's life
        self._preemptions: deque[dict[str, Any]] = deque(maxlen=_PREEMPTIONS_KEPT)
        self._deaf: set[str] = set()  # variants that did not stop when they were preempted
        self._cluster_is_stale = False
        counted = "submitted granted refused tried cancelled batches preempted on_node unclaimed"
        self._counts = Counter(dict.fromkeys(counted.split(), 0))
        self._log = open_log(spec, self.epoch)
        self._host = self._new_host()
        self._ticker = self._loop.create_task(self._ticks())

    def close(self) -> None:
        self._ticker.cancel()
        self._solver.close()
        self._host.close()
        if self._log is not None:
            self._log.close()

    # -- from frontends --------------------------------------------------------------------

    def hear(self, client: str, events: Iterable[Event]) -> None:
        """Take a client's events, in order."""
        for event in events:
            match event:
                case Submit():
                    self._submit(client, event)
                case Cancel(request_id):
                    self._cancel(client, request_id)
                case Unreachable(worker):
                    self._quarantine.add(worker, self._clock())
                    self._forget_worker(worker)
                case Withdrawn(batch_id):
                    self._end_batch(batch_id, BatchStatus.LOST)

    def _submit(self, client: str, submit: Submit) -> None:
        key = (client, submit.request_id)
        if key in self._queued:
            return
        known = submit.model in self._spec.models and (submit.task or submit.model) in self._tasks
        if not known:  # the request is from an older release that is still draining
            self._counts["refused"] += 1
            self._post(client, Refusal((submit.request_id,), DropReason.NO_WORKER.value, math.nan))
            return
        node = self._client_nodes.get(client, "")
        request = OwnedRequest(self._next_id, submit, self._clock(), client, node)
        self._next_id += 1
        self._queued[key] = request
        self._counts["submitted"] += 1
        self._host.submit(request)

    def _cancel(self, client: str, request_id: int) -> None:
        """Withdraw a request that is still queued."""
        request = self._queued.pop((client, request_id), None)
        if request is not None:
            self._counts["cancelled"] += 1
            self._host.cancel(request)

    def client_is_on(self, client: str, node: str) -> None:
        """Note the node of a frontend and its payloads."""
        self._client_nodes[client] = node

    def client_gone(self, client: str, unread: Iterable[Message] = ()) -> None:
        """Withdraw all queued requests of a dead frontend.

        Args:
            unread: messages that the frontend never read. A batch whose grants were never read is
                over.
        """
        self._client_nodes.pop(client, None)
        for owner, request_id in list(self._queued):
            if owner == client:
                self._cancel(client, request_id)
        for message in (*unread, *self._outbox.pop(client, ())):
            flight = self._in_flight.get(message.batch_id) if isinstance(message, Grant) else None
            if flight is not None:
                flight.pieces -= 1
                if not flight.pieces:
                    self._end_batch(flight.batch_id, BatchStatus.LOST)

    # -- from workers ----------------------------------------------------------------------

    def heartbeat(self, beat: Heartbeat) -> None:
        """Take a worker's heartbeat. The first one registers the worker."""
        now = self._clock()
        if self._quarantine.holds(beat.worker, now):
            return
        if not beat.profiles:  # the worker leaves the group, and still answers its running batches
            self._forget_worker(beat.worker)
            return
        # Workers of an older release that drain may have variants that this release does not have.
        known = {v: p for v, p in beat.profiles.items() if v in self._variants}
        self._cluster_is_stale |= self._learned.meet(known, beat.kind)
        state = WorkerState.of(beat, frozenset(known), now)
        self._cluster_is_stale |= self._workers.heard(beat.worker, state)
        held = set(beat.batches)
        for flight in self._in_flight.values():
            flight.heard(beat.worker, held, now)
        self._refresh_cluster()

    def report(self, report: BatchReport) -> None:
        """Note that a batch is over on its worker."""
        now = self._clock()
        self._quarantine.reached(report.worker)
        if self._learned.ended(report, self._workers.kind_of(report.worker), now):
            self._host.set_cluster(self._learned.cluster())
        flight = self._in_flight.get(report.batch_id)
        if flight is not None:
            ago_s = self._learned.returned(report, flight, now)
            self._end_batch(report.batch_id, report.status, now - ago_s, report.exec_s)

    # -- status ----------------------------------------------------------------------------

    @property
    def has_workers(self) -> bool:
        return bool(self._workers)

    @property
    def capacity(self) -> dict[str, Capacity]:
        """Return `Learned.capacity` with the policy's predictions."""
        expected = self._host.expected()
        found = self._learned.capacity()
        return {model: c._replace(expected=expected.get(model)) for model, c in found.items()}

    def status(self) -> dict[str, Any]:
        """Return the status for `ray-slo status`."""
        queued = Counter(request.model for request in self._queued.values())
        now, running = self._clock(), defaultdict[str, list[dict[str, Any]]](list)
        for flight in self._in_flight.values():
            running[flight.worker].append(flight.told(now))
        return {
            "epoch": self.epoch,
            "policy": str(self._spec.policy.name),
            "queued": {model: queued[model] for model in self._spec.models},
            "in_flight": len(self._in_flight),
            "counts": dict(self._counts),
            "preemptions": [dict(record) for record in self._preemptions],
            "decision_log": self._log and self._log.status(),
            "workers": self._workers.status(now, running),
            **self._solver.status(self._host, now),
            **self._learned.status(now),
        }

    # -- inside ----------------------------------------------------------------------------

    def _new_host(self) -> PolicyHost:
        name, kwargs, policy = new_policy(self._spec)
        if self._log is not None:
            policy = self._log.recorded(policy, name, kwargs, self._clock())
        return PolicyHost(
            NearPayloads(policy, self._workers.node_of, attrgetter("node")),
            self._learned.cluster(),
            on_dispatch=self._on_dispatch,
            on_drop=self._on_drop,
            on_preempt=self._on_preempt,
            on_error=self._on_policy_error,
            clock=self._clock,
        )

    def _on_policy_error(self, error: Exception) -> None:
        # Start a new policy with the queued requests, but not at once, because it may fail again.
        self._host.close()
        self._loop.call_later(_RESTART_S, self._restart_policy)

    def _restart_policy(self) -> None:
        if self._ticker.done():  # the scheduler was closed meanwhile
            return
        logger.warning("policy restarted with %d queued requests", len(self._queued))
        self._generation += 1
        self._in_flight.clear()  # the new policy does not know of them
        self._host = self._new_host()
        for request in self._queued.values():
            self._host.submit(request)

    def _refresh_cluster(self) -> None:
        if self._cluster_is_stale:
            self._cluster_is_stale = False
            self._host.set_cluster(self._learned.cluster())

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._tick(self._clock())
            except Exception:
                logger.exception("scheduler tick failed; going on")

    def _tick(self, now: float) -> None:
        long_ago = now - self._heartbeat_timeout_s
        for worker in self._workers.silent(long_ago):
            logger.warning("worker %s stopped reporting, and counts as dead", worker)
            self._forget_worker(worker)
        self._quarantine.forget(long_ago)
        self._free_unclaimed()
        self._cluster_is_stale |= self._learned.take_news(now)
        self._refresh_cluster()
        self._solver.look(self._host)

    def _free_unclaimed(self) -> None:
        """Free workers from batches that no process has any more (the watchdog).

        Nothing else can end such a batch: its frontends died or hung before they sent it, or the
        worker's report was lost. A worker's heartbeats name its waiting and running batches. So a
        worker that runs its batch keeps it for any time. A silent worker keeps it too.
        """
        for flight in list(self._in_flight.values()):
            worker = self._workers.get(flight.worker)
            if worker is not None and not flight.is_unclaimed(worker.seen_at):
                continue
            lost = flight.lost(self._clock())
            logger.warning("worker %s is free again: %s", flight.worker, lost)
            self._counts["unclaimed"] += 1
            self._watch.unclaimed()
            self._end_batch(flight.batch_id, BatchStatus.LOST)

    def _forget_worker(self, worker: str) -> None:
        if self._workers.pop(worker, None) is None:
            return
        for flight in list(self._in_flight.values()):
            if flight.worker == worker:
                # Tell the policy. If the worker is back at once, it may never see the worker leave.
                self._end_batch(flight.batch_id, BatchStatus.LOST)
        self._host.set_cluster(self._learned.cluster())

    def _end_batch(
        self,
        batch_id: str,
        status: BatchStatus,
        finished_at: float | None = None,
        exec_s: float = 0.0,
    ) -> None:
        flight = self._in_flight.pop(batch_id, None)
        if flight is None:
            return
        now = self._clock()
        at = now if finished_at is None else finished_at
        d = flight.dispatch
        flight.ended(status, now)
        if flight.preempted_at is not None and status is BatchStatus.PREEMPTED:
            self._counts["preempted"] += 1
            self._learned.preempted(now - flight.preempted_at)
        outcome = BatchOutcome(d.batch_id, d.requests, at - exec_s, at, status)
        self._host.finished(d.worker, outcome)

    def _on_dispatch(self, dispatch: Dispatch) -> None:
        batch_id = f"{self.epoch}-{self._generation}-{dispatch.batch_id}"
        flight = self._in_flight[batch_id] = Flight(batch_id, dispatch, self._clock())
        self._counts["batches"] += 1
        self._counts["granted"] += len(dispatch.requests)
        for request in cast(Sequence[OwnedRequest], dispatch.requests):
            self._queued.pop((request.client, request.client_id), None)
        node = self._workers.node_of(dispatch.worker)
        for client, grant in flight.grants(self._workers.kind_of(dispatch.worker)):
            if node and self._client_nodes.get(client) == node:
                self._counts["on_node"] += len(grant.request_ids)
            self._post(client, grant)

    def _on_preempt(self, preempt: Preempt) -> None:
        # The oldest batch of the worker is the running one. It is None if it has just ended.
        on_it = (f for f in self._in_flight.values() if f.worker == preempt.worker)
        flight = next(on_it, None)
        if flight is None or flight.preempted_at is not None:
            return
        self._preemptions.append(flight.preempt(preempt, self._clock()))
        # Only frontends can call a worker. All frontends with a piece of the batch are asked,
        # because one may have died. The worker ignores repetitions.
        stop = Stop(flight.batch_id, preempt.worker, self._workers.kind_of(preempt.worker))
        for client in flight.clients:
            self._post(client, stop)
        least_s, factor = _PATIENCE
        patience_s = max(least_s, factor * self._learned.preempt_delay_s)
        self._loop.call_later(patience_s, self._look_whether_stopped, flight)

    def _look_whether_stopped(self, flight: Flight) -> None:
        if flight.batch_id not in self._in_flight:
            return
        running = flight.dispatch
        if running.variant not in self._deaf:
            self._deaf.add(running.variant)
            logger.warning(
                "a batch of %s was preempted, but continues to run: give its network exit points "
                "(`exit_points`), or call ray_slo.checkpoint() between the steps of its batch "
                "method. This warning is not repeated",
                running.variant,
            )
        self._host.preempt_failed(running.worker, running.batch_id)

    def _on_drop(self, drop: Drop) -> None:
        if self._learned.tries(drop, self._in_flight.values(), self._clock()):
            self._counts["tried"] += 1
            self._host.set_cluster(self._learned.cluster())
            for request in drop.requests:
                self._host.submit(request)
            return
        finish_in_s = drop.finish_at - self._clock()
        by_client: dict[str, list[int]] = {}
        for request in cast(Sequence[OwnedRequest], drop.requests):
            self._queued.pop((request.client, request.client_id), None)
            by_client.setdefault(request.client, []).append(request.client_id)
        self._counts["refused"] += len(drop.requests)
        for client, ids in by_client.items():
            finish = finish_in_s if math.isfinite(finish_in_s) else math.nan
            self._post(client, Refusal(tuple(ids), drop.reason.value, finish))

    def _post(self, client: str, message: Message) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.setdefault(client, []).append(message)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for client, messages in outbox.items():
            self._deliver(client, messages)


def new_policy(spec: AppSpec) -> tuple[Any, dict[str, Any], Any]:
    """Return a policy, and the name and the arguments with which it was made. A policy that was
    given as an object is copied, so that a restart gets the original."""
    shortest_ms = min(spec.slos_ms(model)[0] for model in spec.models)
    name, kwargs = recipe_for(
        spec.policy.name,
        {**live_arguments(spec.policy.name, shortest_ms), **spec.policy.kwargs},
        tuple(spec.trees.values()),
        {model: len(config.variants) for model, config in spec.models.items()},
        planned=spec.planner is not None and spec.planner.assigns,
    )
    return name, kwargs, copy.deepcopy(make_policy(name, kwargs))
