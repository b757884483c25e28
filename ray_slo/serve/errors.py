"""Typed errors, with the model, the SLO, the reason, and the answer over HTTP and gRPC.

`RefusedEarly`, `Expired` and `WorkerLost` are Serve `BackPressureError`s. Serve turns those (and
only those) into an answer with their own status code, body and `Retry-After`. So a plain deployment
that raises one answers 503 or 504 with the JSON of `to_body`. The other errors need a frontend that
calls `http_response`; in a plain deployment, Serve answers 500 for them.

Every error pickles, and keeps its attributes when Ray wraps it in a `RayTaskError`: all state is
in the instance's `__dict__`, none in class-level defaults.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.exceptions import HTTPException

from ray_slo.core.text import SHOWN, clipped, quoted

if TYPE_CHECKING:
    from starlette.responses import Response


# Outcomes of requests without an answer: some are the service's fault, others the client's (it
# left, or sent a wrong request).
FAULTS = ("refused", "expired", "failed")
OF_CLIENTS = ("cancelled", "invalid")

MAX_MESSAGE = 600  # characters of a message from other code than ours
_MAX_OWN_MESSAGE = 4000  # characters; it may list the names of all models
_LEAST_RETRY_S = 0.01  # a client that is told to wait for less asks again at once

_OF_OUR_BODY = (  # headers that say how the body is sent, which is ours
    *("content-length", "content-type", "content-encoding", "transfer-encoding", "connection"),
    *("upgrade", "trailer", "keep-alive"),
)


__all__ = [
    "BadHeader",
    "BadInput",
    "BatchResultError",
    "BodyTooLarge",
    "ConfigError",
    "Expired",
    "FrontendLost",
    "NotReady",
    "OutOfMemory",
    "RefusedEarly",
    "SLOError",
    "SlowBody",
    "UnknownModel",
    "UnsupportedEncoding",
    "WorkerLost",
]


class SLOError(RayServeException):
    """Base of every error that ray-slo raises.

    Args:
        message: one sentence for a person.
        reason: short and stable, for programs: "would_miss", "shed", "queue_full", ….
        model: the model or pipeline that the client asked for.
        task: the pipeline's task where it happened.
        latency_slo_ms: the request's SLO, milliseconds.
        predicted_finish_ms: when it was predicted to finish, milliseconds after its arrival.
        retry_after_s: when a new attempt makes sense, seconds.

    Attributes:
        http_status: HTTP status code of the class.
        grpc_code: name of the `grpc.StatusCode` of the class.
        outcome: name of this end of a request in metrics, traces and reports.
    """

    outcome: ClassVar[str] = "failed"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    default_reason: ClassVar[str] = "error"

    def __init__(
        self,
        message: str = "",
        *,
        reason: str | None = None,
        model: str | None = None,
        latency_slo_ms: float | None = None,
        predicted_finish_ms: float | None = None,
        retry_after_s: float | None = None,
        task: str | None = None,
    ) -> None:
        # Not super(): BackPressureError's constructor wants queue lengths. With the message alone
        # in `args`, the default pickling rebuilds the error and restores `__dict__`.
        Exception.__init__(self, message)
        if predicted_finish_ms is not None and not math.isfinite(predicted_finish_ms):
            predicted_finish_ms = None
        self.text = message
        self.reason = reason or self.default_reason
        self.model = model
        self.task = task
        self.latency_slo_ms = latency_slo_ms
        self.predicted_finish_ms = predicted_finish_ms
        self._retry_after_s = retry_after_s

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Ray derives a class for an error of another process. Its `str` is a stack trace.
        if issubclass(cls, RayTaskError):
            cls.__str__ = SLOError.__str__  # type: ignore[method-assign]

    def __str__(self) -> str:
        return self.text if self.task is None else f"{self.text} (in task {self.task!r})"

    @property
    def status_code(self) -> int:
        """`http_status`, by the name under which Serve looks for it."""
        return self.http_status

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which a new attempt makes sense; None if no attempt can succeed."""
        return self._retry_after_s

    @property
    def message(self) -> str:
        """The body as JSON; Serve uses it as the answer for `BackPressureError`s."""
        return json.dumps(self.to_body())

    def to_body(self) -> dict[str, Any]:
        """The answer's body: error, reason, message, and the other fields that are known."""
        again_s = self.retry_after_s
        body: dict[str, Any] = {
            "error": type(original(self)).__name__,
            "reason": self.reason,
            "message": clipped(str(self), _MAX_OWN_MESSAGE),
            "model": self.model,
            "task": self.task,
            "latency_slo_ms": _rounded(self.latency_slo_ms),
            "predicted_finish_ms": _rounded(self.predicted_finish_ms),
            "retry_after_s": _rounded(None if again_s is None else max(again_s, _LEAST_RETRY_S)),
        }
        return {k: v for k, v in body.items() if v is not None}


