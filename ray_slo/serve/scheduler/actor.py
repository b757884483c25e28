"""The scheduler as a named, detached actor: survives frontends, restarted by Ray when it dies,
leaves by itself when its application is gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from typing import Any

import ray

from ray_slo.record.writer import clock_id
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.memory import vitals
from ray_slo.serve.messages import BatchReport, Capacity, Event, Heartbeat, Message
from ray_slo.serve.ray_private.actors import Releases, application_is_gone, get_or_create, in_task
from ray_slo.serve.scheduler.scheduler import Scheduler
from ray_slo.serve.watch.metrics import SchedulerMetrics
from ray_slo.serve.watch.tracing import Decisions, name_of

logger = logging.getLogger(__name__)

_POLL_S = 5.0  # an idle long poll returns after this, so that a silent client is noticed
_CLIENT_GONE_S = 15.0
_WATCH_S = 2.0
_TICK_S = 0.25
# Ticks without a poll, after which a client is taken for gone. What it leaves unread is worth
# nothing any more, and may hold workers: a second. Counted, not timed: a scheduler that did not run
# itself has heard nothing, and blames nobody.
_UNREAD_TICKS = 4
_SILENT_TICKS = round(_CLIENT_GONE_S / _TICK_S)


class _Mailbox:
    """Messages for one client, kept until it acknowledges them. `epoch` names this acquaintance:
    a client that comes with another one has to submit everything again."""

    def __init__(self) -> None:
        self.epoch = uuid.uuid4().hex[:8]
        self.sequence = 0
        self.messages: list[tuple[int, Message]] = []
        self.ready = asyncio.Event()
        self.ticks = 0  # since its client last polled, or had nothing to read

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
        """Whether its client is taken for gone."""
        self.ticks += 1
        return self.ticks >= (_UNREAD_TICKS if self.messages else _SILENT_TICKS)


class SchedulerActor:
    """Ray's side of `Scheduler`: mailboxes, long polls, watch."""

    def __init__(self, spec: AppSpec, app_key: str) -> None:
        self._spec = spec
        self._releases = Releases(spec)
        self._app_key = app_key
        self._scheduler: Scheduler | None = None
        self._mailboxes: dict[str, _Mailbox] = {}
        self._decisions = Decisions(app_key, name_of(spec.policy.name))
        self._metrics = SchedulerMetrics(app_key)
        self._watcher: asyncio.Task[None] | None = None
        self._last_contact = 0.0

    def _start(self) -> Scheduler:
        # Not in __init__: there is no running event loop there.
        loop = asyncio.get_running_loop()
        self._last_contact = loop.time()
        if self._scheduler is None:
            self._scheduler = Scheduler(
                self._spec,
                self._deliver,
                aside=in_task,
                on_unclaimed=self._metrics.unclaimed,
            )
        if self._watcher is None:
            self._watcher = loop.create_task(self._watch())
        return self._scheduler

    async def configure(self, spec: AppSpec) -> None:
        """Take over a newer specification (a redeployed application)."""
        if self._releases.is_news(spec, self._spec):
            old_spec, self._spec = self._spec, spec
            if spec.fingerprint != old_spec.fingerprint:
                old, self._scheduler = self._scheduler, None
                if old is not None:
                    old.close()
                self._decisions = Decisions(self._app_key, name_of(spec.policy.name))
                for client in list(self._mailboxes):
                    self._withdraw(client)
        self._start()

    async def events(self, client: str, epoch: str, events: list[Event]) -> None:
        """A bunch of a client's events, in order. Events meant for an earlier self are void."""
        scheduler = self._start()
        box = self._mailboxes.get(client)
        if box is not None and box.epoch == epoch:
            for event in events:
                self._decisions.heard(client, event)
            scheduler.hear(client, events)

    async def poll(
        self, client: str, epoch: str | None, acked: int, node: str = ""
    ) -> tuple[str, int, list[Message]]:
        """Wait for messages; returns (epoch, sequence number, messages not yet acknowledged).

        Args:
            node: where the client is, by Ray's id.
        """
        scheduler = self._start()
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
            self._start()
            box.polled(acked)
        return box.epoch, box.sequence, [message for _, message in box.messages]

    async def goodbye(self, client: str) -> None:
        """A frontend leaves in good order."""
        self._withdraw(client)

    async def heartbeat(self, beat: Heartbeat) -> None:
        self._start().heartbeat(beat)

    async def report(self, report: BatchReport) -> None:
        self._start().report(report)

    async def capacity(self) -> dict[str, Capacity]:
        """See `Scheduler.capacity`."""
        return self._start().capacity

    async def status(self) -> dict[str, Any]:
        status = self._start().status()
        process = vitals(
            queued=sum(status["queued"].values()),
            in_flight=status["in_flight"],
            unsent=sum(len(box.messages) for box in self._mailboxes.values()),
        )
        return {**status, "scheduler_process": process}

    async def clock(self) -> tuple[str, float]:
        """Which clock its decision log's times are of, and what it shows."""
        return clock_id(), time.monotonic()

    def _deliver(self, client: str, messages: list[Message]) -> None:
        if (box := self._mailboxes.get(client)) is not None:
            box.put(messages)
        self._decisions.told(client, messages)

    def _withdraw(self, client: str) -> None:
        """Do without a client until it comes again, with all that it waits for."""
        box = self._mailboxes.pop(client, None)
        if box is None:
            return
        unread = [message for _, message in box.messages]
        box.messages = []
        box.ready.set()
        if self._scheduler is not None:
            self._scheduler.client_gone(client, unread)
        self._decisions.gone(client)

    def _tick(self) -> None:
        for client, box in list(self._mailboxes.items()):
            if box.tick():
                logger.warning(
                    "frontend %s is silent with %d messages unread; its requests are withdrawn",
                    client,
                    len(box.messages),
                )
                self._withdraw(client)

    async def _watch(self) -> None:
        for tick in itertools.count(1):
            await asyncio.sleep(_TICK_S)
            try:
                self._tick()
                if tick % round(_WATCH_S / _TICK_S) == 0 and await self._application_is_gone():
                    logger.info("application %s is gone; leaving", self._app_key)
                    self._decisions.flush()
                    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
            except Exception:
                logger.exception("watch failed; going on")

    async def _application_is_gone(self) -> bool:
        loop = asyncio.get_running_loop()
        silent_s = loop.time() - self._last_contact
        if silent_s <= (_CLIENT_GONE_S if self._mailboxes else _WATCH_S):
            return False
        return await loop.run_in_executor(None, application_is_gone, self._app_key)


def get_or_create_scheduler(spec: AppSpec, app_key: str) -> Any:
    """The application's scheduler actor; made if there is none. Blocks."""
    return get_or_create(SchedulerActor, app_key, spec, app_key)
