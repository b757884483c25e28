"""Plans of Loki: workers with variants and batch sizes, and the shares of the paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.loki.terms.problem import Problem
from ray_slo.papers.routing import Worker

Step = Literal["hardware", "accuracy", "share"]


@dataclass(frozen=True)
class Assignment:
    """Workers with one variant and batch size.

    Attributes:
        workers: number of workers.
        load: planned requests per second for all of them together.
        throughput: largest requests per second of one of them.
        latency_s: time of a full batch, in seconds. It is the latency budget of the task (§4.2),
            without the wait.
    """

    task: str
    variant: str
    batch_size: int
    workers: int
    load: float
    throughput: float
    latency_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the assignment as JSON data, for logs and status."""
        names = ("task", "variant", "batch_size", "workers", "load")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PathShare:
    """A path from the root to a last task. It has a share of the demand, an accuracy in percent,
    and the longest sum of batch latencies on it, in seconds, without waits."""

    variants: tuple[str, ...]
    share: float
    accuracy: float
    latency_s: float


@dataclass(frozen=True)
class Plan:
    """A plan of Loki.

    Attributes:
        step: the step that found the plan.
        assignments: workers by variant and batch size.
        paths: shares of the paths.
        accuracy: mean accuracy over the served requests, in percent: the mean of the last tasks.
        planned_demand: demand with its headroom, in requests per second.
        shed_share: share of the planned demand that is not served.
        swaps: number of workers that change their variant.
        gap: no other plan can improve the objective of `step` by more than this share.
        explanation: the plan in words.
        shared: whether each worker serves all tasks. Then every assignment is for each worker
            (`best_effort`).
    """

    step: Step
    assignments: tuple[Assignment, ...]
    paths: tuple[PathShare, ...]
    accuracy: float
    planned_demand: float
    shed_share: float
    swaps: int
    gap: float
    explanation: str
    shared: bool = False

    @property
    def workers(self) -> int:
        counts = [a.workers for a in self.assignments]
        return max(counts, default=0) if self.shared else sum(counts)

    @property
    def loaded(self) -> dict[tuple[str, str], int]:
        """Number of workers by (task, variant), for `current` of the next problem."""
        counts: dict[tuple[str, str], int] = {}
        for a in self.assignments:
            counts[a.task, a.variant] = counts.get((a.task, a.variant), 0) + a.workers
        return counts


def swaps_of(problem: Problem, loaded: Mapping[tuple[str, str], int]) -> int:
    """Return the number of workers that change their variant."""
    if problem.current is None:
        return 0
    loads = sum(max(n - problem.current.get(key, 0), 0) for key, n in loaded.items())
    return max(loads - max(problem.workers - sum(problem.current.values()), 0), 0)


def explain(problem: Problem, made: Plan, swaps: int) -> str:
    """Return a plan in words."""
    said = {
        "hardware": "Hardware scaling: the most accurate variants suffice.",
        "accuracy": "Accuracy scaling: the most accurate variants do not suffice.",
        "share": f"Not all demand can be served: {100 * made.shed_share:.3g} % is shed.",
    }[made.step]
    margin = ""
    if problem.headroom_quantile is not None:
        margin = f" (average {problem.demand:.5g}, quantile {problem.headroom_quantile:g} of "
        margin += f"{problem.headroom_period_s:g} s)"
    parts = [
        said,
        f"{made.planned_demand:.5g} req/s{margin} on {made.workers} of {problem.workers} workers, "
        f"accuracy {made.accuracy:.4g} %.",
    ]
    if problem.current is not None:
        parts.append(f"{swaps} workers change their variant.")
    return " ".join(parts)


def workers_of(problem: Problem, plan: Plan, *, as_planned: bool = True) -> list[Worker]:
    """Return the workers of a plan, with ids (task, variant, batch size, number).

    With `as_planned`, workers are first filled to their planned rates. So there is capacity for any
    demand up to the planned one. Without it, this is exactly Algorithm 1: accurate detectors are
    saturated even if the plan does not saturate them. They may then find more items than the plan
    has workers for.
    """
    variants = {(t.name, v.name): v for t in problem.tasks for v in t.variants}
    return [
        Worker(
            (a.task, a.variant, a.batch_size, i),
            a.task,
            variants[a.task, a.variant].accuracy,
            a.throughput,
            a.latency_s,
            variants[a.task, a.variant].factors,
            a.load / a.workers if as_planned else None,
        )
        for a in plan.assignments
        for i in range(a.workers)
    ]
