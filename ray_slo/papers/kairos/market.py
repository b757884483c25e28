"""What Kairos chooses from, and what it chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.arguments import Positive, Share, check_fields
from ray_slo.core.profiles import LatencyProfile
from ray_slo.planning.catalogue import InstanceType

Configuration = dict[str, int]
"""Number of instances by name of type. Missing types are not rented."""


@dataclass(frozen=True)
class Market:
    """What there is to rent: instance types, a budget, and the requests to serve.

    Attributes:
        types: instance types to choose from.
        profiles: ℓ(size) by name of type, for one request of that size at a time.
        latency_slo_s: SLO of every request, in seconds.
        sizes: sizes of recent requests, shape (n,). The plan is for their distribution.
        budget_per_hour: upper limit of the cost.
        xi: share of the SLO that may be used, as in the policy.
        base: name of the base type. The default is the type that serves the mix at the least cost,
            of those that meet the SLO at every size.
    """

    types: Sequence[InstanceType]
    profiles: Mapping[str, LatencyProfile]
    latency_slo_s: Positive
    sizes: Sequence[int] | NDArray[Any]
    budget_per_hour: Positive
    xi: Share = 0.98
    base: str | None = None

    def __post_init__(self) -> None:
        names = [t.name for t in self.types]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"types must be different and at least one, got {names}")
        if missing := [n for n in names if n not in self.profiles]:
            raise ValueError(f"profiles has none for {', '.join(missing)}")
        if self.base is not None and self.base not in names:
            raise ValueError(f"base must be one of {', '.join(names)}, got {self.base!r}")
        check_fields(self)
        sizes = np.asarray(self.sizes)
        if sizes.ndim != 1 or len(sizes) == 0 or sizes.min() < 1:
            raise ValueError("sizes must be a non-empty list of sizes of at least 1")


@dataclass(frozen=True)
class Rented:
    """A configuration and its reason.

    Attributes:
        counts: number of rented instances by type.
        cost_per_hour: total cost.
        bound: upper bound on its throughput, requests per second.
        explanation: the choice in words.
    """

    counts: Configuration
    cost_per_hour: float
    bound: float
    explanation: str


@dataclass(frozen=True)
class Found:
    """Result of a search by evaluation.

    Attributes:
        counts: the best configuration that was evaluated.
        throughput: result of `evaluate` for it.
        evaluated: configurations and their throughputs, in order of evaluation.
        space: number of configurations in the search space.
    """

    counts: Configuration
    throughput: float
    evaluated: tuple[tuple[Configuration, float], ...] = field(repr=False)
    space: int = 0
