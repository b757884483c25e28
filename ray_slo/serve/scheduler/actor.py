"""The scheduler as a named, detached actor. It survives frontends, Ray restarts it when it dies,
and it ends by itself when its application is gone. There are two of them: see `lease`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import deque
from typing import Any

from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.direct import Listener
from ray_slo.serve.memory import vitals
from ray_slo.serve.messages import BatchReport, Capacity, Event, Heartbeat, Lead, Message
from ray_slo.serve.ray_private.actors import (
    AppActor,
    OtherProcess,
    bring_forward,
    get_or_create,
    this_node,
    usable_nodes,
)
from ray_slo.serve.scheduler.lease import Lease, candidate_name
from ray_slo.serve.scheduler.line import METHODS
from ray_slo.serve.scheduler.scheduler import Scheduler, new_policy
from ray_slo.serve.watch.log_writer import clock_id
from ray_slo.serve.watch.metrics import SchedulerMetrics
from ray_slo.serve.watch.tracing import Decisions, name_of

logger = logging.getLogger(__name__)

_POLL_S = 5.0  # an idle long poll returns after this time, so that a silent client is noticed
_CLIENT_GONE_S = 15.0
_ALONE_S = 2.0  # after this many seconds without clients and workers, the actor is alone
_TICK_S = 0.1
# A client counts as gone after this many ticks without a poll, because its unread grants hold
# workers. Ticks are counted, because the time also passes while the scheduler itself does not run,
# and then the missing polls are not the client's fault. A client that polls `_SLOW_S` later was
# only slow. It has to submit again, and gets twice as many ticks, at most `_MOST_TICKS`.
_UNREAD_TICKS, _MOST_TICKS, _SLOW_S = 3, 10, 5.0
_SILENT_TICKS = round(_CLIENT_GONE_S / _TICK_S)
# A scheduler serves if workers finish batches for it: in the last `_SERVED_S` seconds, and without
# a pause of `_PAUSE_S` for `_LONG_S`. What came while this process stood still (no tick for
# `_STOOD_S`) proves nothing, for `_STEADY_S`. It stays the leader for this reason at most `_STAYS`
# times in `_ONCE_S`.
_SERVED_S, _PAUSE_S, _LONG_S, _STOOD_S, _STEADY_S = 0.5, 2.0, 5.0, 0.4, 2.0
_STAYS, _ONCE_S = 8, 30.0
# A scheduler that had to give way does not lead again for so long. Otherwise the frontends that
# were cut off with it would choose it again, before their connections to the other one work.
_GIVES_WAY_S = 2.0


class _Mailbox:
    """Messages for one client. They are kept until the client acknowledges them. `epoch` is the id
    of this connection. A client with another one must submit everything again.

    Attributes:
        node: Ray's id of the client's node.
        patience: number of ticks after which the client counts as gone, if it has unread messages.
        told: the term that the client knows of. None: it must be told at once.
    """

    def __init__(self, node: str, told: int, patience: int = _UNREAD_TICKS) -> None:
        self.node, self.patience = node, patience
        self.told: int | None = told
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
        return self.ticks >= (self.patience if self.messages else _SILENT_TICKS)


class SchedulerActor(AppActor):
    """Connects a `Scheduler` to Ray: mailboxes and long polls. It has one only while it leads.

    Args:
        number: which of the application's two scheduler actors it is: see `lease`.
    """

    def __init__(self, spec: AppSpec, app_key: str, number: int = 0) -> None:
        super().__init__(spec, app_key, _TICK_S)
        bring_forward()
        self._scheduler: Scheduler | None = None
        self._lease = Lease(number)
        self._changed = asyncio.Event()  # set when the actor begins to lead
        self._aside = OtherProcess()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._silent: dict[str, tuple[float, int]] = {}  # clients taken for gone: when, patience
        self._decisions = Decisions(app_key, name_of(spec.policy.name))
        self._metrics = SchedulerMetrics(app_key)
        self._last_contact = self._ticked_at = time.monotonic()
        self._served_at = self._stood_at = self._gave_way_at = -math.inf
        self._serves_since = -math.inf
        self._stays: deque[float] = deque([-math.inf] * _STAYS, _STAYS)  # when it stayed the leader
        self._listener: asyncio.Task[Listener] | None = None
        with contextlib.suppress(Exception):  # imports, before the first request waits for them
            new_policy(spec)

    def _hear(self, highest: int = 0) -> None:
        """Note that a client or worker is there, and the highest term that it knows."""
        self._start()
        now = self._last_contact = time.monotonic()
        if not self._lease.heard(highest):
            return
        self._end_scheduler()
        if self._serves(now):
            self._stays.append(now)
            self._lease.renew()
            self._begin_scheduler()
            said = "a scheduler that was cut off led, with term %d; this one serves, and leads on"
            logger.warning(said, highest)
        else:
            self._gave_way_at = now
            logger.warning("another scheduler leads, with term %d; this one is its spare", highest)

    def _serves(self, now: float) -> bool:
        """Return whether workers serve for this scheduler now, as they have for a while. Then its
        frontends were never told that it is silent: the other one was cut off from them, and chosen
        by those on its side. Its connections may take as long again as it was away until they
        work."""
        ran = now - self._ticked_at < _STOOD_S and now - self._stood_at > _STEADY_S
        serves = now - self._served_at < _SERVED_S and now - self._serves_since > _LONG_S
        return ran and serves and now - self._stays[0] > _ONCE_S

    async def lead(self, client: str, highest: int) -> None:
        """Begin to lead, if the actor does not lead, and tell the client.

        Args:
            highest: the highest term that the client knows.
        """
        self._hear(highest)
        if time.monotonic() - self._gave_way_at < _GIVES_WAY_S:
            return  # the client asks again
        if self._lease.take(highest):
            logger.warning("this scheduler leads from now on, with term %d", self._lease.term)
            self._begin_scheduler()
        if (box := self._mailboxes.get(client)) is not None:
            box.told = None
            box.ready.set()

    def _begin_scheduler(self) -> None:
        self._scheduler = Scheduler(
            self._spec, self._deliver, aside=self._aside, watch=self._metrics
        )
        for client, box in self._mailboxes.items():
            self._scheduler.client_is_on(client, box.node)
            box.ready.set()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _end_scheduler(self) -> None:
        old, self._scheduler = self._scheduler, None
        if old is not None:
            old.close()
        for client in list(self._mailboxes):
            self._withdraw(client)

    def _begin_anew(self) -> None:
        self._end_scheduler()
        self._decisions = Decisions(self._app_key, name_of(self._spec.policy.name))
        if self._lease.term:
            self._lease.renew()
            self._begin_scheduler()

    @property
    def _lead(self) -> Lead:
        scheduler = self._scheduler
        return Lead() if scheduler is None else Lead(self._lease.term, scheduler.epoch)

    async def where(self) -> tuple[str, str]:
        """Return Ray's id of its node, and the address of its socket for `SchedulerLine`, which is
        empty if there is none."""
        if self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen())
        return this_node(), (await self._listener).address

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
        self._hear()
        box = self._mailboxes.get(client)
        if self._scheduler is not None and box is not None and box.epoch == epoch:
            for event in events:
                self._decisions.heard(client, event)
            self._scheduler.hear(client, events)

    async def poll(
        self, client: str, epoch: str | None, acked: int, node: str = "", highest: int = 0
    ) -> tuple[str, int, int, list[Message]]:
        """Wait for messages. Return the epoch, the actor's term, a sequence number, and the
        messages that are not acknowledged yet.

        Args:
            node: Ray's id of the client's node.
            highest: the highest term that the client knows.
        """
        self._hear(highest)
        box = self._mailboxes.get(client)
        if box is None or box.epoch != epoch:
            self._withdraw(client)
            patience = self._patience_with(client)
            box = self._mailboxes[client] = _Mailbox(node, self._lease.term, patience)
            if self._scheduler is not None:
                self._scheduler.client_is_on(client, node)
            return box.epoch, self._lease.term, 0, []
        box.polled(acked)
        if not box.messages and box.told == self._lease.term:
            box.ready.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(box.ready.wait(), _POLL_S)
            self._hear()
            box.polled(acked)
        box.told = self._lease.term
        return box.epoch, box.told, box.sequence, [message for _, message in box.messages]

    async def ping(self) -> None:
        """Answer, as a sign of life."""
        self._hear()

    async def goodbye(self, client: str) -> None:
        """Note that a frontend leaves in an orderly way."""
        self._withdraw(client)

    async def heartbeat(self, beat: Heartbeat) -> Lead:
        """Take a worker's heartbeat. Return whether the actor leads."""
        self._hear(beat.highest)
        if self._scheduler is not None and beat.leader == self._lead:
            self._scheduler.heartbeat(beat)
        return self._lead

    async def news(self, term: int) -> Lead:
        """Wait until the actor leads with a higher term than a worker knows. Return whether it
        leads."""
        self._hear(term)
        if self._lease.term <= term:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_S)
        return self._lead

    async def report(self, report: BatchReport) -> None:
        self._hear()
        if self._scheduler is not None:
            now = time.monotonic()
            if now - self._served_at > _PAUSE_S:
                self._serves_since = now
            self._served_at = now
            self._scheduler.report(report)

    async def capacity(self) -> dict[str, Capacity]:
        """See `Scheduler.capacity`. Empty if the actor does not lead."""
        self._hear()
        return {} if self._scheduler is None else self._scheduler.capacity

    async def status(self) -> dict[str, Any]:
        """Return the status of the scheduler, or only of the process if the actor does not lead."""
        self._hear()
        lead = {"term": self._lease.term, "node": this_node()}
        if self._scheduler is None:
            return {**lead, "scheduler_process": vitals(queued=0, in_flight=0, unsent=0)}
        status = self._scheduler.status()
        process = vitals(
            queued=sum(status["queued"].values()),
            in_flight=status["in_flight"],
            unsent=sum(len(box.messages) for box in self._mailboxes.values()),
        )
        return {**status, **lead, "scheduler_process": process}

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
        if now - self._ticked_at > _STOOD_S:
            self._stood_at = now
        self._ticked_at = now
        for client, box in list(self._mailboxes.items()):
            if box.tick():
                said = "frontend %s is silent with %d messages unread; its requests are withdrawn"
                logger.warning(said, client, len(box.messages))
                self._silent[client] = now, box.patience
                self._withdraw(client)
        self._silent = {c: s for c, s in self._silent.items() if now - s[0] < _SLOW_S}

    def _patience_with(self, client: str) -> int:
        """Return the ticks after which a client that connects counts as gone."""
        _, before = self._silent.pop(client, (0.0, 0))
        return min(2 * before, _MOST_TICKS) or _UNREAD_TICKS

    def _is_alone(self) -> bool:
        silent_s = time.monotonic() - self._last_contact
        return silent_s > (_CLIENT_GONE_S if self._mailboxes else _ALONE_S)

    def _leave(self) -> None:
        self._decisions.flush()


def get_or_create_scheduler(spec: AppSpec, app_key: str, number: int, apart_from: str = "") -> Any:
    """Return one of the application's two scheduler actors. It is made if there is none. This call
    blocks.

    Args:
        number: 0, or 1 for the spare.
        apart_from: Ray's id of the node where it should not be, if there is another one.
    """
    others = (node for node in usable_nodes() if node != apart_from) if apart_from else ()
    node = next(iter(others), apart_from or this_node())
    return get_or_create(
        SchedulerActor, candidate_name(app_key, number), spec, app_key, number, node=node
    )
