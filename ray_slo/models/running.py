"""Runs a network in batches such that a GPU is used well.

    runner = Runner(network, device, How(precision="bfloat16", engine="graph"))
    staged = runner.stage(lambda lane: lane.put(pictures))   # may happen while another batch runs
    scores = runner(staged)                                  # a tensor on the device, complete

A batch is *staged* first: it is copied to the device from pinned memory, on a separate stream,
without waiting. The worker stages the next batch while one computes. A call returns when the device
is done, so its duration contains the whole work.

`ways` finds the fastest way to run a network. `lanes` contains the differences between CPU and GPU.
A CPU has one queue, and repeats the recorded work in the same buffers instead of a CUDA graph.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from ray_slo.models.checkpoint import flags_in_force
from ray_slo.models.lanes import Lane, lane_of
from ray_slo.models.loading import one_of

if TYPE_CHECKING:
    import torch

Tensors = Any
"""A tensor, or a mapping of names to tensors, each with one row per item; or a list with one tensor
per item. Lists cannot be recorded or compiled, because their tensors may differ in shape."""

SIZES = (1, 2, 4, 8, 16)
"""Batch sizes that are recorded or compiled. Up to 16 items, a few more rows cost a GPU less than
the host's time to start the work. Larger batches run without a recording."""
# Calls before a recording. In these, libraries choose their kernels, and memory is allocated.
_WARM = 3


@dataclass(frozen=True)
class How:
    """The way in which a network is run.

    Attributes:
        precision: precision of convolutions and matrix products. The weights do not change.
            "bfloat16" and "float16" use autocast. With "tf32", a GPU rounds the factors to TF32,
            which has the range of float32 and a mantissa of 10 bits. With "float32" it does not,
            also in convolutions, where torch would. On a CPU, both are the same.
        channels_last: whether pictures and the weights of convolutions have the memory layout
            "channels last".
        engine: "eager" runs the network as it is. "graph" records a CUDA graph for each batch size
            in `SIZES`; on a CPU it uses the same buffers without a graph. "compile" uses
            `torch.compile` for each batch size in `SIZES`, which takes minutes at load.

    Raises:
        ValueError: a field has another value. The message names the valid ones.
    """

    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    channels_last: bool = False
    engine: Literal["eager", "graph", "compile"] = "eager"

    def __post_init__(self) -> None:
        hints = get_type_hints(How)
        for name in ("precision", "engine"):
            if getattr(self, name) not in (valid := get_args(hints[name])):
                raise one_of(f"how.{name}", getattr(self, name), list(valid))
        if not isinstance(self.channels_last, bool):
            raise one_of("how.channels_last", self.channels_last, ["true", "false"])

    def __str__(self) -> str:
        return f"{self.precision}, {'channels last, ' * self.channels_last}{self.engine}"


def parse_how(how: object) -> How | Literal["auto", "measure"]:
    """Read a loader's argument `how`.

    * "auto": as "measure" on a GPU; the loader's plain way on a CPU.
    * "measure": several ways are timed, and the fastest is used.
    * A mapping of fields of `How`. Missing fields have their defaults.

    Raises:
        ValueError: the argument is none of these. The message names the valid ones.
    """
    if how == "auto":
        return "auto"
    if how == "measure":
        return "measure"
    if isinstance(how, How):
        return how
    if not isinstance(how, Mapping):
        raise one_of("how", how, ["'auto'", "'measure'", "a mapping"])
    known = [field.name for field in fields(How)]
    for name in how:
        if name not in known:
            raise one_of("how", name, known)
    return How(**how)


@dataclass(frozen=True)
class Staged:
    """A batch that is on the device, or is being copied there.

    Attributes:
        inputs: inputs of the network. They are kept until the batch has run, so that their memory
            is not reused.
        ready: mark in the lane's queue of copies: the inputs have arrived.
    """

    inputs: Tensors
    ready: Any


