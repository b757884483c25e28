"""The question of how many workers a load needs, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_slo.core.cluster import DispatchDelay, Model
from ray_slo.planning import auto
from ray_slo.planning.catalogue import InstanceType
from ray_slo.simulation.report import in_ms
from ray_slo.simulation.workloads import Workload

Named = tuple[str, Mapping[str, Any]]
"""A policy's name and its arguments."""

KIND = "default"  # kind of the workers if there is no pool of instance types


@dataclass(frozen=True)
class Question:
    """A load, and how well it must be served.

    Args:
        models: models with a profile for each kind of worker; empty for a pipeline.
        workload: arrivals of every model, or at the pipeline's root.
        policies: name and arguments of each policy to compare.
        duration_s, warmup_s, latency_noise: arguments of `simulate` for each run.
        bad_rate: allowed share of late or dropped requests of each model.
        accuracy_floor: least mean accuracy of the requests in time, percent.
        seeds: the search uses the first seed; its result must pass with all others, too.
        guess: the number of workers with which the search begins; by default, the fluid limit.
        most: the largest number of workers, or of pools, in the search.
        types: instance types, each of which is a kind of worker; empty if all workers are alike.
        budget_per_hour: the most that a pool may cost per hour.
        pipeline: the problem of a pipeline; the search sets its demand and its workers.
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
    pipeline: auto.Problem | None = None


@dataclass(frozen=True)
class Figures:
    """What the simulator predicts. Each figure is the worst over the runs.

    Attributes:
        bad_rate: share of late or dropped requests of the worst model.
        p99_s: 99th percentile of the latency of answered requests; NaN if there are none.
        busy: mean share of the time in which a worker runs a batch.
        accuracy: mean accuracy of the requests in time, percent; None if it is not known.
        models: (bad rate, p99_s), by model.
        variants: share of the answered requests, by variant, in the first run.
    """

    bad_rate: float
    p99_s: float
    busy: float
    accuracy: float | None = None
    models: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    variants: Mapping[str, float] = field(default_factory=dict)

    def or_worse(self, other: Figures) -> Figures:
        """For each figure, the worse of both."""
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
        name: the policy, and what kind of answer it is.
        counts: workers by kind, or by variant in a pipeline; None if nothing passed.
        figures: what the simulator predicts; None if nothing was run.
        why: reasons and limits, in words.
        least: workers in the fluid limit. With fewer, every policy falls behind.
        cost_per_hour: cost of the pool.
        carries: the highest rate with at most the allowed bad requests, requests/s; None if it was
            not searched.
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
        """The answer as JSON, with times in ms and null for NaN."""
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
