"""The actor that plans an application: the number of workers, their variants, models and groups.

Workers and frontends ask for their orders by long polls, and report what they have done. The actor
calls no other process. A *brain* (pure code: `ray_slo.planning.brains`) turns the reports into a
problem. A Ray task solves it every `interval_s`, or earlier after an important change. The brain
turns the plan into orders. Serve's autoscaler asks for the number of workers (`autoscaling`).

If anything fails (the solver, the Ray task, this actor), the last plan stays. A new actor continues
from the reports of workers and frontends, and plans after it has listened for a while. The actor is
named and detached, and ends with its application.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from ray_slo.planning.brains.brain import FrontendHears, FrontendSays, Wanted, WorkerSays
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.planner.planning import Aside, Pace, Planning, orders
from ray_slo.serve.ray_private.actors import AppActor, in_task, this_node

logger = logging.getLogger(__name__)


class Planner(AppActor):
    """Takes reports, plans, and gives orders, for one application.

    Attributes:
        planning: the planning of the newest release.
        aside: function that runs a function of one argument in another process.
    """

    def __init__(
        self, spec: AppSpec, app_key: str, aside: Aside = in_task, pace: Pace = Pace()
    ) -> None:
        super().__init__(spec, app_key, pace.step_s)
        self._pace = pace
        self.aside = aside
        self._plan_anew()

    def _plan_anew(self) -> None:
        self._epoch = uuid.uuid4().hex[:8]
        aside: Aside = lambda function, argument: self.aside(function, argument)  # noqa: E731
        self.planning = Planning(self._spec, self._epoch, aside, self._pace)

    def _begin_anew(self) -> None:
        self.planning.close()
        self._plan_anew()

    def _go_on(self) -> None:
        self.planning.configure(self._spec)

    def _step(self, now: float) -> None:
        self.planning.step(now)

    def _is_alone(self) -> bool:
        return self.planning.heard.is_alone

    def _leave(self) -> None:
        self.planning.close(1.0)

    def close(self) -> None:
        super().close()
        self.planning.close()

    async def worker(self, says: WorkerSays, had: str | None) -> tuple[str | None, Wanted | None]:
        """Answer a worker's long poll. Return as soon as its orders differ from those it `had`, or
        after `poll_s`. None: nothing changed."""
        self._start()
        if says.version != self._spec.fingerprint:  # from an older release that is still draining
            await asyncio.sleep(self._pace.poll_s)
            return None, None
        planning = self.planning
        planning.worker_says(says)
        until = time.monotonic() + self._pace.poll_s
        while True:
            found = planning.wanted.get(says.worker)
            token = f"{self._epoch} {orders(found)}" if found is not None else None
            if (found is not None and token != had) or time.monotonic() >= until:
                return token, found
            await planning.news(until)

    async def leave(self, worker: str) -> None:
        """Note that a worker is leaving."""
        if self.planning.heard.left(worker):
            self.planning.refresh()

    async def frontend(self, says: FrontendSays) -> FrontendHears | None:
        """Answer a frontend's long poll. Return as soon as there are new routes, or after
        `report_s`. None for a frontend of an older release."""
        self._start()
        if says.version != self._spec.fingerprint:
            await asyncio.sleep(self._pace.report_s)
            return None
        planning = self.planning
        planning.frontend_says(says)
        until = time.monotonic() + self._pace.report_s
        while says.applied == (self._epoch, planning.number) and time.monotonic() < until:
            await planning.news(until)
        return planning.answer(says.client)

    async def target(self, kind: str, most: int) -> int | None:
        """Return the wanted number of workers of a kind, or None for no change.

        Args:
            most: the largest number that Serve starts.
        """
        self._start()
        self.planning.brain.limit(kind, most)
        return self.planning.brain.target(kind)

    async def move(self, model: str, group: str) -> None:
        """See `Planning.move`."""
        self._start()
        self.planning.move(model, group)

    async def replan(self, says: FrontendSays | None = None) -> None:
        """See `Planning.replan`."""
        self._start()
        await self.planning.replan(says)

    async def dry_run(self) -> dict[str, Any]:
        """See `Planning.dry_run`."""
        self._start()
        return await self.planning.dry_run()

    async def status(self) -> dict[str, Any]:
        """Return the part of `ray-slo status` about the plan."""
        self._start()
        return {**self.planning.status(), "node": this_node()}
