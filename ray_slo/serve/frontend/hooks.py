"""The users' own code that a frontend runs: `preprocess`, `size`, `postprocess` and `join`."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError
from starlette.exceptions import HTTPException

from ray_slo.core.seldom import Seldom
from ray_slo.core.text import SHOWN, clipped
from ray_slo.models.memory import is_out_of_memory
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.errors import (
    MAX_MESSAGE,
    BadInput,
    Expired,
    SLOError,
    message_of,
    original,
    parts_of,
)
from ray_slo.serve.frontend.ledger import GRACE_S, Asked
from ray_slo.serve.suspects import Marks
from ray_slo.serve.user_code import Hook, HookThreads, checked_size, is_of_service

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_THREADS = 32
_IN_HOOK = (
    "the request was in the application's own code at the frontend (preprocess, size, postprocess "
    "or join)"
)
_QUICK_S = 0.05  # quick calls end within this time, in seconds, also in a busy process
_LEAVING_S = 0.1  # seconds for a cancelled hook to end
# Exceptions about the state of the program, not about an item. Python, torch and CUDA raise
# `RuntimeError` for theirs, and `as_exception` for a hook that exits.
_OWN = (
    *(RuntimeError, ImportError, NameError, SystemError, ConnectionError, TimeoutError, RayError),
    *(queue.Empty, queue.Full, asyncio.QueueEmpty, asyncio.QueueFull, asyncio.InvalidStateError),
    asyncio.IncompleteReadError,
)
_SENTENCES = (ValueError, TypeError, AttributeError)  # their messages say enough without the type
_JSON = (bool, int, float, str, bytes, list, dict)


class Hooks:
    """Calls users' code for a request. It waits for this code at most as long as for a worker."""

    def __init__(self, spec: AppSpec) -> None:
        self._spec = spec
        self._marks = Marks()
        self._threads = HookThreads(_THREADS, self._marks)
        classes = {name: model.load() for name, model in spec.models.items()}

        def found(method: str) -> dict[str, Hook]:
            return {
                name: self._threads.hook(getattr(cls, method))
                for name, cls in classes.items()
                if hasattr(cls, method)
            }

        self.preprocess = found("preprocess")
        self.postprocess = found("postprocess")
        self.sizes = found("size")
        self.joins = {task: self._threads.hook(join) for task, join in spec.joins().items()}

    def check(self) -> None:
        """Check the running calls.

        Raises:
            RuntimeError: too many calls seem to hang.
        """
        self._threads.check()

    def is_in_long_call(self) -> bool:
        """Return whether a thread runs a call that is not quick."""
        return self._threads.longest_s() > _QUICK_S

    def close(self) -> None:
        self._marks.close()

    async def preprocessed(self, model: str, asked: Asked, item: Any, *, is_own: bool) -> Any:
        """Return the result of `preprocess` for an item.

        Args:
            is_own: whether this is the client's item. Then an error that `_is_items` is the
                client's mistake.

        Raises:
            BadInput: `preprocess` refused the client's item.
            Expired: it took too long.
            Exception: another error that it raised.
        """
        if model not in self.preprocess:
            return item
        try:
            return await self.in_time(asked, self.preprocess[model](item))
        except Exception as error:
            if not is_own or not _is_items(error, item):
                raise
            raise self._refused("preprocess refused the item", error, model) from error

    async def size(self, model: str, asked: Asked, item: Any, *, is_own: bool) -> int:
        """Return the size of a preprocessed item. It is 1 if items have no sizes.

        Args:
            is_own: whether this is the client's item. Then an item that is too large for any batch
                is the client's mistake.

        Raises:
            BadInput: the client's item has no size, or is too large for any batch.
            ValueError: the same for an item that a task made.
            Expired: `size` took too long.
            Exception: another error that `size` raised.
        """
        if model not in self.sizes:
            return 1
        try:
            size = checked_size(await self.in_time(asked, self.sizes[model](item)))
        except Exception as error:
            if not is_own or not _is_items(error, item):
                raise
            raise self._refused("the item has no size", error, model) from error
        limit = self._spec.models[model].max_batch_size
        if not 1 <= size <= limit:
            said = f"the item's size is {size}; 1 to {limit} can be served (max_batch_size)"
            if not is_own:
                raise ValueError(said)
            raise BadInput(said, field="item", model=model)
        return size

    def _refused(self, why: str, error: Exception, model: str) -> BadInput:
        """Return the refusal of a client's item."""
        cause, field = original(error), "item"
        if found := _fields(cause):
            field = clipped(found[0][0], SHOWN) or field
            said = "; ".join(f"{name}: {text}" if name else text for name, text in found)
        elif isinstance(cause, ValueError) or self._spec.error_details:
            name, said = type(cause).__name__, message_of(cause)
            if not said:
                said = name
            elif type(cause) not in _SENTENCES:
                said = f"{name}: {said}"
        else:  # a message that was not written for clients
            said = type(cause).__name__
        logger.warning("%s: %s", why, said, exc_info=error)  # it may be a bug
        return BadInput(f"{why}: {clipped(said, MAX_MESSAGE)}", field=field, model=model)

    async def postprocessed(self, model: str, asked: Asked, value: Any) -> Any:
        """Return the result of `postprocess`.

        Raises:
            Expired: it took too long.
            Exception: the error that it raised.
        """
        if model not in self.postprocess:
            return value
        return await self.in_time(asked, self.postprocess[model](value))

    async def in_time(
        self,
        asked: Asked,
        hook: Awaitable[Any],
        grace_s: float = GRACE_S,
        where: Callable[[], str] = lambda: _IN_HOOK,
    ) -> Any:
        """Return the result of a hook.

        Args:
            where: function that returns what the request waited for, for the error.

        Raises:
            Expired: it has not ended `grace_s` seconds after the deadline.
            Exception: the error that it raised.
        """
        left_s = asked.deadline + grace_s - time.monotonic()
        running: asyncio.Future[Any] = asyncio.ensure_future(hook)
        if not isinstance(running, asyncio.Task):  # a thread's call: its future can just end
            timer = asyncio.get_running_loop().call_later(left_s, _expire, running, asked, grace_s)
            try:
                return await running
            finally:
                timer.cancel()
        try:
            await asyncio.wait([running], timeout=left_s)
            if running.done():
                return running.result()
            said = where()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=_LEAVING_S)
        raise _expired(asked, grace_s, said)


