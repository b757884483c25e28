"""The two work queues of a worker's device: one for computations, one for copies.

On a GPU, each queue is a CUDA stream, with one pair per process. So the next batch is copied while
one runs. On a CPU, both are the calling thread: the same code runs without overlap. The tests check
the order of calls of the GPU's lane on a pretended device.

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
        """Queue the work inside for computing."""

    def copying(self) -> AbstractContextManager[Any]:
        """Queue the work inside to run beside the computations."""

    def put(self, data: Any) -> torch.Tensor:
        """Copy a tensor or NumPy array of the host to the device. May return before it has
        arrived."""

    def mark(self) -> Any:
        """Mark the end of the work queued so far in the present queue."""

    def wait(self, mark: Any) -> None:
        """Let later work of the present queue wait for a mark."""

    def finish(self) -> None:
        """Wait until all computations are done."""

    def pool(self) -> Any:
        """Memory shared by recordings that never run at the same time."""

    def record(self, run: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        """Record work. Return a function that runs it again on the same memory and returns its
        result."""


class CpuLane:
    """A lane of a CPU: everything runs at once in the calling thread."""

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    copying = computing

    def put(self, data: Any) -> torch.Tensor:
        import torch

        # A copy: what Ray hands out is read-only, which torch warns of.
        return torch.tensor(data) if isinstance(data, np.ndarray) else data

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        pass

    finish = pool = mark

    def record(self, run: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        return run


class CudaLane:
    """Two streams of a GPU."""

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

        # Pinned memory: only from there does a copy not hold up the host. torch keeps what is freed
        # of it, and hands none out again before its copy is over.
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
        # On a stream of its own: another thread's batches must not get into the recording, nor what
        # they ask of CUDA meanwhile end it.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()

        def play() -> Any:
            graph.replay()
            return result

        return play


@cache
def lane_of(device: torch.device) -> Lane:
    """The lane of a device; one per process."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()


def settled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that waits until the GPU has done its work, so that its duration contains that work.
    Without a GPU, it is the method itself."""

    def run(*args: Any) -> Any:
        results = method(*args)
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            cuda.current_stream().synchronize()
        return results

    return run
