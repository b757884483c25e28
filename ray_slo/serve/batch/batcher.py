"""Forms and runs the batches of a function that `@ray_slo.batch` decorates.

The policy is `deferred`, as in the scheduler. It runs on the caller's event loop, with a cluster of
one worker: the decorated method. The latency profile is learned while it runs.

The start without a profile
    The first assumption is ℓ(b) = SLO / 50 · (4 + b). This is the shape of a typical network, with
    a fixed cost of four items. One item takes a tenth of the SLO. The first batch scales this
    profile. Until a second size is measured, larger batches are assumed to save no time
    (`ray_slo.core.profiles`). A batch has at most four times the largest measured size (8 at
    first).
Correction of a wrong profile
    The method may seem too slow for a request although it is idle. If the profile is not sure
    (`Belief.is_sure`), it is doubted, and the request is tried. So one cold start does not cause
    the refusal of all later requests.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from ray_slo.core import (
    BatchOutcome,
    BatchStatus,
    Cluster,
    Dispatch,
    Drop,
    DropReason,
    Model,
    Request,
    Variant,
)
from ray_slo.core.beliefs import TRIED_FROM, Belief, Caution
from ray_slo.core.quantile import FEW_SAMPLES, Quantile
from ray_slo.models.checkpoint import warn_of_checkpoints
from ray_slo.policies.registry import make_policy
from ray_slo.serve import user_code
from ray_slo.serve.batch.calls import Call, End, Kind, Settings, kind_of
from ray_slo.serve.batch.capacity import uses, without_uses
from ray_slo.serve.batch.metrics import BatchMetrics
from ray_slo.serve.deadlines import deadline_for
from ray_slo.serve.errors import Expired, SLOError, error_of, predicted
from ray_slo.serve.ray_private import context
from ray_slo.serve.ray_private.actors import bring_forward
from ray_slo.serve.results import as_it_is, taken
from ray_slo.serve.scheduler.host import PolicyHost
from ray_slo.serve.watch import tracing

logger = logging.getLogger("ray.serve")  # Serve's logger: it writes into the replica's log

_HARDWARE = "here"
_STOPS_NOTHING = (
    "@ray_slo.batch stops no batch; use @ray_slo.deployment with the policy flex or deferred_flex"
)
_FIRST_CAP = 8
_GROWTH = 4
_ANNOUNCE_PERIOD_S = 0.25
_AFTER = 0.25  # at most this share of the time left is kept for the event loop


async def _awaited(method: Callable[[], Any], take: Callable[[Any], list[Any]]) -> list[Any]:
    return take(await method())


def _answer_all(calls: list[Call], error: BaseException) -> None:
    for call in calls:
        if not call.future.done():
            call.future.set_exception(error)


class Batcher:
    """Forms and runs the batches of one method of one instance on one event loop."""

    def __init__(
        self, name: str, func: Callable[..., Any], settings: Settings, belief: Belief | None
    ) -> None:
        self._name = name
        self._func = func
        self._kind = kind_of(func)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.belief = belief or Belief(settings.prior())
        self._caution = Caution()
        self._metrics = BatchMetrics(name)
        self._fastest_s = math.inf
        self._after = Quantile(0.95, prior=FEW_SAMPLES)  # s until a caller goes on with its answer
        self._announced_at = -math.inf
        self._ids = itertools.count()
        self._waiting: dict[int, Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0  # number of running batches
        self._due: dict[int, float] = {}  # their predicted ends
        self._exploring = 0  # number of those that are larger than any batch measured before
        self._held: dict[Call, asyncio.TimerHandle] = {}
        self._slots: dict[str, asyncio.Lock] = {}
        self._pool: ThreadPoolExecutor | None = None
        # Timers fire late. With a flat profile, there is no slack for this after frontrun.
        jitter_ms = 1e3 * settings.margin * settings.latency_slo_s
        self._host = PolicyHost(
            make_policy("deferred", {"objective": settings.objective, "jitter_ms": jitter_ms}),
            self._cluster(),
            on_dispatch=self._start,
            on_drop=self._refuse,
            on_error=self._fail,
            clock=time.monotonic,
            # If the method blocked the event loop, calls wait there. Take them first.
            settle_turns=3,
            context=without_uses(),
        )
        bring_forward()
        _warn_if_held_back(name, settings.max_batch_size)
        warn_of_checkpoints(_STOPS_NOTHING)

    # -- callers ---------------------------------------------------------------------------

    def submit(
        self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], slo_s: float | None
    ) -> Call:
        """Add a call with this SLO, in seconds, to the queue. None: the function's SLO or that of
        the request, from when the request came to the door.

        Raises:
            Expired: the deadline of the Serve request that makes the call has passed.
        """
        now, of_request, spent_s = time.monotonic(), uses(), 0.0
        if slo_s is None:
            spent_s = 0.0 if of_request is None else of_request.before_s
            slo_s = deadline_for(self._settings.latency_slo_s - spent_s) - now + spent_s
        left_s = slo_s - spent_s
        if left_s <= 0:
            raise Expired(
                f"{self._name}: the deadline passed {-1e3 * left_s:.0f} ms before the call",
                model=self._name,
                latency_slo_ms=1e3 * max(slo_s, 0.0),
            )
        if of_request is not None:
            of_request.begin(self, self._settings.latency_slo_s)
        kept_s = slo_s * self._settings.margin + min(self._after.value(0.0), _AFTER * left_s)
        request = Request(next(self._ids), self._name, now, now + left_s - kept_s)
        call = Call(
            instance,
            args,
            kwargs,
            slo_s,
            request,
            self._loop.create_future(),
            context.request_context(),
            tracing.caller(),
            of_request,
            spent_s,
        )
        self._waiting[request.id] = call
        self._host.submit(request)
        return call

    def leave(self, call: Call) -> None:
        """Remove a caller that has left, or that has all its values."""
        call.ended = True
        if call.answered_at is not None:
            self._after.add(time.monotonic() - call.answered_at)
        if call.uses is not None:
            call.uses.end()
            call.uses = call.answered_at = None
        if self._waiting.pop(call.request.id, None) is not None:
            self._host.cancel(call.request)
            self._let_go(call)

    @property
    def capacity(self) -> float:
        """Calls per second that the method can answer in time. It is infinite before the first
        batch. It is doubled until batches of half the SLO were measured, as they may be faster than
        assumed."""
        settings, belief = self._settings, self.belief
        rate = belief.rate_within(settings.latency_slo_s, settings.max_batch_size)
        half = belief.profile.max_batch_within(0.5 * settings.latency_slo_s)
        is_known = min(half, settings.max_batch_size) <= belief.measured_to
        return settings.max_concurrent_batches * rate * (1 if is_known else 2)

    def settings_changed(self) -> None:
        self._announce(force=True)

    def close(self) -> None:
        self._host.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    # -- the policy's input --------------------------------------------------------------

    def _cluster(self) -> Cluster:
        """Return the present cluster for the policy."""
        settings, learned = self._settings, self.belief.tell()
        cap = min(settings.max_batch_size, learned.max_batch_size)
        if settings.profile is None:
            cap = min(cap, max(_FIRST_CAP, _GROWTH * learned.measured_to))
        variant = Variant(self._name, {_HARDWARE: learned.truncated(cap)})
        usable_s = settings.latency_slo_s * (1 - settings.margin)
        model = Model(self._name, usable_s, (variant,))
        return Cluster.uniform([model], settings.max_concurrent_batches, _HARDWARE)

    def _announce(self, force: bool = False) -> None:
        """Give the policy a changed profile if the change matters, but not too often."""
        now = time.monotonic()
        early = self.belief.samples <= 32
        due = early or not self.belief.is_settled or now - self._announced_at >= _ANNOUNCE_PERIOD_S
        if force or (due and self.belief.is_news()):
            self._announced_at = now
            self._host.set_cluster(self._cluster())

    # -- the policy's decisions ------------------------------------------------------------

    def _start(self, dispatch: Dispatch) -> None:
        calls = [self._waiting.pop(r.id) for r in dispatch.requests if r.id in self._waiting]
        exploring = len(calls) > self.belief.measured_to
        task = self._loop.create_task(self._run(dispatch, calls, exploring))
        self._running += 1
        self._due[dispatch.batch_id] = dispatch.finish_at
        self._exploring += exploring  # count it now: drops in the same decision depend on it
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, drop: Drop) -> None:
        for request in drop.requests:
            call = self._waiting.get(request.id)
            if call is None:
                continue
            if drop.reason is DropReason.WOULD_MISS and self._worth_a_try(call):
                self._try(call)
            elif drop.reason is not DropReason.EXPIRED and self._exploring:
                # The refusal is based on an assumed latency. The running batch will measure it.
                left_s = request.deadline - time.monotonic()
                self._held[call] = self._loop.call_later(left_s, self._give_up, call, drop)
            else:
                self._give_up(call, drop)

    def _give_up(self, call: Call, drop: Drop) -> None:
        self._let_go(call)
        if self._waiting.pop(call.request.id, None) is None:
            return
        if not call.future.done():
            call.future.set_exception(self._refusal(call, drop))

    def _let_go(self, call: Call) -> None:
        timer = self._held.pop(call, None)
        if timer is not None:
            timer.cancel()

    def _refusal(self, call: Call, drop: Drop) -> SLOError:
        slo_ms = 1e3 * call.latency_slo_s
        finish_ms = 1e3 * (drop.finish_at - call.request.arrival + call.spent_s)
        now = time.monotonic()
        late_s = max(now - max(self._due.values(), default=now), 0.0)
        said, again_s = predicted(finish_ms, slo_ms, self._settings.margin * slo_ms, late_s)
        return error_of(drop.reason)(
            f"{self._name}: {drop.reason.value.replace('_', ' ')}, {said}",
            reason=drop.reason.value,
            model=self._name,
            latency_slo_ms=slo_ms,
            predicted_finish_ms=finish_ms,
            retry_after_s=None if drop.reason is DropReason.EXPIRED else again_s,
        )

    def _fail(self, error: Exception) -> None:
        """Fail all waiting calls, because the policy raised."""
        for call in list(self._waiting.values()):
            self.leave(call)
            if not call.future.done():
                call.future.set_exception(error)

    def _worth_a_try(self, call: Call) -> bool:
        now = time.monotonic()
        left_s = call.request.deadline - now
        if self._running or call.tried or left_s <= 0:
            return False
        # Do not try if this request has less time than most, and no batch was ever so fast.
        least_s = min(TRIED_FROM * self._settings.latency_slo_s, self._fastest_s)
        return not self.belief.is_sure(now) and left_s >= least_s

    def _try(self, call: Call) -> None:
        """Run this request alone, as if it could be in time."""
        call.tried = True
        now = time.monotonic()
        self.belief.doubt((call.request.deadline - now) / self.belief.profile.latency(1), now)
        self._announce(force=True)
        self._host.submit(call.request)

    # -- running a batch -------------------------------------------------------------------

    async def _run(self, dispatch: Dispatch, calls: list[Call], exploring: bool) -> None:
        async with self._slots.setdefault(dispatch.worker, asyncio.Lock()):
            started = time.monotonic()
            status = BatchStatus.FAILED
            finished = started
            try:
                calls = [c for c in calls if not c.future.done()]
                if calls:
                    waited_s = started - min(c.request.arrival for c in calls)
                    most, waiting = self._settings.max_batch_size, len(self._waiting)
                    self._metrics.started(len(calls), most, waited_s, waiting)
                groups: dict[Any, list[Call]] = {}
                for call in calls:
                    groups.setdefault(call.group, []).append(call)
                ok = [await self._run_group(group) for group in groups.values()]
                finished = time.monotonic()
                if all(ok):
                    status = BatchStatus.FINISHED
                if ok == [True]:
                    self._learn(calls, started, finished)
            finally:
                # Whatever happened, nobody waits for a batch that is over.
                _answer_all(calls, RuntimeError(f"{self._name}: the batch gave no answer"))
                self._running -= 1
                del self._due[dispatch.batch_id]
                self._exploring -= exploring
                ended = time.monotonic()
                self._metrics.ended(ended - started, len(self._waiting))
                outcome = BatchOutcome(
                    dispatch.batch_id, dispatch.requests, started, finished, status
                )
                self._host.finished(dispatch.worker, outcome)
                self._announce()
                for call in list(self._held):
                    self._let_go(call)
                    self._host.submit(call.request)

    async def _run_group(self, calls: list[Call]) -> bool:
        """Call the method once, and answer the callers. Return False if it failed."""
        args = [list(column) for column in zip(*(c.args for c in calls), strict=True)]
        kwargs = {name: [c.kwargs[name] for c in calls] for name in calls[0].kwargs}
        if calls[0].instance is not None:
            args.insert(0, calls[0].instance)
        try:
            with (
                context.batch_context([c.context for c in calls]),
                tracing.within([c.trace for c in calls]),
            ):
                method = functools.partial(self._func, *args, **kwargs)
                if self._kind is Kind.STREAM:
                    await self._run_stream(calls, method())
                    return True
                take = functools.partial(self._taken, expected=len(calls))
                if self._kind is Kind.ASYNC:
                    answers = await user_code.call_async(_awaited, method, take)
                else:
                    answers = await self._run_in_thread(method, take)
        except asyncio.CancelledError:
            _answer_all(calls, RuntimeError(f"{self._name}: the batch was cancelled"))
            raise
        except Exception as error:
            _answer_all(calls, error)
            return False
        for call, answer in zip(calls, answers, strict=True):
            if not call.future.done():
                call.answered_at = time.monotonic()
                call.future.set_result(answer)
        return True

    def _taken(self, results: Any, expected: int) -> list[Any]:
        return taken(results, expected, self._name, self._name, as_it_is)

    async def _run_in_thread(
        self, method: Callable[[], Any], take: Callable[[Any], list[Any]]
    ) -> list[Any]:
        def run() -> Any:
            results = method()
            return results if inspect.isawaitable(results) else take(results)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self._settings.max_concurrent_batches, f"batch-{self._name}"
            )
        found = await self._loop.run_in_executor(
            self._pool, copy_context().run, user_code.call, run
        )
        if inspect.isawaitable(found):
            found = await user_code.call_async(_awaited, lambda: found, take)
        answers: list[Any] = found
        return answers

    async def _run_stream(self, calls: list[Call], steps: Any) -> None:
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in calls]
        for call, queue in zip(calls, queues, strict=True):
            if not call.future.done():
                call.future.set_result(queue)
        error: Exception | None = None
        try:
            async for results in steps:
                values = self._taken(results, len(calls))
                for call, queue, value in zip(calls, queues, values, strict=True):
                    if call.ended:
                        continue
                    if value is StopIteration or value is StopAsyncIteration:
                        call.ended = True
                        queue.put_nowait(End())
                    else:
                        queue.put_nowait(value)
                if all(call.ended for call in calls):
                    break
                await asyncio.sleep(0)  # callers get their values, and may leave
        except asyncio.CancelledError:
            error = RuntimeError(f"{self._name}: the batch was cancelled")
            raise
        except BaseException as e:
            error = user_code.as_exception(e)
            raise error from e.__cause__
        finally:
            for call, queue in zip(calls, queues, strict=True):
                if not call.ended:
                    queue.put_nowait(End(error))
            await user_code.guarded(steps.aclose)

    def _learn(self, calls: Sequence[Call], started: float, finished: float) -> None:
        duration_s = max(finished - started, 1e-6)
        late = sum(call.request.deadline < finished for call in calls)
        self._caution.answered(len(calls) - late, late)
        self.belief.be_cautious(self._caution.quantile)
        self.belief.observe([(len(calls), duration_s)], finished)
        self.belief.bound(self._settings.latency_slo_s, self.belief.typical_s)
        self._fastest_s = min(self._fastest_s, duration_s)


def _warn_if_held_back(name: str, max_batch_size: int) -> None:
    limit = context.max_ongoing_requests()
    if limit is not None and limit < max_batch_size:
        logger.warning(
            f"{name}: Serve lets {limit} requests at a time into this replica "
            f"(max_ongoing_requests), so no batch is larger, and what waits outside is not seen "
            f"until its deadline is near. Set max_ongoing_requests well above max_batch_size "
            f"({max_batch_size})."
        )
