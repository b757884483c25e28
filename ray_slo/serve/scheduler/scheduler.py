"""The scheduler: hosts a policy and turns its decisions into grants and refusals.

Plain asyncio, no ray: the same class lives in the scheduler actor and inside an only frontend
(DESIGN §4). It sees metadata, never a payload. Call everything from one event loop.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ray_slo.core import (
    Assigned,
    BatchOutcome,
    BatchStatus,
    Cluster,
    Dispatch,
    DispatchDelay,
    Drop,
    DropReason,
    LatencyProfile,
    Model,
    OnlineProfile,
    Preempt,
    Request,
    Variant,
    Worker,
)
from ray_slo.core.names import import_attr
from ray_slo.core.quantile import Quantile
from ray_slo.policies.registry import live_arguments, make_policy
from ray_slo.record.writer import open_log
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.messages import (
    BatchReport,
    Capacity,
    Grant,
    Heartbeat,
    Message,
    Refusal,
    Stop,
    Submit,
)
from ray_slo.serve.scheduler.host import PolicyHost
from ray_slo.serve.scheduler.preempted import Preemption
from ray_slo.serve.scheduler.seats import NearPayloads

logger = logging.getLogger(__name__)

_PROFILE_PERIOD_S = 0.25  # how often measured batches may change the policy's view
_MATERIAL = 0.02  # a profile that changed by less is no news to the policy
_FORGET_AFTER_S = 60.0  # what a variant was seen to take, when it is not used any more
_SOLVER = "ray_slo.planning.ramsis:solve"  # for policies that have their tables solved aside
_TICK_S = 0.5
FEW_SAMPLES = 20  # samples of a delay, before which it is not believed for one that was long
# A worker that could not be reached is left alone: it drains, or is being reconfigured. Longer and
# longer, as long as it is not reached.
_QUARANTINE_S = (0.5, 5.0)
_PROBE_AFTER_S = 1.0  # a model that looks too slow for its SLO is tried again after this
_PATIENCE = (0.1, 5.0)  # with a preempted batch: seconds, or so many times the expected delay
_PREEMPTIONS_KEPT = 100
# A worker is freed of a granted batch that it has not named in its heartbeats for so long. The
# batch's pieces, or the report of its end, may be on their way.
_UNCLAIMED_S = 3.0


class _Owned(Request):
    """A request and whose it is."""

    __slots__ = ("client", "client_id")

    def __init__(self, id: int, submit: Submit, now: float, client: str) -> None:
        deadline = now + submit.budget_s
        super().__init__(id, submit.model, now, deadline, submit.size, submit.upstream)
        self.client = client
        self.client_id = submit.request_id


@dataclass(slots=True)
class _InFlight:
    dispatch: Dispatch
    granted_at: float
    pieces: int  # that may reach the worker
    was_there: bool = False  # its worker has named it
    unclaimed_since: float = math.inf  # the first heartbeat of its worker without it
    preemption: Preemption | None = None


@dataclass(slots=True)
class _WorkerState:
    kind: str
    variants: frozenset[str]
    seen_at: float
    preempt_delay_s: float
    assigned: Assigned | None
    node: str


class Scheduler:
    """Hosts the policy of one application.

    Args:
        spec: the application.
        deliver: called with (client, messages) at most once per client and event-loop turn.
        aside: runs a function that takes a second or so off this event loop; default: a thread.
        heartbeat_timeout_s: a silent worker is taken for dead after this.
        on_unclaimed: told of every worker that the watchdog frees.
    """

    def __init__(
        self,
        spec: AppSpec,
        deliver: Callable[[str, list[Message]], None],
        *,
        aside: Callable[[Callable[[Any], Any], Any], Awaitable[Any]] | None = None,
        heartbeat_timeout_s: float = 10.0,
        on_unclaimed: Callable[[], None] = lambda: None,
    ) -> None:
        self.epoch = uuid.uuid4().hex[:8]
        self._spec = spec
        self._variants = spec.variants()
        self._deliver = deliver
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_unclaimed = on_unclaimed
        self._loop = asyncio.get_running_loop()
        self._aside = aside or self._in_thread
        self._clock = time.monotonic  # uvloop's loop.time() has milliseconds only
        self._workers: dict[str, _WorkerState] = {}
        self._client_nodes: dict[str, str] = {}
        self._quarantine: dict[str, tuple[float, float]] = {}  # (until, how long that is)
        self._profiles: dict[tuple[str, str], OnlineProfile] = {}  # by (variant, kind)
        self._measured_at: dict[tuple[str, str], float] = {}
        self._told: dict[tuple[str, str], LatencyProfile] = {}  # what the policy believes
        self._told_delays_s = (math.inf, math.inf)
        self._solving: asyncio.Task[None] | None = None
        self._unsolvable: set[Any] = set()
        self._queued: dict[tuple[str, int], _Owned] = {}
        self._in_flight: dict[str, _InFlight] = {}
        self._outbox: dict[str, list[Message]] = {}
        self._ran_at: dict[str, float] = {}
        self._next_id = 0
        self._generation = 0  # of the policy
        self._overhead = Quantile(0.9, prior=FEW_SAMPLES)
        self._prediction_error = Quantile(0.5)
        self._preempt_delay = Quantile(0.9)
        self._preemptions: deque[Preemption] = deque(maxlen=_PREEMPTIONS_KEPT)
        self._deaf: set[str] = set()  # variants that did not stop when asked to
        self._cluster_is_stale = False
        self._profiles_are_stale = False
        self._counts = {"submitted": 0, "granted": 0, "refused": 0, "cancelled": 0, "batches": 0}
        self._counts |= {"preempted": 0, "on_node": 0, "unclaimed": 0}
        self._log = open_log(spec, self.epoch)
        self._host = self._new_host()
        self._ticker = self._loop.create_task(self._tick())

    def close(self) -> None:
        self._ticker.cancel()
        if self._solving is not None:
            self._solving.cancel()
        self._host.close()
        if self._log is not None:
            self._log.close()

    # -- from frontends --------------------------------------------------------------------

    def submit(self, client: str, submits: Iterable[Submit]) -> None:
        """Requests of one client. One that is queued already is ignored."""
        now = self._clock()
        for submit in submits:
            key = (client, submit.request_id)
            if key in self._queued:
                continue
            if submit.model not in self._spec.models:  # of an older release, still draining
                self._counts["refused"] += 1
                reason = DropReason.NO_WORKER.value
                self._post(client, Refusal((submit.request_id,), reason, math.nan))
                continue
            request = _Owned(self._next_id, submit, now, client)
            self._next_id += 1
            self._queued[key] = request
            self._counts["submitted"] += 1
            self._host.submit(request)

    def cancel(self, client: str, request_ids: Iterable[int]) -> None:
        """Withdraw what is still queued; the rest is ignored."""
        for request_id in request_ids:
            request = self._queued.pop((client, request_id), None)
            if request is not None:
                self._counts["cancelled"] += 1
                self._host.cancel(request)

    def client_is_on(self, client: str, node: str) -> None:
        """A frontend says which node it is on, and its payloads with it."""
        self._client_nodes[client] = node

    def client_gone(self, client: str, unread: Iterable[Message] = ()) -> None:
        """Withdraw everything that a dead frontend had queued.

        Args:
            unread: what it was told and never heard. A batch of which nobody heard is over.
        """
        self._client_nodes.pop(client, None)
        self.cancel(client, [i for c, i in self._queued if c == client])
        for message in (*unread, *self._outbox.pop(client, ())):
            flight = self._in_flight.get(message.batch_id) if isinstance(message, Grant) else None
            if flight is not None:
                flight.pieces -= 1
                if not flight.pieces:
                    self.batch_withdrawn(message.batch_id)

    def worker_lost(self, worker: str) -> None:
        """A worker died or cannot be reached: do without it, its batches are over.

        The frontends submit again what they had sent there.
        """
        first_s, longest_s = _QUARANTINE_S
        _, last_s = self._quarantine.get(worker, (0.0, first_s / 2))
        time_s = min(2 * last_s, longest_s)
        self._quarantine[worker] = (self._clock() + time_s, time_s)
        self._forget_worker(worker)

    def batch_withdrawn(self, batch_id: str) -> None:
        """All requests of a granted batch were cancelled before it was sent."""
        self._end_batch(batch_id, BatchStatus.LOST)

    # -- from workers ----------------------------------------------------------------------

    def heartbeat(self, beat: Heartbeat) -> None:
        """A worker is here; the first one brings it in."""
        now = self._clock()
        until, _ = self._quarantine.get(beat.worker, (0.0, 0.0))
        if until > now:
            return
        if not beat.profiles:  # it leaves the group; what it runs, it still answers
            self._forget_worker(beat.worker)
            return
        # Those of an older release, still draining, are not ours.
        known = {v: p for v, p in beat.profiles.items() if v in self._variants}
        for variant, profile in known.items():
            if (variant, beat.kind) not in self._profiles:
                quantile = self._spec.models[self._variants[variant].model].profile_quantile
                self._profiles[variant, beat.kind] = OnlineProfile(profile, quantile=quantile)
                self._cluster_is_stale = True
        variants = frozenset(known)
        assigned = beat.assigned
        if assigned is not None and assigned.variant not in variants:
            assigned = None
        state = self._workers.get(beat.worker)
        said = (beat.kind, variants, assigned)
        if state is None or (state.kind, state.variants, state.assigned) != said:
            if state is None:
                logger.info("worker %s (%s) joined with %s", beat.worker, beat.kind, set(variants))
            self._workers[beat.worker] = _WorkerState(
                beat.kind, variants, now, beat.preempt_delay_s, assigned, beat.node
            )
            self._cluster_is_stale = True
        else:
            state.seen_at = now
        held = set(beat.batches)
        for batch_id, flight in self._in_flight.items():
            if batch_id in held:
                flight.was_there, flight.unclaimed_since = True, math.inf
            elif flight.dispatch.worker == beat.worker:
                # Not since the grant: one heartbeat may have waited for us since before it.
                flight.unclaimed_since = min(flight.unclaimed_since, now)
        self._refresh_cluster()

    def report(self, report: BatchReport) -> None:
        """A batch is over on its worker."""
        now = self._clock()
        self._quarantine.pop(report.worker, None)
        if report.variant in self._variants:
            self._ran_at[self._variants[report.variant].model] = now
        key = (report.variant, self._kind_of(report.worker))
        profile = self._profiles.get(key)
        if profile is not None:
            for size, seconds in report.measured:
                profile.observe(size, seconds)
                self._measured_at[key] = now
            self._profiles_are_stale |= bool(report.measured)
        flight = self._in_flight.get(report.batch_id)
        if flight is not None:
            overhead = now - flight.granted_at - report.held_s
            self._overhead.add(max(overhead, 0.0))
            # Half the overhead is the way here, so the worker was done that much earlier.
            finished = now - 0.5 * max(overhead, 0.0)
            if report.status is not BatchStatus.PREEMPTED:
                self._prediction_error.add(finished - flight.dispatch.finish_at)
            self._end_batch(report.batch_id, report.status, finished, report.exec_s)

    # -- status ----------------------------------------------------------------------------

    @property
    def has_workers(self) -> bool:
        return bool(self._workers)

    @property
    def capacity(self) -> dict[str, Capacity]:
        """Of models that there are workers for."""
        rates: dict[str, float] = {}
        workers: dict[str, set[str]] = {}
        for name, worker in self._workers.items():
            best: dict[str, float] = {}
            for variant in worker.variants:
                model = self._variants[variant].model
                profile = self._profiles[variant, worker.kind].profile
                slo_s = self._spec.models[model].latency_slo_ms / 1e3
                rate = profile.throughput(max(profile.max_batch_within(slo_s), 1))
                best[model] = max(best.get(model, 0.0), rate)
            for model, rate in best.items():
                rates[model] = rates.get(model, 0.0) + rate
                workers.setdefault(model, set()).add(name)
        return {model: Capacity(rate, frozenset(workers[model])) for model, rate in rates.items()}

    @property
    def dispatch_delay_s(self) -> float:
        """Measured one-way time between a decision and the worker (90th percentile)."""
        return 0.5 * self._overhead.value(default=0.01)

    @property
    def preempt_delay_s(self) -> float:
        """Measured time from a preemption until the worker is known to be free (90th percentile);
        before the first one, what the workers' preemption profiles say."""
        profiled_s = max((w.preempt_delay_s for w in self._workers.values()), default=0.0)
        return self._preempt_delay.value(default=2 * self.dispatch_delay_s + profiled_s)

    def status(self) -> dict[str, Any]:
        """What `ray-slo status` shows."""
        now = self._clock()
        queued: dict[str, int] = dict.fromkeys(self._spec.models, 0)
        for request in self._queued.values():
            queued[request.model] += 1
        busy: dict[str, int] = {}
        for flight in self._in_flight.values():
            busy[flight.dispatch.worker] = busy.get(flight.dispatch.worker, 0) + 1
        return {
            "epoch": self.epoch,
            "policy": str(self._spec.policy.name),
            "queued": queued,
            "in_flight": len(self._in_flight),
            "counts": dict(self._counts),
            "dispatch_delay_ms": 1e3 * self.dispatch_delay_s,
            "prediction_error_ms": 1e3 * self._prediction_error.value(default=0.0),
            "preempt_delay_ms": 1e3 * self.preempt_delay_s,
            "preemptions": [p.to_json() for p in self._preemptions],
            "decision_log": self._log and self._log.status(),
            "workers": {
                name: {
                    "kind": w.kind,
                    "node": w.node,
                    "variants": sorted(w.variants),
                    "assigned": w.assigned and asdict(w.assigned),
                    "batches_in_flight": busy.get(name, 0),
                    "last_heartbeat_s": now - w.seen_at,
                }
                for name, w in self._workers.items()
            },
            "profiles": {
                f"{variant}@{kind}": {
                    "latency_1_ms": 1e3 * p.profile.latency(1),
                    "latency_max_ms": 1e3 * p.profile.latency(p.profile.max_batch_size),
                    "max_batch_size": p.profile.max_batch_size,
                    "measured_to": p.profile.measured_to,
                    "samples": p.samples,
                    **p.profile.to_json(),
                }
                for (variant, kind), p in self._profiles.items()
            },
        }

    # -- inside ----------------------------------------------------------------------------

    def _new_host(self) -> PolicyHost:
        name = self._spec.policy.name
        shortest_ms = min(m.latency_slo_ms for m in self._spec.models.values())
        kwargs = {**live_arguments(name, shortest_ms), **self._spec.policy.kwargs}
        # A ready-made policy object is kept as it was made, for a restart.
        policy = copy.deepcopy(make_policy(name, kwargs))
        if self._log is not None:
            policy = self._log.recorded(policy, name, kwargs, self._clock())
        return PolicyHost(
            NearPayloads(policy, self._node_of_worker, self._node_of_request),
            self._cluster(),
            on_dispatch=self._on_dispatch,
            on_drop=self._on_drop,
            on_preempt=self._on_preempt,
            on_error=self._on_policy_error,
            clock=self._clock,
        )

    def _on_policy_error(self, error: Exception) -> None:
        # Start afresh with what is queued. Not at once: it may fail again.
        self._host.close()
        self._loop.call_later(_TICK_S, self._restart_policy)

    def _restart_policy(self) -> None:
        if self._ticker.done():  # closed meanwhile
            return
        logger.warning("policy restarted with %d queued requests", len(self._queued))
        self._generation += 1
        self._in_flight.clear()  # the new policy does not know of them
        self._host = self._new_host()
        for request in self._queued.values():
            self._host.submit(request)

    def _node_of_worker(self, worker: str) -> str:
        state = self._workers.get(worker)
        return state.node if state else ""

    def _node_of_request(self, request: Request) -> str:
        assert isinstance(request, _Owned)
        return self._client_nodes.get(request.client, "")

    def _kind_of(self, worker: str) -> str:
        state = self._workers.get(worker)
        return state.kind if state else ""

    def _cluster(self) -> Cluster:
        profiles: dict[str, dict[str, LatencyProfile]] = {name: {} for name in self._variants}
        for (variant, kind), online in self._profiles.items():
            profiles[variant][kind] = online.profile
        variants: dict[str, list[Variant]] = {name: [] for name in self._spec.models}
        for name, ref in self._variants.items():
            variants[ref.model].append(Variant(name, profiles[name], ref.accuracy))
        margin_ms = self._spec.response_margin_ms  # frontends keep it for the way back
        models = [
            Model(name, max(m.latency_slo_ms - margin_ms, 1.0) / 1e3, tuple(variants[name]))
            for name, m in self._spec.models.items()
        ]
        workers = [
            Worker(name, w.kind, w.variants, w.assigned) for name, w in self._workers.items()
        ]
        dispatch_delay_s, preempt_delay_s = self._delays_s()
        return Cluster.of(models, workers, DispatchDelay(dispatch_delay_s), preempt_delay_s)

    def _delays_s(self) -> tuple[float, float]:
        return self.dispatch_delay_s, self.preempt_delay_s

    def _refresh_cluster(self) -> None:
        if self._cluster_is_stale:
            self._cluster_is_stale = self._profiles_are_stale = False
            self._told = {key: online.profile for key, online in self._profiles.items()}
            self._told_delays_s = self._delays_s()
            self._host.set_cluster(self._cluster())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_PROFILE_PERIOD_S)
            try:
                now = self._clock()
                for name, worker in list(self._workers.items()):
                    if now - worker.seen_at > self._heartbeat_timeout_s:
                        logger.warning("worker %s is silent; doing without it", name)
                        self._forget_worker(name)
                self._free_unclaimed()
                for name, (until, _) in list(self._quarantine.items()):
                    if now - until > self._heartbeat_timeout_s:
                        del self._quarantine[name]
                self._forget_unused()
                if self._profiles_are_stale:
                    self._profiles_are_stale = False
                    self._cluster_is_stale |= self._has_news()
                self._refresh_cluster()
                self._solve_wanted()
            except Exception:
                logger.exception("scheduler tick failed; going on")

    def _free_unclaimed(self) -> None:
        """The watchdog: frees workers of batches that nobody has any more.

        Whoever should have ended such a batch cannot: its frontends died or hang with it unsent, or
        the worker's report was lost. A worker names in its heartbeats what waits or runs there, so
        one that works is left alone, however long that takes. A silent one is, too.
        """
        for batch_id, flight in list(self._in_flight.items()):
            worker = self._workers.get(flight.dispatch.worker)
            if worker is not None and worker.seen_at - flight.unclaimed_since <= _UNCLAIMED_S:
                continue
            clients = {r.client for r in flight.dispatch.requests if isinstance(r, _Owned)}
            logger.warning(
                "worker %s is free again: batch %s, granted %.1f s ago to %s, %s",
                flight.dispatch.worker,
                batch_id,
                self._clock() - flight.granted_at,
                ", ".join(sorted(clients)) or "the only frontend",
                "is over there, and its report was lost"
                if flight.was_there
                else "is not there, and no report of it came",
            )
            self._counts["unclaimed"] += 1
            self._on_unclaimed()
            self._end_batch(batch_id, BatchStatus.LOST)

    def _has_news(self) -> bool:
        """Whether measured batches say something else than the policy was told."""
        for now_s, told_s in zip(self._delays_s(), self._told_delays_s, strict=True):
            if abs(now_s - told_s) > max(0.1 * told_s, 1e-3):
                return True
        return any(
            key not in self._told or online.profile.differs(self._told[key], _MATERIAL)
            for key, online in self._profiles.items()
        )

    def _forget_unused(self) -> None:
        """Believe again the first profile of a variant that the policy avoids.

        It may have looked slow in a disturbance that is over; nobody would ever find out.
        """
        for key, online in self._profiles.items():
            ran_at = self._ran_at.get(self._variants[key[0]].model, -math.inf)
            if online.samples and ran_at - self._measured_at[key] > _FORGET_AFTER_S:
                self._profiles[key] = OnlineProfile(online.prior, quantile=online.quantile)
                self._profiles_are_stale = True

    def _solve_wanted(self) -> None:
        """Have what the policy wants solved off this event loop, one problem after the other."""
        wanted = getattr(self._host.policy, "wanted", None)
        if wanted is None or (self._solving is not None and not self._solving.done()):
            return
        problem = next((p for p in wanted() if p not in self._unsolvable), None)
        if problem is not None:
            self._solving = self._loop.create_task(self._solve(self._host, problem))

    async def _solve(self, host: PolicyHost, problem: Any) -> None:
        start = self._clock()
        try:
            table = await self._aside(import_attr(_SOLVER), problem)
        except Exception:
            logger.exception("could not be solved, and is not tried again: %r", problem)
            self._unsolvable.add(problem)
            return
        logger.info("solved in %.2f s: %r", self._clock() - start, problem)
        host.tables_solved([table])

    async def _in_thread(self, function: Callable[[Any], Any], argument: Any) -> Any:
        return await self._loop.run_in_executor(None, function, argument)

    def _forget_worker(self, worker: str) -> None:
        if self._workers.pop(worker, None) is None:
            return
        for batch_id, flight in list(self._in_flight.items()):
            if flight.dispatch.worker == worker:
                # The policy is told: it may never see the worker leave, if that is back at once.
                self._end_batch(batch_id, BatchStatus.LOST)
        self._cluster_is_stale = True
        self._refresh_cluster()

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
        if flight.preemption is not None:
            flight.preemption.ended(status, now)
            if status is BatchStatus.PREEMPTED:
                self._counts["preempted"] += 1
                self._preempt_delay.add(now - flight.preemption.asked_at)
        outcome = BatchOutcome(d.batch_id, d.requests, at - exec_s, at, status)
        self._host.finished(d.worker, outcome)

    def _on_dispatch(self, dispatch: Dispatch) -> None:
        now = self._clock()
        batch_id = f"{self.epoch}-{self._generation}-{dispatch.batch_id}"
        self._counts["batches"] += 1
        self._counts["granted"] += len(dispatch.requests)
        node = self._node_of_worker(dispatch.worker)
        pieces: dict[str, list[int]] = {}
        for request in dispatch.requests:
            assert isinstance(request, _Owned)
            self._queued.pop((request.client, request.client_id), None)
            pieces.setdefault(request.client, []).append(request.client_id)
        self._in_flight[batch_id] = _InFlight(dispatch, now, len(pieces))
        for i, (client, ids) in enumerate(pieces.items()):
            if node and self._client_nodes.get(client) == node:
                self._counts["on_node"] += len(ids)
            self._post(
                client,
                Grant(
                    batch_id=batch_id,
                    worker=dispatch.worker,
                    kind=self._kind_of(dispatch.worker),
                    model=dispatch.requests[0].model,
                    variant=dispatch.variant,
                    request_ids=tuple(ids),
                    piece=i,
                    num_pieces=len(pieces),
                    batch_size=len(dispatch.requests),
                    start_in_s=dispatch.start_at - now,
                    finish_in_s=dispatch.finish_at - now,
                    slack_s=dispatch.slack_s,
                ),
            )

    def _on_preempt(self, preempt: Preempt) -> None:
        # The oldest batch of the worker is the one that runs. None: it ended just now.
        on_it = (i for i in self._in_flight.items() if i[1].dispatch.worker == preempt.worker)
        batch_id, flight = next(on_it, ("", None))
        if flight is None or flight.preemption is not None:
            return
        running, now = flight.dispatch, self._clock()
        flight.preemption = Preemption.of(preempt, running, now)
        self._preemptions.append(flight.preemption)
        # By the way that the payloads went: only a frontend can call a worker. All of them, as one
        # may have died; once is enough.
        stop = Stop(batch_id, preempt.worker, self._kind_of(preempt.worker))
        for client in dict.fromkeys(r.client for r in running.requests if isinstance(r, _Owned)):
            self._post(client, stop)
        least_s, factor = _PATIENCE
        patience_s = max(least_s, factor * self.preempt_delay_s)
        self._loop.call_later(patience_s, self._look_whether_stopped, batch_id)

    def _look_whether_stopped(self, batch_id: str) -> None:
        flight = self._in_flight.get(batch_id)
        if flight is None:
            return
        running = flight.dispatch
        if running.variant not in self._deaf:
            self._deaf.add(running.variant)
            logger.warning(
                "a batch of %s was preempted and runs on: give its network exit points "
                "(`exit_points`), or call ray_slo.checkpoint() between the steps of its batch "
                "method. Said once",
                running.variant,
            )
        self._host.preempt_failed(running.worker, running.batch_id)

    def _on_drop(self, drop: Drop) -> None:
        finish_in_s = drop.finish_at - self._clock()
        by_client: dict[str, list[int]] = {}
        for request in drop.requests:
            assert isinstance(request, _Owned)
            self._queued.pop((request.client, request.client_id), None)
            by_client.setdefault(request.client, []).append(request.client_id)
        self._counts["refused"] += len(drop.requests)
        if drop.reason in (DropReason.WOULD_MISS, DropReason.SHED):
            self._doubt_profiles(drop.requests[0])
        for client, ids in by_client.items():
            finish = finish_in_s if math.isfinite(finish_in_s) else math.nan
            self._post(client, Refusal(tuple(ids), drop.reason.value, finish))

    def _doubt_profiles(self, refused: Request) -> None:
        """Let a probe through when only our belief keeps a whole model from being served.

        A profile is learned from batches, so one that says "too slow for anything" (a cold start,
        a disturbance that is over) would never be corrected. In a pipeline, that may be a profile
        of any task from the refused one on.
        """
        now = self._clock()
        models = self._from(refused.model)
        budget_s = refused.deadline - refused.arrival
        ran_at = max(self._ran_at.get(model, -math.inf) for model in models)
        slo_s = self._spec.models[refused.model].latency_slo_ms / 1e3
        if now - ran_at <= _PROBE_AFTER_S or budget_s < 0.5 * slo_s:
            return
        for model in models:
            self._ran_at[model] = now
        self._overhead.forget()
        self._profiles_are_stale = True  # no batch will come to have the policy told
        quickest: dict[tuple[str, str], tuple[float, str]] = {}  # by model and kind
        for (variant, kind), online in self._profiles.items():
            if (model := self._variants[variant].model) in models:
                found = (online.profile.latency(1), variant)
                quickest[model, kind] = min(quickest.get((model, kind), found), found)
        for kind in {kind for _, kind in quickest}:
            needs = {m: quickest[m, kind] for m in models if (m, kind) in quickest}
            needed_s = sum(seconds for seconds, _ in needs.values())
            if needed_s <= 0.5 * budget_s:
                continue
            for seconds, variant in needs.values():
                logger.warning(
                    "%s looks too slow for its SLO on %s (%.4g ms): trying again",
                    variant,
                    kind,
                    seconds * 1e3,
                )
                online = self._profiles[variant, kind]
                self._profiles[variant, kind] = OnlineProfile(
                    online.profile.scaled(0.5 * budget_s / needed_s), quantile=online.quantile
                )
            self._cluster_is_stale = True

    def _from(self, model: str) -> list[str]:
        """A model, and in a pipeline all tasks below it."""
        pipeline, found = self._spec.pipeline, [model]
        if pipeline is not None:
            for task in found:  # grows as it goes
                found += pipeline.children(task)
        return found

    def _post(self, client: str, message: Message) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.setdefault(client, []).append(message)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for client, messages in outbox.items():
            self._deliver(client, messages)
