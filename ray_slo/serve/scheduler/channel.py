"""Connections of frontends and workers to the scheduler.

`EmbeddedChannel`: the scheduler is an object in the only frontend. There are no messages, and the
workers' reports come with their results. `ActorChannel`: the scheduler is a named actor. All
submissions of an event-loop turn go in one message, and grants come back through one long poll.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import Context
from typing import Any

import ray
from ray import serve

from ray_slo.core.seldom import Seldom
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.direct import Disconnected
from ray_slo.serve.messages import (
    BatchReport,
    Cancel,
    Capacity,
    Event,
    Heartbeat,
    Message,
    Submit,
    Unreachable,
    Withdrawn,
)
from ray_slo.serve.ray_private.actors import OtherProcess, find_actor, in_time, this_node
from ray_slo.serve.scheduler.actor import get_or_create_scheduler
from ray_slo.serve.scheduler.line import SchedulerLine
from ray_slo.serve.scheduler.scheduler import Scheduler
from ray_slo.serve.watch.log_writer import clock_id
from ray_slo.serve.watch.metrics import SchedulerMetrics

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())


class Channel(ABC):
    """A frontend's side of the scheduler. Nothing here blocks.

    Methods that do nothing here matter only if the scheduler runs in the frontend. Otherwise
    workers find the scheduler and report to it themselves.
    """

    def submit(self, request: Submit) -> None:
        self._say(request)

    def cancel(self, request_id: int) -> None:
        self._say(Cancel(request_id))

    def worker_lost(self, worker: str) -> None:
        self._say(Unreachable(worker))

    def batch_withdrawn(self, batch_id: str) -> None:
        self._say(Withdrawn(batch_id))

    def _say(self, event: Event) -> None:
        raise NotImplementedError  # subclasses that send events in another way override the methods

    def report(self, report: BatchReport | None) -> None:
        """Take a report that came with results."""
        return None

    async def heartbeat(self, beat: Heartbeat) -> None:
        """Take the heartbeat of a worker that knows no other scheduler."""
        return None

    @abstractmethod
    async def join(self, beat: Heartbeat) -> None:
        """Introduce a worker to the scheduler as soon as the scheduler is there, if the worker does
        not do so itself."""

    def is_deserted(self) -> bool:
        """Return whether the scheduler knows no worker and the frontend must introduce workers."""
        return False

    @abstractmethod
    async def capacity(self) -> dict[str, Capacity]:
        """See `Learned.capacity`.

        Raises:
            Exception: the reason why the scheduler did not answer.
        """

    @abstractmethod
    async def clocks(self) -> dict[str, float]:
        """Return the reading of the clock of the scheduler's decision log, if there is a scheduler.

        Raises:
            Exception: the reason why the scheduler did not answer.
        """

    @abstractmethod
    async def status(self) -> dict[str, Any]:
        """Return the part of `ray-slo status` about the scheduler."""

    @abstractmethod
    def close(self) -> None:
        """Send and receive nothing more."""


class EmbeddedChannel(Channel):
    """The scheduler runs in this process."""

    def __init__(self, spec: AppSpec, on_messages: Callable[[list[Message]], None]) -> None:
        self._aside = OtherProcess()
        self._scheduler = Scheduler(
            spec,
            lambda _client, messages: on_messages(messages),
            aside=self._aside,
            watch=SchedulerMetrics(),
        )
        self._scheduler.client_is_on("", this_node())

    def _say(self, event: Event) -> None:
        self._scheduler.hear("", (event,))

    def report(self, report: BatchReport | None) -> None:
        if report is not None:
            self._scheduler.report(report)

    async def heartbeat(self, beat: Heartbeat) -> None:
        self._scheduler.heartbeat(beat)

    join = heartbeat

    def is_deserted(self) -> bool:
        return not self._scheduler.has_workers

    async def capacity(self) -> dict[str, Capacity]:
        return self._scheduler.capacity

    async def clocks(self) -> dict[str, float]:
        return {clock_id(): time.monotonic()}

    async def status(self) -> dict[str, Any]:
        return {"scheduler": "embedded", **self._scheduler.status()}

    def close(self) -> None:
        self._scheduler.close()
        self._aside.close()


class ActorChannel(Channel):
    """A channel to a scheduler that is a named actor. Ray restarts the actor when it dies.

    Args:
        on_messages: called with grants and refusals.
        on_reset: called when the scheduler is new and knows nothing. The caller must submit again
            all requests that were not granted.
    """

    def __init__(
        self,
        spec: AppSpec,
        app_key: str,
        client: str,
        on_messages: Callable[[list[Message]], None],
        on_reset: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._app_key = app_key
        self._client = client
        self._on_messages = on_messages
        self._on_reset = on_reset
        self._loop = asyncio.get_running_loop()
        self._node = this_node()
        self._actor: Any = None
        self._line: SchedulerLine | None = None
        self._epoch: str | None = None
        self._connected = asyncio.Event()
        self._events: list[Event] = []
        self._poller = self._loop.create_task(self._poll())

    async def join(self, beat: Heartbeat) -> None:
        """Wait until the scheduler is there; workers find it and register themselves."""
        await self._connected.wait()

    async def capacity(self) -> dict[str, Capacity]:
        if self._actor is None:
            return {}
        capacity: dict[str, Capacity] = await self._actor.capacity.remote()
        return capacity

    async def clocks(self) -> dict[str, float]:
        return {} if self._actor is None else dict([await self._actor.clock.remote()])

    async def status(self) -> dict[str, Any]:
        if self._actor is None:
            return {"scheduler": "actor", "state": "starting"}
        return {"scheduler": "actor", **await self._actor.status.remote()}

    def close(self) -> None:
        self._poller.cancel()
        if self._actor is not None:
            self._actor.goodbye.remote(self._client)
        if self._line is not None:
            self._line.close()

    def _say(self, event: Event) -> None:
        if not self._events:
            # Use an empty context. For Ray, a call is a child of the request in whose context it is
            # made. Ray would cancel it with that request, and lose the other requests' events.
            self._loop.call_soon(self._flush, context=Context())
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        if self._line is not None and self._epoch is not None:
            # The answer is not awaited: if the actor died, the poll fails and everything is
            # submitted again.
            self._line.tell("events", self._client, self._epoch, events)

    async def _poll(self) -> None:
        acked = 0
        while True:
            try:
                if self._actor is None:
                    self._actor = await self._loop.run_in_executor(
                        None, get_or_create_scheduler, self._spec, self._app_key
                    )
                    await self._actor.configure.remote(self._spec.without_code())
                if self._line is None:
                    self._line = SchedulerLine(self._actor)
                    await self._line.connect()
                epoch, sequence, messages = await self._line.ask(
                    "poll", self._client, self._epoch, acked, self._node
                )
                if epoch != self._epoch:
                    await self._actor.configure.remote(self._spec.without_code())
                    self._epoch, acked = epoch, 0
                    self._connected.set()
                    self._on_reset()
                elif sequence > acked:
                    acked = sequence
                    self._on_messages(messages)
            except asyncio.CancelledError:
                raise
            except (ray.exceptions.RayError, Disconnected) as error:
                logger.warning("scheduler unreachable (%s); trying again", type(error).__name__)
                again_s = 0.2
            except Exception:
                logger.exception("poll of the scheduler failed; trying again")
                again_s = 1.0
            else:
                continue
            # Events may be lost with it, even if it is the same scheduler afterwards: submit again.
            if self._line is not None:
                self._line.close()
            self._actor = self._line = self._epoch = None
            await asyncio.sleep(again_s)


class WorkerLink:
    """A worker's connection to the scheduler."""

    def __init__(self, spec: AppSpec, app_key: str) -> None:
        self._app_key = app_key
        self._embedded = spec.embedded
        self._target: Any = None
        self._line: SchedulerLine | None = None
        self._is_sure = False  # whether the target is the right one

    async def heartbeat(self, beat: Heartbeat) -> None:
        """Deliver a heartbeat.

        Raises:
            Exception: it did not arrive. The target is looked up again next time.
        """
        try:
            if not self._is_sure:
                if self._embedded:
                    app, _, frontend = self._app_key.partition("#")
                    self._target = serve.get_deployment_handle(frontend, app)
                else:
                    self._target = await asyncio.get_running_loop().run_in_executor(
                        None, find_actor, self._app_key
                    )
                    if self._line is not None:
                        self._line.close()
                    self._line = SchedulerLine(self._target)
                    await in_time(self._line.connect(), 5.0)
                self._is_sure = True
            call = self._target.slo_heartbeat if self._embedded else self._target.heartbeat
            await in_time(call.remote(beat), 5.0)
        except Exception:
            self._is_sure = False  # reports still go there, because it may only have been slow
            raise

    def report(self, report: BatchReport) -> None:
        """Report that a batch is over. A scheduler in a frontend gets the report with the
        results."""
        if self._line is not None:
            self._line.tell("report", report)
