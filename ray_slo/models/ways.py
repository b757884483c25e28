"""Choice of the fastest way to run a network: `fit`, which uses `choose`.

When a network is loaded, the ways to run it are timed. The fastest one whose outputs are close to
those of float32 is used. Importing this module does not import torch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ray_slo.models.memory import let_go
from ray_slo.models.running import How, Runner, Staged, Tensors, parse_how

if TYPE_CHECKING:
    import torch

TOLERANCE = 0.02
"""Largest allowed difference from the output of float32, as a share of the largest output."""
_LEAST, _MOST = 3, 50  # smallest and largest number of timed calls


@dataclass(frozen=True)
class Tried:
    """A measured way to run a network.

    Attributes:
        how: the way.
        seconds: median time of a batch, by batch size. Empty if the way failed.
        off: largest difference from the output of float32, as a share of the largest output.
        failed: reason why the way cannot be used. None if it can.
    """

    how: How
    seconds: Mapping[int, float]
    off: float = 0.0
    failed: str | None = None

    @property
    def cost(self) -> float:
        """Geometric mean of the times over the batch sizes, in seconds."""
        if not self.seconds:
            return math.inf
        return statistics.geometric_mean(self.seconds.values())


@dataclass(frozen=True)
class Choice:
    """The fastest way whose outputs are close to those of float32, and all ways that were tried."""

    runner: Runner
    tried: tuple[Tried, ...]

    def __str__(self) -> str:
        """The chosen way and its times in words, for a profile."""
        first = self.tried[0]
        best = next(tried for tried in self.tried if tried.how == self.runner.how)
        took = ", ".join(
            f"{1e3 * seconds:.3g} ms at batch size {size}" for size, seconds in best.seconds.items()
        )
        if best is first:
            return f"{best.how}: {took}; the best of {len(self.tried)} ways"
        against = ", ".join(f"{1e3 * seconds:.3g}" for seconds in first.seconds.values())
        return f"{best.how}: {took} ({first.how}: {against}); outputs off by {best.off:.2%} at most"


def choose(
    make: Callable[[How], Runner],
    stage: Callable[[Runner, int], Staged],
    ways: Mapping[str, Sequence[Any]],
    *,
    sizes: Sequence[int] = (1, 8),
    budget_s: float = 2.0,
    compared: Callable[[Runner, Staged], torch.Tensor] = lambda runner, staged: runner(staged),
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Time ways to run a network, and return the best. The fields of `How` are tried one after the
    other, and each keeps its best value.

    Args:
        make: function that returns a runner of the network for a way.
        stage: function that stages a batch of a given number of items on a runner.
        ways: values to try, by field of `How`. The first value of each list is the plain one.
        budget_s: approximate time for all measurements, in seconds. Recordings take more time.
        compared: function that runs a batch and returns the output to compare. Default: what the
            runner returns.
    """
    number = 1 + sum(len(values) - 1 for values in ways.values())
    best = How(**{name: values[0] for name, values in ways.items()})
    each_s = budget_s / number / len(sizes)
    runner = make(best)
    outputs = [compared(runner, stage(runner, size)) for size in sizes]
    tried = [Tried(best, {size: _timed(runner, stage, size, each_s, clock) for size in sizes})]
    for name, values in ways.items():
        for value in values[1:]:
            way = replace(best, **{name: value})
            tried.append(_tried(make, stage, way, compared, outputs, sizes, each_s, clock))
            if tried[-1].off <= TOLERANCE and tried[-1].cost < _of(tried, best).cost:
                best = way
    runner = make(best)
    runner.prepare(lambda size: stage(runner, size))
    return Choice(runner, tuple(tried))


def _of(tried: Sequence[Tried], how: How) -> Tried:
    return next(one for one in tried if one.how == how)


def _tried(
    make: Callable[[How], Runner],
    stage: Callable[[Runner, int], Staged],
    how: How,
    compared: Callable[[Runner, Staged], torch.Tensor],
    outputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    each_s: float,
    clock: Callable[[], float],
) -> Tried:
    try:
        runner = make(how)
        runner.prepare(lambda size: stage(runner, size), sizes)
        off = max(
            _difference(compared(runner, stage(runner, size)), output)
            for size, output in zip(sizes, outputs, strict=True)
        )
        seconds = {size: _timed(runner, stage, size, each_s, clock) for size in sizes}
    except Exception as error:  # the device does not support this way, or has too little memory
        said = f"{type(error).__name__}: {error}"
        let_go(error)
        return Tried(how, {}, failed=said)
    return Tried(how, seconds, off)


def _difference(output: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference between two outputs, as a share of the largest value in
    `right`. It is infinite if an output has a value that is not finite."""
    share = float((output - right).abs().max() / right.abs().max())
    return share if math.isfinite(share) else math.inf


def _timed(
    runner: Runner,
    stage: Callable[[Runner, int], Staged],
    size: int,
    budget_s: float,
    clock: Callable[[], float],
) -> float:
    staged = stage(runner, size)
    runner(staged)
    times: list[float] = []
    while len(times) < _LEAST or (sum(times) < budget_s and len(times) < _MOST):
        start = clock()
        runner(staged)
        times.append(clock() - start)
    return statistics.median(times)


def ways_of(network: Any, device: torch.device, *, fixed_shape: bool) -> dict[str, list[Any]]:
    """Return the ways to try on a device: values by field of `How`.

    Args:
        fixed_shape: whether all items have the same shape, so that batches can be recorded.
    """
    import torch

    on_gpu = device.type == "cuda"
    has_tf32 = on_gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    short = "bfloat16" if not on_gpu or torch.cuda.is_bf16_supported() else "float16"
    # First the precision: the layout matters most to the units for less than float32.
    ways: dict[str, list[Any]] = {"precision": ["float32", *["tf32"] * has_tf32, short]}
    if any(parameter.dim() == 4 for parameter in network.parameters()):
        ways["channels_last"] = [False, True]
    if fixed_shape and on_gpu:
        ways["engine"] = ["eager", "graph"]
    return ways


def fit(
    network: Any,
    device: torch.device,
    stage: Callable[[Runner, int], Staged],
    how: object,
    *,
    plain: How,
    fixed_shape: bool,
    call: Callable[[Any, Tensors], Any] | None = None,
    compared: Callable[[Any, Tensors], torch.Tensor] | None = None,
    sizes: Sequence[int] = (1, 8),
) -> tuple[Runner, str]:
    """Return a prepared runner for a loader's argument `how`, and its way in words.

    Args:
        how: see `parse_how`.
        plain: the way that is used without a measurement.
        fixed_shape: see `ways_of`.
        stage: see `choose`.
        call: see `Runner`.
        compared: function `compared(network, inputs)` that returns the tensor to compare, if that
            is not the network's output. It needs ways that are neither recorded nor compiled.
        sizes: batch sizes to measure.

    Raises:
        ValueError: `how` is not valid.
    """

    def make(way: How) -> Runner:
        return Runner(network, device, way) if call is None else Runner(network, device, way, call)

    def output(runner: Runner, staged: Staged) -> torch.Tensor:
        of = runner if compared is None else Runner(network, device, runner.how, compared)
        found: torch.Tensor = of(staged)
        return found

    asked = parse_how(how)
    if asked == "auto":
        asked = "measure" if device.type == "cuda" else plain
    if asked == "measure":
        ways = ways_of(network, device, fixed_shape=fixed_shape)
        choice = choose(make, stage, ways, sizes=sizes, compared=output)
        return choice.runner, str(choice)
    runner = make(asked)
    runner.prepare(lambda size: stage(runner, size))
    return runner, str(asked)
