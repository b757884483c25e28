"""The two work queues of a worker's device (a *lane*): one for computations, one for copies.

On a GPU, each queue is a CUDA stream, and a process has one pair of them. So the next batch is
copied while another one computes. On a CPU, the calling thread does both, one after the other. The
tests check the GPU lane's order of calls on a simulated device.

Importing this module does not import torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


class Lane:
    """The device functions that a `Runner` needs. This is the lane of a CPU: all work runs
    immediately in the calling thread."""

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context manager that puts the work inside into the queue for computations."""
        return nullcontext()

    def copying(self) -> AbstractContextManager[Any]:
        """Return a context manager that puts the work inside into the queue for copies."""
        return nullcontext()

    def put(self, data: Any) -> torch.Tensor:
        """Copy a tensor or NumPy array from the host to the device. The call may return before the
        copy is complete."""
        import torch

        # Copy the data: arrays from Ray are read-only, and torch warns about these.
        return torch.tensor(data) if isinstance(data, np.ndarray) else data

    def rounding(self, *, to_tf32: bool) -> AbstractContextManager[Any]:
        """Return a context manager in which convolutions and matrix products of float32 round their
        inputs to TF32, or do not."""
        return nullcontext()  # a CPU has no TF32

    def mark(self) -> Any:
        """Return a mark at the present end of the current queue."""
        return None

    def wait(self, mark: Any) -> None:
        """Let later work in the current queue start only when the work before `mark` is done."""

    def finish(self) -> None:
        """Wait until all computations are done."""

    def pool(self) -> Any:
        """Return a memory pool that recordings share. They must not run at the same time."""
        return None

    def record(self, run: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        """Record the work of `run`. Return a function that runs it again on the same memory and
        returns its result."""
        return run


class Tf32:
    """torch's switch of TF32, which is one for all threads and all GPUs of a process.

    Threads that need the same setting run at the same time. A thread that needs the other setting
    waits for them. After the last one, the switch is as it was before.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._is_on = False
        self._before: tuple[Any, ...] = ()

    @contextmanager
    def set_to(self, on: bool) -> Iterator[None]:
        """Return a context manager in which TF32 is on or off. Do not nest it in a thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._users or self._is_on == on)
            if not self._users:
                self._before = _tf32_settings()
                _set_tf32(on, on)
                self._is_on = on
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    _set_tf32(*self._before)
                    self._changed.notify_all()


_TF32 = Tf32()


def _tf32_settings() -> tuple[Any, ...]:
    """Return torch's settings for matrix products and convolutions, which `_set_tf32` takes."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        return matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError:  # the user has set them by torch's newer names; they cannot be mixed
        return matmul.fp32_precision, cudnn.conv.fp32_precision


def _set_tf32(matmul: bool | str, convolutions: bool | str) -> None:
    import torch

    backends = torch.backends
    if isinstance(matmul, str):
        backends.cuda.matmul.fp32_precision = matmul
        backends.cudnn.conv.fp32_precision = convolutions
    else:  # by the older names, because torch's compiler reads these, too
        backends.cuda.matmul.allow_tf32 = matmul
        backends.cudnn.allow_tf32 = convolutions


class CudaLane(Lane):
    """Lane of a GPU: two CUDA streams."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._computing = torch.cuda.Stream(device)
        self._copying = torch.cuda.Stream(device)

    def computing(self) -> AbstractContextManager[Any]:
        import torch

        within: AbstractContextManager[Any] = torch.cuda.stream(self._computing)
        return within

    def copying(self) -> AbstractContextManager[Any]:
        import torch

        within: AbstractContextManager[Any] = torch.cuda.stream(self._copying)
        return within

    def put(self, data: Any) -> torch.Tensor:
        import torch

        # Only copies from pinned memory run while the host continues. torch keeps freed pinned
        # memory in a pool, and does not reuse it before its copy is complete.
        if isinstance(data, np.ndarray):
            pinned = torch.from_numpy(np.empty(0, data.dtype)).new_empty(
                data.shape, pin_memory=True
            )
            np.copyto(pinned.numpy(), data)
        else:
            pinned = data.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def rounding(self, *, to_tf32: bool) -> AbstractContextManager[Any]:
        return _TF32.set_to(to_tf32)

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Any) -> None:
        import torch

        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        self._computing.synchronize()  # releases the GIL

    def pool(self) -> Any:
        import torch

        return torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        import torch

        graph = torch.cuda.CUDAGraph()
        # torch records on a separate stream, so batches of other threads are not recorded. In the
        # mode "thread_local", their CUDA calls do not abort the recording either.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()

        def play() -> Any:
            graph.replay()
            return result

        return play


@cache
def lane_of(device: torch.device) -> Lane:
    """Return the lane of a device. There is one per device and process."""
    return CudaLane(device) if device.type == "cuda" else Lane()


def settled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` with a wait at its end until the GPU has done the work. So the duration of a
    call contains the GPU's work. Without a GPU, return `method` itself."""

    def run(*args: Any) -> Any:
        results = method(*args)
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            cuda.current_stream().synchronize()
        return results

    return run
