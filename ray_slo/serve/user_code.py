"""Runs code that users wrote: whatever it raises, it ends only what it was called for.

Most of a server's code guards itself by `except Exception`. A Rust panic in a tokenizer, or a class
of the user's own derived from `BaseException`, passes that. `SystemExit` ends an event loop,
`StopIteration` cannot travel through a future, and a `CancelledError` looks like our own. Here all
of them become a `RuntimeError` that says what it was.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any

from ray import cloudpickle

from ray_slo.models.checkpoint import Preempted
from ray_slo.serve.errors import BatchResultError
from ray_slo.serve.suspects import Marks

_STUCK_S = 60.0  # a call that runs longer is taken for one that never ends


def as_exception(error: BaseException) -> Exception:
    """The error itself; in place of one that `except Exception` would not catch, or that a future
    cannot carry, a `RuntimeError` with its name and message."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return RuntimeError(in_words(error))


def in_words(error: BaseException) -> str:
    """Name and message of an error, whose class may be the user's own."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return f"{name}, whose message cannot be made"


def sendable(error: Exception) -> Exception:
    """The error itself, or one that says the same and can be pickled."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except BaseException:
        return RuntimeError(in_words(error))
    return error


def call(
    function: Callable[..., Any],
    *values: Any,
    scope: AbstractContextManager[None] | None = None,
) -> Any:
    """`function(*values)`.

    Args:
        scope: to be inside of.

    Raises:
        Exception: what it raised (`as_exception`).
        Preempted: its batch was stopped.
    """
    try:
        with scope or nullcontext():
            return function(*values)
    except Preempted:
        raise
    except BaseException as error:
        if (plain := as_exception(error)) is error:
            raise
        raise plain from error


async def call_async(
    function: Callable[..., Any],
    *values: Any,
    scope: AbstractContextManager[None] | None = None,
) -> Any:
    """`await function(*values)`, in a task of its own: that it cancels itself, or exits, does not
    concern the caller's. When the caller is cancelled, so is the task.

    Raises:
        Exception: what it raised (`as_exception`).
        Preempted: its batch was stopped.
    """
    task = asyncio.ensure_future(_guarded(function, values, scope))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_heard)
        raise
    return task.result()


async def _guarded(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    scope: AbstractContextManager[None] | None,
) -> Any:
    try:
        with scope or nullcontext():
            return await function(*values)
    except Preempted:
        raise
    except BaseException as error:
        if (plain := as_exception(error)) is error:
            raise
        raise plain from error


def _heard(task: asyncio.Task[Any]) -> None:
    """asyncio complains of errors that nobody asks for."""
    if not task.cancelled():
        task.exception()


def check_results(results: Any, expected: int, method: str, model: str) -> None:
    """Raises BatchResultError unless a batch method returned one result per item, in order."""
    try:
        unordered = isinstance(results, str | bytes | dict | set | frozenset)
        count = -1 if unordered else len(results)
    except TypeError:
        count = -1
    if count != expected:
        got = f"{count} results" if count >= 0 else f"a {type(results).__name__}"
        raise BatchResultError(
            f"{method} was given {expected} items and returned {got}; "
            "it must return a list with one result per item",
            model=model,
        )


class HookThreads:
    """Where users' hooks run: off the event loop, so that one that blocks costs its own callers
    only.

    Args:
        threads: how many calls run at a time.
        marks: where to write which requests they are of; default: nowhere.
    """

    def __init__(self, threads: int, marks: Marks | None = None) -> None:
        self._marks = marks
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ray-slo-hook")
        self._threads = threads
        self._numbers = itertools.count()
        self._running: dict[int, float] = {}  # when each call began

    def hook(self, function: Callable[..., Any]) -> Hook:
        return Hook(function, self)

    def inside(self) -> AbstractContextManager[None]:
        """While a call of this request's runs."""
        return nullcontext() if self._marks is None else self._marks.inside()

    async def run(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        context, loop = copy_context(), asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, context.run, self._timed, function, values)

    def _timed(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        number = next(self._numbers)
        self._running[number] = time.monotonic()
        try:
            return call(function, *values, scope=self.inside())
        finally:
            del self._running[number]

    def check(self) -> None:
        """Raises RuntimeError where half of the threads are in calls that seem never to end."""
        since = time.monotonic() - _STUCK_S
        stuck = sum(began < since for began in list(self._running.values()))
        if 2 * stuck >= self._threads:
            raise RuntimeError(
                f"{stuck} calls of preprocess, postprocess, join or size have been running for "
                f"more than {_STUCK_S:.0f} s"
            )


class Hook:
    """A user's pre- or postprocessing, `join` or `size`: in a thread, or awaited where it is
    async.

    Raises:
        Exception: what it raised (`as_exception`).
    """

    def __init__(self, function: Callable[..., Any], threads: HookThreads) -> None:
        self._function = function
        self._threads = threads
        self._is_async = inspect.iscoroutinefunction(function)

    async def __call__(self, *values: Any) -> Any:
        if self._is_async:
            return await call_async(self._function, *values, scope=self._threads.inside())
        return await self._threads.run(self._function, values)
