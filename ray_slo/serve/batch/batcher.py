"""`@ray_slo.batch`: a drop-in for `@serve.batch` that forms batches by deadline.

The policy is the one of the scheduler actor (`deferred`), hosted on the event loop of the caller
with a cluster of one worker: the decorated method. Its latency profile is learned as it runs.

Starting from nothing
    The prior is ℓ(b) = SLO / 50 · (4 + b): the shape of a typical network (a fixed cost worth four
    items), at a tenth of the SLO for one item. The first batch scales it; larger batches are then
    assumed to gain nothing, until a second size says more (`ray_slo.core.profiles`). Batches may
    grow to four times the largest one measured (to 8 at first).
Getting out of a wrong belief
    When the method looks too slow for a request although it is idle, the request is tried anyway
    (a *probe*) while there is little evidence, or none from the last seconds. A probe that was on
    time voids what was measured before it: one cold start does not shut the door.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ray_slo.core import (
    BatchOutcome,
    BatchStatus,
    Cluster,
    Dispatch,
    Drop,
    DropReason,
    LatencyProfile,
    Model,
    OnlineProfile,
    Request,
    Variant,
)
from ray_slo.core.profiles import load_profiles, profile_of
from ray_slo.policies.registry import make_policy
from ray_slo.serve import user_code
from ray_slo.serve.deadlines import deadline_for, note_headers, without_request
from ray_slo.serve.errors import (
    BadInput,
    ConfigError,
    Expired,
    SLOError,
    error_of,
)
from ray_slo.serve.ray_private import context
from ray_slo.serve.scheduler.host import PolicyHost
from ray_slo.serve.watch import tracing

logger = logging.getLogger("ray.serve")  # Serve's own: it ends up in the replica's log

_HARDWARE = "here"
_GUESS_SIZES = 1024  # the guessed profile's table; `set_max_batch_size` may go that far
_FIRST_CAP = 8
_GROWTH = 4
_LITTLE_EVIDENCE = 3  # batches
_PROBE_PERIOD_S = 10.0
_ANNOUNCE_PERIOD_S = 0.25
_MATERIAL = 0.02  # a profile that moved less than this is not worth a new decision


@dataclass(slots=True)
class _Settings:
    latency_slo_s: float
    max_batch_size: int
    max_concurrent_batches: int
    objective: str
    profile: LatencyProfile | None
    margin: float  # share of a request's budget

    def prior(self) -> LatencyProfile:
        if self.profile is not None:
            return self.profile
        unit = self.latency_slo_s / 50
        largest = max(_GUESS_SIZES, self.max_batch_size)
        return LatencyProfile.linear(unit, 4 * unit, largest, measured_to=0)


@dataclass(slots=True, eq=False)
class _Call:
    """One caller, waiting for one result."""

    instance: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    latency_slo_s: float
    request: Request
    future: asyncio.Future[Any]
    context: Any  # Serve's request context
    trace: Any  # OpenTelemetry's context, where Serve's tracing is on
    probed: bool = False
    ended: bool = False  # of a stream: this caller gets no more

    @property
    def group(self) -> Any:
        """Calls of one group can share one call of the method."""
        return context.model_id(self.context), len(self.args), tuple(self.kwargs)


class _End:
    """Put into a stream's queue: it is over, with this error if there is one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Batcher:
    """Forms and runs the batches of one method of one instance on one event loop."""

    def __init__(self, batched: _Batched, online: OnlineProfile | None) -> None:
        settings = batched.settings
        self._name = batched.name
        self._func = batched.func
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.online = online or OnlineProfile(settings.prior())
        self._largest = 0
        self._fastest_s = math.inf
        self._ended_at = -math.inf
        self._probe_call: _Call | None = None
        self._announced: LatencyProfile | None = None
        self._announced_at = -math.inf
        self._ids = itertools.count()
        self._waiting: dict[int, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0  # batches
        self._exploring = 0  # of them, larger than any that was measured when they started
        self._held: dict[_Call, asyncio.TimerHandle] = {}
        self._slots: dict[str, asyncio.Lock] = {}
        self._pool: ThreadPoolExecutor | None = None
        # Timers wake late; with a flat profile there is no slack left after frontrun for that.
        jitter_ms = 1e3 * settings.margin * settings.latency_slo_s
        self._host = PolicyHost(
            make_policy("deferred", {"objective": settings.objective, "jitter_ms": jitter_ms}),
            self._cluster(self._profile()),
            on_dispatch=self._start,
            on_drop=self._refuse,
            on_error=self._fail,
            clock=time.monotonic,
            # If the method held the event loop, calls piled up behind it: let them in.
            settle_turns=3,
            context=without_request(),
        )
        self._warn_if_serve_holds_requests_back()

    # -- callers ---------------------------------------------------------------------------

    def submit(
        self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], slo_s: float | None
    ) -> _Call:
        """Raises Expired when the deadline of the request around it has passed already."""
        now = time.monotonic()
        if slo_s is None:
            slo_s = deadline_for(self._settings.latency_slo_s) - now
        if slo_s <= 0:
            raise Expired(
                f"{self._name}: the deadline passed {-1e3 * slo_s:.0f} ms before the call",
                model=self._name,
                latency_slo_ms=0.0,
            )
        deadline = now + slo_s * (1 - self._settings.margin)
        request = Request(next(self._ids), self._name, now, deadline)
        call = _Call(
            instance,
            args,
            kwargs,
            slo_s,
            request,
            self._loop.create_future(),
            context.request_context(),
            tracing.caller(),
        )
        self._waiting[request.id] = call
        self._host.submit(request)
        return call

    def leave(self, call: _Call) -> None:
        """The caller is gone, or has all it wanted."""
        call.ended = True
        if self._waiting.pop(call.request.id, None) is not None:
            self._host.cancel(call.request)
            self._let_go(call)
            if call is self._probe_call:
                self._end_probe()

    def settings_changed(self) -> None:
        self._announce(force=True)

    def close(self) -> None:
        self._host.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    # -- what the policy sees --------------------------------------------------------------

    def _profile(self) -> LatencyProfile:
        learned = self.online.profile
        cap = min(self._settings.max_batch_size, learned.max_batch_size)
        if self._settings.profile is None:
            cap = min(cap, max(_FIRST_CAP, _GROWTH * self._largest))
        return learned.truncated(cap)

    def _cluster(self, profile: LatencyProfile) -> Cluster:
        settings = self._settings
        variant = Variant(self._name, {_HARDWARE: profile})
        usable_s = settings.latency_slo_s * (1 - settings.margin)
        model = Model(self._name, usable_s, (variant,))
        return Cluster.uniform([model], settings.max_concurrent_batches, _HARDWARE)

    def _announce(self, force: bool = False) -> None:
        """Tell the policy what was learned, when it matters and not too often."""
        now = time.monotonic()
        force = force or self._announced is None
        early = self.online.samples <= 32
        if not (force or early or now - self._announced_at >= _ANNOUNCE_PERIOD_S):
            return
        profile, old = self._profile(), self._announced
        self._announced_at = now
        if old is None or force or profile.differs(old, _MATERIAL):
            self._announced = profile
            self._host.set_cluster(self._cluster(profile))

    # -- the policy's decisions ------------------------------------------------------------

    def _start(self, dispatch: Dispatch) -> None:
        calls = [self._waiting.pop(r.id) for r in dispatch.requests if r.id in self._waiting]
        exploring = len(calls) > self._largest
        task = self._loop.create_task(self._run(dispatch, calls, exploring))
        self._running += 1
        self._exploring += exploring  # already: drops may follow in this very decision
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, drop: Drop) -> None:
        for request in drop.requests:
            call = self._waiting.get(request.id)
            if call is None:
                continue
            if drop.reason is DropReason.WOULD_MISS and self._worth_a_probe(call):
                self._probe(call)
            elif drop.reason is not DropReason.EXPIRED and self._exploring:
                # The refusal rests on an assumed latency; the batch that runs will say more.
                left_s = request.deadline - time.monotonic()
                self._held[call] = self._loop.call_later(left_s, self._give_up, call, drop)
            else:
                self._give_up(call, drop)

    def _give_up(self, call: _Call, drop: Drop) -> None:
        self._let_go(call)
        if self._waiting.pop(call.request.id, None) is None:
            return
        if call is self._probe_call:
            self._end_probe()
        if not call.future.done():
            call.future.set_exception(self._refusal(call, drop))

    def _let_go(self, call: _Call) -> None:
        timer = self._held.pop(call, None)
        if timer is not None:
            timer.cancel()

    def _refusal(self, call: _Call, drop: Drop) -> SLOError:
        slo_ms = 1e3 * call.latency_slo_s
        finish_ms = 1e3 * (drop.finish_at - call.request.arrival)
        text = f"{self._name}: {drop.reason.value.replace('_', ' ')}, SLO {slo_ms:.0f} ms"
        if math.isfinite(finish_ms):
            text += f", predicted finish {finish_ms:.0f} ms after arrival"
        return error_of(drop.reason)(
            text,
            reason=drop.reason.value,
            model=self._name,
            latency_slo_ms=slo_ms,
            predicted_finish_ms=finish_ms,
        )

    def _fail(self, error: Exception) -> None:
        """The policy raised: nobody may hang on that."""
        for call in list(self._waiting.values()):
            self.leave(call)
            if not call.future.done():
                call.future.set_exception(error)

    def _worth_a_probe(self, call: _Call) -> bool:
        now = time.monotonic()
        left_s = call.request.deadline - now
        if self._running or self._probe_call is not None or call.probed or left_s <= 0:
            return False
        if self.online.samples < _LITTLE_EVIDENCE:
            return True
        # Old evidence: try, unless this request is in more of a hurry than most and no batch was
        # ever that quick.
        ordinary = call.latency_slo_s >= self._settings.latency_slo_s
        old = now - self._ended_at >= _PROBE_PERIOD_S
        return old and (ordinary or left_s >= self._fastest_s)

    def _probe(self, call: _Call) -> None:
        """Run this one request, believing for the moment that it can be on time."""
        call.probed = True
        self._probe_call = call
        left_s = call.request.deadline - time.monotonic()
        self._announced = None
        self._host.set_cluster(self._cluster(LatencyProfile([0.8 * left_s])))
        self._host.submit(call.request)

    def _end_probe(self) -> None:
        self._probe_call = None
        self._announce()

    # -- running a batch -------------------------------------------------------------------

    async def _run(self, dispatch: Dispatch, calls: list[_Call], exploring: bool) -> None:
        async with self._slots.setdefault(dispatch.worker, asyncio.Lock()):
            started = time.monotonic()
            status = BatchStatus.FAILED
            finished = started
            try:
                calls = [c for c in calls if not c.future.done()]
                groups: dict[Any, list[_Call]] = {}
                for call in calls:
                    groups.setdefault(call.group, []).append(call)
                ok = [await self._run_group(group) for group in groups.values()]
                finished = time.monotonic()
                if all(ok):
                    status = BatchStatus.FINISHED
                if ok == [True]:
                    self._learn(len(calls), finished - started, calls)
            finally:
                self._running -= 1
                self._exploring -= exploring
                self._ended_at = time.monotonic()
                if self._probe_call in calls:
                    self._probe_call = None
                outcome = BatchOutcome(
                    dispatch.batch_id, dispatch.requests, started, finished, status
                )
                self._host.finished(dispatch.worker, outcome)
                self._announce()
                for call in list(self._held):
                    self._let_go(call)
                    self._host.submit(call.request)

    async def _run_group(self, calls: list[_Call]) -> bool:
        """Call the method once and answer the callers; False if it failed."""
        args = [list(column) for column in zip(*(c.args for c in calls), strict=True)]
        kwargs = {name: [c.kwargs[name] for c in calls] for name in calls[0].kwargs}
        if calls[0].instance is not None:
            args.insert(0, calls[0].instance)
        try:
            with (
                context.batch_context([c.context for c in calls]),
                tracing.within([c.trace for c in calls]),
            ):
                if inspect.isasyncgenfunction(self._func):
                    await self._run_stream(calls, self._func(*args, **kwargs))
                    return True
                if inspect.iscoroutinefunction(self._func):
                    results = await user_code.call_async(
                        functools.partial(self._func, *args, **kwargs)
                    )
                else:
                    results = await self._run_in_thread(args, kwargs)
            user_code.check_results(results, len(calls), self._name, self._name)
        except asyncio.CancelledError:
            self._answer_all(calls, RuntimeError(f"{self._name}: the batch was cancelled"))
            raise
        except Exception as error:
            self._answer_all(calls, error)
            return False
        for call, result in zip(calls, results, strict=True):
            if not call.future.done():
                call.future.set_result(result)
        return True

    async def _run_in_thread(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        call = functools.partial(user_code.call, functools.partial(self._func, *args, **kwargs))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self._settings.max_concurrent_batches, f"batch-{self._name}"
            )
        results = await self._loop.run_in_executor(self._pool, copy_context().run, call)
        if inspect.isawaitable(results):
            return await user_code.call_async(lambda: results)
        return results

    async def _run_stream(self, calls: list[_Call], steps: Any) -> None:
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in calls]
        for call, queue in zip(calls, queues, strict=True):
            if not call.future.done():
                call.future.set_result(queue)
        error: Exception | None = None
        try:
            async for results in steps:
                user_code.check_results(results, len(calls), self._name, self._name)
                for call, queue, result in zip(calls, queues, results, strict=True):
                    if call.ended:
                        continue
                    if result is StopIteration or result is StopAsyncIteration:
                        call.ended = True
                        queue.put_nowait(_End())
                    else:
                        queue.put_nowait(result)
                if all(call.ended for call in calls):
                    break
        except asyncio.CancelledError:
            error = RuntimeError(f"{self._name}: the batch was cancelled")
            raise
        except BaseException as e:
            error = user_code.as_exception(e)
            raise error from e.__cause__
        finally:
            for call, queue in zip(calls, queues, strict=True):
                if not call.ended:
                    queue.put_nowait(_End(error))
            await steps.aclose()

    @staticmethod
    def _answer_all(calls: list[_Call], error: BaseException) -> None:
        for call in calls:
            if not call.future.done():
                call.future.set_exception(error)

    def _learn(self, size: int, duration_s: float, calls: list[_Call]) -> None:
        duration_s = max(duration_s, 1e-6)
        on_time = time.monotonic() <= calls[0].request.deadline
        if self._probe_call in calls and on_time:
            self.online = OnlineProfile(self._settings.prior())
        if size <= self.online.prior.max_batch_size:
            self.online.observe(size, duration_s)
        self._largest = max(self._largest, size)
        self._fastest_s = min(self._fastest_s, duration_s)

    def _warn_if_serve_holds_requests_back(self) -> None:
        limit = context.max_ongoing_requests()
        if limit is not None and limit < self._settings.max_batch_size:
            logger.warning(
                f"{self._name}: Serve lets {limit} requests at a time into this replica "
                f"(max_ongoing_requests), so no batch is larger, and what waits outside is not "
                f"seen until its deadline is near. Set max_ongoing_requests well above "
                f"max_batch_size ({self._settings.max_batch_size})."
            )