class RefusedEarly(SLOError, BackPressureError):
    """Refused now rather than answered late: it would miss, was shed, the queue was full, or no
    worker can run its model. HTTP 503 with `Retry-After`, gRPC RESOURCE_EXHAUSTED.

    `retry_after_s` defaults to the predicted lateness, or 1 s where none was predicted. It is never
    0: a refusal never means "ask again at once".
    """

    outcome = "refused"
    http_status = 503
    grpc_code = "RESOURCE_EXHAUSTED"
    default_reason = "would_miss"

    @property
    def retry_after_s(self) -> float:
        if self._retry_after_s is not None:
            return self._retry_after_s
        if self.predicted_finish_ms is None or self.latency_slo_ms is None:
            return 1.0
        return max((self.predicted_finish_ms - self.latency_slo_ms) / 1e3, _LEAST_RETRY_S)


class WorkerLost(RefusedEarly):
    """The worker died with this request and no time is left for another. HTTP 503.

    Args:
        worker: its id.
    """

    grpc_code = "UNAVAILABLE"
    default_reason = "worker_lost"

    def __init__(self, message: str = "", *, worker: str | None = None, **context: Any) -> None:
        super().__init__(message or f"worker {worker} was lost", **context)
        self.worker = worker


class NotReady(RefusedEarly):
    """No worker has loaded the model since the application was deployed: they are starting, or have
    failed for good (reason "start_failed"). HTTP 503, gRPC UNAVAILABLE."""

    grpc_code = "UNAVAILABLE"
    default_reason = "starting"


class FrontendLost(RefusedEarly):
    """The frontend died with this request, and no other could take it. Serve's proxies raise it.
    HTTP 503, gRPC UNAVAILABLE."""

    grpc_code = "UNAVAILABLE"
    default_reason = "frontend_lost"


class Expired(SLOError, BackPressureError, TimeoutError):
    """The deadline passed while the request waited. HTTP 504, gRPC DEADLINE_EXCEEDED."""

    outcome = "expired"
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    default_reason = "expired"


