"""Arrival processes with one rate, also from files.

Every process is a unit-rate renewal process stretched to its rate. So two runs with the same seed
have the same pattern of arrivals at any rate (common random numbers). This makes `goodput_search`
smooth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from ray_slo.core.arrival_files import read_arrivals
from ray_slo.core.documents import Frozen
from ray_slo.core.explain import Misplaced
from ray_slo.core.text import text_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_REQUESTS = 100_000_000  # largest number of requests in a run; their arrivals need 2 GB


def _renewal(total: float, shape: float, rng: np.random.Generator) -> Floats:
    """Arrivals of a unit-rate Gamma renewal process in [0, total), ascending.

    Raises:
        ValueError: they are more than `MAX_REQUESTS`.
    """
    check_count(total)
    blocks: list[Floats] = []
    reached = 0.0
    while reached < total:
        count = int(total - reached + 4 * math.sqrt(total / shape)) + 16
        gaps = rng.exponential(size=count) if shape == 1 else rng.gamma(shape, 1 / shape, count)
        blocks.append(reached + np.cumsum(gaps))
        reached = float(blocks[-1][-1])
    times = np.concatenate(blocks) if blocks else np.empty(0)
    return times[: np.searchsorted(times, total)]


def _at_rates(
    edges: Floats, rates: Floats, duration_s: float, shape: float, rng: np.random.Generator
) -> Floats:
    """Arrivals in [0, duration_s) at rates[i] per second between edges[i] and edges[i + 1]."""
    served = np.concatenate([[0.0], np.cumsum(rates * np.diff(edges))])
    units = _renewal(float(np.interp(duration_s, edges, served)), shape, rng)
    # The interval of each arrival. side="right" skips intervals with rate 0.
    i = np.searchsorted(served, units, side="right") - 1
    return np.asarray(edges[i] + (units - served[i]) / rates[i])


class Burst(Frozen):
    """Two states, burst and calm, of exponentially distributed length, which modulate an MMPP.

    Attributes:
        peak: rate in a burst over the mean rate. It is above 1 and at most (burst_s + calm_s) /
            burst_s, at which no request arrives between bursts.
        burst_s, calm_s: mean lengths of the states, seconds.
    """

    peak: Annotated[float, Field(gt=1)]
    burst_s: PositiveFloat
    calm_s: PositiveFloat

    @model_validator(mode="after")
    def _check(self) -> Burst:
        if self.peak * self.share > 1 + 1e-9:
            raise ValueError(
                f"peak must be at most (burst_s + calm_s) / burst_s = {1 / self.share:.6g}, "
                f"got {self.peak:.6g}"
            )
        return self

    @property
    def share(self) -> float:
        """Share of the time in bursts."""
        return self.burst_s / (self.burst_s + self.calm_s)

    @property
    def calm(self) -> float:
        """Rate between bursts over the mean rate."""
        return max(0.0, (1 - self.peak * self.share) / (1 - self.share))

    def edges(
        self, streams: int, duration_s: float, rng: np.random.Generator
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Ends of the states, shape (streams, n), ascending along a row, the last one at
        `duration_s` or later; and whether the first state is a burst, shape (streams,)."""
        bursting = rng.random(streams) < self.share
        mean = np.where(bursting[:, None], [self.burst_s, self.calm_s], [self.calm_s, self.burst_s])
        ends = np.empty((streams, 0))
        while ends.shape[1] == 0 or ends[:, -1].min(initial=math.inf) < duration_s:
            pairs = int(duration_s / (self.burst_s + self.calm_s)) + 8
            more = (rng.exponential(size=(streams, pairs, 2)) * mean[:, None, :]).reshape(
                streams, 2 * pairs
            )
            last = ends[:, -1:] if ends.shape[1] else np.zeros((streams, 1))
            ends = np.concatenate([ends, last + np.cumsum(more, axis=1)], axis=1)
        return ends, bursting

    def levels(self, duration_s: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """One stream: edges of the states from 0 on, shape (n + 1,), the last one after
        `duration_s`, and the rate over the mean rate in each, shape (n,)."""
        ends, bursting = self.edges(1, duration_s, rng)
        edges = np.concatenate([[0.0], ends[0]])
        odd = np.arange(len(edges) - 1) % 2 == 1
        return edges, np.where(odd ^ bursting[0], self.peak, self.calm)


class Constant(Frozen):
    """One request every 1 / rate seconds; the first at `start_s`.

    Attributes:
        rate: requests per second.
        start_s: seconds from the start.
    """

    kind: Literal["constant"] = "constant"
    rate: PositiveFloat
    start_s: NonNegativeFloat = 0.0

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        check_count(duration_s * self.rate)
        count = max(math.ceil((duration_s - self.start_s) * self.rate - 1e-9), 0)
        return self.start_s + np.arange(count) / self.rate


class Poisson(Frozen):
    """Independent arrivals at a mean of `rate` per second.

    Attributes:
        rate: requests per second.
    """

    kind: Literal["poisson"] = "poisson"
    rate: PositiveFloat

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        return _renewal(duration_s * self.rate, 1.0, rng) / self.rate


class Gamma(Frozen):
    """Gamma-distributed gaps: shape 1 is Poisson, smaller is burstier (Symphony §5.3: 0.05).

    Attributes:
        rate: requests per second, on average.
        shape: of the gaps.
    """

    kind: Literal["gamma"] = "gamma"
    rate: PositiveFloat
    shape: PositiveFloat

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        return _renewal(duration_s * self.rate, self.shape, rng) / self.rate


class Mmpp(Frozen):
    """Markov-modulated Poisson arrivals at a mean of `rate` per second, in bursts.

    Attributes:
        rate: requests per second, on average.
        burst: height and length of the bursts.
    """

    kind: Literal["mmpp"] = "mmpp"
    rate: PositiveFloat
    burst: Burst

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        edges, levels = self.burst.levels(duration_s, rng)
        return _at_rates(edges, self.rate * levels, duration_s, 1.0, rng)


class _OfFile(Frozen):
    """Arrivals that may be in a file, which is read when the document is."""

    file: Path | None = Field(default=None, exclude=True)  # it has been read
    _said: str = PrivateAttr("")

    @property
    def said(self) -> str:
        """What was read from the file, in words; "" without a file."""
        return self._said

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: Any, info: ValidationInfo) -> Any:
        given = data if isinstance(data, Mapping) else {}
        if not isinstance(file := given.get("file"), str | Path):
            return handler(data)
        own = "times_s" if cls is Times else "rates"
        if own in given:
            raise Misplaced("file", f"it holds the {own}; leave out one of them")
        try:
            interval_s = None if cls is Times else given.get("interval_s")
            interval_s = None if interval_s is None else float(interval_s)
            wrong = interval_s is not None and not 0 < interval_s < math.inf
        except (TypeError, ValueError):
            wrong = True
        if wrong:
            return handler({**given, own: [1.0]})  # which refuses the interval
        try:
            found = of_file((info.context or {}).get("base", Path()) / file, interval_s)
        except (OSError, ValueError) as error:
            raise Misplaced("file", text_of(error)) from None
        if not isinstance(found, cls):
            holds = "the time of each request" if isinstance(found, Times) else "rates by interval"
            raise Misplaced("kind", f"{file} holds {holds}; write kind: {found.kind}")
        read = {n: v for n, v in found if n in ("rates", "times_s", "interval_s")}
        made = handler({**read, **given, "file": None})
        made._said = found.said
        return made


