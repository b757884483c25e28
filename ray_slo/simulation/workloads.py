"""Workloads: when requests arrive, for which model, and by when they must be answered.

Every process is a unit-rate renewal process stretched to its rate, so two runs with the same seed
at different rates see the same pattern of arrivals (common random numbers: what makes
`goodput_search` smooth). All specs are pydantic models, so they read from YAML as they stand:

    arrivals: {kind: gamma, rate: 500, shape: 0.05}
    popularity: {zipf: 0.9}
    slo_mix: [{slo_ms: 50, share: 0.2}, {slo_ms: 200, share: 0.8}]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

from ray_slo.core.cluster import Cluster

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _renewal(total: float, shape: float, rng: np.random.Generator) -> Floats:
    """Arrivals of a unit-rate Gamma renewal process in [0, total), ascending."""
    blocks: list[Floats] = []
    reached = 0.0
    while reached < total:
        count = int(total - reached + 4 * math.sqrt(total / shape)) + 16
        gaps = rng.exponential(size=count) if shape == 1 else rng.gamma(shape, 1 / shape, count)
        blocks.append(reached + np.cumsum(gaps))
        reached = float(blocks[-1][-1])
    times = np.concatenate(blocks) if blocks else np.empty(0)
    return times[: np.searchsorted(times, total)]


class Constant(_Spec):
    """One request every 1 / rate seconds; the first at `start_s`."""

    kind: Literal["constant"] = "constant"
    rate: PositiveFloat
    start_s: NonNegativeFloat = 0.0

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        count = max(math.ceil((duration_s - self.start_s) * self.rate - 1e-9), 0)
        return self.start_s + np.arange(count) / self.rate


class Poisson(_Spec):
    """Independent arrivals at a mean of `rate` per second."""

    kind: Literal["poisson"] = "poisson"
    rate: PositiveFloat

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        return _renewal(duration_s * self.rate, 1.0, rng) / self.rate


class Gamma(_Spec):
    """Gamma-distributed gaps: shape 1 is Poisson, smaller is burstier (Symphony §5.3: 0.05)."""

    kind: Literal["gamma"] = "gamma"
    rate: PositiveFloat
    shape: PositiveFloat

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        return _renewal(duration_s * self.rate, self.shape, rng) / self.rate


class Trace(_Spec):
    """A rate (requests per second) per interval of `interval_s`; ends with its last interval.

    Inside an interval arrivals are a Gamma process of that rate (`shape` 1: Poisson).
    """

    kind: Literal["trace"] = "trace"
    rates: Annotated[list[NonNegativeFloat], Field(min_length=1)]
    interval_s: PositiveFloat = 1.0
    shape: PositiveFloat = 1.0

    @property
    def length_s(self) -> float:
        return len(self.rates) * self.interval_s

    @property
    def rate(self) -> float:
        """Mean rate, requests per second."""
        return float(np.mean(self.rates))

    def times(self, duration_s: float, rng: np.random.Generator) -> Floats:
        edges = np.arange(len(self.rates) + 1) * self.interval_s
        served = np.concatenate([[0.0], np.cumsum(np.array(self.rates) * self.interval_s)])
        units = _renewal(float(np.interp(duration_s, edges, served)), self.shape, rng)
        # The interval in which each falls; "right" skips those whose rate is 0.
        i = np.searchsorted(served, units, side="right") - 1
        return np.asarray(edges[i] + (units - served[i]) / np.array(self.rates)[i])


class Times(_Spec):
    """Explicit arrival times, seconds from the start."""

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


Arrivals = Annotated[Constant | Poisson | Gamma | Trace | Times, Field(discriminator="kind")]
ArrivalProcess = Constant | Poisson | Gamma | Trace | Times


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
    """Popularity of the i-th model (in the cluster's order) is proportional to i^-zipf."""

    zipf: NonNegativeFloat


class SloShare(_Spec):
    """A share of the requests that asks for an SLO of its own."""

    slo_ms: PositiveFloat
    share: PositiveFloat


@dataclass(frozen=True)
class Requests:
    """Columns of a generated workload, in order of arrival; all of shape (n,).

    Attributes:
        model: index into `models`.
        arrival, deadline: seconds from the start.
    """

    models: Sequence[str]
    model: Ints
    arrival: Floats
    deadline: Floats

    def __len__(self) -> int:
        return len(self.arrival)


class Workload(_Spec):
    """Arrivals for the models of a cluster.

    Attributes:
        arrivals: one process whose rate is shared by all models (each model gets an independent
            stream of its share; explicit times are dealt out at random), or one process per model.
        popularity: shares of the models, where `arrivals` is one process: Zipf, or a share per
            model (scaled to sum 1; models left out get none). Equal by default.
        slo_mix: SLOs that requests ask for instead of their model's, with their shares.
    """

    arrivals: Arrivals | dict[str, Arrivals]
    popularity: Annotated[
        Zipf | dict[str, NonNegativeFloat] | None, Field(union_mode="left_to_right")
    ] = None
    slo_mix: list[SloShare] | None = None

    @model_validator(mode="after")
    def _check(self) -> Workload:
        if isinstance(self.arrivals, dict):
            if not self.arrivals:
                raise ValueError("arrivals must name at least one model")
            if self.popularity is not None:
                raise ValueError("popularity has no meaning beside arrivals per model")
        if isinstance(self.popularity, dict) and not sum(self.popularity.values()) > 0:
            raise ValueError("popularity must give at least one model a positive share")
        return self

    @classmethod
    def poisson(cls, rate: float, **kwargs: Any) -> Workload:
        """Poisson arrivals of `rate` requests per second over all models."""
        return cls(arrivals=Poisson(rate=rate), **kwargs)

    @property
    def rate(self) -> float:
        """Mean arrivals per second over all models."""
        processes = self.arrivals.values() if isinstance(self.arrivals, dict) else [self.arrivals]
        return sum(p.rate for p in processes)

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
        rngs = rng.spawn(len(models))  # a stream's draws do not depend on how many others took
        streams: list[Floats]
        if isinstance(self.arrivals, dict):
            _check_models("arrivals", self.arrivals, models)
            streams = [
                self.arrivals[m].times(duration_s, r) if m in self.arrivals else np.empty(0)
                for m, r in zip(models, rngs, strict=True)
            ]
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
        return Requests(models, model, arrival, arrival + slo)


def _check_models(field: str, given: Mapping[str, Any], models: Sequence[str]) -> None:
    if unknown := sorted(set(given) - set(models)):
        raise ValueError(
            f"{field} names unknown models {', '.join(unknown)}; "
            f"the cluster has {', '.join(models)}"
        )
