"""The deadline of a request, from its headers or from the scope of the current call.

`HEADERS` lists the request headers of ray-slo: bounds, proxies, frontends, gRPC and the OpenAPI
document of the tests read it. `TimeLimits` is the only parser of headers about time.

A deadline in user code (`@ray_slo.batch`, `remaining_ms`) comes from the first of these that
exists:

1. `deadline_scope(...)` around the call;
2. the HTTP request that Serve is handling, in deployments that use `@ray_slo.batch`. In others, use
   `with deadline_scope(request):`;
3. the gRPC request's metadata, with the same names. `ray_slo.serve.grpc.with_deadlines` puts gRPC's
   own deadline there, because Serve does not read it.

`x-slo-latency-ms` replaces the model's SLO. `x-slo-class` names another SLO of the model.
`x-request-timeout-seconds` can only shorten the SLO: Serve's proxy gives up at this time, and
gateways set it to minutes. A `DeploymentHandle` passes on the metadata of gRPC requests, but no
headers of HTTP requests: call it with `latency_slo_ms=remaining_ms()`. Deadlines here are
`time.monotonic()` seconds of this process. This module does not import Ray.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, overload, runtime_checkable

from ray_slo.core.requests import MAX_LATENCY_MS
from ray_slo.core.text import quoted

logger = logging.getLogger(__name__)

PROXY_CALLBACK_ENV = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_CALLBACK = "ray_slo.serve.proxy:middlewares"

HTTP_PAGE = "docs/reference/http.md"
# Frontends have answered this long after the deadline. So a caller gets the answer within a second.
ANSWERED_S = 0.9
LATE_BODY_S = 0.5  # time for a body after its deadline, so that late requests get the right error
LATENCY_HEADER = "x-slo-latency-ms"
CLASS_HEADER = "x-slo-class"
TIMEOUT_HEADER = "x-request-timeout-seconds"
PROXIED_HEADER = "x-slo-timeout-ms"
WHOLE_HEADER = "x-slo-body-whole"
REFUSED_HEADER = "x-slo-refused-before"
WAY_HEADER = "x-slo-way-ms"
ATTEMPT_HEADER = "x-slo-attempt"
ARRIVED_HEADER = "x-slo-arrived"
KNOWN_HEADER = "x-slo-known-ms"
MARK_HEADER = "x-slo-mark"
CAPACITY_HEADER = "x-slo-capacity"  # of answers: the capacity that the frontend reports
BATCH_HEADER = "x-batch-capacity"  # of answers: that of functions with `@ray_slo.batch`
NO_PLACE = "none"  # value of `CAPACITY_HEADER` if the frontend does not know the model or the class


class Header(NamedTuple):
    """A request header.

    Attributes:
        said_by: who sets it: the client, the admission control in a proxy ("door"), the part of a
            proxy that sends requests again ("failover"), or HAProxy, to be believed ("mark").
            Proxies remove headers of a client that only ray-slo's proxies may set.
        means: meaning of the header, for the OpenAPI document of the tests.
        per_s: units per second, if the value is a time. 0 for other values.
        most: the largest value, in its unit.
        unit: unit of the value, for messages.
    """

    name: str
    said_by: Literal["client", "door", "failover", "mark"]
    means: str
    per_s: float = 0.0
    most: float = math.inf
    unit: str = ""


HEADERS = {
    header.name: header
    for header in (
        Header(
            LATENCY_HEADER,
            "client",
            "The request's own SLO, milliseconds, instead of the model's.",
            per_s=1e3,
            most=MAX_LATENCY_MS,
            unit="milliseconds",
        ),
        Header(
            CLASS_HEADER,
            "client",
            "The SLO class that the request belongs to; its SLO instead of the model's.",
        ),
        Header(
            TIMEOUT_HEADER,
            "client",
            "When the client gives up, seconds; can only tighten the SLO.",
            per_s=1.0,
            most=MAX_LATENCY_MS / 1e3,
            unit="seconds",
        ),
        Header(PROXIED_HEADER, "failover", "What is left of the client's timeout.", per_s=1e3),
        Header(ATTEMPT_HEADER, "failover", "Names this sending of the request."),
        Header(KNOWN_HEADER, "failover", "The model's SLO as HAProxy knows it, milliseconds."),
        Header(MARK_HEADER, "mark", "The secret of the cluster's HAProxy."),
        Header(WHOLE_HEADER, "door", '"1": the proxy has the whole body; else "0".'),
        Header(ARRIVED_HEADER, "door", "When the request came to the door, and by whose clock."),
        Header(REFUSED_HEADER, "door", "How many requests the proxy refused before this one."),
        Header(WAY_HEADER, "door", "How long the way from the proxy and back takes, milliseconds."),
    )
}
_BY_KEY: dict[str | bytes, Header] = {
    key: header for header in HEADERS.values() for key in (header.name, header.name.encode())
}
_SAID_BY = {key: header.said_by for key, header in _BY_KEY.items()}
_TIMES = {key: header.name for key, header in _BY_KEY.items() if header.per_s}
_LONGEST_NUMBER = 32  # characters
_LONGEST_CLASS = 100  # characters, as for all names
_LEAST_MS = 1.0  # stands for a deadline that has passed, because 0 would be an invalid SLO


# -- headers -----------------------------------------------------------------------------------


def read_here(headers: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the headers that ray-slo reads. A request has many others."""
    return [pair for pair in headers if pair[0] in _BY_KEY]


