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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.profiles import median_profile
from ray_slo.record.plans import Outline
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.errors import ConfigError
from ray_slo.serve.messages import Plans
from ray_slo.serve.planner import app_actor
from ray_slo.serve.planner.app_actor import AppActor
from ray_slo.serve.ray_private.actors import find_actor, get_or_create, in_task

logger = logging.getLogger(__name__)

_GONE_S = 10.0  # workers and frontends are taken for dead after this silence
_SETTLE_S = 1.0  # at first: so long for all workers to say what they do
_LISTEN_S = 3.0  # after a restart: so long for the demand to be seen
_GAP_S = 1.0  # between plans, however much changes
_RETRY_S = 10.0  # after planning failed
_REMIND_S = 20.0  # between profiles for frontends
_AVOID_S = 60.0  # a variant that could not be loaded

FIRST = "first plan"

Key = tuple[str, str]  # (variant, kind of worker)


class WorkerSays(NamedTuple):
    """Worker → planner.

    Attributes:
        loaded: variants that it offers to the scheduler.
        assigned: what it does; None where it does whatever comes.
        profiles: of every variant that it ever measured or was told of: so nothing is lost with the
            actor.
        errors: variants that it could not load, why, and the number of the failure.
        version: fingerprint of its specification.
        ready: Serve may send it requests; before, it loads what it is to begin with.
        age_s: since it started.
    """

    worker: str
    kind: str
    loaded: frozenset[str] = frozenset()
    assigned: Assigned | None = None
    profiles: Mapping[str, LatencyProfile] = {}
    errors: Mapping[str, tuple[str, float]] = {}
    version: str = ""
    ready: bool = True
    age_s: float = 0.0


class Wanted(NamedTuple):
    """What a worker should do: have exactly these variants loaded, and serve `assigned`.

    Attributes:
        profiles: of those in `keep`, where known, to start from.
    """

    assigned: Assigned | None
    keep: tuple[str, ...]
    profiles: Mapping[str, LatencyProfile] = {}


class Counts(NamedTuple):
    """What a frontend counted since it started.

    Attributes:
        requests: by clients.
        finished: requests answered, by variant.
        made: requests made of them, by variant and child task.
        sizes: requests by clients, by their size.
    """

    requests: int = 0
    finished: Mapping[str, int] = {}
    made: Mapping[str, Mapping[str, int]] = {}
    sizes: Mapping[int, int] = {}

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`."""
        return Counts(
            max(self.requests - before.requests, 0),
            _more(self.finished, before.finished),
            {v: _more(made, before.made.get(v, {})) for v, made in self.made.items()},
            _more(self.sizes, before.sizes),
        )


def _more(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    return {k: n - before.get(k, 0) for k, n in now.items() if n > before.get(k, 0)}


class FrontendSays(NamedTuple):
    """Frontend → planner.

    Attributes:
        tuned: arguments of the planner that were changed while it runs.
        profiles: what it last heard, for an actor that is new: there may be no worker any more of
            a kind that was measured.
        clock: of its scheduler's decision log, and what it shows, where they are one process.
    """

    client: str
    counts: Counts
    version: str
    tuned: Mapping[str, Any] = {}
    profiles: Mapping[Key, LatencyProfile] = {}
    clock: tuple[str, float] | None = None


class FrontendHears(NamedTuple):
    """Planner → frontend.

    Attributes:
        plan_age_s: None before there is a plan.
        replicas: workers wanted (None: as many as there are) and running, by kind.
        profiles: for a successor, once in a while.
        shortfall: what the plan cannot do, and why; None where it does all.
    """

    plan_age_s: float | None
    replicas: Mapping[str, tuple[int | None, int]] = {}
    profiles: Mapping[Key, LatencyProfile] | None = None
    plans: Plans = Plans()
    shortfall: str | None = None


@dataclass(frozen=True)
class Seen:
    """What a brain decides by.

    Attributes:
        workers: those that are there, as they last said, the oldest first.
        profiles: by variant and kind: the median of what workers that have it loaded measured, else
            what was last known.
        avoided: could not be loaded lately.
    """

    workers: Mapping[str, WorkerSays]
    profiles: Mapping[Key, LatencyProfile] = field(default_factory=dict)
    avoided: frozenset[Key] = frozenset()

    @property
    def serving(self) -> Mapping[str, WorkerSays]:
        """Workers that are ready; before there is one, all."""
        return {w: says for w, says in self.workers.items() if says.ready} or self.workers


class Verdict(NamedTuple):
    """What became of a problem. `shortfall`: what the plan leaves out, None if nothing."""

    why: str
    shortfall: str | None = None


class NotYet(Exception):
    """There is nothing to plan with yet."""


class Brain(Protocol):
    """Decides for one application. Pure: no ray, no clock. `solve` runs elsewhere."""

    @property
    def solve(self) -> Callable[[Any], Any]:
        """The planner: problem to answer. A function of a module."""

    def configure(self, spec: AppSpec) -> None:
        """Take over a specification of the same fingerprint."""

    def tune(self, kwargs: Mapping[str, Any]) -> bool:
        """Go by these arguments on top of the specification's; whether that is news.

        Raises:
            ValueError: they are none.
        """

    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        """What one frontend counted since it last said, in its share `over_s` of the time."""

    def problem(self, now: float, seen: Seen) -> Any:
        """What is to be solved.

        Raises:
            NotYet: too little is known.
            ValueError: there is no such plan, and why.
        """

    def due(self, now: float, seen: Seen) -> str:
        """What changed so that the plan does not fit any more; "" where nothing did."""

    def adopt(self, problem: Any, answer: Any) -> Verdict:
        """Go by this answer of `solve` from now on."""

    def wanted(self, seen: Seen, hopeless: bool) -> Mapping[str, Wanted]:
        """What workers should do; those left out go on.

        Args:
            hopeless: there is no plan, and the last attempt to make one failed.
        """

    def target(self, kind: str) -> int | None:
        """Workers of a kind; None: as many as there are."""

    def limit(self, kind: str, most: int) -> None:
        """Serve starts no more of a kind."""

    def inputs(self, now: float) -> dict[str, Any]:
        """What it would plan for, for people: `demand` in requests per second, and the rest."""

    def outcome(self) -> dict[str, Any]:
        """The plan that it goes by, for people; nothing before there is one."""


def make_brain(spec: AppSpec) -> Brain:
    """The brain of the planner that the application names."""
    assert spec.planner is not None
    if spec.planner.is_loki:
        from ray_slo.planning.brains.loki import LokiBrain

        return LokiBrain(spec)
    from ray_slo.planning.brains.kairos import KairosBrain

    return KairosBrain(spec)


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
        self._brain.configure(spec)

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
            if says.clock is not None and self._log is not None:
                self._log.clocks.heard(*says.clock, now)
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
        trial = copy.deepcopy(self._brain, {id(self._spec): self._spec})
        why, shortfall = trial.adopt(problem, answer)
        wanted, replicas = trial.wanted(seen, False), self._replicas()
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
            for worker, w in self._brain.wanted(self._seen(), hopeless).items()
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
            return "planner restarted" if running else FIRST
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
        self._why, self._error = verdict
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
