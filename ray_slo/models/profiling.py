"""Measurement of the latency profile ℓ(b): the time of a batch method by batch size.

`profile_callable` measures in the caller's process. `profile_class` measures a deployment class in
a new process with one CPU thread, as a worker would run it. So the threads and the memory of the
caller's process do not affect the figures. A worker's warm-up measures in the same order of sizes
(`sweep.Sweep`), without these functions.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import platform
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.core.names import import_attr
from ray_slo.core.processes import THREAD_VARIABLES
from ray_slo.core.profiles import LatencyProfile, doubling_sizes
from ray_slo.models.lanes import settled
from ray_slo.models.memory import Meter
from ray_slo.models.sweep import Sweep

if TYPE_CHECKING:
    from ray_slo.models.preemption_profile import PreemptionProfile


def profile_callable(
    fn: Callable[[list[Any]], Any],
    example: Any,
    sizes: Iterable[int] = (1, 2, 4, 8, 16, 32),
    *,
    budget_s: float = 3.0,
    bound_s: float | None = None,
    repeats: int = 50,
    clock: Callable[[], float] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> dict[int, list[float]]:
    """Measure the duration of `fn([example] * b)` for batch sizes b, several times each.

    `sweep.Sweep` gives the order: first large sizes, then those in between, then rounds over all.

    Args:
        fn: the batch method. It takes a list of items. An `async` method runs to its end on an
            event loop of its own.
        example: one representative item.
        sizes: batch sizes to measure.
        budget_s, bound_s, repeats: see `sweep.Sweep`. A running call is never interrupted.
        clock: function that returns monotonic time in seconds. Default: `time.perf_counter`.
        progress: called with (batch size, seconds) after every call.

    Returns:
        The measured durations in seconds, by batch size, in ascending order of the sizes.

    Raises:
        ValueError: there is no size, or a size below 1.
        Exception: the error that `fn` raised.
    """
    sweep = Sweep(sizes, budget_s=budget_s, bound_s=bound_s, repeats=repeats)
    clock = clock or time.perf_counter
    with _runner(fn) as run:
        while (size := sweep.size) is not None:
            items = [example] * size
            start = clock()
            run(items)
            seconds = clock() - start
            if progress:
                progress(size, seconds)
            sweep.took(seconds)
    return sweep.samples


@contextmanager
def _runner(fn: Callable[[list[Any]], Any]) -> Iterator[Callable[[list[Any]], Any]]:
    """Return a context manager of a function that runs `fn` to its end, also if it is async. The
    garbage collector is off inside."""
    call = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    collects = gc.isenabled()
    gc.disable()
    try:
        if inspect.iscoroutinefunction(call):
            loop = asyncio.new_event_loop()
            try:
                yield lambda items: loop.run_until_complete(fn(items))
            finally:
                loop.close()
        else:
            yield settled(fn)
    finally:
        if collects:
            gc.enable()


def to_profile(
    samples: Mapping[int, list[float]], *, quantile: float = 0.95, max_batch_size: int | None = None
) -> LatencyProfile:
    """Return a latency profile from durations in seconds, by batch size. It has the `quantile` of
    each size, and interpolates between sizes.

    Raises:
        ValueError: the quantile is not between 0 and 1.
    """
    if not 0 < quantile < 1:
        raise ValueError(f"quantile must lie between 0 and 1, got {quantile}")
    points = {size: float(np.quantile(values, quantile)) for size, values in samples.items()}
    return LatencyProfile.from_points(points, max_batch_size)


@dataclass(frozen=True)
class Target:
    """A deployment class to measure.

    Attributes:
        name: "module:Class". "module:attr" may also name the result of `@ray_slo.deployment`.
        kwargs, args: arguments of the class's constructor.
        variant: the `ray_slo.Variant` whose network the batch method gets, if it takes one.
        environment: additional environment variables of the measuring process.
    """

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    variant: Any = None
    environment: Mapping[str, str] = field(default_factory=dict)


class ProfilingError(ValueError):
    """The measured class failed. The message contains its error."""


def profile_class(
    target: Target,
    *,
    max_batch_size: int = 32,
    budget_s: float = 10.0,
    bound_s: float | None = None,
    threads: int = 1,
    example: Any = None,
    progress: Callable[[float], None] | None = None,
    about: Callable[[dict[str, Any]], None] | None = None,
) -> dict[int, list[float]]:
    """Measure a class's `__call__` with `profile_callable`, in a new process with `threads` CPU
    threads.

    Args:
        example: one item as a client sends it. The class's `preprocess` is applied, if it has one.
            Default: the class's `example_input()`.
        progress: called with the used share of the budget, 0 … 1, about 10 times per second.
        about: called with further facts for the profile: the memory that loading the variant took
            (`memory_mb`, MB), its sort (`memory_of`: "host" or "gpu"), and how the network runs
            (`runs`, if known).

    Raises:
        ProfilingError: the class cannot be imported, or has no example, or raised an error; or the
            process died.
    """
    options = {"max_batch_size": max_batch_size, "budget_s": budget_s, "bound_s": bound_s}
    samples: dict[int, list[float]] = _in_fresh_process(
        _sweep, target, threads, example, options, progress, about
    )
    return samples


def profile_class_preemption(
    target: Target,
    *,
    batch_sizes: Iterable[int] = (1, 8),
    candidates: Iterable[int] | None = None,
    budget_s: float = 30.0,
    threads: int = 1,
    example: Any = None,
    progress: Callable[[float], None] | None = None,
) -> PreemptionProfile:
    """Measure the exit points of a class's network with `profile_preemption`. This runs in a new
    process, as in `profile_class`.

    The network is the object that the variant's loader returned, or the instance of the class. If
    this is no torch module, its only attribute that is one is taken.

    Args:
        candidates: numbers of exit points. Default: 0, 1, 2, 4, … 64.

    Raises:
        ProfilingError: as in `profile_class`; or there is no such network, or it cannot stop
            inside.
    """
    from ray_slo.models.preemption_profile import CANDIDATES

    options = {
        "batch_sizes": tuple(batch_sizes),
        "candidates": CANDIDATES if candidates is None else tuple(candidates),
        "budget_s": budget_s,
    }
    measured: PreemptionProfile = _in_fresh_process(
        _stop, target, threads, example, options, progress
    )
    return measured


def _in_fresh_process(
    work: Callable[..., Any],
    target: Target,
    threads: int,
    example: Any,
    options: dict[str, Any],
    progress: Callable[[float], None] | None,
    about: Callable[[dict[str, Any]], None] | None = None,
) -> Any:
    """Return the result of `work(batch, network, item, options, progress)`, which runs in a new
    process. It gets the batch method, the network that this uses, and an item to measure with."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with _environment({**target.environment, **dict.fromkeys(THREAD_VARIABLES, str(threads))}):
        process = context.Process(
            target=_measure, args=(sender, work, target, threads, example, options), daemon=True
        )
        try:
            process.start()
        except (AttributeError, PicklingError, TypeError) as error:
            raise ProfilingError(
                f"{target.name}: its variant cannot be sent to the measuring process; name its "
                f'load as "module:attr" ({error})'
            ) from None
    sender.close()
    try:
        while True:
            kind, value = receiver.recv()
            if kind == "progress":
                if progress:
                    progress(value)
            elif kind == "about":
                if about:
                    about(value)
            elif kind == "error":
                raise ProfilingError(f"{target.name}: {value}")
            else:
                return value
    except EOFError:
        process.join()
        raise ProfilingError(
            f"{target.name}: the measuring process died (exit code {process.exitcode}); "
            "perhaps it ran out of memory"
        ) from None
    finally:
        if process.is_alive():
            process.join(5)
        if process.is_alive():
            process.terminate()
        receiver.close()