class Trace(_OfFile):
    """A rate (requests per second) for each interval of `interval_s`. It ends with the last
    interval.

    Inside an interval arrivals are a Gamma process of that rate (`shape` 1: Poisson), which `burst`
    modulates (SHEPHERD §7: per-minute rates of a trace as Poisson, "stable", or MMPP, "bursty").

    Attributes:
        rates: requests per second, by interval.
        file: a file that holds them instead, relative to the document's folder.
        interval_s: length of an interval, seconds. A file with times says it itself.
        shape: shape parameter of the gaps inside an interval.
        burst: bursts inside the intervals.
    """

    kind: Literal["trace"] = "trace"
    rates: Annotated[list[NonNegativeFloat], Field(min_length=1)]
    interval_s: PositiveFloat = 1.0
    shape: PositiveFloat = 1.0
    burst: Burst | None = None

    @property
    def length_s(self) -> float:
        return len(self.rates) * self.interval_s

    @property
    def rate(self) -> float:
        """Mean rate, requests per second."""
        return float(np.mean(self.rates))

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        edges: Floats = np.arange(len(self.rates) + 1, dtype=float) * self.interval_s
        rates: Floats = np.array(self.rates, dtype=float)
        if self.burst is not None:
            switches, levels = self.burst.levels(self.length_s, rng)
            merged = np.union1d(edges, switches[switches < self.length_s])
            middle = (merged[1:] + merged[:-1]) / 2
            rates = (
                rates[np.searchsorted(edges, middle) - 1]
                * levels[np.searchsorted(switches, middle) - 1]
            )
            edges = np.asarray(merged, dtype=float)
        return _at_rates(edges, rates, duration_s, self.shape, rng)


class Times(_OfFile):
    """Explicit arrival times, seconds from the start.

    Attributes:
        times_s: arrival times, seconds from the start, in any order.
        file: a file that holds them instead, relative to the document's folder.
    """

    kind: Literal["times"] = "times"
    times_s: Annotated[list[NonNegativeFloat], Field(min_length=1)]

    @property
    def length_s(self) -> float:
        return float(np.nextafter(max(self.times_s), np.inf))

    @property
    def rate(self) -> float:
        """Mean rate, requests per second."""
        return len(self.times_s) / self.length_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        times = np.sort(np.array(self.times_s, dtype=float))
        return times[: np.searchsorted(times, duration_s)]