@dataclass(slots=True)
class _State:
    """What belongs to one instance: a batcher per event loop."""

    owner: Any  # a weak reference, or the instance itself where its class allows none
    batchers: dict[asyncio.AbstractEventLoop, _Batcher] = field(default_factory=dict)


class _Batched:
    """A decorated function with its settings. Pickles without its state, which is made on use."""

    def __init__(self, func: Callable[..., Any], settings: _Settings) -> None:
        self.func = func
        self.name = func.__name__
        self.settings = settings
        self._signature = inspect.signature(func)
        parameters = list(self._signature.parameters.values())
        self._is_method = bool(parameters) and parameters[0].name in ("self", "cls")
        items = parameters[self._is_method :]
        if not items:
            raise ConfigError(f"{self.name} must take a list of items as its argument")
        if any(p.name == "latency_slo_ms" for p in items):
            raise ConfigError(
                f"{self.name}: the argument name latency_slo_ms is taken: a caller's "
                "latency_slo_ms=… is the deadline of that call"
            )
        self._one_item = len(items) == 1 and items[0].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        self._reset()

    def _reset(self) -> None:
        context.install(note_headers)  # here, as a replica unpickles what the driver decorated
        self._states: dict[int, _State] = {}
        self._lock = threading.RLock()  # instances may live on loops of several threads

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
            while not isinstance(item := await queue.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            batcher.leave(call)

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Batcher, _Call]:
        slo_s = None
        if (slo_ms := kwargs.pop("latency_slo_ms", None)) is not None:
            slo_s = _positive_ms(slo_ms, BadInput, field="latency_slo_ms") / 1e3
        skip = int(self._is_method)
        if kwargs or not self._one_item or len(args) != 1 + skip:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        instance = args[0] if self._is_method else None
        batcher = self._batcher(instance)
        return batcher, batcher.submit(instance, args[skip:], kwargs, slo_s)

    def _batcher(self, instance: Any) -> _Batcher:
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
                learned = batcher.online
                batcher.close()
            batcher = state.batchers[loop] = _Batcher(self, learned)
        return batcher

    def _remember(self, instance: Any) -> Any:
        key, forget = id(instance), self._forget
        try:
            return weakref.ref(instance, lambda _: forget(key))
        except TypeError:
            return instance  # None, or __slots__ without __weakref__: lives as long as we do

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
        self.settings.latency_slo_s = _positive_ms(latency_slo_ms, ConfigError) / 1e3
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
    lists and returns a list of the same length, in order. There is no waiting time to tune. When a
    batch starts and how large it is follows from the deadlines of the waiting calls and from how
    long batches of that size take, which is learned while it runs.

        @serve.deployment(max_ongoing_requests=200)
        class Classifier:
            @ray_slo.batch(latency_slo_ms=100)
            async def predict(self, images: list[np.ndarray]) -> list[str]: ...

            async def __call__(self, request: Request) -> str:
                return await self.predict(decode(await request.body()))

    What may be decorated: functions and methods (the instance is the first argument, named `self`
    or `cls`), with one or several arguments, each of which becomes a list.

    * `async def`: runs on the event loop.
    * `def`: runs in one thread of its own (or `max_concurrent_batches` of them), so the loop stays
      free to take calls in. Callers await it all the same. The better choice for code that
      computes, PyTorch for one.
    * `async def` with `yield`: each step yields a list with one value per call, and each caller
      iterates its own values (`async for`). `StopIteration` in a caller's place ends that caller.
      The SLO is for the whole stream.

    Each instance (and event loop) has its own queue and learns by itself; it works without Serve
    and without Ray running, too. One batch runs at a time, and none is cut before it can start.

    Deadlines. A call's own `latency_slo_ms=…` keyword comes first; the function does not see it.
    Else the request's: `x-slo-latency-ms`, or `x-request-timeout-seconds` where it is tighter than
    the SLO (`ray_slo.serve.deadlines`). Else the SLO. Time that a request spent before the
    call is not known here, least of all what it waited outside the replica: set the deployment's
    `max_ongoing_requests` well above `max_batch_size` (Serve's default is 5).

    The policy is `ray_slo.policies.deferred` (Symphony, Algorithm 1) with one worker.

    Args:
        latency_slo_ms: milliseconds from call to result.
        max_batch_size: an upper bound only (memory, mostly).
        max_concurrent_batches: how many batches of one instance may run at a time.
        objective: "responsive" (as early as the load allows) or "consolidate" (as late and as
            large as the deadlines allow, as in the paper).
        profile: a `LatencyProfile`, or a file written by `ray-slo profile` (with one profile, or
            one named like the function), to start from; it also bounds the batch size.
        margin_ms: how much earlier than the deadline to aim, and how much earlier than the last
            moment to start, for timers and threads; the former is scaled with a call's own
            deadline. Default: 5 % of the SLO.

    The decorated function has `set_max_batch_size`, `set_latency_slo_ms`, `get_max_batch_size` and
    `get_latency_slo_ms`, to be used from `reconfigure`, for instance.

    Raises (when decorating):
        ConfigError: an argument is wrong, or is one of `@serve.batch` that has no meaning here.

    Raises (when called):
        RefusedEarly: it would have been late. Raised as soon as that is known, by a timer, not
            when the running batch ends. Serve answers HTTP 503 with `Retry-After`.
        Expired: its deadline had passed before it came here, or while it waited. HTTP 504.
        BadInput: `latency_slo_ms` is no positive number.
        BatchResultError: the function returned no list, or one of another length.

    What the function raises goes to every caller of that batch. A cancelled caller leaves the
    queue; when its batch runs already, the batch goes on for the others.
    """
    if unsupported:
        names = ", ".join(unsupported)
        why = (
            "it follows from the deadlines; leave it out"
            if "batch_wait_timeout_s" in unsupported
            else "valid are latency_slo_ms, max_batch_size, max_concurrent_batches, objective, "
            "profile, margin_ms"
        )
        raise ConfigError(f"@ray_slo.batch takes no {names}: {why}")
    if callable(latency_slo_ms):
        raise ConfigError("@ray_slo.batch needs to know how fast: @ray_slo.batch(latency_slo_ms=…)")
    slo_ms = _positive_ms(latency_slo_ms, ConfigError)
    if margin_ms is None:
        margin_ms = 0.05 * slo_ms
    if not 0 <= margin_ms < slo_ms:
        raise ConfigError(f"margin_ms must be 0 … latency_slo_ms ({slo_ms:g}), got {margin_ms!r}")
    try:
        make_policy("deferred", {"objective": objective})
    except ValueError as error:
        raise ConfigError(str(error)) from error

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(func) or inspect.isclass(func):
            raise ConfigError(f"@ray_slo.batch decorates functions and methods, not {func!r}")
        if inspect.isgeneratorfunction(func):
            raise ConfigError(
                f"{func.__name__} is a generator; for streams, make it `async def` with `yield`"
            )
        settings = _Settings(
            latency_slo_s=slo_ms / 1e3,
            max_batch_size=_positive_int("max_batch_size", max_batch_size),
            max_concurrent_batches=_positive_int("max_concurrent_batches", max_concurrent_batches),
            objective=objective,
            profile=_load(profile, func.__name__),
            margin=margin_ms / slo_ms,
        )
        return _wrap(_Batched(func, settings))

    return decorate


def _wrap(batched: _Batched) -> Callable[..., Any]:
    # These closures are pickled by value with the user's class: they hold `batched` and no more.
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await batched.call(args, kwargs)

    async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for item in batched.stream(args, kwargs):
            yield item

    is_stream = inspect.isasyncgenfunction(batched.func)
    wrapped: Any = functools.wraps(batched.func)(stream if is_stream else call)
    wrapped.set_max_batch_size = batched.set_max_batch_size
    wrapped.set_latency_slo_ms = batched.set_latency_slo_ms
    wrapped.get_max_batch_size = batched.get_max_batch_size
    wrapped.get_latency_slo_ms = batched.get_latency_slo_ms
    return cast(Callable[..., Any], wrapped)


def _load(profile: LatencyProfile | str | Path | None, name: str) -> LatencyProfile | None:
    if profile is None or isinstance(profile, LatencyProfile):
        return profile
    try:
        profiles = load_profiles(profile)
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile: {error}") from error
    if (found := profile_of(profiles, name, name)) is None:
        raise ConfigError(f"profile {profile} has no {name!r}; it has {', '.join(profiles)}")
    return found


def _positive_ms(value: Any, error: type[SLOError], **context: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise error(
            f"latency_slo_ms must be a positive number of milliseconds, got {value!r}", **context
        )
    return number


def _positive_int(name: str, value: Any) -> int:
    if not isinstance(value, int | float) or value < 1 or value != int(value):
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)
