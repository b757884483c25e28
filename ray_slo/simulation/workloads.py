"""Workloads: when requests arrive, for which model, and by when they must be answered.

Every process is a unit-rate renewal process stretched to its rate, so two runs with the same seed
at different rates see the same pattern of arrivals (common random numbers: what makes
`goodput_search` smooth). All specs are pydantic models, so they read from YAML as they stand:

    arrivals: {kind: gamma, rate: 500, shape: 0.05}
    popularity: {zipf: 0.9}
    slo_mix: [{slo_ms: 50, share: 0.2}, {slo_ms: 200, share: 0.8}]
    sizes: {kind: log_normal, median: 80, sigma: 1.2}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from scipy.special import ndtr, ndtri

from ray_slo.core.cluster import Cluster
from ray_slo.core.documents import Strict

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_REQUESTS = 100_000_000  # in a run; their arrivals alone are 2 GB


class _Spec(Strict):
    model_config = ConfigDict(frozen=True)


def _renewal(total: float, shape: float, rng: np.random.Generator) -> Floats:
    """Arrivals of a unit-rate Gamma renewal process in [0, total), ascending.

    Raises:
        ValueError: they are more than `MAX_REQUESTS`.
    """
    _check_count(total)
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
    # The interval in which each falls; "right" skips those whose rate is 0.
    i = np.searchsorted(served, units, side="right") - 1
    return np.asarray(edges[i] + (units - served[i]) / rates[i])


class Burst(_Spec):
    """Two states, bursting and calm, that last exponentially long: what modulates an MMPP.

    Attributes:
        peak: rate in a burst over the mean rate, above 1 and at most
            (burst_s + calm_s) / burst_s, where nothing arrives between bursts.
        burst_s, calm_s: mean lengths of the states.
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
        """Of the time that is bursting."""
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


class Constant(_Spec):
    """One request every 1 / rate seconds; the first at `start_s`.

    Attributes:
        rate: requests per second.
        start_s: seconds from the start.
    """

    kind: Literal["constant"] = "constant"
    rate: PositiveFloat
    start_s: NonNegativeFloat = 0.0

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        _check_count(duration_s * self.rate)
        count = max(math.ceil((duration_s - self.start_s) * self.rate - 1e-9), 0)
        return self.start_s + np.arange(count) / self.rate


class Poisson(_Spec):
    """Independent arrivals at a mean of `rate` per second.

    Attributes:
        rate: requests per second.
    """

    kind: Literal["poisson"] = "poisson"
    rate: PositiveFloat

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        return _renewal(duration_s * self.rate, 1.0, rng) / self.rate


class Gamma(_Spec):
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


class Mmpp(_Spec):
    """Markov-modulated Poisson arrivals at a mean of `rate` per second, in bursts.

    Attributes:
        rate: requests per second, on average.
        burst: how high and how long bursts are.
    """

    kind: Literal["mmpp"] = "mmpp"
    rate: PositiveFloat
    burst: Burst

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        edges, levels = self.burst.levels(duration_s, rng)
        return _at_rates(edges, self.rate * levels, duration_s, 1.0, rng)


class Trace(_Spec):
    """A rate (requests per second) per interval of `interval_s`; ends with its last interval.

    Inside an interval arrivals are a Gamma process of that rate (`shape` 1: Poisson), which `burst`
    modulates (SHEPHERD §7: per-minute rates of a trace as Poisson, "stable", or MMPP, "bursty").

    Attributes:
        rates: requests per second, interval by interval.
        interval_s: length of each.
        shape: of the gaps inside an interval.
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


class Times(_Spec):
    """Explicit arrival times, seconds from the start.

    Attributes:
        times_s: in any order.
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