def _measure(
    pipe: Connection,
    work: Callable[..., Any],
    target: Target,
    threads: int,
    example: Any,
    options: dict[str, Any],
) -> None:
    """Build the class, measure it, and send the result through the pipe. This runs in the new
    process."""
    try:
        if "" not in sys.path:
            sys.path.insert(0, "")  # like `python -m`: deployments may be in the working folder
        cls = import_attr(target.name)
        cls = getattr(cls, "user_class", cls)
        meter = Meter()
        with meter.loading("it"):
            batch = network = _made(cls, target.args, target.kwargs)
            if (variant := target.variant) is not None:
                network = _made(variant.loader(), variant.args, variant.kwargs)
                batch = partial(batch, network)
        pipe.send(("about", _about(network, meter)))
        _limit_torch(threads)
        if example is not None:
            item = cls.preprocess(example) if hasattr(cls, "preprocess") else example
        elif hasattr(cls, "example_input"):
            item = cls.example_input(*(1,) * hasattr(cls, "size"))
        else:
            raise ValueError(
                "the class has no static method example_input(); add one that returns a "
                "representative item, or pass an input"
            )
        last = time.perf_counter()

        def progress(share: float) -> None:
            nonlocal last
            if time.perf_counter() - last > 0.1:
                last = time.perf_counter()
                pipe.send(("progress", share))

        pipe.send(("result", work(batch, network, item, options, progress)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def making(
    factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any | Coroutine[Any, Any, Any]:
    """Return what a class or a loader makes; if it is async, a coroutine that returns it. Serve
    awaits an `async def __init__`, which Python does not."""
    if not (inspect.isclass(factory) and inspect.iscoroutinefunction(factory.__init__)):
        return factory(*args, **kwargs)
    instance = factory.__new__(factory, *args, **kwargs)

    async def make() -> Any:
        await factory.__init__(instance, *args, **kwargs)  # type: ignore[misc]
        return instance

    return make()


def _made(factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    made = making(factory, args, kwargs)
    return asyncio.run(made) if inspect.iscoroutine(made) else made


def _about(network: Any, meter: Meter) -> dict[str, Any]:
    """Return further facts for the profile. The meter knows the variant by the name "it"."""
    found: dict[str, Any] = {"memory_of": meter.device}
    if meter.device == "gpu" and (torch := sys.modules.get("torch")):
        found["gpu"] = torch.cuda.get_device_name()
    if (footprint := meter.variants.get("it")) is not None:
        found["memory_mb"] = round(footprint.load_mb, 1)
    if runs := getattr(network, "runs", ""):
        found["runs"] = str(runs)
    return found


def _sweep(
    batch: Callable[[list[Any]], Any],
    _network: Any,
    item: Any,
    options: dict[str, Any],
    progress: Callable[[float], None],
) -> dict[int, list[float]]:
    budget_s = options["budget_s"]
    start = time.perf_counter()
    return profile_callable(
        batch,
        item,
        doubling_sizes(options["max_batch_size"]),
        budget_s=budget_s,
        bound_s=options["bound_s"],
        repeats=1000,
        progress=lambda *_: progress(min((time.perf_counter() - start) / budget_s, 1.0)),
    )


def _stop(
    batch: Callable[[list[Any]], Any],
    network: Any,
    item: Any,
    options: dict[str, Any],
    progress: Callable[[float], None],
) -> PreemptionProfile:
    from ray_slo.models.exit_points import module_of
    from ray_slo.models.preemption_profile import profile_preemption

    def items(size: int) -> list[Any]:
        return [item] * size

    with _runner(batch) as run:
        return profile_preemption(module_of(network), items, run=run, progress=progress, **options)


def _limit_torch(threads: int) -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Return a context manager in which started processes have these environment variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def metadata(*, quantile: float, threads: int) -> dict[str, Any]:
    """Return facts about the measurement for a profile file: software, hardware, settings."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for package in ("torch", "ray"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {_cpu_name()}",
        "quantile": quantile,
        "threads": threads,
        "versions": versions,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"
