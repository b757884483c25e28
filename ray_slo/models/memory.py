"""Memory of this process and of its GPU: the size, and the use of each variant.

A `Meter` measures differences: the memory that loading a variant added, and the additional memory
of its largest batch so far. It does not see memory that was freed and is used again, so its figures
are lower bounds. This module does not import torch, and does not start to use a GPU. It reads the
memory of a GPU only after the user's code has used the GPU.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MB = 2**20
_STATUS = Path("/proc/self/status")
_OUT_OF_MEMORY = frozenset({"OutOfMemoryError", "ResourceExhaustedError"})
# Parts of messages of libraries that have no exception class for this error.
_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate memory",
    "resource_exhausted",
    "alloc_failed",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, means that there was not enough memory. Such
    errors are Python's `MemoryError`, torch's `OutOfMemoryError`, and errors of other libraries
    whose message says so."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError):
            return True
        if any(cls.__name__ in _OUT_OF_MEMORY for cls in type(error).__mro__):
            return True
        # Read the message only of classes that libraries raise. The message of a user's own error
        # may quote a client's text.
        if isinstance(error, RuntimeError) or "Runtime" in type(error).__name__:
            with suppress(Exception):
                said = str(error).lower()
                if any(words in said for words in _WORDS):
                    return True
        error = error.__cause__ or error.__context__
    return False


def let_go(error: BaseException | None = None) -> None:
    """Free objects to which only reference cycles or the frames of `error` refer, and return their
    memory to the system."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    release()


def release() -> None:
    """Return free memory to the system, and to other users of the GPU."""
    if (cuda := _torch_cuda()) is not None:
        cuda.empty_cache()
    if (trim := trimmer()) is not None:
        trim()


def resident_mb() -> float:
    """Return the resident memory of this process, in MB, or NaN if the system does not report
    it."""
    return _status_mb("VmRSS")


def trimmer() -> Callable[[], object] | None:
    """Return the C library's function that returns free memory to the system, or None."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return lambda: trim(0)


def _status_mb(name: str) -> float:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
    except (OSError, ValueError, IndexError):
        pass
    return math.nan


class Host:
    """Resident memory of this process. Figures are in MB, and None while they are unknown. The peak
    is the largest memory since `begin_peak`.

    Args:
        limit_mb: memory that the process may use, in MB. None: the limit of its control group, or
            the memory of the machine.
    """

    def __init__(self, limit_mb: float | None = None) -> None:
        self._limit_mb = limit_mb

    @property
    def used_mb(self) -> float | None:
        return _known(resident_mb())

    @property
    def peak_mb(self) -> float | None:
        return _known(_status_mb("VmHWM"))

    @property
    def total_mb(self) -> float | None:
        return _machine_mb() if self._limit_mb is None else self._limit_mb

    def begin_peak(self) -> None:
        with suppress(OSError):  # without it, the peak is that of the whole life of the process
            Path("/proc/self/clear_refs").write_text("5")


class Gpu:
    """Memory of the GPU that the user's code uses. It is read through torch if that is loaded,
    otherwise through NVML if `pynvml` is installed (which knows no peaks).

    Args:
        share: the worker's share of the GPU.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share

    @property
    def used_mb(self) -> float | None:
        if (cuda := _torch_cuda()) is not None:
            return _sum_mb(cuda, cuda.memory_allocated)
        return _nvml_mb()[0]

    @property
    def peak_mb(self) -> float | None:
        if (cuda := _torch_cuda()) is not None:
            return _sum_mb(cuda, cuda.max_memory_allocated)
        return _nvml_mb()[0]

    @property
    def total_mb(self) -> float | None:
        if (cuda := _torch_cuda()) is None:
            total_mb = _nvml_mb()[1]
            return None if total_mb is None else total_mb * self._share
        if self._share < 1:  # other processes use the rest
            return self._share * _sum_mb(cuda, lambda i: cuda.get_device_properties(i).total_memory)
        # Memory of other processes, and of CUDA itself, is not available.
        return _sum_mb(cuda, lambda i: cuda.mem_get_info(i)[0] + cuda.memory_reserved(i))

    def begin_peak(self) -> None:
        if (cuda := _torch_cuda()) is not None:
            for i in range(cuda.device_count()):
                cuda.reset_peak_memory_stats(i)


def _torch_cuda() -> Any:
    """Return `torch.cuda` if it is in use, otherwise None. An earlier query would start to use it,
    which takes GPU memory."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _sum_mb(cuda: Any, of: Callable[[int], float]) -> float:
    return sum(of(i) for i in range(cuda.device_count())) / _MB


def _nvml_mb() -> tuple[float | None, float | None]:
    """Return the memory that this process uses on the GPUs, and their total memory, in MB."""
    if "CUDA_VISIBLE_DEVICES" in os.environ and not os.environ["CUDA_VISIBLE_DEVICES"]:
        return None, None
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
        used, total = 0, 0
        for i in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(i)
            of_process = [
                process.usedGpuMemory or 0
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
                if process.pid == os.getpid()
            ]
            if of_process:
                used += sum(of_process)
                total += pynvml.nvmlDeviceGetMemoryInfo(gpu).total
    except Exception:  # not installed, no driver, or a container that hides processes
        return None, None
    return (used / _MB, total / _MB) if total else (None, None)


def _machine_mb() -> float | None:
    """Return the smaller of two sizes, in MB: the limit of the control group, and the memory of the
    machine."""
    found = []
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # the file says "max" if there is no limit
            found.append(int(Path(file).read_text()))
    with suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found) / _MB if found else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a variant.

    Attributes:
        load_mb: memory that loading the variant added, in MB: its weights and all else.
        batch_mb: additional memory while its largest batch so far runs, in MB. 0 before the first
            measurement.
        batch_size: size of that batch. 0 before the first measurement.
    """

    load_mb: float
    batch_mb: float = 0.0
    batch_size: int = 0

    @property
    def mb(self) -> float:
        """Memory at the largest batch so far, in MB."""
        return self.load_mb + self.batch_mb


