"""The frontend: a Serve replica that owns every request from its arrival to its answer.

It reads the deadline, runs `preprocess`, sends metadata to the scheduler, and holds the payload. It
sends its share of a granted batch to the worker in one call. It answers once: with the result, or
with a typed error; if a worker dies, it tries again first. In a pipeline it does so for every task
that a client's item reaches (`tree`), under one deadline.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ray_slo.core.policy import Expected
from ray_slo.core.seldom import Seldom
from ray_slo.core.text import quoted
from ray_slo.serve import grpc
from ray_slo.serve.app.settings import Settings
from ray_slo.serve.channels.channel import ActorChannel, Channel, EmbeddedChannel
from ray_slo.serve.channels.group_channel import GroupedChannel
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.deadlines import ATTEMPT_HEADER, CAPACITY_HEADER, CLASS_HEADER, WHOLE_HEADER
from ray_slo.serve.errors import (
    FAULTS,
    BadInput,
    ConfigError,
    SLOError,
    UnknownModel,
    http_response,
    outcome_of,
)
from ray_slo.serve.frontend.answer import Answer, encoded, in_parts
from ray_slo.serve.frontend.hooks import Hooks
from ray_slo.serve.frontend.http import headers_of, name_in
from ray_slo.serve.frontend.intake import Intake
from ray_slo.serve.frontend.ledger import Asked, Ledger
from ray_slo.serve.frontend.service import Service
from ray_slo.serve.frontend.surroundings import Surroundings
from ray_slo.serve.frontend.workers import Workers, check_names
from ray_slo.serve.memory import vitals
from ray_slo.serve.messages import Heartbeat, Progress
from ray_slo.serve.planner.links import FrontendLink
from ray_slo.serve.planner.plugin import planner_class
from ray_slo.serve.protos import DescribeReply, InferReply
from ray_slo.serve.proxy.door import mode_in_words
from ray_slo.serve.ray_private.http_head import arrival_here
from ray_slo.serve.ray_private.ingress import answer_with
from ray_slo.serve.ray_private.peers import asked_all
from ray_slo.serve.user_code import sendable
from ray_slo.serve.watch.lately import Seen, together
from ray_slo.serve.watch.page import StatusPage

logger = logging.getLogger(__name__)
logger.addFilter(Seldom(10))

_REFRESH_S = 1.0  # seconds between two updates of gauges and capacity
_PEERS_S = 2.0  # seconds for other frontends to send their counts
_NO_GROUPS = "the application has no serving groups; name some under `groups`"


class Frontend:
    """Ingress of an application: receives HTTP and gRPC requests and handle calls."""

    async def __init__(  # type: ignore[misc]
        self, spec: AppSpec, workers: dict[str, Any], around: Surroundings | None = None
    ) -> None:
        around = around or Surroundings.of_replica()
        check_names(around.deployment, spec.deployment_name, workers)
        kinds = {kind: handle.deployment_name for kind, handle in workers.items()}
        self._settings = Settings(spec, around.app, around.deployment, kinds, around.details)
        self._spec = spec = await self._settings.begin()
        self._names = around.app, around.deployment
        self._metrics = around.metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoding = asyncio.Lock()
        app_key = f"{around.app}#{around.deployment}"
        self._hooks = Hooks(spec)
        self._channel, self._plan = self._links(app_key, around.client)
        self._workers = Workers(
            spec,
            around,
            workers,
            self._channel,
            spawn=self._spawn,
            plan_says=self._plan_says,
        )
        self._ledger = Ledger(
            spec,
            self._channel,
            self._workers,
            self._metrics,
            clock=time.monotonic,  # uvloop's loop.time() has a resolution of only 1 ms
            spawn=self._spawn,
            plan_says=self._plan_says,
        )
        demand = around.demand or self._plan
        self._service = Service(spec, self._ledger, self._hooks, self._metrics, demand)
        self._intake = Intake(
            spec, around, self._hooks, self._workers.capacity_of, self._service.turned_away
        )
        self._page = None
        if spec.status_page:
            self._page = StatusPage(around.app, self.slo_status, spec.status_hosts)
        await self._workers.begin()
        answer_with(self.answer_http)
        self._spawn(self._refresh())
        self._spawn(self._settings.watch())

    def _links(self, app_key: str, client: str) -> tuple[Channel, FrontendLink | None]:
        """Return the connection to the scheduler or to those of all groups, and the connection to
        the planner if there is one."""

        def heard(messages: Any) -> None:
            self._ledger.heard(messages)

        def resubmit(request_ids: Any = None) -> None:
            self._ledger.resubmit(request_ids)

        spec = self._spec
        if spec.grouped:
            groups = GroupedChannel(spec, app_key, client, heard, resubmit)
            return groups, FrontendLink(spec, app_key, client, groups, groups)
        channel: Channel
        if spec.embedded:
            channel = EmbeddedChannel(spec, heard)
        else:
            channel = ActorChannel(spec, app_key, client, heard, resubmit)
        return channel, FrontendLink(spec, app_key, client, channel) if spec.planned else None

    # -- entry points ---------------------------------------------------------------------------

    async def __call__(
        self,
        *items: Any,
        model: str | None = None,
        latency_slo_ms: float | None = None,
        slo_class: str | None = None,
        response_metadata: bool = False,
        **others: Any,
    ) -> Any:
        """Answer one item.

        Args:
            items: one item. It is what the model's `preprocess` takes (or its batch method, item by
                item), or an HTTP request when Serve's proxy calls.
            model: model or pipeline; needed if the application serves several.
            latency_slo_ms: SLO of this call, in milliseconds from now.
            slo_class: one of the model's `slo_classes`. Its SLO is used if `latency_slo_ms` is not
                given.
            response_metadata: return an `Answer` instead of only the result.

        Raises:
            RefusedEarly, Expired, WorkerLost, UnknownModel, BadInput: see `ray_slo.errors`.
            Exception: the error that the user's method raised for this request's batch.
        """
        arrival = time.monotonic()
        item = _only(items, others)
        if isinstance(item, HttpRequest):
            return await self.answer_http(item)
        name = self._intake.model_name(model)
        asked = self._intake.asked(name, arrival, latency_slo_ms, slo_class)
        await self._check_ready(asked)
        async with self._intake.admitted(asked):
            try:
                answer = await self._service.answer(asked, item)
            except Exception as error:  # its caller is in another process
                is_ours = type(error).__module__ == SLOError.__module__
                if is_ours or (sent := sendable(error)) is error:
                    raise
                raise sent from None
        return answer if response_metadata else answer.result

    async def answer_http(self, request: HttpRequest) -> Response:
        """Answer an HTTP request. Errors are answers, too."""
        came = arrival_here(request.scope)
        arrival = time.monotonic() if came is None else came
        headers = headers_of(request)
        try:
            page = self._page and await self._page.answer(request, _path(request))
            response = page or await self._responded(request, headers, arrival)
        except Exception as error:
            _log(error)
            response = http_response(error, details=self._spec.error_details)
        if WHOLE_HEADER in headers:  # the answer goes through the door in Serve's proxy
            response.headers[CAPACITY_HEADER] = self._intake.capacity_said(
                _path(request), headers.get(CLASS_HEADER)
            )
        return response

    async def _responded(
        self, request: HttpRequest, headers: Mapping[str, str], arrival: float
    ) -> Response:
        path, intake = _path(request), self._intake
        if request.method in ("GET", "HEAD") and not path:
            return JSONResponse(intake.describe())
        name = intake.model_name(path or None)
        if request.method in ("GET", "HEAD"):
            return JSONResponse(intake.describe())
        if request.method != "POST":
            return JSONResponse(
                {
                    "error": "MethodNotAllowed",
                    "reason": "method_not_allowed",
                    "message": "POST an item, or GET a description",
                },
                status_code=405,
                headers={"allow": "GET, POST"},
            )
        asked = intake.asked_http(request, headers, name, arrival)
        intake.heed_proxy(headers, asked)
        await self._check_ready(asked)
        kind = headers.get("content-type", "")
        body = await intake.body(request, kind, asked)
        async with intake.admitted(asked, kind):
            item = await intake.item(kind, body, name)
            return await _response(await self._service.answer(asked, item), self._encoding)

    async def Infer(self, request: Any, grpc_context: Any) -> Any:  # noqa: N802
        """Answer a gRPC call (`protos/inference.proto`). Errors are set in `grpc_context`."""
        arrival, intake = time.monotonic(), self._intake
        metadata = grpc_context.invocation_metadata()
        headers = dict(metadata)
        try:
            _check_application(self._names[0], headers)
            name = intake.model_name(request.model or None)
            asked, kind, body = intake.asked_grpc(request, metadata, name, arrival)
            intake.heed_proxy(headers, asked)
            await self._check_ready(asked)
            async with intake.admitted(asked):
                item = await intake.item(kind, body, name)
                answer = await self._service.answer(asked, item)
            return await _reply(answer, self._encoding)
        except Exception as error:
            _log(error)
            grpc.fail(grpc_context, error, self._spec.error_details)
            return InferReply()
        finally:
            if ATTEMPT_HEADER in headers:  # the answer goes through the door in Serve's proxy
                capacity = (
                    CAPACITY_HEADER,
                    intake.capacity_said(request.model, headers.get(CLASS_HEADER)),
                )
                # Serve adds it to its own list, so it must be a list.
                told = [*grpc_context.trailing_metadata(), capacity]
                grpc_context.set_trailing_metadata(told)

    async def Describe(self, request: Any, grpc_context: Any) -> Any:  # noqa: N802
        """Return the description that GET returns over HTTP."""
        try:
            _check_application(self._names[0], dict(grpc_context.invocation_metadata()))
        except UnknownModel as error:
            grpc.fail(grpc_context, error)
            return DescribeReply()
        return DescribeReply(json=json.dumps(self._intake.describe()))

    async def _check_ready(self, asked: Asked) -> None:
        """Check that a worker can serve the request now.

        Raises:
            NotReady: none can. The message has the reason.
        """
        refusal = await self._workers.refusal(asked.model, asked.slo_s)
        if refusal is not None:
            self._metrics.unanswered(asked.stream, "refused", refusal.reason)
            self._service.turned_away(asked.stream, 1)
            raise refusal

    def _plan_says(self) -> tuple[str | None, float | None]:
        """Return what the plan cannot serve, and why; and how long a worker's start took."""
        return (None, None) if self._plan is None else (self._plan.shortfall, self._plan.start_s)

    def _expected(self) -> dict[str, Expected]:
        """Return the predictions for clients' requests. They come from the current plan, otherwise
        from the policy."""
        asked = self._spec.trees
        planned = dict(self._plan.expected) if self._plan is not None else {}
        if "" in planned:
            planned |= dict.fromkeys(asked, planned[""])
        found = {**self._workers.expected, **planned}
        return {name: found[name] for name in asked if name in found}

    # -- what Serve, workers and operators call --------------------------------------------

    def check_health(self) -> None:
        """Check whether user code hangs. Serve calls this.

        Raises:
            RuntimeError: it does. Serve then replaces the replica.
        """
        self._hooks.check()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change arguments of the planner while it runs: `{"planner": {…}}`. Serve calls this.

        Raises:
            ConfigError: another key, or arguments that the planner does not take.
        """
        planner = self._spec.planner
        if set(user_config) != {"planner"} or planner is None or not planner.tunable:
            raise ConfigError(
                "user_config of a frontend: {'planner': {…}}, with arguments of a planner whose "
                "arguments can be changed while it runs ('auto', 'kairos'); "
                f"got {quoted(user_config)}"
            )
        try:
            found = planner_class(planner.name).arguments(
                {**planner.kwargs, **user_config["planner"]}
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"user_config.{error}") from None
        assert self._plan is not None
        self._plan.tune({name: found[name] for name in user_config["planner"]})

    async def slo_heartbeat(self, beat: Heartbeat) -> None:
        """Take a worker's heartbeat, if the scheduler runs here."""
        await self._channel.heartbeat(beat)

    async def slo_progress(self, progress: Progress) -> None:
        """Take the progress of a worker that is starting."""
        self._workers.startup.heard(progress, time.monotonic())

    async def slo_move(self, model: str, group: str) -> None:
        """Serve a model in another group from now on, without a failed request.

        This returns when the move is decided. When it is done, `slo_status()["plan"]["state"]` is
        "settled".

        Raises:
            ConfigError: there are no groups, or there is no such group.
            UnknownModel: there is no such model.
        """
        if self._plan is None:
            raise ConfigError(_NO_GROUPS)
        await self._plan.move(model, group)

    async def slo_replan(self) -> None:
        """Plan the groups or the pipeline now. Return when this is done.

        Raises:
            ConfigError: there is no planner.
        """
        if self._plan is None:
            raise ConfigError(_NO_GROUPS)
        await self._plan.replan()

    async def slo_seen(self) -> Seen:
        """Return the counts of this frontend. Another frontend asks for them to make a status."""
        return self._metrics.seen_lately(len(self._ledger))

    async def _all_seen(self) -> list[Seen]:
        """Return the counts of all frontends. If one does not answer, return only those of this
        frontend."""
        if self._spec.num_frontends > 1:
            try:
                return await asked_all(*self._names, "slo_seen", _PEERS_S)
            except Exception as error:
                logger.info("other frontends do not say what they know: %r", error)
        return [await self.slo_seen()]

    async def slo_status(self) -> dict[str, Any]:
        """Return the status for `ray-slo status` and `ray-slo top`."""
        return {
            **self._intake.describe(),
            "mode": mode_in_words(),
            **together(await self._all_seen()),
            "num_frontends": self._spec.num_frontends,
            **await self._settings.status(),
            "process": vitals(pending=len(self._ledger), owned=self._service.num_owned),
            "expected": {name: e._asdict() for name, e in self._expected().items()},
            "overhead_ms": 1e3 * self._ledger.overhead_s,
            **self._workers.startup.status(time.monotonic()),
            **await (self._channel if self._plan is None else self._plan).status(),
        }

    # -- life ------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            self._metrics.refresh(len(self._ledger), self._expected())
            await self._workers.refresh(is_waited_for=bool(self._ledger))

    def __del__(self) -> None:
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        for part in ("_hooks", "_channel", "_plan", "_workers"):
            if (found := getattr(self, part, None)) is not None:
                found.close()


