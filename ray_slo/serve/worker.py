"""The worker: a Serve replica that hosts every variant of every model and runs the batches it is
sent, one at a time."""

from __future__ import annotations

import asyncio
import functools
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
from ray_slo.serve.spec import AppSpec, ModelSpec, VariantRef, VariantSpec, worker_deployment

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_ROUNDS = 30  # of measurements at start: what they leave of their time goes to slower variants
_HUNG_S = (
    60.0  # a batch that runs longer than this and 20 × its profile makes the replica unhealthy
)


@dataclass
class _Loaded:
    """A variant, ready to run.

    Attributes:
        call: the user's batch method; with variants, bound to this variant's network.
        owner: name of the user's class, for messages.
    """

    ref: VariantRef
    call: Callable[[list[Any]], Any]
    is_async: bool
    owner: str
    profile: OnlineProfile = field(init=False)


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
        self._models: dict[str, Any] = {}  # the user's objects
        self._configured: dict[str, Any] = {}  # the user_config in force, by model
        self._variants: dict[str, _Loaded] = {}
        for name, model in spec.models.items():
            await self._load_model(name, model)
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

    async def _load_model(self, name: str, model: ModelSpec) -> None:
        cls = model.load()
        instance = await self._loop.run_in_executor(
            self._thread, lambda: cls(*model.args, **model.kwargs)
        )
        self._models[name] = instance
        if model.user_config is not None:
            await self._reconfigure_one(name, model.user_config)
        refs = {key: ref for key, ref in self._spec.variants().items() if ref.model == name}
        for key, ref in refs.items():
            call = instance if ref.spec is None else await self._load_network(ref, ref.spec)
            self._variants[key] = _Loaded(
                ref, call, inspect.iscoroutinefunction(cls.__call__), cls.__name__
            )
        await self._measure_variants(model, list(refs))

    async def _load_network(self, ref: VariantRef, spec: VariantSpec) -> Callable[..., Any]:
        """The model's batch method, bound to the network of a variant."""
        try:
            load = spec.loader()
            network = await self._loop.run_in_executor(
                self._thread, lambda: load(*spec.args, **spec.kwargs)
            )
        except Exception as error:
            raise ConfigError(
                f"models.{ref.model}.variants.{ref.name}: load failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        return functools.partial(self._models[ref.model], network)

    async def _measure_variants(self, model: ModelSpec, keys: list[str]) -> None:
        """A first profile for every variant of a model; refuses an SLO that none can meet."""
        left_s = self._spec.profile_seconds
        fastest: dict[str, tuple[float, str]] = {}  # seconds of a batch of one, and who says so
        for i, key in enumerate(keys):
            start = time.monotonic()
            # What a quick variant leaves of its share goes to the others.
            share_s = max(left_s, 0.0) / (len(keys) - i)
            prior, *fastest[key] = await self._first_profile(self._variants[key], model, share_s)
            left_s -= time.monotonic() - start
            self._variants[key].profile = OnlineProfile(prior, quantile=model.profile_quantile)
        too_slow = {k: f for k, f in fastest.items() if f[0] > model.latency_slo_ms / 1e3}
        if len(too_slow) == len(keys):
            name = self._variants[keys[0]].ref.model
            raise ConfigError(
                f"models.{name}.latency_slo_ms: no batch can meet {model.latency_slo_ms:g} ms: "
                f"{min(too_slow.values())[1]}"
            )
        for key, (_, says) in too_slow.items():
            logger.warning("variant %s is too slow for its SLO to be used: %s", key, says)

    async def _first_profile(
        self, loaded: _Loaded, model: ModelSpec, budget_s: float
    ) -> tuple[LatencyProfile, float, str]:
        """From a file, else measured here, else a guess that a few batches will mend; also the
        least time that a batch takes, and how that is known."""
        ref, limit = loaded.ref, model.max_batch_size
        slo_s = model.latency_slo_ms / 1e3
        one = "a batch of one" + (f" of {ref.name}" if ref.spec is not None else "")
        own = ref.spec.profile if ref.spec is not None else None
        cls = type(self._models[ref.model])
        if (file := own or model.profile) is not None:
            field = f"models.{ref.model}{f'.variants.{ref.name}' * (own is not None)}.profile"
            found = self._from_file(field, file, ref.name, alone=own is not None or not ref.spec)
            points = {b: found.latency(b) for b in range(1, min(found.max_batch_size, limit) + 1)}
            prior = LatencyProfile.from_points(points, limit)
            says = f"{file} says {prior.latency(1) * 1e3:.4g} ms for {one}"
            return prior, prior.latency(1), says
        if hasattr(cls, "example_input") and self._spec.profile_seconds > 0:
            measured = await self._measure(loaded, cls.example_input(), limit, slo_s, budget_s)
            fastest_s = min(min(times) for times in measured.values())
            says = f"{one} took {fastest_s * 1e3:.4g} ms at best on {self._kind!r} workers"
            quantile = model.profile_quantile
            prior = to_profile(measured, quantile=quantile, max_batch_size=limit)
            return prior, fastest_s, says
        return LatencyProfile.linear(slo_s / 100, slo_s / 20, limit), 0.0, ""

    @staticmethod
    def _from_file(field: str, file: str, name: str, *, alone: bool) -> LatencyProfile:
        """The profile of that name; of any name where the file holds but one for the one network
        (`alone`) that it was given for."""
        known = load_profiles(file)
        if name in known:
            return known[name]
        if alone and len(known) == 1:
            return next(iter(known.values()))
        raise ConfigError(
            f"{field}: {file} has no profile of {name!r}; it has {', '.join(sorted(known))}"
        )

    async def _measure(
        self, loaded: _Loaded, example: Any, limit: int, slo_s: float, budget_s: float
    ) -> dict[int, list[float]]:
        sizes = doubling_sizes(limit)
        if loaded.is_async:
            # Runs on the loop, as it will in service.
            measured: dict[int, list[float]] = {}
            until = time.perf_counter() + budget_s
            for size in sizes:
                for _ in range(3):
                    start = time.perf_counter()
                    await loaded.call([example] * size)
                    measured.setdefault(size, []).append(time.perf_counter() - start)
                if time.perf_counter() > until or min(measured[size]) > slo_s:
                    break
            return measured
        return await self._loop.run_in_executor(
            self._thread,
            lambda: profile_callable(
                loaded.call, example, sizes, budget_s=budget_s, bound_s=slo_s, repeats=_ROUNDS
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
        loaded = self._variants[batch.variant]
        profile = loaded.profile
        size = len(items)
        in_range = 1 <= size <= profile.prior.max_batch_size
        self._running_since = (start, profile.profile.latency(size) if in_range else 0.0)
        measured: list[tuple[int, float]] = []
        status = BatchStatus.FINISHED
        results: list[tuple[bool, Any]] = []
        if items:
            try:
                results = [(True, r) for r in await self._call(loaded, items, measured)]
            except Exception as error:
                status = BatchStatus.FAILED
                if self._spec.isolate_errors and size > 1:
                    results = await self._one_by_one(loaded, items, measured)
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
        self._metrics.batch(loaded.ref, size, end - start)
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
        self, loaded: _Loaded, items: list[Any], measured: list[tuple[int, float]]
    ) -> list[Any]:
        start = time.perf_counter()
        if loaded.is_async:
            results = await _only_exceptions(loaded.call, items)
        else:
            results = await self._loop.run_in_executor(self._thread, _no_exit, loaded.call, items)
        seconds = time.perf_counter() - start
        try:
            unordered = isinstance(results, str | bytes | dict | set | frozenset)
            count = -1 if unordered else len(results)
        except TypeError:
            count = -1
        if count != len(items):
            got = f"{count} results" if count >= 0 else f"a {type(results).__name__}"
            raise BatchResultError(
                f"{loaded.owner}.__call__ was given {len(items)} items and returned {got}; "
                "it must return a list with one result per item",
                model=loaded.ref.model,
            )
        if 1 <= len(items) <= loaded.profile.prior.max_batch_size:
            measured.append((len(items), max(seconds, 1e-7)))
        return list(results)

    async def _one_by_one(
        self, loaded: _Loaded, items: list[Any], measured: list[tuple[int, float]]
    ) -> list[tuple[bool, Any]]:
        results: list[tuple[bool, Any]] = []
        for item in items:
            try:
                results.append((True, (await self._call(loaded, [item], measured))[0]))
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
            profiles={name: v.profile.profile.table for name, v in self._variants.items()},
            batches=[*self._batches, *self._recent],
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
