"""The worker: a Serve replica that hosts models and runs the batches it is sent, one at a time."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle, serve

from ray_slo.core import BatchStatus, LatencyProfile, OnlineProfile
from ray_slo.core.profiles import load_profiles
from ray_slo.models.profiling import doubling_sizes, profile_callable, to_profile
from ray_slo.serve.channel import WorkerLink
from ray_slo.serve.errors import BatchResultError, ConfigError
from ray_slo.serve.messages import BatchReport, Heartbeat, Piece, PieceResult
from ray_slo.serve.metrics import WorkerMetrics
from ray_slo.serve.spec import AppSpec, ModelSpec, worker_deployment

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_HUNG_S = (
    60.0  # a batch that runs longer than this and 20 × its profile makes the replica unhealthy
)


@dataclass
class _Batch:
    """Pieces of one batch, gathered until all are there."""

    id: str
    variant: str
    num_pieces: int
    received_at: float
    pieces: dict[int, list[Any]] = field(default_factory=dict)
    waiters: dict[int, asyncio.Future[PieceResult]] = field(default_factory=dict)
    closed: bool = False  # it runs, or ran: a piece that comes now is too late


class Worker:
    """Runs batches of every model of the application on one accelerator or CPU slot.

    The user's objects are built and called on one thread of their own, off the event loop.
    """

    async def __init__(  # type: ignore[misc]
        self, spec: AppSpec, kind: str, frontend: str
    ) -> None:
        self._spec = spec
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-worker")
        context = serve.get_replica_context()
        self.id: str = context.replica_id.unique_id
        # Serve numbers deployments of one name in an application; ours come in step.
        frontend += context.deployment.removeprefix(worker_deployment(frontend, kind))
        self._models: dict[str, Any] = {}
        self._configured: dict[str, Any] = {}  # the user_config in force, by model
        self._profiles: dict[str, OnlineProfile] = {}
        self._measured = False
        for name, model in spec.models.items():
            await self._load(name, model)
        self._batches: dict[str, _Batch] = {}
        self._recent: dict[str, None] = {}  # ids of ended batches, for pieces that come too late
        self._to_run: asyncio.Queue[_Batch] = asyncio.Queue()
        self._running_since: tuple[float, float] | None = None  # (loop time, expected seconds)
        self._metrics = WorkerMetrics()
        self._link = WorkerLink(spec, f"{context.app_name}#{frontend}")
        self._tasks = [
            self._loop.create_task(self._run_batches()),
            self._loop.create_task(self._beat()),
        ]

    # -- models ----------------------------------------------------------------------------

    async def _load(self, name: str, model: ModelSpec) -> None:
        cls = model.load()
        instance = await self._loop.run_in_executor(
            self._thread, lambda: cls(*model.args, **model.kwargs)
        )
        self._models[name] = instance
        if model.user_config is not None:
            await self._reconfigure_one(name, model.user_config)
        prior = await self._first_profile(name, model, cls)
        self._profiles[name] = OnlineProfile(prior, quantile=model.profile_quantile)

    async def _first_profile(self, name: str, model: ModelSpec, cls: type[Any]) -> LatencyProfile:
        """From a file, else measured here, else a guess that a few batches will mend."""
        limit = model.max_batch_size
        slo_s = model.latency_slo_ms / 1e3
        prior = None
        if model.profile is not None:
            known = load_profiles(model.profile)
            if name not in known and len(known) > 1:
                raise ConfigError(
                    f"models.{name}.profile: {model.profile} has no profile of {name!r}; "
                    f"it has {', '.join(sorted(known))}"
                )
            found = known.get(name) or next(iter(known.values()))
            points = {b: found.latency(b) for b in range(1, min(found.max_batch_size, limit) + 1)}
            prior = LatencyProfile.from_points(points, limit)
        elif hasattr(cls, "example_input") and self._spec.profile_seconds > 0:
            measured = await self._measure(name, cls.example_input(), limit, slo_s)
            self._measured = True
            prior = to_profile(measured, quantile=model.profile_quantile, max_batch_size=limit)
            fastest = min(min(times) for times in measured.values())
            if fastest > slo_s:
                raise ConfigError(
                    f"models.{name}.latency_slo_ms: no batch can meet {model.latency_slo_ms:g} ms: "
                    f"a batch of one took {fastest * 1e3:.4g} ms at best on {self._kind!r} workers"
                )
        if prior is None:
            prior = LatencyProfile.linear(slo_s / 100, slo_s / 20, limit)
        elif prior.latency(1) > slo_s and model.profile is not None:
            raise ConfigError(
                f"models.{name}.latency_slo_ms: no batch can meet {model.latency_slo_ms:g} ms: "
                f"{model.profile} says {prior.latency(1) * 1e3:.4g} ms for a batch of one"
            )
        return prior

    async def _measure(
        self, name: str, example: Any, limit: int, slo_s: float
    ) -> dict[int, list[float]]:
        call = self._models[name]
        sizes = doubling_sizes(limit)
        if inspect.iscoroutinefunction(type(call).__call__):
            # Runs on the loop, as it will in service.
            measured: dict[int, list[float]] = {}
            until = time.perf_counter() + self._spec.profile_seconds
            for size in sizes:
                for _ in range(3):
                    start = time.perf_counter()
                    await call([example] * size)
                    measured.setdefault(size, []).append(time.perf_counter() - start)
                if time.perf_counter() > until or min(measured[size]) > slo_s:
                    break
            return measured
        return await self._loop.run_in_executor(
            self._thread,
            lambda: profile_callable(
                call, example, sizes, budget_s=self._spec.profile_seconds, bound_s=slo_s
            ),
        )

    async def _reconfigure_one(self, name: str, config: Any) -> None:
        method: Callable[[Any], Any] | None = getattr(self._models[name], "reconfigure", None)
        if method is None:
            raise ConfigError(
                f"models.{name}.user_config is set, but {type(self._models[name]).__name__} "
                "has no reconfigure(user_config)"
            )
        if inspect.iscoroutinefunction(method):
            await method(config)
        else:
            await self._loop.run_in_executor(self._thread, method, config)
        self._configured[name] = config

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook: `user_config` maps a model's name to its own configuration."""
        for name, config in user_config.items():
            if name not in self._models:
                raise ConfigError(
                    f"user_config names model {name!r}; the models are "
                    f"{', '.join(sorted(self._models))}"
                )
            if name not in self._configured or self._configured[name] != config:
                await self._reconfigure_one(name, config)

    # -- batches ---------------------------------------------------------------------------

    async def execute(self, piece: Piece, worker: str) -> PieceResult:
        """Run one piece of a batch, together with its other pieces.

        Args:
            worker: this replica's id; the router sends the call to it.
        """
        now = time.monotonic()
        batch = self._batches.get(piece.batch_id)
        if batch is None:
            if piece.batch_id in self._recent:
                return PieceResult(None, 0, 0.0, 0.0, 0.0)
            batch = _Batch(piece.batch_id, piece.variant, piece.num_pieces, now)
            self._batches[piece.batch_id] = batch
            if piece.num_pieces > 1:
                self._loop.call_later(max(piece.start_by_s, 0.0), self._close_batch, batch)
        if batch.closed:
            return PieceResult(None, 0, 0.0, 0.0, 0.0)
        waiter: asyncio.Future[PieceResult] = self._loop.create_future()
        batch.pieces[piece.piece] = piece.items
        batch.waiters[piece.piece] = waiter
        if len(batch.pieces) == batch.num_pieces:
            self._close_batch(batch)
        return await waiter

    def _close_batch(self, batch: _Batch) -> None:
        if not batch.closed:
            batch.closed = True
            self._to_run.put_nowait(batch)

    async def _run_batches(self) -> None:
        while True:
            batch = await self._to_run.get()
            try:
                await self._run(batch)
            except Exception as error:  # never let one batch end the worker
                logger.exception("batch %s failed inside the worker", batch.id)
                for waiter in batch.waiters.values():
                    if not waiter.done():
                        waiter.set_exception(error)
            finally:
                self._batches.pop(batch.id, None)
                self._recent[batch.id] = None
                if len(self._recent) > 64:
                    del self._recent[next(iter(self._recent))]

    async def _run(self, batch: _Batch) -> None:
        order = sorted(batch.pieces)
        items = [item for i in order for item in batch.pieces[i]]
        start = time.monotonic()
        profile = self._profiles[batch.variant]
        size = len(items)
        in_range = 1 <= size <= profile.prior.max_batch_size
        self._running_since = (start, profile.profile.latency(size) if in_range else 0.0)
        measured: list[tuple[int, float]] = []
        status = BatchStatus.FINISHED
        results: list[tuple[bool, Any]] = []
        if items:
            try:
                results = [(True, r) for r in await self._call(batch.variant, items, measured)]
            except Exception as error:
                status = BatchStatus.FAILED
                if self._spec.isolate_errors and size > 1:
                    results = await self._one_by_one(batch.variant, items, measured)
                else:
                    results = [(False, _sendable(error))] * size
        end = time.monotonic()
        self._running_since = None
        for run_size, seconds in measured:
            profile.observe(run_size, seconds)
        report = BatchReport(
            batch_id=batch.id,
            worker=self.id,
            variant=batch.variant,
            status=status,
            batch_size=size,
            held_s=end - batch.received_at,
            exec_s=end - start,
            measured=measured,
        )
        embedded = self._link.report(report)
        self._metrics.batch(batch.variant, size, end - start)
        for i in order:
            share, results = results[: len(batch.pieces[i])], results[len(batch.pieces[i]) :]
            answer = PieceResult(
                share,
                batch_size=size,
                wait_s=start - batch.received_at,
                exec_s=end - start,
                held_s=time.monotonic() - batch.received_at,
                report=report if embedded else None,
            )
            if not batch.waiters[i].done():
                batch.waiters[i].set_result(answer)

    async def _call(
        self, variant: str, items: list[Any], measured: list[tuple[int, float]]
    ) -> list[Any]:
        call = self._models[variant]
        start = time.perf_counter()
        if inspect.iscoroutinefunction(type(call).__call__):
            results = await _only_exceptions(call, items)
        else:
            results = await self._loop.run_in_executor(self._thread, _no_exit, call, items)
        seconds = time.perf_counter() - start
        try:
            unordered = isinstance(results, str | bytes | dict | set | frozenset)
            count = -1 if unordered else len(results)
        except TypeError:
            count = -1
        if count != len(items):
            got = f"{count} results" if count >= 0 else f"a {type(results).__name__}"
            raise BatchResultError(
                f"{type(call).__name__}.__call__ was given {len(items)} items and returned {got}; "
                "it must return a list with one result per item",
                model=variant,
            )
        if 1 <= len(items) <= self._profiles[variant].prior.max_batch_size:
            measured.append((len(items), max(seconds, 1e-7)))
        return list(results)

    async def _one_by_one(
        self, variant: str, items: list[Any], measured: list[tuple[int, float]]
    ) -> list[tuple[bool, Any]]:
        results: list[tuple[bool, Any]] = []
        for item in items:
            try:
                results.append((True, (await self._call(variant, [item], measured))[0]))
            except Exception as error:
                results.append((False, _sendable(error)))
        return results

    # -- life ------------------------------------------------------------------------------

    async def introduce(self) -> Heartbeat:
        """To a frontend that just started."""
        return self._heartbeat()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            worker=self.id,
            kind=self._kind,
            profiles={n: p.profile.table for n, p in self._profiles.items()},
            batches=[*self._batches, *self._recent],
            measured=self._measured,
        )

    async def _beat(self) -> None:
        while True:
            try:
                await self._link.heartbeat(self._heartbeat())
                await asyncio.sleep(_HEARTBEAT_S)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # The scheduler is starting, restarting or gone; Serve decides our own end.
                logger.debug("heartbeat failed: %r", error)
                await asyncio.sleep(0.2)

    def check_health(self) -> None:
        """Serve's hook: a batch that runs far too long makes the replica unhealthy.

        Raises:
            RuntimeError: then Serve replaces the replica.
        """
        if self._running_since is not None:
            since, expected_s = self._running_since
            ran_s = time.monotonic() - since
            if ran_s > max(_HUNG_S, 20 * expected_s if math.isfinite(expected_s) else 0.0):
                raise RuntimeError(f"a batch has been running for {ran_s:.0f} s")

    def __del__(self) -> None:
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        if hasattr(self, "_thread"):
            self._thread.shutdown(wait=False)


def _no_exit(call: Callable[[Any], Any], items: list[Any]) -> Any:
    """`call(items)`; what an event loop cannot carry (or would end it) becomes a plain error."""
    try:
        return call(items)
    except (StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _only_exceptions(call: Callable[[Any], Any], items: list[Any]) -> Any:
    # A task of its own: that it was cancelled, or exits, does not concern the worker's loop.
    done, _ = await asyncio.wait([asyncio.ensure_future(_guarded(call, items))])
    return done.pop().result()


async def _guarded(call: Callable[[Any], Any], items: list[Any]) -> Any:
    try:
        return await call(items)
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _sendable(error: Exception) -> Exception:
    """The error itself, or one that says the same and can be pickled."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
