"""A frontend's workers: calls to them, and what they can serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from ray_slo.core.policy import Expected
from ray_slo.core.seldom import Seldom
from ray_slo.serve.channels.channel import Channel
from ray_slo.serve.config.spec import AppSpec, worker_deployment
from ray_slo.serve.direct import Connection, Disconnected, NotDirect, connect
from ray_slo.serve.errors import BatchResultError, ConfigError, NotReady, RefusedEarly
from ray_slo.serve.frontend.ledger import Entry, WorkerGone
from ray_slo.serve.frontend.startup import Startup
from ray_slo.serve.frontend.surroundings import Surroundings
from ray_slo.serve.messages import Capacity, Grant, Heartbeat, Piece, PieceResult, Stop
from ray_slo.serve.payloads import Items, why
from ray_slo.serve.ray_private.peers import of_any_size
from ray_slo.serve.shared import Lent
from ray_slo.serve.watch import tracing

logger = logging.getLogger(__name__)
logger.addFilter(Seldom(10))

_RELEASE_S = 1.0  # until the workers and frontends of one release know each other
_CONNECT_AGAIN_S = 5.0  # seconds between attempts to connect
_MEET_S = 5.0  # seconds for workers to introduce themselves again
_FIRST_S = 2.0  # the same at the start; without an answer, no worker is up
_LOOK_S = 0.3  # seconds between two checks of what workers can serve, until it is everything
_LEAST_LOOK_S = 0.05  # the same while a request waits for the next check
_FRESH_S = 1.0  # a request waits at most this long for a check, in seconds
_PATIENT_S = 10.0  # the same for the first requests, if their SLO allows it
# Exceptions of a call to a worker if the worker is gone, or its node with the result.
_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    Disconnected,
)


def check_names(frontend: str, name: str, handles: Mapping[str, Any]) -> None:
    """Check that the frontend and its workers find each other. If an application has several
    deployments with the same name, Serve numbers them, and a worker finds its frontend by that
    number.

    Args:
        frontend: name of the frontend's deployment, with the number.
        name: name in the config.

    Raises:
        ConfigError: the workers have another number.
    """
    suffix = frontend.removeprefix(name)
    for kind, handle in handles.items():
        if handle.deployment_name != worker_deployment(name, kind) + suffix:
            raise ConfigError(
                f"name: frontend {frontend!r} and its workers {handle.deployment_name!r} do not "
                f"match, because another deployment of the application is named {name!r}, too; "
                "give one of them another name"
            )


class Up(NamedTuple):
    """Workers that can serve a model now, and the largest number of them so far."""

    workers: frozenset[str]
    most: int


class Workers:
    """The workers' deployments.

    Args:
        handles: handles by kind.
        spawn: function that runs a coroutine as a task.
        plan_says: function that returns what the plan cannot serve, and why; and the last measured
            time of a worker's start, in seconds.
    """

    def __init__(
        self,
        spec: AppSpec,
        around: Surroundings,
        handles: Mapping[str, Any],
        channel: Channel,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        plan_says: Callable[[], tuple[str | None, float | None]],
    ) -> None:
        self._spec = spec
        self._around = around
        self._handles = {kind: of_any_size(handle) for kind, handle in handles.items()}
        self._channel = channel
        self._spawn = spawn
        self._plan_says = plan_says
        needs = {name: tree.models for name, tree in spec.trees.items()}
        self.startup = Startup(needs, spec.error_details)
        self._loop = asyncio.get_running_loop()
        self._connections = Connections(self._address_of, spawn)
        self._most: dict[str, int] = {}  # largest number of workers of a model so far
        self._look_now = asyncio.Event()
        self._next_look: asyncio.Future[None] = self._loop.create_future()
        self._meeting: asyncio.Task[None]
        self._capacity: dict[str, Capacity] = {}  # by model

    # -- calls -----------------------------------------------------------------------------

    async def execute(self, grant: Grant, share: Sequence[Entry]) -> PieceResult:
        """Send a frontend's share of a batch, and wait for its results.

        Raises:
            WorkerLost: the share was not sent, because there is no such worker.
            WorkerGone: the worker ended during the call.
            BatchResultError: Ray could not carry the call.
            RefusedEarly: the worker is of another release, with other kinds of workers.
            Exception: the call failed.
        """
        if grant.kind not in self._handles:
            said = f"worker {grant.worker} is of another release, whose workers have other names"
            raise RefusedEarly(said, reason="no_worker", retry_after_s=_RELEASE_S)
        traces = [entry.trace for entry in share]
        sizes = tuple(entry.size for entry in share)
        piece = Piece(
            batch_id=grant.batch_id,
            variant=grant.variant,
            items=Items(entry.item for entry in share),
            piece=grant.piece,
            num_pieces=grant.num_pieces,
            start_by_s=grant.start_by_s,
            traces=tracing.contexts(traces),
            late_in_s=grant.finish_in_s + grant.slack_s,
            sizes=sizes if max(sizes, default=1) > 1 else (),
        )
        try:
            connection = None if piece.traces else self._connections.to(grant.kind, grant.worker)
            if connection is not None:
                with contextlib.suppress(NotDirect):
                    result: PieceResult = await connection.call(piece)
                    return result
            with tracing.call_of(traces):
                call = self._handles[grant.kind].execute.remote(piece, worker=grant.worker)
                result = await call
        except _GONE as error:
            said = type(error).__name__
            raise WorkerGone(said, self._around.ended_itself(grant.worker)) from error
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", error)
            if not isinstance(cause, ray.exceptions.RayError):
                raise
            # Ray could not carry the call; what it says has a stack trace.
            logger.warning("a call of worker %s failed: %s", grant.worker, error)
            said = f"Ray could not pass the batch on: {why(cause)}"
            raise BatchResultError(said) from error
        return result

    def close(self) -> None:
        self._connections.close()

    async def alive(self, kind: str, worker: str) -> None:
        """Ask a worker whether it is alive, and wait for its answer.

        Raises:
            Exception: the question did not reach it.
        """
        connection = self._connections.to(kind, worker)
        if connection is not None:
            await connection.call(None)
        else:
            await self._address_of(kind, worker)

    def may_be_gone(self, model: str, worker: str) -> bool:
        """Return whether to give up a worker of a model that does not answer.

        Nobody could do the work of the last worker. If it is a process of this machine that runs,
        its code holds Python's lock, or the machine is busy. One of its requests may be why, and
        must not go to the next worker.
        """
        capacity = self._capacity.get(model)
        has_others = capacity is not None and bool(capacity.workers - {worker})
        return has_others and not self._connections.runs_here(worker)

    async def _address_of(self, kind: str, worker: str) -> str:
        address: str = await self._handles[kind].address.remote(worker=worker)
        return address

    async def preempt(self, stop: Stop) -> None:
        """Pass a preemption on to the worker. The batch's results show its effect."""
        try:
            await self._handles[stop.kind].preempt.remote(stop.batch_id, worker=stop.worker)
        except Exception as error:
            logger.info("batch %s could not be preempted: %r", stop.batch_id, error)

    # -- what they can serve ---------------------------------------------------------------

    def capacity_of(self, model: str) -> Capacity | None:
        """Return the capacity for a model. None while it is not known."""
        return self._capacity.get(model)

    @property
    def expected(self) -> dict[str, Expected]:
        """Return the policy's predictions for requests, by model."""
        found = self._capacity.items()
        return {model: c.expected for model, c in found if c.expected is not None}

    async def begin(self) -> None:
        """Meet workers that are up, and keep checking what they can serve."""
        self._meeting = self._spawn(self._meet())
        await asyncio.wait({self._meeting}, timeout=_FIRST_S)
        watch = self._spawn(self._watch_startup())
        if self._meeting.done():
            # Workers are up, so this is not the first start. The frontend is ready only when they
            # can be used; until then Serve routes nothing here.
            await asyncio.wait({watch}, timeout=_MEET_S)

    async def refusal(self, model: str, slo_s: float) -> NotReady | None:
        """Return the refusal of a client's request that no worker can serve. None if one can.

        Args:
            slo_s: the request's SLO, in seconds.
        """
        if self.startup.complete:
            return None
        refusal = self.startup.refusal(model, time.monotonic())
        if refusal is not None:
            self._look_now.set()
            patience_s = max(_FRESH_S, min(slo_s, _PATIENT_S))
            await asyncio.wait({self._next_look}, timeout=patience_s)
            now = time.monotonic()
            refusal = self.startup.refusal(model, now)
            if refusal is not None and self.startup.is_awaited(now):
                refusal = refusal if slo_s < (refusal.retry_after_s or 0.0) else None
        return refusal

    async def up(self, model: str) -> Up:
        """Ask the scheduler which workers are up.

        Raises:
            Exception: the scheduler does not answer, or no worker is up.
        """
        await self._look(_FRESH_S)
        return Up(self._capacity[model].workers, self._most[model])

    async def refresh(self, *, is_waited_for: bool) -> None:
        """Ask the scheduler again what workers can serve. This is called about once per second.

        Args:
            is_waited_for: whether requests wait for workers.
        """
        with contextlib.suppress(Exception):  # the scheduler restarts: keep what is known
            await self._look(_FRESH_S)
        # While Serve replaces us, workers send heartbeats to our successor, and Serve replaces them
        # too.
        if is_waited_for and self._channel.is_deserted():
            try:
                await asyncio.wait_for(self._meet(), _MEET_S)
            except Exception as error:
                logger.info("no worker to be met: %r", error)

    async def _meet(self) -> None:
        # A planner may want no worker of a kind. Then a call would never be answered, and Serve
        # would start a worker for it. Running workers send heartbeats to the scheduler by
        # themselves.
        until = asyncio.FIRST_COMPLETED if self._spec.planned else asyncio.FIRST_EXCEPTION
        meetings = [asyncio.ensure_future(self._join(handle)) for handle in self._handles.values()]
        try:
            done, _ = await asyncio.wait(meetings, return_when=until)
            for meeting in done:
                meeting.result()
        finally:
            for meeting in meetings:
                meeting.cancel()

    async def _join(self, handle: Any) -> None:
        beat: Heartbeat = await handle.introduce.remote()
        await self._channel.join(beat)
        self._connections.to(beat.kind, beat.worker)  # the first batch does not wait for it

    async def _watch_startup(self) -> None:
        """Find out what can be served, and why the rest cannot, until everything can."""
        kinds = {kind: handle.deployment_name for kind, handle in self._handles.items()}
        while True:
            look, self._next_look = self._next_look, self._loop.create_future()
            self._look_now.clear()
            try:
                # If the scheduler itself is still starting, requests wait for it with their SLO.
                with contextlib.suppress(asyncio.TimeoutError):
                    await self._look(_MEET_S)
                self.startup.serves(self._capacity)
                if self.startup.complete:
                    self._next_look.set_result(None)
                    return
                if self._meeting.done() and self._meeting.exception() is not None:
                    self._meeting = self._spawn(self._meet())
                self.startup.plan_says(*self._plan_says())
                states = await self._loop.run_in_executor(
                    None, self._around.states, self._around.app, kinds
                )
                self.startup.deployments(states)
            except Exception as error:
                logger.info("cannot tell what is served: %r", error)
            finally:
                look.set_result(None)
            await asyncio.sleep(_LEAST_LOOK_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), _LOOK_S)

    async def _look(self, within_s: float) -> None:
        """Ask the scheduler.

        Raises:
            Exception: the reason why it did not answer.
        """
        self._capacity = await asyncio.wait_for(self._channel.capacity(), within_s)
        for model, capacity in self._capacity.items():
            self._most[model] = max(self._most.get(model, 0), len(capacity.workers))


