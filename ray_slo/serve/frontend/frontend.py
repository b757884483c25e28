"""The frontend: a Serve replica that owns every request from its arrival to its answer.

It reads the deadline, runs `preprocess`, sends metadata to the scheduler, holds the payload, sends
its share of a granted batch to the worker in one call, and answers once: with the result, with a
typed error, or after trying again because a worker died. In a pipeline it does so for every task
that a client's item comes to (`tree`), under one deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
from ray import cloudpickle, serve
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ray_slo.core.quantile import Quantile
from ray_slo.core.requests import Upstream
from ray_slo.core.text import clipped, quoted
from ray_slo.serve import grpc
from ray_slo.serve.config.spec import AppSpec, VariantRef, worker_deployment
from ray_slo.serve.deadlines import (
    CAPACITY_HEADER,
    MAX_LATENCY_MS,
    REFUSED_HEADER,
    WHOLE_HEADER,
)
from ray_slo.serve.errors import (
    MAX_MESSAGE,
    BadInput,
    BodyTooLarge,
    ConfigError,
    Expired,
    RefusedEarly,
    SLOError,
    UnknownModel,
    WorkerLost,
    error_body,
    http_response,
)
from ray_slo.serve.frontend import http as reading
from ray_slo.serve.frontend.answer import Answer, joined_answer, to_json
from ray_slo.serve.frontend.startup import Progress, Startup
from ray_slo.serve.frontend.tree import Tree, Visit, say_task
from ray_slo.serve.memory import give_back
from ray_slo.serve.messages import (
    Capacity,
    Grant,
    Heartbeat,
    Message,
    Piece,
    PieceResult,
    Refusal,
    Stop,
    Submit,
)
from ray_slo.serve.planner.group_channel import GroupedChannel
from ray_slo.serve.planner.plan_channel import PlanReporter
from ray_slo.serve.protos import DescribeReply, InferReply
from ray_slo.serve.proxy.door import has_door_before
from ray_slo.serve.proxy.gate import Door
from ray_slo.serve.ray_private.http_head import arrival_here
from ray_slo.serve.ray_private.replica_port import listen_on_node_only
from ray_slo.serve.scheduler.channel import ActorChannel, Channel, EmbeddedChannel
from ray_slo.serve.scheduler.scheduler import FEW_SAMPLES
from ray_slo.serve.suspects import ATTEMPT, ATTEMPT_HEADER, Marks, ended_itself
from ray_slo.serve.user_code import Hook, HookThreads
from ray_slo.serve.watch import tracing
from ray_slo.serve.watch.metrics import FrontendMetrics
from ray_slo.serve.watch.status import worker_states
from ray_slo.serve.watch.tracing import RequestTrace
from ray_slo.serve.watch.vitals import vitals

logger = logging.getLogger(__name__)

# A caller hears something by its deadline plus a second, whatever happens; so long it waits here,
# and the rest is for the way.
_GRACE_S = 0.75
_MEET_S = 5.0  # for workers to introduce themselves again
_FIRST_S = 2.0  # the same at the start; without an answer, none is up
_LOOK_S = 0.3  # between looks at what workers can serve, until that is all
_LEAST_LOOK_S = 0.05  # the same, when a request waits for the next one
_FRESH_S = 1.0  # that it waits, at most
_DIGITS = 7  # of a number of requests
_SPARE = 2  # workers that are up when a request whose worker was lost is tried again
_START_S = 2.0  # a worker takes longer than this to start
_AGAIN_S = 0.2  # between looks whether they are
_WAY_BACK = 0.25  # of an SLO, at most
_LEAVING_S = 0.1  # for what was cancelled to end
_JOINING_S = 0.1  # more than that for a whole pipeline
_HOOK_THREADS = 32
_PER_TURN = 8  # requests that go on together, and are submitted in one message
# What a call to a worker raises when the worker is gone, or its node with the result.
_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
)


class _Asked(NamedTuple):
    """What a client asked for. Times in seconds of the frontend's clock."""

    model: str
    arrival: float
    slo_s: float
    traceparent: str | None = None

    @property
    def deadline(self) -> float:
        return self.arrival + self.slo_s


class _Pending:
    """A request that is not answered yet: the client's, or one of a task of a pipeline.

    Attributes:
        model: what scheduler and workers call it: the task, in a pipeline.
        entered: when it came to the task; what the client asked for came at `asked.arrival`.
    """

    __slots__ = (
        "asked",
        "entered",
        "future",
        "grant",
        "id",
        "item",
        "model",
        "preemptions",
        "result",
        "retries",
        "sent_at",
        "size",
        "trace",
        "upstream",
    )

    def __init__(
        self,
        id: int,
        model: str,
        asked: _Asked,
        item: Any,
        entered: float,
        upstream: Upstream | None = None,
    ) -> None:
        self.id = id
        self.model = model
        self.asked = asked
        self.item = item
        self.entered = entered
        self.upstream = upstream
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.grant: Grant | None = None
        self.result: PieceResult | None = None
        self.retries = 0
        self.preemptions = 0
        self.sent_at = math.nan
        self.size = 1
        self.trace = tracing.NOT_TRACED

    @property
    def context(self) -> dict[str, Any]:
        """What errors say of it."""
        task = self.model if self.model != self.asked.model else None
        slo_ms = self.asked.slo_s * 1e3
        return {"model": self.asked.model, "task": task, "latency_slo_ms": slo_ms}


