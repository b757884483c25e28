"""`@ray_slo.batch`: a drop-in for `@serve.batch` that forms batches by deadline."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ray_slo.core import LatencyProfile
from ray_slo.core.documents import MAX_BATCH
from ray_slo.core.pages import DEPLOYMENTS, pointed
from ray_slo.core.profiles import load_profiles, profile_of
from ray_slo.core.text import quoted, text_of
from ray_slo.policies.registry import make_policy
from ray_slo.serve.batch.batcher import Batcher
from ray_slo.serve.batch.calls import Call, End, Kind, Settings, code_of, kind_of
from ray_slo.serve.batch.capacity import note_request, said
from ray_slo.serve.deadlines import slo_ms_of
from ray_slo.serve.errors import BadInput, ConfigError
from ray_slo.serve.ray_private import context


@dataclass(slots=True)
class _State:
    """The state of one instance: a batcher for each event loop."""

    owner: Any  # a weak reference, or the instance itself if its class allows none
    batchers: dict[asyncio.AbstractEventLoop, Batcher] = field(default_factory=dict)


class _Batched:
    """A decorated function with its settings. It is pickled without its state, which is made when
    it is used."""

    def __init__(self, func: Callable[..., Any], settings: Settings) -> None:
        self.func = func
        self.name = _name_of(func)
        self.settings = settings
        self._signature = inspect.signature(func)
        parameters = list(self._signature.parameters.values())
        self._is_method = bool(parameters) and parameters[0].name in ("self", "cls")
        items = parameters[self._is_method :]
        if not items:
            raise _refused(f"{self.name} must take a list of items as its argument")
        if any(p.name == "latency_slo_ms" for p in items):
            raise _refused(
                f"{self.name}: the argument name latency_slo_ms is taken: a caller's "
                "latency_slo_ms=… is the deadline of that call"
            )
        self._one_item = len(items) == 1 and items[0].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        self._reset()

    def _reset(self) -> None:
        # Not only in `__init__`, because replicas unpickle the driver's decorated function.
        context.install(note_request, said)
        self._states: dict[int, _State] = {}
        self._lock = threading.RLock()  # instances may be on event loops of several threads

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_states", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    async def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batcher, call = self._submit(args, kwargs)
        try:
            return await call.future
        finally:
            batcher.leave(call)

    async def stream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        batcher, call = self._submit(args, kwargs)
        try:
            queue = await call.future
            while not isinstance(item := await queue.get(), End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            batcher.leave(call)

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Batcher, Call]:
        slo_s = None
        if (slo_ms := kwargs.pop("latency_slo_ms", None)) is not None:
            slo_s = slo_ms_of(slo_ms, BadInput, field="latency_slo_ms") / 1e3
        skip = int(self._is_method)
        if kwargs or not self._one_item or len(args) != 1 + skip:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                takes = list(self._signature.parameters)[skip:]
                raise TypeError(f"{self.name}: {error}; it takes {', '.join(takes)}") from None
            args, kwargs = bound.args, bound.kwargs
        instance = args[0] if self._is_method else None
        batcher = self._batcher(instance)
        return batcher, batcher.submit(instance, args[skip:], kwargs, slo_s)

    def _batcher(self, instance: Any) -> Batcher:
        loop = asyncio.get_running_loop()
        state = self._states.get(id(instance))
        if state is not None and (batcher := state.batchers.get(loop)) is not None:
            return batcher
        with self._lock:
            if state is None:
                state = self._states[id(instance)] = _State(self._remember(instance))
            learned = None
            for old in [old for old in state.batchers if old.is_closed()]:
                batcher = state.batchers.pop(old)
                learned = batcher.belief
                batcher.close()
            batcher = state.batchers[loop] = Batcher(self.name, self.func, self.settings, learned)
        return batcher

    def _remember(self, instance: Any) -> Any:
        key, forget = id(instance), self._forget
        try:
            return weakref.ref(instance, lambda _: forget(key))
        except TypeError:
            # None, or an object with __slots__ without __weakref__. It is kept as long as self.
            return instance

    def _forget(self, key: int) -> None:
        with self._lock:
            state = self._states.pop(key)
        for loop, batcher in state.batchers.items():
            if loop.is_closed():
                batcher.close()
            else:
                loop.call_soon_threadsafe(batcher.close)

    def _settings_changed(self) -> None:
        with self._lock:
            batchers = [item for s in self._states.values() for item in s.batchers.items()]
        for loop, batcher in batchers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(batcher.settings_changed)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Change the upper bound from now on, for every instance."""
        self.settings.max_batch_size = _positive_int("max_batch_size", max_batch_size)
        self._settings_changed()

    def set_latency_slo_ms(self, latency_slo_ms: float) -> None:
        """Change the SLO from now on, for every instance."""
        self.settings.latency_slo_s = slo_ms_of(latency_slo_ms, _refused) / 1e3
        self._settings_changed()

    def get_max_batch_size(self) -> int:
        return self.settings.max_batch_size

    def get_latency_slo_ms(self) -> float:
        return self.settings.latency_slo_s * 1e3


