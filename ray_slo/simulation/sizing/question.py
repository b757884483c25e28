"""The question what it takes to serve a load, and what an answer holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_slo.core.cluster import DispatchDelay, Model
from ray_slo.planning import loki
from ray_slo.planning.catalogue import InstanceType
from ray_slo.simulation.report import in_ms
from ray_slo.simulation.workloads import Workload

Named = tuple[str, Mapping[str, Any]]
"""A policy's name and its arguments."""

KIND = "default"  # of workers, where no pool names some


@dataclass(frozen=True)
class Question:
    """What is to be served, and how well.

    Args:
        models: with profiles for each kind of worker; none for a pipeline.
        workload: arrivals, for every model or at the pipeline's root.
        policies: name and arguments.
        duration_s, warmup_s, latency_noise: of each run, as in `simulate`.
        bad_rate: share of late or dropped requests that is allowed, of any model.
        accuracy_floor: mean over the requests in time, percent.
        seeds: the first searches, the others confirm.
        guess: where the search for a number of workers begins; by default the fluid limit.
        most: workers, or pools that are tried.
        types: of instances, each a kind of worker; none where all workers are alike.
        budget_per_hour: of a pool.
        pipeline: its `demand` and `workers` are filled in.
    """

    models: tuple[Model, ...]
    workload: Workload
    policies: tuple[Named, ...]
    duration_s: float
    warmup_s: float = 0.0
    latency_noise: float = 0.0
    delay: DispatchDelay = field(default_factory=DispatchDelay)
    bad_rate: float = 0.01
    accuracy_floor: float = 0.0
    seeds: tuple[int, ...] = (0, 1)
    guess: int | None = None
    most: int = 1000
    types: tuple[InstanceType, ...] = ()
    budget_per_hour: float | None = None
    pipeline: loki.Problem | None = None


@dataclass(frozen=True)
class Figures:
    """What the simulator predicts: the worst of the runs.

    Attributes:
        bad_rate: of the worst model.
        p99_s: latency of those that were answered; NaN if none was.
        busy: mean share of the time in which a worker runs a batch.
        accuracy: percent, of the requests in time; None where it is not known.
        models: bad rate and p99_s by model.
        variants: shares of the requests that were answered, of the first run.
    """

    bad_rate: float
    p99_s: float
    busy: float
    accuracy: float | None = None
    models: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    variants: Mapping[str, float] = field(default_factory=dict)

    def or_worse(self, other: Figures) -> Figures:
        """The worst of both."""
        known = [a for a in (self.accuracy, other.accuracy) if a is not None]
        return Figures(
            max(self.bad_rate, other.bad_rate),
            float(np.fmax(self.p99_s, other.p99_s)),
            max(self.busy, other.busy),
            min(known, default=None),
            {
                m: (max(a, other.models[m][0]), float(np.fmax(b, other.models[m][1])))
                for m, (a, b) in self.models.items()
            },
            self.variants,
        )


@dataclass(frozen=True)
class Answer:
    """One way to serve the load.

    Attributes:
        name: of the policy, or what kind of answer it is.
        counts: workers by kind, or by variant in a pipeline; None where nothing passed.
        figures: predicted for it; None where nothing was run.
        why: in words: limits, reasons, where it comes from.
        least: workers in the fluid limit: no policy does with fewer for long.
        cost_per_hour: of a pool.
        carries: requests per second that it sustains at the bad rate, where that was searched.
        probes: (number, bad rate) of every run, in order.
    """

    name: str
    counts: Mapping[str, int] | None
    figures: Figures | None
    why: str = ""
    least: int | None = None
    cost_per_hour: float | None = None
    carries: float | None = None
    probes: tuple[tuple[int, float], ...] = ()

    @property
    def workers(self) -> int | None:
        return None if self.counts is None else sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """Times in ms; NaN is null."""
        f = self.figures
        return {
            "name": self.name,
            "workers": self.workers,
            "counts": None if self.counts is None else dict(self.counts),
            "cost_per_hour": self.cost_per_hour,
            "bad_rate": f and f.bad_rate,
            "p99_ms": f and in_ms(f.p99_s),
            "busy": f and f.busy,
            "accuracy": f and f.accuracy,
            "variants": dict(f.variants) if f else {},
            "models": {
                m: {"bad_rate": bad, "p99_ms": in_ms(p99)}
                for m, (bad, p99) in (f.models if f else {}).items()
            },
            "fluid_limit": self.least,
            "carries_per_s": self.carries,
            "why": self.why,
            "probes": [list(p) for p in self.probes],
        }
