"""A frontend's connection to the schedulers of several groups. A request goes to the group that
serves its model; the planner names that group (`FrontendLink`)."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ray_slo.core import DropReason
from ray_slo.core.recent import Recent
from ray_slo.planning.brains.brain import Routing
from ray_slo.serve.channels.channel import ActorChannel, Channel
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.messages import (
    Capacity,
    Grant,
    Heartbeat,
    Message,
    Refusal,
    Submit,
)
from ray_slo.serve.watch.metrics import GroupMetrics

_STATUS_S = 3.0
# Number of workers whose groups are remembered. It is limited, because lost workers are not
# reported.
_WORKERS_KEPT = 10_000


class GroupedChannel(Channel):
    """A channel to the schedulers of all groups.

    Args:
        on_messages: called with grants and refusals of any group.
        resubmit: function that submits these requests again, if they still wait.
        connect: function that makes the channel to one group's scheduler.
    """

    def __init__(
        self,
        spec: AppSpec,
        app_key: str,
        client: str,
        on_messages: Callable[[list[Message]], None],
        resubmit: Callable[[Iterable[int]], None],
        connect: Callable[..., Channel] = ActorChannel,
    ) -> None:
        self._spec = spec
        self._app_key = app_key
        self._client = client
        self._on_messages = on_messages
        self._resubmit = resubmit
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._channels: dict[str, Channel] = {}
        self._routes: Mapping[str, str] = {}
        self._queued: dict[int, tuple[str, str]] = {}  # (model, group) by request
        # Requests that wait for a route, and what ends the wait.
        self._unrouted: dict[int, tuple[Submit, asyncio.TimerHandle]] = {}
        self._group_of_worker: Recent[str, str] = Recent(_WORKERS_KEPT)
        self._metrics = GroupMetrics()
        self._ready = asyncio.Event()

    # -- a channel -------------------------------------------------------------------------

    def submit(self, request: Submit) -> None:
        self._stop_waiting(request.request_id)
        group = self._routes.get(request.model)
        if group is None:
            left_s = max(request.budget_s, 0.0)
            timer = self._loop.call_later(left_s, self._give_up, request.request_id)
            self._unrouted[request.request_id] = request, timer
            return
        self._queued[request.request_id] = (request.model, group)
        self._metrics.count(group, request.model, "submitted", 1)
        self._channels[group].submit(request)

    def cancel(self, request_id: int) -> None:
        self._stop_waiting(request_id)
        _, group = self._queued.pop(request_id, ("", ""))
        if group:
            self._channels[group].cancel(request_id)

    def worker_lost(self, worker: str) -> None:
        if (group := self._group_of_worker.get(worker)) is not None:
            self._channels[group].worker_lost(worker)

    def batch_withdrawn(self, batch_id: str) -> None:
        for channel in self._channels.values():  # only one of them knows the batch
            channel.batch_withdrawn(batch_id)

    async def join(self, beat: Heartbeat) -> None:
        """Wait until every model has a group that serves it."""
        await self._ready.wait()

    async def capacity(self) -> dict[str, Capacity]:
        """Return the capacity for models whose group has workers for them."""
        channels = dict(self._channels)
        found = await asyncio.gather(*(c.capacity() for c in channels.values()))
        capacity = dict(zip(channels, found, strict=True))
        return {
            model: capacity[group][model]
            for model, group in self._routes.items()
            if model in capacity.get(group, {})
        }

    async def clocks(self) -> dict[str, float]:
        found = await asyncio.gather(*(c.clocks() for c in self._channels.values()))
        return {clock: reading for clocks in found for clock, reading in clocks.items()}

    async def status(self) -> dict[str, Any]:
        """Return the status of all groups together, in the form of one group's status. The status
        of each group is in `groups`."""
        channels = dict(self._channels)
        told = await asyncio.gather(*(_status_of(channel) for channel in channels.values()))
        found = dict(zip(channels, told, strict=True))
        groups = {}
        for group in sorted({*found, *self._routes.values()}):
            models = sorted(m for m, g in self._routes.items() if g == group)
            groups[group] = {"models": models, **found.get(group, {})}
        total: dict[str, Any] = {"scheduler": "actor per group"}
        policies: set[str] = set()
        for status in found.values():
            for key, value in status.items():
                if key == "auto":  # each group has its own setting
                    continue
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
                    policies.add(value)
        total |= {"policy": ", ".join(sorted(policies))} if policies else {}
        return {**total, "routes": dict(self._routes), "groups": groups}

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    # -- for the planner ------------------------------------------------------------------

    @property
    def routes(self) -> Mapping[str, str]:
        """The group to which each model's requests go."""
        return self._routes

    @property
    def queued(self) -> Counter[tuple[str, str]]:
        """Number of requests that wait in a group, by (model, group)."""
        return Counter(self._queued.values())

    def route(self, routing: Routing) -> None:
        """Use these routes from now on. A model without a new route keeps its current one, because
        the planner may be new and learn the routes from here."""
        for group in routing.groups:
            if group not in self._channels:
                self._channels[group] = self._connect(
                    self._spec.in_group(group),
                    f"{self._app_key}#{group}",
                    self._client,
                    functools.partial(self._on_group_messages, group),
                    functools.partial(self._on_reset, group),
                )
        routes = {**self._routes, **routing.routes}
        if routes != self._routes:
            self._metrics.routed(self._routes, routes)
        self._routes = routes
        if routing.complete:
            self._ready.set()
        if routed := [i for i, (request, _) in self._unrouted.items() if request.model in routes]:
            self._resubmit(routed)

    # -- inside ----------------------------------------------------------------------------

    def _stop_waiting(self, request_id: int) -> None:
        """Forget that a request waits for a route, if it does."""
        _, timer = self._unrouted.pop(request_id, (None, None))
        if timer is not None:
            timer.cancel()

    def _give_up(self, request_id: int) -> None:
        """Refuse a request for which no route came in time."""
        del self._unrouted[request_id]
        self._on_messages([Refusal((request_id,), DropReason.NO_WORKER.value, math.nan)])

    def _on_reset(self, group: str) -> None:
        ids = [i for i, (_, g) in self._queued.items() if g == group]
        for i in ids:  # some may be too late to be sent again
            del self._queued[i]
        self._resubmit(ids)

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
                    # The request's model has left the group to which the request was sent.
                    if moved and self._routes.get(model, group) != group:
                        self._queued.pop(i, None)
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


async def _status_of(channel: Channel) -> dict[str, Any]:
    """Return a scheduler's status, or the reason why there is none."""
    try:
        return await asyncio.wait_for(channel.status(), _STATUS_S)
    except Exception as error:
        return {"state": "unreachable", "error": f"{type(error).__name__}: {error}"}