class TimeLimits:
    """The time limits in the headers of a request (or the metadata of gRPC).

    A value must be a positive decimal number within the header's bound, and appear once.

    Args:
        headers: pairs of text or bytes, names in small letters; other headers are ignored.
        strict: refuse a bad value; otherwise it counts as absent.
        proxied: whether a proxy of ray-slo passed the request on. Then the client did not set
            `x-slo-timeout-ms`.
    """

    def __init__(
        self, headers: Iterable[tuple[Any, Any]], *, strict: bool = False, proxied: bool = True
    ) -> None:
        self._strict = strict
        self._found: dict[str, list[Any]] = {}
        for key, value in headers:
            if (name := _TIMES.get(key)) and (proxied or name != PROXIED_HEADER):
                self._found.setdefault(name, []).append(value)

    def own_s(self) -> float | None:
        """Return the SLO that the client sets for the request, in seconds. None: the model's SLO.

        Raises:
            BadHeader: a bad value, if `strict`.
        """
        return self._seconds(LATENCY_HEADER)

    def timeout_s(self) -> float | None:
        """Return the time until the client gives up, in seconds. None if it does not say.

        Raises:
            BadHeader: a bad value, if `strict`.
        """
        named_s, proxied_s = self._seconds(TIMEOUT_HEADER), self._seconds(PROXIED_HEADER)
        return named_s if proxied_s is None else proxied_s

    def named_s(self) -> float | None:
        """Return the time until the deadline that the client names, in seconds, or None."""
        own_s = self.own_s()
        return self.timeout_s() if own_s is None else own_s

    @overload
    def budget_s(self, slo_s: float) -> float: ...

    @overload
    def budget_s(self, slo_s: float | None) -> float | None: ...

    def budget_s(self, slo_s: float | None) -> float | None:
        """Return the time from the request's arrival to its deadline, in seconds. It is the
        client's SLO, otherwise the model's. A timeout can only shorten it.

        Args:
            slo_s: the model's SLO in seconds. None: not known.

        Raises:
            BadHeader: a bad value, if `strict`.
        """
        if not self._found:
            return slo_s
        own_s = self.own_s()
        return tightest(self.timeout_s(), slo_s) if own_s is None else own_s

    def _seconds(self, name: str) -> float | None:
        values = self._found.get(name)
        if values is None:
            return None
        header, value = HEADERS[name], _number(values[0])
        if len(values) > 1:
            bad = _twice(len(values))
        elif value == 0 and name == TIMEOUT_HEADER:
            return None  # in Serve, 0 means "no timeout"
        elif 0 < value <= header.most and value < math.inf:
            return value / header.per_s
        else:
            unit = f" of {header.unit}" if header.unit else ""
            bound = f", at most {header.most:.0f}" if header.most < math.inf else ""
            bad = f"must be a positive number{unit}{bound}, got {quoted(values[0])}"
        if self._strict:
            _refuse(name, bad)
        return None


