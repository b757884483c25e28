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
from typing import Any

from ray_slo.core import LatencyProfile, OnlineProfile
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
from ray_slo.serve.worker.profiles import Profiles

logger = logging.getLogger(__name__)

_ROUNDS = 20  # rounds of measurements of a variant, if there is time for them
_BETWEEN = 0.1  # share of the shortest SLO for which a measurement may delay the models in service


@dataclass
class Loaded:
    """A variant that is ready to run.

    Attributes:
        call: the user's batch method; with variants, bound to this variant's network.
        owner: name of the user's class, for messages.
        size: size of an item, if the user's class defines `size(item)`. Profiles then use the sum
            of sizes instead of the number of items.
        stage: prepares a batch for `call` while another batch runs, if that is possible.
        least_s: the shortest known time of a batch, seconds.
    """

    key: str
    ref: VariantRef
    call: Callable[[list[Any]], Any]
    is_async: bool
    owner: str
    size: Callable[[Any], int] | None = None
    stage: Callable[[list[Any]], Any] | None = None
    profile: OnlineProfile = field(init=False)
    least_s: float = math.inf

    def load(self, items: list[Any]) -> int:
        """Return the size of a batch of these items, in the unit of its profile."""
        if self.size is None:
            return len(items)
        return user_code.call(lambda: sum(map(self.size, items)))  # type: ignore[arg-type]

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

    Attributes:
        loaded: variants that are ready to run.
        offered: those of them that schedulers may use.
        preempts: whether batches may be stopped.
        preempt_delay_s: the longest delay in a preemption profile, seconds.
        meter: meter of the variants' memory.
        profiles: profiles of every variant that was ever loaded.
    """

    def __init__(
        self,
        spec: AppSpec,
        kind: str,
        doing: Callable[[str, str, int], None],
        meter: Meter | None = None,
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
        self._instances: dict[str, Any] = {}  # the user's objects, by model
        self._user_configs = {name: model.user_config for name, model in spec.models.items()}
        self._configured: dict[str, Any] = {}  # the current user_config, by model
        self.profiles = Profiles(spec)
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-worker")
        self._builder = self._thread
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-stager")
        self._in_service = False

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
                self._instances.pop(name, None)
                self._configured.pop(name, None)
        let_go()

    async def run(
        self,
        loaded: Loaded,
        items: Any,
        scope: AbstractContextManager[None],
        *,
        load: int,
        check: bool = False,
    ) -> Any:
        """Call the user's method: on the event loop if it is async, else on the worker's thread.

        Args:
            items: a list, or a staged batch.
            load: size of the batch, in the unit of its profile.
            check: see `Meter.running`.

        Raises:
            Exception: the exception of the method (`user_code.as_exception`).
            Preempted: the batch was stopped.
        """
        with self.meter.running(loaded.key, load, check=check):
            if loaded.is_async:
                return await user_code.call_async(loaded.call, items, scope=scope)
            call = functools.partial(user_code.call, loaded.call, items, scope=scope)
            return await self._loop.run_in_executor(self._thread, call)

    def stage(self, loaded: Loaded, items: list[Any]) -> asyncio.Future[Any]:
        """Stage a batch while another one runs. `run` takes the result as its items."""
        staged = self._loop.run_in_executor(
            self._stager, user_code.call, loaded.stage or list, items
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

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply `user_config`, which maps a model's name to its own configuration.

        Raises:
            ConfigError: there is no such model, or it has no `reconfigure`.
        """
        for name, config in user_config.items():
            if name not in self._spec.models:
                raise ConfigError(
                    f"user_config names model {name!r}; the models are "
                    f"{', '.join(sorted(self._spec.models))}"
                )
            self._user_configs[name] = config
            if name not in self._instances:  # of another group
                continue
            if name not in self._configured or self._configured[name] != config:
                await self._reconfigure_one(name, config)

    # -- building --------------------------------------------------------------------------

    async def _build(self, name: str, cls: Callable[..., Any]) -> None:
        """Make a model's instance."""
        self._doing("building", name, len(self.loaded) + 1)
        model = self._spec.models[name]
        instance = await self._loop.run_in_executor(
            self._builder, user_code.call, lambda: cls(*model.args, **model.kwargs)
        )
        self._instances[name] = instance
        if (config := self._user_configs[name]) is not None:
            await self._reconfigure_one(name, config)

    async def _reconfigure_one(self, name: str, config: Any) -> None:
        instance = self._instances[name]
        method: Callable[[Any], Any] | None = getattr(instance, "reconfigure", None)
        if method is None:
            raise ConfigError(
                f"{self._spec.fields[name]}.user_config is set, but {type(instance).__name__} "
                "has no reconfigure(user_config)"
            )
        if inspect.iscoroutinefunction(method):
            await user_code.call_async(method, config)
        else:
            await self._loop.run_in_executor(self._thread, user_code.call, method, config)
        self._configured[name] = config

    async def _load_one(self, key: str) -> None:
        """Load a variant, and build its model if needed. Its profile is set later.

        Raises:
            MemoryError: the variant needs more memory than there is.
        """
        ref = self._refs[key]
        is_built = ref.model in self._instances
        cls = None if is_built else user_code.call(self._spec.models[ref.model].load)
        with self.meter.loading(key):  # memory of its imports belongs to no variant
            if cls is not None:
                await self._build(ref.model, cls)
            await self._load_built(key, ref)
        self.meter.check_fits(key)

    async def _load_built(self, key: str, ref: VariantRef) -> None:
        """Load a variant of a model that was built."""
        self._doing("loading", key, len(self.loaded) + 1)
        instance = self._instances[ref.model]
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
            size=getattr(cls, "size", None),
            stage=_stage_of(instance, network, ref),
        )

    async def _load_network(self, ref: VariantRef, spec: VariantConfig) -> Any:
        try:
            load = user_code.call(spec.loader)
            return await self._loop.run_in_executor(
                self._builder, user_code.call, lambda: load(*spec.args, **spec.kwargs)
            )
        except Exception as error:
            raise ConfigError(
                f"{self._spec.fields[ref.model]}.variants.{ref.name}: load failed: "
                f"{type(error).__name__}: {error}"
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
        example_input = getattr(type(self._instances[loaded.ref.model]), "example_input", None)
        if key not in self.profiles.learned:
            prior = known or self.profiles.from_file(loaded.ref)
            if prior is None and example_input is not None and self._spec.profile_seconds > 0:
                sweep = await self._measure(loaded, example_input, limit, slo_s)
                measured = sweep.samples
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

    async def _measure(
        self, loaded: Loaded, example_input: Callable[..., Any], limit: int, slo_s: float
    ) -> Sweep:
        """Measure a variant, and return the sweep. While models are in service, each call runs
        between their batches. A call with several items may use only a small share of their SLOs. A
        size that does not fit in memory ends the sweep.

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
            repeats=_ROUNDS,
        )
        example = user_code.call(example_input)
        while (size := sweep.size) is not None:
            sized = loaded.size is not None
            items = [user_code.call(example_input, size)] if sized else [example] * size
            scope = preemption_scope(PreemptionFlag()) if self.preempts else nullcontext()
            start = time.perf_counter()
            try:
                await self.run(loaded, items, scope, load=size, check=True)
            except Exception as error:
                took_s = time.perf_counter() - start
                if not is_out_of_memory(error) or not sweep.ran_out(took_s):
                    raise
                logger.warning("%s: no memory for a batch of %d: %s", loaded.key, size, error)
                let_go(error)
            else:
                sweep.took(time.perf_counter() - start)
        return sweep


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
