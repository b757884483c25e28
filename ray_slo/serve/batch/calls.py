"""Settings, kinds and calls of a function that `@ray_slo.batch` decorates."""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray_slo.core import LatencyProfile, Request
from ray_slo.serve.batch.capacity import Uses
from ray_slo.serve.ray_private import context

_GUESS_SIZES = 1024  # size of the guessed profile; `set_max_batch_size` may be as large


@dataclass(slots=True)
class Settings:
    latency_slo_s: float
    max_batch_size: int
    max_concurrent_batches: int
    objective: str
    profile: LatencyProfile | None
    margin: float  # safety margin, as a share of a request's budget

    def prior(self) -> LatencyProfile:
        if self.profile is not None:
            return self.profile
        unit = self.latency_slo_s / 50
        largest = max(_GUESS_SIZES, self.max_batch_size)
        return LatencyProfile.linear(unit, 4 * unit, largest, measured_to=0)


@dataclass(slots=True, eq=False)
class Call:
    """A caller that waits for one result."""

    instance: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    latency_slo_s: float
    request: Request
    future: asyncio.Future[Any]
    context: Any  # Serve's request context
    trace: Any  # OpenTelemetry's context, if Serve's tracing is on
    uses: Uses | None  # of its HTTP request
    spent_s: float  # how much of the SLO had passed before the call
    answered_at: float | None = None  # when it got its answer, time.monotonic()
    tried: bool = False  # it runs although the profile predicts that it will be late
    ended: bool = False  # in a stream: this caller gets no more values

    @property
    def group(self) -> Any:
        """Calls of one group can share one call of the method."""
        return context.model_id(self.context), len(self.args), tuple(self.kwargs)


class Kind(enum.Enum):
    """Kinds of batch functions."""

    SYNC = "runs in a thread"
    ASYNC = "runs on the event loop"
    STREAM = "yields a list for each step"


def code_of(func: Any) -> tuple[Any, ...]:
    """Return the functions that may say of which kind a callable is: the function of a partial, and
    the `__call__` of an object."""
    while isinstance(func, functools.partial):
        func = func.func
    return func, type(func).__call__


def kind_of(func: Callable[..., Any]) -> Kind:
    """Return the kind of a function, a partial, or an object with `__call__`."""
    for code in code_of(func):
        if inspect.isasyncgenfunction(code):
            return Kind.STREAM
        if inspect.iscoroutinefunction(code):
            return Kind.ASYNC
    return Kind.SYNC


class End:
    """The end of a stream in its queue, with the error if there is one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
