"""Reads, checks and admits what clients ask for over HTTP, gRPC and handles."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from ray_slo.core.text import quoted
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.deadlines import ATTEMPT_HEADER, MAX_LATENCY_MS, REFUSED_HEADER, TimeLimits
from ray_slo.serve.errors import BadInput, BodyTooLarge, RefusedEarly, SLOError, UnknownModel
from ray_slo.serve.frontend import http as reading
from ray_slo.serve.frontend.hooks import Hooks
from ray_slo.serve.frontend.ledger import Asked
from ray_slo.serve.frontend.surroundings import Surroundings
from ray_slo.serve.frontend.workers import offers
from ray_slo.serve.messages import Capacity
from ray_slo.serve.proxy.gate import Door, Known
from ray_slo.serve.suspects import ATTEMPT

_DIGITS = 7  # of a number of requests
_PER_TURN = 8  # requests that go on together, and are submitted in one message


class Intake:
    """Reads and admits requests.

    Args:
        capacity: of a model; None while it is not known.
        refused: told of requests that are refused at a door: the model, and their number.
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
        self._readers = reading.Readers(spec.max_queued_requests)
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-parser")
        self.offers = offers(spec)

    def describe(self) -> dict[str, Any]:
        """What the application serves."""
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

    # -- who asks for what -----------------------------------------------------------------

    def model_name(self, name: str | None) -> str:
        """The model that is meant; None means the only one.

        Raises:
            UnknownModel: there is no such model, or several.
        """
        if name is None and len(self.offers) == 1:
            return next(iter(self.offers))
        if name is not None and name in self.offers:
            return name
        self._unanswered("", "invalid", "unknown_model")
        valid = self.offers
        if name is None:
            said = f"say which model; choose one of {', '.join(sorted(valid))}"
            raise UnknownModel(said, valid=valid)
        raise UnknownModel(model=name, valid=valid)

    def asked(self, model: str, arrival: float, latency_slo_ms: float | None) -> Asked:
        """What a caller asks who gives `latency_slo_ms`, or leaves it to the model.

        Raises:
            BadInput: it is not a positive number.
        """
        return Asked(model, arrival, self._slo_s(model, latency_slo_ms))

    def asked_http(self, request: HttpRequest, model: str, arrival: float) -> Asked:
        """What the headers of an HTTP request ask.

        Raises:
            BadInput: one of them is wrong.
        """
        with self._noting_bad_input(model):
            limits = TimeLimits(request.headers.items(), strict=True)
            slo_s = limits.budget_s(self.offers[model][0] / 1e3)
            return Asked(model, arrival, slo_s, request.headers.get("traceparent"))

    def asked_grpc(
        self, request: Any, metadata: Any, model: str, arrival: float
    ) -> tuple[Asked, str, bytes]:
        """What a gRPC message and its metadata ask, and the content type and body of the item.

        Raises:
            BadInput: something in them is wrong, or too large.
        """
        with self._noting_bad_input(model):
            limits = TimeLimits(metadata, strict=True)
            if request.HasField("latency_slo_ms"):
                slo_s = self._slo_s(model, request.latency_slo_ms)
            else:
                slo_s = limits.budget_s(self.offers[model][0] / 1e3)
            if (timeout_s := limits.timeout_s()) is not None:
                slo_s = min(slo_s, timeout_s)  # after its deadline, a gRPC client has hung up
            kind = request.WhichOneof("item")
            if kind is None:
                raise BadInput("no item; give json or data", field="item")
            body = request.data if kind == "data" else request.json.encode()
            for option in ("max_body_bytes", "max_json_bytes")[: 1 + (kind == "json")]:
                if len(body) > (limit := getattr(self._spec, option)):
                    raise reading.too_large(kind, len(body), limit, option=option)
            content_type = "application/json" if kind == "json" else "application/octet-stream"
            traceparent = dict(metadata).get("traceparent")
            return Asked(model, arrival, slo_s, traceparent), content_type, body

    def _slo_s(self, model: str, latency_slo_ms: float | None) -> float:
        if latency_slo_ms is None:
            return self.offers[model][0] / 1e3
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

    @contextlib.contextmanager
    def _noting_bad_input(self, model: str) -> Iterator[None]:
        try:
            yield
        except BadInput as error:
            self._unanswered(model, "invalid", error.reason)
            error.model = model
            raise

    # -- bodies ----------------------------------------------------------------------------

    async def body(self, request: HttpRequest, asked: Asked) -> bytes:
        """The body that a client sends over HTTP.

        Raises:
            BodyTooLarge, SlowBody, RefusedEarly, BadInput: see `http.body_of`.
        """
        content_type = request.headers.get("content-type", "")
        most, option = self._spec.max_body_bytes, "max_body_bytes"
        if not self._takes_bytes(content_type, asked.model) and self._spec.max_json_bytes < most:
            most, option = self._spec.max_json_bytes, "max_json_bytes"
        try:
            left_s = asked.deadline - time.monotonic()
            return await reading.body_of(request, most, left_s, option, self._readers)
        except (SLOError, ClientDisconnect) as error:
            if not isinstance(error, SLOError):
                error = BadInput("the client left before its body was here", field="body")
            self._unanswered(asked.model, error.outcome, error.reason)
            error.model = asked.model
            raise error from None

    async def item(self, content_type: str, body: bytes, model: str) -> Any:
        """What is in a body: JSON by content type; raw bytes for anything else, if the model has a
        `preprocess`.

        Raises:
            BadInput: it is no JSON.
        """
        if self._takes_bytes(content_type, model):
            return body
        with self._noting_bad_input(model):
            kind, is_json = _kind_of(content_type)
            most = self._spec.max_json_values
            try:
                if len(body) <= reading.INLINE_BYTES:
                    return reading.json_of(body, most)
                # On one thread, so that parsing never takes more than half of Python's time.
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._parser, reading.json_of, body, most)
            except BodyTooLarge:
                raise
            except ValueError as error:
                if not is_json and self._has_preprocess(model):
                    return body
                said = f"body is not JSON: {error}"
                if not is_json:
                    said += f" (content-type {quoted(kind)})"
                raise BadInput(said, field="body") from None

    def _takes_bytes(self, content_type: str, model: str) -> bool:
        """Whether a body of this type goes to the model's `preprocess` as it is."""
        kind, is_json = _kind_of(content_type)
        return bool(kind) and not is_json and self._has_preprocess(model)

    def _has_preprocess(self, model: str) -> bool:
        return self.offers[model][1] in self._hooks.preprocess

    # -- the doors -------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def admitted(self, asked: Asked) -> AsyncIterator[None]:
        """Inside, a request is on its way.

        Raises:
            RefusedEarly: it would come too late.
        """
        capacity = self._capacity(self.offers[asked.model][1])
        rate = None if capacity is None else capacity.rate / self._spec.num_frontends
        try:
            ticket = await self._door.enter(asked.deadline, Known(rate))
        except RefusedEarly as error:
            self._refuse(asked.model, error.reason)
            error.model, error.latency_slo_ms = asked.model, asked.slo_s * 1e3
            raise
        try:
            yield
        finally:
            self._door.leave(ticket)

    def heed_proxy(self, headers: Mapping[str, str], model: str) -> None:
        """What our door in Serve's proxy says with a request."""
        ATTEMPT.set(headers.get(ATTEMPT_HEADER, ""))
        said = headers.get(REFUSED_HEADER, "")
        if self._has_door_before and said.isdecimal() and len(said) < _DIGITS:
            self._refuse(model, "door", int(said))

    def capacity_said(self, path: str) -> str:
        """For our door in Serve's proxy: requests/s that the workers can do of what is served
        there, its SLO in milliseconds, how many requests all frontends keep, and how many bytes
        of a body, and of JSON, are read."""
        name = path if path in self.offers else next(iter(self.offers))
        slo_ms, model = self.offers[name]
        most = self._spec.max_queued_requests * self._spec.num_frontends
        capacity = self._capacity(model)
        rate = math.inf if capacity is None else capacity.rate
        sizes = f"{self._spec.max_body_bytes};{self._spec.max_json_bytes}"
        return f"{rate:.6g};{slo_ms:.6g};{most};{sizes}"

    def _refuse(self, model: str, reason: str, count: int = 1) -> None:
        """Requests that came no further than a door; they count as demand."""
        self._unanswered(model, "refused", reason, count)
        self._refused(model, count)


def _kind_of(content_type: str) -> tuple[str, bool]:
    """The media type, and whether it is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind, kind == "application/json" or kind.endswith("+json")