class Connections:
    """A frontend's direct connections to workers of its machine.

    Args:
        address_of: function that asks a worker of a kind for its address. It raises if there is no
            answer.
        spawn: function that runs a coroutine as a task.
    """

    def __init__(
        self,
        address_of: Callable[[str, str], Awaitable[str]],
        spawn: Callable[[Any], Any],
    ) -> None:
        self._address_of = address_of
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, Connection] = {}
        self._lent: Lent | None = None
        self._not_before: dict[
            str, float
        ] = {}  # earliest next attempt, by worker without a connection

    def to(self, kind: str, worker: str) -> Connection | None:
        """Return an open connection to a worker. If there is none, return None and begin to
        connect."""
        connection = self._open.get(worker)
        if connection is not None:
            if connection.is_open:
                return connection
            del self._open[worker]
        now = self._loop.time()
        if now >= self._not_before.get(worker, now):
            self._not_before = {w: at for w, at in self._not_before.items() if at > now}
            self._not_before[worker] = now + _CONNECT_AGAIN_S
            self._spawn(self._connect(kind, worker))
        return None

    def runs_here(self, worker: str) -> bool:
        """Return whether a worker is a process of this machine, and is not stopped."""
        connection = self._open.get(worker)
        return connection is not None and connection.is_running

    async def _connect(self, kind: str, worker: str) -> None:
        with contextlib.suppress(
            Exception
        ):  # Serve's handle failed; a call with it gives a better error
            if not (address := await self._address_of(kind, worker)):
                return
            if self._lent is None:
                with contextlib.suppress(OSError):
                    self._lent = Lent()
            if (connection := await connect(address, self._lent)) is None:
                return
            # A worker that is gone never comes back under its name.
            self._open = {w: kept for w, kept in self._open.items() if kept.is_open}
            if self._open.setdefault(worker, connection) is not connection:
                connection.close()

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()
        if self._lent is not None:
            self._lent.close()
