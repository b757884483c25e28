"""The users' own code that a frontend runs: `preprocess`, `size`, `postprocess` and `join`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray_slo.core.text import clipped
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.errors import MAX_MESSAGE, BadInput, Expired, SLOError
from ray_slo.serve.frontend.ledger import GRACE_S, Asked
from ray_slo.serve.suspects import Marks
from ray_slo.serve.user_code import Hook, HookThreads

_THREADS = 32
_IN_HOOK = (
    "the request was in the application's own code at the frontend (preprocess, size, postprocess "
    "or join)"
)
_QUICK_S = 0.05  # quick calls end within this time, in seconds, also in a busy process
_LEAVING_S = 0.1  # seconds for a cancelled hook to end
_REFUSALS = (ValueError, TypeError, LookupError, ArithmeticError)  # exceptions that refuse an item


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
            is_own: whether this is the client's item. Then a refusal by `preprocess` is the
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
        except SLOError:
            raise
        except _REFUSALS as error:
            if not is_own:
                raise
            said = f"preprocess refused the item: {clipped(str(error), MAX_MESSAGE)}"
            raise BadInput(said, field="item", model=model) from error

    async def size(self, model: str, asked: Asked, item: Any, *, is_own: bool) -> int:
        """Return the size of a preprocessed item. It is 1 if items have no sizes.

        Args:
            is_own: whether this is the client's item. Then an item that is too large for any batch
                is the client's mistake.

        Raises:
            BadInput: the client's item has no size, or is too large for any batch.
            ValueError: the same for an item that a task made.
            Expired: `size` took too long.
            Exception: for an item that a task made, another error that `size` raised.
        """
        if model not in self.sizes:
            return 1
        try:
            size = int(await self.in_time(asked, self.sizes[model](item)))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            if not is_own:
                raise
            said = f"the item has no size: {clipped(str(error), MAX_MESSAGE)}"
            raise BadInput(said, field="item", model=model) from error
        limit = self._spec.models[model].max_batch_size
        if not 1 <= size <= limit:
            said = f"the item's size is {size}; 1 to {limit} can be served (max_batch_size)"
            if not is_own:
                raise ValueError(said)
            raise BadInput(said, field="item", model=model)
        return size

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


def _expire(running: asyncio.Future[Any], asked: Asked, grace_s: float) -> None:
    if not running.done():
        running.set_exception(_expired(asked, grace_s, _IN_HOOK))


def _expired(asked: Asked, grace_s: float, said: str) -> Expired:
    return Expired(
        f"no answer {grace_s:g} s after the deadline; {said}",
        model=asked.model,
        latency_slo_ms=asked.slo_s * 1e3,
    )
