"""Conversions for `herd` and `partition`, the planners of serving groups: from measurements to
their problems, and from their answers to layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_slo.core import LatencyProfile
from ray_slo.core.trees import root_and_class
from ray_slo.papers import herd, partition

# Share of the SLO that the batch with the largest goodput takes. The rest is for waiting.
_SLO_SHARE = 0.5


@dataclass(frozen=True)
class Layout:
    """The wanted groups.

    Attributes:
        models: group of each model.
        sizes: number of workers of each group. Empty if a worker's kind decides its group.
    """

    models: Mapping[str, str]
    sizes: Mapping[str, int] = field(default_factory=dict)

    def of(self, group: str) -> set[str]:
        return {model for model, g in self.models.items() if g == group}

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(sorted({*self.models.values(), *self.sizes}))


@dataclass(frozen=True)
class Measured:
    """The measured input of a planner.

    Attributes:
        rates: requests per second, by stream ("model", or "model@class").
        throughput: T of SHEPHERD §4, by stream: the requests per second that one worker can answer
            in time.
        profiles: profile of the variant with the largest throughput, by model. Models without a
            profile are left out.
        memory_mb: memory of all variants of a model together, in MB. Models with an unmeasured
            variant are left out.
        room_mb: memory of a worker for models, in MB. None if it was not measured.
    """

    rates: Mapping[str, float]
    throughput: Mapping[str, float]
    profiles: Mapping[str, LatencyProfile] = field(default_factory=dict)
    memory_mb: Mapping[str, float] = field(default_factory=dict)
    room_mb: float | None = None

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(root_and_class(stream)[0] for stream in self.rates))

    def of_model(self, model: str) -> list[str]:
        """Return the streams of a model."""
        return [stream for stream in self.rates if root_and_class(stream)[0] == model]

    def load(self, model: str) -> float:
        """Return the number of workers that the model's average load needs. It is a fraction."""
        return sum(self.rates[s] / self.throughput[s] for s in self.of_model(model))

    def rate(self, model: str) -> float:
        """Return the requests per second of a model, over all its streams."""
        return sum(self.rates[s] for s in self.of_model(model))

    def memory(self, told_mb: Mapping[str, float], room_mb: float | None) -> dict[str, float]:
        """Return the memory of every model, in MB. It is the configured memory `told_mb`, otherwise
        the measured one. It is 0 if it is unknown, or if a worker's memory `room_mb` is unknown."""
        known = self.memory_mb if room_mb is not None else {}
        return {m: told_mb.get(m, known.get(m, 0.0)) for m in self.models}

    def affinity_sets(self, most: float) -> dict[str, int]:
        """Return the number of the affinity set of each model. Two models of one set have an
        affinity of at most `most` (SHEPHERD §4.1). A model without a profile fits any set."""
        if math.isinf(most) or not self.profiles:
            return dict.fromkeys(self.models, 0)
        sets = herd.affinity_sets(*self._lines(), most)
        found = dict(zip(self.profiles, sets, strict=True))
        return {m: found.get(m, sets[0]) for m in self.models}

    def divergence(self, models: Iterable[str]) -> float:
        """Return the largest affinity of any two of these models. It is 1 if they are alike."""
        known = [i for i, m in enumerate(self.profiles) if m in set(models)]
        if not known:
            return 1.0
        return float(herd.affinity(*self._lines())[np.ix_(known, known)].max())

    def _lines(self) -> tuple[list[float], list[float]]:
        """Return α and β of the line ℓ(b) = α·b + β, in seconds, for every model with a profile."""
        known = [profile.measured for profile in self.profiles.values()]
        lines = [profile.fit_linear() for profile in known]
        least = [1e-3 * profile.latency(1) for profile in known]  # a slope must be positive
        return [max(a, e) for (a, _), e in zip(lines, least, strict=True)], [
            max(b, 0.0) for _, b in lines
        ]


def best_throughput(profile: LatencyProfile, slo_s: float) -> float:
    """Return the highest throughput of one worker, in requests per second, with batches that take
    at most half of the SLO."""
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
    """Return the problem of the planner `name`.

    Args:
        name: "herd" or "partition".
        kwargs: arguments of the planner's problem. `herd` also takes `max_affinity`. `partition`
            also takes `dynamic_mb` and `change_cost`, both by model.
        memory_mb: configured memory of models, in MB.
        workers: number of workers.
        groups: names of the groups, in the order of `partition`'s sub-clusters.
        current: present group of each model.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: an argument is unknown.
    """
    rest = dict(kwargs)
    models = measured.models
    if name == "herd":
        sets = measured.affinity_sets(rest.pop("max_affinity", math.inf))
        room_mb = rest.get("memory_mb", measured.room_mb)
        memory = measured.memory(memory_mb, room_mb)
        defaults = {"group_worker_limit": workers, "memory_mb": room_mb or 1.0}
        streams = tuple(herd.ModelStream(m, measured.load(m), memory[m], sets[m]) for m in models)
        return herd.Problem(streams, workers, **{**defaults, **rest})
    dynamic, cost = rest.pop("dynamic_mb", {}), rest.pop("change_cost", {})
    room_mb = rest.get("max_memory_mb", measured.room_mb)
    memory = measured.memory(memory_mb, room_mb)
    if room_mb is not None:
        rest["max_memory_mb"] = room_mb
    index = {group: j for j, group in enumerate(groups)}
    where = tuple(index.get(current.get(m, ""), -1) for m in models)
    if any(j >= 0 for j in where):
        rest |= {"current": where, "change_cost": tuple(cost.get(m, 1.0) for m in models)}
    parts = tuple(
        partition.Model(m, measured.rate(m), memory[m], dynamic.get(m, 0.0)) for m in models
    )
    return partition.Problem(parts, **{"sub_clusters": len(groups), **rest})


def to_layout(
    answer: Any, workers: int, groups: Sequence[str], current: Layout | None, *, pool: bool
) -> Layout:
    """Return the layout of a plan. Groups keep their present names.

    Args:
        answer: plan of `herd` or `partition`.
        workers: number of workers. `partition` does not divide them, so they are divided evenly.
        groups: names of the groups.
        current: present layout, if there is one.
        pool: whether workers are divided among the groups. Otherwise a worker's kind decides its
            group.
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
    """Return names for the planned groups. A group gets the name of the present group with which
    it has the most models in common."""
    taken = list(current.groups) if current is not None else []
    names = [""] * len(planned)
    if current is not None and taken:
        # SciPy is imported late, because every replica imports this module.
        from scipy.optimize import linear_sum_assignment

        common = [[-len(current.of(name) & set(models)) for name in taken] for models in planned]
        for row, column in zip(
            *linear_sum_assignment(np.array(common).reshape(-1, len(taken))), strict=True
        ):
            names[row] = taken[column]
    unused = (f"g{i}" for i in range(1, len(planned) + len(taken) + 1) if f"g{i}" not in taken)
    return [name or next(unused) for name in names]


def worth_it(problem: Any, current: Layout, answer: Any, min_gain: float) -> bool:
    """Return whether a plan is better than the present layout by at least the share `min_gain`.
    `herd` compares the burst tolerance and the headroom. `partition` compares the differences
    between the groups' loads, as a share of the average load."""
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