def _is_items(raised: BaseException, item: Any, *, seen: bool = False) -> bool:
    """Return whether an error of a hook says that the client's item is wrong, and not that the
    server fails. `BadInput` and `HTTPException` say it themselves."""
    error = original(raised)
    if parts := parts_of(error):
        return all(_is_items(part, item) for part in parts)
    cause = error.__cause__
    if cause is not None and not seen and not _is_items(cause, item, seen=True):
        return False
    if isinstance(error, (SLOError, HTTPException, *_OWN)) or is_out_of_memory(error):
        return False
    if isinstance(error, OSError) and error.errno is not None:  # of the system: a disk, a socket
        return False
    if isinstance(error, AttributeError):  # of the item, or of the server's own objects
        return error.obj is item or isinstance(error.obj, _JSON)
    return not is_of_service(error)


def _fields(error: BaseException) -> list[tuple[str, str]]:
    """Return the fields that a `ValidationError` of pydantic names, with what is wrong there. The
    wrong values are not shown."""
    try:
        found = error.errors()  # type: ignore[attr-defined]
        return [(".".join(map(str, one["loc"])), str(one["msg"])) for one in found]
    except Exception:
        return []


def _expire(running: asyncio.Future[Any], asked: Asked, grace_s: float) -> None:
    if not running.done():
        running.set_exception(_expired(asked, grace_s, _IN_HOOK))


def _expired(asked: Asked, grace_s: float, said: str) -> Expired:
    return Expired(
        f"no answer {grace_s:g} s after the deadline; {said}",
        model=asked.model,
        latency_slo_ms=asked.slo_s * 1e3,
    )
