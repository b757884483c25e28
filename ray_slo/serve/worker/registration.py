"""Tells the scheduler what a worker can do, and which scheduler the worker obeys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from ray_slo.serve.channels.worker_link import WorkerLink
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.messages import BatchReport, Heartbeat, Lead

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0


class Registration:
    """A worker's registration with the scheduler of its group.

    Args:
        describe: function that returns a heartbeat with what the worker can do now.
        refuse: function that refuses later batches of a scheduler, and returns the ends of those
            that are here: see `Batches.refuse`.

    Attributes:
        announced: variants of the worker that the scheduler knows.
    """

    def __init__(
        self,
        spec: AppSpec,
        describe: Callable[[], Heartbeat],
        refuse: Callable[[str], list[asyncio.Future[None]]],
    ) -> None:
        self._spec = spec
        self._describe = describe
        self._refuse = refuse
        self._link: WorkerLink | None = None
        self._telling = asyncio.Lock()  # otherwise an older heartbeat might arrive last
        self._news = asyncio.Event()  # the scheduler should learn it before the next heartbeat
        self._obeyed = Lead()  # the scheduler that may use this worker
        self._highest = 0  # the highest term of a scheduler
        self.announced: frozenset[str] = frozenset()

    def begin(self, app_key: str) -> None:
        """Register with the application's scheduler."""
        self._link = WorkerLink(self._spec, app_key, self._heard)

    async def join(self, app_key: str) -> None:
        """Leave the scheduler of this group, and register with that of another one.

        Args:
            app_key: name of the other group's scheduler.
        """
        async with self._telling:
            old, self._link = self._link, WorkerLink(self._spec, app_key, self._heard)
            self.announced = frozenset()
            if old is not None:
                await self._take_leave(old)
                old.close()
            self._obeyed, self._highest = Lead(), 0
        await self.announce()

    def news(self) -> None:
        """Send the next heartbeat at once."""
        self._news.set()

    def report(self, report: BatchReport) -> None:
        """Report that a batch is over."""
        if self._link is not None:
            self._link.report(report)

    async def beat(self) -> None:
        """Send heartbeats forever."""
        while True:
            try:
                await self.tell()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._news.wait(), _HEARTBEAT_S)
                self._news.clear()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # The scheduler is starting, restarting or gone; Serve decides when this worker
                # ends.
                logger.debug("heartbeat failed: %r", error)
                await asyncio.sleep(0.2)

    async def announce(self) -> None:
        """Send a heartbeat now. If it does not arrive, the next one will."""
        try:
            await self.tell()
        except Exception as error:
            logger.info("heartbeat failed: %r", error)

    async def tell(self) -> None:
        """Send a heartbeat now, if the scheduler has, or needs, one.

        Raises:
            Exception: it did not arrive.
        """
        async with self._telling:
            link, offered = self._link, frozenset(self._describe().profiles)
            if link is None or not (offered or self.announced):
                return  # there is no scheduler, or no news
            obeyed = None
            while obeyed != self._obeyed:  # the answer to the first one says who leads
                obeyed = self._obeyed
                await link.heartbeat(self._signed(self._describe()))
            self.announced = offered

    async def leave(self) -> None:
        """Ask the scheduler for no more grants."""
        async with self._telling:
            if self._link is not None:
                await self._take_leave(self._link)

    def close(self) -> None:
        """Send and receive nothing more."""
        if self._link is not None:
            self._link.close()

    async def _take_leave(self, link: WorkerLink) -> None:
        """Tell a scheduler that this worker serves nothing any more; needs `_telling`."""
        try:
            beat = replace(self._describe(), profiles={}, batches=[])
            await link.heartbeat(self._signed(beat))
        except Exception as error:  # it will notice the missing heartbeats
            logger.info("could not tell the old scheduler that this worker has left: %r", error)

    def _signed(self, beat: Heartbeat) -> Heartbeat:
        return replace(beat, leader=self._obeyed, highest=self._highest)

    def _heard(self, link: WorkerLink, lead: Lead) -> None:
        """Obey a scheduler with a higher term, when the batches of the one before are over. That
        one is not obeyed any more: see `scheduler.lease`."""
        if link is not self._link or lead.term <= self._highest:
            return
        self._highest = lead.term
        if rest := self._refuse(self._obeyed.epoch):
            asyncio.gather(*rest).add_done_callback(lambda _: self._obey(link, lead))
        else:
            self._obey(link, lead)

    def _obey(self, link: WorkerLink, lead: Lead) -> None:
        if link is self._link and lead.term == self._highest:
            self._obeyed = lead
            self.news()