def batch(
    latency_slo_ms: float,
    *,
    max_batch_size: int = 64,
    max_concurrent_batches: int = 1,
    objective: str = "responsive",
    profile: LatencyProfile | str | Path | None = None,
    margin_ms: float | None = None,
    **unsupported: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Batch the calls of a function or method so that each is answered within `latency_slo_ms`.

    A drop-in for `@serve.batch`: a caller passes one item and gets one result, the function sees
    lists and returns a list of the same length, in order. There is no waiting time to tune. The
    start and the size of a batch follow from the deadlines of the waiting calls, and from the
    latency of batches of that size. This latency is learned while it runs.

        @serve.deployment(max_ongoing_requests=200)
        class Classifier:
            @ray_slo.batch(latency_slo_ms=100)
            async def predict(self, images: list[np.ndarray]) -> list[str]: ...

            async def __call__(self, request: Request) -> str:
                return await self.predict(decode(await request.body()))

    You may decorate functions, methods (the instance is the first argument, named `self` or
    `cls`), partials and objects with `__call__`. They have one or several arguments, and each
    becomes a list.

    * `async def`: runs on the event loop.
    * `def`: runs in its own thread (or in `max_concurrent_batches` threads), so the loop stays free
      for new calls. Callers await it, too. It is the better choice for code that computes, such as
      PyTorch.
    * `async def` with `yield`: each step yields a list with one value per call, and each caller
      iterates over its own values (`async for`). `StopIteration` in place of a value ends that
      caller's stream. The SLO is for the whole stream.

    Each instance (and event loop) has its own queue and its own profile. It also works without
    Serve, and without a running Ray. One batch runs at a time, and its requests are chosen when it
    starts.

    Deadlines. The first of these that exists counts: the call's keyword `latency_slo_ms=…`, which
    the function does not see; the request's `x-slo-latency-ms`, or `x-request-timeout-seconds` if
    it is shorter than the SLO (`ray_slo.serve.deadlines`); the SLO. If the application was started
    with `ray-slo run`, the wait of an HTTP request outside of the replica counts, until the first
    answer of a function. Otherwise it is unknown here. So set the deployment's
    `max_ongoing_requests` well above `max_batch_size` (Serve's default is 5).

    The policy is `ray_slo.policies.deferred` (Symphony, Algorithm 1) with one worker.

    Args:
        latency_slo_ms: milliseconds from call to result, and until the caller goes on.
        max_batch_size: an upper bound, mostly for memory. The deadlines decide the size.
        max_concurrent_batches: number of batches of one instance that may run at a time.
        objective: "responsive" (start as early as the load allows) or "consolidate" (start as late
            and as large as the deadlines allow, as in the paper).
        profile: initial profile: a `LatencyProfile`, or a file of `ray-slo profile` (with one
            profile, or one named like the function). It also bounds the batch size.
        margin_ms: safety margin for timers and threads, milliseconds. Batches aim at this much
            before the deadline, and start this much before the last moment. The former is scaled
            with a call's own deadline. Default: 5 % of the SLO.

    The decorated function has `set_max_batch_size`, `set_latency_slo_ms`, `get_max_batch_size` and
    `get_latency_slo_ms`, to be used from `reconfigure`, for instance.

    Raises (when decorating):
        ConfigError: an argument is wrong, or is an argument of `@serve.batch` without a meaning
        here.

    Raises (when called):
        RefusedEarly: the answer would be late. A timer raises it as soon as this is known, not when
        the running batch ends. Serve answers HTTP 503 with `Retry-After`.
        Expired: the deadline had passed before the call, or while it waited. HTTP 504.
        BadInput: `latency_slo_ms` is not a positive number.
        BatchResultError: the function returned no list of results, or one of another length. Lists
            are lists, tuples, the first axis of an array or tensor, and other sequences. Data
            frames, mappings, sets and generators are none.

    The function may change its lists, and use its output arrays again: arrays, tensors, containers
    of Python and dataclasses are copied when it returns (on the event loop, if it is async). Other
    objects are handed on as they are, so make a new one for each call.

    An exception of the function goes to every caller of that batch. A cancelled caller leaves the
    queue. If its batch runs already, it continues for the others.
    """
    if unsupported:
        names = ", ".join(unsupported)
        why = (
            "it follows from the deadlines; leave it out"
            if "batch_wait_timeout_s" in unsupported
            else "valid are latency_slo_ms, max_batch_size, max_concurrent_batches, objective, "
            "profile, margin_ms"
        )
        raise _refused(f"@ray_slo.batch takes no {names}: {why}")
    if callable(latency_slo_ms):
        raise _refused("@ray_slo.batch needs an SLO: @ray_slo.batch(latency_slo_ms=…)")
    slo_ms = slo_ms_of(latency_slo_ms, _refused)
    if margin_ms is None:
        margin_ms = 0.05 * slo_ms
    is_number = isinstance(margin_ms, int | float) and not isinstance(margin_ms, bool)
    if not is_number or not 0 <= margin_ms < slo_ms:
        raise _refused(
            f"margin_ms must be 0 … latency_slo_ms ({slo_ms:g}), got {quoted(margin_ms)}"
        )
    try:
        make_policy("deferred", {"objective": objective})
    except ValueError as error:
        raise _refused(str(error)) from error

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(func) or inspect.isclass(func):
            raise _refused(f"@ray_slo.batch decorates functions and methods, not {quoted(func)}")
        if any(map(inspect.isgeneratorfunction, code_of(func))):
            raise _refused(
                f"{_name_of(func)} is a generator; for streams, make it `async def` with `yield`"
            )
        settings = Settings(
            latency_slo_s=slo_ms / 1e3,
            max_batch_size=_positive_int("max_batch_size", max_batch_size),
            max_concurrent_batches=_positive_int("max_concurrent_batches", max_concurrent_batches),
            objective=objective,
            profile=_load(profile, _name_of(func)),
            margin=margin_ms / slo_ms,
        )
        return _wrap(_Batched(func, settings))

    return decorate


def _name_of(func: Any) -> str:
    """Return the name of a function, of a partial's function, or of the class of an object with
    `__call__`."""
    named = code_of(func)[0]
    return str(getattr(named, "__name__", type(named).__name__))


def _wrap(batched: _Batched) -> Callable[..., Any]:
    # These closures are pickled by value with the user's class, so they contain only `batched`.
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await batched.call(args, kwargs)

    async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for item in batched.stream(args, kwargs):
            yield item

    is_stream = kind_of(batched.func) is Kind.STREAM
    wrapped: Any = functools.wraps(batched.func)(stream if is_stream else call)
    wrapped.set_max_batch_size = batched.set_max_batch_size
    wrapped.set_latency_slo_ms = batched.set_latency_slo_ms
    wrapped.get_max_batch_size = batched.get_max_batch_size
    wrapped.get_latency_slo_ms = batched.get_latency_slo_ms
    return cast(Callable[..., Any], wrapped)


def _load(profile: LatencyProfile | str | Path | None, name: str) -> LatencyProfile | None:
    if profile is None or isinstance(profile, LatencyProfile):
        return profile
    if not isinstance(profile, str | Path):
        raise _refused(
            f"profile must be a LatencyProfile or the path of a file, got {quoted(profile)}"
        )
    try:
        profiles = load_profiles(profile)
    except (OSError, ValueError) as error:
        raise _refused(f"profile: {text_of(error)}") from error
    if (found := profile_of(profiles, name, name)) is None:
        raise _refused(f"profile {profile} has no {name!r}; it has {', '.join(profiles)}")
    return found


def _refused(said: str) -> ConfigError:
    return ConfigError(pointed(said, DEPLOYMENTS))


def _positive_int(name: str, value: Any) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 1 <= value < math.inf or value != int(value):
        raise _refused(f"{name} must be a whole number of at least 1, got {quoted(value)}")
    if value > MAX_BATCH:
        raise _refused(f"{name} must be at most {MAX_BATCH}, got {quoted(value)}")
    return int(value)
