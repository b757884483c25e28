"""Plans of `auto`: what every worker loads and serves, the expected results, and prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_slo.core.cluster import Assigned
from ray_slo.planning.auto.limits import Found

Step = Literal["hardware", "accuracy", "cost", "share"]
"""hardware: the most accurate variants are enough, on the cheapest workers; accuracy: they are not
enough, so the highest accuracy; cost: the cheapest workers that keep the accuracy floor; share: not
all demand can be served, so the largest share of it."""


@dataclass(frozen=True)
class Slot:
    """What one worker loads and serves.

    Attributes:
        kind: kind of the worker.
        parts: its assignments; the load is the planned requests per second for this worker.
        variants: its loaded variants: those of the parts, in their order.
    """

    kind: str
    parts: tuple[Assigned, ...]
    variants: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For logs and status."""
        parts = [
            {"variant": part.variant, "batch_size": part.batch_size, "load": part.load}
            for part in self.parts
        ]
        return {"kind": self.kind, "parts": parts}


@dataclass(frozen=True)
class Prices:
    """Prices of the plan's scarce resources, in points of accuracy (percent of one answer).

    Attributes:
        worker_s: value of one more worker-second, by kind; 0 if workers have time left.
        request: value of one more request at a task, minus what it takes from other requests. 0 if
            it would only displace another request of the same value.
    """

    worker_s: Mapping[str, float] = field(default_factory=dict)
    request: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        workers: by kind, of every kind of the problem.
        slots: one for each worker that has something to serve. Workers that only `min_workers` or
            `present` asks for are counted in `workers`, and take part in `slots` where they help.
        accuracy: percent, over the requests that are served, mean of the last tasks; 0 if none are.
        served: share of the demand that is planned for, by stream.
        bad_rate: share of the demand that would be late or refused with the planned batches of the
            planned variants alone: what is not planned for, and what bursts make late. What is
            expected, as workers do more than planned in bursts, says `expected.py`.
        cost_per_hour: of `workers`.
        prices: see `Prices`.
        rest_s: by task and SLO class, the time that the rest of a request's path needs after the
            task: in the plan's batches, waiting and communication included; 0 at the last tasks.
        step: which step found it.
        explanation: the plan in words.
        swaps: workers on which a variant is loaded in the place of others.
        gap: no other plan can improve the objective of `step` by more than this share of it.
        found: what the next plan may begin with; see `limits.py`.
        group_of: group of every model, where workers are in groups.
    """

    workers: Mapping[str, int]
    slots: tuple[Slot, ...]
    accuracy: float
    served: Mapping[str, float]
    bad_rate: float
    cost_per_hour: float
    prices: Prices
    rest_s: Mapping[str, Mapping[str, float]]
    step: Step
    explanation: str
    swaps: int = 0
    gap: float = 0.0
    found: Found | None = field(default=None, repr=False, compare=False)
    group_of: Mapping[str, str] = field(default_factory=dict)
