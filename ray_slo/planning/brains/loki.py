"""The brain of the planner `loki`. It decides how many workers an application has, and which
variant each of them runs.

A problem contains the measurements: the demand at the root, the numbers of child requests per
request (multiplicative factors), the workers' profiles, and what the workers have loaded. It is
solved twice. The plan for the largest number of workers (`max_replicas`) gives the number that
Serve scales to. The plan for the present workers gives their work until then
(`planning.meanwhile`).

Before the first plan, variants with an unknown latency (no file, no measurement) are measured. The
first workers divide these variants among themselves, and serve all requests with the variants that
they have. Later workers load the plan's variants, and one of them retries those that could not be
loaded before. If there are fewer workers than tasks, no variant is assigned, and each worker loads
the plan's variants for all tasks. If the problem has no solution, the planner serves the largest
possible part of the demand (`planning.best_effort`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.demand import Factors, Rate
from ray_slo.core.policy import Expected
from ray_slo.planning import best_effort, loki
from ray_slo.planning.brains.brain import (
    FIRST,
    Brain,
    Counts,
    NotYet,
    Seen,
    Verdict,
    Wanted,
    WorkerSays,
)
from ray_slo.planning.brains.measure import Measuring, in_turn, loadable
from ray_slo.planning.meanwhile import Plans, best, plan_both
from ray_slo.planning.placement import place
from ray_slo.planning.result import Infeasible

_LEAST_FACTOR = 0.05  # a task that had no requests for hours still needs a worker


@dataclass(frozen=True)
class LokiSetting:
    """The brain's settings for one application.

    Attributes:
        problem: the configured part of the problem. Its demand and its factors are used until they
            have been measured. Its profiles are not used.
        kind: kind of the workers.
        first_workers: the initial number of workers.
        scales: whether Serve starts and stops workers as planned. It stops the youngest first.
        interval_s: time between plans, in seconds.
        demand: method that predicts the demand (`ray_slo.core.demand`).
        make_before_break: whether a worker loads its next variant before it removes the last one.
        profiles: profiles of variants from files.
    """

    problem: loki.Problem
    kind: str
    first_workers: int = 1
    scales: bool = False
    interval_s: float = 10.0
    demand: Literal["ewma", "peak", "holt"] = "ewma"
    make_before_break: bool = True
    profiles: Mapping[str, LatencyProfile] = field(default_factory=dict)


class Job(NamedTuple):
    """The problem for the largest number of workers, and the present number of workers."""

    problem: loki.Problem
    present: int
    last: loki.Plan | None
    usable: frozenset[str]


def solve(job: Job) -> Plans:
    """Return both plans of a job. This runs as a Ray task."""
    return plan_both(job.problem, job.present, job.last, best_effort.plan)


class LokiBrain(Brain):
    """Plans a pipeline whose workers are of one kind (see the module).

    Args:
        rate: measures the demand. The default is the method that the setting names.
    """

    def __init__(self, setting: LokiSetting, rate: Rate | None = None) -> None:
        self.configure(setting)
        self._rate = rate or Rate(setting.demand, setting.interval_s)
        prior: dict[Hashable, Mapping[str, float]] = {
            v.name: v.factors for task in setting.problem.tasks for v in task.variants
        }
        self._factors = Factors(prior)
        self._job: Job | None = None
        self._solved: Plans | None = None
        self._told: dict[str, str] = {}  # variant by worker, even while it loads
        self._measuring = Measuring()

    @property
    def solve(self) -> Callable[[Job], Plans]:
        return solve

    def configure(self, setting: LokiSetting) -> None:
        self._setting = setting
        self._most = setting.problem.workers
        tasks = setting.problem.tasks
        self._tasks = frozenset(task.name for task in tasks)
        self._task_of = {v.name: task.name for task in tasks for v in task.variants}

    # -- reports ---------------------------------------------------------------------

    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        self._rate.counted(now, over_s, counts.total)
        for variant, requests in counts.finished.items():
            if variant in self._task_of:
                self._factors.observe(variant, requests, counts.made.get(variant, {}))

    def rate(self, now: float) -> float:
        """Return the demand to plan for, in requests per second on average."""
        if not self._rate.seen:
            return self._setting.problem.demand
        return self._rate.value(now)

    def _profiles(self, seen: Seen) -> dict[str, LatencyProfile]:
        """Return the profiles of usable variants, without batch sizes that never ran."""
        kind = self._setting.kind
        measured = {v: p for (v, k), p in seen.profiles.items() if k == kind}
        known = {**self._setting.profiles, **measured}
        usable = [v for v in self._task_of if v in known and not self._avoids(seen, v)]
        return {v: known[v].measured for v in usable}

    def _avoids(self, seen: Seen, variant: str) -> bool:
        return (variant, self._setting.kind) in seen.avoided

    def _unknown(self, seen: Seen) -> list[str]:
        """Return the variants that must still be measured."""
        known = self._profiles(seen)
        return [v for v in self._task_of if v not in known and not self._avoids(seen, v)]

    # -- problem and plan ------------------------------------------------------------------

    def problem(self, now: float, seen: Seen) -> Job:
        if not seen.workers:
            raise NotYet("no worker is there yet")
        running = any(says.assigned for says in seen.workers.values())
        if self._solved is None and not running and (unknown := self._unknown(seen)):
            raise NotYet(f"{', '.join(unknown)} not measured yet")
        profiles = self._profiles(seen)
        tasks = tuple(self._measured(task, profiles) for task in self._setting.problem.tasks)
        if lost := [task.name for task in tasks if not task.variants]:
            raise ValueError(f"no variant of {', '.join(lost)} can be loaded; the last plan holds")
        current: dict[tuple[str, str], int] = {}
        for says in seen.workers.values():
            for variant in (a.variant for a in says.assigned if a.variant in profiles):
                key = self._task_of[variant], variant
                current[key] = current.get(key, 0) + 1
        problem = replace(
            self._setting.problem,
            tasks=tasks,
            demand=self.rate(now),
            workers=self._most,
            current=current or None,
        )
        present = min(len(seen.serving), self._most)
        last = best(self._solved.now) if self._solved is not None else None
        return Job(problem, present, last, frozenset(profiles))

    def _measured(self, task: loki.Task, profiles: Mapping[str, LatencyProfile]) -> loki.Task:
        """Return the task with its measurements, without unusable variants."""
        variants = []
        for v in task.variants:
            if v.name in profiles:
                learned = self._factors.of(v.name) or v.factors
                factors = {c: max(f, _LEAST_FACTOR) for c, f in learned.items()}
                variants.append(replace(v, profile=profiles[v.name], factors=factors))
        return replace(task, variants=tuple(variants))

    def due(self, now: float, seen: Seen) -> str:
        if self._job is None or self._solved is None:
            return FIRST
        if frozenset(self._profiles(seen)) != self._job.usable:
            return "variants changed"
        if self._job.problem.workers != self._most:
            return "limits changed"
        useful = best(self._solved.whole).workers
        present = min(len(seen.serving), self._most)
        if min(present, useful) != min(self._job.present, useful):
            return "worker joined" if present > self._job.present else "worker lost"
        return "demand changed" if self._rate.differs(now, self._job.problem.demand) else ""

    def adopt(self, problem: Job, answer: Plans) -> Verdict:
        self._job, self._solved = problem, answer
        return Verdict(answer.why, answer.shortfall)

    # -- orders ----------------------------------------------------------------------

    def limit(self, kind: str, most: int) -> None:
        if kind == self._setting.kind:
            self._most = most

    def target(self, kind: str) -> int | None:
        if self._solved is None or kind != self._setting.kind:
            return None
        whole = self._solved.whole
        return self._most if isinstance(whole, Infeasible) else whole.workers

    def wanted(self, now: float, seen: Seen, hopeless: bool) -> dict[str, Wanted]:
        unknown = self._unknown(seen)
        if self._solved is None:
            if hopeless:
                # Workers with work of an earlier planner continue with it.
                idle = {w: says for w, says in seen.workers.items() if not says.loaded}
                return dict.fromkeys(idle if self._runs(seen) else seen.workers, self._all(seen))
            return self._to_measure(seen, unknown)
        plan, serving = best(self._solved.now), seen.serving
        staying = serving
        if self._setting.scales:  # Serve stops the youngest workers, so they get no work
            staying = dict(list(serving.items())[: max(plan.workers, 1)])
        placed = self._placed(plan, staying)
        if placed is None:
            return {worker: self._shared(says, seen) for worker, says in seen.workers.items()}
        told = {worker: assigned.variant for worker, assigned in placed.items()}
        later = self._placed(best(self._solved.whole), seen.workers) or {}
        settled = all(placed[w].variant in serving[w].loaded for w in placed)
        answer = {}
        for worker, says in serving.items():
            if (assigned := placed.get(worker)) is not None:
                answer[worker] = self._step(worker, assigned, serving, placed)
            elif self._is_new(later.get(worker), says):
                # A new worker does the work that it was started for, until the next plan.
                told[worker] = later[worker].variant
                answer[worker] = Wanted((later[worker],), (later[worker].variant,))
            elif settled or not self._setting.make_before_break:
                # An idle worker keeps its variants until it is needed, or Serve stops it.
                answer[worker] = Wanted((), tuple(sorted(says.loaded)))
            else:  # other workers are not ready to replace it yet
                answer[worker] = Wanted(says.assigned, tuple(sorted(says.loaded)))
        # Starting workers load what they will serve; the others continue until these are ready.
        for worker in seen.workers.keys() - serving.keys():
            if (assigned := later.get(worker)) is not None:
                told[worker] = assigned.variant
                answer[worker] = Wanted((assigned,), (assigned.variant,))
            else:
                answer[worker] = Wanted((), ())
        self._told = told
        if unknown and answer:  # an idle worker loads it, if there is one
            worker = min(answer, key=lambda w: (bool(answer[w].assigned), w))
            keep = dict.fromkeys((*answer[worker].keep, unknown[0]))
            answer[worker] = answer[worker]._replace(keep=tuple(keep))
        return answer

    def _is_new(self, later: Assigned | None, says: WorkerSays) -> bool:
        """Return whether a worker that has no work in the plan for the present workers has loaded
        its variant in the plan for all workers."""
        assert self._solved is not None
        if later is None or self._solved.now is self._solved.whole:
            return False
        return later.variant in says.loaded

    def _to_measure(self, seen: Seen, unknown: list[str]) -> dict[str, Wanted]:
        """Divide the variants that must be measured among the workers. A worker that has measured
        its variants takes the next."""
        turns = in_turn(unknown, self._task_of)
        avoided = {v for v in self._task_of if self._avoids(seen, v)}
        shares = self._measuring.shares(seen.workers, turns, avoided, self._setting.first_workers)
        return {w: Wanted((), variants) for w, variants in shares.items()}

    @staticmethod
    def _runs(seen: Seen) -> bool:
        return any(says.assigned for says in seen.workers.values())

    def _all(self, seen: Seen) -> Wanted:
        avoided = {v for v in self._task_of if self._avoids(seen, v)}
        return Wanted((), loadable(self._task_of, avoided))

    def _shared(self, says: WorkerSays, seen: Seen) -> Wanted:
        """Return the orders for a worker when there are fewer workers than tasks. It loads the
        plan's variants for all tasks. If the plan has enough workers for all tasks, the worker
        keeps its other variants too."""
        assert self._solved is not None
        now, whole = best(self._solved.now), best(self._solved.whole)
        plan = now if now.shared else whole
        variants = tuple(dict.fromkeys(a.variant for a in plan.assignments))
        if {self._task_of[v] for v in variants} != self._tasks:
            return self._all(seen)
        if plan.shared:
            return Wanted((), variants)
        return Wanted((), (*variants, *sorted(says.loaded - set(variants))))

    def _placed(
        self, plan: loki.Plan, workers: Mapping[str, WorkerSays]
    ) -> dict[str, Assigned] | None:
        """Return the assignments by worker, or None if they do not cover all tasks."""
        if plan.shared:
            return None
        used = {a.variant for a in plan.assignments}
        current = {w: self._current(says, used) for w, says in workers.items()}
        # Workers with variants come first; the others may still be starting.
        current = dict(sorted(current.items(), key=lambda item: item[1] is None))
        placed = place(plan, current)
        served = {self._task_of[assigned.variant] for assigned in placed.values()}
        return placed if served == self._tasks else None

    def _current(self, says: WorkerSays, used: set[str]) -> str | None:
        """Return the variant that a worker runs or was told to run. Otherwise return a variant of
        `used` that it has loaded."""
        if (told := self._told.get(says.worker)) is not None:
            return told
        if says.assigned:
            return says.assigned[0].variant
        return min(says.loaded & used, default=None)

    def _step(
        self,
        worker: str,
        assigned: Assigned,
        workers: Mapping[str, WorkerSays],
        placed: Mapping[str, Assigned],
    ) -> Wanted:
        """Return a worker's next step to `assigned`. A worker that alone serves a task continues to
        serve it until another worker can. Meanwhile it loads its next variant beside the present
        one."""
        says = workers[worker]
        now = says.assigned[0] if says.assigned else None
        if now is None or now.variant not in says.loaded or not self._setting.make_before_break:
            return Wanted((assigned,), (assigned.variant,))
        task = self._task_of[now.variant]
        if self._task_of[assigned.variant] == task:
            return Wanted((assigned,), (assigned.variant,))
        for other, its in workers.items():
            goal = placed.get(other)
            ready = goal is not None and goal.variant in its.loaded
            if other != worker and ready and self._task_of[goal.variant] == task:  # type: ignore[union-attr]
                return Wanted((assigned,), (assigned.variant,))
        return Wanted((now,), (now.variant, assigned.variant))

    def inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        factors = {v: f for v in self._task_of if (f := self._factors.of(v))}
        return {"demand": self.rate(now), "factors": factors}

    @property
    def expected(self) -> dict[str, Expected]:
        if self._solved is None:
            return {}
        plan = best(self._solved.now)
        return {"": Expected(None if plan.shared else plan.accuracy, plan.shed_share)}

    def outcome(self) -> dict[str, Any]:
        if self._job is None or self._solved is None:
            return {}
        plan = best(self._solved.now)
        return {
            "planned_demand": plan.planned_demand,
            "step": plan.step,
            "shared": plan.shared,
            "accuracy": plan.accuracy,
            "shed_share": plan.shed_share,
            "assignments": [a.to_json() for a in plan.assignments],
        }
