"""Builds, loads, measures and frees the user's models on one worker, by variant."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import ray

from ray_slo.core import LatencyProfile, OnlineProfile
from ray_slo.core.processes import bound_threads
from ray_slo.core.profiles import doubling_sizes
from ray_slo.core.trees import tree_of_task
from ray_slo.models.checkpoint import PreemptionFlag, preemption_scope
from ray_slo.models.exit_points import module_of
from ray_slo.models.lanes import settled
from ray_slo.models.memory import Gpu, Host, Meter, is_out_of_memory, let_go
from ray_slo.models.preemption import Preemptible
from ray_slo.models.profiling import to_profile
from ray_slo.models.sweep import Sweep
from ray_slo.serve import user_code
from ray_slo.serve.config.files import preemption_of
from ray_slo.serve.config.models import VariantConfig
from ray_slo.serve.config.spec import AppSpec, VariantRef, WorkerSpec
from ray_slo.serve.errors import ConfigError
from ray_slo.serve.results import copied, given, taken
from ray_slo.serve.worker.instances import Instances, made
from ray_slo.serve.worker.profiles import Profiles

logger = logging.getLogger(__name__)

_BETWEEN = 0.1  # share of the shortest SLO for which a measurement may delay the models in service


@dataclass
class Loaded:
    """A variant that is ready to run.

    Attributes:
        call: the user's batch method; with variants, bound to this variant's network.
        owner: name of the user's class, for messages.
        has_sizes: whether the user's class defines `size(item)`. Profiles then use the sum of sizes
            instead of the number of items.
        stage: prepares a batch for `call` while another batch runs, if that is possible.
        least_s: the shortest known time of a batch, seconds.
        has_worked: whether a batch has worked since the variant was loaded.
    """

    key: str
    ref: VariantRef
    call: Callable[[list[Any]], Any]
    is_async: bool
    owner: str
    has_sizes: bool = False
    stage: Callable[[list[Any]], Any] | None = None
    profile: OnlineProfile = field(init=False)
    least_s: float = math.inf
    has_worked: bool = False

    def run(self, items: list[Any], staged: Any) -> list[Any]:
        """Call the method, and take its results."""
        return self._taken(self.call(_argument(items, staged)), len(items))

    async def run_async(self, items: list[Any], staged: Any) -> list[Any]:
        """Call the async method, and take its results."""
        return self._taken(await self.call(_argument(items, staged)), len(items))

    def _taken(self, results: Any, count: int) -> list[Any]:
        return taken(results, count, f"{self.owner}.__call__", self.ref.model, _sendable)

    def expected_s(self, load: int) -> float:
        """Return the time of a batch of this size in seconds, as learned here. 0 if the profile
        does not have this size."""
        if not 1 <= load <= self.profile.prior.max_batch_size:
            return 0.0
        return self.profile.profile.latency(load)


class Models:
    """All models that the worker has or may get.

    The user's objects are built and called on one thread of their own, off the event loop.

    Args:
        doing: called with the current action ("building", "loading" or "measuring"), its object and
            its number.
        rank: the worker's rank, for a `reconfigure(user_config, rank)`.

    Attributes:
        loaded: variants that are ready to run.
        offered: those of them that schedulers may use.
        preempts: whether batches may be stopped.
        preempt_delay_s: the longest delay in a preemption profile, seconds.
        meter: meter of the variants' memory.
        profiles: profiles of every variant that was ever loaded.
        instances: the user's objects, by model.
    """

    def __init__(
        self,
        spec: AppSpec,
        kind: str,
        doing: Callable[[str, str, int], None],
        meter: Meter | None = None,
        rank: Any = None,
    ) -> None:
        self.loaded: dict[str, Loaded] = {}
        self.offered: set[str] = set()
        self.meter = meter or _meter(spec.workers[kind])
        self.preempt_delay_s = 0.0
        self.preempts = spec.policy_of(spec.workers[kind].group).preempts
        self._spec = spec
        self._kind = kind
        self._doing = doing
        self._refs = spec.variants()
        self._tree_of = tree_of_task(spec.trees)
        self.profiles = Profiles(spec)
        self._loop = asyncio.get_running_loop()
        bound = bound_threads if ray.is_initialized() else None  # OpenMP counts per thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-worker", initializer=bound)
        self.instances = Instances(spec, self._thread, rank)
        self._builder = self._thread
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-stager")
        self._one, self._in_service = asyncio.Lock(), False

    def begin_service(self) -> None:
        """Let batches run from now on. Models are then built on another thread."""
        self._in_service = True
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-builder")

    def close(self) -> None:
        for thread in (self._thread, self._builder, self._stager):
            thread.shutdown(wait=False)

    def variants_of(self, model: str) -> list[str]:
        return [key for key, ref in self._refs.items() if ref.model == model]

    async def load(
        self,
        variants: Iterable[str],
        known: Mapping[str, LatencyProfile],
        *,
        leave_out: bool = False,
    ) -> dict[str, str]:
        """Load variants and offer them.

        Args:
            leave_out: skip variants without enough memory, as long as one fits.

        Returns:
            The reason for each variant that was skipped.

        Raises:
            Exception: the exception of a loader or of a model's constructor. Then none of these
                variants stays loaded.
        """
        keys = [key for key in variants if key not in self.offered]
        left_out: dict[str, str] = {}

        async def tried(key: str, step: Awaitable[None]) -> None:
            try:
                await step
            except Exception as error:
                if not leave_out or not is_out_of_memory(error) or len(left_out) + 1 == len(keys):
                    raise
                left_out[key] = why = user_code.in_words(error)
                logger.warning("%s does not fit in memory, and is left out: %s", key, why)
                await self._undo([key], error)

        try:
            for key in keys:
                await tried(key, self._load_one(key))
            for key in [key for key in keys if key not in left_out]:
                await tried(key, self._set_profile(self.loaded[key], known.get(key)))
        except BaseException as error:
            await self._undo(keys, error)
            raise
        self.offered.update(key for key in keys if key not in left_out)
        return left_out

    async def _undo(self, keys: Iterable[str], error: BaseException) -> None:
        """Free variants after an error. The error may hold references to them."""
        self.forget(keys)
        await asyncio.sleep(0)  # lets the event loop release the loader's result
        let_go(error)

    def forget(self, keys: Iterable[str]) -> None:
        """Free variants, and models that have no variant left."""
        keys = list(keys)
        self.meter.forget(keys)
        for key in keys:
            self.offered.discard(key)
            self.loaded.pop(key, None)
            name = self._refs[key].model
            if not any(other in self.loaded for other in self.variants_of(name)):
                self.instances.forget(name)
        let_go()

    async def run(
        self,
        loaded: Loaded,
        items: list[Any],
        scope: AbstractContextManager[None],
        *,
        load: int,
        staged: Any = None,
        check: bool = False,
    ) -> list[Any]:
        """Call the user's method: on the event loop if it is async, else on the worker's thread.

        Args:
            load: size of the batch, in the unit of its profile.
            staged: the staged batch, in place of the items.
            check: see `Meter.running`.

        Returns:
            One result per item, which the method cannot change any more.

        Raises:
            BatchResultError: the method returned no list, or one of another length.
            Exception: the exception of the method (`user_code.as_exception`).
            Preempted: the batch was stopped.
        """
        with self.meter.running(loaded.key, load, check=check):
            if loaded.is_async:
                async with self._one:  # an example may run while the models serve
                    found = await user_code.call_async(loaded.run_async, items, staged, scope=scope)
                return cast(list[Any], found)
            call = functools.partial(user_code.call, loaded.run, items, staged, scope=scope)
            return await self._loop.run_in_executor(self._thread, call)

    async def run_example(self, loaded: Loaded) -> bool:
        """Run the model's example alone, and return whether it has one.

        Raises:
            Exception: the exception of the method.
        """
        if not self.instances.has_example(loaded.ref.model):
            return False
        items = [self.instances.example(loaded.ref, 1)]
        await self.run(loaded, items, nullcontext(), load=1)
        return True

    def stage(self, loaded: Loaded, items: list[Any]) -> asyncio.Future[Any]:
        """Stage a batch while another one runs. `run` takes the result in place of the items."""
        stage = loaded.stage or list
        staged = self._loop.run_in_executor(
            self._stager, user_code.call, lambda: stage(given(items))
        )
        staged.add_done_callback(user_code.heard)  # its batch may be stopped before it runs
        return staged

    def check_slo(self) -> None:
        """Refuse an SLO that no variant of a model can meet, if all of them are offered.

        Raises:
            ConfigError: names the model and its fastest variant.
        """
        for name in self._spec.models:
            keys = self.variants_of(name)
            if not self.offered.issuperset(keys):
                continue
            fastest = min((self.loaded[key] for key in keys), key=lambda loaded: loaded.least_s)
            if fastest.least_s > (slo_ms := self._spec.slos_ms(name)[1]) / 1e3:
                field = f"{self._spec.fields[name]}.latency_slo_ms"
                if name not in self._spec.trees:
                    pipeline = self._tree_of[name].name
                    field = f"{self._spec.fields[pipeline]}.latency_slo_ms, in task {name}"
                of = f" of {fastest.ref.name}" if fastest.ref.spec is not None else ""
                raise ConfigError(
                    f"{field}: no batch can meet {slo_ms:g} ms: a batch of one{of} "
                    f"took {1e3 * fastest.least_s:.4g} ms at best on {self._kind!r} workers"
                )

    # -- building --------------------------------------------------------------------------

    async def _load_one(self, key: str) -> None:
        """Load a variant, and build its model if needed. Its profile is set later.

        Raises:
            MemoryError: the variant needs more memory than there is.
        """
        ref = self._refs[key]
        is_built = ref.model in self.instances
        cls = None if is_built else user_code.call(self._spec.models[ref.model].load)
        with self.meter.loading(key):  # memory of its imports belongs to no variant
            if cls is not None:
                self._doing("building", ref.model, len(self.loaded) + 1)
                await self.instances.build(ref.model, cls, self._builder)
            await self._load_built(key, ref)
        self.meter.check_fits(key)

    async def _load_built(self, key: str, ref: VariantRef) -> None:
        """Load a variant of a model that was built."""
        self._doing("loading", key, len(self.loaded) + 1)
        instance = self.instances[ref.model]
        network, call = instance, instance
        if ref.spec is not None:
            network = await self._load_network(ref, ref.spec)
            call = functools.partial(instance, network)
        if self.preempts:
            await self._add_exit_points(ref, network)
        cls = type(instance)
        is_async = inspect.iscoroutinefunction(cls.__call__)
        self.loaded[key] = Loaded(
            *(key, ref, call if is_async else settled(call), is_async, cls.__name__),
            has_sizes=hasattr(cls, "size"),
            stage=_stage_of(instance, network, ref),
        )

    async def _load_network(self, ref: VariantRef, spec: VariantConfig) -> Any:
        try:
            load = user_code.call(spec.loader)
            return await made(load, spec.args, spec.kwargs, self._builder)
        except Exception as error:
            raise ConfigError(
                f"{self._spec.fields[ref.model]}.variants.{ref.name}: load failed: "
                f"{user_code.in_words(error)}"
            ) from error

    async def _add_exit_points(self, ref: VariantRef, network: Any) -> None:
        """Add the exit points of the config, or those of the file with the profile."""
        model = self._spec.models[ref.model]
        known, field = preemption_of(ref, model), f"{self._spec.fields[ref.model]}.exit_points"
        points: int | Sequence[str] | None = model.exit_points
        if points is None and known is not None:
            points, field = known.exit_points, f"{field}: 0 leaves out those of the profile"
        if not points:
            return
        try:
            module = module_of(network)
            await self._loop.run_in_executor(self._builder, Preemptible, module, points)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{field}: {error}") from error
        if known is not None:
            chosen = [p.delay_p95_s for p in known.points if p.exit_points == known.chosen]
            self.preempt_delay_s = max(self.preempt_delay_s, *chosen)

    # -- profiles --------------------------------------------------------------------------

    async def _set_profile(self, loaded: Loaded, known: LatencyProfile | None) -> None:
        """Set a variant's profile. It is the first of these that exists: learned here, learned on
        other workers, from a file, measured, or a guess that a few batches will correct."""
        key, model = loaded.key, self._spec.models[loaded.ref.model]
        limit, slo_s = model.max_batch_size, self._spec.slos_ms(loaded.ref.model)[1] / 1e3
        if key not in self.profiles.learned:
            prior = known or self.profiles.from_file(loaded.ref)
            if (
                prior is None
                and self.instances.has_example(loaded.ref.model)
                and self._spec.profile_seconds > 0
            ):
                sweep = await self._measure(loaded, limit, slo_s)
                loaded.has_worked = True
                measured = sweep.steady or sweep.samples
                if sweep.is_cut:
                    limit = max(measured)
                loaded.least_s = min(min(times) for times in measured.values())
                quantile = model.profile_quantile
                prior = to_profile(measured, quantile=quantile, max_batch_size=limit)
            prior = prior or LatencyProfile.linear(slo_s / 100, slo_s / 20, limit, measured_to=0)
            self.profiles.learned[key] = OnlineProfile(prior, quantile=model.profile_quantile)
        loaded.profile = self.profiles.learned[key]
        loaded.least_s = min(loaded.least_s, loaded.profile.profile.latency(1))
        if loaded.least_s > slo_s:
            logger.warning(
                "variant %s is too slow for its SLO to be used: %.4g ms", key, 1e3 * loaded.least_s
            )

    async def _measure(self, loaded: Loaded, limit: int, slo_s: float) -> Sweep:
        """Measure a variant, and return the sweep. While models are in service, each call runs
        between their batches. A call with several items may use only a small share of their SLOs. A
        size that does not fit in memory ends the sweep, and so do steady times.

        Raises:
            MemoryError: not even the smallest batch fits in memory.
        """
        call_s = math.inf
        if self._in_service:
            served = {self._refs[key].model for key in self.offered}
            slos_ms = [self._spec.slos_ms(model)[0] for model in served]
            call_s = _BETWEEN * min(slos_ms, default=math.inf) / 1e3
        self._doing("measuring", loaded.ref.name, len(self.profiles.learned) + 1)
        sweep = Sweep(
            doubling_sizes(limit),
            budget_s=self._spec.profile_seconds,
            bound_s=slo_s,
            call_s=call_s,
        )
        while (size := sweep.size) is not None and sweep.steady is None:
            # A new example for each call, because the method may change it. If there are several
            # items, `run` copies it for each.
            items = [self.instances.example(loaded.ref, size)] * (1 if loaded.has_sizes else size)
            scope = preemption_scope(PreemptionFlag()) if self.preempts else nullcontext()
            start = time.perf_counter()
            error = await self._run_examples(loaded, items, scope, size)
            took_s = time.perf_counter() - start
            if error is None:
                sweep.took(took_s)
            elif not sweep.ran_out(took_s):
                raise error
            else:
                logger.warning("%s: no memory for a batch of %d: %s", loaded.key, size, error)
                let_go(error)
        logger.info("%s was measured: %s", loaded.key, sweep.outcome)
        # A method that returns one result for any batch is to be noticed now, not under load.
        if limit > 1 and not sweep.is_cut and (loaded.has_sizes or max(sweep.samples) == 1):
            items = [self.instances.example(loaded.ref, 1)] * 2
            if (error := await self._run_examples(loaded, items, nullcontext(), 2)) is not None:
                let_go(error)
        return sweep

    async def _run_examples(
        self, loaded: Loaded, items: list[Any], scope: AbstractContextManager[None], load: int
    ) -> Exception | None:
        """Run a batch of examples. Return the error if there is not enough memory for it.

        Raises:
            ConfigError: another error.
        """
        try:
            await self.run(loaded, items, scope, load=load, check=True)
        except Exception as error:
            if is_out_of_memory(error):
                return error
            what = f"{loaded.owner}.__call__ failed on its example_input()"
            raise self.instances.wrong_example(loaded.ref, what, error) from error
        return None


def _argument(items: list[Any], staged: Any) -> Any:
    """Return what the method gets: the staged batch, or a list of its own. It also gets copies of
    several items, because a batch that fails may run again in parts, from the items as the clients
    sent them."""
    if staged is not None:
        return staged
    return list(items) if len(items) == 1 else given(items)


def _sendable(value: Any) -> Any:
    """Return a copy of a result for another process. An exception keeps its type and message."""
    return user_code.sendable(value) if isinstance(value, Exception) else copied(value)


def _stage_of(instance: Any, network: Any, ref: VariantRef) -> Callable[[list[Any]], Any] | None:
    """Return the user's `stage`, if there is one and its network gains from it."""
    stage = getattr(instance, "stage", None)
    if not callable(stage) or not getattr(network, "stages_ahead", True):
        return None
    return stage if ref.spec is None else functools.partial(stage, network)


def _meter(worker: WorkerSpec) -> Meter:
    options = worker.ray_actor_options
    memory, gpus = options.get("memory"), options.get("num_gpus") or 1.0
    host = Host(memory / 2**20 if memory else None)
    return Meter(host, Gpu(min(gpus, 1.0)), worker.memory_mb)