class Population(_Spec):
    """Very many streams with heavy-tailed rates, dealt out to the models round robin.

    Stands for the 46,000 streams of the Azure Functions trace in SHEPHERD §7, which give requests
    per minute: a stream's mean rate is log-normal, its rate changes every interval by a Gamma
    factor, and inside an interval arrivals are Poisson ("stable") or, with `burst`, an MMPP of the
    stream's own ("bursty"; its state is drawn anew in each interval).

    Attributes:
        rate: mean of all streams together, requests per second.
        streams: how many.
        interval_s: a stream's rate holds so long.
        burst: bursts of each stream, inside the intervals.
        sigma: standard deviation of the logarithm of a stream's mean rate.
        variation: coefficient of variation of a stream's rate from interval to interval.
        population_seed: of the streams' rates. They are the same whatever the run's seed.
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
        _check_count(duration_s * self.rate)
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
                # All rows one after the other, each in a range of its own: one sorted search.
                lanes = 2 * length * np.arange(len(active))
                flat = (np.minimum(ends, length) + lanes[:, None]).ravel()
                state = np.searchsorted(flat, at + lanes[row], side="right")
                in_burst = ((state - row * ends.shape[1]) % 2 == 1) ^ bursting[row]
                kept = in_burst | (rng.random(len(row)) < self.burst.calm / peak)
                at, row = at[kept], row[kept]
            times.append(start + at)
            streams.append(active[row])
        return np.concatenate(times), np.concatenate(streams)


ArrivalProcess = Constant | Poisson | Gamma | Mmpp | Trace | Times
Arrivals = Annotated[ArrivalProcess, Field(discriminator="kind")]


def _scaled(process: ArrivalProcess | Population, rate: float) -> ArrivalProcess | Population:
    if isinstance(process, Population):
        return process.model_copy(update={"rate": rate})
    return at_rate(process, rate)


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


class Zipf(_Spec):
    """Popularity of the i-th model (in the cluster's order) is proportional to i^-zipf.

    Attributes:
        zipf: the exponent.
    """

    zipf: NonNegativeFloat


class SloShare(_Spec):
    """A share of the requests that asks for an SLO of its own.

    Attributes:
        slo_ms: what it asks for.
        share: of the requests; shares are scaled to sum 1.
    """

    slo_ms: PositiveFloat
    share: PositiveFloat


class _Sizes(_Spec):
    """Sizes whose transform is normal, cut to 1 … `max_size` (drawn inside, not clipped to it)."""

    max_size: PositiveInt = 1000

    def quantiles(self, at: Floats) -> Ints:
        """Sizes at the quantiles `at`, each in (0, 1)."""
        raise NotImplementedError

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """`count` sizes. The first ones do not depend on how many follow."""
        return self.quantiles(rng.random(count))

    def _cut_normal(self, at: Floats, low: float, high: float) -> Floats:
        a, b = ndtr(low), ndtr(high)
        return np.asarray(ndtri(a + at * (b - a)))


class LogNormal(_Sizes):
    """Log-normal request sizes, what recommenders see (Kairos §7: the trace of Meta's queries).

    Attributes:
        median: of the sizes before the cut.
        sigma: standard deviation of the logarithm.
        max_size: largest size.
    """

    kind: Literal["log_normal"] = "log_normal"
    median: PositiveFloat
    sigma: PositiveFloat

    def quantiles(self, at: Floats) -> Ints:
        low, high = np.log(np.array([0.5, self.max_size + 0.5]) / self.median) / self.sigma
        sizes = self.median * np.exp(self.sigma * self._cut_normal(at, low, high))
        return np.clip(np.rint(sizes), 1, self.max_size).astype(np.int64)


class Gaussian(_Sizes):
    """Normal request sizes (Kairos §8.6).

    Attributes:
        mean, std: of the sizes before the cut.
        max_size: largest size.
    """

    kind: Literal["gaussian"] = "gaussian"
    mean: PositiveFloat
    std: PositiveFloat

    def quantiles(self, at: Floats) -> Ints:
        low, high = (np.array([0.5, self.max_size + 0.5]) - self.mean) / self.std
        sizes = self.mean + self.std * self._cut_normal(at, low, high)
        return np.clip(np.rint(sizes), 1, self.max_size).astype(np.int64)


class Measured(_Sizes):
    """Sizes as they were seen, drawn anew.

    Attributes:
        values: of requests, in any order.
        max_size: of no use here.
    """

    kind: Literal["measured"] = "measured"
    values: list[PositiveInt] = Field(min_length=1)

    def quantiles(self, at: Floats) -> Ints:
        values = np.sort(np.array(self.values, dtype=np.int64))
        return np.asarray(values[np.minimum((at * len(values)).astype(int), len(values) - 1)])


Sizes = Annotated[LogNormal | Gaussian | Measured, Field(discriminator="kind")]


@dataclass(frozen=True)
class Requests:
    """Columns of a generated workload, in order of arrival; all of shape (n,).

    Attributes:
        model: index into `models`.
        arrival, deadline: seconds from the start.
        size: items in each request; None where each has one.
    """

    models: Sequence[str]
    model: Ints
    arrival: Floats
    deadline: Floats
    size: Ints | None = None

    def __len__(self) -> int:
        return len(self.arrival)


class Workload(_Spec):
    """Arrivals for the models of a cluster.

    Attributes:
        arrivals: one process whose rate is shared by all models (each model gets an independent
            stream of its share; explicit times are dealt out at random), one process per model, or
            a population of streams.
        popularity: shares of the models, where `arrivals` is one process: Zipf, or a share per
            model (scaled to sum 1; models left out get none). Equal by default.
        slo_mix: SLOs that requests ask for instead of their model's, with their shares.
        sizes: items per request; one by default. A batch takes ℓ(its items).
    """

    arrivals: (
        Annotated[ArrivalProcess | Population, Field(discriminator="kind")] | dict[str, Arrivals]
    )
    popularity: Annotated[
        Zipf | dict[str, NonNegativeFloat] | None, Field(union_mode="left_to_right")
    ] = None
    slo_mix: list[SloShare] | None = None
    sizes: Sizes | None = None

    @model_validator(mode="after")
    def _check(self) -> Workload:
        if isinstance(self.arrivals, dict):
            if not self.arrivals:
                raise ValueError("arrivals must name at least one model")
            if self.popularity is not None:
                raise ValueError("popularity has no meaning beside arrivals per model")
        if isinstance(self.arrivals, Population) and self.popularity is not None:
            raise ValueError("popularity has no meaning beside a population of streams")
        if isinstance(self.popularity, dict) and not sum(self.popularity.values()) > 0:
            raise ValueError("popularity must give at least one model a positive share")
        return self

    @classmethod
    def poisson(cls, rate: float, **kwargs: Any) -> Workload:
        """Poisson arrivals of `rate` requests per second over all models."""
        return cls(arrivals=Poisson(rate=rate), **kwargs)

    @classmethod
    def changing(
        cls, rates: Mapping[str, Sequence[float]], period_s: float, **kwargs: Any
    ) -> Workload:
        """Poisson arrivals at `rates[model][i]` per second in the i-th period (Symphony §5.7)."""
        return cls(
            arrivals={m: Trace(rates=list(r), interval_s=period_s) for m, r in rates.items()},
            **kwargs,
        )

    @property
    def rate(self) -> float:
        """Mean arrivals per second over all models."""
        processes = self.arrivals.values() if isinstance(self.arrivals, dict) else [self.arrivals]
        return sum(p.rate for p in processes)

    def duration_s(self, given: float | None) -> float:
        """How long requests arrive: as given, else as long as the workload lasts.

        Raises:
            ValueError: neither is known.
        """
        if given is None and (given := self.length_s) is None:
            raise ValueError("duration_s is needed: the workload's arrivals go on for ever")
        return given

    @property
    def length_s(self) -> float | None:
        """How long the arrivals last, seconds; None where they go on for ever."""
        processes = self.arrivals.values() if isinstance(self.arrivals, dict) else [self.arrivals]
        lengths = [p.length_s if isinstance(p, Trace | Times) else math.inf for p in processes]
        return None if math.inf in lengths else max(lengths)

    def at_rate(self, rate: float) -> Workload:
        """The same workload at a total mean of `rate` requests per second."""
        if isinstance(self.arrivals, dict):
            factor = rate / self.rate
            arrivals: Any = {m: at_rate(p, p.rate * factor) for m, p in self.arrivals.items()}
        else:
            arrivals = _scaled(self.arrivals, rate)
        return self.model_copy(update={"arrivals": arrivals})

    def shares(self, models: Sequence[str]) -> Floats:
        """Share of the requests for each of `models`, summing to 1.

        Raises:
            ValueError: `popularity` names a model that is not there.
        """
        if isinstance(self.popularity, Zipf):
            shares = np.arange(1, len(models) + 1) ** -self.popularity.zipf
        elif self.popularity is not None:
            _check_models("popularity", self.popularity, models)
            shares = np.array([self.popularity.get(m, 0.0) for m in models])
        else:
            shares = np.ones(len(models))
        return np.asarray(shares / shares.sum())

    def generate(self, cluster: Cluster, duration_s: float, rng: np.random.Generator) -> Requests:
        """Draw the requests that arrive in [0, duration_s).

        Raises:
            ValueError: the workload names a model that the cluster does not have.
        """
        models = list(cluster.models)
        # A stream's draws do not depend on how many others took.
        *rngs, sizes_rng = rng.spawn(len(models) + 1)
        streams: list[Floats]
        if isinstance(self.arrivals, dict):
            _check_models("arrivals", self.arrivals, models)
            streams = [
                self.arrivals[m].times(duration_s, r) if m in self.arrivals else np.empty(0)
                for m, r in zip(models, rngs, strict=True)
            ]
        elif isinstance(self.arrivals, Population):
            times, stream = self.arrivals.draw(duration_s, rng)
            chosen = self.arrivals.model_of(len(models))[stream]
            streams = [times[chosen == i] for i in range(len(models))]
        elif isinstance(self.arrivals, Times):
            times = self.arrivals.times(duration_s, rng)
            chosen = rng.choice(len(models), size=len(times), p=self.shares(models))
            streams = [times[chosen == i] for i in range(len(models))]
        else:
            streams = []
            for i, share in enumerate(self.shares(models)):
                process = at_rate(self.arrivals, self.rate * share) if share > 0 else None
                if isinstance(process, Constant):  # models take turns rather than arrive together
                    start = process.start_s + i / len(models) / process.rate
                    process = process.model_copy(update={"start_s": start})
                streams.append(process.times(duration_s, rngs[i]) if process else np.empty(0))
        arrival = np.concatenate(streams)
        model = np.repeat(np.arange(len(models)), [len(s) for s in streams])
        order = np.argsort(arrival, kind="stable")
        arrival, model = arrival[order], model[order]
        if self.slo_mix:
            weights = np.array([s.share for s in self.slo_mix])
            slos = np.array([s.slo_ms / 1e3 for s in self.slo_mix])
            slo = slos[rng.choice(len(slos), size=len(arrival), p=weights / weights.sum())]
        else:
            slo = np.array([cluster.models[m].latency_slo_s for m in models])[model]
        size = self.sizes.draw(len(arrival), sizes_rng) if self.sizes else None
        return Requests(models, model, arrival, arrival + slo, size)


def changing_rates(
    models: Sequence[str],
    periods: int,
    mean_rate: float,
    rng: np.random.Generator,
    swing: float = 0.8,
) -> dict[str, list[float]]:
    """Rates per period that rise and fall slowly, for `Workload.changing`.

    The logarithm of a model's rate is a sum of waves of 1, 2 and 4 cycles with random phases and
    falling amplitudes. Stands for the unpublished video workload of Symphony §5.7.

    Args:
        mean_rate: of all models together, requests per second, over all periods.
        swing: amplitude of the slowest wave; 0 for constant rates.
    """
    cycles = np.array([1, 2, 4])
    phase = rng.random((len(models), 1, 3))
    at = (np.arange(periods) / periods)[None, :, None]
    waves = np.sin(2 * np.pi * (cycles * at + phase)) / cycles
    weights = np.exp(swing * waves.sum(axis=2)) * rng.exponential(size=(len(models), 1))
    rates = mean_rate * weights / weights.sum(axis=0).mean()
    return {m: row.tolist() for m, row in zip(models, rates, strict=True)}


def _check_count(expected: float) -> None:
    if not expected <= MAX_REQUESTS:
        raise ValueError(
            f"{expected:.3g} requests are more than a run may have ({MAX_REQUESTS:,}): "
            "lower the rate or the duration"
        )


def _check_models(field: str, given: Mapping[str, Any], models: Sequence[str]) -> None:
    if unknown := sorted(set(given) - set(models)):
        raise ValueError(
            f"{field} names unknown models {', '.join(unknown)}; "
            f"the cluster has {', '.join(models)}"
        )