@dataclass
class _Of:
    """The measurements of one device.

    Attributes:
        base_mb: memory that this process uses besides its variants, in MB.
    """

    device: Host | Gpu
    found: dict[str, Footprint] = field(default_factory=dict)
    base_mb: float = 0.0


class Meter:
    """Attributes memory to the variants of one process.

    Args:
        host: memory of the process.
        gpu: memory of its GPU. If a variant uses it, it is the memory that variants share. If none
            does, they share the memory of the process.
        limit_mb: memory for all variants, in MB, if it is less than all memory.
        release: function that returns free memory to the system.
    """

    def __init__(
        self,
        host: Host | Gpu | None = None,
        gpu: Host | Gpu | None = None,
        limit_mb: float | None = None,
        release: Callable[[], object] = release,
    ) -> None:
        self._host, self._gpu = _Of(host or Host()), _Of(gpu or Gpu())
        self._limit_mb = limit_mb
        self._release = release
        self._loading = 0

    @contextmanager
    def loading(self, variant: str) -> Iterator[None]:
        """Return a context manager in which the variant is loaded. The memory that is added inside
        counts as the variant's."""
        self._release()
        before = [(of, of.device.used_mb) for of in self._devices]
        self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1
        self._release()
        for of, before_mb in before:
            after_mb = of.device.used_mb
            if after_mb is None:
                continue
            # Before the first use of a GPU, its use is unknown; it was 0.
            added_mb = max(after_mb - (before_mb or 0.0), 0.0)
            of.found[variant] = Footprint(added_mb)
            of.base_mb = max(after_mb - sum(f.load_mb for f in of.found.values()), 0.0)

    @contextmanager
    def running(self, variant: str, batch_size: int, *, check: bool = False) -> Iterator[None]:
        """Return a context manager in which a batch runs. Its memory is measured if it is the
        variant's largest batch so far. A batch that fails, or that runs while a variant is loaded,
        is not measured.

        Args:
            check: whether to raise MemoryError if all variants together now need too much memory.

        Raises:
            MemoryError: they do.
        """
        larger = [
            of
            for of in self._devices
            if variant in of.found and batch_size > of.found[variant].batch_size
        ]
        if not larger or self._is_loading():
            yield
            return
        before = [of.device.used_mb for of in larger]
        for of in larger:
            of.device.begin_peak()
        yield
        if self._is_loading():
            return
        for of, before_mb in zip(larger, before, strict=True):
            peak_mb, known = of.device.peak_mb, of.found.get(variant)
            if known is not None and before_mb is not None and peak_mb is not None:
                batch_mb = max(peak_mb - before_mb, known.batch_mb)
                if check and of is self._shared:
                    self._check_room(batch_mb, f"a batch of {batch_size} of {variant}")
                of.found[variant] = Footprint(known.load_mb, batch_mb, batch_size)

    def _is_loading(self) -> bool:
        return self._loading > 0

    def forget(self, variants: Iterable[str]) -> None:
        """Forget variants that were unloaded."""
        for variant in variants:
            for of in self._devices:
                of.found.pop(variant, None)

    @property
    def _devices(self) -> Sequence[_Of]:
        return self._host, self._gpu

    @property
    def _shared(self) -> _Of:
        on_gpu = any(f.mb > 0 for f in self._gpu.found.values())
        return self._gpu if on_gpu else self._host

    @property
    def device(self) -> str:
        """The memory that variants share: "host" or "gpu"."""
        return "gpu" if self._shared is self._gpu else "host"

    @property
    def variants(self) -> Mapping[str, Footprint]:
        """Footprints of loaded variants in the memory that they share."""
        return dict(self._shared.found)

    @property
    def room_mb(self) -> float | None:
        """Memory for all variants together, in MB. None if it is unknown."""
        shared = self._shared
        if (total_mb := shared.device.total_mb) is None:
            return self._limit_mb
        room_mb = max(total_mb - shared.base_mb, 0.0)
        return room_mb if self._limit_mb is None else min(room_mb, self._limit_mb)

    def check_fits(self, variant: str) -> None:
        """Check that the loaded variants, with this one, fit into the memory.

        Raises:
            MemoryError: they do not fit.
        """
        self._check_room(0.0, variant)

    def _check_room(self, more_mb: float, what: str) -> None:
        room_mb = self.room_mb
        taken_mb = sum(f.load_mb for f in self.variants.values()) + more_mb
        if room_mb is not None and taken_mb > room_mb:
            raise MemoryError(
                f"with {what}, the variants of this worker take {taken_mb:.0f} MB; there is room "
                f"for {room_mb:.0f} MB"
            )
