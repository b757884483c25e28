"""Decides when to plan an application, puts plans into effect, and logs them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_slo.core.policy import Expected
from ray_slo.planning.brains.asking import Asking, Question
from ray_slo.planning.brains.brain import (
    FIRST,
    RESTARTED,
    FrontendHears,
    FrontendSays,
    NotYet,
    Plans,
    Verdict,
    Wanted,
    WorkerSays,
)
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.errors import ConfigError, UnknownModel
from ray_slo.serve.planner import told
from ray_slo.serve.planner.heard import Heard
from ray_slo.serve.planner.plugin import make_brain, planner_of, planners_of_workers
from ray_slo.serve.watch.logs import open_plan_log

logger = logging.getLogger(__name__)

Aside = Callable[[Callable[[Any], Any], Any], Awaitable[Any]]


@dataclass(frozen=True)
class Pace:
    """Intervals, in seconds.

    Attributes:
        step_s: between two checks of what is due.
        poll_s: longest time of a worker's long poll, so that workers that are gone are noticed.
        report_s: longest time of a frontend's long poll. So frontends report twice a second.
        gone_s: workers and frontends count as dead after this silence.
        gap_s: least time between plans.
        remind_s: time between two messages with profiles to frontends.
        avoid_s: time until a variant that could not be loaded is tried again.
    """

    step_s: float = 0.2
    poll_s: float = 2.0
    report_s: float = 0.5
    gone_s: float = 10.0
    gap_s: float = 1.0
    remind_s: float = 20.0
    avoid_s: float = 60.0


class Planning:
    """Plans one release of an application, and gives orders to workers and frontends.

    Attributes:
        brain: makes the decisions.
        asking: asks the brain for plans.
        heard: reports of workers and frontends.
        wanted: orders for each worker.
        planned_at: when the current plan was made; None before there is one.
        plans: number of plans that were made.

    Args:
        epoch: id of this planner.
        aside: runs a function of one argument in another process.
    """

    def __init__(self, spec: AppSpec, epoch: str, aside: Aside, pace: Pace) -> None:
        self._spec = spec
        self._epoch = epoch
        self._aside = aside
        self._pace = pace
        self.brain = make_brain(spec)
        self._started = time.monotonic()
        self.heard = Heard(self._started, pace.gone_s, pace.avoid_s)
        self.log = open_plan_log(spec, epoch)
        log = None if self.log is None else self.log.planned
        self.asking = Asking(self.brain, spec.workers, _interval_s(spec), log, pace.gap_s)
        self.wanted: dict[str, Wanted] = {}
        self.planned_at: float | None = None
        self.plans = Plans(epoch)
        self._running: asyncio.Task[None] | None = None
        self._why = "not planned yet"
        self._changed = asyncio.Event()

    def configure(self, spec: AppSpec) -> None:
        """Take over a specification that differs only in ways that do not matter to replicas."""
        self._spec = spec
        self.brain.configure(planner_of(spec).setting(spec))
        self.asking.interval_s = _interval_s(spec)

    def close(self, wait_s: float = 0.0) -> None:
        """Stop, wake all long polls, and wait for the log at most `wait_s`."""
        if self._running is not None:
            self._running.cancel()
        if self.log is not None:
            self.log.close(wait_s)
        self._tell()

    # -- reports and orders ----------------------------------------------------------------

    def worker_says(self, says: WorkerSays) -> None:
        """Take a worker's report."""
        if self.heard.worker(says, time.monotonic(), planned=self.planned_at is not None):
            self.refresh()

    def frontend_says(self, says: FrontendSays) -> None:
        """Take a frontend's report."""
        now = time.monotonic()
        if self.log is not None:
            for clock, reading in says.clocks.items():
                self.log.clocks.heard(clock, reading, now)
        epoch, number = says.applied
        if epoch != self._epoch:  # this planner is new, but the frontend may be old
            number = -1
        counted = self.heard.frontend(says._replace(applied=(self._epoch, number)), now)
        if counted is not None:
            self.brain.counted(now, *counted)
        if self.brain.tune(says.tuned):
            logger.info("arguments of the planner: %s", dict(says.tuned))

    def answer(self, client: str) -> FrontendHears:
        """Return the answer to a frontend's report."""
        now = time.monotonic()
        age_s = None if self.planned_at is None else now - self.planned_at
        error = self.asking.error
        why = self.heard.load_errors.values() if error else ()
        hears = FrontendHears(
            age_s,
            self.replicas(),
            None,
            self.plans,
            "; ".join(filter(None, [error, *dict.fromkeys(why)])) or None,
            self._epoch,
            *(self.brain.routing, self.brain.start_s, _predicted(self._spec, self.brain.expected)),
        )
        known = self.heard.frontends.get(client)
        if known is None or age_s is None or now - known.told_at < self._pace.remind_s:
            return hears
        known.told_at = now
        return hears._replace(profiles=dict(self.heard.profiles))

    @property
    def number(self) -> int:
        """Number of the last answer to frontends."""
        return 0 if (routing := self.brain.routing) is None else routing.number

    def replicas(self) -> dict[str, tuple[int | None, int]]:
        """Workers wanted and running, by kind."""
        running = self.heard.running(self._spec.workers)
        return {kind: (self.brain.target(kind), n) for kind, n in running.items()}

    def refresh(self) -> None:
        """Compute the orders of workers and frontends, and send them if they changed."""
        before = self.number, {w: orders(v) for w, v in self.wanted.items()}
        hopeless = self.planned_at is None and self.asking.error is not None
        seen = self.heard.seen()
        self.wanted = {
            worker: w
            # A worker that takes over a model from another group measures it first, and is then
            # warm.
            if w.group is not None
            else w._replace(**self.heard.known(seen.workers[worker].kind, w.keep))
            for worker, w in self.brain.wanted(time.monotonic(), seen, hopeless).items()
        }
        if before != (self.number, {w: orders(v) for w, v in self.wanted.items()}):
            self._tell()

    def _tell(self) -> None:
        """Wake all long polls."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self, until: float) -> None:
        """Wait for the next `_tell`, at most until this time (`time.monotonic()` seconds)."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(until - time.monotonic(), 0.0))

    # -- calls by people -------------------------------------------------------------------

    def move(self, model: str, group: str) -> None:
        """Serve a model in another group from now on, until a planner decides otherwise.

        Raises:
            UnknownModel: there is no such model.
            ConfigError: there is no such group, there are no groups, or they have no layout yet.
        """
        try:
            why = self.brain.move(model, group)
        except LookupError:
            raise UnknownModel(model=model, valid=self._spec.models) from None
        except (NotYet, ValueError) as error:
            raise ConfigError(str(error)) from None
        if self._running is not None:
            self._running.cancel()  # it does not know of the move
        self._go_by(time.monotonic(), why, "moved by hand")

    async def replan(self, says: FrontendSays | None = None) -> None:
        """Plan now, and return when that is done.

        Args:
            says: the next report of the frontend that asks.

        Raises:
            ConfigError: there is no planner, or no input yet. The message has the reason. If the
                planner fails, the last plan holds, and the status has the error.
        """
        if self._spec.planner is None:
            raise ConfigError("the application has no planner; name one, or move models by hand")
        if says is not None and says.version == self._spec.fingerprint:
            self.frontend_says(says)
        if not self._is_planning and (why := self._plan_now(time.monotonic(), "asked for")):
            raise ConfigError(why)
        assert self._running is not None
        await asyncio.wait([self._running])

    async def dry_run(self) -> dict[str, Any]:
        """Return what the planner would do now, and what runs now. Nothing is changed.

        Raises:
            ConfigError: there is no planner, no input yet, or no plan. The message has the reason.
        """
        if not self._spec.planned:
            raise ConfigError(
                "the application has no planner of its workers: its args have no `planner` named "
                f"{planners_of_workers()}"
            )
        self.heard.learn()
        now, seen = time.monotonic(), self.heard.seen()
        try:
            problem = self.brain.problem(now, seen)
        except (NotYet, ValueError) as reason:
            raise ConfigError(str(reason)) from None
        try:
            answer = await self._aside(self.brain.solve, problem)
        except Exception as error:
            raise ConfigError(f"planning failed: {type(error).__name__}: {error}") from None
        trial = copy.deepcopy(self.brain)
        verdict = trial.adopt(problem, answer)
        return {
            "planner": self._planner_name,
            "why_in_force": self._why,
            "took_s": time.monotonic() - now,
            **told.trial(trial, verdict, now, seen, self.replicas()),
        }

    def status(self) -> dict[str, Any]:
        """Return the part of `ray-slo status` about the plan."""
        now = time.monotonic()
        state = "planned" if self.planned_at is not None else "starting"
        if self.planned_at is None and self.heard.successor:
            state = "taken over"
        return {
            "planner": self._planner_name,
            "state": state,
            "plan_age_s": None if self.planned_at is None else now - self.planned_at,
            "last_tried_s": None if (tried_at := self.asking.asked_at) is None else now - tried_at,
            "epoch": self._epoch,
            "plans": self.plans.planned,
            "failures": self.plans.failed,
            "planning_took_s": self.plans.took_s,
            "why": self._why,
            "error": self.asking.error,
            "load_errors": {f"{v} on {k}": why for (v, k), why in self.heard.load_errors.items()},
            **told.status(self.brain, now, self.heard.seen(), self.wanted, self.replicas()),
        }

    @property
    def _planner_name(self) -> str | None:
        return self._spec.planner.name if self._spec.planner is not None else None

    # -- plans -----------------------------------------------------------------------------

    @property
    def _is_planning(self) -> bool:
        return self._running is not None and not self._running.done()

    def step(self, now: float) -> None:
        """Do everything that is due."""
        self.heard.forget(now)
        self.refresh()
        if self._is_planning:
            return
        if self.asking.asked_at is None:
            self._begin(now)
        elif trigger := self.asking.due(now, self.heard.seen()):
            self._plan_now(now, trigger)

    def _begin(self, now: float) -> None:
        """Make the first decision, once there are enough reports."""
        seen = self.heard.seen()
        listened_s = now - self.heard.listens_since
        if not self.brain.may_begin(seen, now - self._started, listened_s):
            return
        trigger = RESTARTED if seen.planned_before else FIRST
        if why := self.brain.begin(now, seen):
            self.asking.asked_at = now
            self._go_by(now, why, trigger)
        else:
            self._plan_now(now, trigger)

    def _go_by(self, now: float, why: str, trigger: str) -> None:
        """Put the brain's decision into effect without a new plan."""
        self.planned_at, self._why = now, why
        asked = self.asking.asked(now, trigger, self.heard.seen(), self._there)
        self.refresh()
        self.asking.note(asked, Verdict(why), told.work(self.wanted))

    @property
    def _there(self) -> dict[str, int]:
        return self.heard.running(self._spec.workers)

    def _plan_now(self, now: float, trigger: str) -> str:
        """Begin to plan. Return why that is not possible, or ""."""
        self.heard.learn()
        error = self.asking.error
        try:
            asked = self.asking.ask(now, trigger, self.heard.seen(), self._there)
        except NotYet as reason:
            if self.planned_at is None:
                self._why = str(reason)
            return str(reason)
        if asked.error:
            if asked.error != error:  # it may happen every second
                self._count_failure()
            return asked.error
        self._running = asyncio.get_running_loop().create_task(self._plan(asked))
        return ""

    async def _plan(self, asked: Question) -> None:
        """Make a plan, and put it into effect. If anything fails, the last plan stays."""
        began = time.monotonic()
        try:
            verdict = self.asking.adopt(asked, await self._aside(self.brain.solve, asked.problem))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("planning failed; the last plan holds")
            self._count_failure()
            self.asking.failed(asked, error, time.monotonic() - began)
            return
        took_s = time.monotonic() - began
        if verdict.holds:
            self._count_failure()
        else:
            if verdict.why != self._why:
                logger.info("plan: %s", verdict.why)
            self._why, self.planned_at = verdict.why, time.monotonic()
            self.plans = self.plans._replace(planned=self.plans.planned + 1, took_s=took_s)
            self.refresh()
        self.asking.note(asked, verdict, told.work(self.wanted), took_s)

    def _count_failure(self) -> None:
        self.plans = self.plans._replace(failed=self.plans.failed + 1)


def _interval_s(spec: AppSpec) -> float:
    """Return the time between plans, in seconds. It is endless without a planner."""
    return math.inf if spec.planner is None else spec.planner.interval_s


def orders(wanted: Wanted) -> tuple[Any, ...]:
    """Return a worker's orders without the profiles, which change all the time."""
    return wanted.assigned, wanted.keep, wanted.group


def _predicted(spec: AppSpec, expected: Mapping[str, Expected]) -> dict[str, Expected]:
    """Return a brain's predictions by root, without accuracies that no user gave. (A brain plans a
    network of unknown accuracy as if it had 100 %.)"""
    unknown = {ref.model for ref in spec.variants().values() if ref.accuracy is None}
    return {
        root: said._replace(accuracy=None)
        if root in spec.trees and unknown & set(spec.trees[root].models)
        else said
        for root, said in expected.items()
    }