class BadInput(SLOError, ValueError):
    """The client sent an item or a value that cannot be used. HTTP 422, gRPC INVALID_ARGUMENT.

    Args:
        field: the part of the input that is wrong.
    """

    outcome = "invalid"
    http_status = 422
    grpc_code = "INVALID_ARGUMENT"
    default_reason = "bad_input"

    def __init__(self, message: str = "", *, field: str | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.field = field

    def to_body(self) -> dict[str, Any]:
        body = super().to_body()
        return body if self.field is None else {**body, "field": self.field}


class BadHeader(BadInput):
    """A header that cannot be used. HTTP 400, gRPC INVALID_ARGUMENT.

    Args:
        field: the header's name.
    """

    http_status = 400
    default_reason = "bad_header"


class BodyTooLarge(BadInput):
    """More than `max_body_bytes`. HTTP 413, gRPC RESOURCE_EXHAUSTED, as gRPC says it itself."""

    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"
    default_reason = "body_too_large"


class UnsupportedEncoding(BadInput):
    """The body's content coding or charset is none that is taken. HTTP 415."""

    http_status = 415
    default_reason = "unsupported_encoding"


class SlowBody(BadInput, TimeoutError):
    """The client did not send the body by the request's deadline. HTTP 408."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    default_reason = "slow_body"


class UnknownModel(SLOError, LookupError):
    """No such model. HTTP 404, gRPC NOT_FOUND.

    Args:
        valid: the names that exist; the body lists them.
    """

    outcome = "invalid"
    http_status = 404
    grpc_code = "NOT_FOUND"
    default_reason = "unknown_model"

    def __init__(
        self, message: str = "", *, model: str | None = None, valid: Iterable[str] = ()
    ) -> None:
        self.valid = sorted(valid)
        if not message:
            known = ", ".join(self.valid) or "none"
            message = f"model {quoted(model)} is unknown; choose one of {known}"
        super().__init__(message, model=None if model is None else clipped(model, SHOWN))

    def to_body(self) -> dict[str, Any]:
        return {**super().to_body(), "valid": self.valid}


class OutOfMemory(SLOError):
    """The worker has not enough memory for this request, though it ran alone. HTTP 500, gRPC
    RESOURCE_EXHAUSTED."""

    grpc_code = "RESOURCE_EXHAUSTED"
    default_reason = "out_of_memory"


class BatchResultError(SLOError):
    """A batch method returned no list, one of another length than its input, or a result that
    cannot be sent. HTTP 500."""

    default_reason = "batch_result"


class ConfigError(SLOError, ValueError):
    """Rejected before anything runs: at decoration, parsing or deployment."""

    default_reason = "config"


@functools.cache
def errors_of_requests() -> tuple[type[SLOError], ...]:
    """The classes that a request may be answered with; the user's own error is a 500."""
    found, classes = [], [SLOError]
    while classes:
        cls = classes.pop()
        if cls.__module__ != __name__:
            continue  # a class that Ray derives for errors from other processes
        classes += reversed(cls.__subclasses__())
        if cls.outcome != SLOError.outcome or cls is OutOfMemory:
            found.append(cls)
    return tuple(found)


def error_of(reason: str) -> type[SLOError]:
    """The error of a refusal for this reason."""
    named = (cls for cls in errors_of_requests() if cls.default_reason == reason)
    return next(named, RefusedEarly)


def predicted(
    finish_ms: float, slo_ms: float, margin_ms: float, late_s: float
) -> tuple[str, float | None]:
    """Return what a refusal says about a predicted finish, and the time after which a new attempt
    makes sense, in seconds.

    Args:
        finish_ms: predicted finish in milliseconds after arrival. NaN if there is none.
        margin_ms: part of the SLO that is kept free.
        late_s: how late the running batch is. What waits behind it is predicted as if it ended now.
    """
    said = f"SLO {slo_ms:.4g} ms"
    if not math.isfinite(finish_ms):
        return said, None
    said += f", predicted finish {finish_ms:.0f} ms after arrival"
    if finish_ms + margin_ms <= slo_ms:
        said += ", and the policy keeps a margin"
    elif margin_ms:
        said += f", and {margin_ms:.3g} ms are kept as a margin"
    return said, max(finish_ms + margin_ms - slo_ms, 0.0) / 1e3 + late_s


def original(error: BaseException) -> BaseException:
    """Return the error itself. If it came from another process, return the one that was raised
    there. The user's own errors may have a `cause`, too, but only Ray's is an original."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def http_status(error: BaseException) -> int:
    """Return the status of the answer for this error. An `HTTPException` has its own."""
    found = original(error)
    status = found.status_code if isinstance(found, SLOError | HTTPException) else 0
    return int(status) if status in range(200, 600) else SLOError.http_status


def outcome_of(error: BaseException) -> tuple[str, str]:
    """Outcome and reason of a request with this error, for metrics and traces."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled", "cancelled"
    if isinstance(error, errors_of_requests()):
        return error.outcome, error.reason
    if isinstance(original(error), HTTPException):
        status = http_status(error)
        return SLOError.outcome if status >= 500 else BadInput.outcome, f"http_{status}"
    return SLOError.outcome, "user_error"


def http_response(error: Exception, status: int | None = None, *, details: bool = True) -> Response:
    """Return the JSON answer for an error: its status, its body, and `Retry-After` in whole
    seconds. An `HTTPException` of the user's code has its own headers.

    Args:
        details: see `error_body`.
    """
    from starlette.responses import JSONResponse, Response

    status = status or http_status(error)
    headers = {}
    if isinstance(error, SLOError):
        if (retry := error.retry_after_s) is not None:
            headers["retry-after"] = str(max(1, math.ceil(retry)))
    elif isinstance(found := original(error), HTTPException):
        headers = _own_headers(found)
    if status in (204, 205, 304):  # such an answer has no body
        return Response(status_code=status, headers=headers)
    return JSONResponse(error_body(error, details), status_code=status, headers=headers)


def _own_headers(error: HTTPException) -> dict[str, str]:
    """Return the headers of an `HTTPException`, without those that would break the answer."""
    found = {}
    for name, value in dict(error.headers or {}).items():
        name, text = str(name).lower(), str(value)
        is_sent = f"{name}{text}".isprintable() and name.isascii() and "".join(name.split()) == name
        if is_sent and ":" not in name and name not in _OF_OUR_BODY:
            found[name] = text.encode("latin-1", "replace").decode("latin-1")
    return found


def error_body(error: Exception, details: bool = True) -> dict[str, Any]:
    """The body for any error: `to_body()`, or a similar one for an error of the user's code.

    Args:
        details: whether the body has the message of an error of the user's code. What the user
            gave to an `HTTPException` is meant for the client.
    """
    if isinstance(error, SLOError):
        return error.to_body()
    found = original(error)
    if isinstance(found, HTTPException):
        detail = _as_json(found.detail)
        said = detail if isinstance(detail, str) else json.dumps(detail)
        about = {"reason": outcome_of(error)[1], "message": clipped(said, MAX_MESSAGE)}
        return {"error": type(found).__name__, **about, "detail": detail}
    if not details:
        said = "the model failed; the log of the application says why"
        return {"error": "InternalError", "reason": "failed", "message": said}
    notes = getattr(error, "__notes__", ())
    said = "; ".join([message_of(found), *map(str, notes if isinstance(notes, list) else ())])
    return {
        "error": type(found).__name__,
        "reason": "failed",
        "message": clipped(said, MAX_MESSAGE),
    }


def parts_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the errors in an exception group, which is new in Python 3.11."""
    parts = getattr(error, "exceptions", ()) if "Group" in type(error).__name__ else ()
    return parts if isinstance(parts, tuple) else ()


def message_of(error: BaseException) -> str:
    """Return the message of an error of the user's code. Where it is the stack trace of another
    process, return only its last line: clients must not read addresses and paths."""
    try:
        said = str(original(error))
    except BaseException:  # the class may be the user's
        return "the message cannot be made"
    if '\n  File "' in said or "Traceback (most recent call last)" in said:
        said = said.rstrip().rpartition("\n")[2]
    parts = [f"{type(part).__name__}: {message_of(part)}" for part in parts_of(original(error))]
    return "; ".join([said, *parts])


def _as_json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
