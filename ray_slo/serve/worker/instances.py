"""The user's objects on one worker: built, configured, and asked as Serve asks its own."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from ray_slo.models.profiling import making
from ray_slo.serve import user_code
from ray_slo.serve.config.spec import AppSpec, VariantRef
from ray_slo.serve.config.user_class import RECORDS
from ray_slo.serve.errors import ConfigError

logger = logging.getLogger(__name__)

# Time for `check_health` beside a running batch. Its outcome then counts at the next check.
_CHECK_S = 0.5


class Instances(dict[str, Any]):
    """The user's objects, by model.

    Methods that are not async run on the thread of the batches. The others run on the event loop.

    Args:
        thread: the thread of the batches.
        rank: the worker's rank, as Serve gives it to a `reconfigure(user_config, rank)`.
    """

    def __init__(self, spec: AppSpec, thread: Executor, rank: Any = None) -> None:
        super().__init__()
        self._spec = spec
        self._thread = thread
        self._rank = rank
        self._user_configs = {name: model.user_config for name, model in spec.models.items()}
        self._configured: dict[str, tuple[Any, ...]] = {}  # current arguments of `reconfigure`
        self._checking: tuple[float, asyncio.Task[None]] | None = None  # since when
        self._unhealthy: BaseException | None = None

    async def build(self, name: str, cls: Callable[..., Any], thread: Executor) -> None:
        """Make a model's object.

        Args:
            thread: runs a constructor that is not async.

        Raises:
            ConfigError: the constructor, or `reconfigure`, has failed. It says how.
        """
        model = self._spec.models[name]
        try:
            self[name] = await made(cls, model.args, model.kwargs, thread)
        except Exception as error:
            raise self._failed(name, cls.__name__, error) from error
        try:
            await self._reconfigure(name)
        except ConfigError:
            raise
        except Exception as error:
            raise self._failed(name, f"{cls.__name__}.reconfigure", error) from error

    def _failed(self, name: str, what: str, error: Exception) -> ConfigError:
        said = f"{self._spec.fields[name]}: {what}(…) failed: {user_code.in_words(error)}"
        return ConfigError(said, model=name)

    def has_example(self, name: str) -> bool:
        """Return whether a model's class has an `example_input`."""
        return getattr(type(self[name]), "example_input", None) is not None

    def example(self, ref: VariantRef, size: int) -> Any:
        """Return what `example_input` returns, for an item of this size.

        Raises:
            ConfigError: it has failed.
        """
        cls = type(self[ref.model])
        try:
            return user_code.call(cls.example_input, *(size,) * hasattr(cls, "size"))
        except Exception as error:
            raise self.wrong_example(
                ref, f"{cls.__name__}.example_input() failed", error
            ) from error

    def wrong_example(self, ref: VariantRef, what: str, error: Exception) -> ConfigError:
        """Return the error of a start that failed with the example."""
        of = f" of variant {ref.name!r}" if ref.spec is not None else ""
        field = self._spec.fields[ref.model]
        return ConfigError(f"{field}: {what}{of}: {user_code.in_words(error)}")

    def forget(self, name: str) -> None:
        self.pop(name, None)
        self._configured.pop(name, None)

    async def reconfigure(self, user_config: Mapping[str, Any], rank: Any = None) -> None:
        """Apply `user_config`, which maps a model's name to its own configuration.

        Args:
            rank: the worker's rank from now on.

        Raises:
            ConfigError: there is no such model, or it has no `reconfigure`.
        """
        self._rank = self._rank if rank is None else rank
        for name, config in user_config.items():
            if name not in self._spec.models:
                raise ConfigError(
                    f"user_config names model {name!r}; the models are "
                    f"{', '.join(sorted(self._spec.models))}"
                )
            self._user_configs[name] = config
        for name in list(self):  # the other models are in another group
            await self._reconfigure(name)

    async def _reconfigure(self, name: str) -> None:
        """Call a model's `reconfigure`, if Serve would: there is a configuration, or it takes the
        rank, and they are not the current ones."""
        method, config = getattr(self[name], "reconfigure", None), self._user_configs[name]
        takes_rank = method is not None and "rank" in inspect.signature(method).parameters
        if config is None and not takes_rank:
            return
        if method is None:
            raise ConfigError(
                f"{self._spec.fields[name]}.user_config is set, but {type(self[name]).__name__} "
                "has no reconfigure(user_config)"
            )
        wanted = (config, self._rank) if takes_rank else (config,)
        if self._configured.get(name) != wanted:
            rank = {"rank": self._rank} if takes_rank else {}
            await self._call(functools.partial(method, config, **rank))
            self._configured[name] = wanted

    async def check_health(self, runs_since: Callable[[], float]) -> None:
        """Call every model's `check_health`.

        Args:
            runs_since: when the running batch began; infinite without one. A check that began later
                waits for the batch's thread, and the outcome of the check before counts.

        Raises:
            Exception: whatever one of them raised.
        """
        if self._checking is None:
            self._checking = time.monotonic(), asyncio.create_task(self._check_all())
        since, check = self._checking
        await asyncio.wait([check], timeout=_CHECK_S)
        while not check.done() and runs_since() > since:
            await asyncio.wait([check], timeout=_CHECK_S)
        if check.done():
            self._checking = None
            self._unhealthy = check.exception()
        if self._unhealthy is not None:
            raise self._unhealthy

    async def _check_all(self) -> None:
        for method in self._methods("check_health").values():
            await self._call(method)

    def records(self) -> dict[str, Callable[[], Awaitable[dict[str, Any]]]]:
        """Return the methods through which objects tell Serve about themselves. With several
        models, the keys of what they tell begin with the model's name."""
        have = [record for record in RECORDS if self._methods(record)]
        return {record: functools.partial(self._record, record) for record in have}

    async def _record(self, record: str) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for name, method in self._methods(record).items():
            own = await self._call(method)
            if len(self._spec.models) == 1:
                return own
            told |= {f"{name}/{key}": value for key, value in (own or {}).items()}
        return told

    @property
    def have_ends(self) -> bool:
        """Whether an object has a `__del__`."""
        return bool(self._methods("__del__"))

    async def end(self) -> None:
        """Call the `__del__` of the objects, as Serve does when a replica stops."""
        for name, method in self._methods("__del__").items():
            try:
                await self._call(method)
            except Exception:
                logger.exception("__del__ of %s failed", name)

    def _methods(self, method: str) -> dict[str, Callable[[], Any]]:
        found = {name: getattr(instance, method, None) for name, instance in self.items()}
        return {name: bound for name, bound in found.items() if callable(bound)}

    async def _call(self, function: Callable[[], Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await user_code.call_async(function)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, user_code.call, function)


async def made(
    factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], thread: Executor
) -> Any:
    """Return what a class or a loader makes. An async one is awaited on the event loop, as Serve
    awaits an async constructor.

    Args:
        thread: runs what is not async.
    """

    loop = asyncio.get_running_loop()
    result = await loop.run_in_executor(thread, user_code.call, making, factory, args, kwargs)
    return await user_code.call_async(lambda: result) if inspect.iscoroutine(result) else result
