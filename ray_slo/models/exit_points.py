"""Places in a PyTorch module where a forward pass can stop, and a choice among them.

An exit point is at the entry of a submodule. `Tracer` measures the time of each entry. `spread`
chooses the entries that divide a pass most evenly. Importing this module does not import torch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.models.running import Runner

if TYPE_CHECKING:
    from torch import nn

PASSES = 4  # number of passes that are timed to place exit points; the first is a warm-up
_FINEST = 1 / 500  # smallest useful distance of two exit points, as a share of a pass


def module_of(model: Any) -> nn.Module:
    """Return the torch module of a deployment's instance: the instance itself, or its only
    attribute that is a torch module.

    Raises:
        ValueError: it has no such attribute, or several.
    """
    import torch

    if isinstance(model, torch.nn.Module):
        return model
    # If an attribute is a `Runner`, it stands for the runner's network.
    held = {k: v.network if isinstance(v, Runner) else v for k, v in vars(model).items()}
    found = {k: v for k, v in held.items() if isinstance(v, torch.nn.Module)}
    if len(found) == 1:
        return next(iter(found.values()))
    raise ValueError(
        f"{type(model).__name__} must have exactly one attribute that is a torch.nn.Module; "
        f"it has {', '.join(sorted(found)) or 'none'}"
    )


def cuda_device(module: nn.Module) -> Any:
    parameter = next(module.parameters(), None)
    if parameter is None:
        parameter = next(module.buffers(), None)
    return parameter.device if parameter is not None and parameter.is_cuda else None


@contextmanager
def inference() -> Iterator[None]:
    import torch

    with torch.inference_mode():
        yield


def refuse(module: Any) -> None:
    import torch

    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got a {type(module).__name__}")
    how = (
        "compiled by torch.compile"
        if _is_compiled(module) or _compiles_itself(module)
        else "scripted by torch.jit"
        if isinstance(module, torch.jit.ScriptModule)
        else None
    )
    if how:
        raise ValueError(
            f"module is {how}, so it runs as one piece and cannot stop inside; wrap the original "
            "module. Its blocks may be compiled: then the exit points are between them"
        )


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod")  # torch.compile(module) returns a wrapper with it


def _compiles_itself(module: nn.Module) -> bool:
    # module.compile() was called. A hook would become part of the compiled graph, so this module
    # and its submodules get no exit points.
    return getattr(module, "_compiled_call_impl", None) is not None


def is_hook_shy(module: nn.Module) -> bool:
    """Return whether the module behaves differently if it or a submodule has a hook: it then runs
    another implementation, which is slower and has slightly different outputs."""
    import torch

    return isinstance(module, torch.nn.TransformerEncoderLayer)


def sites(
    module: nn.Module, prefix: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that can have an exit point before them, with their names. A module
    comes before its submodules."""
    import torch

    seen = set() if seen is None else seen
    if is_hook_shy(module):
        return
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if id(child) in seen or _compiles_itself(child):
            continue
        if isinstance(child, torch.jit.ScriptModule):
            continue
        seen.add(id(child))
        yield path, child
        if not _is_compiled(child):
            yield from sites(child, f"{path}.", seen)


def before(module: nn.Module, check: Callable[[], None]) -> Callable[[], None]:
    """Call `check` before every forward pass of `module`. Return a function that undoes this."""
    if not is_hook_shy(module):

        def hook(_module: nn.Module, _args: Any) -> None:
            check()

        undo: Callable[[], None] = module.register_forward_pre_hook(hook).remove
        return undo

    forward = vars(module).get("forward")
    if not isinstance(forward, _CheckedForward):
        forward = module.forward = _CheckedForward(module)
    forward.checks.append(check)
    return lambda: forward.remove(check)


class _CheckedForward:
    """Replaces the `forward` of a module for which a hook would change the implementation."""

    def __init__(self, module: nn.Module) -> None:
        self.checks: list[Callable[[], None]] = []
        self._module = module
        self._shadowed = vars(module).get("forward")
        self._forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for check in self.checks:
            check()
        return self._forward(*args, **kwargs)

    def remove(self, check: Callable[[], None]) -> None:
        self.checks.remove(check)
        if not self.checks:
            del self._module.forward
            if self._shadowed is not None:
                self._module.forward = self._shadowed