class Population(Frozen):
    """Many streams with heavy-tailed rates, assigned to the models round robin.

    It replaces the 46,000 streams of the Azure Functions trace in SHEPHERD §7, which has requests
    per minute. A stream's mean rate is log-normal. Its rate changes in every interval by a Gamma
    factor. Inside an interval, arrivals are Poisson ("stable"). With `burst` they are an MMPP for
    each stream ("bursty"), whose state is drawn anew in each interval.

    Attributes:
        rate: mean rate of all streams together, requests per second.
        streams: number of streams.
        interval_s: time for which a stream's rate is constant, seconds.
        burst: bursts of each stream, inside the intervals.
        sigma: standard deviation of the logarithm of a stream's mean rate.
        variation: coefficient of variation of a stream's rate from interval to interval.
        population_seed: seed of the streams' rates, which do not depend on the run's seed.
    """

    kind: Literal["population"] = "population"
    rate: PositiveFloat
    streams: PositiveInt = 46_000
    sigma: NonNegativeFloat = 2.5
    interval_s: PositiveFloat = 60.0
    variation: NonNegativeFloat = 0.5
    burst: Burst | None = None
    population_seed: NonNegativeInt = 0

    def stream_rates(self) -> Floats:
        """Mean rates of the streams, requests per second, shape (streams,)."""
        rng = np.random.default_rng([self.population_seed, 0])
        weights = np.exp(self.sigma * rng.standard_normal(self.streams))
        return np.asarray(self.rate * weights / weights.sum())

    def interval_rates(self, interval: int) -> Floats:
        """Rates of the streams in an interval, requests per second, shape (streams,)."""
        rates = self.stream_rates()
        if self.variation:
            shape = self.variation**-2
            rng = np.random.default_rng([self.population_seed, 1, interval])
            rates = rates * rng.gamma(shape, 1 / shape, self.streams)
        return rates

    def model_of(self, models: int) -> Ints:
        """Index of each stream's model, round robin, shape (streams,)."""
        return np.arange(self.streams) % models

    def draw(self, duration_s: float, rng: np.random.Generator) -> tuple[Floats, Ints]:
        """Arrivals in [0, duration_s): times (in no order) and streams, both of shape (n,)."""
        check_count(duration_s * self.rate)
        times, streams = [np.empty(0)], [np.empty(0, dtype=np.int64)]
        for interval in range(math.ceil(duration_s / self.interval_s)):
            start = interval * self.interval_s
            length = min(self.interval_s, duration_s - start)
            # At the peak rate all the time, then thinned to the state's rate.
            peak = self.burst.peak if self.burst else 1.0
            counts = rng.poisson(self.interval_rates(interval) * length * peak)
            active = np.flatnonzero(counts)
            row = np.repeat(np.arange(len(active)), counts[active])
            at = rng.random(len(row)) * length
            if self.burst and len(row):
                ends, bursting = self.burst.edges(len(active), length, rng)
                # Shift each row into a separate range, so that one sorted search does all rows.
                lanes = 2 * length * np.arange(len(active))
                flat = (np.minimum(ends, length) + lanes[:, None]).ravel()
                state = np.searchsorted(flat, at + lanes[row], side="right")
                in_burst = ((state - row * ends.shape[1]) % 2 == 1) ^ bursting[row]
                kept = in_burst | (rng.random(len(row)) < self.burst.calm / peak)
                at, row = at[kept], row[kept]
            times.append(start + at)
            streams.append(active[row])
        return np.concatenate(times), np.concatenate(streams)


def of_file(path: Path, interval_s: float | None = None) -> Trace | Times:
    """The arrivals in a file. `said` tells what it holds.

    Args:
        interval_s: length of an interval, seconds, where the file does not say it.

    Raises:
        OSError: it cannot be read.
        ValueError: it does not fit; with the line, and what to write.
    """
    found = read_arrivals(path, interval_s=interval_s)
    made: Trace | Times
    if found.rates is not None:
        made = Trace(rates=found.rates.tolist(), interval_s=found.interval_s)
    else:
        made = Times(times_s=np.asarray(found.times_s).tolist())
    made._said = f"{path}: {found.said}"
    return made


ArrivalProcess = Constant | Poisson | Gamma | Mmpp | Trace | Times
Arrivals = Annotated[ArrivalProcess, Field(discriminator="kind")]


def at_rate(process: ArrivalProcess, rate: float) -> ArrivalProcess:
    """The same process at a mean of `rate` requests per second.

    Raises:
        ValueError: the process has explicit times, so its rate cannot be chosen.
    """
    if isinstance(process, Times):
        raise ValueError("arrivals with explicit times_s have no rate to change; use kind: trace")
    if isinstance(process, Trace):
        if process.rate == 0:
            raise ValueError("rates are all 0, so the trace cannot be scaled to a rate")
        factor = rate / process.rate
        return process.model_copy(update={"rates": [r * factor for r in process.rates]})
    return process.model_copy(update={"rate": rate})


def check_count(expected: float) -> None:
    """Check the expected number of requests of a run.

    Raises:
        ValueError: it is above `MAX_REQUESTS`.
    """
    if not expected <= MAX_REQUESTS:
        raise ValueError(
            f"{expected:.3g} requests are more than a run may have ({MAX_REQUESTS:,}): "
            "lower the rate or the duration"
        )
