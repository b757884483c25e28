"""Preemptible PyTorch modules: exit points on submodules, and how many of them a module needs.

SHEPHERD §6: when a preemption is asked for, the running batch ends at its next *exit point*. Few
exit points make the delay until then long, many slow down every batch. `profile_preemption`
measures both (§7.3, Figure 12) and chooses a number. The module's code stays as it is:

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

import gc
import json
import math
import random
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ray_slo.models.checkpoint import (
    Preempted,
    PreemptionFlag,
    checkpoint,
    flags_in_force,
    preemption_scope,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Preempted",
    "Preemptible",
    "PreemptionFlag",
    "PreemptionPoint",
    "PreemptionProfile",
    "load_preemption",
    "module_of",
    "plot_preemption",
    "preemption_scope",
    "profile_preemption",
]

CANDIDATES = (0, 1, 2, 4, 8, 16, 32, 64)
_PASSES = 4  # timed to place exit points; the first warms up and does not count
_LEAST_ROUNDS, _MOST_ROUNDS, _PREEMPTIONS = 3, 300, 4  # of measuring; preemptions in a round
_FINEST = 1 / 500  # of a pass: exit points closer than this are of no use


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
        _refuse(module)
        if run_ahead < 0:
            raise ValueError(f"run_ahead must be at least 0, got {run_ahead}")
        if isinstance(exit_points, str) or (isinstance(exit_points, int) and exit_points < 0):
            raise ValueError(f"exit_points must be a number ≥ 0 or names, got {exit_points!r}")
        self.module = module
        self._run_ahead = run_ahead
        self._gate: _Gate | None = None
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._tracer: _Tracer | None = None
        self._exit_points: tuple[str, ...] = ()
        self._undo = [_before(module, self._enter)]
        try:
            if not isinstance(exit_points, int):
                self._place(exit_points)
            elif exit_points > 0 and not _is_hook_shy(module):
                self._wanted = exit_points
                self._tracer = _Tracer(module, self._traced, self._exit_point)
                if example is not None:
                    arguments = example if isinstance(example, tuple) else (example,)
                    with _inference():
                        for _ in range(_PASSES):
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
        if passes >= _PASSES and self._tracer is not None:
            calls = self._tracer.calls()
            self._tracer.close()
            self._tracer = None
            self._place(spread(calls, self._wanted))

    def _place(self, names: Sequence[str]) -> None:
        submodules = dict(_sites(self.module))
        wanted: dict[str, tuple[set[int], int]] = {}
        for name in names:
            path, which, total = _parse(name)
            if path not in submodules:
                hint = ", ".join(get_close_matches(path, submodules, 3)) or "none alike"
                raise ValueError(f"exit_points: no submodule {path!r} to stop at (alike: {hint})")
            wanted.setdefault(path, (set(), total))[0].add(which)
        for path, (indices, total) in wanted.items():
            once = total == 1
            check = self._exit_point if once else self._counted(path, indices, total)
            self._undo.append(_before(submodules[path], check))
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
            device = _cuda_device(self.module)
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


def _cuda_device(module: nn.Module) -> Any:
    parameter = next(module.parameters(), None)
    if parameter is None:
        parameter = next(module.buffers(), None)
    return parameter.device if parameter is not None and parameter.is_cuda else None


# -- where exit points can stand ---------------------------------------------------------------


def _refuse(module: Any) -> None:
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
            f"module is {how}: it runs as one piece, there is nothing to stop at inside. Wrap the "
            "module as it was before; its blocks may be compiled, exit points then go between them"
        )


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod")  # torch.compile(module) returns a wrapper


def _compiles_itself(module: nn.Module) -> bool:
    # module.compile(): hooks become part of the graph, so this one and what is inside is left alone
    return getattr(module, "_compiled_call_impl", None) is not None


def _is_hook_shy(module: nn.Module) -> bool:
    """Runs another (slower, not bit-identical) implementation when it or a submodule has a hook."""
    import torch

    return isinstance(module, torch.nn.TransformerEncoderLayer)


def _sites(
    module: nn.Module, prefix: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that can have an exit point before them, by name, the outer before the inner."""
    import torch

    seen = set() if seen is None else seen
    if _is_hook_shy(module):
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
            yield from _sites(child, f"{path}.", seen)


