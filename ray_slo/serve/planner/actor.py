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
import contextlib
import copy
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import ray

from ray_slo.planning.brains.brain import (
    FIRST,
    RESTARTED,
    FrontendHears,
    FrontendSays,
    NotYet,
    Plans,
    Seen,
    Verdict,
    Wanted,
    WorkerSays,
)
from ray_slo.record.writer import PlanLog
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.errors import ConfigError, UnknownModel
from ray_slo.serve.planner import told
from ray_slo.serve.planner.heard import Heard
from ray_slo.serve.planner.registry import make_brain, setting
from ray_slo.serve.ray_private.actors import Releases, application_is_gone, in_task
from ray_slo.serve.watch.logs import open_plan_log

logger = logging.getLogger(__name__)

_WATCH_S = 2.0


@dataclass(frozen=True)
class Pace:
    """How often things are done, in seconds.

    Attributes:
        step_s: between looks at what is due.
        poll_s: a worker's long poll returns after this, so that the silent are noticed.
        report_s: a frontend's does: it reports twice a second.
        gone_s: workers and frontends are taken for dead after this silence.
        gap_s: between plans, however much changes.
        retry_s: after planning failed.
        remind_s: between profiles for frontends.
        avoid_s: a variant that could not be loaded is avoided for so long.
    """

    step_s: float = 0.2
    poll_s: float = 2.0
    report_s: float = 0.5
    gone_s: float = 10.0
    gap_s: float = 1.0
    retry_s: float = 10.0
    remind_s: float = 20.0
    avoid_s: float = 60.0


