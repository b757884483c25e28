"""Problems and plans of the partition."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_slo.core.arguments import AtLeast0, Count, NonNegative, check_fields
from ray_slo.planning.milp import Backend


@dataclass(frozen=True)
class Model:
    """A model: its requests per second, and the memory of its weights and of its execution, in
    MB."""

    name: str
    rate: NonNegative
    static_mb: NonNegative
    dynamic_mb: NonNegative = 0.0


@dataclass(frozen=True)
class Problem:
    """A partitioning problem.

    Args:
        models: the m models.
        sub_clusters: l, the number of sub-clusters.
        max_rate: R_max, the requests per second that one dispatcher can handle.
        max_memory_mb: S_max, the memory of a worker, in MB.
        memory_weight: w, the requests per second that count as much as 1 MB of ΔS. None means
            R̄ / S̄; both spreads then count as shares of their averages.
        current: present sub-cluster of each model, shape (m,). −1 for a new model. None at the
            start.
        change_cost: c, the cost of loading or unloading each model, shape (m,). None: 1.
        max_change_cost: C_max, the largest total cost of changes.
        tolerance: if the spread is below this share of the averages, the MILP is not solved.
        time_limit_s: time limit of the MILP, in seconds. With 0, it is not solved.

    Raises:
        ValueError: a field is not valid. The message names it.
    """

    models: tuple[Model, ...]
    sub_clusters: Count
    max_rate: AtLeast0 = math.inf
    max_memory_mb: AtLeast0 = math.inf
    memory_weight: NonNegative | None = None
    current: tuple[int, ...] | None = None
    change_cost: tuple[float, ...] | None = None
    max_change_cost: AtLeast0 = math.inf
    tolerance: AtLeast0 = 1e-3
    time_limit_s: AtLeast0 = 10.0
    backend: Backend = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        count, parts = len(self.models), self.sub_clusters
        if not count:
            raise ValueError("models must not be empty")
        if len({m.name for m in self.models}) < count:
            raise ValueError("models must have names of their own")
        check_fields(self)
        for m in self.models:
            check_fields(m, f" of model {m.name!r}")
        if self.current is not None:
            if len(self.current) != count:
                raise ValueError(f"current has {len(self.current)} entries for {count} models")
            if bad := [j for j in self.current if not -1 <= j < parts]:
                raise ValueError(
                    f"current: no sub-cluster {bad[0]} among {parts} (−1 is a new model)"
                )
        if self.change_cost is not None and (
            len(self.change_cost) != count or not all(c >= 0 for c in self.change_cost)
        ):
            raise ValueError(f"change_cost must be {count} numbers of at least 0")


@dataclass(frozen=True)
class SubCluster:
    """A sub-cluster."""

    models: tuple[str, ...]
    rate: float
    static_mb: float


@dataclass(frozen=True)
class Plan:
    """A partition. `rate_spread` and `memory_spread` are ΔR and ΔS. `objective` is ΔR + w·ΔS, and
    no partition has one below `bound`. `gap` is the distance of the two, as a share of R̄ + w·S̄.
    `moved` has the models whose sub-cluster changes."""

    sub_clusters: tuple[SubCluster, ...]
    rate_spread: float
    memory_spread: float
    objective: float
    bound: float
    gap: float
    moved: tuple[str, ...]
    change_cost: float
    unplaced: tuple[str, ...]
    explanation: str