def _before(module: nn.Module, check: Callable[[], None]) -> Callable[[], None]:
    """Has `check` called before every forward pass of `module`; returns what undoes that."""
    if not _is_hook_shy(module):

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
    """Stands in for a module's `forward`, where a hook would change what is run."""

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
    """A submodule entered at this share (0 … 1) of the time of a pass."""

    name: str
    at: float


class _Tracer:
    """Times when every submodule is entered, pass by pass.

    Args:
        on_pass: told the number of complete passes after each.
        check: called at every entry.
    """

    def __init__(
        self, module: nn.Module, on_pass: Callable[[int], None], check: Callable[[], None]
    ) -> None:
        self._module = module
        self._on_pass = on_pass
        self._passes: list[list[tuple[str, float]]] = []
        self._marks: list[tuple[str, Any]] = []
        self._device: Any = None
        self._undo = [_before(module, self._begin)]
        for name, submodule in _sites(module):
            self._undo.append(_before(submodule, self._marker(name, check)))
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
        self._device = _cuda_device(self._module)
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
        """Of the latest pass, in order; with the median times of the passes that were like it."""
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


def _parse(name: str) -> tuple[str, int, int]:
    """A submodule's path, which of its calls, and of how many. "block#2/6" → ("block", 2, 6)."""
    path, mark, calls = name.partition("#")
    if not mark:
        return path, 0, 1
    which, _, total = calls.partition("/")
    try:
        return path, int(which), int(total)
    except ValueError:
        raise ValueError(f"exit_points: {name!r} is not of the form name#i/n") from None


def spread(calls: Sequence[Call], number: int) -> list[str]:
    """Names of `number` calls (or of all that differ in time) that part a pass most evenly.

    Least sum of squared segments: the expected wait from a uniformly random time to the next exit
    point (or the end) is half of that. Exact, by dynamic programming; O(number · len(calls)²).
    """
    places: list[Call] = []
    for call in calls:  # of calls at the same time the first is kept, that is the outermost
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


# -- how many ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreemptionPoint:
    """One number of exit points, measured at one batch size.

    Attributes:
        exit_points: the number asked for; `placed`: how many the module had places for.
        batch_s: median duration of the bare module's batch, seconds.
        delay_p50_s, delay_p95_s: from a flag set at a random time of the batch until the thread
            (and on a GPU the device) is free again, seconds.
        slowdown: median of paired ratios to the bare module, minus 1.
        pairs, preemptions: how many measurements these stand on.
    """

    exit_points: int
    placed: int
    batch_size: int
    batch_s: float
    delay_p50_s: float
    delay_p95_s: float
    slowdown: float
    pairs: int
    preemptions: int

    @property
    def delay(self) -> float:
        """The p95 of the delay as a share of the batch's time."""
        return self.delay_p95_s / self.batch_s


@dataclass(frozen=True)
class PreemptionProfile:
    """What numbers of exit points cost a module, and the number chosen.

    Attributes:
        points: by number and batch size.
        chosen: number of exit points to use.
        exit_points: their names, for `Preemptible(module, profile.exit_points)`.
        reason: why this number.
    """

    points: tuple[PreemptionPoint, ...]
    chosen: int
    exit_points: tuple[str, ...]
    reason: str
    max_delay: float = 0.05
    max_slowdown: float = 0.05

    @property
    def meets_limits(self) -> bool:
        """The chosen number keeps both limits at every batch size that was measured."""
        return self.cost(self.chosen) <= 1

    def cost(self, exit_points: int) -> float:
        """The worst of delay and slowdown, over the batch sizes, as a multiple of its limit."""
        return _cost(self.points, exit_points, self.max_delay, self.max_slowdown)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PreemptionProfile:
        """The inverse of `to_json`.

        Raises:
            ValueError: a field is missing or unknown.
        """
        try:
            points = tuple(PreemptionPoint(**point) for point in data["points"])
            fields = {**data, "points": points, "exit_points": tuple(data["exit_points"])}
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a preemption profile: {error}") from None


def load_preemption(path: str | Path) -> dict[str, PreemptionProfile]:
    """By variant, from the entry "preemption" of a profile file; empty if it has none."""
    body = json.loads(Path(path).read_text(encoding="utf-8"))
    entries = body.get("preemption", {})
    return {name: PreemptionProfile.from_json(data) for name, data in entries.items()}