# -- placing them ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of a submodule.

    Attributes:
        name: name of the submodule, with "#i/n" for call i of n in a pass.
        at: time of the call, as a share (0 … 1) of the time of a pass.
    """

    name: str
    at: float


class Tracer:
    """Measures the time at which every submodule is called, in every pass.

    Args:
        module: the module to trace.
        on_pass: called after each pass, with the number of complete passes.
        check: called before every call of a submodule.
    """

    def __init__(
        self, module: nn.Module, on_pass: Callable[[int], None], check: Callable[[], None]
    ) -> None:
        self._module = module
        self._on_pass = on_pass
        self._passes: list[list[tuple[str, float]]] = []
        self._marks: list[tuple[str, Any]] = []
        self._device: Any = None
        self._undo = [before(module, self._begin)]
        for name, submodule in sites(module):
            self._undo.append(before(submodule, self._marker(name, check)))
        self._undo.append(module.register_forward_hook(self._end).remove)

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _marker(self, name: str, check: Callable[[], None]) -> Callable[[], None]:
        def mark() -> None:
            check()
            self._marks.append((name, self._now()))

        return mark

    def _begin(self) -> None:
        self._device = cuda_device(self._module)
        self._marks = [("", self._now())]

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        marks = [*self._marks, ("", self._now())]
        if self._device is not None:
            marks[-1][1].synchronize()
            first = marks[0][1]
            marks = [(name, first.elapsed_time(event)) for name, event in marks]
        self._passes.append(marks)
        self._on_pass(len(self._passes))

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def calls(self) -> list[Call]:
        """Return the calls of the latest pass, in order. Their times are medians over the passes
        that made the same calls."""
        names = [name for name, _ in self._passes[-1]]
        times = np.array(
            [
                [at for _, at in marks]
                for marks in self._passes[1:] or self._passes
                if [name for name, _ in marks] == names
            ]
        )
        ends = np.cumsum(np.median(np.diff(times, axis=1), axis=0))
        entered = names[1:-1]
        totals, counted = Counter(entered), Counter[str]()
        calls = []
        for name, at in zip(entered, ends, strict=False):
            which, total = counted[name], totals[name]
            counted[name] += 1
            label = name if total == 1 else f"{name}#{which}/{total}"
            calls.append(Call(label, float(at / (ends[-1] or 1.0))))
        return calls


def parse(name: str) -> tuple[str, int, int]:
    """Split a call's name into the path of the submodule, the index of the call, and the number of
    calls. "block#2/6" gives ("block", 2, 6).

    Raises:
        ValueError: the name has another form.
    """
    path, mark, calls = name.partition("#")
    if not mark:
        return path, 0, 1
    which, _, total = calls.partition("/")
    try:
        return path, int(which), int(total)
    except ValueError:
        raise ValueError(f"exit_points: {name!r} is not of the form name#i/n") from None


def spread(calls: Sequence[Call], number: int) -> list[str]:
    """Return the names of the `number` calls that divide a pass most evenly. If fewer calls differ
    in time, return all of these.

    The sum of the squared segments is least. Half of it is the expected wait from a uniformly
    random time to the next exit point or the end. Dynamic programming finds the exact minimum in
    O(number · len(calls)²).
    """
    places: list[Call] = []
    for call in calls:  # of several calls at the same time, the first is the outermost
        if call.at - (places[-1].at if places else 0.0) >= _FINEST:
            places.append(call)
    number = min(number, len(places))
    at = np.array([0.0, *(p.at for p in places), 1.0])
    gaps = at[None, :] - at[:, None]
    cost = np.where(np.triu(np.ones_like(gaps), 1) > 0, gaps**2, np.inf)
    best, came_from = cost[0], []
    for _ in range(number):
        through = best[:, None] + cost
        came_from.append(through.argmin(axis=0))
        best = through.min(axis=0)
    chosen, here = [], len(at) - 1
    for previous in reversed(came_from):
        here = int(previous[here])
        chosen.append(places[here - 1].name)
    return chosen[::-1]
