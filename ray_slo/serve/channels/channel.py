"""A frontend's connection to the scheduler.

`EmbeddedChannel`: the scheduler is an object in the only frontend. There are no messages, and the
workers' reports come with their results. `ActorChannel`: the scheduler is one of two named actors.
All submissions of an event-loop turn go in one message, and grants come back through a long poll.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import Context
from operator import attrgetter
from typing import Any

from ray_slo.core.seldom import Seldom
from ray_slo.serve.channels.candidate import Candidate, Silence
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
    Submit,
    Unreachable,
    Withdrawn,
)
from ray_slo.serve.ray_private.actors import OtherProcess, this_node
from ray_slo.serve.scheduler.lease import CANDIDATES
from ray_slo.serve.scheduler.scheduler import Scheduler
from ray_slo.serve.watch.log_writer import clock_id
from ray_slo.serve.watch.metrics import SchedulerMetrics

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

# Seconds until the next candidate is asked to lead: at first, and at most.
_ASK_AGAIN_S, _LONGEST_S = 0.2, 2.0
_LOOK_S = 0.05  # until one is connected
_NEWS_S = 0.1  # when the leader does not lead any more, another one may do so, and say it soon


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
    """A channel to the one of two scheduler actors that leads: see `lease`. Ray restarts an actor
    when it dies.

    Args:
        on_messages: called with grants and refusals.
        on_reset: called when another scheduler leads, which knows nothing. The caller must submit
            again all requests that were not granted.
    """

    def __init__(
        self,
        spec: AppSpec,
        app_key: str,
        client: str,
        on_messages: Callable[[list[Message]], None],
        on_reset: Callable[[], None],
    ) -> None:
        self._on_messages = on_messages
        self._on_reset = on_reset
        self._loop = asyncio.get_running_loop()
        self._term = 0
        self._leader: Candidate | None = None
        self._silence = Silence(self._waits, self._leader_is_silent)
        self._connected = asyncio.Event()
        self._events: list[Event] = []
        self._waiting: set[int] = set()  # requests that are neither granted nor refused
        self._candidates = [
            Candidate(spec, app_key, client, number, self) for number in range(CANDIDATES)
        ]
        self._election: asyncio.Task[None] | None = None

    @property
    def term(self) -> int:
        """The highest term that the frontend knows."""
        return self._term

    def other_than(self, candidate: Candidate) -> Candidate:
        """Return the other candidate."""
        return next((c for c in self._candidates if c is not candidate), candidate)

    def is_spare(self, candidate: Candidate) -> bool:
        """Return whether the other candidate leads."""
        return self._leader is self.other_than(candidate)

    async def join(self, beat: Heartbeat) -> None:
        """Wait until the scheduler is there; workers find it and register themselves."""
        await self._connected.wait()

    async def capacity(self) -> dict[str, Capacity]:
        if self._leader is None:
            return {}
        capacity: dict[str, Capacity] = await self._leader.actor.capacity.remote()
        return capacity

    async def clocks(self) -> dict[str, float]:
        return {} if self._leader is None else dict([await self._leader.actor.clock.remote()])

    async def status(self) -> dict[str, Any]:
        told = {
            "scheduler": "actor",
            "schedulers": [c.status(leads=c is self._leader) for c in self._candidates],
        }
        if self._leader is None:
            return {**told, "state": "starting"}
        return {**told, **await self._leader.actor.status.remote()}

    def close(self) -> None:
        self._silence.close()
        if self._election is not None:
            self._election.cancel()
        for candidate in self._candidates:
            candidate.close()

    def submit(self, request: Submit) -> None:
        self._waiting.add(request.request_id)
        self._silence.watch()
        self._say(request)

    def cancel(self, request_id: int) -> None:
        self._waiting.discard(request_id)
        self._say(Cancel(request_id))

    def _say(self, event: Event) -> None:
        if not self._events:
            # Use an empty context. For Ray, a call is a child of the request in whose context it is
            # made. Ray would cancel it with that request, and lose the other requests' events.
            self._loop.call_soon(self._flush, context=Context())
        self._events.append(event)

    def _flush(self) -> None:
        # Without a leader, they wait: the last one may lead again, and then has all the others.
        if self._leader is not None and self._events:
            events, self._events = self._events, []
            # The answer is not awaited: if the actor died, the poll fails and everything is
            # submitted again.
            self._leader.tell("events", events)

    # -- who leads -------------------------------------------------------------------------

    def polled(
        self, candidate: Candidate, term: int, messages: list[Message], *, is_new: bool
    ) -> None:
        """Take a candidate's answer.

        Args:
            term: the candidate's term.
            is_new: whether the candidate knows nothing of this frontend.
        """
        if term and term >= self._term:
            self._hear(messages)
            if term > self._term or is_new:
                self._events = []
                self._waiting.clear()
                self._term, self._leader = term, candidate
                self._connected.set()
                self._on_reset()
            elif self._leader is not candidate:
                self._leader = candidate
            if self._events:
                self._flush()
        elif self._leader is candidate or self._leader is None:
            self._leader = None
            self._elect(_NEWS_S)

    def _hear(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Grant | Refusal):
                self._waiting.difference_update(message.request_ids)
        if messages:
            self._on_messages(messages)

    def lost(self, candidate: Candidate) -> None:
        """Note that a candidate cannot be reached."""
        if self._leader is candidate:
            self._leader = None
            self._elect()

    def answers_again(self) -> None:
        """Note that a candidate that was called silent has answered."""
        self._silence.was_wrong()

    def _waits(self) -> Candidate | None:
        """Return the leader if requests wait for it."""
        return self._leader if self._waiting else None

    def _leader_is_silent(self, leader: Candidate) -> None:
        logger.warning("the scheduler on node %s is silent; another one is asked", leader.node)
        self.lost(leader)

    def _elect(self, after_s: float = 0.0) -> None:
        if self._election is None or self._election.done():
            self._election = self._loop.create_task(self._ask_to_lead(after_s))

    async def _ask_to_lead(self, after_s: float) -> None:
        """Ask the candidates in turn, until one leads. One that was silent is asked last."""
        await asyncio.sleep(after_s)
        asked = 0
        while self._leader is None:
            ready = sorted(
                (c for c in self._candidates if c.is_connected), key=attrgetter("is_silent")
            )
            if ready:
                ready[asked % len(ready)].tell("lead", self._term)
                asked += 1
            await asyncio.sleep(min(_ASK_AGAIN_S * asked, _LONGEST_S) or _LOOK_S)
