"""Calls of user code. Every exception ends only the call.

Most of a server's code protects itself with `except Exception`. This does not catch a Rust panic in
a tokenizer, or a user's class derived from `BaseException`. `SystemExit` ends an event loop,
`StopIteration` cannot pass through a future, and a `CancelledError` looks like one of the server.
Here all of them become a `RuntimeError` with the original name.
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

_STUCK_S = 60.0  # a call that runs longer counts as hanging


def as_exception(error: BaseException) -> Exception:
    """Return the error itself. If `except Exception` would not catch it, or a future cannot have
    it, return a `RuntimeError` with its name and message."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return RuntimeError(in_words(error))


def in_words(error: BaseException) -> str:
    """Return the name and the message of an error. The class may be the user's, so `str` may
    fail."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return f"{name}, whose message cannot be made"


def sendable(error: Exception) -> Exception:
    """Return the error itself. If it cannot be pickled, return one with the same text."""
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
    """Return `function(*values)`.

    Args:
        scope: context manager around the call.

    Raises:
        Exception: the error that it raised (`as_exception`).
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
    """Return `await function(*values)`. It runs in a separate task: if it cancels itself or exits,
    the caller's task continues. If the caller is cancelled, the task is cancelled too.

    Raises:
        Exception: the error that it raised (`as_exception`).
        Preempted: its batch was stopped.
    """
    task = asyncio.ensure_future(_guarded(function, values, scope))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(heard)
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


def heard(task: asyncio.Future[Any]) -> None:
    """Read the error of a task, because asyncio logs errors that are never read."""
    if not task.cancelled():
        task.exception()


def check_results(results: Any, expected: int, method: str, model: str) -> None:
    """Check that a batch method returned a list with one result per item.

    Raises:
        BatchResultError: it did not.
    """
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
    """Threads for users' hooks, outside the event loop, so that a blocking hook affects only its
    own callers.

    Args:
        threads: number of calls that run at a time.
        marks: records the requests of the calls; default: no record.
    """

    def __init__(self, threads: int, marks: Marks | None = None) -> None:
        self._marks = marks
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ray-slo-hook")
        self._threads = threads
        self._numbers = itertools.count()
        self._running: dict[int, float] = {}  # start of each call

    def hook(self, function: Callable[..., Any]) -> Hook:
        return Hook(function, self)

    def inside(self) -> AbstractContextManager[None]:
        """Context during a call for this request."""
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
        """Check the running calls.

        Raises:
            RuntimeError: half of the threads are in calls that seem to hang.
        """
        since = time.monotonic() - _STUCK_S
        stuck = sum(began < since for began in list(self._running.values()))
        if 2 * stuck >= self._threads:
            raise RuntimeError(
                f"{stuck} calls of preprocess, postprocess, join or size have been running for "
                f"more than {_STUCK_S:.0f} s"
            )


class Hook:
    """A user's `preprocess`, `postprocess`, `join` or `size`. It runs in a thread, or is awaited if
    it is async.

    Raises:
        Exception: the error that it raised (`as_exception`).
    """

    def __init__(self, function: Callable[..., Any], threads: HookThreads) -> None:
        self._function = function
        self._threads = threads
        self._is_async = inspect.iscoroutinefunction(function)

    async def __call__(self, *values: Any) -> Any:
        if self._is_async:
            return await call_async(self._function, *values, scope=self._threads.inside())
        return await self._threads.run(self._function, values)
