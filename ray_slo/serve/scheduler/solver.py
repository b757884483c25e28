"""Solver for the problems of policies: tables and rehearsals, which take about a second. They are
solved one after the other, outside the scheduler's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, cast

from ray_slo.core.names import import_attr
from ray_slo.core.rehearsal import Rehearsal, Rehearsed
from ray_slo.serve.scheduler.host import PolicyHost
from ray_slo.serve.scheduler.watch import Watch

logger = logging.getLogger(__name__)

_SOLVER = "ray_slo.simulation.rehearsal:solve"
_PATIENCE_S = 60.0  # longest time of a rehearsal
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 300.0  # pause after a failed rehearsal; it doubles each time
_REST = 4.0  # pause as a multiple of a rehearsal's time, so that it uses a fifth of a core at most

Aside = Callable[[Callable[[Any], Any], Any], Awaitable[Any]]


class Solver:
    """Solves the problems that a policy asks for.

    A table that cannot be solved is not tried again. A rehearsal that fails or takes too long
    changes nothing, and another one follows later. After a rehearsal there is a pause of four times
    its length, because it uses a core that others may need. The solver is loaded when the first
    problem comes. That takes seconds of CPU time, which is not counted as the problem's, and which
    an application without load does not pay.

    Args:
        aside: function that runs a function of one argument outside this event loop. If possible,
            it stops the function when the answer is no longer needed. Default: in a thread.
        watch: object that gets rehearsals and changes of the setting.
    """

    def __init__(self, aside: Aside | None, watch: Watch) -> None:
        self._aside = aside or asyncio.to_thread
        self._watch = watch
        self._setting = ""
        self._solving: asyncio.Task[None] | None = None
        self._is_loaded = False
        self._unsolvable: set[Any] = set()
        self._not_before = -1.0
        self._failed_in_a_row = 0
        self._held = self._failed = 0  # numbers of successful and failed rehearsals
        self._took_s: float | None = None
        self._error: str | None = None

    def look(self, host: PolicyHost) -> None:
        """Begin to solve the first problem of the policy, if none is being solved."""
        if (in_force := getattr(host.policy, "in_force", None)) is not None:
            setting = in_force()["setting"]
            if setting != self._setting:
                before, self._setting = self._setting, setting
                self._watch.setting(before, setting)
        wanted = getattr(host.policy, "wanted", None)
        if wanted is None or (self._solving is not None and not self._solving.done()):
            return
        if monotonic() < self._not_before:
            return
        problem = next((p for p in wanted() if p not in self._unsolvable), None)
        if problem is None:
            return
        if not self._is_loaded:
            self._is_loaded = True
            self._solving = asyncio.create_task(self._load())
            return
        solve = self._rehearse if isinstance(problem, Rehearsal) else self._solve
        self._solving = asyncio.create_task(solve(host, problem))

    async def _load(self) -> None:
        """Import the solver in its process. If this fails, the first problem fails too."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._aside(import_attr, _SOLVER), _PATIENCE_S)

    async def _solve(self, host: PolicyHost, problem: Any) -> None:
        start = monotonic()
        try:
            table = await self._aside(import_attr(_SOLVER), problem)
        except Exception:
            logger.exception("could not be solved, and is not tried again: %r", problem)
            self._unsolvable.add(problem)
            return
        logger.info("solved in %.2f s: %r", monotonic() - start, problem)
        host.solved([table])

    async def _rehearse(self, host: PolicyHost, problem: Rehearsal) -> None:
        start = monotonic()
        answer: Rehearsed | None = None
        error = ""
        try:
            answer = await asyncio.wait_for(self._aside(import_attr(_SOLVER), problem), _PATIENCE_S)
        except TimeoutError:
            error = f"it was not over after {_PATIENCE_S:g} s"
        except Exception as raised:  # from any policy, or from the cluster
            # The last line of Ray's messages names the error.
            said = str(raised).strip().splitlines() or [""]
            error = said[-1] if len(said) > 1 else f"{type(raised).__name__}: {said[0]}"
        took_s = monotonic() - start
        self._watch.rehearsed(answer is not None, took_s)
        if answer is None:
            self._failed += 1
            self._error = error
            pause_s = min(_PAUSE_S * 2**self._failed_in_a_row, _LONGEST_PAUSE_S)
            self._failed_in_a_row += 1
            self._not_before = monotonic() + pause_s
            logger.warning(
                "%r failed, and changes nothing: %s. The next one is held in %.0f s or later",
                *(problem, error, pause_s),
            )
            return
        self._held += 1
        self._failed_in_a_row = 0
        self._not_before = monotonic() + _REST * took_s
        self._took_s, self._error = took_s, None
        for label, score in answer.scores.items():
            if score.error:
                logger.warning("%r: %s could not be tried: %s", problem, label, score.error)
        logger.info("held in %.2f s: %r", took_s, problem)
        host.solved([answer])

    def status(self, host: PolicyHost, now: float) -> dict[str, Any]:
        """Return the state for people: the current tables and the number of missing ones, or the
        current setting and the last rehearsals. It is empty for a policy without them.

        Args:
            now: time in seconds of the policy's clock.
        """
        return {**self._tables(host), **self._rehearsals(host, now)}

    def _tables(self, host: PolicyHost) -> dict[str, Any]:
        in_force = getattr(host.policy, "tables_in_force", None)
        if in_force is None:
            return {}
        wanted = cast(Any, host.policy).wanted()
        missing = sum(problem not in self._unsolvable for problem in wanted)
        failed = len(wanted) - missing
        return {"tables": in_force(), "tables_wanted": missing, "tables_failed": failed}

    def _rehearsals(self, host: PolicyHost, now: float) -> dict[str, Any]:
        in_force = getattr(host.policy, "in_force", None)
        if in_force is None:
            return {}
        now_in_force = in_force()
        return {
            "auto": {
                "setting": now_in_force["setting"],
                "why": now_in_force["why"],
                "for_s": now - now_in_force["since"],
                "held": self._held,
                "failed": self._failed,
                "took_s": self._took_s,
                "error": self._error,
                "rehearsals": [
                    {"ago_s": now - one["at"], **{k: v for k, v in one.items() if k != "at"}}
                    for one in cast(Any, host.policy).story()
                    if "tried" in one
                ],
            }
        }

    def close(self) -> None:
        if self._solving is not None:
            self._solving.cancel()
