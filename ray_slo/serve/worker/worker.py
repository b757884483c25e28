"""The worker: a Serve replica that hosts every variant of every model and runs the batches it is
sent, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve

from ray_slo.core import BatchStatus, LatencyProfile, OnlineProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.profiles import doubling_sizes, load_profiles
from ray_slo.core.text import clipped
from ray_slo.models.checkpoint import Preempted, PreemptionFlag, preemption_scope
from ray_slo.models.preemption import (
    Preemptible,
    PreemptionProfile,
    load_preemption,
    module_of,
)
from ray_slo.models.profiling import to_profile
from ray_slo.models.sweep import Sweep
from ray_slo.serve import user_code
from ray_slo.serve.config.spec import AppSpec, ModelSpec, VariantRef, VariantSpec, worker_deployment
from ray_slo.serve.errors import MAX_MESSAGE, BatchResultError, ConfigError
from ray_slo.serve.frontend.startup import SERVING, Progress
from ray_slo.serve.messages import BatchReport, Heartbeat, Piece, PieceResult
from ray_slo.serve.planner.group_channel import Membership
from ray_slo.serve.planner.plan_channel import PlanFollower
from ray_slo.serve.ray_private.actors import this_node
from ray_slo.serve.ray_private.replica_port import listen_on_node_only
from ray_slo.serve.scheduler.channel import WorkerLink
from ray_slo.serve.suspects import note_own_end
from ray_slo.serve.watch import tracing
from ray_slo.serve.watch.metrics import WorkerMetrics
from ray_slo.serve.watch.vitals import vitals

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_FIRST_BEAT_S = 1.0  # for the first one to arrive, before Serve may send requests
_LAST_WORDS_S = 0.5  # for frontends to hear why it failed
_ROUNDS = 20  # of measurements of a variant at start, where there is time for them
_BETWEEN = 0.1  # of the tightest SLO: how long measuring a new model may hold up the others
_HUNG_S = (
    60.0  # a batch that runs longer than this and 20 × its profile makes the replica unhealthy
)


@dataclass
class _Loaded:
    """A variant, ready to run.

    Attributes:
        call: the user's batch method; with variants, bound to this variant's network.
        owner: name of the user's class, for messages.
        size: of an item, where the user's class says (`size(item)`): profiles are by the sum of
            sizes then, not by the number of items.
        least_s: the least time that a batch takes, as far as is known; `says` how it is known.
    """

    ref: VariantRef
    call: Callable[[list[Any]], Any]
    is_async: bool
    owner: str
    size: Callable[[Any], int] | None = None
    profile: OnlineProfile = field(init=False)
    least_s: float = 0.0
    says: str = ""

    def load(self, items: list[Any]) -> int:
        """What a batch of these counts for in the profile."""
        if self.size is None:
            return len(items)
        return user_code.call(lambda: sum(map(self.size, items)))  # type: ignore[arg-type]


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
    stop_asked_at: float | None = None
    flag: PreemptionFlag | None = None  # of the call of the user's method that runs, or ran
    traces: list[str] = field(default_factory=list)  # of its requests
    caller: Any = None  # of the first that is traced
    trace: tracing.BatchTrace = tracing.BATCH_NOT_TRACED

    def scope(self) -> AbstractContextManager[None]:
        """For a call of the user's method: it is stopped if the batch is, even before it starts."""
        self.flag = PreemptionFlag()
        if self.stop_asked_at is not None:
            self.flag.set()
        return preemption_scope(self.flag)

    def stop(self, now: float) -> None:
        if self.stop_asked_at is None:
            self.stop_asked_at = now
            if self.flag is not None:
                self.flag.set()


