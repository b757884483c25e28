"""Problems and plans of HERD."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_slo.core.arguments import Above0, Count, NonNegative, check_fields
from ray_slo.planning.milp import Backend


@dataclass(frozen=True)
class ModelStream:
    """All streams of one model.

    Attributes:
        load: number of workers that its average load needs: Σ rate_i / T_i.
        memory_mb: memory of the model, in MB.
    """

    name: str
    load: NonNegative
    memory_mb: NonNegative
    affinity_set: int = 0


@dataclass(frozen=True)
class Problem:
    """A planning problem.

    Args:
        models: the model-streams.
        workers: N, the number of workers in the cluster.
        group_worker_limit: Ḡ, the largest number of workers of one scheduler.
        memory_mb: memory of a worker for models, in MB.
        max_groups: largest number of groups. None: the number of workers.
        min_headroom: least headroom of a group: its workers, divided by the workers that its
            average load needs. 0 is the published ILP, which allows groups that cannot sustain even
            their average load.
        exact_cells: if bound and plan do not meet, the ILP is solved if models × groups is at most
            this. It takes at most `time_limit_s`, and uses `backend` and `seed`.

    Raises:
        ValueError: a field is not valid. The message names it.
    """

    models: tuple[ModelStream, ...]
    workers: Count
    group_worker_limit: Count
    memory_mb: Above0
    max_groups: Count | None = None
    min_headroom: NonNegative = 0.0
    exact_cells: int = 150
    time_limit_s: NonNegative = 10.0
    backend: Backend = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models must not be empty")
        if len({m.name for m in self.models}) < len(self.models):
            raise ValueError("models must have names of their own")
        check_fields(self)
        for m in self.models:
            check_fields(m, f" of model {m.name!r}")

    @property
    def groups(self) -> int:
        most = min(self.workers, len(self.models))
        return most if self.max_groups is None else min(self.max_groups, most)


@dataclass(frozen=True)
class Group:
    """A serving group. `load` is the number of workers that the average load of all its models
    needs."""

    workers: int
    models: tuple[str, ...]
    load: float

    @property
    def headroom(self) -> float:
        """Workers divided by `load`. Below 1, the group is overloaded on average."""
        return self.workers / self.load if self.load else math.inf


@dataclass(frozen=True)
class Plan:
    """A plan of HERD. No plan has a larger least burst tolerance than `bound`. `unplaced` has the
    models in no group; only the best effort of an infeasible problem has some."""

    groups: tuple[Group, ...]
    burst_tolerance: float
    bound: float
    spare_workers: int
    unplaced: tuple[str, ...]
    explanation: str

    @property
    def gap(self) -> float:
        """Share by which the best plan may be better. 0 means that this plan is proven optimal."""
        if self.bound <= self.burst_tolerance:
            return 0.0
        return self.bound / self.burst_tolerance - 1 if self.burst_tolerance else math.inf

    @property
    def headroom(self) -> float:
        return min((g.headroom for g in self.groups), default=math.inf)
