"""Connections of workers and frontends to the planner of their application.

While the planner cannot be reached, they continue with its last answer. Every replica imports this
module. So it does not import the planner, which would take long.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ray_slo.core import LatencyProfile
from ray_slo.core.policy import Expected
from ray_slo.planning.brains.brain import (
    Counts,
    FrontendHears,
    FrontendSays,
    Key,
    Wanted,
    WorkerSays,
)
from ray_slo.serve.channels.channel import Channel
from ray_slo.serve.channels.group_channel import GroupedChannel
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.ray_private.actors import find_actor, get_or_create, in_time
from ray_slo.serve.watch.metrics import PlanMetrics

if TYPE_CHECKING:
    from ray_slo.serve.worker.worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_S = 10.0  # longest wait for an answer; it is longer than a long poll
_AGAIN_S = 0.3  # pause after the planner could not be reached
_RETRY_LOAD_S = 20.0
_READ_CLOCKS_S = 10.0
_UNREACHABLE = "unreachable"


def planner_name(app_key: str) -> str:
    """Return the name of the actor that plans an application. No group can have this name."""
    return f"{app_key}##planner"


def get_or_create_planner(spec: AppSpec, app_key: str) -> Any:
    """Return the actor that plans the application. It is made if there is none. This call
    blocks."""
    from ray_slo.serve.planner.actor import Planner

    return get_or_create(Planner, planner_name(app_key), spec, app_key)


def find_planner(app_key: str) -> Any:
    """Return the actor that plans the application. This call blocks.

    Raises:
        ValueError: there is none.
    """
    return find_actor(planner_name(app_key))


class PlannerLink:
    """A worker's or frontend's connection to the planner. It finds the planner's actor, or makes a
    new one if there is none."""

    def __init__(self, spec: AppSpec, app_key: str) -> None:
        self._spec = spec
        self._app_key = app_key
        self._actor: Any = None

    @property
    def actor(self) -> Any:
        """The planner that was last found.

        Raises:
            ConnectionError: it cannot be reached.
        """
        if self._actor is None:
            raise ConnectionError("the planner cannot be reached; the last plan holds")
        return self._actor

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the planner, and return the answer.

        Raises:
            Exception: the planner did not answer. It is looked up again next time.
        """
        try:
            if self._actor is None:
                loop = asyncio.get_running_loop()
                actor = await loop.run_in_executor(
                    None, get_or_create_planner, self._spec, self._app_key
                )
                await in_time(actor.configure.remote(self._spec.without_code()), _ANSWER_S)
                self._actor = actor
            return await in_time(getattr(self._actor, method).remote(*args), _ANSWER_S)
        except Exception:
            self._actor = None
            raise


