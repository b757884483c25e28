"""The two work queues of a worker's device (a *lane*): one for computations, one for copies.

On a GPU, each queue is a CUDA stream, and a process has one pair of them. So the next batch is
copied while another one computes. On a CPU, the calling thread does both, one after the other. The
tests check the GPU lane's order of calls on a simulated device.

Importing this module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


class Lane(Protocol):
    """The device functions that a `Runner` needs."""

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context manager that puts the work inside into the queue for computations."""

    def copying(self) -> AbstractContextManager[Any]:
        """Return a context manager that puts the work inside into the queue for copies."""

    def put(self, data: Any) -> torch.Tensor:
        """Copy a tensor or NumPy array from the host to the device. The call may return before the
        copy is complete."""

    def mark(self) -> Any:
        """Return a mark at the present end of the current queue."""

    def wait(self, mark: Any) -> None:
        """Let later work in the current queue start only when the work before `mark` is done."""

    def finish(self) -> None:
        """Wait until all computations are done."""

    def pool(self) -> Any:
        """Return a memory pool that recordings share. They must not run at the same time."""

    def record(self, run: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        """Record the work of `run`. Return a function that runs it again on the same memory and
        returns its result."""


class CpuLane:
    """Lane of a CPU: all work runs immediately in the calling thread."""

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    copying = computing

    def put(self, data: Any) -> torch.Tensor:
        import torch

        # Copy the data: arrays from Ray are read-only, and torch warns about these.
        return torch.tensor(data) if isinstance(data, np.ndarray) else data

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        pass

    finish = pool = mark

    def record(self, run: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        return run


class CudaLane:
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
    return CudaLane(device) if device.type == "cuda" else CpuLane()


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
