"""Measurement of the cost of exit points in a PyTorch module, and choice of their number (SHEPHERD
§7.3). More exit points make a preemption faster and every batch slower.

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
# Bounds on the number of rounds of measurements; preemptions of each candidate in a round.
_LEAST_ROUNDS, _MOST_ROUNDS, _PREEMPTIONS = 3, 300, 4


@dataclass(frozen=True)
class PreemptionPoint:
    """The measurement of one number of exit points at one batch size.

    Attributes:
        exit_points: the wanted number of exit points.
        placed: the number of exit points that the module has places for.
        batch_size: number of items in the batch.
        batch_s: median duration of a batch without exit points, in seconds.
        delay_p50_s, delay_p95_s: median and 95th percentile of the preemption delay, in seconds.
            The delay begins when a flag is set at a random time of the batch. It ends when the
            thread (and on a GPU the device) is free again.
        slowdown: relative slowdown of a batch by the exit points: the median of paired ratios to
            the bare module, minus 1.
        pairs: number of measured ratios.
        preemptions: number of measured delays.
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
        """The 95th percentile of the delay, as a share of the batch's time."""
        return self.delay_p95_s / self.batch_s


@dataclass(frozen=True)
class PreemptionProfile:
    """The measured costs of numbers of exit points for one module, and the chosen number.

    Attributes:
        points: one measurement per number of exit points and batch size.
        chosen: number of exit points to use.
        exit_points: names of these exit points, for `Preemptible(module, profile.exit_points)`.
        reason: reason for the choice, as a sentence.
        max_delay, max_slowdown: the limits, as shares of the batch's time.
    """

    points: tuple[PreemptionPoint, ...]
    chosen: int
    exit_points: tuple[str, ...]
    reason: str
    max_delay: float = 0.05
    max_slowdown: float = 0.05

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PreemptionProfile:
        """Return the profile that `to_json` wrote.

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
    """Return the preemption profiles in a profile file, by variant. They are in its entry
    "preemption". Without this entry, the result is empty.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of another kind. The message names it.
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

    The measurements are in rounds over all candidates, so that a passing disturbance affects all
    equally. In a round, every candidate runs one batch without and one with exit points, in
    alternating order. Then another thread preempts some batches at uniformly random times.

    The smallest number that keeps both limits at all batch sizes is chosen. If none does, the one
    whose largest ratio to a limit is least is chosen. A number whose median delay is over the limit
    after a few rounds is not measured further, unless all are over it.

    Args:
        module: the module to measure. It has no exit points before, and none afterwards.
        example_input: one item, as a tensor without a batch dimension; or a function of the batch
            size that returns a batch.
        batch_sizes: batch sizes to measure at.
        candidates: numbers of exit points to measure.
        run: function that runs a batch and calls the module. Default: `module(batch)`.
        budget_s: approximate time for all measurements, in seconds. Each candidate is measured at
            least 3 times.
        max_delay, max_slowdown: limits, as shares of the time of a batch without exit points.
        run_ahead: as in `Preemptible`.
        clock: `wall` measures wall-clock time. `thread` measures the CPU time of the thread that
            runs the batch, so other work on the machine does not count. It needs Linux and one CPU
            thread, and cannot measure a GPU.
        seed: seed of the random times.
        progress: called with the used share of the budget.

    Raises:
        TypeError: as in `Preemptible`, or `example_input` is of another type.
        ValueError: as in `Preemptible`; or there is no batch size or candidate, or one is out of
            its range; or `run` did not call the module.
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
    costs = {
        n: max(
            max(p.delay / max_delay, p.slowdown / max_slowdown)
            for p in points
            if p.exit_points == n
        )
        for n in sorted(placed)
    }
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


class _Samples:
    def __init__(self) -> None:
        self.bare: list[float] = []
        self.ratios: list[float] = []
        self.delays: list[float] = []

    def may_keep(self, max_delay: float) -> bool:
        """Return whether the median delay is within the limit, so that more samples are useful."""
        return statistics.median(self._delays()) <= max_delay * statistics.median(self.bare)

    def _delays(self) -> list[float]:
        # If every flag came too late, because the batch is short, the delay is the whole batch.
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
    """Runs one batch in three ways: without exit points, with exit points, and preempted."""

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
        # The times are spread evenly (golden ratio) from a random start. So fewer samples are
        # enough than with independent random times.
        start = rng.random()
        when = {number: ((start + k * 0.618034) % 1 for k in count()) for number in placed}
        for _ in range(2):
            self._once()
        self._lasted.clear()  # the first calls are a warm-up
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
        """Return the time of a batch that is not preempted, in seconds. It has exit points at
        `names`; None: none."""
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
        """Set a flag `after_s` seconds after the batch started. Return the time from then to the
        end of the batch, in seconds, or None if it ended earlier."""
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
    """Return a function from a thread's identifier to the reading of its clock, in seconds."""
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
    """Plot the delay and the slowdown over the number of exit points, as in SHEPHERD Fig. 12.

    Returns:
        A matplotlib Figure with one panel per module.
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
