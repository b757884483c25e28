"""A worker's connection to the scheduler: to the only frontend, or to both scheduler actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray import serve

from ray_slo.serve import user_code
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.messages import BatchReport, Heartbeat, Lead, epoch_of
from ray_slo.serve.ray_private.actors import find_actor, in_time
from ray_slo.serve.scheduler.lease import CANDIDATES, candidate_name
from ray_slo.serve.scheduler.line import SchedulerLine

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0  # longest wait for an answer to a heartbeat
_NEWS_S = 10.0  # the same for an answer to a long poll
_AGAIN_S = 1.0  # time between two attempts to poll


class WorkerLink:
    """A worker's connection to the scheduler.

    Args:
        app_key: name of the application's scheduler, or of that of its group.
        on_lead: called with a scheduler that leads, again and again.
    """

    def __init__(
        self, spec: AppSpec, app_key: str, on_lead: Callable[[WorkerLink, Lead], None]
    ) -> None:
        self._app_key = app_key
        self._on_lead = on_lead
        self._frontend: Any = None  # handle of the only frontend, if the scheduler is there
        names = [candidate_name(app_key, n) for n in range(0 if spec.embedded else CANDIDATES)]
        self._candidates = [_Candidate(name, self._heard) for name in names]

    async def heartbeat(self, beat: Heartbeat) -> None:
        """Deliver a heartbeat. Return when it has arrived at one scheduler. One that does not
        answer gets it later, or not at all.

        Raises:
            Exception: it did not arrive anywhere.
        """
        if not self._candidates:
            if self._frontend is None:  # not before: a worker may be up before Serve knows it
                app, _, frontend = self._app_key.partition("#")
                self._frontend = serve.get_deployment_handle(frontend, app)
            await in_time(self._frontend.slo_heartbeat.remote(beat), _ANSWER_S)
            return
        left = {asyncio.ensure_future(c.heartbeat(beat)) for c in self._candidates}
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            errors = [call.exception() for call in done]
            if None in errors:
                for call in left:
                    call.add_done_callback(user_code.heard)
                return
        raise errors[0] or ConnectionError("no scheduler")

    def report(self, report: BatchReport) -> None:
        """Report that a batch is over. A scheduler in a frontend gets the report with the
        results."""
        for candidate in self._candidates:
            if candidate.lead.epoch == epoch_of(report.batch_id):
                candidate.report(report)

    def close(self) -> None:
        """Send and receive nothing more."""
        for candidate in self._candidates:
            candidate.close()

    def _heard(self, lead: Lead) -> None:
        if lead.term:
            self._on_lead(self, lead)


class _Candidate:
    """One of the two scheduler actors, as a worker sees it.

    Attributes:
        lead: what it said last.
    """

    def __init__(self, name: str, on_lead: Callable[[Lead], None]) -> None:
        self._name = name
        self._on_lead = on_lead
        self._actor: Any = None
        self._line: SchedulerLine | None = None
        self._is_sure = False  # whether the actor is the right one
        self.lead = Lead()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def heartbeat(self, beat: Heartbeat) -> None:
        try:
            if not self._is_sure:
                await in_time(self._find(), _ANSWER_S)
            self._heard(await in_time(self._actor.heartbeat.remote(beat), _ANSWER_S))
        except Exception:
            self._is_sure = False  # reports still go there, because it may only have been slow
            raise

    def report(self, report: BatchReport) -> None:
        if self._line is not None:
            self._line.tell("report", report)

    def close(self) -> None:
        self._watching.cancel()
        if self._line is not None:
            self._line.close()

    async def _find(self) -> None:
        actor = await asyncio.get_running_loop().run_in_executor(None, find_actor, self._name)
        if self._line is not None:
            self._line.close()
        self._actor, self._line = actor, SchedulerLine(actor)
        await self._line.connect()
        self._is_sure = True

    def _heard(self, lead: Lead) -> None:
        self.lead = lead
        self._on_lead(lead)

    async def _watch(self) -> None:
        """Wait for news of who leads. A heartbeat would bring them a second later."""
        while True:
            if self._is_sure:
                with suppress(Exception):  # the next heartbeat finds it again
                    news = self._actor.news.remote(self.lead.term)
                    self._heard(await in_time(news, _NEWS_S))
                    continue
            await asyncio.sleep(_AGAIN_S)
