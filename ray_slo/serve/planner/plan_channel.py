"""Both ends of a planned application: what a frontend tells the plan actor, and how a worker comes
to run what the plan says. While the actor cannot be reached, both go on as before.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.planning.brains.brain import (
    Counts,
    FrontendHears,
    FrontendSays,
    Key,
    Wanted,
    WorkerSays,
)
from ray_slo.record.writer import clock_id
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.planner.actor import get_or_create_plan
from ray_slo.serve.planner.app_actor import AGAIN_S, AppActorLink, Follower, status_of
from ray_slo.serve.watch.metrics import PlanMetrics

logger = logging.getLogger(__name__)

_REPORT_S = 0.5
_RETRY_LOAD_S = 20.0


class PlanReporter:
    """A frontend's line to the plan actor: counts, and tells what was counted twice a second."""

    def __init__(self, spec: AppSpec, app_key: str, client: str) -> None:
        self._spec = spec
        self._client = client
        self._link = AppActorLink(functools.partial(get_or_create_plan, spec, app_key), spec)
        self._requests = 0
        self._finished: Counter[str] = Counter()
        self._made: dict[str, Counter[str]] = {}
        self._sizes: Counter[int] = Counter()
        self._tuned: dict[str, Any] = {}
        self._profiles: Mapping[Key, LatencyProfile] = {}
        self._remind = False  # the actor may be a new one
        self._decided_at: float | None = None
        self.shortfall: str | None = None  # what the plan cannot do, and why
        self._has_log = spec.decision_log is not None and spec.embedded  # the scheduler's, here
        self._metrics = PlanMetrics()
        self._task = asyncio.get_running_loop().create_task(self._report())

    def arrived(self, size: int = 1, count: int = 1) -> None:
        """Clients' requests, refused ones included."""
        self._requests += count
        self._sizes[size] += count

    def finished(self, variant: str, made: Mapping[str, int] | None = None) -> None:
        """A request was answered by a variant, and made so many requests for child tasks."""
        self._finished[variant] += 1
        if made:
            self._made.setdefault(variant, Counter()).update(made)

    def tune(self, kwargs: Mapping[str, Any]) -> None:
        """Change arguments of the planner, as against the specification's; told from now on, to
        every actor that plans the application."""
        self._tuned = dict(kwargs)

    async def status(self) -> dict[str, Any]:
        """The actor's, or what is known of the plan without it."""
        status = await status_of(self._status())
        if status.get("state") == "unreachable" and self._decided_at is not None:
            status["plan_age_s"] = time.monotonic() - self._decided_at
            status["why"] = "the last plan holds"
        return status

    async def replan(self) -> None:
        """See `PlanActor.replan`.

        Raises:
            ConnectionError: the actor cannot be reached.
            ConfigError: there is no plan.
        """
        await self._link.actor.frontend.remote(self._says())
        await self._link.actor.replan.remote()

    def close(self) -> None:
        self._task.cancel()

    async def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._link.actor.status.remote()
        return status

    def _says(self) -> FrontendSays:
        made = {variant: dict(counts) for variant, counts in self._made.items()}
        counts = Counts({"": self._requests}, dict(self._finished), made, dict(self._sizes))
        profiles = self._profiles if self._remind else {}
        known = self._client, counts, self._spec.fingerprint, self._tuned, profiles
        return FrontendSays(*known, {clock_id(): time.monotonic()} if self._has_log else {})

    async def _report(self) -> None:
        while True:
            try:
                heard: FrontendHears = await self._link.ask("frontend", self._says())
                self._remind = False
                if heard.plan_age_s is not None:
                    self._decided_at = time.monotonic() - heard.plan_age_s
                self.shortfall = heard.shortfall
                if heard.profiles is not None:
                    self._profiles = heard.profiles
                for kind, (wanted, running) in heard.replicas.items():
                    self._metrics.replicas(kind, wanted, running)
                self._metrics.planned(heard.plans)
                await asyncio.sleep(_REPORT_S)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.warning("planner unreachable (%r); the last plan holds", error)
                self._remind = True
                await asyncio.sleep(AGAIN_S)
            if self._decided_at is not None:
                self._metrics.age(time.monotonic() - self._decided_at)


