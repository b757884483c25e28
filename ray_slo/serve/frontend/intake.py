"""Reads, checks and admits requests from HTTP, gRPC and handles."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ray import serve
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from ray_slo.core.text import quoted
from ray_slo.core.trees import DEFAULT_CLASS, stream_of
from ray_slo.serve.config.models import ModelConfig
from ray_slo.serve.config.pipeline import PipelineConfig
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.deadlines import (
    ATTEMPT_HEADER,
    NO_PLACE,
    REFUSED_HEADER,
    WAY_HEADER,
    TimeLimits,
    of_caller_s,
    positive,
    read_here,
    slo_class_of,
    slo_ms_of,
)
from ray_slo.serve.errors import BadInput, RefusedEarly, SLOError, UnknownModel
from ray_slo.serve.frontend import http as reading
from ray_slo.serve.frontend.congestion import Congestion
from ray_slo.serve.frontend.hooks import Hooks
from ray_slo.serve.frontend.ledger import Asked
from ray_slo.serve.frontend.surroundings import Surroundings
from ray_slo.serve.messages import Capacity
from ray_slo.serve.proxy.door import Door
from ray_slo.serve.proxy.gate import FEW, Known, Ticket
from ray_slo.serve.suspects import ATTEMPT

_T = TypeVar("_T")
_DIGITS = 7  # a number of requests has fewer digits than this
_SEND_JSON = "for JSON, send it with content-type: application/json"
# What clients' tools say of a body if nobody tells them, such as curl's -d.
_UNTOLD = ("application/x-www-form-urlencoded", "text/plain", "application/octet-stream")
_SENT_AS = {
    kind: f"preprocess got the body's bytes, because {why}; {_SEND_JSON}"
    for kind, why in (
        ("", "it has no content-type"),
        *((kind, f"its content-type is {kind}") for kind in _UNTOLD),
    )
}
_PER_TURN = 8  # requests that are admitted together, and submitted in one message


class Intake:
    """Reads and admits requests.

    Args:
        capacity: function that returns the capacity for a model. None while it is not known.
        refused: called for requests that a door refused, with their stream and their number.
    """

    def __init__(
        self,
        spec: AppSpec,
        around: Surroundings,
        hooks: Hooks,
        capacity: Callable[[str], Capacity | None],
        refused: Callable[[str, int], None],
    ) -> None:
        self._spec = spec
        self._hooks = hooks
        self._capacity = capacity
        self._unanswered = around.metrics.unanswered
        self._refused = refused
        self._has_door_before = around.has_door_before
        self._door = Door(per_turn=_PER_TURN)
        self._congestion: defaultdict[str, Congestion] = defaultdict(Congestion)  # by stream
        self._held_bytes = 0  # of decompressed bodies
        self._readers = reading.Readers(spec.max_queued_requests, spec.max_body_bytes)
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-parser")
        self._trees = spec.trees
        self._entries = {name: tree[tree.root].model for name, tree in spec.trees.items()}

    def describe(self) -> dict[str, Any]:
        """Return the description of what the application serves."""
        described: dict[str, Any] = {
            "models": {
                name: _slos(m)
                | (
                    {"variants": {v: {"accuracy": s.accuracy} for v, s in m.variants.items()}}
                    if m.variants
                    else {"accuracy": m.accuracy}
                )
                for name, m in self._spec.models.items()
            }
        }
        pipelines = {
            name: {
                **_slos(pipeline),
                "parents": dict(self._trees[name].parents),
                **({"shared": pipeline.shares} if pipeline.shares else {}),
            }
            for name, pipeline in self._spec.pipelines.items()
        }
        return described | ({"pipelines": pipelines} if pipelines else {})

    # -- requests --------------------------------------------------------------------------

    def model_name(self, name: str | None) -> str:
        """Return the name of the requested model or pipeline. None means the only one.

        Raises:
            UnknownModel: there is no such model, or there are several.
        """
        if name is None and len(self._trees) == 1:
            return next(iter(self._trees))
        if name is not None and name in self._trees:
            return name
        self._unanswered("", "invalid", "unknown_model")
        valid = self._trees
        if name is None:
            said = f"say which model; choose one of {', '.join(sorted(valid))}"
            raise UnknownModel(said, valid=valid)
        raise UnknownModel(model=name, valid=valid)

    def asked(
        self,
        model: str,
        arrival: float,
        latency_slo_ms: float | None = None,
        slo_class: str | None = None,
    ) -> Asked:
        """Return the request of a handle's caller. Its SLO is `latency_slo_ms`, otherwise that of
        the class or the model.

        Raises:
            BadInput: `latency_slo_ms` is not a positive number, or there is no such class.
        """
        with self._noting_bad_input(model):
            _refuse_model_id()
            slo_class, slo_s = self._of_class(model, slo_class)
            if latency_slo_ms is None:
                slo_s = of_caller_s(slo_s)
            slo_s = self._slo_s(model, latency_slo_ms, slo_s)
            return Asked(model, arrival, slo_s, slo_class=slo_class, takes_errors=True)

    def asked_http(
        self, request: HttpRequest, headers: Mapping[str, str], model: str, arrival: float
    ) -> Asked:
        """Return the request that the headers of an HTTP request describe.

        Raises:
            BadInput: a header is wrong.
        """
        with self._noting_bad_input(model):
            _refuse_model_id()
            ours = read_here(request.scope["headers"])
            limits, named = TimeLimits(ours, strict=True), slo_class_of(ours, strict=True)
            slo_class, slo_s = self._of_class(model, named)
            slo_s = limits.budget_s(slo_s)
            given = headers.get("traceparent"), slo_class
            return Asked(model, arrival, slo_s, *given, way_s=self._way_s(headers))

    def asked_grpc(
        self, request: Any, metadata: Any, model: str, arrival: float
    ) -> tuple[Asked, str, bytes]:
        """Return the request that a gRPC message and its metadata describe, and the content type
        and the body of its item.

        Raises:
            BadInput: a field or the metadata is wrong or too large.
        """
        with self._noting_bad_input(model):
            _refuse_model_id()
            limits, said = TimeLimits(metadata, strict=True), dict(metadata)
            slo_class, slo_s = self._of_class(model, slo_class_of(metadata, strict=True))
            if request.HasField("latency_slo_ms"):
                slo_s = self._slo_s(model, request.latency_slo_ms, slo_s)
            else:
                slo_s = limits.budget_s(slo_s)
            if (timeout_s := limits.timeout_s()) is not None:
                slo_s = min(slo_s, timeout_s)  # after its deadline, a gRPC client has disconnected
            kind = request.WhichOneof("item")
            if kind is None:
                raise BadInput("no item; give json or data", field="item")
            body = request.data if kind == "data" else request.json.encode()
            for option in ("max_body_bytes", "max_json_bytes")[: 1 + (kind == "json")]:
                if len(body) > (limit := getattr(self._spec, option)):
                    raise reading.too_large(kind, len(body), limit, option=option)
            content_type = "application/json" if kind == "json" else "application/octet-stream"
            given = said.get("traceparent"), slo_class
            asked = Asked(model, arrival, slo_s, *given, way_s=self._way_s(said))
            return asked, content_type, body

    def _way_s(self, headers: Mapping[str, str]) -> float:
        way_ms = positive(headers.get(WAY_HEADER)) if self._has_door_before else None
        return 0.0 if way_ms is None else way_ms / 1e3

    def _of_class(self, model: str, slo_class: str | None) -> tuple[str, float]:
        """Return the SLO class that a client names, and its SLO in seconds.

        Raises:
            BadInput: there is no such class.
        """
        slos_s, name = self._trees[model].slos_s, slo_class or DEFAULT_CLASS
        if (slo_s := slos_s.get(name)) is not None:
            return name, slo_s
        valid = ", ".join(sorted(filter(None, slos_s))) or "none; leave it out"
        said = f"{model!r} has no SLO class {quoted(name)}; its classes are {valid}"
        raise BadInput(said, field="slo_class", model=model)

    def _slo_s(self, model: str, latency_slo_ms: float | None, default_s: float) -> float:
        if latency_slo_ms is None:
            return default_s
        return slo_ms_of(latency_slo_ms, BadInput, field="latency_slo_ms", model=model) / 1e3

    def _noting_bad_input(self, model: str) -> _NotingBadInput:
        """Return the context for a request to this model."""
        return _NotingBadInput(self._unanswered, model)

    # -- bodies ----------------------------------------------------------------------------

    async def body(self, request: HttpRequest, content_type: str, asked: Asked) -> bytes:
        """Return the body that a client sends over HTTP, decompressed.

        Raises:
            BodyTooLarge, SlowBody, RefusedEarly: see `http.body_of`.
            UnsupportedEncoding: it is compressed in a way that is not taken.
            BadInput: it is not compressed as it says, or the client left.
        """
        most, option = self._spec.max_body_bytes, "max_body_bytes"
        if not self._takes_bytes(content_type, asked.model) and self._spec.max_json_bytes < most:
            most, option = self._spec.max_json_bytes, "max_json_bytes"
        try:
            coding = reading.check_coding(request)
            left_s = asked.deadline - time.monotonic()
            body = await reading.body_of(
                request, most, left_s, option, self._readers, self._has_door_before
            )
            if not coding:
                return body
            body = await self._off_loop(reading.decoded, body, coding, most, option)
            self._hold(len(body))
            return body
        except (SLOError, ClientDisconnect, ValueError) as error:
            if isinstance(error, ClientDisconnect):
                error = BadInput("the client left before its body was here", field="body")
            elif not isinstance(error, SLOError):
                error = BadInput(f"body is not {coding}: {error}", field="body")
            if isinstance(error, RefusedEarly):
                self._refuse(asked, error.reason)
            else:
                self._unanswered(asked.stream, error.outcome, error.reason)
            error.model = asked.model
            raise error from None

    def _hold(self, num_bytes: int) -> None:
        """Count the memory of a decompressed body until its request is answered: clients can cause
        it with few bytes.

        Raises:
            RefusedEarly: all need too much.
        """
        if self._held_bytes + num_bytes > (most := self._readers.most_bytes):
            said = f"decompressed bodies need {self._held_bytes} bytes; at most {most} are held"
            raise RefusedEarly(said, reason="queue_full")

        def release(task: object) -> None:
            self._held_bytes -= num_bytes

        self._held_bytes += num_bytes
        task: Any = asyncio.current_task()
        task.add_done_callback(release)

    async def item(self, content_type: str, body: bytes, model: str) -> Any:
        """Return the item in a body. If the model has a `preprocess`, it is the bytes, unless the
        content type says that they are JSON. Otherwise it is JSON.

        Raises:
            BadInput: it is not JSON.
        """
        if self._takes_bytes(content_type, model):
            return body
        with self._noting_bad_input(model):
            kind, is_json = _kind_of(content_type)
            most = self._spec.max_json_values
            try:
                if len(body) <= reading.INLINE_BYTES:
                    return reading.json_of(body, most, content_type)
                return await self._off_loop(reading.json_of, body, most, content_type)
            except SLOError:
                raise
            except ValueError as error:
                said = f"body is not JSON: {error}"
                if not is_json:
                    said += f" (content-type {quoted(kind) if kind else 'missing'}); {_SEND_JSON}"
                raise BadInput(said, field="body") from None

    async def _off_loop(self, read: Callable[..., _T], *args: Any) -> _T:
        """Return what `read` makes of a body, on one thread, so that it uses at most half of
        Python's time."""
        return await asyncio.get_running_loop().run_in_executor(self._parser, read, *args)

    def _takes_bytes(self, content_type: str, model: str) -> bool:
        """Return whether a body of this type goes unchanged to the model's `preprocess`."""
        _, is_json = _kind_of(content_type)
        return not is_json and self._has_preprocess(model)

    def _has_preprocess(self, model: str) -> bool:
        return self._entries[model] in self._hooks.preprocess

    # -- admission -------------------------------------------------------------------------

    def admitted(self, asked: Asked, content_type: str | None = None) -> _Admission:
        """Return the context of an admitted request. Entering it waits until the request is
        admitted, and raises `RefusedEarly` if it would be late. The request leaves the door at the
        end.

        Args:
            content_type: content type of an HTTP request. If the item's bytes are refused, and
                the client may have meant JSON, the error says so.
        """
        hint = None
        if content_type is not None and self._takes_bytes(content_type, asked.model):
            hint = _SENT_AS.get(_kind_of(content_type)[0])
        return _Admission(self, asked, hint)

    async def _enter(self, asked: Asked) -> Ticket:
        capacity = self._capacity(self._entries[asked.model])
        rate = None if capacity is None else capacity.rate / self._spec.num_frontends
        try:
            return await self._door.enter(asked.deadline, Known(rate))
        except RefusedEarly as error:
            self._refuse(asked, error.reason)
            error.model, error.latency_slo_ms = asked.model, asked.slo_s * 1e3
            raise

    def _leave(self, asked: Asked, ticket: Ticket) -> None:
        # Not the request's own SLO: a client must not lower the limit of others.
        slo_s = self._trees[asked.model].slos_s[asked.slo_class]
        self._congestion[asked.stream].answered(time.monotonic(), self._door.turn_s, slo_s)
        self._door.leave(ticket)

    def heed_proxy(self, headers: Mapping[str, str], asked: Asked) -> None:
        """Use the headers that the door in Serve's proxy wrote into a request."""
        ATTEMPT.set(headers.get(ATTEMPT_HEADER, ""))
        said = headers.get(REFUSED_HEADER, "")
        if self._has_door_before and said.isdecimal() and len(said) < _DIGITS:
            self._refuse(asked, "door", int(said))

    def capacity_said(self, path: str, slo_class: str | None = None) -> str:
        """Return the capacity header for the door in Serve's proxy. It has the requests/s that the
        workers can serve for this path; its SLO in milliseconds; the number of requests that all
        frontends keep, or fewer if they are too busy; and the largest sizes of a body and of a JSON
        body in bytes. If there is no such model or class, it says only that:
        what clients make up is nothing that a door should keep."""
        name = path or (next(iter(self._trees)) if len(self._trees) == 1 else "")
        slos_s = self._trees[name].slos_s if name in self._trees else {}
        if (slo_s := slos_s.get(slo_class or DEFAULT_CLASS)) is None:
            return NO_PLACE
        slo_ms = 1e3 * slo_s
        most = self._spec.max_queued_requests * self._spec.num_frontends
        capacity = self._capacity(self._entries[name])
        rate = math.inf
        if capacity is not None:
            rate = capacity.rate
            busy = self._congestion.get(stream_of(name, slo_class or DEFAULT_CLASS))
            if busy is not None and busy.limit < math.inf:
                most = min(most, max(round(busy.limit * self._spec.num_frontends), FEW))
        sizes = f"{self._spec.max_body_bytes};{self._spec.max_json_bytes}"
        return f"{rate:.3f};{slo_ms:.3f};{most};{sizes}"  # HAProxy reads no exponent

    def _refuse(self, asked: Asked, reason: str, count: int = 1) -> None:
        """Note that a door refused requests. They count as demand."""
        self._unanswered(asked.stream, "refused", reason, count)
        self._refused(asked.stream, count)