def slo_class_of(headers: Iterable[tuple[Any, Any]], *, strict: bool = False) -> str:
    """Return the SLO class that a client names. It is empty if the client names none.

    Args:
        headers: pairs of text or bytes, with names in small letters. Other headers are ignored.
        strict: whether a header that is there twice is refused; otherwise the first one counts. If
            False, a name that is too long counts as absent.

    Raises:
        BadHeader: the header is there twice, if `strict`.
    """
    found = [value for name, value in headers if _BY_KEY.get(name) is HEADERS[CLASS_HEADER]]
    if not found:
        return ""
    if strict and len(found) > 1:
        _refuse(CLASS_HEADER, _twice(len(found)))
    text = found[0].decode("latin-1") if isinstance(found[0], bytes) else str(found[0])
    return text if strict or len(text) <= _LONGEST_CLASS else ""


def _twice(times: int) -> str:
    return f"is there {times} times; send one"


def _refuse(name: str, bad: str) -> NoReturn:
    from ray_slo.serve.errors import BadHeader  # imports Ray

    raise BadHeader(f"header {name} {bad}. See {HTTP_PAGE}#requests", field=name)


def _number(value: Any) -> float:
    """Return the value of a decimal number in text. NaN for anything else."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    # This check is thirty times as fast as an exception.
    if not text or len(text) > _LONGEST_NUMBER or not text.isascii() or "_" in text:
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(value: Any) -> float | None:
    """Return a number that is above 0 and finite. None for anything else."""
    number = as_number(value)
    return number if 0 < number < math.inf else None


def tightest(*times: float | None) -> float | None:
    """Return the smallest of the known times."""
    return min((t for t in times if t is not None), default=None)


def without(headers: Iterable[tuple[Any, Any]], *said_by: str) -> list[tuple[Any, Any]]:
    """Return the headers without those that only ray-slo's proxies may set. A client's values for
    these are not trusted.

    Args:
        said_by: the setters whose headers are removed: "door", "failover" or "mark".
    """
    return [pair for pair in headers if _SAID_BY.get(pair[0]) not in said_by]


def spent(
    headers: Iterable[tuple[Any, Any]], spent_s: float, other_s: float | None = None
) -> list[tuple[Any, Any]]:
    """Return a request's headers for a frontend.

    Times are reduced by the time spent. `x-request-timeout-seconds`, which Serve acts upon, becomes
    `x-slo-timeout-ms`. A bad value is unchanged: the reader reports it.

    Args:
        headers: pairs of bytes or of text.
        spent_s: time since the request came, in seconds.
        other_s: another timeout from now, in seconds.
    """
    told, timeout_s, is_text = [], other_s, False
    for name, value in headers:
        is_text = isinstance(name, str)
        if name not in _TIMES:
            told.append((name, value))
            continue
        limits = TimeLimits([(name, value)], proxied=False)
        if (own_s := limits.own_s()) is not None:
            told.append((name, _millis(own_s - spent_s, is_text) if spent_s else value))
        elif (left_s := limits.timeout_s()) is not None:
            timeout_s = tightest(timeout_s, left_s - spent_s)
        else:
            told.append((name, value))
    if timeout_s is not None:
        name = PROXIED_HEADER if is_text else PROXIED_HEADER.encode()
        told.append((name, _millis(timeout_s, is_text)))
    return told


def left_ms(slo_ms: float, spent_s: float) -> float:
    """Return the rest of an SLO, in milliseconds."""
    return max(slo_ms - 1e3 * spent_s, _LEAST_MS)


def _millis(seconds: float, is_text: bool) -> Any:
    text = f"{left_ms(1e3 * seconds, 0.0):.3f}"
    return text if is_text else text.encode()


# -- the current call --------------------------------------------------------------------------


@runtime_checkable
class HasHeaders(Protocol):
    """A Starlette or FastAPI request, or an object with `headers`."""

    @property
    def headers(self) -> Mapping[str, str]: ...


class _Limit(NamedTuple):
    at: float  # time.monotonic() seconds; inf: no deadline, even if the request has one
    replaces_slo: bool


_limit: ContextVar[_Limit | None] = ContextVar("ray_slo_limit", default=None)


@contextmanager
def deadline_scope(latency_ms: float | HasHeaders | None) -> Iterator[None]:
    """Set a deadline for the calls inside. It replaces that of the surrounding request.

    Args:
        latency_ms: time until the deadline, in milliseconds; or an HTTP request (any object with
            `headers`), whose headers are read. None: each call has the SLO of its model.

    Raises:
        ValueError: `latency_ms` is none of these.
    """
    if latency_ms is None:
        limit = None
    elif isinstance(latency_ms, HasHeaders):
        limit = _limit_of((name.lower(), value) for name, value in latency_ms.headers.items())
    else:
        limit = _from_now(_scope_ms(latency_ms) / 1e3, True)
    token = _limit.set(limit or _Limit(math.inf, False))
    try:
        yield
    finally:
        _limit.reset(token)


def as_number(value: Any) -> float:
    """Return a value as a number; nan if it is none, or a boolean."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def slo_ms_of(value: Any, error: Callable[..., Exception], **context: Any) -> float:
    """Return a `latency_slo_ms` of a call or a decorator.

    Raises:
        Exception: the given error, with `context`. The value is no positive number, or too large.
    """
    number = as_number(value)
    if not 0 < number <= MAX_LATENCY_MS:
        raise error(
            f"latency_slo_ms must be a positive number of milliseconds, at most "
            f"{MAX_LATENCY_MS:.0f}, got {quoted(value)}",
            **context,
        )
    return number


