"""Preemptible PyTorch modules: forward passes that another thread can stop at exit points.

SHEPHERD §6: when a preemption is asked for, the running batch ends at its next *exit point*. Few
exit points make the delay until then long, many slow down every batch: `preemption_profile`
measures both and chooses a number. The module's code stays as it is:

    model = Preemptible(resnet50, exit_points=32, example=images)
    flag = PreemptionFlag()
    logits = model(images, flag=flag)  # raises Preempted soon after another thread's flag.set()

or, where other code calls the module: `with preemption_scope(flag): resnet50(images)`.

On a GPU the host runs ahead of the device: it has queued the whole batch while the first layers
run, and would then see the flag too late. Exit points therefore also make the host wait until the
device has come near: with `run_ahead=1`, one segment runs and one is queued at any time, so that
the device does not idle, and a preemption takes at most two segments (on a CPU: one).

Importing this module does not import torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

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
    """Exit points on a module: forward passes inside a `preemption_scope` can be stopped.

    Outputs of passes that are not stopped are those of the bare module, bit by bit. Calls outside
    any scope run as before. A stopped pass leaves state that `forward` itself changes half changed
    (batch norm in training mode, a cache): it must be safe to run the batch again.

    Exit points stand before submodules of any depth, spread by measured time so that the wait for
    the next one is shortest on average. A name is that of the submodule, followed by "#i/n" for
    call i (from 0) of one that is called n times in a pass; calls beyond n are exit points, too.
    The start of the module itself always is one.

    Args:
        module: any `torch.nn.Module`. Submodules compiled by `torch.compile` are not entered.
        exit_points: how many to place (fewer where the module has not as many places), or their
            names, as in `PreemptionProfile.exit_points`.
        example: input to time the module with, as in `module(example)`; a tuple holds several
            arguments. Without it the module's first 4 calls are timed, and until then every
            submodule is an exit point.
        run_ahead: on a GPU, segments between exit points that the host may have queued beyond the
            one that runs; 0 waits for the device at every exit point. No effect on a CPU.

    Raises:
        TypeError: not a `torch.nn.Module`.
        ValueError: the module as a whole is compiled or scripted and cannot be stopped inside; an
            unknown name in `exit_points`; a negative number.
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
            raise ValueError(f"exit_points must be a number ≥ 0 or names, got {exit_points!r}")
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
        """`module(*args, **kwargs)`, in a scope of `flag` if one is given.

        Raises:
            Preempted: the flag was set in time. On a GPU the device has then stopped, too.
        """
        if flag is None:
            return self.module(*args, **kwargs)
        with preemption_scope(flag):
            return self.module(*args, **kwargs)

    @property
    def exit_points(self) -> tuple[str, ...]:
        """Names, in order of execution; empty while the first calls are timed."""
        return self._exit_points

    def close(self) -> None:
        """Take the exit points off the module again."""
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
        """Before each pass of the whole module."""
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
        """Mark the end of the segment just queued; wait for the one `run_ahead` before it."""
        newest = self._events.popleft()
        newest.record(self._current_stream(self.device))
        self._events.append(newest)
        self._events[0].synchronize()  # releases the GIL; returns at once if never recorded

    def drain(self) -> None:
        """Wait until the device has done what is queued."""
        self._current_stream(self.device).synchronize()