class Frontend:
    """Ingress of an application: HTTP and gRPC requests and handle calls come in here."""

    async def __init__(  # type: ignore[misc]
        self, spec: AppSpec, workers: dict[str, Any]
    ) -> None:
        listen_on_node_only()
        give_back()
        self._spec = spec
        self._variants = spec.variants()
        self._policy = tracing.name_of(spec.policy.name)
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._clock = time.monotonic  # uvloop's loop.time() has milliseconds only
        context = serve.get_replica_context()
        app_key = f"{context.app_name}#{context.deployment}"
        client = context.replica_tag
        self._check_names(context.deployment, workers)
        self._marks = Marks()
        self._threads = HookThreads(_HOOK_THREADS, self._marks)
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-parser")
        self._preprocess: dict[str, Hook] = {}
        self._postprocess: dict[str, Hook] = {}
        self._sizes: dict[str, Hook] = {}
        for name, model in spec.models.items():
            cls = model.load()
            if hasattr(cls, "preprocess"):
                self._preprocess[name] = self._threads.hook(cls.preprocess)
            if hasattr(cls, "postprocess"):
                self._postprocess[name] = self._threads.hook(cls.postprocess)
            if hasattr(cls, "size"):
                self._sizes[name] = self._threads.hook(cls.size)
        # What clients may ask for: latency SLO in milliseconds, and where it comes in.
        self._offers = {name: (m.latency_slo_ms, name) for name, m in spec.models.items()}
        self._tree: Tree | None = None
        self._plan = PlanReporter(spec, app_key, client) if spec.planned else None
        if (pipeline := spec.pipeline) is not None:
            self._offers = {spec.deployment_name: (pipeline.latency_slo_ms, pipeline.root)}
            self._accuracy = functools.cache(pipeline.accuracy)
            self._tree = Tree(
                pipeline.parents,
                postprocess=self._postprocess,
                join={name: self._threads.hook(join) for name, join in spec.joins().items()},
                made=None if self._plan is None else self._plan.finished,
            )
        self._ids = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._door = Door(per_turn=_PER_TURN)
        self._readers = reading.Readers(spec.max_queued_requests)
        self._capacity: dict[str, Capacity] = {}  # by model
        self._most_workers: dict[str, int] = {}  # that a model has had
        self._has_door_before = has_door_before()
        self._num_owned = 0  # from arrival to answer, pre- and postprocessing included
        self._overhead = Quantile(0.95, prior=FEW_SAMPLES)
        self._metrics = FrontendMetrics()
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel: Channel
        if spec.grouped:
            self._channel = GroupedChannel(spec, app_key, client, self._on_messages, self._resubmit)
        elif spec.embedded:
            self._channel = EmbeddedChannel(spec, self._on_messages)
        else:
            self._channel = ActorChannel(
                spec, app_key, client, self._on_messages, self._resubmit_all
            )
        self._app = context.app_name
        needs = list(spec.models) if self._tree is not None else None
        self._startup = Startup(
            {name: needs or [name] for name in self._offers}, spec.error_details
        )
        self._look_now = asyncio.Event()
        self._next_look: asyncio.Future[None] = self._loop.create_future()
        self._meeting = self._loop.create_task(self._meet_workers())
        await asyncio.wait({self._meeting}, timeout=_FIRST_S)
        watch = self._spawn(self._watch_startup())
        if self._meeting.done():
            # Workers are up, so this is no first start. Not ready before they can be used, too:
            # Serve then routes nothing here.
            await asyncio.wait({watch}, timeout=_MEET_S)
        self._spawn(self._refresh_metrics())

    def _check_names(self, deployment: str, workers: dict[str, Any]) -> None:
        # When an application holds several deployments of one name, Serve numbers them. A worker
        # finds its frontend by that number, so the two must have got the same.
        name = self._spec.deployment_name
        suffix = deployment.removeprefix(name)
        for kind, handle in workers.items():
            if handle.deployment_name != worker_deployment(name, kind) + suffix:
                raise ConfigError(
                    f"name: frontend {deployment!r} and its workers {handle.deployment_name!r} do "
                    f"not match, because another deployment of the application is named {name!r}, "
                    "too; give one of them another name"
                )

    # -- ways in ---------------------------------------------------------------------------

    async def __call__(
        self,
        item: Any,
        *,
        model: str | None = None,
        latency_slo_ms: float | None = None,
        response_metadata: bool = False,
    ) -> Any:
        """Answer one item.

        Args:
            item: what the model's `preprocess` takes (or its batch method, item by item); an HTTP
                request when called by Serve's proxy.
            model: needed when the application serves several.
            latency_slo_ms: this call's own SLO, milliseconds from now.
            response_metadata: return an `Answer` instead of the bare result.

        Raises:
            RefusedEarly, Expired, WorkerLost, UnknownModel, BadInput: see `ray_slo.errors`.
            Exception: whatever the user's method raised for this request's batch.
        """
        arrival = self._clock()
        if isinstance(item, HttpRequest):
            came = arrival_here(item.scope)
            return await self._http(item, arrival if came is None else came)
        name = self._model_name(model)
        await self._check_ready(name)
        asked = _Asked(name, arrival, self._slo_s(name, latency_slo_ms))
        async with self._admitted(asked):
            answer = await self._answer(asked, item)
        return answer if response_metadata else answer.result

    async def _http(self, request: HttpRequest, arrival: float) -> Response:
        response = await self._responded(request, arrival)
        if WHOLE_HEADER in request.headers:  # to our own door in Serve's proxy
            response.headers[CAPACITY_HEADER] = self._said_capacity(self._path(request))
        return response

    async def _responded(self, request: HttpRequest, arrival: float) -> Response:
        try:
            path = self._path(request)
            if request.method in ("GET", "HEAD") and not path:
                return JSONResponse(self._describe())
            name = self._model_name(path or None)
            if request.method in ("GET", "HEAD"):
                return JSONResponse(self._describe())
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
            self._heed_proxy(request.headers, name)
            await self._check_ready(name)
            asked = self._asked_by(request, name, arrival)
            body = await self._read_http(request, asked)
            async with self._admitted(asked):
                item = await self._item(request.headers.get("content-type", ""), body, name)
                answer = await self._answer(asked, item)
            if isinstance(answer.result, Response):
                answer.result.headers.update(answer.headers())
                return answer.result
            if isinstance(answer.result, bytes):
                return Response(
                    answer.result,
                    media_type="application/octet-stream",
                    headers=answer.headers(),
                )
            content = to_json(answer.result)
            return Response(content, media_type="application/json", headers=answer.headers())
        except SLOError as error:
            return http_response(error)
        except Exception as error:
            logger.exception("request failed")
            return JSONResponse(error_body(error, self._spec.error_details), status_code=500)

    async def Infer(self, request: Any, grpc_context: Any) -> Any:  # noqa: N802
        """gRPC's way in (`protos/inference.proto`); what goes wrong is in `grpc_context`."""
        arrival = self._clock()
        headers = dict(grpc_context.invocation_metadata())
        try:
            name = self._model_name(request.model or None)
            self._heed_proxy(headers, name)
            await self._check_ready(name)
            slo_s, kind, body = self._read_grpc(request, grpc_context.invocation_metadata(), name)
            asked = _Asked(name, arrival, slo_s, headers.get("traceparent"))
            async with self._admitted(asked):
                answer = await self._answer(asked, await self._item(kind, body, name))
            return grpc.reply_of(answer)
        except Exception as error:
            if not isinstance(error, SLOError):
                logger.exception("request failed")
            grpc.fail(grpc_context, error, self._spec.error_details)
            return InferReply()
        finally:
            if ATTEMPT_HEADER in headers:  # to our own door in Serve's proxy
                capacity = (CAPACITY_HEADER, self._said_capacity(request.model))
                # Serve adds it to a list of its own, so it must be one.
                told = [*grpc_context.trailing_metadata(), capacity]
                grpc_context.set_trailing_metadata(told)

    async def Describe(self, request: Any) -> Any:  # noqa: N802
        """What GET answers over HTTP."""
        return DescribeReply(json=json.dumps(self._describe()))

    def check_health(self) -> None:
        """Serve's hook: users' code that never ends makes the replica unhealthy.

        Raises:
            RuntimeError: then Serve replaces the replica.
        """
        self._threads.check()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook: `{"planner": {…}}` changes arguments of the planner while it runs.

        Raises:
            ConfigError: another key, or arguments that the planner does not take.
        """
        from ray_slo.planning.brains.kairos import arguments

        planner = self._spec.planner
        if set(user_config) != {"planner"} or planner is None or not planner.is_kairos:
            raise ConfigError(
                "user_config of a frontend: {'planner': {…}}, with arguments of 'kairos'; "
                f"got {user_config!r}"
            )
        try:
            arguments({**planner.kwargs, **user_config["planner"]})
        except (ValueError, TypeError) as error:
            raise ConfigError(f"user_config.{error}") from None
        assert self._plan is not None
        self._plan.tune(user_config["planner"])

    async def slo_heartbeat(self, beat: Heartbeat) -> None:
        """From workers, when the scheduler lives here."""
        await self._channel.heartbeat(beat)

    async def slo_progress(self, progress: Progress) -> None:
        """From workers, while they start."""
        self._startup.heard(progress, self._clock())

    async def slo_move(self, model: str, group: str) -> None:
        """Serve a model in another group from now on, without a failed request.

        Returns when that is decided; `slo_status()["plan"]["state"]` is "settled" when it is done.

        Raises:
            ConfigError, UnknownModel: no groups, no such group, no such model.
        """
        if not isinstance(self._channel, GroupedChannel):
            raise ConfigError("the application has no serving groups; name some under `groups`")
        await self._channel.move(model, group)

    async def slo_replan(self) -> None:
        """Have the groups, or the pipeline, planned now; returns when that is done.

        Raises:
            ConfigError: there is no planner.
        """
        if self._plan is not None:
            await self._plan.replan()
            return
        if not isinstance(self._channel, GroupedChannel):
            raise ConfigError("the application has no serving groups; name some under `groups`")
        await self._channel.replan()

    async def slo_status(self) -> dict[str, Any]:
        """What `ray-slo status` shows."""
        return {
            **self._describe(),
            "pending": len(self._pending),
            "process": vitals(pending=len(self._pending), owned=self._num_owned),
            "goodput": self._metrics.goodput(),
            "accuracy": self._metrics.accuracy(),
            "overhead_ms": 1e3 * self._overhead.value(default=0.0),
            **self._startup.status(self._clock()),
            **await self._channel.status(),
            **({} if self._plan is None else {"plan": await self._plan.status()}),
        }

    # -- reading a request -----------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "models": {
                name: {"latency_slo_ms": m.latency_slo_ms}
                | (
                    {"variants": {v: {"accuracy": s.accuracy} for v, s in m.variants.items()}}
                    if m.variants
                    else {"accuracy": m.accuracy}
                )
                for name, m in self._spec.models.items()
            }
        }
        if (pipeline := self._spec.pipeline) is not None:
            described["pipeline"] = {
                "name": self._spec.deployment_name,
                "latency_slo_ms": pipeline.latency_slo_ms,
                "parents": pipeline.parents,
            }
        return described

    def _path(self, request: HttpRequest) -> str:
        path: str = request.scope.get("path", "")
        root: str = request.scope.get("root_path", "")
        return path.removeprefix(root).strip("/")

    def _model_name(self, name: str | None) -> str:
        valid = self._offers
        if name is None:
            if len(valid) == 1:
                return next(iter(valid))
            self._metrics.unanswered("", "invalid", "unknown_model")
            raise UnknownModel(
                f"say which model; choose one of {', '.join(sorted(valid))}", valid=valid
            )
        if name not in valid:
            self._metrics.unanswered("", "invalid", "unknown_model")
            raise UnknownModel(model=name, valid=valid)
        return name

    async def _check_ready(self, model: str) -> None:
        """Raises NotReady while no worker can serve the model, with the reason."""
        if self._startup.complete:
            return
        refusal = self._startup.refusal(model, self._clock())
        if refusal is not None:
            self._look_now.set()
            await asyncio.wait({self._next_look}, timeout=_FRESH_S)
            refusal = self._startup.refusal(model, self._clock())
        if refusal is not None:
            self._metrics.unanswered(model, "refused", refusal.reason)
            raise refusal

    def _slo_s(self, model: str, latency_slo_ms: float | None) -> float:
        if latency_slo_ms is None:
            return self._offers[model][0] / 1e3
        try:
            slo_ms = float(latency_slo_ms)
        except (TypeError, ValueError):
            slo_ms = math.nan
        if not 0 < slo_ms <= MAX_LATENCY_MS:
            raise BadInput(
                f"latency_slo_ms must be a positive number of milliseconds, at most "
                f"{MAX_LATENCY_MS:.0f}, got {quoted(latency_slo_ms)}",
                field="latency_slo_ms",
                model=model,
            )
        return slo_ms / 1e3

    def _asked_by(self, request: HttpRequest, model: str, arrival: float) -> _Asked:
        """What the headers of a client's request say."""
        try:
            headers = reading.Headers(request.headers.items())
            slo_s = self._slo_s(model, headers.latency_ms(self._offers[model][0]))
        except BadInput as error:
            self._metrics.unanswered(model, "invalid", error.reason)
            error.model = model
            raise
        return _Asked(model, arrival, slo_s, request.headers.get("traceparent"))

    @contextlib.asynccontextmanager
    async def _admitted(self, asked: _Asked) -> AsyncIterator[None]:
        """Inside, a request is on its way.

        Raises:
            RefusedEarly: it would come too late.
        """
        capacity = self._capacity.get(self._offers[asked.model][1])
        share = self._spec.num_frontends
        try:
            ticket = await self._door.enter(
                asked.deadline, rate=None if capacity is None else capacity.rate / share
            )
        except RefusedEarly as error:
            self._refused_outside(asked.model, error.reason)
            error.model, error.latency_slo_ms = asked.model, asked.slo_s * 1e3
            raise
        try:
            yield
        finally:
            self._door.leave(ticket)

    def _refused_outside(self, model: str, reason: str, count: int = 1) -> None:
        """Requests that came no further than a door; they count as demand."""
        self._metrics.unanswered(model, "refused", reason, count)
        self._channel.refused(self._offers[model][1], count)
        if self._plan is not None and model not in self._sizes:
            self._plan.arrived(count=count)

    def _heed_proxy(self, headers: Mapping[str, str], model: str) -> None:
        """What our door before us says with a request."""
        ATTEMPT.set(headers.get(ATTEMPT_HEADER, ""))
        said = headers.get(REFUSED_HEADER, "")
        if self._has_door_before and said.isdecimal() and len(said) < _DIGITS:
            self._refused_outside(model, "door", int(said))

    def _said_capacity(self, path: str) -> str:
        """For our door in Serve's proxy: requests/s that the workers can do of what is served
        there, its SLO in milliseconds, how many requests all frontends keep, and how many bytes
        of a body, and of JSON, are read."""
        name = path if path in self._offers else next(iter(self._offers))
        slo_ms, model = self._offers[name]
        most = self._spec.max_queued_requests * self._spec.num_frontends
        capacity = self._capacity.get(model)
        rate = math.inf if capacity is None else capacity.rate
        sizes = f"{self._spec.max_body_bytes};{self._spec.max_json_bytes}"
        return f"{rate:.6g};{slo_ms:.6g};{most};{sizes}"

    async def _read_http(self, request: HttpRequest, asked: _Asked) -> bytes:
        """The body that a client sends."""
        content_type = request.headers.get("content-type", "")
        most, option = self._spec.max_body_bytes, "max_body_bytes"
        if not self._takes_bytes(content_type, asked.model) and self._spec.max_json_bytes < most:
            most, option = self._spec.max_json_bytes, "max_json_bytes"
        try:
            left_s = asked.deadline - self._clock()
            return await reading.body_of(request, most, left_s, option, self._readers)
        except SLOError as error:
            self._metrics.unanswered(asked.model, *_outcome(error))
            error.model = asked.model
            raise

    def _read_grpc(self, request: Any, metadata: Any, model: str) -> tuple[float, str, bytes]:
        """(SLO in seconds, content type, body) that a client sends."""
        try:
            headers = reading.Headers(metadata)
            is_own = request.HasField("latency_slo_ms")
            slo_ms = self._offers[model][0]
            own_ms = request.latency_slo_ms if is_own else headers.latency_ms(slo_ms)
            slo_s = self._slo_s(model, own_ms)
            if (left_ms := headers.timeout_ms()) is not None:
                slo_s = min(slo_s, left_ms / 1e3)  # after its deadline, a gRPC client has hung up
            kind = request.WhichOneof("item")
            if kind is None:
                raise BadInput("no item; give json or data", field="item")
            body = request.data if kind == "data" else request.json.encode()
            for option in ("max_body_bytes", "max_json_bytes")[: 1 + (kind == "json")]:
                if len(body) > (limit := getattr(self._spec, option)):
                    raise reading.too_large(kind, len(body), limit, option=option)
            content_type = "application/json" if kind == "json" else "application/octet-stream"
            return slo_s, content_type, body
        except BadInput as error:
            self._metrics.unanswered(model, "invalid", error.reason)
            error.model = model
            raise

    def _takes_bytes(self, content_type: str, model: str) -> bool:
        """Whether a body of this type goes to the model's `preprocess` as it is."""
        kind, is_json = _kind_of(content_type)
        return bool(kind) and not is_json and self._offers[model][1] in self._preprocess

    async def _item(self, content_type: str, body: bytes, model: str) -> Any:
        """What is in a body."""
        try:
            return await self._parse(content_type, body, model)
        except BadInput as error:
            self._metrics.unanswered(model, "invalid", error.reason)
            error.model = model
            raise

    async def _parse(self, content_type: str, body: bytes, model: str) -> Any:
        """JSON by content type; raw bytes for anything else, if the model has a `preprocess`."""
        if self._takes_bytes(content_type, model):
            return body
        kind, is_json = _kind_of(content_type)
        most = self._spec.max_json_values
        try:
            if len(body) <= reading.INLINE_BYTES:
                return reading.json_of(body, most)
            # On one thread, so that parsing never takes more than half of Python's time.
            return await self._loop.run_in_executor(self._parser, reading.json_of, body, most)
        except BodyTooLarge:
            raise
        except ValueError as error:
            if not is_json and self._offers[model][1] in self._preprocess:
                return body
            raise BadInput(
                f"body is not JSON: {error}"
                + ("" if is_json else f" (content-type {quoted(kind)})"),
                field="body",
            ) from None

    # -- one request -----------------------------------------------------------------------

    async def _answer(self, asked: _Asked, item: Any) -> Answer:
        if self._plan is not None and asked.model not in self._sizes:
            self._plan.arrived()
        trace = tracing.request(*asked)
        is_full = self._num_owned >= self._spec.max_queued_requests
        if is_full and not self._give_way(asked.deadline):
            trace.unanswered("refused", "queue_full")
            self._metrics.unanswered(asked.model, "refused", "queue_full")
            raise RefusedEarly(
                f"{self._num_owned} requests are waiting, which is the limit (max_queued_requests)",
                reason="queue_full",
                model=asked.model,
                latency_slo_ms=asked.slo_s * 1e3,
            )
        self._num_owned += 1
        try:
            answer_one = self._answer_one if self._tree is None else self._answer_tree
            with trace.inside():
                answer = await answer_one(asked, item, trace)
        except BaseException as error:
            trace.unanswered(*_outcome(error), error)
            self._metrics.unanswered(asked.model, *_outcome(error))
            if isinstance(error, SLOError):
                error.model = error.model or asked.model
            raise
        finally:
            self._num_owned -= 1
        trace.answered(answer)
        self._metrics.answered(answer)
        return answer

    def _give_way(self, deadline: float) -> bool:
        """Refuse the waiting request with the latest deadline, if that is later than this one."""
        waiting = (p for p in self._pending.values() if p.grant is None and not p.future.done())
        last = max(waiting, key=lambda p: p.asked.deadline, default=None)
        if last is None or last.asked.deadline <= deadline:
            return False
        self._channel.cancel(last.id)
        self._fail(
            last,
            RefusedEarly(
                f"{self._num_owned} requests are waiting, which is the limit "
                "(max_queued_requests), and this one has the latest deadline",
                reason="queue_full",
                **last.context,
            ),
        )
        return True

    async def _answer_one(self, asked: _Asked, item: Any, trace: RequestTrace) -> Answer:
        item = await self._preprocessed(asked.model, asked, item)
        pending = await self._made(asked.model, asked, item, asked.arrival)
        pending.trace = trace
        if self._plan is not None and asked.model in self._sizes:
            self._plan.arrived(pending.size)
        value = await self._result(pending)
        if asked.model in self._postprocess:
            value = await self._in_time(asked, self._postprocess[asked.model](value))
        return self._describe_answer(pending, value)

    async def _in_time(
        self, asked: _Asked, hook: Coroutine[Any, Any, Any], grace_s: float = _GRACE_S
    ) -> Any:
        """What a user's hook returns. Its caller waits no longer than for a worker.

        Raises:
            Expired: it has not ended by then.
            Exception: whatever it raised.
        """
        task = self._loop.create_task(hook)
        try:
            await asyncio.wait([task], timeout=asked.deadline + grace_s - self._clock())
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=_LEAVING_S)
        raise Expired(
            f"no answer {grace_s:g} s after the deadline; the request was in the application's own "
            "code at the frontend (preprocess, size, postprocess or join)",
            model=asked.model,
            latency_slo_ms=asked.slo_s * 1e3,
        )

    async def _preprocessed(self, model: str, asked: _Asked, item: Any) -> Any:
        if model not in self._preprocess:
            return item
        try:
            return await self._in_time(asked, self._preprocess[model](item))
        except SLOError:
            raise
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            said = clipped(str(error), MAX_MESSAGE)
            raise BadInput(
                f"preprocess refused the item: {said}", field="item", model=model
            ) from error

    async def _made(self, model: str, asked: _Asked, item: Any, *about: Any) -> _Pending:
        """A request of a preprocessed item, and its size."""
        pending = _Pending(next(self._ids), model, asked, item, *about)
        if (size := self._sizes.get(model)) is not None:
            try:
                pending.size = int(await self._in_time(asked, size(item)))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise BadInput(
                    f"the item has no size: {clipped(str(error), MAX_MESSAGE)}",
                    field="item",
                    model=model,
                ) from error
            limit = self._spec.models[model].max_batch_size
            if not 1 <= pending.size <= limit:
                raise BadInput(
                    f"the item's size is {pending.size}; 1 to {limit} can be served "
                    "(max_batch_size)",
                    field="item",
                    model=model,
                )
        return pending

    async def _result(self, pending: _Pending) -> Any:
        """What a worker makes of it."""
        self._pending[pending.id] = pending
        guard = self._loop.call_later(
            pending.asked.deadline + _GRACE_S - self._clock(), self._give_up, pending
        )
        try:
            self._submit(pending)
            return await pending.future
        except asyncio.CancelledError:
            self._channel.cancel(pending.id)
            raise
        finally:
            guard.cancel()
            del self._pending[pending.id]

    def _describe_answer(self, pending: _Pending, value: Any) -> Answer:
        """How a request went at the model, or task, that served it."""
        assert pending.grant is not None and pending.result is not None
        result = pending.result
        queue_s = max(pending.sent_at - pending.entered + result.wait_s, 0.0)
        variant = self._variant(pending.grant)
        return Answer(
            result=value,
            model=pending.model,
            variant=variant.name,
            accuracy=variant.accuracy,
            batch_size=result.batch_size,
            queue_ms=queue_s * 1e3,
            exec_ms=result.exec_s * 1e3,
            latency_ms=(self._clock() - pending.entered) * 1e3,
            latency_slo_ms=(pending.asked.deadline - pending.entered) * 1e3,
        )

    # -- one request of a pipeline ---------------------------------------------------------

    async def _answer_tree(self, asked: _Asked, item: Any, trace: RequestTrace) -> Answer:
        assert self._tree is not None

        async def serve(task: str, item: Any, upstream: Upstream | None) -> tuple[Any, Visit]:
            return await self._serve_task(asked, trace.task(task), task, item, upstream)

        # Tasks give up by themselves; what takes longer is `postprocess` or `join`.
        visits = self._tree.run(item, serve)
        node = await self._in_time(asked, visits, _GRACE_S + _JOINING_S)
        latency_ms = (self._clock() - asked.arrival) * 1e3
        return joined_answer(asked.model, node, self._accuracy, latency_ms, asked.slo_s * 1e3)

    async def _serve_task(
        self,
        asked: _Asked,
        trace: RequestTrace,
        task: str,
        item: Any,
        upstream: Upstream | None,
    ) -> tuple[Any, Visit]:
        entered = asked.arrival if upstream is None else self._clock()
        try:
            if upstream is None:
                item = await self._preprocessed(task, asked, item)
            elif task in self._preprocess:  # what it may refuse is not the client's
                item = await self._in_time(asked, self._preprocess[task](item))
            pending = await self._made(task, asked, item, entered, upstream)
            pending.trace = trace
            value = await self._result(pending)
        except BaseException as error:
            trace.unanswered(*_outcome(error), error)
            self._metrics.unanswered(task, *_outcome(error))
            if isinstance(error, SLOError):
                error.model, error.task = asked.model, task
            elif isinstance(error, Exception):
                say_task(error, task)
            raise
        stage = self._describe_answer(pending, None)
        trace.answered(stage)
        self._metrics.answered(stage)
        assert pending.grant is not None
        return value, Visit(
            worker=pending.grant.worker,
            variant=pending.grant.variant,
            batch_size=stage.batch_size,
            queue_s=stage.queue_ms / 1e3,
            exec_s=stage.exec_ms / 1e3,
            spent_s=stage.latency_ms / 1e3,
            done_at=entered + stage.latency_ms / 1e3,
        )

    # -- to the scheduler ------------------------------------------------------------------

    def _variant(self, grant: Grant) -> VariantRef:
        # A scheduler of a newer release may name one that we, still draining, do not know.
        unknown = VariantRef(grant.model, grant.variant, None)
        return self._variants.get(grant.variant, unknown)

    def _submit(self, pending: _Pending) -> None:
        """(Again) to the scheduler, with what is left of the budget less the way back."""
        asked, now = pending.asked, self._clock()
        # At most a share of the SLO: who refuses everything never learns that it is quicker now.
        way_back_s = min(0.5 * self._overhead.value(default=0.0), _WAY_BACK * asked.slo_s)
        margin_s = self._spec.response_margin_ms / 1e3 + way_back_s
        budget_s = asked.deadline - margin_s - now
        if budget_s <= 0:
            gone_s = now - asked.arrival
            self._fail(
                pending,
                RefusedEarly(
                    f"no time is left for the work: of {asked.slo_s * 1e3:.4g} ms, "
                    f"{gone_s * 1e3:.4g} ms are over, and {margin_s * 1e3:.4g} ms are kept for the "
                    f"way back{_preempted(pending)}",
                    reason="preempted" if pending.preemptions else None,
                    predicted_finish_ms=(gone_s + margin_s) * 1e3,
                    **pending.context,
                ),
            )
            return
        pending.grant = None
        pending.trace.submitted(pending.id, budget_s)
        self._channel.submit(
            Submit(
                pending.id,
                pending.model,
                budget_s,
                pending.size,
                pending.upstream,
                pending.trace.waiting,
            )
        )

    def _fail(self, pending: _Pending, error: BaseException) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)

    def _give_up(self, pending: _Pending) -> None:
        self._channel.cancel(pending.id)
        where = f"on worker {pending.grant.worker}" if pending.grant else "in the queue"
        self._fail(
            pending,
            Expired(
                f"no answer {_GRACE_S:g} s after the deadline; the request was {where}",
                **pending.context,
            ),
        )

    def _resubmit_all(self) -> None:
        """The scheduler is new: tell it of everything that waits."""
        self._resubmit(list(self._pending))

    def _resubmit(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            pending = self._pending.get(request_id)
            if pending is not None and pending.grant is None and not pending.future.done():
                self._submit(pending)

    # -- what the scheduler says -----------------------------------------------------------

    def _on_messages(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Grant):
                self._spawn(self._send(message))
            elif isinstance(message, Stop):
                self._spawn(self._stop(message))
            else:
                self._refuse(message)

    def _refuse(self, refusal: Refusal) -> None:
        now = self._clock()
        for request_id in refusal.request_ids:
            pending = self._pending.get(request_id)
            if pending is None:
                continue
            slo_ms = pending.asked.slo_s * 1e3
            finish_ms = (now + refusal.finish_in_s - pending.asked.arrival) * 1e3
            if refusal.reason == "expired":
                self._fail(
                    pending,
                    Expired(
                        f"waited until its deadline of {slo_ms:.4g} ms was out of reach",
                        **pending.context,
                    ),
                )
                continue
            why = {
                "would_miss": "it would have finished too late",
                "shed": "the system is overloaded, and serving it would have delayed others",
                "no_worker": "no worker has its model loaded",
            }.get(refusal.reason, refusal.reason)
            if self._plan is not None and self._plan.shortfall:
                why += f"; the plan falls short: {self._plan.shortfall}"
            self._fail(
                pending,
                RefusedEarly(
                    f"refused early: {why}{_preempted(pending)}",
                    reason="preempted" if pending.preemptions else refusal.reason,
                    predicted_finish_ms=finish_ms,
                    **pending.context,
                ),
            )

    async def _stop(self, stop: Stop) -> None:
        """Pass a preemption on. What becomes of the batch is said by its results."""
        try:
            await self._workers[stop.kind].preempt.remote(stop.batch_id, worker=stop.worker)
        except Exception as error:
            logger.info("batch %s could not be preempted: %r", stop.batch_id, error)

    async def _send(self, grant: Grant) -> None:
        """Send our share of a batch and hand its results out."""
        share = [
            p
            for i in grant.request_ids
            if (p := self._pending.get(i)) is not None and not p.future.done()
        ]
        if not share and grant.num_pieces == 1:
            self._channel.batch_withdrawn(grant.batch_id)
            return
        # An empty share is sent, too: the other frontends' pieces wait for it.
        sent_at = self._clock()
        for pending in share:
            pending.grant, pending.sent_at = grant, sent_at
            pending.trace.granted(grant, self._policy)
        traces = [p.trace for p in share]
        piece = Piece(
            batch_id=grant.batch_id,
            variant=grant.variant,
            items=[p.item for p in share],
            piece=grant.piece,
            num_pieces=grant.num_pieces,
            start_by_s=grant.start_by_s,
            traces=tracing.contexts(traces),
        )
        try:
            with tracing.call_of(traces):
                result: PieceResult = await self._workers[grant.kind].execute.remote(
                    piece, worker=grant.worker
                )
        except asyncio.CancelledError:
            raise
        except WorkerLost as error:  # from the router: it was not even sent
            logger.warning("%s", error)
            self._channel.worker_lost(grant.worker)
            self._submit_again(share, "worker_not_there")
            return
        except _GONE as error:
            own_end = ended_itself(grant.worker)
            said = f"it ended itself: {own_end}" if own_end else type(error).__name__
            logger.warning("worker %s is lost: %s", grant.worker, said)
            self._channel.worker_lost(grant.worker)
            share = self._with_retries_left(share, grant)
            if own_end:
                await self._submit_when_safe(share, grant.worker)
            else:
                self._submit_again(share, "worker_lost")
            return
        except Exception as error:
            if self._refuse_unpicklable(share):
                await self._send(grant)  # what is left of it
                return
            # A result that cannot be pickled, most likely.
            self._channel.batch_withdrawn(grant.batch_id)
            for pending in share:
                self._fail(pending, error)
            return
        self._overhead.add(max(self._clock() - sent_at - result.held_s, 0.0))
        if result.report is not None and result.results is not None:
            predicted_s = grant.finish_in_s - (self._clock() - sent_at)
            self._metrics.predicted(self._variant(grant), -predicted_s * 1e3)
        self._channel.report(result.report)
        if result.results is None:  # preempted, or the batch had to start without it
            for pending in share:
                pending.trace.ran(result.trace)
                pending.preemptions += result.preempted
            self._submit_again(share, "preempted" if result.preempted else "came_too_late")
            return
        for pending, (ok, value) in zip(share, result.results, strict=True):
            pending.result = result
            pending.trace.ran(result.trace)
            if pending.future.done():
                continue
            if ok:
                pending.future.set_result(value)
            else:
                pending.future.set_exception(value)

    def _submit_again(self, share: list[_Pending], why: str) -> None:
        for pending in share:
            if not pending.future.done():
                pending.trace.requeued(why)
                self._submit(pending)

    async def _submit_when_safe(self, share: list[_Pending], lost: str) -> None:
        """Again, once two workers are up: the worker that was lost ended itself, one of these
        requests may be why, and it must not end the last one. Where there has never been more
        than one, once that is back."""
        gone = {lost}
        while share := [p for p in share if not p.future.done()]:
            model = share[0].model
            is_safe = False
            with contextlib.suppress(Exception):  # the scheduler restarts
                await self._look_at_capacity(_FRESH_S)
                others = self._capacity[model].workers - gone
                is_safe = len(others) >= min(_SPARE, self._most_workers[model])
            if is_safe:
                self._submit_again(share, "worker_lost")
                return
            for pending in share:
                if pending.asked.deadline - self._clock() < _START_S:
                    self._fail(
                        pending,
                        WorkerLost(
                            f"worker {lost} ended itself while it worked on the request, which "
                            f"may be why; it is tried again where {_SPARE} workers are up",
                            worker=lost,
                            **pending.context,
                        ),
                    )
            await asyncio.sleep(_AGAIN_S)
            gone = set()  # by now the scheduler knows; who is there again is there

    def _with_retries_left(self, share: list[_Pending], grant: Grant) -> list[_Pending]:
        """Count one more worker that died with them, and fail those for which it was the last."""
        for pending in share:
            pending.retries += 1
            if pending.retries > self._spec.retries:
                before = f", and so were {pending.retries - 1} before" * (pending.retries > 1)
                self._fail(
                    pending,
                    WorkerLost(
                        f"worker {grant.worker} was lost with the request{before}",
                        worker=grant.worker,
                        **pending.context,
                    ),
                )
        return share

    def _refuse_unpicklable(self, share: list[_Pending]) -> bool:
        """Refuse what cannot be sent to a worker; whether there was any."""
        poison = [p for p in share if not _picklable(p.item)]
        for pending in poison:
            self._fail(
                pending,
                BadInput(
                    f"an item of type {type(pending.item).__name__} cannot be sent to a worker: "
                    "it cannot be pickled",
                    field="item",
                    **pending.context,
                ),
            )
        return bool(poison)

    # -- life ------------------------------------------------------------------------------

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _meet_workers(self) -> None:
        if not self._spec.planned:
            for handle in self._workers.values():
                await self._channel.join(await handle.introduce.remote())
            return
        # A planner may want none of a kind; then nobody would ever answer, and Serve would start a
        # worker for the waiting call. Those that are there beat to the scheduler by themselves.
        meetings = {asyncio.ensure_future(self._meet(handle)) for handle in self._workers.values()}
        try:
            while meetings:
                done, meetings = await asyncio.wait(meetings, return_when=asyncio.FIRST_COMPLETED)
                if any(meeting.exception() is None for meeting in done) or not meetings:
                    done.pop().result()
                    return
        finally:
            for meeting in meetings:
                meeting.cancel()

    async def _meet(self, handle: Any) -> None:
        await self._channel.join(await handle.introduce.remote())

    async def _watch_startup(self) -> None:
        """Find out what can be served, until that is all, and what keeps the rest."""
        kinds = {kind: handle.deployment_name for kind, handle in self._workers.items()}
        while True:
            look, self._next_look = self._next_look, self._loop.create_future()
            self._look_now.clear()
            try:
                await self._look_at_capacity(_MEET_S)
                self._startup.serves(self._capacity)
                if self._startup.complete:
                    self._next_look.set_result(None)
                    return
                if self._meeting.done() and self._meeting.exception() is not None:
                    self._meeting = self._loop.create_task(self._meet_workers())
                if self._plan is not None:
                    self._startup.plan_says(self._plan.shortfall)
                states = await self._loop.run_in_executor(None, worker_states, self._app, kinds)
                self._startup.deployments(states)
            except Exception as error:
                logger.info("cannot tell what is served: %r", error)
            finally:
                look.set_result(None)
            await asyncio.sleep(_LEAST_LOOK_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), _LOOK_S)

    async def _look_at_capacity(self, within_s: float) -> None:
        """Ask the scheduler.

        Raises:
            Exception: whatever kept it from answering.
        """
        self._capacity = await asyncio.wait_for(self._channel.capacity(), within_s)
        for model, capacity in self._capacity.items():
            before = self._most_workers.get(model, 0)
            self._most_workers[model] = max(before, len(capacity.workers))

    async def _refresh_metrics(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._metrics.refresh(len(self._pending))
            with contextlib.suppress(Exception):  # the scheduler restarts: what is known stays
                await self._look_at_capacity(_FRESH_S)
            # While Serve replaces us, workers beat to our successor, and it replaces them, too.
            if self._pending and self._channel.is_deserted():
                try:
                    await asyncio.wait_for(self._meet_workers(), _MEET_S)
                except Exception as error:
                    logger.info("no worker to be met: %r", error)

    def __del__(self) -> None:
        if hasattr(self, "_marks"):
            self._marks.close()
        meeting = [self._meeting] if hasattr(self, "_meeting") else []
        for task in [*getattr(self, "_tasks", ()), *meeting]:
            task.cancel()
        for line in (getattr(self, "_channel", None), getattr(self, "_plan", None)):
            if line is not None:
                line.close()


def _kind_of(content_type: str) -> tuple[str, bool]:
    """The media type, and whether it is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind, kind == "application/json" or kind.endswith("+json")


def _outcome(error: BaseException) -> tuple[str, str]:
    """How a request ended without an answer, and why, for the metrics."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled", "cancelled"
    if isinstance(error, Expired):
        return "expired", error.reason
    if isinstance(error, RefusedEarly):
        return "refused", error.reason
    if isinstance(error, BadInput):
        return "invalid", error.reason
    return "failed", "user_error"


def _preempted(pending: _Pending) -> str:
    count = pending.preemptions
    times = "" if count == 1 else f" {count} times"
    return f"; it was stopped{times} while it ran, for a larger batch" if count else ""


def _picklable(item: Any) -> bool:
    try:
        cloudpickle.dumps(item)
    except Exception:
        return False
    return True
