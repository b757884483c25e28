"""What the planners of serving groups, `herd` and `partition`, are asked, and what layout their
answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_slo.core import LatencyProfile
from ray_slo.planning import herd, partition
from ray_slo.planning.brains.layouts import Layout

_SLO_SHARE = 0.5  # a batch of the largest goodput leaves as much time to wait as it takes


@dataclass(frozen=True)
class Measured:
    """What a planner plans for.

    Attributes:
        rates: requests per second, by model.
        throughput: requests per second that one worker can serve in time, by model.
    """

    rates: Mapping[str, float]
    throughput: Mapping[str, float]

    def load(self, model: str) -> float:
        """Workers that the model's average load needs."""
        return self.rates[model] / self.throughput[model]


def best_throughput(profile: LatencyProfile, slo_s: float) -> float:
    """Requests per second of one worker, in batches that leave as much time to wait as to run."""
    known = profile.measured
    largest = max(known.max_batch_within(_SLO_SHARE * slo_s), 1)
    return max(known.throughput(b) for b in range(1, largest + 1))


def make_problem(
    name: str,
    kwargs: Mapping[str, Any],
    measured: Measured,
    memory_mb: Mapping[str, float],
    workers: int,
    groups: Sequence[str],
    current: Mapping[str, str],
) -> Any:
    """The planner's problem.

    Args:
        memory_mb: of models; 0 where not given.
        groups: names in the order of `partition`'s sub-clusters.
        current: group of each model now.

    Raises:
        ValueError, TypeError: an argument out of its range, or unknown.
    """
    if name == "herd":
        defaults = {"group_worker_limit": workers, "memory_mb": 1.0}
        streams = tuple(
            herd.ModelStream(m, measured.load(m), memory_mb.get(m, 0.0)) for m in measured.rates
        )
        return herd.Problem(streams, workers, **{**defaults, **kwargs})
    models = tuple(
        partition.Model(m, rate, memory_mb.get(m, 0.0)) for m, rate in measured.rates.items()
    )
    index = {group: j for j, group in enumerate(groups)}
    where = tuple(index.get(current.get(m, ""), -1) for m in measured.rates)
    extra = {} if all(j < 0 for j in where) else {"current": where}
    return partition.Problem(models, **{"sub_clusters": len(groups), **kwargs, **extra})


def solve(problem: Any) -> Any:
    """The planner's answer; run as a Ray task."""
    planner: Any = herd if isinstance(problem, herd.Problem) else partition
    return planner.plan(problem)


def to_layout(
    answer: Any, workers: int, groups: Sequence[str], current: Layout | None, *, pool: bool
) -> Layout:
    """What a plan says, under the names that its groups have now.

    Args:
        answer: of `herd` or `partition`.
        workers: how many there are, to be shared out where the planner does not.
        pool: workers are shared out; else they belong to their groups.
    """
    if isinstance(answer, herd.Plan):
        names = _names([g.models for g in answer.groups], current)
        models = {m: n for n, g in zip(names, answer.groups, strict=True) for m in g.models}
        return Layout(models, {n: g.workers for n, g in zip(names, answer.groups, strict=True)})
    parts = answer.sub_clusters
    models = {m: name for name, part in zip(groups, parts, strict=True) for m in part.models}
    if not pool:
        return Layout(models)
    busiest = np.argsort([-part.rate for part in parts], kind="stable").tolist()
    each, more = divmod(workers, len(parts))
    return Layout(models, {groups[j]: each + (busiest.index(j) < more) for j in range(len(parts))})


def _names(planned: Sequence[Sequence[str]], current: Layout | None) -> list[str]:
    """Names for planned groups: those of the groups that they have most models in common with."""
    taken = list(current.groups) if current is not None else []
    names = [""] * len(planned)
    if current is not None and taken:
        from scipy.optimize import linear_sum_assignment  # every replica imports this module

        common = [[-len(current.of(name) & set(models)) for name in taken] for models in planned]
        for row, column in zip(
            *linear_sum_assignment(np.array(common).reshape(-1, len(taken))), strict=True
        ):
            names[row] = taken[column]
    unused = (f"g{i}" for i in range(1, len(planned) + len(taken) + 1) if f"g{i}" not in taken)
    return [name or next(unused) for name in names]


def worth_it(problem: Any, current: Layout, answer: Any, min_gain: float) -> bool:
    """Whether a plan is better than what is there by the share `min_gain`: in burst tolerance or
    headroom (`herd`), or in the evenness of loads, as a share of their average (`partition`)."""
    loads: dict[str, float] = {}
    for model in problem.models:
        loads[model.name] = model.load if isinstance(problem, herd.Problem) else model.rate
    if not set(loads) <= set(current.models):
        return True
    sums: dict[str, float] = {}
    for model, load in loads.items():
        group = current.models[model]
        sums[group] = sums.get(group, 0.0) + load
    if isinstance(problem, herd.Problem):
        if sum(current.sizes.values()) != problem.workers:
            return True
        sizes = {model: current.sizes[group] for model, group in current.models.items()}
        tolerances = [sizes[m] / n for m, n in loads.items() if n > 0]
        headrooms = [current.sizes[g] / n for g, n in sums.items() if n > 0]
        if not tolerances:
            return False
        tolerance, headroom = min(tolerances), min(headrooms)
        better = 1 + min_gain
        return bool(answer.burst_tolerance > better * tolerance) or bool(
            answer.burst_tolerance >= tolerance and answer.headroom > better * headroom
        )
    average = sum(loads.values()) / problem.sub_clusters
    spread = max((abs(value - average) for value in sums.values()), default=0.0)
    if len(sums) < problem.sub_clusters:
        spread = max(spread, average)
    return bool(spread - answer.rate_spread > min_gain * average)
