"""Calls of user code. Every exception ends only the call.

Most of a server's code protects itself with `except Exception`. This does not catch a Rust panic in
a tokenizer, or a user's class derived from `BaseException`. `SystemExit` ends an event loop,
`StopIteration` cannot pass through a future, and a `CancelledError` looks like one of the server.
Here all of them become a `RuntimeError` with the original name.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import math
import operator
import re
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NamedTuple

from ray import cloudpickle
from starlette.exceptions import HTTPException

from ray_slo.core.text import clipped, quoted
from ray_slo.models.checkpoint import Preempted
from ray_slo.serve.errors import MAX_MESSAGE, SLOError, original
from ray_slo.serve.results import as_it_is, own
from ray_slo.serve.suspects import Marks

# asyncio makes its own `CancelledError` of the last one, on its way from a thread.
_NOT_THROUGH_A_FUTURE = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)
_STUCK_S = 60.0  # a call that runs longer counts as hanging
# Parts of names of errors of libraries that call another service.
_OF_SERVICES = (
    *("Connect", "Timeout", "Transport", "BrokenPipe", "RequestException", "URLError", "RpcError"),
    *("HTTPStatusError", "APIStatus", "ServiceUnavailable", "ClientError"),
    *("OperationalError", "InterfaceError"),  # of databases
)
_LARGEST_ERROR = 65_536  # bytes of a pickled error; each request of a batch gets it
_LARGEST_TEXT = 4000  # characters of its message, if it is larger
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SLOW_S = 0.005  # a call that runs longer does not delay the calls behind it


def as_exception(error: BaseException) -> Exception:
    """Return the error itself. If `except Exception` would not catch it, or a future cannot have
    it, return a `RuntimeError` with its name and message."""
    if isinstance(error, Exception) and not isinstance(error, _NOT_THROUGH_A_FUTURE):
        return error
    return RuntimeError(in_words(error))


def in_words(error: BaseException) -> str:
    """Return the name and the message of an error. The class may be the user's, so `str` may
    fail."""
    name = "an error"
    try:
        name = type(error).__name__
        return f"{name}: {error}"
    except BaseException:
        return f"{name}, whose message cannot be made"


def is_of_service(error: BaseException) -> bool:
    """Return whether an error says that another service failed. Libraries have no common class for
    such errors."""
    names = [cls.__name__ for cls in type(original(error)).__mro__]
    return any(word in name for name in names for word in _OF_SERVICES)


def sendable(error: Exception) -> Exception:
    """Return an error that has the type and message of this one, also in another process.

    It is the error itself if its pickle keeps both. Otherwise, its class gets a subclass that is
    unpickled without the constructor, which may take other arguments than `args`. If its class does
    not allow that, or does not exist in the other process, the error gets a class with the same
    name, derived from the same class of Python.
    """
    if _stays(error, error):
        return error
    with contextlib.suppress(BaseException):
        args = tuple(map(_sent, error.args))
        again = _made_again(type(error), args, _state(error))
        if _stays(again, error):
            return again
    return _stand_in(error)


def _stays(sent: Exception, error: Exception) -> bool:
    """Return whether an error arrives with the type and message of `error`."""
    try:
        pickled = cloudpickle.dumps(sent)
        came = cloudpickle.loads(pickled)
        if len(pickled) > _LARGEST_ERROR or type(came).__name__ != type(error).__name__:
            return False
        if isinstance(error, HTTPException | SLOError):  # the status matters more than the text
            return True
        texts = {_ADDRESS.sub("", str(one)) for one in (came, error)}
        return len(texts) == 1
    except BaseException:
        return False


def _made_again(cls: Any, args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """Make an error without the constructor of its class."""
    same = type(cls.__name__, (cls,), {"__reduce__": lambda _: (_made_again, (cls, args, state))})
    return _made(same, args, state)


def _made(cls: Any, args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error: Exception = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(state)
    return error


def _state(error: Exception) -> dict[str, Any]:
    """Return the attributes of an error, and the text of those that cannot be sent."""
    return {name: _sent(value) for name, value in vars(error).items()}


def _sent(value: Any) -> Any:
    """Return a value as it arrives in another process; its text if it cannot be sent, or is large.
    Each request of a batch gets the error."""
    if isinstance(value, list | tuple) and all(isinstance(one, Exception) for one in value):
        return [sendable(one) for one in value]  # of a group
    with contextlib.suppress(BaseException):
        if len(pickled := cloudpickle.dumps(value)) <= _LARGEST_ERROR:
            return cloudpickle.loads(pickled)
    with contextlib.suppress(BaseException):
        return clipped(str(value), MAX_MESSAGE)
    return None


def _stand_in(error: Exception) -> Exception:
    said = clipped(in_words(error).removeprefix(f"{type(error).__name__}: "), _LARGEST_TEXT)
    base = next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins")
    cls = type(type(error).__name__, (base,), {"__str__": lambda error: error.said})
    try:
        made = _made(cls, (), {**_state(error), "said": said})
        cloudpickle.loads(cloudpickle.dumps(made))
    except BaseException:
        return RuntimeError(clipped(in_words(error), _LARGEST_TEXT))
    return made


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
    task = asyncio.ensure_future(guarded(function, values, scope))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(heard)
        raise
    return task.result()


async def guarded(
    function: Callable[..., Any],
    values: tuple[Any, ...] = (),
    scope: AbstractContextManager[None] | None = None,
) -> Any:
    """Return `await function(*values)`, in this task.

    Raises:
        Exception: the error that it raised (`as_exception`).
        Preempted: its batch was stopped.
    """
    try:
        with scope or nullcontext():
            return await function(*values)
    except Preempted:
        raise
    except BaseException as error:
        if (plain := as_exception(error)) is error:
            raise
        raise plain from error


async def _into(future: asyncio.Future[Any], coroutine: Coroutine[Any, Any, Any]) -> None:
    """Put the outcome of a guarded call into a future, if somebody still waits for it."""
    try:
        result = await coroutine
    except Exception as error:
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)


def heard(task: asyncio.Future[Any]) -> None:
    """Read the error of a task, because asyncio logs errors that are never read."""
    if not task.cancelled():
        task.exception()


class _Call(NamedTuple):
    """A hook's call that waits for a thread."""

    future: asyncio.Future[Any]
    came: float
    run: Callable[[], Any]
    context: Context


