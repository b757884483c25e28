"""How many exit points a PyTorch module needs: what each number costs, measured (SHEPHERD §7.3).

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ray_slo.models.checkpoint import Preempted, PreemptionFlag, preemption_scope
from ray_slo.models.exit_points import (
    PASSES,
    Call,
    Tracer,
    cuda_device,
    inference,
    refuse,
    spread,
)
from ray_slo.models.preemption import Preemptible

if TYPE_CHECKING:
    from torch import nn

CANDIDATES = (0, 1, 2, 4, 8, 16, 32, 64)
_LEAST_ROUNDS, _MOST_ROUNDS, _PREEMPTIONS = 3, 300, 4  # of measuring; preemptions in a round


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
    """By variant, from the entry "preemption" of a profile file; empty if it has none.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or of another kind; the message names it.
    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a latency-profile file: {error}") from None
    entries = body.get("preemption", {}) if isinstance(body, dict) else None
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: preemption must be a mapping by name of variants")
    found = {}
    for name, data in entries.items():
        try:
            found[name] = PreemptionProfile.from_json(data)
        except ValueError as error:
            raise ValueError(f"{path}: preemption.{name}: {error}") from None
    return found


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
    refuse(module)
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
    with inference(), _no_garbage_collection():
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
        self._is_cuda = cuda_device(module) is not None

    def trace(self) -> list[Call]:
        passes = 0

        def count_up(number: int) -> None:
            nonlocal passes
            passes = number

        tracer = Tracer(self._module, count_up, lambda: None)
        try:
            for _ in range(PASSES):
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