def _only(items: Sequence[Any], others: Mapping[str, Any]) -> Any:
    """Return the item of a call with a handle.

    Raises:
        BadInput: there is not exactly one, or an argument that no call takes.
    """
    if not items and set(others) == {"item"}:
        return others["item"]
    if others:
        raise BadInput(
            f"a call takes no argument {next(iter(others))!r}: put it into the item; a call takes "
            "handle.remote(item) with model, latency_slo_ms, slo_class and response_metadata"
        )
    if len(items) != 1:
        raise BadInput(
            f"a call takes one item, got {len(items)}: put them into one, such as "
            "handle.remote((a, b)) or handle.remote({'a': a, 'b': b}); with several items, call "
            "once for each"
        )
    return items[0]


def _check_application(app: str, metadata: Mapping[str, str]) -> None:
    """Check that a gRPC call is for this application. Serve passes all calls to the only
    application that is there, also those for one that was deleted.

    Raises:
        UnknownModel: it is for another one.
    """
    named = metadata.get("application")
    if named and named != app:
        said = f"application {quoted(named)} is not there; choose {app}"
        raise UnknownModel(said, valid=[app])


def _log(error: Exception) -> None:
    """Log an error of the user's code. What it says to clients is no failure."""
    if not isinstance(error, SLOError) and outcome_of(error)[0] in FAULTS:
        logger.error("request failed", exc_info=error)


