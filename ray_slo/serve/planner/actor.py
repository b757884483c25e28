"""The actor that plans an application: what its workers run, and how many there are.

Frontends tell it what they counted, workers what they have loaded and measured. A *brain* (pure:
`plan_loki`, `plan_kairos`) makes a problem of that, which is solved as a Ray task every
`interval_s`, or sooner when something that matters has changed, and makes of the plan what each
worker is `Wanted` to do and how many workers of a kind there should be. Workers ask for the one by
long polls, Serve's autoscaler for the other (`plan_autoscaling`).

Whatever fails (the solver, the Ray task, this actor) leaves the last plan in force: workers go on
with what they were told, the autoscaler holds its last target. A new actor goes on from what the
workers say they run, and plans when it has listened for a while.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import median_profile
from ray_slo.planning.brains.brain import (
    FIRST,
    RESTARTED,
    Counts,
    FrontendHears,
    FrontendSays,
    Key,
    NotYet,
    Plans,
    Seen,
    Verdict,
    Wanted,
    WorkerSays,
)
from ray_slo.record.plans import Outline
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.errors import ConfigError
from ray_slo.serve.planner import app_actor
from ray_slo.serve.planner.app_actor import AppActor
from ray_slo.serve.planner.registry import make_brain, setting
from ray_slo.serve.ray_private.actors import find_actor, get_or_create, in_task

logger = logging.getLogger(__name__)

_GONE_S = 10.0  # workers and frontends are taken for dead after this silence
_SETTLE_S = 1.0  # at first: so long for all workers to say what they do
_LISTEN_S = 3.0  # after a restart: so long for the demand to be seen
_GAP_S = 1.0  # between plans, however much changes
_RETRY_S = 10.0  # after planning failed
_REMIND_S = 20.0  # between profiles for frontends
_AVOID_S = 60.0  # a variant that could not be loaded


@dataclass
class _Worker:
    says: WorkerSays
    seen_at: float
    born: float


@dataclass
class _Frontend:
    counts: Counts
    seen_at: float
    told_at: float = -math.inf  # when it was last told profiles


class PlanActor(AppActor):
    """Hears, plans and tells, for one application."""

    def _reset(self, spec: AppSpec) -> None:
        super()._reset(spec)
        self._brain = make_brain(spec)
        self._epoch = uuid.uuid4().hex[:8]
        self._open_log(spec, self._epoch)
        self._started = time.monotonic()
        self._workers: dict[str, _Worker] = {}
        self._frontends: dict[str, _Frontend] = {}
        self._profiles: dict[Key, LatencyProfile] = {}
        self._avoided: dict[Key, tuple[str, float]] = {}  # why, and until when
        self._wanted: dict[str, Wanted] = {}
        self._asking: asyncio.Task[None] | None = None  # a scheduler what time it has
        self._planned_at: float | None = None
        self._tried_at: float | None = None
        self._took_over = False
        self._listens_since = self._started
        self._failed = False  # the last attempt
        self._why = "not planned yet"
        self._error: str | None = None
        self._plans = self._failures = 0
        self._took_s: float | None = None  # the last plan, from problem to answer

    def _go_on(self, spec: AppSpec) -> None:
        super()._go_on(spec)
        self._brain.configure(setting(spec))

    # -- asked by workers, frontends and Serve ---------------------------------------------

    async def worker(self, says: WorkerSays, had: str | None) -> tuple[str | None, Wanted | None]:
        """What a worker should do: at once when that is news to it (it `had` another answer), else
        after a while. None: what it does."""
        self._start()
        if says.version != self._spec.fingerprint:  # of an older release, still draining
            await asyncio.sleep(app_actor._POLL_S)
            return None, None
        now = time.monotonic()
        if self._hear(says, now):
            self._refresh()
        until = now + app_actor._POLL_S
        while True:
            found = self._wanted.get(says.worker)
            token = f"{self._epoch} {found[:2]}" if found is not None else None
            if (found is not None and token != had) or time.monotonic() >= until:
                return token, found
            await self._news(until)

    async def leave(self, worker: str) -> None:
        """A worker is going."""
        if self._workers.pop(worker, None) is not None:
            self._refresh()

    async def frontend(self, says: FrontendSays) -> FrontendHears:
        """Count, and say how old the plan is; once in a while, what a successor has to know."""
        self._start()
        now = time.monotonic()
        if says.version == self._spec.fingerprint:
            if self._log is not None:
                for clock, reading in says.clocks.items():
                    self._log.clocks.heard(clock, reading, now)
            before = self._frontends.get(says.client)
            if before is not None:  # what was counted before we knew it, we cannot place in time
                over_s = max(now - before.seen_at, 1e-3) / len(self._frontends)
                self._brain.counted(now, over_s, says.counts.since(before.counts))
            if not self._frontends:
                self._listens_since = now
            told_at = before.told_at if before is not None else -math.inf
            self._frontends[says.client] = _Frontend(says.counts, now, told_at)
            for key, profile in says.profiles.items():
                self._profiles.setdefault(key, profile)
            if self._brain.tune(says.tuned):
                logger.info("arguments of the planner: %s", dict(says.tuned))
        age_s = None if self._planned_at is None else now - self._planned_at
        known = self._frontends.get(says.client)
        why = [text for text, _ in self._avoided.values()] if self._error else []
        shortfall = "; ".join(filter(None, [self._error, *dict.fromkeys(why)])) or None
        hears = FrontendHears(age_s, self._replicas(), None, self._counted(), shortfall)
        if age_s is None or known is None or now - known.told_at < _REMIND_S:
            return hears
        known.told_at = now
        return hears._replace(profiles=dict(self._profiles))

    def _counted(self) -> Plans:
        return Plans(self._epoch, self._plans, self._failures, self._took_s)

    def _replicas(self) -> dict[str, tuple[int | None, int]]:
        kinds = [w.says.kind for w in self._workers.values()]
        return {k: (self._brain.target(k), kinds.count(k)) for k in self._spec.workers}

    async def target(self, kind: str, most: int) -> int | None:
        """How many workers of a kind there should be; None: as many as there are.

        Args:
            most: Serve starts no more.
        """
        self._start()
        self._brain.limit(kind, most)
        return self._brain.target(kind)

    # -- asked by people -------------------------------------------------------------------

    async def replan(self) -> None:
        """Plan now; returns when that is done.

        Raises:
            ConfigError: there is nothing to plan with yet, or no plan; says why.
        """
        self._start()
        if self._planning is None or self._planning.done():
            self._plan_now(time.monotonic(), "asked for")
        if self._planning is None or self._planning.done():
            raise ConfigError(self._error or self._why)
        await asyncio.wait([self._planning])

    async def dry_run(self) -> dict[str, Any]:
        """What it would plan now, and why, beside what runs; nothing is gone by.

        Raises:
            ConfigError: there is nothing to plan with yet, or no plan; says why.
        """
        self._start()
        self._learn()
        began = time.monotonic()
        seen = self._seen()
        try:
            problem = self._brain.problem(began, seen)
        except (NotYet, ValueError) as reason:
            raise ConfigError(str(reason)) from None
        try:
            answer = await in_task(self._brain.solve, problem)
        except Exception as error:
            raise ConfigError(f"planning failed: {type(error).__name__}: {error}") from None
        trial = copy.deepcopy(self._brain)
        why, shortfall, _ = trial.adopt(problem, answer)
        wanted, replicas = trial.wanted(began, seen, False), self._replicas()
        workers = {}
        for name, says in seen.workers.items():
            new = wanted[name].assigned if name in wanted else says.assigned
            workers[name] = {
                "kind": says.kind,
                "does": says.assigned and asdict(says.assigned),
                "would": new and asdict(new),
                "load": sorted(set(wanted[name].keep) - says.loaded) if name in wanted else [],
            }
        return {
            "planner": self._spec.planner and self._spec.planner.name,
            "why": why,
            "shortfall": shortfall,
            "why_in_force": self._why,
            "took_s": time.monotonic() - began,
            "replicas": {
                kind: {"running": running, "target": target, "would": trial.target(kind)}
                for kind, (target, running) in replicas.items()
            },
            "workers": workers,
            "plan": {**trial.inputs(time.monotonic()), **trial.outcome()},
        }

    async def status(self) -> dict[str, Any]:
        """What `ray-slo status` shows of the plan."""
        self._start()
        now = time.monotonic()
        planner = self._spec.planner
        state = "planned" if self._planned_at is not None else "starting"
        if self._planned_at is None and self._took_over:
            state = "taken over"
        wanted = self._wanted
        if state == "planned" and not all(
            _does(w.says, wanted[name]) for name, w in self._workers.items() if name in wanted
        ):
            state = "changing"
        replicas = self._replicas()
        return {
            "planner": planner.name if planner is not None else None,
            "state": state,
            "plan_age_s": None if self._planned_at is None else now - self._planned_at,
            "last_tried_s": None if self._tried_at is None else now - self._tried_at,
            "epoch": self._epoch,
            "plans": self._plans,
            "failures": self._failures,
            "planning_took_s": self._took_s,
            "why": self._why,
            "error": self._error,
            "load_errors": {f"{v} on {k}": why for (v, k), (why, _) in self._avoided.items()},
            "targets": {kind: wanted for kind, (wanted, _) in replicas.items()},
            "running": {kind: running for kind, (_, running) in replicas.items()},
            "workers": {
                name: {
                    "ready": w.says.ready,
                    "loaded": sorted(w.says.loaded),
                    "assigned": w.says.assigned.variant if w.says.assigned else None,
                    "batch_size": w.says.assigned.batch_size if w.says.assigned else None,
                    "wanted": wanted[name].assigned.variant  # type: ignore[union-attr]
                    if name in wanted and wanted[name].assigned
                    else None,
                }
                for name, w in self._workers.items()
            },
            **self._brain.inputs(now),
            **self._brain.outcome(),
        }

    # -- steps -----------------------------------------------------------------------------

    async def _turn(self, now: float) -> None:
        for client, frontend in list(self._frontends.items()):
            if now - frontend.seen_at > _GONE_S:
                del self._frontends[client]
        for name, worker in list(self._workers.items()):
            if now - worker.seen_at > _GONE_S:
                logger.warning("worker %s is silent; doing without it", name)
                del self._workers[name]
        for key, (_, until) in list(self._avoided.items()):
            if now > until:
                del self._avoided[key]
        self._refresh()
        if trigger := self._plan_is_due(now):
            self._plan_now(now, trigger)

    def _is_alone(self) -> bool:
        return not self._workers and not self._frontends

    def _hear(self, says: WorkerSays, now: float) -> bool:
        """Whether there is news in it but for profiles."""
        before = self._workers.get(says.worker)
        if before is None and says.ready and self._planned_at is None:
            self._took_over = True  # it was there before us
        for variant, (why, number) in says.errors.items():
            known = before.says.errors.get(variant) if before is not None else None
            if known is None or known[1] != number:
                logger.warning("%s could not load %s: %s", says.worker, variant, why)
                self._avoided[variant, says.kind] = why, now + _AVOID_S
        born = before.born if before is not None else now - says.age_s
        self._workers[says.worker] = _Worker(says, now, born)
        unknown = [v for v in says.profiles if (v, says.kind) not in self._profiles]
        for variant in unknown:
            self._profiles[variant, says.kind] = says.profiles[variant]
        plain = says._replace(profiles={}, age_s=0.0)
        same = before is not None and before.says._replace(profiles={}, age_s=0.0) == plain
        return not same or bool(unknown)

    def _learn(self) -> None:
        """Take the workers' profiles over."""
        measured: dict[Key, list[LatencyProfile]] = {}
        for worker in self._workers.values():
            says = worker.says
            for variant in says.loaded & says.profiles.keys():
                measured.setdefault((variant, says.kind), []).append(says.profiles[variant])
        for key, profiles in measured.items():
            self._profiles[key] = median_profile(profiles)

    def _seen(self) -> Seen:
        return Seen(
            {n: w.says for n, w in sorted(self._workers.items(), key=lambda item: item[1].born)},
            self._profiles,
            frozenset(self._avoided),
        )

    def _refresh(self) -> None:
        hopeless = self._planned_at is None and self._error is not None
        wanted = {
            worker: w._replace(profiles=self._known(self._workers[worker].says.kind, w.keep))
            for worker, w in self._brain.wanted(time.monotonic(), self._seen(), hopeless).items()
        }
        news = {w: v[:2] for w, v in wanted.items()} != {w: v[:2] for w, v in self._wanted.items()}
        self._wanted = wanted
        if news:
            self._tell()

    def _known(self, kind: str, variants: tuple[str, ...]) -> dict[str, LatencyProfile]:
        return {v: self._profiles[v, kind] for v in variants if (v, kind) in self._profiles}

    # -- plans -----------------------------------------------------------------------------

    def _plan_is_due(self, now: float) -> str:
        """What makes it plan now; "" where nothing does."""
        planner = self._spec.planner
        assert planner is not None
        if self._planning is not None and not self._planning.done():
            return ""
        if now - self._started < _SETTLE_S:
            return ""
        if self._took_over and now - self._listens_since < _LISTEN_S:
            return ""  # what runs is better than a plan for a demand that nobody has seen
        if self._tried_at is None:
            running = any(w.says.assigned for w in self._workers.values())
            return RESTARTED if running else FIRST
        since_s = now - self._tried_at
        period = "period" if since_s >= planner.interval_s else ""
        if self._failed:
            return period or ("tried again" if since_s >= _RETRY_S else "")
        if period or since_s >= _GAP_S:
            return self._brain.due(now, self._seen()) or period
        return ""

    def _plan_now(self, now: float, trigger: str) -> None:
        self._learn()
        seen = self._seen()
        try:
            problem = self._brain.problem(now, seen)
        except NotYet as reason:
            if self._planned_at is None:
                self._why = str(reason)
            return
        except ValueError as error:
            if str(error) != self._error:  # it may be tried every second
                self._failures += 1
                self._note(now, trigger, self._inputs(now, seen), error=str(error))
            self._tried_at, self._error = now, str(error)
            return
        self._tried_at = now
        work = self._plan(problem, now, trigger, self._inputs(now, seen))
        self._planning = asyncio.get_running_loop().create_task(work)

    async def _plan(self, problem: Any, now: float, trigger: str, inputs: dict[str, Any]) -> None:
        """Plan, and go by it. Whatever fails, the last plan stays."""
        began = time.monotonic()
        if self._log is not None and not self._spec.embedded:
            self._asking = asyncio.ensure_future(self._hear_clock(self._app_key))
        try:
            verdict = self._brain.adopt(problem, await in_task(self._brain.solve, problem))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("planning failed; the last plan holds")
            self._failed = True
            self._failures += 1
            self._error = f"planning failed: {type(error).__name__}: {error}"
            self._note(now, trigger, inputs, error=self._error, took_s=time.monotonic() - began)
            return
        if verdict.why != self._why:
            logger.info("plan: %s", verdict.why)
        self._why, self._error = verdict.why, verdict.shortfall
        self._failed = False
        self._planned_at = time.monotonic()
        self._took_s = self._planned_at - began
        self._plans += 1
        self._refresh()
        self._note(now, trigger, inputs, verdict, took_s=self._took_s)

    # -- what is logged of it --------------------------------------------------------------

    def _inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        if self._log is None:
            return {}
        kinds = [says.kind for says in seen.workers.values()]
        there = {kind: kinds.count(kind) for kind in self._spec.workers}
        avoided = {"avoided": sorted(map("@".join, seen.avoided))} if seen.avoided else {}
        return {**self._brain.inputs(now), "workers": there, **avoided}

    def _note(
        self,
        now: float,
        trigger: str,
        inputs: dict[str, Any],
        verdict: Verdict | None = None,
        **rest: Any,
    ) -> None:
        """Log a question to the planner. Without a verdict there is no plan."""
        if self._log is None:
            return
        demand, outline = inputs.pop("demand", None), None
        running = [w.says.assigned for w in self._workers.values() if w.says.assigned]
        if running and self._log.outline == Outline():  # another planner's
            there = {kind: n for kind, (_, n) in self._replicas().items()}
            assigned = [(a.variant, a.batch_size, 1) for a in running]
            self._log.outline = Outline.of_assignments(there, assigned)
        if verdict is not None:
            targets = {kind: self._brain.target(kind) for kind in self._spec.workers}
            plan = self._brain.outcome()
            parts = plan.get("assignments", ())
            outline = Outline.of_assignments(
                targets, [(a["variant"], a["batch_size"], a["workers"]) for a in parts]
            )
            rest |= {"targets": targets, "plan": plan, "why": verdict.why}
            rest |= {"shortfall": verdict.shortfall}
            wanted = {name: w.assigned for name, w in self._wanted.items()}
            rest["workers"] = {name: a and a.variant for name, a in wanted.items()}
        self._log.planned(now, trigger, outline, demand=demand, inputs=inputs, **rest)


def _does(says: WorkerSays, wanted: Wanted) -> bool:
    return says.assigned == wanted.assigned and says.loaded == frozenset(wanted.keep)


def plan_name(app_key: str) -> str:
    """Name of the actor that plans an application."""
    return f"{app_key}##plan"


def get_or_create_plan(spec: AppSpec, app_key: str) -> Any:
    """The actor that plans the application; made if there is none. Blocks."""
    return get_or_create(PlanActor, plan_name(app_key), spec, app_key)


def find_plan(app_key: str) -> Any:
    """The actor that plans the application. Blocks.

    Raises:
        ValueError: there is none.
    """
    return find_actor(plan_name(app_key))