class Planner:
    """Hears, plans and tells, for one application.

    Args:
        aside: runs a function of one argument elsewhere.
    """

    def __init__(
        self,
        spec: AppSpec,
        app_key: str,
        aside: Callable[[Callable[[Any], Any], Any], Awaitable[Any]] = in_task,
        pace: Pace = Pace(),
    ) -> None:
        self._app_key = app_key
        self._releases = Releases(spec)
        self._pace = pace
        self.aside = aside
        self._tasks: list[asyncio.Task[None]] = []
        self._planning: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._log: PlanLog | None = None
        self._reset(spec)

    def _reset(self, spec: AppSpec) -> None:
        """Begin anew, with a specification."""
        if self._planning is not None:
            self._planning.cancel()
        if self._log is not None:
            self._log.close()
        self._spec = spec
        self._planning = None
        self._brain = make_brain(spec)
        self._epoch = uuid.uuid4().hex[:8]
        self._log = open_plan_log(spec, self._epoch)
        self._started = time.monotonic()
        self._heard = Heard(self._started, self._pace.gone_s, self._pace.avoid_s)
        self._wanted: dict[str, Wanted] = {}
        self._planned_at: float | None = None
        self._tried_at: float | None = None
        self._failed = False  # the last attempt
        self._why = "not planned yet"
        self._error: str | None = None
        self._plans = Plans(self._epoch)

    async def configure(self, spec: AppSpec) -> None:
        """Take over a newer specification (a redeployed application)."""
        if self._releases.is_news(spec, self._spec):
            if spec.fingerprint != self._spec.fingerprint:
                self._reset(spec)
                self._tell()
            else:  # it differs in nothing that replicas would have to know of
                self._spec = spec
                self._brain.configure(setting(spec))
        self._start()

    def close(self) -> None:
        """Stop; for tests, as Ray kills the actor."""
        for task in self._tasks:
            task.cancel()
        if self._log is not None:
            self._log.close(1.0)

    # -- asked by workers, frontends and Serve ---------------------------------------------

    async def worker(self, says: WorkerSays, had: str | None) -> tuple[str | None, Wanted | None]:
        """A worker's long poll: returns as soon as its orders differ from those it `had`, or after
        `poll_s`. None: it carries on."""
        self._start()
        if says.version != self._spec.fingerprint:  # of an older release, still draining
            await asyncio.sleep(self._pace.poll_s)
            return None, None
        now = time.monotonic()
        if self._heard.worker(says, now, planned=self._planned_at is not None):
            self._refresh()
        until = now + self._pace.poll_s
        while True:
            found = self._wanted.get(says.worker)
            token = f"{self._epoch} {_orders(found)}" if found is not None else None
            if (found is not None and token != had) or time.monotonic() >= until:
                return token, found
            await self._news(until)

    async def leave(self, worker: str) -> None:
        """A worker is going."""
        if self._heard.left(worker):
            self._refresh()

    async def frontend(self, says: FrontendSays) -> FrontendHears | None:
        """A frontend's long poll: returns as soon as there are routes that it does not go by, or
        after `report_s`. None for a frontend of an older release."""
        self._start()
        if says.version != self._spec.fingerprint:
            await asyncio.sleep(self._pace.report_s)
            return None
        self._hear(says)
        until = time.monotonic() + self._pace.report_s
        while says.applied == (self._epoch, self._number) and time.monotonic() < until:
            await self._news(until)
        now = time.monotonic()
        age_s = None if self._planned_at is None else now - self._planned_at
        why = self._heard.load_errors.values() if self._error else ()
        hears = FrontendHears(
            age_s,
            self._replicas(),
            None,
            self._plans,
            "; ".join(filter(None, [self._error, *dict.fromkeys(why)])) or None,
            self._epoch,
            self._brain.routing,
        )
        known = self._heard.frontends.get(says.client)
        if known is None or age_s is None or now - known.told_at < self._pace.remind_s:
            return hears
        known.told_at = now
        return hears._replace(profiles=dict(self._heard.profiles))

    @property
    def _number(self) -> int:
        return 0 if (routing := self._brain.routing) is None else routing.number

    def _hear(self, says: FrontendSays) -> None:
        now = time.monotonic()
        if self._log is not None:
            for clock, reading in says.clocks.items():
                self._log.clocks.heard(clock, reading, now)
        epoch, number = says.applied
        if epoch != self._epoch:  # this planner is new, the frontend may not be
            number = -1
        counted = self._heard.frontend(says._replace(applied=(self._epoch, number)), now)
        if counted is not None:
            self._brain.counted(now, *counted)
        if self._brain.tune(says.tuned):
            logger.info("arguments of the planner: %s", dict(says.tuned))

    def _replicas(self) -> dict[str, tuple[int | None, int]]:
        running = self._heard.running(self._spec.workers)
        return {kind: (self._brain.target(kind), n) for kind, n in running.items()}

    async def target(self, kind: str, most: int) -> int | None:
        """How many workers of a kind there should be; None: as many as there are.

        Args:
            most: Serve starts no more.
        """
        self._start()
        self._brain.limit(kind, most)
        return self._brain.target(kind)

    # -- asked by people -------------------------------------------------------------------

    async def move(self, model: str, group: str) -> None:
        """Serve a model in another group from now on (until a planner decides otherwise).

        Raises:
            UnknownModel: no such model.
            ConfigError: no such group, no groups, or no layout of them yet.
        """
        self._start()
        try:
            why = self._brain.move(model, group)
        except LookupError:
            raise UnknownModel(model=model, valid=self._spec.models) from None
        except (NotYet, ValueError) as error:
            raise ConfigError(str(error)) from None
        if self._planning is not None:
            self._planning.cancel()  # it knows nothing of the move
        self._go_by(time.monotonic(), why, "moved by hand")

    async def replan(self, says: FrontendSays | None = None) -> None:
        """Plan now; returns when that is done.

        Args:
            says: what the frontend that asks would report next.

        Raises:
            ConfigError: there is no planner, nothing to plan with yet, or no plan; says why.
        """
        self._start()
        if self._spec.planner is None:
            raise ConfigError("the application has no planner; name one, or move models by hand")
        if says is not None and says.version == self._spec.fingerprint:
            self._hear(says)
        if not self._is_planning and (why := self._plan_now(time.monotonic(), "asked for")):
            raise ConfigError(why)
        assert self._planning is not None
        await asyncio.wait([self._planning])

    async def dry_run(self) -> dict[str, Any]:
        """What it would plan now, and why, beside what runs; nothing is gone by.

        Raises:
            ConfigError: there is nothing to plan with yet, or no plan; says why.
        """
        self._start()
        if not self._spec.planned:
            raise ConfigError(
                "the application has no planner of its workers: its args have no `planner` named "
                "loki, kairos or kairos_plus"
            )
        self._heard.learn()
        now, seen = time.monotonic(), self._heard.seen()
        try:
            problem = self._brain.problem(now, seen)
        except (NotYet, ValueError) as reason:
            raise ConfigError(str(reason)) from None
        try:
            answer = await self.aside(self._brain.solve, problem)
        except Exception as error:
            raise ConfigError(f"planning failed: {type(error).__name__}: {error}") from None
        trial = copy.deepcopy(self._brain)
        verdict = trial.adopt(problem, answer)
        return {
            "planner": self._planner_name,
            "why_in_force": self._why,
            "took_s": time.monotonic() - now,
            **told.trial(trial, verdict, now, seen, self._replicas()),
        }

    async def status(self) -> dict[str, Any]:
        """What `ray-slo status` shows of the plan."""
        self._start()
        now = time.monotonic()
        state = "planned" if self._planned_at is not None else "starting"
        if self._planned_at is None and self._heard.successor:
            state = "taken over"
        return {
            "planner": self._planner_name,
            "state": state,
            "plan_age_s": None if self._planned_at is None else now - self._planned_at,
            "last_tried_s": None if self._tried_at is None else now - self._tried_at,
            "epoch": self._epoch,
            "plans": self._plans.planned,
            "failures": self._plans.failed,
            "planning_took_s": self._plans.took_s,
            "why": self._why,
            "error": self._error,
            "load_errors": {f"{v} on {k}": why for (v, k), why in self._heard.load_errors.items()},
            **told.status(self._brain, now, self._heard.seen(), self._wanted, self._replicas()),
        }

    @property
    def _planner_name(self) -> str | None:
        return self._spec.planner.name if self._spec.planner is not None else None

    # -- steps -----------------------------------------------------------------------------

    def _start(self) -> None:
        # Not in __init__: there is no running event loop there.
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._run()), loop.create_task(self._watch())]

    async def _run(self) -> None:
        while True:
            try:
                self._step(time.monotonic())
            except Exception:
                logger.exception("planner step failed; going on")
            await asyncio.sleep(self._pace.step_s)

    def _step(self, now: float) -> None:
        self._heard.forget(now)
        self._refresh()
        if self._is_planning:
            return
        if self._tried_at is None:
            self._begin(now)
        elif trigger := self._plan_is_due(now):
            self._plan_now(now, trigger)

    def _refresh(self) -> None:
        """See what workers and frontends should do; tell them if that is news."""
        before = self._number, {w: _orders(v) for w, v in self._wanted.items()}
        hopeless = self._planned_at is None and self._error is not None
        seen = self._heard.seen()
        self._wanted = {
            worker: w
            # Who takes a model over from another group measures it, and is warm then.
            if w.group is not None
            else w._replace(profiles=self._heard.known(seen.workers[worker].kind, w.keep))
            for worker, w in self._brain.wanted(time.monotonic(), seen, hopeless).items()
        }
        if before != (self._number, {w: _orders(v) for w, v in self._wanted.items()}):
            self._tell()

    def _tell(self) -> None:
        """Wake all long polls."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _news(self, until: float) -> None:
        """Wait for the next `_tell`, at most until then."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(until - time.monotonic(), 0.0))

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                if self._heard.is_alone and await loop.run_in_executor(
                    None, application_is_gone, self._app_key
                ):
                    logger.info("application %s is gone; leaving", self._app_key)
                    if self._log is not None:
                        self._log.close(1.0)
                    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
            except Exception:
                logger.exception("watch failed; going on")

    # -- plans -----------------------------------------------------------------------------

    @property
    def _is_planning(self) -> bool:
        return self._planning is not None and not self._planning.done()

    def _begin(self, now: float) -> None:
        """Make the first decision, once enough was heard."""
        seen = self._heard.seen()
        listened_s = now - self._heard.listens_since
        if not self._brain.may_begin(seen, now - self._started, listened_s):
            return
        trigger = RESTARTED if seen.planned_before else FIRST
        if why := self._brain.begin(now, seen):
            self._tried_at = now
            self._go_by(now, why, trigger)
        else:
            self._plan_now(now, trigger)

    def _go_by(self, now: float, why: str, trigger: str) -> None:
        """Go by what the brain decided without a plan."""
        self._planned_at, self._why = now, why
        self._refresh()
        self._note(now, trigger, {"workers": self._heard.running(self._spec.workers)}, Verdict(why))

    def _plan_is_due(self, now: float) -> str:
        """What makes it plan now; "" where nothing does."""
        planner = self._spec.planner
        if planner is None or self._tried_at is None:
            return ""
        since_s = now - self._tried_at
        period = "period" if since_s >= planner.interval_s else ""
        if self._failed:
            return period or ("tried again" if since_s >= self._pace.retry_s else "")
        if period or since_s >= self._pace.gap_s:
            return self._brain.due(now, self._heard.seen()) or period
        return ""

    def _plan_now(self, now: float, trigger: str) -> str:
        """Begin to plan; returns why there is nothing to plan, "" where there is."""
        self._heard.learn()
        seen = self._heard.seen()
        try:
            problem = self._brain.problem(now, seen)
        except NotYet as reason:
            if self._planned_at is None:
                self._why = str(reason)
            return str(reason)
        except ValueError as error:
            if str(error) != self._error:  # it may be tried every second
                self._count_failure(str(error))
                self._note(now, trigger, self._inputs(now, seen), error=str(error))
            self._tried_at = now
            return str(error)
        self._tried_at = now
        work = self._plan(problem, now, trigger, self._inputs(now, seen))
        self._planning = asyncio.get_running_loop().create_task(work)
        return ""

    async def _plan(self, problem: Any, now: float, trigger: str, inputs: dict[str, Any]) -> None:
        """Plan, and go by it. Whatever fails, the last plan stays."""
        began = time.monotonic()
        try:
            verdict = self._brain.adopt(problem, await self.aside(self._brain.solve, problem))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("planning failed; the last plan holds")
            self._failed = True
            self._count_failure(f"planning failed: {type(error).__name__}: {error}")
            took_s = time.monotonic() - began
            self._note(now, trigger, inputs, error=self._error, took_s=took_s)
            return
        took_s = time.monotonic() - began
        self._failed = False
        if verdict.holds:
            self._count_failure(verdict.why)
            self._note(now, trigger, inputs, error=verdict.why, took_s=took_s)
            return
        if verdict.why != self._why:
            logger.info("plan: %s", verdict.why)
        self._why, self._error = verdict.why, verdict.shortfall
        self._planned_at = time.monotonic()
        self._plans = self._plans._replace(planned=self._plans.planned + 1, took_s=took_s)
        self._refresh()
        self._note(now, trigger, inputs, verdict, took_s=took_s)

    def _count_failure(self, why: str) -> None:
        self._error = why
        self._plans = self._plans._replace(failed=self._plans.failed + 1)

    # -- what is logged of it --------------------------------------------------------------

    def _inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        if self._log is None:
            return {}
        there = self._heard.running(self._spec.workers)
        avoided = {"avoided": sorted(map("@".join, seen.avoided))} if seen.avoided else {}
        return {"workers": there, **self._brain.inputs(now, seen), **avoided}

    def _note(
        self,
        now: float,
        trigger: str,
        inputs: dict[str, Any],
        verdict: Verdict | None = None,
        **rest: Any,
    ) -> None:
        """Log a question to the planner. Without a verdict, the last plan holds."""
        if self._log is not None:
            told.log(
                self._log,
                self._brain,
                (now, trigger),
                self._heard.seen(),
                self._wanted,
                self._replicas(),
                inputs,
                verdict,
                **rest,
            )


def _orders(wanted: Wanted) -> tuple[Any, ...]:
    """What a worker should do, without profiles, which change all the time."""
    return wanted.assigned, wanted.keep, wanted.group
