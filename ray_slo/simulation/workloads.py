"""Workloads: the arrival times of requests, their models and their deadlines.

All specs are pydantic models, which YAML can be read into:

    arrivals: {kind: gamma, rate: 500, shape: 0.05}
    popularity: {zipf: 0.9}
    slo_mix: [{slo_ms: 50, share: 0.2}, {slo_ms: 200, share: 0.8}]
    sizes: {kind: log_normal, median: 80, sigma: 1.2}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from scipy.special import ndtr, ndtri

from ray_slo.core.cluster import Cluster
from ray_slo.core.documents import Frozen, SloMs
from ray_slo.core.explain import Misplaced
from ray_slo.core.names import listed, nearest
from ray_slo.core.text import quoted
from ray_slo.simulation.arrivals import (
    ArrivalProcess,
    Arrivals,
    Constant,
    Floats,
    Ints,
    Poisson,
    Population,
    Times,
    Trace,
    at_rate,
)


class Zipf(Frozen):
    """Popularity of the i-th model (in the cluster's order) is proportional to i^-zipf.

    Attributes:
        zipf: the exponent.
    """

    zipf: NonNegativeFloat


class SloShare(Frozen):
    """A share of the requests with its own SLO.

    Attributes:
        slo_ms: the SLO, milliseconds.
        share: share of the requests; the shares are scaled to the sum 1.
    """

    slo_ms: SloMs
    share: PositiveFloat


class _Sizes(Frozen):
    """Sizes with a normal transform, within 1 … `max_size`. They are drawn inside this range, not
    clipped to it."""

    max_size: PositiveInt = 1000

    def quantiles(self, at: Floats) -> Ints:
        """Sizes at the quantiles `at`, each in (0, 1)."""
        raise NotImplementedError

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """Draw `count` sizes. The first ones do not depend on `count`."""
        return self.quantiles(rng.random(count))

    def _cut_normal(self, at: Floats, low: float, high: float) -> Floats:
        a, b = ndtr(low), ndtr(high)
        return np.asarray(ndtri(a + at * (b - a)))


class LogNormal(_Sizes):
    """Log-normal request sizes, like those of recommenders (Kairos §7: the trace of Meta's
    queries).

    Attributes:
        median: median of the sizes before the cut, items.
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
        mean, std: mean and standard deviation of the sizes before the cut, items.
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
    """Sizes drawn from measured ones.

    Attributes:
        values: measured sizes of requests, in any order.
        max_size: not used.
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
        size: items in each request; None if each has one.
        task: index into `tasks`; None if each task has its model's name.
    """

    models: Sequence[str]
    model: Ints
    arrival: Floats
    deadline: Floats
    size: Ints | None = None
    task: Ints | None = None
    tasks: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.arrival)


class Workload(Frozen):
    """Arrivals for the models of a cluster.

    Attributes:
        arrivals: one process, one process per model, or a population of streams. The models share
            the rate of one process: each model gets an independent stream with its share. Explicit
            times are assigned to models at random.
        popularity: shares of the models, if `arrivals` is one process: Zipf, or a share per model.
            They are scaled to the sum 1, and models that are left out get no requests. Default:
            equal shares.
        slo_mix: SLOs of requests instead of their model's, with their shares.
        sizes: distribution of the items per request; default: one. A batch takes ℓ(its items).
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
                raise Misplaced("arrivals", "must name at least one model, got {}")
            if self.popularity is not None:
                raise Misplaced("popularity", "it has no meaning beside arrivals per model")
        if isinstance(self.arrivals, Population) and self.popularity is not None:
            raise Misplaced("popularity", "it has no meaning beside a population of streams")
        if isinstance(self.popularity, dict) and not sum(self.popularity.values()) > 0:
            raise Misplaced(
                "popularity",
                f"must give at least one model a positive share, got {quoted(self.popularity)}",
            )
        return self

    @property
    def said(self) -> list[str]:
        """What was read from files, in words."""
        processes = self.arrivals.values() if isinstance(self.arrivals, dict) else [self.arrivals]
        return [p.said for p in processes if isinstance(p, Trace | Times) and p.said]

    def check_models(self, models: Sequence[str]) -> None:
        """Refuse names that are not in `models`.

        Raises:
            ValueError: names the field.
        """
        for field in ("arrivals", "popularity"):
            if isinstance(given := getattr(self, field), dict):
                for unknown in [name for name in given if name not in models]:
                    law = " (or {zipf: EXPONENT} alone)" if field == "popularity" else ""
                    raise Misplaced(
                        f"{field}.{unknown}",
                        f"no such model; the cluster has {listed(models)}{law}"
                        f"{nearest(unknown, models)}",
                    )

    @classmethod
    def poisson(cls, rate: float, **kwargs: Any) -> Workload:
        """Poisson arrivals of `rate` requests per second over all models."""
        return cls(arrivals=Poisson(rate=rate), **kwargs)

    @property
    def rate(self) -> float:
        """Mean arrivals per second over all models."""
        processes = self.arrivals.values() if isinstance(self.arrivals, dict) else [self.arrivals]
        return sum(p.rate for p in processes)

    def duration_s(self, given: float | None) -> float:
        """How long requests arrive, seconds: as given, or else the workload's length.

        Raises:
            ValueError: neither is known.
        """
        if given is None and (given := self.length_s) is None:
            raise ValueError("duration_s is needed: the workload's arrivals go on for ever")
        return given

    @property
    def length_s(self) -> float | None:
        """How long the arrivals last, seconds; None if they do not end."""
        processes = self.arrivals.values() if isinstance(self.arrivals, dict) else [self.arrivals]
        lengths = [p.length_s if isinstance(p, Trace | Times) else math.inf for p in processes]
        return None if math.inf in lengths else max(lengths)

    def at_rate(self, rate: float) -> Workload:
        """The same workload at a total mean of `rate` requests per second."""
        if isinstance(self.arrivals, dict):
            factor = rate / self.rate
            arrivals: Any = {m: at_rate(p, p.rate * factor) for m, p in self.arrivals.items()}
        elif isinstance(self.arrivals, Population):
            arrivals = self.arrivals.model_copy(update={"rate": rate})
        else:
            arrivals = at_rate(self.arrivals, rate)
        return self.model_copy(update={"arrivals": arrivals})

    def shares(self, models: Sequence[str]) -> Floats:
        """Share of the requests for each of `models`, summing to 1.

        Raises:
            ValueError: `popularity` names a model that is not there.
        """
        if isinstance(self.popularity, Zipf):
            shares = np.arange(1, len(models) + 1) ** -self.popularity.zipf
        elif self.popularity is not None:
            self.check_models(models)
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
        # A stream's draws do not depend on the other streams.
        *rngs, sizes_rng = rng.spawn(len(models) + 1)
        streams: list[Floats]
        if isinstance(self.arrivals, dict):
            self.check_models(models)
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