def _path(request: HttpRequest) -> str:
    return name_in(request.scope.get("path", ""), request.scope.get("root_path", ""))


async def _response(answer: Answer, encoding: asyncio.Lock) -> Response:
    """Return an answer as an HTTP response.

    Raises:
        TypeError, ValueError: the result is not JSON.
    """
    result = answer.result
    if isinstance(result, Response):
        result = copy.copy(result)  # the user's code may return it again
        result.raw_headers = list(result.raw_headers)
        vars(result).pop("_headers", None)  # Starlette's view of the other list
        result.headers.update(answer.headers())
        return result
    if isinstance(result, bytes):
        response = in_parts(result, "application/octet-stream")
    else:
        response = in_parts(await encoded(result, encoding), "application/json")
    # Starlette's own way with `headers` looks for names that cannot be among ours.
    response.raw_headers += [(k.encode(), v.encode("latin-1")) for k, v in answer.headers().items()]
    return response


async def _reply(answer: Answer, encoding: asyncio.Lock) -> Any:
    """Return an answer as a gRPC reply. The errors are those of `_response`."""
    is_sent_as_it_is = isinstance(answer.result, bytes | Response)
    return grpc.reply_of(
        answer, None if is_sent_as_it_is else await encoded(answer.result, encoding)
    )