def _refuse_model_id() -> None:
    """Refuse a request that brings a multiplexed model id, by a handle's option or a header.

    Raises:
        BadInput: it does.
    """
    if model_id := serve.get_multiplexed_model_id():
        raise BadInput(
            f"multiplexed_model_id {quoted(model_id)} cannot be honoured: a coordinated batch has "
            "no model id. Leave out the handle's option or the header serve_multiplexed_model_id, "
            "and name the model instead (model=, or the path); an application lists its models "
            "under `models:`, or the networks of a model under `variants:`. With "
            "@serve.multiplexed, use @ray_slo.batch in a @serve.deployment",
            field="multiplexed_model_id",
        )


class _NotingBadInput:
    """Counts a client's mistake inside, and names the model in its error.

    This and `_Admission` are classes, because generators of `contextlib` cost more.
    """

    __slots__ = ("_count", "_model")

    def __init__(self, count: Callable[[str, str, str], None], model: str) -> None:
        self._count, self._model = count, model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, BadInput):
            self._count(self._model, "invalid", error.reason)
            error.model = self._model


class _Admission:
    """The time of a request behind the door."""

    __slots__ = ("_asked", "_hint", "_intake", "_ticket")

    def __init__(self, intake: Intake, asked: Asked, hint: str | None) -> None:
        self._intake, self._asked, self._hint = intake, asked, hint

    async def __aenter__(self) -> None:
        self._ticket = await self._intake._enter(self._asked)

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        self._intake._leave(self._asked, self._ticket)
        if self._hint is None or not isinstance(error, Exception):
            return
        if isinstance(error, BadInput) and error.field == "item" and self._hint not in error.text:
            error.text += f"; {self._hint}"
        elif not isinstance(error, SLOError) and "'bytes' object" in str(error):
            vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), self._hint]


def _slos(said: ModelConfig | PipelineConfig) -> dict[str, Any]:
    classes = {"slo_classes": said.slo_classes} if said.slo_classes else {}
    return {"latency_slo_ms": said.latency_slo_ms, **classes}


def _kind_of(content_type: str) -> tuple[str, bool]:
    """Return the media type, and whether it is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind, kind == "application/json" or kind.endswith("+json")