class _Worker(Protocol):
    """What `PlanFollower` needs of a worker."""

    id: str

    @property
    def offered(self) -> frozenset[str]: ...
    @property
    def assigned(self) -> Assigned | None: ...
    @property
    def profiles(self) -> dict[str, LatencyProfile]: ...
    async def load(
        self, variants: Iterable[str], known: Mapping[str, LatencyProfile] | None = None
    ) -> None: ...
    async def assign(self, assigned: Assigned | None) -> None: ...
    async def unload(self, variants: Iterable[str]) -> None: ...
    def check_slo(self) -> None: ...
    def will_load(self, variants: int) -> None: ...


class PlanFollower(Follower[Wanted]):
    """A worker's side of the plan: has loaded and does what is wanted.

    Make before break: the next variant is loaded while the last one serves, then the scheduler is
    told what the worker does now, then the last one finishes its batches and goes. With
    `make_before_break: false` it goes first, and the worker serves nothing meanwhile.
    """

    def __init__(self, spec: AppSpec, app_key: str, kind: str, worker: _Worker) -> None:
        super().__init__(AppActorLink(functools.partial(get_or_create_plan, spec, app_key), spec))
        self._spec = spec
        self._kind = kind
        self._worker = worker
        self._refs = spec.variants()
        self._failures = itertools.count(1)
        self._errors: dict[str, tuple[str, float]] = {}  # why, and number of the failure
        self._retry_at: dict[str, float] = {}
        self._raised: dict[str, Exception] = {}
        self._ready = False
        self._started = time.monotonic()
        planner = spec.planner
        self._make_first = planner is None or planner.make_before_break

    def leave(self) -> None:
        """Tell the actor, if it is there, that the worker is going. Does not wait."""
        try:
            self._link.actor.leave.remote(self._worker.id)
        except Exception as error:  # it will notice our silence
            logger.info("could not take leave: %r", error)

    def _says(self) -> WorkerSays:
        worker = self._worker
        return WorkerSays(
            worker.id,
            self._kind,
            worker.offered,
            worker.assigned,
            worker.profiles,
            dict(self._errors),
            self._spec.fingerprint,
            self._ready,
            time.monotonic() - self._started,
        )

    async def follow(self) -> None:
        self._ready = True
        await super().follow()

    async def _first(self, wanted: Wanted) -> bool:
        self._worker.will_load(len(wanted.keep))
        await self._do(wanted)
        if wanted.assigned is None:
            served = {self._refs[key].model for key in self._worker.offered}
            for key, error in self._raised.items():
                task = self._refs[key].model
                if task in served:
                    continue
                if {v for v, ref in self._refs.items() if ref.model == task} <= {*wanted.keep}:
                    raise error  # none of its variants can be loaded
                return False  # the planner hears of it, and wants something else
        self._worker.check_slo()
        return True

    async def _do(self, wanted: Wanted) -> None:
        keep, worker = dict.fromkeys(wanted.keep), self._worker
        self._errors = {v: e for v, e in self._errors.items() if v in keep}
        self._raised = {v: e for v, e in self._raised.items() if v in keep}
        missing = [v for v in keep if v not in worker.offered]
        extra = worker.offered - keep.keys()
        if missing and extra and not self._make_first:
            await worker.assign(None)
            await worker.unload(extra)
        complete = True
        for variant in missing:
            complete &= await self._load(variant, wanted.profiles)
        assigned = wanted.assigned
        possible = assigned is None or assigned.variant in worker.offered
        if possible and assigned != worker.assigned:
            await worker.assign(assigned)
        if complete and (extra := worker.offered - keep.keys()):
            await worker.unload(extra)

    async def _load(self, variant: str, known: Mapping[str, LatencyProfile]) -> bool:
        if time.monotonic() < self._retry_at.get(variant, 0.0):
            return False
        try:
            await self._worker.load([variant], known)
        except Exception as error:
            logger.exception("could not load %s", variant)
            why = f"{type(error).__name__}: {error}"
            self._errors[variant] = why, float(next(self._failures))
            self._retry_at[variant] = time.monotonic() + _RETRY_LOAD_S
            self._raised[variant] = error
            return False
        self._errors.pop(variant, None)
        self._raised.pop(variant, None)
        return True
