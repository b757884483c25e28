"""The stream that every system gets (calm, a rise, a burst, and calm again), and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ray_slo.load.report import LoadResult
from ray_slo.load.workload import Payloads, Recorded
from ray_slo.simulation.arrivals import Poisson

GIVEN_UP_S = 10.0  # a request without an answer after this counts as not answered


@dataclass(frozen=True)
class Stretch:
    """A part of the stream with one rate.

    Attributes:
        load: rate, as a multiple of the rate that tuned plain Serve holds.
    """

    name: str
    length_s: float
    load: float


CALM, RISE, BURST, AFTER = "calm", "rise", "burst", "calm again"
WARM_UP_S = 4.0  # before the first stretch, at its rate; not in any figure
STORY = (
    Stretch(CALM, 18.0, 0.5),
    Stretch(RISE, 10.0, 1.3),
    Stretch(BURST, 5.0, 2.6),
    Stretch(AFTER, 13.0, 0.5),
)
WHOLE = "whole run"
PARTS: Mapping[str, tuple[str, ...]] = {
    WHOLE: (CALM, RISE, BURST, AFTER),
    "calm": (CALM,),
    "overload": (RISE, BURST),
    "calm again": (AFTER,),
}
"""Parts of the run in the table, and the stretches in each."""


def shortened(story: Sequence[Stretch], length_s: float) -> list[Stretch]:
    """Return the same stretches with a total length of `length_s` seconds."""
    share = length_s / sum(stretch.length_s for stretch in story)
    return [replace(stretch, length_s=stretch.length_s * share) for stretch in story]


def starts(story: Sequence[Stretch], warm_up_s: float) -> list[float]:
    """Return the start of each stretch, and the end of the last, in seconds from the first
    request."""
    lengths = [stretch.length_s for stretch in story]
    return [float(at) for at in warm_up_s + np.concatenate([[0.0], np.cumsum(lengths)])]


def record(
    story: Sequence[Stretch], held: float, payloads: Payloads, *, warm_up_s: float, seed: int
) -> Recorded:
    """Return the recorded stream. Each stretch has Poisson arrivals.

    Args:
        held: rate that tuned plain Serve holds, in requests per second.
    """
    rng = np.random.default_rng(seed)
    begins = starts(story, warm_up_s)
    pieces = [Poisson(rate=story[0].load * held).times(warm_up_s, rng)] if warm_up_s else []
    for stretch, begin in zip(story, begins, strict=False):
        pieces.append(begin + Poisson(rate=stretch.load * held).times(stretch.length_s, rng))
    return Recorded.record(
        np.concatenate(pieces),
        payloads,
        duration_s=begins[-1],
        warmup_s=warm_up_s,
        seed=seed,
        arrivals="story",
        stretches=[[s.name, s.length_s, s.load * held] for s in story],
    )


@dataclass(frozen=True)
class Sums:
    """The figures of some stretches.

    Attributes:
        offered, goodput: requests per second that were sent, and that were answered in time.
        bad: share of the requests that were not answered in time.
        p50_ms, p99_ms: median and 99th percentile of the latency of the requests that were answered
            or given up, in milliseconds. A given-up request counts as `GIVEN_UP_S`. None if there
            are none.
        accuracy: share of right answers among those in time. None if there are none.
        seconds: length of these stretches.
    """

    offered: float
    goodput: float
    bad: float
    p50_ms: float | None
    p99_ms: float | None
    accuracy: float | None
    seconds: float


def sums(
    result: LoadResult, story: Sequence[Stretch], parts: Mapping[str, Sequence[str]] = PARTS
) -> dict[str, Sums]:
    """Return the figures of each part of the run. A request belongs to the part of its intended
    send time."""
    begins = starts(story, result.warmup_s)
    index = np.searchsorted(begins, result.requests["intended_s"].to_numpy(), side="right") - 1
    found = {}
    for part, names in parts.items():
        chosen = [i for i, stretch in enumerate(story) if stretch.name in names]
        seconds = sum(story[i].length_s for i in chosen)
        found[part] = _sums(result.requests[np.isin(index, chosen)], seconds)
    return found


def _sums(frame: pd.DataFrame, seconds: float) -> Sums:
    in_time = frame[frame["status"] == "ok"]
    waited = 1e3 * frame.loc[frame["status"].isin(("ok", "late", "timeout")), "latency_s"]
    right = in_time["correct"].dropna().astype(float)
    return Sums(
        offered=len(frame) / seconds,
        goodput=len(in_time) / seconds,
        bad=1 - len(in_time) / len(frame) if len(frame) else 0.0,
        p50_ms=float(np.percentile(waited, 50)) if len(waited) else None,
        p99_ms=float(np.percentile(waited, 99)) if len(waited) else None,
        accuracy=float(right.mean()) if len(right) else None,
        seconds=seconds,
    )


@dataclass(frozen=True)
class OverTime:
    """Figures of a run for each second, by intended send time. All arrays have the shape (bins,).

    Attributes:
        at_s: middle of each bin, in seconds since the end of the warm-up.
        offered, goodput: requests per second.
        p99_ms: 99th percentile of the latency, with late and given-up requests, in milliseconds.
            NaN if there is none.
        accuracy: mean accuracy of the networks that answered in time, in percent. NaN if no answer
            tells it.
    """

    at_s: NDArray[np.float64]
    offered: NDArray[np.float64]
    goodput: NDArray[np.float64]
    p99_ms: NDArray[np.float64]
    accuracy: NDArray[np.float64]


def over_time(result: LoadResult, bin_s: float = 1.0) -> OverTime:
    """Return the figures of each second."""
    frame = result.measured
    bins = max(round((result.duration_s - result.warmup_s) / bin_s), 1)
    width = (result.duration_s - result.warmup_s) / bins
    at = (frame["intended_s"].to_numpy() - result.warmup_s) / width
    index = np.clip(at.astype(int), 0, bins - 1)
    status = frame["status"].to_numpy()
    ok = status == "ok"
    waited = np.isin(status, ("ok", "late", "timeout"))
    latency_ms = 1e3 * frame["latency_s"].to_numpy()
    told = (
        frame["accuracy"].to_numpy(dtype=float) if "accuracy" in frame else np.full(len(ok), np.nan)
    )
    p99, accuracy = np.full(bins, np.nan), np.full(bins, np.nan)
    for i in range(bins):
        here = index == i
        if (here & waited).any():
            p99[i] = np.percentile(latency_ms[here & waited], 99)
        known = here & ok & ~np.isnan(told)
        if known.any():
            accuracy[i] = told[known].mean()
    return OverTime(
        np.asarray((np.arange(bins) + 0.5) * width, dtype=float),
        np.bincount(index, minlength=bins) / width,
        np.bincount(index[ok], minlength=bins) / width,
        p99,
        accuracy,
    )