class Worker:
    """Runs batches of every model of the application on one accelerator or CPU slot.

    The user's objects are built and called on one thread of their own, off the event loop.
    """

    async def __init__(  # type: ignore[misc]
        self, spec: AppSpec, kind: str, frontend: str
    ) -> None:
        listen_on_node_only()
        self._spec = spec
        self._kind = kind
        self._preempts = spec.policy.preempts
        self._preempt_delay_s = 0.0  # the longest that a preemption profile expects
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-worker")
        self._builder = self._thread  # of the user's objects
        context = serve.get_replica_context()
        self.id: str = context.replica_tag
        # Tests run workers in their own process, where `os._exit` must stay as it is.
        if ray.is_initialized():
            note_own_end(self.id)
        self._node = this_node()
        # Serve numbers deployments of one name in an application; ours come in step.
        frontend += context.deployment.removeprefix(worker_deployment(frontend, kind))
        self._models: dict[str, Any] = {}  # the user's objects
        self._user_configs = {name: model.user_config for name, model in spec.models.items()}
        self._configured: dict[str, Any] = {}  # the user_config in force, by model
        self._variants: dict[str, _Loaded] = {}
        self._refs = spec.variants()
        self._offered: set[str] = set()  # variants that schedulers may send batches of
        self._announced: frozenset[str] = frozenset()  # variants that the scheduler knows of
        self._assigned: Assigned | None = None  # what the plan has it do
        self._learned: dict[str, OnlineProfile] = {}  # of variants that were unloaded, too
        self._batches: dict[str, _Batch] = {}
        self._recent: dict[str, None] = {}  # ids of ended batches, for pieces that come too late
        self._stops: dict[str, float] = {}  # when batches were preempted of which no piece is here
        self._to_run: asyncio.Queue[_Batch] = asyncio.Queue()
        self._running_since: tuple[float, float] | None = None  # (loop time, expected seconds)
        self._metrics = WorkerMetrics()
        app_key = f"{context.app_name}#{frontend}"
        self._link: WorkerLink | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._progress = Progress(self.id, kind)
        self._to_load = len(self._refs)
        self._news = asyncio.Event()
        telling = self._loop.create_task(self._tell_progress(frontend, context.app_name))
        try:
            self._follower = await self._begin(app_key)
        except Exception as error:
            said = clipped(f"{type(error).__name__}: {error}", MAX_MESSAGE)
            self._progress = self._progress._replace(failed=said)
            self._news.set()
            await asyncio.sleep(_LAST_WORDS_S)
            raise
        finally:
            telling.cancel()
        # Before Serve calls the application running, so that no frontend refuses its first request.
        self._progress = Progress(self.id, kind, SERVING)
        await self._tell_frontends(frontend, context.app_name)
        self._tasks = [
            self._loop.create_task(self._run_batches()),
            self._loop.create_task(self._beat()),
        ]
        if self._follower is not None:
            # From now on another thread builds, so that batches need not wait for it.
            self._builder = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-builder")
            self._tasks.append(self._loop.create_task(self._follower.follow()))

    async def _begin(self, app_key: str) -> Membership | PlanFollower | None:
        """Load the models that this worker serves, and announce them to the scheduler.

        Returns:
            The follower of the plan, or of the groups, that changes later what it serves; None
            where nothing does.
        """
        spec = self._spec
        follower: Membership | PlanFollower | None = None
        if spec.grouped:
            follower = Membership(spec, app_key, spec.group_of_kind(self._kind), self)
            await follower.begin()
            return follower
        if spec.planned:
            follower = PlanFollower(spec, app_key, self._kind, self)
            await follower.begin()
        else:
            for name in spec.models:
                await self.load(self._keys(name))
                self.check_slo()
        self._link = WorkerLink(spec, app_key)
        try:
            await asyncio.wait_for(self._announce(), _FIRST_BEAT_S)
        except asyncio.TimeoutError:
            logger.info("no scheduler yet; the next heartbeat will tell it")
        return follower

    async def _tell_progress(self, frontend: str, app: str) -> None:
        """Say what is being done, to all frontends that there are, until cancelled."""
        while True:
            self._news.clear()
            await self._tell_frontends(frontend, app)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), _HEARTBEAT_S)

    async def _tell_frontends(self, frontend: str, app: str) -> None:
        try:
            handle = serve.get_deployment_handle(frontend, app)
            responses = handle.broadcast("slo_progress", self._progress)
            await responses.results_async(timeout_s=2.0, return_exceptions=True)
        except Exception as error:  # none is there yet
            logger.debug("nobody to tell of %s: %r", self._progress, error)

    def will_load(self, variants: int) -> None:
        """How many variants it begins with, for those who wait."""
        self._to_load = variants

    def _doing(self, doing: str, what: str, number: int) -> None:
        of = max(self._to_load, number)
        self._progress = Progress(self.id, self._kind, doing, what, number, of)
        self._news.set()

    # -- models ----------------------------------------------------------------------------

    @property
    def announced(self) -> frozenset[str]:
        """Variants that the scheduler knows this worker has."""
        return self._announced

    @property
    def offered(self) -> frozenset[str]:
        """Variants that are loaded for schedulers to use."""
        return frozenset(self._offered)

    @property
    def assigned(self) -> Assigned | None:
        """What the plan has it do, as schedulers are told."""
        return self._assigned

    @property
    def profiles(self) -> dict[str, LatencyProfile]:
        """Of every variant that was ever loaded."""
        return {key: learned.profile for key, learned in self._learned.items()}

    async def load(
        self, variants: Iterable[str], known: Mapping[str, LatencyProfile] | None = None
    ) -> None:
        """Load variants, and offer them to the scheduler. Others are served meanwhile.

        Args:
            known: profiles that others have learned. A variant that neither they nor this worker
                know is measured.

        Raises:
            Exception: whatever a loader or a model's constructor raised. Then none of these
                variants stays.
        """
        keys = [key for key in variants if key not in self._offered]
        try:
            for key in keys:
                if (name := self._refs[key].model) not in self._models:
                    await self._build(name)
                await self._load_one(key)
            for key in keys:
                await self._set_profile(self._variants[key], (known or {}).get(key))
        except BaseException:
            self._forget(keys)
            raise
        self._offered.update(keys)
        await self._announce()

    def check_slo(self) -> None:
        """Refuse an SLO that no variant of a model can meet, where all of them are loaded.

        Raises:
            ConfigError: names the model and its fastest variant.
        """
        for name, model in self._spec.models.items():
            loaded = [self._variants[key] for key in self._keys(name) if key in self._offered]
            if len(loaded) < len(self._keys(name)):
                continue
            fastest = min(loaded, key=lambda variant: variant.least_s)
            if fastest.least_s > model.latency_slo_ms / 1e3:
                raise ConfigError(
                    f"{self._slo_field(name)}: no batch can meet {model.latency_slo_ms:g} ms: "
                    f"{fastest.says}"
                )

    async def assign(self, assigned: Assigned | None) -> None:
        """Tell the scheduler what the plan has this worker do, of what it has loaded."""
        self._assigned = assigned
        await self._announce()

    async def unload(self, variants: Iterable[str]) -> None:
        """Take no more batches of these variants, finish those that are here, and free them."""
        keys = set(variants)
        self._offered -= keys
        await self._announce()
        while here := [b for b in self._batches.values() if b.variant in keys]:
            await asyncio.wait([waiter for batch in here for waiter in batch.waiters.values()])
        self._forget(keys)

    def _field(self, model: str) -> str:
        """Where the configuration speaks of a model."""
        return f"{'models' if self._spec.pipeline is None else 'pipeline.tasks'}.{model}"

    def _slo_field(self, model: str) -> str:
        if self._spec.pipeline is None:
            return f"{self._field(model)}.latency_slo_ms"
        return f"pipeline.latency_slo_ms, in task {model}"

    def _keys(self, model: str) -> list[str]:
        return [key for key, ref in self._refs.items() if ref.model == model]

    def _forget(self, keys: Iterable[str]) -> None:
        """Let variants go, and models that have none left."""
        for key in keys:
            self._variants.pop(key, None)
            name = self._refs[key].model
            if not any(other in self._variants for other in self._keys(name)):
                self._models.pop(name, None)
                self._configured.pop(name, None)

    async def join(self, link: WorkerLink) -> None:
        """Serve in another group. What the old one's scheduler has sent is still answered."""
        old, self._link, self._announced = self._link, link, frozenset()
        if old is not None:
            try:
                await old.heartbeat(Heartbeat(self.id, self._kind, {}, []))
            except Exception as error:  # it will notice our silence
                logger.info("could not take leave: %r", error)
        await self._announce()

    async def _announce(self) -> None:
        """Tell the scheduler now; if it cannot be reached, the next heartbeat does."""
        try:
            await self._send_heartbeat()
        except Exception as error:
            logger.info("heartbeat failed: %r", error)

    async def _send_heartbeat(self) -> None:
        link, offered = self._link, frozenset(self._offered)
        if link is None or not (offered or self._announced):
            return  # nobody to tell, or nothing
        await link.heartbeat(self._heartbeat())
        if link is self._link:
            self._announced = offered

    async def _build(self, name: str) -> None:
        """Make a model's instance."""
        self._doing("building", name, len(self._variants) + 1)
        model = self._spec.models[name]
        cls = user_code.call(model.load)
        instance = await self._loop.run_in_executor(
            self._builder, user_code.call, lambda: cls(*model.args, **model.kwargs)
        )
        self._models[name] = instance
        if (config := self._user_configs[name]) is not None:
            await self._reconfigure_one(name, config)

    async def _load_one(self, key: str) -> _Loaded:
        """Load a variant of a model that was built; its profile comes later."""
        self._doing("loading", key, len(self._variants) + 1)
        ref = self._refs[key]
        instance = self._models[ref.model]
        network, call = instance, instance
        if ref.spec is not None:
            network = await self._load_network(ref, ref.spec)
            call = functools.partial(instance, network)
        if self._preempts:
            await self._add_exit_points(ref, self._spec.models[ref.model], network)
        cls = type(instance)
        is_async = inspect.iscoroutinefunction(cls.__call__)
        size = getattr(cls, "size", None)
        self._variants[key] = _Loaded(ref, call, is_async, cls.__name__, size)
        return self._variants[key]

    async def _load_network(self, ref: VariantRef, spec: VariantSpec) -> Any:
        try:
            load = user_code.call(spec.loader)
            return await self._loop.run_in_executor(
                self._builder, user_code.call, lambda: load(*spec.args, **spec.kwargs)
            )
        except Exception as error:
            raise ConfigError(
                f"{self._field(ref.model)}.variants.{ref.name}: load failed: "
                f"{type(error).__name__}: {error}"
            ) from error

    async def _add_exit_points(self, ref: VariantRef, model: ModelSpec, network: Any) -> None:
        """Where the configuration wants them, or the file with the profile names them."""
        known = self._preemption_profile(ref, model)
        points = known.exit_points if model.exit_points is None and known else model.exit_points
        if points:
            try:
                module = module_of(network)
                await self._loop.run_in_executor(self._builder, Preemptible, module, points)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{self._field(ref.model)}.exit_points: {error}") from error
        if points and known is not None:
            chosen = [p.delay_p95_s for p in known.points if p.exit_points == known.chosen]
            self._preempt_delay_s = max(self._preempt_delay_s, *chosen)

    @staticmethod
    def _preemption_profile(ref: VariantRef, model: ModelSpec) -> PreemptionProfile | None:
        own = ref.spec.profile if ref.spec is not None else None
        if (file := own or model.profile) is None:
            return None
        known = load_preemption(file)
        for name in (ref.name, f"{ref.model}/{ref.name}"):
            if name in known:
                return known[name]
        alone = len(known) == 1 and (own is not None or ref.spec is None)
        return next(iter(known.values())) if alone else None

    def _scope(self, batch: _Batch | None = None) -> AbstractContextManager[None]:
        """What a call of the user's method runs in."""
        if not self._preempts:
            return nullcontext()
        return preemption_scope(PreemptionFlag()) if batch is None else batch.scope()

    async def _set_profile(self, loaded: _Loaded, known: LatencyProfile | None) -> None:
        ref = loaded.ref
        model = self._spec.models[ref.model]
        key = next(key for key, other in self._refs.items() if other is ref)
        if key not in self._learned:
            if known is None:
                known, loaded.least_s, loaded.says = await self._first_profile(loaded, model)
            self._learned[key] = OnlineProfile(known, quantile=model.profile_quantile)
        loaded.profile = self._learned[key]
        if not loaded.says:
            loaded.least_s = loaded.profile.profile.latency(1)
            loaded.says = f"a batch of one of {key} takes {1e3 * loaded.least_s:.4g} ms"
        if loaded.least_s > model.latency_slo_ms / 1e3:
            logger.warning("variant %s is too slow for its SLO to be used: %s", key, loaded.says)

    async def _first_profile(
        self, loaded: _Loaded, model: ModelSpec
    ) -> tuple[LatencyProfile, float, str]:
        """From a file, else measured here, else a guess that a few batches will mend; also the
        least time that a batch takes, and how that is known."""
        ref, limit = loaded.ref, model.max_batch_size
        slo_s = model.latency_slo_ms / 1e3
        one = "a batch of one" + (f" of {ref.name}" if ref.spec is not None else "")
        own = ref.spec.profile if ref.spec is not None else None
        cls = type(self._models[ref.model])
        if (file := own or model.profile) is not None:
            owner = f".variants.{ref.name}" * (own is not None)
            field = f"{self._field(ref.model)}{owner}.profile"
            names = (ref.name, f"{ref.model}/{ref.name}")
            found = self._from_file(field, file, names, alone=own is not None or not ref.spec)
            found = found.measured.truncated(limit)
            points = {b: found.latency(b) for b in range(1, found.max_batch_size + 1)}
            prior = LatencyProfile.from_points(points, limit)
            says = f"{file} says {prior.latency(1) * 1e3:.4g} ms for {one}"
            return prior, prior.latency(1), says
        if hasattr(cls, "example_input") and self._spec.profile_seconds > 0:
            measured = await self._measure(loaded, cls.example_input, limit, slo_s)
            fastest_s = min(min(times) for times in measured.values())
            says = f"{one} took {fastest_s * 1e3:.4g} ms at best on {self._kind!r} workers"
            quantile = model.profile_quantile
            prior = to_profile(measured, quantile=quantile, max_batch_size=limit)
            return prior, fastest_s, says
        return LatencyProfile.linear(slo_s / 100, slo_s / 20, limit, measured_to=0), 0.0, ""

    @staticmethod
    def _from_file(field: str, file: str, names: tuple[str, ...], *, alone: bool) -> LatencyProfile:
        """The profile of one of the names; whatever its name, where the file holds but one and is
        for one network (`alone`)."""
        known = load_profiles(file)
        for name in names:
            if name in known:
                return known[name]
        if alone and len(known) == 1:
            return next(iter(known.values()))
        raise ConfigError(
            f"{field}: {file} has no profile of {names[0]!r}; it has {', '.join(sorted(known))}"
        )

    async def _measure(
        self, loaded: _Loaded, example_input: Callable[..., Any], limit: int, slo_s: float
    ) -> dict[int, list[float]]:
        """Seconds by batch size. Where models are served meanwhile, one call at a time between
        their batches, and none longer than a small share of their SLOs, but for a batch of one."""
        call_s = math.inf
        if self._tasks:
            served = {self._refs[key].model for key in self._offered}
            slos_ms = [self._spec.models[model].latency_slo_ms for model in served]
            call_s = _BETWEEN * min(slos_ms, default=math.inf) / 1e3
        self._doing("measuring", loaded.ref.name, len(self._learned) + 1)
        sweep = Sweep(
            doubling_sizes(limit),
            budget_s=self._spec.profile_seconds,
            bound_s=slo_s,
            call_s=call_s,
            repeats=_ROUNDS,
        )
        example = user_code.call(example_input)
        while (size := sweep.size) is not None:
            sized = loaded.size is not None
            items = [user_code.call(example_input, size)] if sized else [example] * size
            sweep.took(await self._timed(loaded, items))
        return sweep.samples

    async def _timed(self, loaded: _Loaded, items: list[Any]) -> float:
        """Seconds of a call, where it will run in service: on the loop, or on the thread."""
        if loaded.is_async:
            start = time.perf_counter()
            await user_code.call_async(loaded.call, items, scope=self._scope())
            return time.perf_counter() - start

        def timed() -> float:
            start = time.perf_counter()
            user_code.call(loaded.call, items, scope=self._scope())
            return time.perf_counter() - start

        return await self._loop.run_in_executor(self._thread, timed)

    async def _reconfigure_one(self, name: str, config: Any) -> None:
        method: Callable[[Any], Any] | None = getattr(self._models[name], "reconfigure", None)
        if method is None:
            raise ConfigError(
                f"{self._field(name)}.user_config is set, but {type(self._models[name]).__name__} "
                "has no reconfigure(user_config)"
            )
        if inspect.iscoroutinefunction(method):
            await user_code.call_async(method, config)
        else:
            await self._loop.run_in_executor(self._thread, user_code.call, method, config)
        self._configured[name] = config

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook: `user_config` maps a model's name to its own configuration."""
        for name, config in user_config.items():
            if name not in self._spec.models:
                raise ConfigError(
                    f"user_config names model {name!r}; the models are "
                    f"{', '.join(sorted(self._spec.models))}"
                )
            self._user_configs[name] = config
            if name not in self._models:  # of another group
                continue
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
            if piece.variant not in self._variants:  # unloaded while the batch was on its way
                self._report_lost(piece.batch_id, piece.variant)
                return PieceResult(None, 0, 0.0, 0.0, 0.0)
            batch = _Batch(piece.batch_id, piece.variant, piece.num_pieces, now)
            self._batches[piece.batch_id] = batch
            if piece.batch_id in self._stops:
                batch.stop(self._stops.pop(piece.batch_id))
            if piece.num_pieces > 1:
                self._loop.call_later(max(piece.start_by_s, 0.0), self._close_batch, batch)
        if batch.closed:
            return PieceResult(None, 0, 0.0, 0.0, 0.0)
        waiter: asyncio.Future[PieceResult] = self._loop.create_future()
        if piece.traces:
            batch.caller = batch.caller or tracing.caller()
            batch.traces += piece.traces
        batch.pieces[piece.piece] = piece.items
        batch.waiters[piece.piece] = waiter
        if len(batch.pieces) == batch.num_pieces or batch.stop_asked_at is not None:
            self._close_batch(batch)
        return await waiter

    def _report_lost(self, batch_id: str, variant: str) -> None:
        if self._link is not None:
            lost = BatchStatus.LOST
            self._link.report(BatchReport(batch_id, self.id, variant, lost, 0, 0.0, 0.0))

    async def preempt(self, batch_id: str, worker: str) -> None:
        """Stop a batch at its next exit point, or before it starts.

        Nothing happens to one that is over, or past its last exit point: it has its results.

        Args:
            worker: this replica's id; the router sends the call to it.
        """
        now = time.monotonic()
        batch = self._batches.get(batch_id)
        if batch is not None:
            batch.stop(now)
            self._close_batch(batch)  # wait no longer for other pieces
        elif batch_id not in self._recent:  # it overtook the payloads
            self._stops[batch_id] = now
            if len(self._stops) > 64:
                del self._stops[next(iter(self._stops))]

    def _close_batch(self, batch: _Batch) -> None:
        if not batch.closed:
            batch.closed = True
            self._to_run.put_nowait(batch)

    async def _run_batches(self) -> None:
        while True:
            batch = await self._to_run.get()
            try:
                await self._run(batch)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # never let one batch end the worker
                logger.exception("batch %s failed inside the worker", batch.id)
                self._running_since = None
                self._report_lost(batch.id, batch.variant)
                for waiter in batch.waiters.values():
                    if not waiter.done():
                        waiter.set_exception(user_code.as_exception(error))
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
        size, load = len(items), loaded.load(items)
        in_range = 1 <= load <= profile.prior.max_batch_size
        expected_s = profile.profile.latency(load) if in_range else 0.0
        self._running_since = (start, expected_s)
        if batch.traces:
            batch.trace = tracing.batch(
                batch.traces,
                batch.caller,
                id=batch.id,
                worker=self.id,
                model=loaded.ref.model,
                variant=loaded.ref.name,
                size=size,
                predicted_s=expected_s,
                waited_s=start - batch.received_at,
            )
        measured: list[tuple[int, float]] = []
        results: list[tuple[bool, Any]] = []
        try:
            status, results = await self._results(batch, loaded, items, measured)
        except Preempted:
            status = BatchStatus.PREEMPTED
        end = time.monotonic()
        self._running_since = None
        batch.trace.ended(status, end - start)
        for run_load, seconds in measured:
            profile.observe(run_load, seconds)
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
        embedded = self._link is not None and self._link.report(report)
        preempted = status is BatchStatus.PREEMPTED
        if not preempted:
            self._metrics.batch(loaded.ref, size, end - start)
        if batch.stop_asked_at is not None:
            self._metrics.preemption(loaded.ref, status.value, end - batch.stop_asked_at)
        for i in order:
            share, results = results[: len(batch.pieces[i])], results[len(batch.pieces[i]) :]
            answer = PieceResult(
                None if preempted else share,
                batch_size=size,
                wait_s=start - batch.received_at,
                exec_s=end - start,
                held_s=time.monotonic() - batch.received_at,
                report=report if embedded else None,
                preempted=preempted,
                trace=batch.trace.context,
            )
            if not batch.waiters[i].done():
                batch.waiters[i].set_result(answer)

    async def _results(
        self,
        batch: _Batch,
        loaded: _Loaded,
        items: list[Any],
        measured: list[tuple[int, float]],
    ) -> tuple[BatchStatus, list[tuple[bool, Any]]]:
        """How the batch ended, and (True, result) or (False, error) per item.

        Raises:
            Preempted: it was stopped.
        """
        if not items:
            return BatchStatus.FINISHED, []
        try:
            results = await self._call(batch, loaded, items, measured)
            return BatchStatus.FINISHED, [(True, result) for result in results]
        except Exception as error:
            if self._spec.isolate_errors and len(items) > 1:
                one_by_one = await self._one_by_one(batch, loaded, items, measured)
                return BatchStatus.FAILED, one_by_one
            return BatchStatus.FAILED, [(False, user_code.sendable(error))] * len(items)

    async def _call(
        self,
        batch: _Batch,
        loaded: _Loaded,
        items: list[Any],
        measured: list[tuple[int, float]],
    ) -> list[Any]:
        start = time.perf_counter()
        scope = batch.trace.around(self._scope(batch))
        try:
            if loaded.is_async:
                results = await user_code.call_async(loaded.call, items, scope=scope)
            else:
                results = await self._loop.run_in_executor(
                    self._thread,
                    functools.partial(user_code.call, loaded.call, items, scope=scope),
                )
        except Preempted as stopped:
            if stopped.flag is not batch.flag:
                raise RuntimeError("Preempted came out of a scope of the batch method") from stopped
            raise
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
        if 1 <= (load := loaded.load(items)) <= loaded.profile.prior.max_batch_size:
            measured.append((load, max(seconds, 1e-7)))
        return list(results)

    async def _one_by_one(
        self,
        batch: _Batch,
        loaded: _Loaded,
        items: list[Any],
        measured: list[tuple[int, float]],
    ) -> list[tuple[bool, Any]]:
        results: list[tuple[bool, Any]] = []
        for item in items:
            try:
                results.append((True, (await self._call(batch, loaded, [item], measured))[0]))
            except Exception as error:
                results.append((False, user_code.sendable(error)))
        return results

    # -- life ------------------------------------------------------------------------------

    async def introduce(self) -> Heartbeat:
        """To a frontend that just started."""
        return self._heartbeat()

    async def slo_status(self) -> dict[str, Any]:
        """What this worker holds."""
        batches, waiting = len(self._batches), self._to_run.qsize()
        return {"worker": self.id, "process": vitals(batches=batches, waiting=waiting)}

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            worker=self.id,
            kind=self._kind,
            profiles={
                key: v.profile.profile for key, v in self._variants.items() if key in self._offered
            },
            batches=list(self._batches),
            preempt_delay_s=self._preempt_delay_s,
            assigned=self._assigned,
            node=self._node,
        )

    async def _beat(self) -> None:
        while True:
            try:
                await self._send_heartbeat()
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
        follower, self._follower = getattr(self, "_follower", None), None
        if isinstance(follower, PlanFollower):
            follower.leave()
        if hasattr(self, "_thread"):
            self._thread.shutdown(wait=False)
            self._builder.shutdown(wait=False)
