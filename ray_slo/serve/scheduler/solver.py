"""Some policies want tables or rehearsals, which take a second or so: one is solved after the
other, off the scheduler's event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from ray_slo.core.names import import_attr
from ray_slo.serve.scheduler.host import PolicyHost

logger = logging.getLogger(__name__)

_SOLVER = "ray_slo.simulation.rehearsal:solve"

Aside = Callable[[Callable[[Any], Any], Any], Awaitable[Any]]


class Solver:
    """Has what a policy wants solved.

    Args:
        aside: runs a function of one argument off this event loop; default: in a thread.
    """

    def __init__(self, aside: Aside | None) -> None:
        self._aside = aside or asyncio.to_thread
        self._solving: asyncio.Task[None] | None = None
        self._unsolvable: set[Any] = set()

    def look(self, host: PolicyHost) -> None:
        """Begin with what the policy wants first, if nothing is being solved."""
        wanted = getattr(host.policy, "wanted", None)
        if wanted is None or (self._solving is not None and not self._solving.done()):
            return
        problem = next((p for p in wanted() if p not in self._unsolvable), None)
        if problem is not None:
            self._solving = asyncio.create_task(self._solve(host, problem))

    async def _solve(self, host: PolicyHost, problem: Any) -> None:
        start = time.monotonic()
        try:
            table = await self._aside(import_attr(_SOLVER), problem)
        except Exception:
            logger.exception("could not be solved, and is not tried again: %r", problem)
            self._unsolvable.add(problem)
            return
        logger.info("solved in %.2f s: %r", time.monotonic() - start, problem)
        host.solved([table])

    def status(self, host: PolicyHost) -> dict[str, Any]:
        """For people: tables that decide now, and how many are missing; nothing for a policy that
        has none."""
        in_force = getattr(host.policy, "tables_in_force", None)
        if in_force is None:
            return {}
        wanted = cast(Any, host.policy).wanted()
        missing = sum(problem not in self._unsolvable for problem in wanted)
        failed = len(wanted) - missing
        return {"tables": in_force(), "tables_wanted": missing, "tables_failed": failed}

    def close(self) -> None:
        if self._solving is not None:
            self._solving.cancel()
