"""Serving groups: which models and workers share a scheduler, and how that changes as it runs.

Pure: no ray, no clock. A `Layout` says what is wanted. What is there (`Seen`) and where frontends
send requests (`routes`) say what is. Every step below is a function of the three, so whoever
carries steps out may die between any two of them, and another goes on from what it sees.

A model moves make-before-break: the workers of the new group load it beside what they have
(`wanted`), then requests are routed to them (`routed`), and when the old group has none of its
requests left, its workers unload it. A worker changes its group when it has loaded what it needs
there and others hold what its old group still serves.

    >>> old, new = Layout({"m": "a"}), Layout({"m": "b"})
    >>> there = {"w": Seen("a", "a", frozenset("m")), "v": Seen("b", "b", frozenset())}
    >>> wanted(new, {"w": "a", "v": "b"}, there, {"m": "a"}, set())["v"].models
    ('m',)
    >>> routed(new, {"w": "a", "v": "b"}, there, {"m": "a"})  # v has not loaded it yet
    {'m': 'a'}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ray_slo.core import LatencyProfile
from ray_slo.planning import Infeasible, herd, partition

_SLO_SHARE = 0.5  # a batch of the largest goodput leaves as much time to wait as it takes
# Arguments of the planners' problems that are measured, or follow from the rest.
_OURS = {
    "herd": {"models", "workers"},
    "partition": {"models", "current", "change_cost"},
}
_PROBLEMS: dict[str, type[herd.Problem | partition.Problem]] = {
    "herd": herd.Problem,
    "partition": partition.Problem,
}


@dataclass(frozen=True)
class Layout:
    """What is wanted.

    Attributes:
        models: group of each model.
        sizes: workers of each group; empty where every worker belongs to a group by its kind.
    """

    models: Mapping[str, str]
    sizes: Mapping[str, int] = field(default_factory=dict)

    def of(self, group: str) -> set[str]:
        return {model for model, g in self.models.items() if g == group}

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(sorted({*self.models.values(), *self.sizes}))


@dataclass(frozen=True)
class Seen:
    """A worker as it last said.

    Attributes:
        home: the group that its kind belongs to; None in a pool.
        group: where it serves; None before it is told.
        loaded: models that its group's scheduler knows it has.
    """

    home: str | None
    group: str | None
    loaded: frozenset[str]


@dataclass(frozen=True)
class Wanted:
    """What a worker should do: serve in this group, with these models and no other."""

    group: str
    models: tuple[str, ...]


Draining = Collection[tuple[str, str]]  # (model, group that still has requests of it)


def members(
    layout: Layout, seen: Mapping[str, Seen], before: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The group that each worker should be in.

    Args:
        before: the last answer. Who is in a group stays while there is room.
    """
    if not layout.sizes:
        return {w: s.home for w, s in seen.items() if s.home is not None}
    now = {w: (before or {}).get(w) or s.group for w, s in seen.items()}
    chosen: dict[str, str] = {}
    free: list[str] = []
    for group in {*now.values()} - {None}:
        assert group is not None
        mine = sorted(
            (w for w, g in now.items() if g == group),
            key=lambda w: (-len(seen[w].loaded & layout.of(group)), w),
        )
        room = layout.sizes.get(group, 0)
        chosen |= dict.fromkeys(mine[:room], group)
        free += mine[room:]
    free += [w for w, g in now.items() if g is None]
    for worker in sorted(free):
        count = {g: sum(c == g for c in chosen.values()) for g in layout.sizes}
        filled = {g: count[g] / size if size else math.inf for g, size in layout.sizes.items()}
        # Beyond all sizes, nobody who serves in a group is moved for nothing.
        stays = now[worker] if min(filled.values()) >= 1 else None
        where = stays if filled.get(stays or "", math.inf) < math.inf else None
        chosen[worker] = where or min(filled, key=lambda g: (filled[g], g))
    return chosen


def wanted(
    layout: Layout,
    member: Mapping[str, str],
    seen: Mapping[str, Seen],
    routes: Mapping[str, str],
    draining: Draining,
) -> dict[str, Wanted]:
    """What every worker should do now, on the way to `layout`."""

    def held(group: str) -> set[str]:
        """Models with requests there."""
        return {m for m, g in routes.items() if g == group} | {m for m, g in draining if g == group}

    answer = {}
    for worker, target in member.items():
        now = seen[worker].group
        need = layout.of(target) | held(target)
        if now is None or now == target:
            answer[worker] = Wanted(target, tuple(sorted(need)))
            continue
        kept = held(now)
        staying = [s.loaded for w, s in seen.items() if s.group == now == member.get(w)]
        covered = all(any(m in loaded for loaded in staying) for m in kept)
        if covered and need <= seen[worker].loaded:
            answer[worker] = Wanted(target, tuple(sorted(need)))
        else:
            answer[worker] = Wanted(now, tuple(sorted(need | kept)))
    return answer


def routed(
    layout: Layout,
    member: Mapping[str, str],
    seen: Mapping[str, Seen],
    routes: Mapping[str, str],
) -> dict[str, str]:
    """Where each model's requests should go now: a model is switched when all of its new group's
    workers have it (the first time, when one has)."""
    answer = dict(routes)
    for model, group in layout.models.items():
        there = [
            model in s.loaded
            for w, s in seen.items()
            if s.group == group and member.get(w) == group
        ]
        if any(there) and (all(there) or model not in routes):
            answer[model] = group
    return answer


def settled(
    layout: Layout,
    member: Mapping[str, str],
    seen: Mapping[str, Seen],
    routes: Mapping[str, str],
    draining: Draining,
) -> bool:
    """Whether nothing is left to be done."""
    return (
        not draining
        and all(routes.get(m) == g for m, g in layout.models.items())
        and all(
            (seen[w].group, set(seen[w].loaded)) == (t.group, set(t.models))
            for w, t in wanted(layout, member, seen, routes, draining).items()
        )
    )


# -- planners ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
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


def check_kwargs(name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the planner has not.

    Raises:
        ValueError: names the argument and lists the valid ones.
    """
    valid = {f.name for f in fields(_PROBLEMS[name])} - _OURS[name]
    if unknown := sorted(set(kwargs) - valid):
        raise ValueError(
            f"planner {name!r} has no argument {unknown[0]!r}; "
            f"valid arguments are {', '.join(sorted(valid))}"
        )


def make_problem(
    name: str,
    kwargs: Mapping[str, Any],
    demand: Demand,
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
        ValueError: an argument out of its range, or unknown.
    """
    check_kwargs(name, kwargs)
    if name == "herd":
        defaults = {"group_worker_limit": workers, "memory_mb": 1.0}
        streams = tuple(
            herd.ModelStream(m, demand.load(m), memory_mb.get(m, 0.0)) for m in demand.rates
        )
        return herd.Problem(streams, workers, **{**defaults, **kwargs})
    models = tuple(
        partition.Model(m, rate, memory_mb.get(m, 0.0)) for m, rate in demand.rates.items()
    )
    index = {group: j for j, group in enumerate(groups)}
    where = tuple(index.get(current.get(m, ""), -1) for m in demand.rates)
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


def verdict(answer: Any) -> tuple[Any, str]:
    """The plan to carry out, and why."""
    if isinstance(answer, Infeasible):
        return answer.best_effort, f"infeasible: {answer.reason}; {answer.best_effort.explanation}"
    return answer, answer.explanation
