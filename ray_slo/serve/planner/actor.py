"""The actor that plans an application: which variants and models its workers serve in which group,
and how many workers there are.

Workers and frontends ask, by long polls, what they should do, and say what they have done; nobody
is called from here. A *brain* (pure: `ray_slo.planning.brains`) makes a problem of what was heard,
which is solved as a Ray task every `interval_s`, or sooner when something that matters has changed,
and makes of the plan what workers and frontends are told. Serve's autoscaler asks for the number of
workers (`autoscaling`).

Whatever fails (the solver, the Ray task, this actor) leaves the last plan in force. A new actor
goes on from what workers and frontends say, and plans when it has listened for a while. The actor
is named and detached, and leaves when its application is gone.
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
from ray_slo.serve.ray_private.actors import AppActor, in_task

logger = logging.getLogger(__name__)


class Planner(AppActor):
    """Hears, plans and tells, for one application.

    Attributes:
        planning: of the newest release.
        aside: runs a function of one argument elsewhere.
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
        """A worker's long poll: returns as soon as its orders differ from those it `had`, or after
        `poll_s`. None: it carries on."""
        self._start()
        if says.version != self._spec.fingerprint:  # of an older release, still draining
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
        """A worker is going."""
        if self.planning.heard.left(worker):
            self.planning.refresh()

    async def frontend(self, says: FrontendSays) -> FrontendHears | None:
        """A frontend's long poll: returns as soon as there are routes that it does not go by, or
        after `report_s`. None for a frontend of an older release."""
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
        """How many workers of a kind there should be; None: as many as there are.

        Args:
            most: Serve starts no more.
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
        """What `ray-slo status` shows of the plan."""
        self._start()
        return self.planning.status()
