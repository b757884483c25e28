"""The scheduler as a named, detached actor. It survives frontends, Ray restarts it when it dies,
and it ends by itself when its application is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from typing import Any

from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.direct import Listener
from ray_slo.serve.memory import vitals
from ray_slo.serve.messages import BatchReport, Capacity, Event, Heartbeat, Message
from ray_slo.serve.ray_private.actors import AppActor, OtherProcess, get_or_create
from ray_slo.serve.scheduler.line import METHODS
from ray_slo.serve.scheduler.scheduler import Scheduler
from ray_slo.serve.watch.log_writer import clock_id
from ray_slo.serve.watch.metrics import SchedulerMetrics
from ray_slo.serve.watch.tracing import Decisions, name_of

logger = logging.getLogger(__name__)

_POLL_S = 5.0  # an idle long poll returns after this time, so that a silent client is noticed
_CLIENT_GONE_S = 15.0
_ALONE_S = 2.0  # after this many seconds without clients and workers, the actor is alone
_TICK_S = 0.25
# A client counts as gone after this many ticks (about a second) without a poll. Its unread messages
# are useless by then, and may block workers. Ticks are counted, because the time also passes while
# the scheduler itself does not run, and then the missing polls are not the client's fault.
_UNREAD_TICKS = 4
_SILENT_TICKS = round(_CLIENT_GONE_S / _TICK_S)


class _Mailbox:
    """Messages for one client. They are kept until the client acknowledges them. `epoch` is the id
    of this connection. A client with another one must submit everything again."""

    def __init__(self) -> None:
        self.epoch = uuid.uuid4().hex[:8]
        self.sequence = 0
        self.messages: list[tuple[int, Message]] = []
        self.ready = asyncio.Event()
        self.ticks = 0  # ticks since its client last polled, or had nothing to read

    def put(self, messages: list[Message]) -> None:
        if not self.messages:
            self.ticks = 0
        self.sequence += 1
        self.messages.extend((self.sequence, message) for message in messages)
        self.ready.set()

    def polled(self, acked: int) -> None:
        self.ticks = 0
        self.messages = [m for m in self.messages if m[0] > acked]

    def tick(self) -> bool:
        """Count a tick. Return whether the client counts as gone."""
        self.ticks += 1
        return self.ticks >= (_UNREAD_TICKS if self.messages else _SILENT_TICKS)


class SchedulerActor(AppActor):
    """Connects a `Scheduler` to Ray: mailboxes and long polls."""

    def __init__(self, spec: AppSpec, app_key: str) -> None:
        super().__init__(spec, app_key, _TICK_S)
        self._scheduler: Scheduler | None = None
        self._aside = OtherProcess()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._decisions = Decisions(app_key, name_of(spec.policy.name))
        self._metrics = SchedulerMetrics(app_key)
        self._last_contact = time.monotonic()
        self._listener: asyncio.Task[Listener] | None = None

    def _heard(self) -> Scheduler:
        self._start()
        self._last_contact = time.monotonic()
        if self._scheduler is None:
            self._scheduler = Scheduler(
                self._spec,
                self._deliver,
                aside=self._aside,
                watch=self._metrics,
            )
        return self._scheduler

    def _begin_anew(self) -> None:
        old, self._scheduler = self._scheduler, None
        if old is not None:
            old.close()
        self._decisions = Decisions(self._app_key, name_of(self._spec.policy.name))
        for client in list(self._mailboxes):
            self._withdraw(client)

    async def address(self) -> str:
        """Address of its socket, for `SchedulerLine`; empty if there is none."""
        if self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen())
        return (await self._listener).address

    async def _listen(self) -> Listener:
        listener = Listener(self._answer)
        await listener.begin()
        return listener

    async def _answer(self, asked: tuple[Any, ...]) -> Any:
        """Answer a call that came over the socket."""
        method, *args = asked
        if method not in METHODS:
            raise ValueError(f"{method!r} cannot be called over a socket")
        return await getattr(self, method)(*args)

    def close(self) -> None:
        super().close()
        if self._listener is not None and self._listener.done():
            self._listener.result().close()

    async def events(self, client: str, epoch: str, events: list[Event]) -> None:
        """Take a client's events, in order. Those for an earlier life of this actor are ignored."""
        scheduler = self._heard()
        box = self._mailboxes.get(client)
        if box is not None and box.epoch == epoch:
            for event in events:
                self._decisions.heard(client, event)
            scheduler.hear(client, events)

    async def poll(
        self, client: str, epoch: str | None, acked: int, node: str = ""
    ) -> tuple[str, int, list[Message]]:
        """Wait for messages. Return the epoch, a sequence number, and the messages that are not
        acknowledged yet.

        Args:
            node: Ray's id of the client's node.
        """
        scheduler = self._heard()
        box = self._mailboxes.get(client)
        if box is None or box.epoch != epoch:
            self._withdraw(client)
            scheduler.client_is_on(client, node)
            box = self._mailboxes[client] = _Mailbox()
            return box.epoch, 0, []
        box.polled(acked)
        if not box.messages:
            box.ready.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(box.ready.wait(), _POLL_S)
            self._heard()
            box.polled(acked)
        return box.epoch, box.sequence, [message for _, message in box.messages]

    async def goodbye(self, client: str) -> None:
        """Note that a frontend leaves in an orderly way."""
        self._withdraw(client)

    async def heartbeat(self, beat: Heartbeat) -> None:
        self._heard().heartbeat(beat)

    async def report(self, report: BatchReport) -> None:
        self._heard().report(report)

    async def capacity(self) -> dict[str, Capacity]:
        """See `Scheduler.capacity`."""
        return self._heard().capacity

    async def status(self) -> dict[str, Any]:
        status = self._heard().status()
        process = vitals(
            queued=sum(status["queued"].values()),
            in_flight=status["in_flight"],
            unsent=sum(len(box.messages) for box in self._mailboxes.values()),
        )
        return {**status, "scheduler_process": process}

    async def clock(self) -> tuple[str, float]:
        """Return the name and the reading of the clock of the decision log."""
        return clock_id(), time.monotonic()

    def _deliver(self, client: str, messages: list[Message]) -> None:
        if (box := self._mailboxes.get(client)) is not None:
            box.put(messages)
        self._decisions.told(client, messages)

    def _withdraw(self, client: str) -> None:
        """Forget a client and its requests, until it polls again."""
        box = self._mailboxes.pop(client, None)
        if box is None:
            return
        unread = [message for _, message in box.messages]
        box.messages = []
        box.ready.set()
        if self._scheduler is not None:
            self._scheduler.client_gone(client, unread)
        self._decisions.gone(client)

    def _step(self, now: float) -> None:
        for client, box in list(self._mailboxes.items()):
            if box.tick():
                logger.warning(
                    "frontend %s is silent with %d messages unread; its requests are withdrawn",
                    client,
                    len(box.messages),
                )
                self._withdraw(client)

    def _is_alone(self) -> bool:
        silent_s = time.monotonic() - self._last_contact
        return silent_s > (_CLIENT_GONE_S if self._mailboxes else _ALONE_S)

    def _leave(self) -> None:
        self._decisions.flush()


def get_or_create_scheduler(spec: AppSpec, app_key: str) -> Any:
    """Return the application's scheduler actor. It is made if there is none. This call blocks."""
    return get_or_create(SchedulerActor, app_key, spec, app_key)
