"""Problems of Loki: tasks with variants, a demand, workers, an SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import Field

from ray_slo.core.arguments import Above0, Count, NonNegative, check_fields
from ray_slo.core.demand import poisson_rate
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import WAITING_FACTOR
from ray_slo.planning.milp import Backend


@dataclass(frozen=True)
class Variant:
    """A network for one task.

    Args:
        name: unique in the pipeline.
        accuracy: accuracy of this network alone, in percent.
        profile: latency by batch size on the cluster's workers.
        factors: number of requests for each child task per request: the paper's multiplicative
            factor times the branch ratio. A missing child has 1.
    """

    name: str
    accuracy: float
    profile: LatencyProfile
    factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A node of the pipeline. The root has no parent."""

    name: str
    variants: tuple[Variant, ...]
    parent: str | None = None


@dataclass(frozen=True)
class Problem:
    """A planning problem.

    Args:
        tasks: a rooted tree.
        demand: D, mean requests per second at the root.
        workers: S, number of workers of one kind.
        slo_s: L, end-to-end SLO, in seconds.
        batch_sizes: B, allowed batch sizes. A variant's profile limits them too.
        waiting_factor: time of a request at a task including the wait, as a multiple of the time of
            a batch. 2 is the paper's "SLO/2".
        communication_s: delay per server on the path, in seconds (§4.2).
        any_route: true. Every path through loaded configurations is fast enough, and a variant has
            one batch size. The published program checks only the paths that it uses, although its
            routing tables (Algorithm 1) may form any path (`benchmarks/loki/published.py`).
        headroom_quantile: the plan is for this quantile of the arrivals in `headroom_period_s`, if
            these are Poisson at `demand`. None: the plan is for the mean, as in the paper.
        fits_alone: whether the requests that a single request at the root makes at a task must fit
            into the task's time (ours). So a single request is in time too.
        path_accuracies: measured end-to-end accuracy in percent, by the names of the variants from
            the root to a last task. A missing path has the product of its variants' accuracies.
        accuracy_floor: least mean accuracy, in percent. Requests are shed rather than served below
            it.
        current: number of workers that are loaded now, by (task, variant). None if nothing runs.
        swap_cost: least gain in points of accuracy for which a worker is reloaded. In step 1, swaps
            only decide between plans with the same number of workers.
        max_swaps: largest number of reloaded workers. Loading an idle worker is not a swap.
        backend, time_limit_s, relative_gap, seed: arguments of the solver, for each program.

    Raises:
        ValueError: a field is not valid. The message names it.
    """

    tasks: tuple[Task, ...]
    demand: NonNegative
    workers: Count
    slo_s: Above0
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    waiting_factor: Annotated[float, Field(ge=1)] = WAITING_FACTOR
    communication_s: NonNegative = 0.0
    any_route: bool = True
    headroom_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    headroom_period_s: Above0 = 1.0
    fits_alone: bool = True
    path_accuracies: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    accuracy_floor: NonNegative = 0.0
    current: Mapping[tuple[str, str], int] | None = None
    swap_cost: NonNegative = 0.0
    max_swaps: Annotated[int, Field(ge=0)] | None = None
    backend: Backend = "auto"
    time_limit_s: Above0 = 10.0
    relative_gap: NonNegative = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.any_route:
            raise ValueError("any_route must be true: requests may take any path")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be at least 1, got {self.batch_sizes}")
        self._check_tree()
        if self.current is not None:
            known = {(t.name, v.name) for t in self.tasks for v in t.variants}
            if unknown := set(self.current) - known:
                raise ValueError(f"current: no such variants: {sorted(unknown)}")
            if min(self.current.values(), default=0) < 0:
                raise ValueError(f"current must count at least 0 workers, got {self.current}")

    def _check_tree(self) -> None:
        names = {t.name for t in self.tasks}
        if not names or len(names) < len(self.tasks):
            raise ValueError("tasks must be at least one, with names of their own")
        variants = [v.name for t in self.tasks for v in t.variants]
        if twice := sorted({v for v in variants if variants.count(v) > 1}):
            raise ValueError(f"variants must have names of their own in the pipeline: {twice}")
        roots = [t.name for t in self.tasks if t.parent is None]
        if len(roots) != 1:
            raise ValueError(f"tasks must have one root (a task without parent), got {roots}")
        for task in self.tasks:
            if task.parent is not None and task.parent not in names:
                raise ValueError(
                    f"parent of task {task.name!r} must be one of {sorted(names)}, "
                    f"got {task.parent!r}"
                )
            if not task.variants:
                raise ValueError(f"variants of task {task.name!r} must name at least one")
            children = {t.name for t in self.tasks if t.parent == task.name}
            for variant in task.variants:
                if unknown := set(variant.factors) - children:
                    raise ValueError(
                        f"factors of variant {variant.name!r}: no children of task "
                        f"{task.name!r}: {sorted(unknown)}"
                    )
                if min(variant.factors.values(), default=0.0) < 0:
                    raise ValueError(f"factors of variant {variant.name!r} must be at least 0")
                if not 0 <= variant.accuracy <= 100:
                    raise ValueError(
                        f"accuracy of variant {variant.name!r} must be 0 to 100 percent, "
                        f"got {variant.accuracy}"
                    )
        if len(self.order) < len(self.tasks):
            lost = sorted(names - {t.name for t in self.order})
            raise ValueError(f"tasks must be a tree: {lost} are in a cycle")

    @cached_property
    def order(self) -> tuple[Task, ...]:
        """The tasks, parents first."""
        found = [t for t in self.tasks if t.parent is None]
        for task in found:  # grows as it goes
            found += self.children(task)
        return tuple(found)

    def children(self, task: Task) -> list[Task]:
        return [t for t in self.tasks if t.parent == task.name]

    @cached_property
    def planned_demand(self) -> float:
        """The demand with its headroom, in requests per second."""
        if self.headroom_quantile is None:
            return self.demand
        return poisson_rate(self.demand, self.headroom_quantile, self.headroom_period_s)


def fastest(problem: Problem) -> float:
    """Return the shortest time to the slowest last task, in seconds, with waits and
    communication."""
    return least_rest(problem, problem.order)[problem.order[0].name]


def cost(problem: Problem, latency_s: float) -> float:
    return problem.waiting_factor * latency_s + problem.communication_s


def least_rest(problem: Problem, tasks: Sequence[Task]) -> dict[str, float]:
    """Return the least time from entering a task to the end of its last descendants, in seconds, by
    task."""
    rest: dict[str, float] = {}
    for task in reversed(tasks):
        own = min(
            v.profile.latency(min(min(problem.batch_sizes), v.profile.max_batch_size))
            for v in task.variants
        )
        below = max((rest[child.name] for child in problem.children(task)), default=0.0)
        rest[task.name] = cost(problem, own) + below
    return rest