class Follower:
    """The worker's side of the connection. It gets orders from the planner, and carries them out
    one at a time.

    It makes before it breaks. The next variants are loaded while the last ones serve. Then the
    scheduler, or that of the new group, is told what the worker serves now. Then the last variants
    finish their batches and are unloaded. With `make_before_break: false`, or without memory for
    both, the last variants are unloaded first, and the worker serves nothing in between.

    Args:
        kind: kind of the worker.
        link: link to the planner; default: to that of the application.
    """

    def __init__(
        self,
        spec: AppSpec,
        app_key: str,
        kind: str,
        worker: Worker,
        link: PlannerLink | None = None,
    ) -> None:
        self._spec = spec
        self._app_key = app_key
        self._kind = kind
        self._worker = worker
        self._link = link or PlannerLink(spec, app_key)
        self._refs = spec.variants()
        self._had: str | None = None  # id of the planner's last answer
        self._latest: Wanted | None = None
        self._group: str | None = None
        self._failures = itertools.count(1)
        self._errors: dict[str, tuple[str, float]] = {}  # reason and number of the failure
        self._retry_at: dict[str, float] = {}
        self._raised: dict[str, Exception] = {}
        self._ready = False
        self._ready_s: float | None = None
        self._started = time.monotonic()
        self._make_first = spec.planner is None or spec.planner.make_before_break

    async def begin(self) -> None:
        """Carry out the first orders. Return when the worker can serve.

        Raises:
            Exception: the worker cannot serve, and ends.
        """
        ready = False
        while not ready:
            ready = await self._while_asking(self.first(await self._orders()))

    async def follow(self) -> None:
        """Carry out orders forever."""
        self._ready = True
        self._ready_s = time.monotonic() - self._started
        while True:
            try:
                await self._while_asking(self.do(await self._orders()))
            except Exception:
                logger.exception("could not carry out the planner's orders")

    async def _orders(self) -> Wanted:
        """Return the newest orders that are not carried out yet."""
        while (wanted := self._latest) is None:
            self._latest = await self._ask()
        self._latest = None
        return wanted

    async def _while_asking(self, doing: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and continue to report meanwhile. Otherwise the planner would count the
        worker as dead."""
        task = asyncio.ensure_future(doing)
        try:
            while not task.done():
                asking = asyncio.ensure_future(self._ask())
                await asyncio.wait({task, asking}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    self._latest = asking.result() or self._latest
                asking.cancel()
            return await task
        finally:
            task.cancel()

    def leave(self) -> None:
        """Tell the planner, if it can be reached, that the worker is leaving. Do not wait for an
        answer."""
        try:
            self._link.actor.leave.remote(self._worker.id)
        except Exception as error:  # the planner will notice that reports stop
            logger.info("could not tell the planner that this worker leaves: %r", error)

    def says(self) -> WorkerSays:
        """Return the worker's report."""
        worker, memory = self._worker, self._worker.memory
        return WorkerSays(
            worker.id,
            self._kind,
            worker.offered if self._group is None else worker.registration.announced,
            worker.assigned,
            worker.profiles,
            dict(self._errors),
            self._spec.fingerprint,
            self._ready,
            time.monotonic() - self._started,
            self._group,
            {key: load + batch for key, (load, batch, _) in memory.variants.items()},
            memory.room_mb,
            ready_s=self._ready_s,
        )

    async def _ask(self) -> Wanted | None:
        try:
            answer: tuple[str | None, Wanted | None]
            answer = await self._link.ask("worker", self.says(), self._had)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.info("planner unreachable (%r); going on as before", error)
            await asyncio.sleep(_AGAIN_S)
            return None
        token, wanted = answer
        self._had = token or self._had
        return wanted

    async def first(self, wanted: Wanted) -> bool:
        """Carry out orders for the first time. An exception here ends the worker.

        Returns:
            Whether the worker can begin to serve. Otherwise it carries out the next orders first.
        """
        self._worker.will_load(len(wanted.keep))
        await self.do(wanted)
        if not wanted.assigned:
            served = {self._refs[key].model for key in self._worker.offered}
            for key, error in self._raised.items():
                task = self._refs[key].model
                if task in served or task in self._spec.unlisted:
                    continue
                if {v for v, ref in self._refs.items() if ref.model == task} <= {*wanted.keep}:
                    raise error  # none of its variants can be loaded
                return False  # the planner learns of the error, and changes the orders
        self._worker.check_slo()
        return True

    async def do(self, wanted: Wanted) -> None:
        """Carry out orders, or the rest of them."""
        keep, worker = dict.fromkeys(wanted.keep), self._worker
        self._errors = {v: e for v, e in self._errors.items() if v in keep}
        self._raised = {v: e for v, e in self._raised.items() if v in keep}
        missing = [v for v in keep if v not in worker.offered]
        extra = worker.offered - keep.keys()
        if missing and extra and not (self._make_first and self._has_room(missing, wanted)):
            await worker.assign(())
            await worker.unload(extra)
        complete = True
        for variant in missing:
            complete &= await self._load(variant, wanted)
        if wanted.group != self._group:
            # In a group, it must serve all listed models; other groups may get unlisted ones.
            unlisted = self._spec.unlisted
            own = [e for v, e in self._raised.items() if self._refs[v].model not in unlisted]
            if self._group is None and own:
                raise own[0]
            self._group = wanted.group
            await worker.join(f"{self._app_key}#{wanted.group}")
        assigned = wanted.assigned
        possible = all(a.variant in worker.offered for a in assigned)
        if possible and assigned != worker.assigned:
            await worker.assign(assigned)
        if (complete or wanted.group is not None) and (extra := worker.offered - keep.keys()):
            await worker.unload(extra)

    def _has_room(self, missing: list[str], wanted: Wanted) -> bool:
        """Return whether there is memory for these variants beside the loaded ones, as far as is
        known."""
        memory = self._worker.memory
        loaded_mb = sum(load + batch for load, batch, _ in memory.variants.values())
        more_mb = sum(wanted.memory_mb.get(variant, 0.0) for variant in missing)
        return memory.room_mb is None or loaded_mb + more_mb <= memory.room_mb

    async def _load(self, variant: str, wanted: Wanted) -> bool:
        if time.monotonic() < self._retry_at.get(variant, 0.0):
            return False
        try:
            await self._worker.load([variant], wanted.profiles)
            if wanted.group is not None:
                self._worker.check_slo()
        except Exception as error:
            logger.exception("could not load %s", variant)
            if variant in self._worker.offered:
                await self._worker.unload([variant])
            why = f"{type(error).__name__}: {error}"
            self._errors[variant] = why, float(next(self._failures))
            self._retry_at[variant] = time.monotonic() + _RETRY_LOAD_S
            self._raised[variant] = error
            return False
        self._errors.pop(variant, None)
        self._raised.pop(variant, None)
        return True


class FrontendLink:
    """The frontend's side of the connection. It counts requests, reports the counts to the planner,
    and gets the routes.

    Args:
        client: id of the frontend.
        channel: channel to its scheduler.
        router: the same channel, if there are groups.
        link: link to the planner. Default: to that of the application.
    """

    def __init__(
        self,
        spec: AppSpec,
        app_key: str,
        client: str,
        channel: Channel,
        router: GroupedChannel | None = None,
        link: PlannerLink | None = None,
    ) -> None:
        self._spec = spec
        self._client = client
        self._channel = channel
        self._router = router
        self._link = link or PlannerLink(spec, app_key)
        self._requests: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._made: dict[str, Counter[str]] = {}
        self._sizes: dict[str, Counter[int]] = {}
        self._bad: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._tuned: dict[str, Any] = {}
        self._profiles: Mapping[Key, LatencyProfile] = {}
        self._clocks: dict[str, float] = {}  # lead of other clocks over this one's, in seconds
        self._applied = ("", -1)
        self._remind = False  # whether the planner may be a new one
        self._decided_at: float | None = None
        self._running: Mapping[str, int] = {}  # number of workers in that plan's time, by kind
        self.shortfall: str | None = None  # the part that the plan cannot serve, with the reason
        self.start_s: float | None = None  # time that a worker needs to start
        self.expected: Mapping[str, Expected] = {}  # predictions for requests, by root
        self._metrics = PlanMetrics()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._report())]
        if spec.decision_log is not None:
            self._tasks.append(loop.create_task(self._read_clocks()))

    def arrived(self, stream: str, count: int = 1) -> None:
        """Count clients' requests, including refused ones."""
        self._requests[stream] += count

    def sized(self, model: str, size: int) -> None:
        """Count the size of a request for a model."""
        self._sizes.setdefault(model, Counter())[size] += 1

    def bad(self, stream: str, count: int = 1) -> None:
        """Count clients' requests that were refused, expired or late."""
        self._bad[stream] += count

    def waits(self, stream: str, count: int) -> None:
        """Count clients' requests that wait for their answer. A negative number no longer does."""
        self._waiting[stream] += count

    def finished(self, variant: str, made: Mapping[str, int] | None = None) -> None:
        """Count a request that a variant answered, and those for child tasks that it made."""
        self._finished[variant] += 1
        if made:
            self._made.setdefault(variant, Counter()).update(made)

    def tune(self, kwargs: Mapping[str, Any]) -> None:
        """Change arguments of the planner from those of the specification. From now on, every actor
        that plans the application is told."""
        self._tuned = dict(kwargs)

    async def status(self) -> dict[str, Any]:
        """Return the status of the scheduler or the groups, and of the planner. If the planner
        cannot be reached, return what is known of the plan."""
        told = await self._channel.status()
        try:
            plan: dict[str, Any] = await in_time(self._link.actor.status.remote(), 3.0)
        except Exception as error:
            plan = {"state": _UNREACHABLE, "error": f"{type(error).__name__}: {error}"}
            if self._decided_at is not None:
                plan["plan_age_s"] = time.monotonic() - self._decided_at
                plan["why"] = "the last plan holds"
        if self._router is not None:
            placed, found = plan.pop("groups", {}), told["groups"]
            names = sorted({*placed, *found})
            told["groups"] = {g: {**placed.get(g, {}), **found.get(g, {})} for g in names}
        return {**told, "plan": plan}

    async def replan(self) -> None:
        """See `Planner.replan`.

        Raises:
            ConnectionError: the planner cannot be reached.
            ConfigError: there is no plan.
        """
        await self._link.actor.replan.remote(self._says())

    async def move(self, model: str, group: str) -> None:
        """See `Planner.move`.

        Raises:
            ConnectionError: the planner cannot be reached.
            ConfigError: there are no groups, or there is no such group.
            UnknownModel: there is no such model.
        """
        await self._link.actor.move.remote(model, group)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _says(self) -> FrontendSays:
        now, router = time.monotonic(), self._router
        made = {variant: dict(counts) for variant, counts in self._made.items()}
        sizes = {model: dict(counts) for model, counts in self._sizes.items()}
        return FrontendSays(
            self._client,
            Counts(
                *(dict(self._requests), dict(self._finished), made, sizes, dict(self._bad)),
                dict(+self._waiting),
            ),
            self._spec.fingerprint,
            self._tuned,
            self._profiles if self._remind else {},
            {clock: now + ahead_s for clock, ahead_s in self._clocks.items()},
            self._applied,
            dict(router.routes) if router is not None else {},
            dict(router.queued) if router is not None else {},
            self._running,
            now,
        )

    async def _report(self) -> None:
        while True:
            try:
                heard = await self._link.ask("frontend", self._says())
                if heard is not None:
                    self._heed(heard)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.warning("planner unreachable (%r); the last plan holds", error)
                self._remind = True
                await asyncio.sleep(_AGAIN_S)
            # Without a planner, the layout is that of the config, and its age does not matter.
            if self._decided_at is not None and self._spec.planner is not None:
                self._metrics.age(time.monotonic() - self._decided_at)

    def _heed(self, heard: FrontendHears) -> None:
        self._remind = False
        if heard.plan_age_s is not None:
            self._decided_at = time.monotonic() - heard.plan_age_s
            self._running = {kind: running for kind, (_, running) in heard.replicas.items()}
        self.shortfall, self.start_s = heard.shortfall, heard.start_s
        self.expected = heard.expected
        if heard.profiles is not None:
            self._profiles = heard.profiles
        number = 0
        if heard.routing is not None and self._router is not None:
            number = heard.routing.number
            self._router.route(heard.routing)
        self._applied = heard.epoch, number
        for kind, (wanted, running) in heard.replicas.items():
            self._metrics.replicas(kind, wanted, running)
        self._metrics.planned(heard.plans)

    async def _read_clocks(self) -> None:
        """Measure how far the clocks of schedulers are ahead, for the planner's log."""
        while True:
            try:
                clocks = await asyncio.wait_for(self._channel.clocks(), _ANSWER_S)
                now = time.monotonic()
                for clock, reading in clocks.items():
                    self._clocks[clock] = reading - now
            except asyncio.CancelledError:
                raise
            except Exception as error:  # a scheduler is starting, or restarting
                logger.info("clocks of schedulers: %r", error)
            await asyncio.sleep(_READ_CLOCKS_S)
