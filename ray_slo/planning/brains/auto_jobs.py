"""The setting of the brain of `auto`, and its jobs: problems, which another process solves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.planning import auto
from ray_slo.planning.auto import Kind, Plan, Problem, Slot
from ray_slo.planning.brains.brain import Key
from ray_slo.planning.result import Infeasible, best

Made = Plan | Infeasible[Plan]
Planner = Callable[[Problem, Plan | None], Made]


@dataclass(frozen=True)
class AutoSetting:
    """The brain's settings for one application.

    Attributes:
        problem: the configured part of the problem. Its demand and its factors are used until they
            have been measured. Its profiles are not used.
        first_workers: the initial number of workers, by kind.
        scales: kinds whose workers Serve starts and stops as the plan says. It stops the youngest
            first.
        choosing: kinds for which the policy chooses among the variants that a worker has loaded.
            For others, it follows the plan's assignment.
        plan: function that solves the problem. It is a function at the top of a module, or a
            partial call of one.
        sized: models whose sizes must be known before the first plan.
        retuned: function that returns the setting with other arguments of the planner. None: they
            are fields of the problem.
        interval_s: time between plans, in seconds.
        up_s, down_s: the number of workers of a kind changes when the plan has wanted more, or
            fewer, for this long, in seconds.
        idle_s: time without a request after which an application needs no worker, in seconds. None:
            it always needs at least one.
        demand: method that predicts the demand (`ray_slo.core.demand`).
        make_before_break: whether a worker loads its next variant before it removes the last one.
        profiles: profiles of variants from files, by kind.
    """

    problem: Problem
    first_workers: Mapping[str, int] = field(default_factory=dict)
    scales: frozenset[str] = frozenset()
    interval_s: float = 10.0
    up_s: Mapping[str, float] = field(default_factory=dict)
    down_s: Mapping[str, float] = field(default_factory=dict)
    idle_s: float | None = None
    demand: Literal["ewma", "peak", "holt"] = "ewma"
    make_before_break: bool = True
    profiles: Mapping[Key, LatencyProfile] = field(default_factory=dict)
    choosing: frozenset[str] = frozenset()
    plan: Planner = auto.plan
    sized: frozenset[str] = frozenset()
    retuned: Callable[[Mapping[str, Any]], AutoSetting] | None = None

    def tuned(self, kwargs: Mapping[str, Any]) -> AutoSetting:
        """Return the setting with these arguments of the planner.

        Raises:
            ValueError: there is no such argument, or it is out of its range.
        """
        if self.retuned is not None and kwargs:
            return self.retuned(kwargs)
        try:
            return replace(self, problem=replace(self.problem, **kwargs))
        except TypeError as error:
            raise ValueError(f"no such argument: {error}") from None


class Job(NamedTuple):
    """A problem to solve.

    Attributes:
        whole: the problem for the largest allowed numbers of workers.
        present: number of workers that serve, by kind.
        last: the plan from which the search starts.
        usable: (variant, kind) pairs whose latency is known.
        now: time when the job was made, in seconds.
        factors: ratio of the planned to the measured demand, by stream.
        idle: streams without demand.
        unknown: kinds of workers that nobody has measured.
        arguments: arguments of the planner that were changed while it runs.
        plan: function that solves the problem.
    """

    whole: Problem
    present: Mapping[str, int]
    last: Plan | None
    usable: frozenset[Key]
    now: float
    factors: Mapping[str, float]
    idle: frozenset[str]
    unknown: frozenset[str] = frozenset()
    arguments: Mapping[str, Any] = {}
    plan: Planner = auto.plan

    def meanwhile(self, group_of: Mapping[str, str]) -> Problem:
        """Return the problem for the present workers, with the models in the groups `group_of`."""
        there = {kind.name for kind in self.whole.kinds if self.present.get(kind.name)}
        current = tuple(hosted for hosted in self.whole.current if hosted.kind in there)
        present = dict(self.present)
        return replace(self.whole, present=present, current=current, group_of=group_of)


class Plans(NamedTuple):
    """The two plans of a job.

    Attributes:
        whole: the plan for the largest allowed numbers of workers.
        now: the plan for the present workers. If their number is as in `whole`, `whole` itself.
    """

    whole: Made
    now: Made

    @property
    def shortfall(self) -> str | None:
        """What cannot be served even with all workers. None if everything can."""
        return self.whole.reason if isinstance(self.whole, Infeasible) else None


def solve(job: Job) -> Plans:
    """Return both plans of a job. This runs as a Ray task."""
    plan = job.plan
    whole = _useful(job.whole, job.last, plan)
    wanted, present = best(whole).workers, job.present
    if not any(present.values()) or all(n <= present.get(k, 0) for k, n in wanted.items()):
        return Plans(whole, whole)
    return Plans(whole, _useful(job.meanwhile(best(whole).group_of), job.last, plan))


def _useful(problem: Problem, last: Plan | None, plan: Planner) -> Made:
    """Return the plan, or one that serves more if that serves nothing.

    If each worker has one variant, and there are fewer workers than tasks, workers share. If no
    path leaves requests time to wait, the plan is made without waits. Then a request alone is in
    time. If no path is fast enough even so, workers load the fastest variants, for clients that
    bring a longer SLO. With an accuracy floor, they do not.
    """
    made = plan(problem, last)
    if not isinstance(made, Infeasible) or made.best_effort.slots:
        return made
    if not problem.sharing:
        problem = replace(problem, sharing=True, fits_alone=False)
        if best(eased := plan(problem, None)).slots:
            why = f"{made.reason} if each worker has one variant, so workers share"
            return replace(made, reason=why, best_effort=best(eased))
    hurried = best(plan(replace(problem, waiting_factor=1.0), None))
    if hurried.slots:
        return replace(made, best_effort=hurried)
    if problem.accuracy_floor:
        return made
    slots = tuple(
        slot for kind in problem.kinds for slot in _fastest(problem, kind, made.best_effort)
    )
    return replace(made, best_effort=replace(made.best_effort, slots=slots))


def _fastest(problem: Problem, kind: Kind, plan: Plan) -> list[Slot]:
    """Return a slot for each worker of a kind, with the fastest variant of each model that its
    memory holds."""
    room_mb, chosen = kind.memory_mb, list[str]()
    for model in problem.models:
        able = [v for v in model.variants if kind.name in v.profiles]
        quickest = min(able, key=lambda v: v.profiles[kind.name].latency(1), default=None)
        if quickest is None or problem.group_of.get(model.name, kind.group) != kind.group:
            continue
        needs_mb = quickest.memory_mb.get(kind.name, 0.0)
        if needs_mb <= room_mb:
            room_mb -= needs_mb
            chosen.append(quickest.name)
    parts = tuple(Assigned(variant, 1) for variant in chosen)
    return [Slot(kind.name, parts, tuple(chosen))] * (plan.workers[kind.name] if chosen else 0)
