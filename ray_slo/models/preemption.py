"""Preemptible PyTorch modules: forward passes that another thread can stop at exit points.

A preempted batch ends at its next *exit point* (SHEPHERD §6). With few exit points, the delay until
then is long. With many, every batch is slower. `preemption_profile` measures both and chooses a
number. The module's code does not change:

    model = Preemptible(resnet50, exit_points=32, example=images)
    flag = PreemptionFlag()
    logits = model(images, flag=flag)  # raises Preempted soon after another thread's flag.set()

or, where other code calls the module: `with preemption_scope(flag): resnet50(images)`.

On a GPU, the host runs ahead of the device: it queues the whole batch while the first layers run,
and would see the flag too late. So exit points also limit how far the host runs ahead. A *segment*
is the work between two exit points. With `run_ahead=1`, one segment runs and one is queued. So the
device is never idle, and a preemption takes at most two segments. On a CPU it takes at most one.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ray_slo.core.text import quoted
from ray_slo.models.checkpoint import (
    Preempted,
    PreemptionFlag,
    checkpoint,
    flags_in_force,
    preemption_scope,
)
from ray_slo.models.exit_points import (
    PASSES,
    Tracer,
    before,
    cuda_device,
    inference,
    is_hook_shy,
    parse,
    refuse,
    sites,
    spread,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Preempted", "Preemptible", "PreemptionFlag", "preemption_scope"]


class Preemptible:
    """A module with exit points: a forward pass inside a `preemption_scope` can be stopped.

    The outputs of a pass that is not stopped are those of the bare module, bit by bit. Calls
    outside any scope run as before. If `forward` changes state (batch norm in training mode, a
    cache), a stopped pass leaves it partly changed. It must be safe to run the batch again.

    Exit points are at the entries of submodules of any depth. They are chosen by measured time, so
    that the average wait for the next one is shortest. An exit point has the name of its submodule.
    If the submodule is called n times in a pass, "#i/n" follows for call i, counted from 0. Calls
    beyond n are exit points too. The start of the module itself is always one.

    Args:
        module: any `torch.nn.Module`. Submodules compiled by `torch.compile` are not entered.
        exit_points: number of exit points, or their names, as in `PreemptionProfile.exit_points`.
            If the module has fewer places, it gets fewer exit points.
        example: input with which the module is timed, as in `module(example)`. A tuple holds
            several arguments. Without an example, the module's first 4 calls are timed; until then
            every submodule is an exit point.
        run_ahead: on a GPU, the number of segments that the host may queue beyond the one that
            runs. With 0, the host waits for the device at every exit point. No effect on a CPU.

    Raises:
        TypeError: the module is not a `torch.nn.Module`.
        ValueError: the module as a whole is compiled or scripted, so it cannot stop inside; or
            `exit_points` has an unknown name; or a number is negative.
    """

    def __init__(
        self,
        module: nn.Module,
        exit_points: int | Sequence[str] = 16,
        *,
        example: Any = None,
        run_ahead: int = 1,
    ) -> None:
        refuse(module)
        if run_ahead < 0:
            raise ValueError(f"run_ahead must be at least 0, got {run_ahead}")
        if isinstance(exit_points, str) or (isinstance(exit_points, int) and exit_points < 0):
            raise ValueError(
                f"exit_points must be a number ≥ 0 or names, got {quoted(exit_points)}"
            )
        self.module = module
        self._run_ahead = run_ahead
        self._gate: _Gate | None = None
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._tracer: Tracer | None = None
        self._exit_points: tuple[str, ...] = ()
        self._undo = [before(module, self._enter)]
        try:
            if not isinstance(exit_points, int):
                self._place(exit_points)
            elif exit_points > 0 and not is_hook_shy(module):
                self._wanted = exit_points
                self._tracer = Tracer(module, self._traced, self._exit_point)
                if example is not None:
                    arguments = example if isinstance(example, tuple) else (example,)
                    with inference():
                        for _ in range(PASSES):
                            module(*arguments)
        except BaseException:
            self.close()
            raise

    def __call__(self, *args: Any, flag: PreemptionFlag | None = None, **kwargs: Any) -> Any:
        """Return `module(*args, **kwargs)`. If a flag is given, it can stop the call.

        Raises:
            Preempted: the flag was set in time. On a GPU, the device has stopped too.
        """
        if flag is None:
            return self.module(*args, **kwargs)
        with preemption_scope(flag):
            return self.module(*args, **kwargs)

    @property
    def exit_points(self) -> tuple[str, ...]:
        """Names of the exit points, in order of execution. Empty while the first calls are
        timed."""
        return self._exit_points

    def close(self) -> None:
        """Remove the exit points from the module."""
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Preemptible:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _traced(self, passes: int) -> None:
        if passes >= PASSES and self._tracer is not None:
            calls = self._tracer.calls()
            self._tracer.close()
            self._tracer = None
            self._place(spread(calls, self._wanted))

    def _place(self, names: Sequence[str]) -> None:
        submodules = dict(sites(self.module))
        wanted: dict[str, tuple[set[int], int]] = {}
        for name in names:
            path, which, total = parse(name)
            if path not in submodules:
                hint = ", ".join(get_close_matches(path, submodules, 3)) or "none alike"
                raise ValueError(f"exit_points: no submodule {path!r} to stop at (alike: {hint})")
            wanted.setdefault(path, (set(), total))[0].add(which)
        for path, (indices, total) in wanted.items():
            once = total == 1
            check = self._exit_point if once else self._counted(path, indices, total)
            self._undo.append(before(submodules[path], check))
        self._exit_points = tuple(names)

    def _counted(self, path: str, indices: set[int], total: int) -> Callable[[], None]:
        calls = self._calls

        def check() -> None:
            i = calls[path]
            calls[path] = i + 1
            if i in indices or i >= total:
                self._exit_point()

        return check

    def _enter(self) -> None:
        """Begin a pass of the whole module. Its start is an exit point."""
        self._calls.clear()
        if flags_in_force.get():
            device = cuda_device(self.module)
            if device is None:
                self._gate = None
            elif self._gate is None or self._gate.device != device:
                self._gate = _Gate(device, self._run_ahead)
            self._exit_point()

    def _exit_point(self) -> None:
        if not flags_in_force.get():
            return
        gate = self._gate
        if gate is None:
            checkpoint()
            return
        gate.wait()
        try:
            checkpoint()
        except Preempted:
            gate.drain()
            raise


class _Gate:
    """Keeps the host at most `run_ahead` segments of queued work ahead of a CUDA device."""

    def __init__(self, device: Any, run_ahead: int) -> None:
        import torch

        self.device = device
        self._current_stream = torch.cuda.current_stream
        self._events = deque(torch.cuda.Event() for _ in range(run_ahead + 1))

    def wait(self) -> None:
        """Mark the end of the segment that was just queued. Wait until the segment that is
        `run_ahead` before it is done."""
        newest = self._events.popleft()
        newest.record(self._current_stream(self.device))
        self._events.append(newest)
        self._events[0].synchronize()  # releases the GIL; returns at once if never recorded

    def drain(self) -> None:
        """Wait until the device has done all queued work."""
        self._current_stream(self.device).synchronize()