def module_of(model: Any, attribute: str | None = None) -> nn.Module:
    """The torch module of a deployment's instance: itself, or the only attribute that is one.

    Raises:
        ValueError: none, or several and no `attribute` says which.
    """
    import torch

    if isinstance(model, torch.nn.Module) and attribute is None:
        return model
    found = {k: v for k, v in vars(model).items() if isinstance(v, torch.nn.Module)}
    if attribute is not None and attribute in found:
        return found[attribute]
    if attribute is None and len(found) == 1:
        return next(iter(found.values()))
    asked = "exactly one attribute" if attribute is None else f"an attribute {attribute!r}"
    raise ValueError(
        f"{type(model).__name__} must have {asked} that is a torch.nn.Module; "
        f"it has {', '.join(sorted(found)) or 'none'}"
    )


def profile_preemption(
    module: nn.Module,
    example_input: Any,
    batch_sizes: Iterable[int] = (1, 8),
    candidates: Iterable[int] = CANDIDATES,
    *,
    run: Callable[[Any], Any] | None = None,
    budget_s: float = 60.0,
    max_delay: float = 0.05,
    max_slowdown: float = 0.05,
    run_ahead: int = 1,
    clock: Literal["wall", "thread"] = "wall",
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> PreemptionProfile:
    """Measure delay and slowdown of numbers of exit points, and choose one (SHEPHERD §7.3).

    In rounds over all candidates, so that a passing disturbance touches each alike. A round runs
    the bare module and the one with exit points in a pair (in alternating order), and preempts some
    batches at uniformly random times from another thread.

    The smallest number that keeps both limits at all batch sizes is chosen; where none does, the
    one whose worst ratio to its limit is least. A number whose median delay is already over the
    limit is not measured further, unless all are.

    Args:
        module: to be measured; without exit points before and after.
        example_input: one item, a tensor without batch dimension, or a function of the batch size
            that returns a batch.
        batch_sizes: to measure at.
        candidates: numbers of exit points.
        run: what runs a batch; it must call the module. Default: `module(batch)`.
        budget_s: to spend, about, in all. Each candidate is measured at least 3 times.
        max_delay, max_slowdown: limits, as shares of the bare batch's time.
        run_ahead: as in `Preemptible`.
        clock: `wall`, or `thread` for the CPU time of the thread that runs the batch: what is
            measured is then what a machine without other work would show. For a busy machine, with
            one CPU thread (Linux); of no use for a GPU.
        seed: of the random times.
        progress: called with the share of the budget that is used.

    Raises:
        TypeError, ValueError: as in `Preemptible`; no batch size or candidate, or a bad one; the
            module was not called by `run`.
    """
    _refuse(module)
    sizes, numbers = sorted(set(batch_sizes)), sorted(set(candidates))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"batch_sizes must be at least one number ≥ 1, got {sizes}")
    if not numbers or numbers[0] < 0:
        raise ValueError(f"candidates must be at least one number ≥ 0, got {numbers}")
    for name, value in (("budget_s", budget_s), ("max_delay", max_delay)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if not max_slowdown > 0:
        raise ValueError(f"max_slowdown must be positive, got {max_slowdown}")
    now = _clock(clock)
    make = example_input if callable(example_input) else _batches_of(example_input)
    call = module if run is None else run
    rng = random.Random(seed)
    points: list[PreemptionPoint] = []
    with _inference(), _no_garbage_collection():
        calls = _Bench(module, call, make(sizes[-1]), run_ahead, now).trace()
        placed = {number: spread(calls, number) for number in numbers}
        for i, size in enumerate(sizes):
            bench = _Bench(module, call, make(size), run_ahead, now)

            def share(used: float, i: int = i) -> None:
                if progress is not None:
                    progress((i + used) / len(sizes))

            samples = bench.measure(placed, budget_s / len(sizes), max_delay, rng, share)
            for number, measured in samples.items():
                points.append(measured.point(number, len(placed[number]), size))
    return _choose(points, placed, max_delay, max_slowdown)


def _choose(
    points: Sequence[PreemptionPoint],
    placed: Mapping[int, Sequence[str]],
    max_delay: float,
    max_slowdown: float,
) -> PreemptionProfile:
    costs = {n: _cost(points, n, max_delay, max_slowdown) for n in sorted(placed)}
    chosen = next((n for n, cost in costs.items() if cost <= 1), None)
    if chosen is None:
        chosen = min(costs, key=lambda n: (costs[n], n))
        verdict = "no number keeps both limits; it has the least excess"
    else:
        verdict = "the smallest number that keeps both limits"
    mine = [p for p in points if p.exit_points == chosen]
    slowest = max(mine, key=lambda p: p.delay)
    dearest = max(mine, key=lambda p: p.slowdown)
    reason = (
        f"{verdict}: p95 of the delay {slowest.delay:.1%} of the batch's time (limit "
        f"{max_delay:.1%}; batch size {slowest.batch_size}), slowdown {dearest.slowdown:.1%} "
        f"(limit {max_slowdown:.1%}; batch size {dearest.batch_size})"
    )
    return PreemptionProfile(
        tuple(points), chosen, tuple(placed[chosen]), reason, max_delay, max_slowdown
    )


def _cost(
    points: Sequence[PreemptionPoint], exit_points: int, max_delay: float, max_slowdown: float
) -> float:
    return max(
        max(p.delay / max_delay, p.slowdown / max_slowdown)
        for p in points
        if p.exit_points == exit_points
    )


class _Samples:
    def __init__(self) -> None:
        self.bare: list[float] = []
        self.ratios: list[float] = []
        self.delays: list[float] = []

    def may_keep(self, max_delay: float) -> bool:
        """False once even the median delay is over the limit: more samples would tell no more."""
        return statistics.median(self._delays()) <= max_delay * statistics.median(self.bare)

    def _delays(self) -> list[float]:
        # A batch so short that every flag came too late just runs to its end.
        return self.delays or [statistics.median(self.bare)]

    def point(self, number: int, placed: int, batch_size: int) -> PreemptionPoint:
        p50, p95 = (float(np.quantile(self._delays(), q)) for q in (0.5, 0.95))
        return PreemptionPoint(
            exit_points=number,
            placed=placed,
            batch_size=batch_size,
            batch_s=statistics.median(self.bare),
            delay_p50_s=p50,
            delay_p95_s=p95,
            slowdown=statistics.median(self.ratios) - 1,
            pairs=len(self.ratios),
            preemptions=len(self.delays),
        )


class _Bench:
    """One batch, run bare, with exit points, and with a flag that is set on the way."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Any], Any],
        batch: Any,
        run_ahead: int,
        now: Callable[[int], float],
    ) -> None:
        self._now = now
        self._thread = threading.get_ident()
        self._module = module
        self._run = run
        self._batch = batch
        self._run_ahead = run_ahead
        self._lasted: deque[float] = deque(maxlen=50)  # wall time of bare batches, for the timer
        self._is_cuda = _cuda_device(module) is not None

    def trace(self) -> list[Call]:
        passes = 0

        def count_up(number: int) -> None:
            nonlocal passes
            passes = number

        tracer = _Tracer(self._module, count_up, lambda: None)
        try:
            for _ in range(_PASSES):
                self._once()
        finally:
            tracer.close()
        if not passes:
            raise ValueError("run must call the module, and did not")
        return tracer.calls()

    def measure(
        self,
        placed: Mapping[int, Sequence[str]],
        budget_s: float,
        max_delay: float,
        rng: random.Random,
        progress: Callable[[float], None],
    ) -> dict[int, _Samples]:
        samples = {number: _Samples() for number in placed}
        # Times spread evenly (golden ratio) from a random start: fewer do than random ones would.
        start = rng.random()
        when = {number: ((start + k * 0.618034) % 1 for k in count()) for number in placed}
        for _ in range(2):
            self._once()
        self._lasted.clear()  # the first calls are no measurement
        begin = time.perf_counter()
        used = 0.0
        for round_ in range(_MOST_ROUNDS):
            if used >= 1 and round_ >= _LEAST_ROUNDS:
                break
            undecided = [
                n for n in placed if round_ < _LEAST_ROUNDS or samples[n].may_keep(max_delay)
            ]
            for number in undecided or placed:
                self._measure_one(samples[number], placed[number], when[number], round_)
                used = (time.perf_counter() - begin) / budget_s
                progress(min(used, 1.0))
        return samples

    def _measure_one(
        self, samples: _Samples, names: Sequence[str], when: Iterator[float], round_: int
    ) -> None:
        pair: dict[bool, float] = {}
        for bare in (True, False) if round_ % 2 else (False, True):
            pair[bare] = self._timed(None if bare else names)
        samples.bare.append(pair[True])
        samples.ratios.append(pair[False] / pair[True])
        for _ in range(_PREEMPTIONS):
            delay = self._preempted(names, next(when) * statistics.median(self._lasted))
            if delay is not None:
                samples.delays.append(delay)

    def _once(self) -> None:
        self._run(self._batch)
        if self._is_cuda:
            import torch

            torch.cuda.synchronize()

    def _timed(self, names: Sequence[str] | None) -> float:
        """Seconds of a batch that nobody stops; bare without names."""
        if names is None:
            begin, start = time.perf_counter(), self._now(self._thread)
            self._once()
            took = self._now(self._thread) - start
            self._lasted.append(time.perf_counter() - begin)
            return took
        with (
            Preemptible(self._module, names, run_ahead=self._run_ahead),
            preemption_scope(PreemptionFlag()),
        ):
            start = self._now(self._thread)
            self._once()
            return self._now(self._thread) - start

    def _preempted(self, names: Sequence[str], after_s: float) -> float | None:
        """Seconds from a flag set `after_s` into the batch to its end; None if it ended before."""
        flag, set_at = PreemptionFlag(), math.inf

        def stop() -> None:
            nonlocal set_at
            set_at = self._now(self._thread)
            flag.set()

        with Preemptible(self._module, names, run_ahead=self._run_ahead):
            timer = threading.Timer(after_s, stop)
            timer.start()
            try:
                with preemption_scope(flag):
                    self._once()
                end = self._now(self._thread)
            except Preempted:
                end = self._now(self._thread)
            finally:
                timer.cancel()
                timer.join()
        return end - set_at if set_at <= end else None


def _clock(kind: str) -> Callable[[int], float]:
    """Seconds as they pass for a thread, given by its identifier."""
    if kind == "wall":
        return lambda _thread: time.perf_counter()
    if kind != "thread":
        raise ValueError(f"clock must be 'wall' or 'thread', got {kind!r}")
    if not hasattr(time, "pthread_getcpuclockid"):
        raise ValueError("clock: this system has no CPU time of other threads; choose 'wall'")
    return lambda thread: time.clock_gettime(time.pthread_getcpuclockid(thread))


def _batches_of(item: Any) -> Callable[[int], Any]:
    import torch

    if not isinstance(item, torch.Tensor):
        raise TypeError(
            "example_input must be a tensor (one item) or a function of the batch size, "
            f"got a {type(item).__name__}"
        )
    return lambda size: torch.stack([item] * size)


@contextmanager
def _inference() -> Iterator[None]:
    import torch

    with torch.inference_mode():
        yield


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def plot_preemption(profiles: Mapping[str, PreemptionProfile]) -> Any:
    """Delay and slowdown over the number of exit points, a panel per module (as SHEPHERD Fig. 12).

    Returns:
        A matplotlib Figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(profiles), 3.2), layout="constrained")
    panels = figure.subplots(1, len(profiles), squeeze=False)[0]
    for axes, (name, profile) in zip(panels, profiles.items(), strict=True):
        for i, size in enumerate(sorted({p.batch_size for p in profile.points})):
            own = [p for p in profile.points if p.batch_size == size]
            x = [p.exit_points for p in own]
            median = [100 * p.delay_p50_s / p.batch_s for p in own]
            style = {"color": f"C{i}", "linewidth": 1.3}
            axes.plot(
                x, [100 * p.delay for p in own], "o-", ms=3, label=f"delay p95, b={size}", **style
            )
            axes.plot(x, median, "--", label=f"delay p50, b={size}", **style)
            axes.plot(
                x, [100 * p.slowdown for p in own], "x:", label=f"slowdown, b={size}", **style
            )
        axes.axhline(100 * profile.max_delay, color="grey", linewidth=0.7)
        axes.axvline(profile.chosen, color="grey", linewidth=0.7, linestyle=":")
        axes.set_xscale("symlog", base=2, linthresh=2)
        ticks = sorted({p.exit_points for p in profile.points})
        axes.set_xticks(ticks, [str(number) for number in ticks])
        axes.minorticks_off()
        axes.set_yscale("symlog", linthresh=10)
        axes.set(title=name, xlabel="exit points", ylabel="% of the batch's time")
        axes.legend(fontsize=6, frameon=False)
    return figure