def _scope_ms(value: Any) -> float:
    number = as_number(value)
    if math.isnan(number):
        raise ValueError(
            "latency_ms of deadline_scope must be a number of milliseconds, a request with "
            f"headers, or None, got {quoted(value)}"
        )
    return number


def note_headers(headers: Iterable[tuple[Any, Any]], before_s: float = 0.0) -> None:
    """Note that the current context belongs to an HTTP request with these headers. It was sent
    `before_s` ago."""
    _limit.set(_limit_of(headers, before_s))


def without_request() -> Context:
    """Return a copy of the current context that belongs to no request."""
    from ray_slo.serve.ray_private.context import forget_request

    context = copy_context()
    context.run(forget_request)
    context.run(_limit.set, None)
    return context


def deadline_for(latency_slo_s: float) -> float:
    """Return the deadline of a call that starts now at a model with this SLO, in
    `time.monotonic()` seconds."""
    at = time.monotonic() + latency_slo_s
    limit = _current_limit()
    if limit is None:
        return at
    return limit.at if limit.replaces_slo else min(at, limit.at)


def of_caller_s(slo_s: float) -> float:
    """Return the SLO of a call through a handle that names none, in seconds. Serve hands down the
    metadata of the gRPC request that the caller answers; it can shorten `slo_s`. Serve does not
    hand down the headers of HTTP requests. A warning says so, once per process.
    """
    from ray_slo.serve.ray_private.context import came_by_http, grpc_metadata

    metadata = grpc_metadata()
    if metadata is not None:
        return min(slo_s, TimeLimits(metadata).budget_s(slo_s))
    if came_by_http():
        _warn_of_lost_headers()
    return slo_s


@functools.cache
def _warn_of_lost_headers() -> None:
    logger.warning(
        "a deployment that answers HTTP calls this one by its handle, without latency_slo_ms. "
        "Serve does not hand down its clients' headers %s and %s, so they have no effect. In that "
        "deployment, write `with deadline_scope(request):`, and call with "
        "`latency_slo_ms=remaining_ms()` (docs/from-serve.md). This warning is not repeated",
        *(LATENCY_HEADER, TIMEOUT_HEADER),
    )


def remaining_ms() -> float | None:
    """Return the time until the deadline of the current call, in milliseconds, at least 0. None if
    there is no deadline."""
    limit = _current_limit()
    if limit is None or limit.at == math.inf:
        return None
    return max(0.0, 1e3 * (limit.at - time.monotonic()))


def _current_limit() -> _Limit | None:
    if (limit := _limit.get()) is not None:
        return limit
    from ray_slo.serve.ray_private.context import grpc_metadata

    metadata = grpc_metadata()
    return None if metadata is None else _limit_of(metadata)


def _limit_of(headers: Iterable[tuple[Any, Any]], before_s: float = 0.0) -> _Limit | None:
    limits = TimeLimits(headers)
    own_s = limits.own_s()
    named_s = limits.timeout_s() if own_s is None else own_s
    return None if named_s is None else _from_now(named_s - before_s, own_s is not None)


def _from_now(budget_s: float, replaces_slo: bool) -> _Limit:
    return _Limit(time.monotonic() + min(budget_s, MAX_LATENCY_MS / 1e3), replaces_slo)
