"""Plans of `auto`: the work of every worker, the expected results, and prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ray_slo.core.cluster import Assigned
from ray_slo.planning.auto.limits import Found

Step = Literal["hardware", "accuracy", "cost", "share"]
"""The step that found a plan.

* hardware: the cheapest workers that serve all demand with the most accurate variants.
* accuracy: these variants are too slow, so the highest accuracy for all demand.
* cost: the cheapest workers that keep the accuracy floor.
* share: not all demand can be served, so the largest share of it."""


@dataclass(frozen=True)
class Slot:
    """The work of one worker.

    Attributes:
        kind: kind of the worker.
        parts: assignments of the worker. Their load is the planned requests per second.
        variants: variants that the worker loads. Those of the parts come first, in their order.
    """

    kind: str
    parts: tuple[Assigned, ...]
    variants: tuple[str, ...]


@dataclass(frozen=True)
class Prices:
    """Prices of the plan's scarce resources, in points of accuracy (percent of one answer).

    Attributes:
        worker_s: value of one more worker-second, by kind. It is 0 if workers have time left.
        request: value of one more request at a task, minus the value that other requests lose. It
            is 0 if the request would only displace another one of the same value.
    """

    worker_s: Mapping[str, float] = field(default_factory=dict)
    request: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A plan for an application.

    Attributes:
        workers: number of workers, for every kind of the problem.
        slots: work of each worker that serves something. Workers that run only because of
            `min_workers` or `present` count in `workers`. They have a slot if they are useful.
        accuracy: mean accuracy over the served requests, in percent: the mean of the last tasks. 0
            if no request is served.
        served: share of the demand that is planned for, by stream.
        bad_rate: share of the demand that would be late or refused with only the planned batches
            and variants. It counts the demand that is not planned for, and requests that bursts
            make late. In bursts, workers do more than planned; `expected.py` predicts that.
        cost_per_hour: cost of `workers`.
        prices: see `Prices`.
        step: the step that found the plan.
        explanation: the plan in words.
        swaps: number of variants that are loaded on workers with other variants.
        gap: no other plan can improve the objective of `step` by more than this share of it.
        found: limits from which the next plan may start; see `limits.py`.
        group_of: group of every model, if workers are in groups.
        paths: share of each path of variants to a last task, by stream.
    """

    workers: Mapping[str, int]
    slots: tuple[Slot, ...]
    accuracy: float
    served: Mapping[str, float]
    bad_rate: float
    cost_per_hour: float
    prices: Prices
    step: Step
    explanation: str
    swaps: int = 0
    gap: float = 0.0
    found: Found | None = field(default=None, repr=False, compare=False)
    group_of: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Mapping[tuple[str, ...], float]] = field(default_factory=dict, repr=False)