class Runner:
    """Runs a network on a device.

    In a `preemption_scope`, batches run eagerly with any engine, because a graph is one piece and
    cannot stop inside.

    Args:
        network: a torch module in evaluation mode, or any function of the inputs. It is moved to
            the device.
        how: see `How`.
        call: function `call(network, inputs)` that returns a tensor with one row per item, or
            another object if it is neither recorded nor compiled. Default: `network(inputs)`.
    """

    def __init__(
        self,
        network: Any,
        device: torch.device,
        how: How = How(),
        call: Callable[[Any, Tensors], torch.Tensor] = lambda network, inputs: network(inputs),
    ) -> None:
        import torch

        self.device = device
        self.how = how
        self.lane: Lane = lane_of(device)
        self._call = call
        self._recorded: dict[tuple[Any, ...], dict[int, _Recorded]] = {}
        # Each network has its own pool, because another thread may run or time another network.
        self._pool = self.lane.pool() if how.engine == "graph" else None
        if isinstance(network, torch.nn.Module):
            layout = torch.channels_last if how.channels_last else torch.contiguous_format
            network = network.to(device, memory_format=layout)
        self.network = network
        self._compiled = network
        if how.engine == "compile":
            self._compiled = torch.compile(network, dynamic=False)

    def stage(self, make: Callable[[Lane], Tensors]) -> Staged:
        """Queue the copy of a batch to the device. Any thread may call this while a batch runs.

        Args:
            make: function of the lane that returns the inputs. It copies data with `lane.put`. Its
                computations on the device also run beside the running batch.
        """
        import torch

        with torch.inference_mode(), self.lane.copying():
            inputs = _mapped(self._laid_out, make(self.lane))
            return Staged(inputs, self.lane.mark())

    def __call__(
        self, staged: Staged, then: Callable[[torch.Tensor], Any] = lambda output: output
    ) -> Any:
        """Run a batch. Return when the device is done.

        Args:
            then: function of the output (a tensor is in float32), which runs on the device.

        Raises:
            Preempted: the batch was stopped.
        """
        import torch

        with torch.inference_mode(), self.lane.computing():
            self.lane.wait(staged.ready)
            output = self._output(staged.inputs)
            result = then(output.float() if isinstance(output, torch.Tensor) else output)
        self.lane.finish()
        return result

    def prepare(self, stage: Callable[[int], Staged], sizes: Sequence[int] = SIZES) -> None:
        """Compile or record the network for these batch sizes. With the engine `eager`, do nothing.

        Args:
            stage: function that stages a batch of a given number of items.
        """
        import torch

        if self.how.engine == "eager":
            return
        for size in sorted(sizes, reverse=True):  # smaller sizes reuse the memory of the largest
            staged = stage(size)
            with torch.inference_mode(), self.lane.computing():
                self.lane.wait(staged.ready)
                self._record(staged.inputs)
            self.lane.finish()

    def _record(self, buffers: Tensors) -> None:
        def run() -> torch.Tensor:
            with self._precision():
                return self._call(self._compiled, buffers)

        for _ in range(_WARM):
            run()
        self.lane.finish()
        play = self.lane.record(run, self._pool) if self.how.engine == "graph" else run
        of_shape = self._recorded.setdefault(_shape(buffers), {})
        of_shape[_size(buffers)] = _Recorded(buffers, play)

    def _output(self, inputs: Tensors) -> torch.Tensor:
        if self._recorded and not flags_in_force.get():
            of_shape, needed = self._recorded.get(_shape(inputs), {}), _size(inputs)
            if fits := [size for size in of_shape if size >= needed]:
                return of_shape[min(fits)](inputs)
        with self._precision():
            return self._call(self.network, inputs)

    def _precision(self) -> AbstractContextManager[Any]:
        import torch

        if self.how.precision in ("float32", "tf32"):
            return self.lane.rounding(to_tf32=self.how.precision == "tf32")
        dtype = getattr(torch, self.how.precision)
        # Autocast frees its cached copies of weights, but a graph continues to use their memory.
        cast: AbstractContextManager[Any] = torch.autocast(
            self.device.type, dtype=dtype, cache_enabled=False
        )
        return cast

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        if not self.how.channels_last or tensor.dim() != 4:
            return tensor
        return tensor.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class _Recorded:
    """Recorded work on the buffers of one batch size. A smaller batch leaves old rows at the end of
    the buffers; they are not returned."""

    buffers: Tensors
    play: Callable[[], torch.Tensor]

    def __call__(self, inputs: Tensors) -> torch.Tensor:
        for buffer, given in zip(_leaves(self.buffers), _leaves(inputs), strict=True):
            buffer[: len(given)].copy_(given)
        # Copy the result, because the next batch runs in the same memory.
        return self.play()[: _size(inputs)].clone()


class OnRunner:
    """Base of classes that run a network through a `Runner`.

    Attributes:
        runner: runs the network.
    """

    runner: Runner

    @property
    def network(self) -> Any:
        return self.runner.network

    @property
    def stages_ahead(self) -> bool:
        """Whether staging a batch while another one runs saves time. It does on a GPU, which copies
        and prepares the next batch meanwhile. On a CPU it would slow down the running batch."""
        return bool(self.runner.device.type == "cuda")


def _leaves(inputs: Tensors) -> list[torch.Tensor]:
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]


def _mapped(change: Callable[[Any], Any], inputs: Tensors) -> Tensors:
    if isinstance(inputs, Mapping):
        return {name: change(tensor) for name, tensor in inputs.items()}
    if isinstance(inputs, list):
        return [change(tensor) for tensor in inputs]
    return change(inputs)


def _size(inputs: Tensors) -> int:
    return len(_leaves(inputs)[0])


def _shape(inputs: Tensors) -> tuple[Any, ...]:
    """Return the shape and type of an item. There is one recording for each."""
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in _leaves(inputs))