class HookThreads:
    """Threads for users' hooks, outside the event loop, so that a blocking hook affects only its
    own callers.

    One thread runs all calls, one after the other, while they are quick: a thread per call would
    cost more than most hooks, because all of them wait for the interpreter's lock. If a call takes
    longer than `_SLOW_S`, another thread takes over those behind it.

    Args:
        threads: number of calls that run at a time.
        marks: records the requests of the calls; default: no record.
    """

    def __init__(self, threads: int, marks: Marks | None = None) -> None:
        self._marks = marks
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ray-slo-hook")
        self._threads = threads
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._active = 0  # threads at work
        self._began: dict[int, float] = {}  # start of the call of each
        self._done: deque[tuple[_Call, Any, BaseException | None]] = deque()
        self._is_settling = False
        self._watch: asyncio.TimerHandle | None = None

    def hook(self, function: Callable[..., Any]) -> Hook:
        return Hook(function, self)

    def inside(self) -> AbstractContextManager[None]:
        """Context during a call for this request."""
        return nullcontext() if self._marks is None else self._marks.inside()

    def begin(self, function: Callable[..., Any], values: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Begin a call, and return its result's future. A call that has not begun when its future
        is done, such as cancelled, does not run."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        future: asyncio.Future[Any] = loop.create_future()
        context = copy_context()
        guarded = partial(context.run, self._guarded, function, values)
        with self._lock:
            self._waiting.append(_Call(future, now, guarded, context))
            slow = sum(began < now - _SLOW_S for began in list(self._began.values()))
            needs_thread = slow == self._active
        if needs_thread:
            self._take_a_thread()
        if self._watch is None:
            self._watch = loop.call_later(_SLOW_S, self._look, loop)
        return future

    def _guarded(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        return call(function, *values, scope=self.inside())

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let another thread work if the first call in the queue has waited for too long."""
        self._watch = None
        with self._lock:
            if not self._waiting:
                return
            waits_for_long = self._waiting[0].came < time.monotonic() - _SLOW_S
        if waits_for_long:
            self._take_a_thread()
        self._watch = loop.call_later(_SLOW_S, self._look, loop)

    def _take_a_thread(self) -> None:
        """Let one more thread work, if there is one."""
        with self._lock:
            if self._active == self._threads:
                return
            self._active += 1
        self._pool.submit(self._work)

    def _work(self) -> None:
        while self._work_on_one():
            pass

    def _work_on_one(self) -> bool:
        """Run the first call of the queue; whether there was one."""
        with self._lock:
            if not self._waiting:
                self._active -= 1
                return False
            waiting = self._waiting.popleft()
        if waiting.future.done():  # its caller has left, or has waited too long
            return True
        thread = threading.get_ident()
        self._began[thread] = time.monotonic()
        result, error = None, None
        try:
            result = waiting.run()
        except BaseException as raised:
            error = raised
        del self._began[thread]
        self._done.append((waiting, result, error))
        if not self._is_settling:
            self._is_settling = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                waiting.future.get_loop().call_soon_threadsafe(self._settle)
        return True

    def _settle(self) -> None:
        """Hand results over, on the event loop. A function that is not async may return a
        coroutine, such as a decorator around one that is."""
        self._is_settling = False
        while self._done:
            (future, _, _, context), result, error = self._done.popleft()
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            elif inspect.isawaitable(result):
                context.run(self.start, future, _awaited, (result,))
            else:
                future.set_result(result)

    def start(
        self,
        future: asyncio.Future[Any],
        function: Callable[..., Coroutine[Any, Any, Any]],
        values: tuple[Any, ...],
    ) -> None:
        """Begin an async call, and put its outcome into a future. When that is done before, such as
        cancelled, nobody waits, and the call is cancelled."""
        call = _into(future, guarded(function, values, self.inside()))
        task = asyncio.get_running_loop().create_task(call)
        future.add_done_callback(lambda _: task.cancel())

    def longest_s(self) -> float:
        """Return how long the longest of the running calls has been running, in seconds."""
        began = min([*self._began.values()], default=math.inf)
        return max(time.monotonic() - began, 0.0)

    def check(self) -> None:
        """Check the running calls.

        Raises:
            RuntimeError: half of the threads are in calls that seem to hang.
        """
        since = time.monotonic() - _STUCK_S
        stuck = sum(began < since for began in list(self._began.values()))
        if 2 * stuck >= self._threads:
            raise RuntimeError(
                f"{stuck} calls of preprocess, postprocess, join or size have been running for "
                f"more than {_STUCK_S:.0f} s"
            )


def _kept(result: Any) -> Any:
    """Return the result of a hook, as it is now: a quick hook may fill the same array for the next
    item. Lists are not searched, because they may be long, and other requests would wait."""
    return result if type(result) is list else own(result, as_it_is)


async def _awaited(result: Awaitable[Any]) -> Any:
    return _kept(await result)


class Hook:
    """A user's `preprocess`, `postprocess`, `join` or `size`. It runs in a thread, or is awaited if
    it is async.

    Raises:
        Exception: the error that it raised (`as_exception`).
    """

    def __init__(self, function: Callable[..., Any], threads: HookThreads) -> None:
        self._is_async = inspect.iscoroutinefunction(function)
        self._threads = threads

        async def run_async(*values: Any) -> Any:
            return _kept(await function(*values))

        self._function = run_async if self._is_async else lambda *values: _kept(function(*values))

    def __call__(self, *values: Any) -> asyncio.Future[Any]:
        """Begin a call, and return its result's future. Cancel the future if nobody waits for
        it any more."""
        if not self._is_async:
            return self._threads.begin(self._function, values)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._threads.start(future, self._function, values)
        return future


def checked_size(value: Any) -> int:
    """Return what a user's `size` returned, as an int. Whole numbers of other libraries count, too.

    Raises:
        ValueError: it is not a whole number.
    """
    kind = type(value)
    try:
        if kind is bool or "bool" in str(getattr(value, "dtype", "")):
            raise TypeError
        return operator.index(value)
    except Exception:
        shown = f" {quoted(value)}" if kind in (bool, float, str) else ""
        said = f"size returned {kind.__name__}{shown}; it must return a whole number (int)"
        raise ValueError(said) from None
