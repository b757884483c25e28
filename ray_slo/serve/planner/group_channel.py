"""Both ends of a grouped application: how a frontend reaches the schedulers of several groups, and
how a worker takes its place in one.

Both ask the planner by long polls what they should do and tell it what they have done. While it
cannot be reached, they go on with what it said last.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ray_slo.core import DropReason
from ray_slo.planning.brains.groups import Wanted
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.messages import (
    Capacity,
    Grant,
    Heartbeat,
    Message,
    Refusal,
    Submit,
)
from ray_slo.serve.planner.app_actor import AGAIN_S, AppActorLink, Follower, status_of
from ray_slo.serve.planner.groups_actor import (
    FrontendSays,
    Routes,
    WorkerSays,
    get_or_create_planner,
)
from ray_slo.serve.scheduler.channel import ActorChannel, Channel, WorkerLink
from ray_slo.serve.watch.metrics import GroupMetrics

logger = logging.getLogger(__name__)

_RETRY_LOAD_S = 20.0


class GroupedChannel(Channel):
    """A frontend's side of all schedulers: a request goes to the group that serves its model.

    Args:
        on_messages: grants and refusals of any group.
        resubmit: submit these again, if they still wait.
    """

    def __init__(
        self,
        spec: AppSpec,
        app_key: str,
        client: str,
        on_messages: Callable[[list[Message]], None],
        resubmit: Callable[[Iterable[int]], None],
    ) -> None:
        self._spec = spec
        self._app_key = app_key
        self._client = client
        self._on_messages = on_messages
        self._resubmit = resubmit
        self._loop = asyncio.get_running_loop()
        self._planner = AppActorLink(functools.partial(get_or_create_planner, spec, app_key), spec)
        self._channels: dict[str, ActorChannel] = {}
        self._routes: dict[str, str] = {}
        self._applied = ("", -1)
        self._counts = dict.fromkeys(spec.models, 0)
        self._newest = -1  # id of a request: what comes again is not counted again
        self._queued: dict[int, tuple[str, str]] = {}  # (model, group) by request
        self._group_of_worker: dict[str, str] = {}
        self._metrics = GroupMetrics()
        self._ready = asyncio.Event()
        self._decided_at: float | None = None  # when the planner last decided
        self._follower = self._loop.create_task(self._follow())

    # -- a channel -------------------------------------------------------------------------

    def submit(self, request: Submit) -> None:
        if request.request_id > self._newest:
            self._newest = request.request_id
            self._counts[request.model] += 1
        group = self._routes.get(request.model)
        if group is None:
            reason = DropReason.NO_WORKER.value
            refusals: list[Message] = [Refusal((request.request_id,), reason, math.nan)]
            self._loop.call_soon(self._on_messages, refusals)
            return
        self._queued[request.request_id] = (request.model, group)
        self._metrics.count(group, request.model, "submitted", 1)
        self._channels[group].submit(request)

    def refused(self, model: str, count: int) -> None:
        """Requests that were not submitted; they are demand all the same."""
        self._counts[model] += count

    def cancel(self, request_id: int) -> None:
        _, group = self._queued.pop(request_id, ("", ""))
        if group:
            self._channels[group].cancel(request_id)

    def worker_lost(self, worker: str) -> None:
        if (group := self._group_of_worker.get(worker)) is not None:
            self._channels[group].worker_lost(worker)

    def batch_withdrawn(self, batch_id: str) -> None:
        for channel in self._channels.values():  # all but one have not heard of it
            channel.batch_withdrawn(batch_id)

    async def join(self, beat: Heartbeat) -> None:
        """Wait until every model has a group that serves it."""
        await self._ready.wait()

    async def capacity(self) -> dict[str, Capacity]:
        """Of models that are routed to a group that has workers for them."""
        channels = dict(self._channels)
        found = await asyncio.gather(*(c.capacity() for c in channels.values()))
        capacity = dict(zip(channels, found, strict=True))
        return {
            model: capacity[group][model]
            for model, group in self._routes.items()
            if model in capacity.get(group, {})
        }

    async def status(self) -> dict[str, Any]:
        """All groups together in the form of one, and each in `groups`."""
        channels = dict(self._channels)
        found = dict(
            zip(
                channels,
                await asyncio.gather(*(status_of(c.status()) for c in channels.values())),
                strict=True,
            )
        )
        plan = await status_of(self._planner_status())
        if plan.get("state") == "unreachable" and self._decided_at is not None:
            plan["plan_age_s"] = self._loop.time() - self._decided_at
            plan["why"] = "the last plan holds"
        placed: dict[str, Any] = plan.pop("groups", {})
        for group in {*found, *self._routes.values()} - placed.keys():
            models = sorted(m for m, g in self._routes.items() if g == group)
            placed[group] = {"models": models}
        groups = {name: {**placed[name], **found.get(name, {})} for name in sorted(placed)}
        total: dict[str, Any] = {"scheduler": "actor per group"}
        for status in found.values():
            for key, value in status.items():
                if key in ("queued", "counts"):
                    sums = total.setdefault(key, {})
                    for name, count in value.items():
                        sums[name] = sums.get(name, 0) + count
                elif key == "preemptions":
                    total.setdefault(key, []).extend(value)
                elif isinstance(value, dict):
                    total.setdefault(key, {}).update(value)
                elif key.endswith("_ms"):
                    total[key] = max(total.get(key, value), value, key=abs)
                elif key == "policy":
                    total[key] = value
        return {**total, "routes": dict(self._routes), "groups": groups, "plan": plan}

    async def _planner_status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._planner.actor.status.remote()
        return status

    def close(self) -> None:
        self._follower.cancel()
        for channel in self._channels.values():
            channel.close()

    # -- for people ------------------------------------------------------------------------

    async def move(self, model: str, group: str) -> None:
        """See `PlannerActor.move`.

        Raises:
            ConnectionError: the planner cannot be reached.
        """
        await self._planner.actor.move.remote(model, group)

    async def replan(self) -> None:
        """See `PlannerActor.replan`.

        Raises:
            ConnectionError: the planner cannot be reached.
        """
        await self._planner.actor.replan.remote(self._says())

    # -- inside ----------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                answer = await self._planner.ask("frontend", self._says())
                if answer is not None:
                    self._apply(answer)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.warning("planner unreachable (%r); the last plan holds", error)
                await asyncio.sleep(AGAIN_S)
            # Without a planner the layout is the configuration's, and no age is too old.
            if self._decided_at is not None and self._spec.planner is not None:
                self._metrics.plan_age(self._loop.time() - self._decided_at)

    def _says(self) -> FrontendSays:
        return FrontendSays(
            self._client,
            self._applied,
            dict(self._routes),
            dict(self._counts),
            self._spec.fingerprint,
        )

    def _apply(self, answer: Routes) -> None:
        for group in answer.groups:
            if group not in self._channels:
                self._channels[group] = ActorChannel(
                    self._spec,
                    f"{self._app_key}#{group}",
                    self._client,
                    functools.partial(self._on_group_messages, group),
                    functools.partial(self._on_reset, group),
                )
        if answer.routes != self._routes:
            self._metrics.routed(self._routes, answer.routes)
        self._routes = answer.routes
        self._applied = answer.token
        self._decided_at = self._loop.time() - answer.plan_age_s
        self._metrics.planned(answer.plans)
        if answer.complete:
            self._ready.set()

    def _on_reset(self, group: str) -> None:
        self._resubmit([i for i, (_, g) in self._queued.items() if g == group])

    def _on_group_messages(self, group: str, messages: list[Message]) -> None:
        kept: list[Message] = []
        again: list[int] = []
        for message in messages:
            if isinstance(message, Grant):
                self._group_of_worker[message.worker] = group
                self._metrics.count(group, message.model, "granted", len(message.request_ids))
            elif isinstance(message, Refusal):
                moved = message.reason == DropReason.NO_WORKER.value
                ids = []
                for i in message.request_ids:
                    model, _ = self._queued.get(i, ("", ""))
                    # Its model has left the group that it was sent to.
                    if moved and self._routes.get(model, group) != group:
                        again.append(i)
                    else:
                        ids.append(i)
                        self._metrics.count(group, model, "refused", 1)
                message = message._replace(request_ids=tuple(ids))
            if isinstance(message, Grant | Refusal):
                for i in message.request_ids:
                    self._queued.pop(i, None)
            kept.append(message)
        self._on_messages(kept)
        if again:
            self._resubmit(again)


class _Worker(Protocol):
    """What `Membership` needs of a worker."""

    id: str

    async def load(self, variants: Iterable[str]) -> None: ...
    async def unload(self, variants: Iterable[str]) -> None: ...
    def check_slo(self) -> None: ...
    async def join(self, link: WorkerLink) -> None: ...
    def will_load(self, variants: int) -> None: ...
    @property
    def announced(self) -> frozenset[str]: ...


class Membership(Follower[Wanted]):
    """A worker's place: which group it serves in, and with which models.

    Args:
        home: the group that its kind belongs to; None in a pool.
    """

    def __init__(self, spec: AppSpec, app_key: str, home: str | None, worker: _Worker) -> None:
        super().__init__(
            AppActorLink(functools.partial(get_or_create_planner, spec, app_key), spec)
        )
        self._spec = spec
        self._app_key = app_key
        self._home = home
        self._worker = worker
        self._group: str | None = None
        self._failed: dict[str, tuple[str, float]] = {}  # (why, when to try again)
        self._loaded: set[str] = set()
        self._variants: dict[str, list[str]] = {model: [] for model in spec.models}
        for key, ref in spec.variants().items():
            self._variants[ref.model].append(key)

    def _says(self) -> WorkerSays:
        return WorkerSays(
            self._worker.id,
            self._home,
            self._group,
            frozenset(m for m, vs in self._variants.items() if self._worker.announced & set(vs)),
            {model: why for model, (why, _) in self._failed.items()},
            self._spec.fingerprint,
        )

    async def _first(self, wanted: Wanted) -> bool:
        self._worker.will_load(sum(len(self._variants[model]) for model in wanted.models))
        for model in wanted.models:
            await self._worker.load(self._variants[model])
            self._worker.check_slo()
            self._loaded.add(model)
        self._group = wanted.group
        await self._worker.join(self._link_to(wanted.group))
        return True

    async def _do(self, wanted: Wanted) -> None:
        models = set(wanted.models)
        now = time.monotonic()
        self._failed = {m: f for m, f in self._failed.items() if m in models}
        for model in wanted.models:
            if model in self._loaded or now < self._failed.get(model, ("", 0.0))[1]:
                continue
            try:
                await self._worker.load(self._variants[model])
                self._worker.check_slo()
            except Exception as error:
                await self._worker.unload(self._variants[model])
                logger.exception("could not load %s", model)
                why = f"{type(error).__name__}: {error}"
                self._failed[model] = (why, time.monotonic() + _RETRY_LOAD_S)
                continue
            self._failed.pop(model, None)
            self._loaded.add(model)
        if wanted.group != self._group:
            self._group = wanted.group
            await self._worker.join(self._link_to(wanted.group))
        if extra := self._loaded - models:
            await self._worker.unload(v for model in extra for v in self._variants[model])
            self._loaded -= extra

    def _link_to(self, group: str) -> WorkerLink:
        return WorkerLink(self._spec, f"{self._app_key}#{group}")
