"""The planner as a named, detached actor: keeps the layout of an application's groups, has it
planned anew, and sees it carried out.

Nobody is called from here but schedulers, for their status. Workers and frontends ask, by long
polls, what they should do, and say what they have done; so the actor may die at any time: they go
on with the last answer, Ray restarts it, and it takes over the layout that it finds.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import load_profiles
from ray_slo.planning.brains.brain import FIRST, Plans
from ray_slo.planning.brains.groups import (
    Demand,
    Layout,
    Seen,
    Wanted,
    best_throughput,
    make_problem,
    members,
    routed,
    settled,
    solve,
    to_layout,
    verdict,
    wanted,
    worth_it,
)
from ray_slo.record.plans import Outline
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.errors import ConfigError, UnknownModel
from ray_slo.serve.planner import app_actor
from ray_slo.serve.planner.app_actor import AppActor
from ray_slo.serve.ray_private.actors import find_actor, get_or_create, in_task

logger = logging.getLogger(__name__)

_GONE_S = 10.0  # workers and frontends are taken for dead after this silence
_TAKE_OVER_S = 3.0  # after a restart: so long for everybody to say what they are doing
_DRAIN_S = 60.0  # a group that still has requests of a model after this is drained no longer


class WorkerSays(NamedTuple):
    """Worker → planner. `loaded`: models that the group's scheduler knows of; `errors`: models that
    could not be loaded, and why."""

    worker: str
    home: str | None
    group: str | None
    loaded: frozenset[str]
    errors: dict[str, str]
    version: str  # fingerprint of its specification


class FrontendSays(NamedTuple):
    """Frontend → planner. `applied`: the last answer that it routes by; `counts`: requests since it
    started, by model."""

    client: str
    applied: tuple[str, int]
    routes: dict[str, str]
    counts: dict[str, int]
    version: str


class Routes(NamedTuple):
    """Planner → frontend. `groups`: schedulers to be ready for; `complete`: every model of the
    layout has a group that serves it. `plan_age_s`: since the layout was last decided on."""

    token: tuple[str, int]
    routes: dict[str, str]
    groups: tuple[str, ...]
    complete: bool
    plan_age_s: float
    plans: Plans = Plans()


@dataclass
class _Frontend:
    seen_at: float
    applied: int = -1
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class _Drain:
    number: int  # frontends that have applied this answer send no more
    since: float
    empty: int = 0  # looks in a row that found nothing


class PlannerActor(AppActor):
    """Keeps, plans and carries out the layout of one application."""

    def _reset(self, spec: AppSpec) -> None:
        super()._reset(spec)
        self._epoch = uuid.uuid4().hex[:8]
        self._open_log(spec, self._epoch)
        self._started = time.monotonic()
        self._layout: Layout | None = None
        self._planned_at: float | None = None  # when the layout was decided on
        self._tried_at: float | None = None
        self._why = "not planned yet"
        self._error: str | None = None
        self._workers: dict[str, tuple[WorkerSays, float]] = {}
        self._frontends: dict[str, _Frontend] = {}
        self._counted: dict[str, int] = {}  # requests of the running interval, by model
        self._rates: dict[str, float] = {}  # of the last one
        self._member: dict[str, str] = {}
        self._routes: dict[str, str] = {}
        self._draining: dict[tuple[str, str], _Drain] = {}
        self._wanted: dict[str, Wanted] = {}
        self._moves = 0
        self._plans = self._failures = 0
        self._took_s: float | None = None  # for the last plan
        self._number = 0

    # -- asked by workers and frontends ----------------------------------------------------

    async def worker(self, says: WorkerSays, had: str | None) -> tuple[str | None, Wanted | None]:
        """What a worker should do: at once when that is news to it (it `had` another answer), else
        after a while. None: what it does."""
        self._start()
        if says.version != self._spec.fingerprint:  # of an older release, still draining
            await asyncio.sleep(app_actor._POLL_S)
            return None, None
        self._workers[says.worker] = (says, time.monotonic())
        until = time.monotonic() + app_actor._POLL_S
        while True:
            found = self._wanted.get(says.worker)
            token = f"{self._epoch} {found}"
            if (found is not None and token != had) or time.monotonic() >= until:
                return (token, found) if found is not None else (None, None)
            await self._news(until)

    async def frontend(self, says: FrontendSays) -> Routes | None:
        """Where to send requests: at once when that is news to a frontend, else after a while."""
        self._start()
        if says.version != self._spec.fingerprint:
            await asyncio.sleep(app_actor._POLL_S)
            return None
        now = time.monotonic()
        epoch, number = says.applied
        applied = number if epoch == self._epoch else -1
        known = self._count(says)
        known.seen_at, known.applied = now, applied
        if epoch != self._epoch:  # we are new, it may not be
            self._routes = {**says.routes, **self._routes}
        until = now + app_actor._POLL_S
        while (applied == self._number or self._layout is None) and time.monotonic() < until:
            await self._news(until)
        known.seen_at = time.monotonic()
        if self._layout is None:
            return None
        complete = set(self._layout.models) <= set(self._routes)
        groups = {*self._routes.values(), *self._layout.groups}
        token = (self._epoch, self._number)
        age_s = time.monotonic() - (self._planned_at or self._started)
        plans = Plans(self._epoch, self._plans, self._failures, self._took_s)
        return Routes(token, dict(self._routes), tuple(sorted(groups)), complete, age_s, plans)

    def _count(self, says: FrontendSays) -> _Frontend:
        now = time.monotonic()
        known = self._frontends.setdefault(says.client, _Frontend(now, counts=says.counts))
        for model, count in says.counts.items():
            new = max(count - known.counts.get(model, 0), 0)
            self._counted[model] = self._counted.get(model, 0) + new
            known.counts = {**known.counts, model: max(count, known.counts.get(model, 0))}
        return known

    # -- asked by people -------------------------------------------------------------------

    async def move(self, model: str, group: str) -> None:
        """Serve a model in another group from now on (until a planner decides otherwise).

        Raises:
            UnknownModel: no such model.
            ConfigError: no such group, or no plan yet.
        """
        self._start()
        if model not in self._spec.models:
            raise UnknownModel(model=model, valid=self._spec.models)
        if self._layout is None:
            raise ConfigError("the groups are not laid out yet; try again in a moment")
        groups = sorted(set(self._spec.groups) or self._layout.groups)
        if group not in groups:
            raise ConfigError(f"no group {group!r}; the groups are {', '.join(groups)}")
        self._adopt(
            Layout({**self._layout.models, model: group}, self._layout.sizes),
            f"{model} was moved to {group} by hand",
        )
        self._note(time.monotonic(), "moved by hand")

    async def replan(self, says: FrontendSays) -> None:
        """Plan now instead of at the end of the interval; returns when that is done.

        Raises:
            ConfigError: there is no planner.
        """
        self._start()
        if says.version == self._spec.fingerprint:
            self._count(says)
        if self._spec.planner is None:
            raise ConfigError("the application has no planner; name one, or move models by hand")
        if self._layout is None:
            raise ConfigError("the groups are not laid out yet; try again in a moment")
        if self._planning is None or self._planning.done():
            self._plan_now(time.monotonic(), "asked for")
        assert self._planning is not None
        await asyncio.wait([self._planning])

    async def status(self) -> dict[str, Any]:
        """What `ray-slo status` shows of groups and plan."""
        self._start()
        now = time.monotonic()
        layout = self._layout
        seen = self._seen()
        state = "starting"
        if layout is not None:
            done = settled(layout, self._member, seen, self._routes, self._draining)
            state = "settled" if done else "moving"
        names = {*self._routes.values(), *(layout.groups if layout else ()), *self._spec.groups}
        errors = {
            f"{model} on {worker}": text
            for worker, (says, _) in self._workers.items()
            for model, text in says.errors.items()
        }
        return {
            "planner": self._spec.planner.name if self._spec.planner else None,
            "state": state,
            "plan_age_s": None if self._planned_at is None else now - self._planned_at,
            "last_tried_s": None if self._tried_at is None else now - self._tried_at,
            "why": self._why,
            "error": self._error,
            "load_errors": errors,
            "moves": self._moves,
            "plans": self._plans,
            "failures": self._failures,
            "rates": dict(self._rates),
            "groups": {
                group: {
                    "models": sorted(m for m, g in self._routes.items() if g == group),
                    "wanted_models": sorted(layout.of(group)) if layout else [],
                    "draining": sorted(m for m, g in self._draining if g == group),
                    "workers": sorted(w for w, s in seen.items() if s.group == group),
                }
                for group in sorted(names)
            },
        }

    # -- steps -----------------------------------------------------------------------------

    async def _turn(self, now: float) -> None:
        self._forget_silent(now)
        if self._layout is None:
            self._first_layout(now)
        else:
            await self._drain(now)
            self._step(now)
            if self._plan_is_due(now):
                self._plan_now(now, "period")

    def _is_alone(self) -> bool:
        return not self._workers and not self._frontends

    def _seen(self) -> dict[str, Seen]:
        return {w: Seen(s.home, s.group, s.loaded) for w, (s, _) in self._workers.items()}

    def _forget_silent(self, now: float) -> None:
        for worker, (_, seen_at) in list(self._workers.items()):
            if now - seen_at > _GONE_S:
                logger.warning("worker %s is silent; doing without it", worker)
                del self._workers[worker]
                self._member.pop(worker, None)
        for client, frontend in list(self._frontends.items()):
            if now - frontend.seen_at > _GONE_S:
                del self._frontends[client]

    def _step(self, now: float) -> None:
        """One step nearer to the layout; tells everybody."""
        layout, seen = self._layout, self._seen()
        assert layout is not None
        self._member = members(layout, seen, self._member)
        routes = routed(layout, self._member, seen, self._routes)
        switched = {m: g for m, g in self._routes.items() if routes[m] != g}
        news = routes != self._routes
        if news:
            self._number += 1
        for model, old in switched.items():
            self._moves += 1
            self._draining[model, old] = _Drain(self._number, now)
            self._draining.pop((model, routes[model]), None)
            logger.info("%s is served by %s now, no more by %s", model, routes[model], old)
        self._routes = routes
        answer = wanted(layout, self._member, seen, routes, self._draining)
        news |= answer != self._wanted
        self._wanted = answer
        if news:
            self._tell()

    async def _drain(self, now: float) -> None:
        """Find out which groups have none of a moved model's requests left."""
        for (model, group), drain in list(self._draining.items()):
            if any(f.applied < drain.number for f in self._frontends.values()):
                continue
            if now - drain.since > _DRAIN_S:
                logger.warning("%s still has requests of %s; draining no longer", group, model)
            else:
                try:
                    status = await asyncio.wait_for(self._scheduler_status(group), 5.0)
                except Exception as error:  # restarting: frontends submit again
                    logger.info("scheduler of %s: %r", group, error)
                    continue
                drain.empty = 0 if status["queued"].get(model) else drain.empty + 1
                if drain.empty < 2:
                    continue
            self._draining.pop((model, group), None)

    async def _scheduler_status(self, group: str) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        actor = await loop.run_in_executor(None, find_actor, f"{self._app_key}#{group}")
        status: dict[str, Any] = await actor.status.remote()
        return status

    # -- plans -----------------------------------------------------------------------------

    def _num_workers(self) -> int:
        # One that is being replaced counts: a plan must not shrink the service.
        configured = sum(worker.num_replicas for worker in self._spec.workers.values())
        return max(configured, len(self._workers))

    def _group_names(self) -> list[str]:
        if self._spec.groups:
            return list(self._spec.groups)
        parts = self._spec.planner.kwargs.get("sub_clusters", 1) if self._spec.planner else 1
        return [f"g{i + 1}" for i in range(parts)]

    def _adopt(self, layout: Layout, why: str) -> None:
        self._layout, self._why = layout, why
        self._planned_at = time.monotonic()
        self._number += 1  # there may be groups to get ready for
        logger.info("layout: %s (%s)", layout, why)
        self._step(time.monotonic())
        self._tell()

    def _first_layout(self, now: float) -> None:
        if self._planning is not None and not self._planning.done():
            return
        # Who is there already must have a say: an actor that was restarted knows of nothing.
        all_here = len(self._workers) >= sum(w.num_replicas for w in self._spec.workers.values())
        if not self._frontends or not (all_here or now - self._started > _TAKE_OVER_S):
            return
        if self._routes or any(says.group is not None for says, _ in self._workers.values()):
            self._take_over(now)
            return
        listed = {m: g for g, spec in self._spec.groups.items() for m in spec.models}
        planner = self._spec.planner
        if planner is None or (set(listed) == set(self._spec.models) and not planner.rates):
            self._tried_at = now
            self._adopt(Layout(listed), "as configured")
            self._note(now, FIRST)
            return
        self._plan_now(now, FIRST)

    def _take_over(self, now: float) -> None:
        """Go on with what a predecessor left behind."""
        seen = self._seen()
        listed = {m: g for g, spec in self._spec.groups.items() for m in spec.models}
        sizes: dict[str, int] = {}
        if not self._spec.groups:
            for says, _ in self._workers.values():
                if says.group is not None:
                    sizes[says.group] = sizes.get(says.group, 0) + 1
            sizes |= {g: 1 for g in self._routes.values() if g not in sizes}
        for worker in seen.values():  # what is loaded beside may still have requests
            for model in worker.loaded:
                group = worker.group
                if group is None or self._routes.get(model, group) == group:
                    continue
                self._draining[model, group] = _Drain(self._number, now)
        models = {**listed, **self._routes}
        groups = sorted(sizes) or self._group_names()
        for model in self._spec.models:
            having = sorted(s.group for s in seen.values() if s.group and model in s.loaded)
            models.setdefault(model, (having or groups)[0])
        self._tried_at = now
        self._adopt(Layout(models, sizes), "taken over from before the planner was restarted")
        self._note(now, "planner restarted")

    def _plan_is_due(self, now: float) -> bool:
        planner = self._spec.planner
        idle = self._planning is None or self._planning.done()
        if planner is None or self._tried_at is None or not idle:
            return False
        return now - self._tried_at >= planner.interval_s

    def _plan_now(self, now: float, trigger: str) -> None:
        since = self._tried_at
        self._tried_at = now
        counted, self._counted = self._counted, {}
        if since is not None and any(counted.values()):
            interval_s = now - since
            self._rates = {m: counted.get(m, 0) / interval_s for m in self._spec.models}
        self._planning = asyncio.get_running_loop().create_task(self._plan(now, trigger))

    async def _plan(self, now: float, trigger: str) -> None:
        """Plan for the measured demand. Whatever fails, the last layout stays."""
        planner = self._spec.planner
        assert planner is not None
        demand: Demand | None = None
        took_s: float | None = None
        try:
            before = self._layout
            demand = Demand(
                self._rates or {m: planner.rates.get(m, 1.0) for m in self._spec.models},
                await self._throughput(),
            )
            names, workers = self._group_names(), self._num_workers()
            known = {m: g for g, spec in self._spec.groups.items() for m in spec.models}
            problem = make_problem(
                planner.name,
                planner.kwargs,
                demand,
                planner.memory_mb,
                workers,
                names,
                before.models if before is not None else known,
            )
            began = time.monotonic()
            answer, why = verdict(await in_task(solve, problem))
            took_s = self._took_s = time.monotonic() - began
            if self._layout is not before:  # moved by hand, meanwhile
                return
            pool = not self._spec.groups
            layout = to_layout(answer, workers, names, before, pool=pool)
            infeasible = why.startswith("infeasible")
            self._error = why if infeasible else None
            self._failures += infeasible
            self._plans += not infeasible
            if before is None:
                self._adopt(layout, why)
            elif infeasible:
                logger.warning("the layout stays: %s", why)
            elif worth_it(problem, before, answer, planner.min_gain):
                self._adopt(layout, why)
            else:
                self._why = f"kept, as moves would gain no more than {planner.min_gain:.0%}: {why}"
                self._planned_at = time.monotonic()
            what = "shortfall" if before is None else "error"  # the last layout stays
            self._note(now, trigger, demand, took_s=took_s, **({what: why} if infeasible else {}))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("planning failed; the layout stays")
            self._failures += 1
            self._error = f"planning failed: {type(error).__name__}: {error}"
            if self._layout is None:
                self._adopt(self._fallback(), "there is no plan: every model in the first group")
            self._note(now, trigger, demand, took_s=took_s, error=self._error)

    def _note(self, now: float, trigger: str, demand: Demand | None = None, **rest: Any) -> None:
        """Log a question to the planner, or a layout that came without one."""
        if self._log is None:
            return
        layout = self._layout
        inputs: dict[str, Any] = {"workers": self._num_workers()}
        if demand is not None:
            rest["demand"] = sum(demand.rates.values())
            inputs |= {"rates": dict(demand.rates), "throughput": dict(demand.throughput)}
        groups = {w: says.group for w, (says, _) in self._workers.items()}
        rest = {"inputs": inputs, "workers": {**groups, **self._member}, **rest}
        outline = None
        if layout is not None:
            outline = Outline(layout.sizes, groups=layout.models)
            rest |= {"targets": dict(layout.sizes), "plan": {"groups": dict(layout.models)}}
            rest["why"] = self._why
        self._log.planned(now, trigger, outline, **rest)

    def _fallback(self) -> Layout:
        names = self._group_names()
        listed = {m: g for g, spec in self._spec.groups.items() for m in spec.models}
        models = {model: listed.get(model, names[0]) for model in self._spec.models}
        return Layout(models, {} if self._spec.groups else {names[0]: self._num_workers()})

    async def _throughput(self) -> dict[str, float]:
        """Requests per second that a worker can serve in time, by model: by what schedulers have
        learned, else by profile files, else alike for all."""
        found: dict[str, list[float]] = {}
        refs = self._spec.variants()
        for group in set(self._routes.values()):
            await self._hear_clock(f"{self._app_key}#{group}")
            try:
                status = await asyncio.wait_for(self._scheduler_status(group), 5.0)
            except Exception as error:
                logger.info("no profiles of %s: %r", group, error)
                continue
            for key, told in status["profiles"].items():
                model = refs[key.rpartition("@")[0]].model
                slo_s = self._spec.models[model].latency_slo_ms / 1e3
                profile = LatencyProfile.from_json(told)
                found.setdefault(model, []).append(best_throughput(profile, slo_s))
        for name, spec in self._spec.models.items():
            if name not in found and spec.profile is not None:
                slo_s = spec.latency_slo_ms / 1e3
                profiles = load_profiles(spec.profile).values()
                found[name] = [best_throughput(p, slo_s) for p in profiles]
        best = {model: max(values) for model, values in found.items() if values}
        usual = sum(best.values()) / len(best) if best else 1.0
        return {model: best.get(model, usual) for model in self._spec.models}


def planner_name(app_key: str) -> str:
    """Name of an application's planner actor; no group can have it."""
    return f"{app_key}##planner"


def get_or_create_planner(spec: AppSpec, app_key: str) -> Any:
    """The application's planner actor; made if there is none. Blocks."""
    return get_or_create(PlannerActor, planner_name(app_key), spec, app_key)


def find_planner(app_key: str) -> Any:
    """The application's planner actor. Blocks.

    Raises:
        ValueError: there is none.
    """
    return find_actor(planner_name(app_key))
