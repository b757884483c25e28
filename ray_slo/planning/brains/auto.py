"""The brain of the planner `auto`. It decides how many workers of each kind run, and what each of
them serves.

A problem contains the measurements of the application:

* the demand of every stream, with its dispersion and trend (`streams`),
* the numbers of child requests per request (multiplicative factors), and the mean request sizes,
* the workers' profiles and memory, and what they have loaded.

It is solved twice. The plan for the largest number of workers gives the number of each kind. The
plan for the workers that run now gives their work until the others are ready.

* **Number of workers.** Workers are added at once. They are removed when the plan has wanted fewer
  for an interval (`targets`). If requests are late although the plan is in force, the planner plans
  for more demand than was measured (Symphony §3.5). After `idle_s` without a request, an
  application has its smallest number of workers, which may be 0. The next request brings workers
  back.
* **Work of a worker.** Every worker loads all variants and serves all requests if two conditions
  hold. The policy chooses variants itself, or there is no choice; and all variants fit in the
  worker's memory. Otherwise each worker loads what the plan assigns to it. The plan swaps few
  variants. A worker loads its new variant before it unloads the old one.
* **Groups** have their own workers. One plan sizes all of them. It also chooses the group of each
  model that the configuration gives to no group. `homes` moves these models.
* **Time without a plan.** Variants with an unknown latency are measured first (`measure`). Until
  then, workers serve all requests with the variants that they have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from ray_slo.core.policy import Expected
from ray_slo.planning import auto
from ray_slo.planning.auto import Problem, Slot
from ray_slo.planning.auto.expected import bad_share, expected
from ray_slo.planning.auto.groups import units
from ray_slo.planning.brains.auto_jobs import AutoSetting, Job, Plans, solve
from ray_slo.planning.brains.brain import (
    FIRST,
    Brain,
    Counts,
    NotYet,
    Routing,
    Seen,
    Verdict,
    Wanted,
    WorkerSays,
)
from ray_slo.planning.brains.homes import Homes
from ray_slo.planning.brains.known import Known
from ray_slo.planning.brains.leaving import Leaving, staying
from ray_slo.planning.brains.measure import Measuring, also_measure, in_turn, loadable
from ray_slo.planning.brains.reserve import with_reserve
from ray_slo.planning.brains.steps import Steps
from ray_slo.planning.brains.streams import Streams
from ray_slo.planning.brains.targets import Target
from ray_slo.planning.result import best

_AHEAD_S = 60.0  # a trend is extrapolated at most this far
# Bad requests in this time after the last worker became ready do not count against the plan: they
# came before it.
_SETTLED_S = 1.0


class AutoBrain(Brain):
    """Plans any application: models, pipelines, kinds of workers and groups (see the module)."""

    def __init__(self, setting: AutoSetting) -> None:
        self._tuned: dict[str, Any] = {}
        self._limits: dict[str, int] = {}
        self._targets: dict[str, Target] = {}
        self._measuring: dict[str, Measuring] = {}
        self._known = Known(setting.problem, setting.profiles)
        self._homes = _homes(setting.problem, self._known.model_of)
        self._known.group_of = self._homes.layout  # the same object, so changes are seen
        expected = dict.fromkeys(setting.problem.streams, 0.0)
        self._streams = Streams(expected, setting.demand, setting.interval_s, setting.idle_s)
        self.configure(setting)
        self._job: Job | None = None
        self._solved: Plans | None = None
        self._expected: Callable[[], dict[str, Expected]] = dict  # of the plan in force
        self._steps = Steps(self._known.model_of)
        self._leaving = Leaving(self._known.model_of)
        self._now = -math.inf
        self._settled_since = math.inf  # since when all planned workers serve, seconds
        self._workers = 0  # number of workers at the last look
        self._served = False  # whether a worker has been ready
        self._follows = False  # whether an earlier planner had workers
        self._deserted = False  # whether all workers went, at the last look
        self._ready: Mapping[str, int] = {}  # serving workers at the last look, by kind

    @property
    def solve(self) -> Callable[[Job], Plans]:
        return solve

    def configure(self, setting: AutoSetting) -> None:
        self._given, self._setting = setting, (setting := setting.tuned(self._tuned))
        self._kinds = tuple(setting.problem.kind)
        for name in self._kinds:
            self._measuring.setdefault(name, Measuring())
        self._known.problem, self._known.profiles = setting.problem, setting.profiles
        self._streams.idle_s = setting.idle_s
        for name, demand in setting.problem.demand.items():
            self._streams[name].expected = demand.rate
        for name, target in self._targets.items():
            target.up_s, target.down_s = self._delays(name)

    def tune(self, kwargs: Mapping[str, Any]) -> bool:
        if dict(kwargs) == self._tuned:
            return False
        tuned = self._given.tuned(kwargs)
        self._tuned, self._setting, self._known.problem = dict(kwargs), tuned, tuned.problem
        return True

    def _delays(self, kind: str) -> tuple[float, float]:
        setting = self._setting
        return setting.up_s.get(kind, 0.0), setting.down_s.get(kind, setting.interval_s)

    # -- reports ---------------------------------------------------------------------

    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        self._now = max(self._now, now)
        self._streams.counted(now, over_s, counts)
        self._known.counted(counts)

    def _look(self, now: float, seen: Seen) -> None:
        """Note which workers are ready, and whether they are as many as planned."""
        self._now, self._workers = max(self._now, now), len(seen.workers)
        self._follows |= seen.successor
        self._deserted = bool(seen.profiles) and not seen.workers
        self._served |= any(says.ready for says in seen.workers.values())
        if not self._served:
            self._streams.unserved(now)
        self._known.look(seen)
        self._ready = self._present(seen)
        self._homes.look(now, seen)
        if self._solved is None or self._job is None:
            return
        wanted = best(self._solved.whole).workers
        present = Counter(says.kind for says in seen.workers.values() if says.ready)
        if all(present.get(kind, 0) >= n for kind, n in wanted.items()):
            self._settled_since = min(self._settled_since, now)
        else:
            self._settled_since = math.inf

    @property
    def first_workers(self) -> Mapping[str, int] | None:
        """The initial number of workers by kind, if the setting says it."""
        return self._setting.first_workers or None

    @property
    def start_s(self) -> float | None:
        return min(self._known.starts_s.values(), default=None)

    def _present(self, seen: Seen) -> dict[str, int]:
        """The number of serving workers, by kind."""
        serving = [says.kind for says in seen.serving.values()]
        return {kind: serving.count(kind) for kind in self._kinds}

    # -- problem and plan ------------------------------------------------------------------

    def problem(self, now: float, seen: Seen) -> Job:
        known, has, there = self._known, self._steps.has, self._present(seen)
        running = any(says.assigned for says in seen.workers.values())
        if unsized := sorted(self._setting.sized - known.sized):
            raise NotYet(f"no requests of {', '.join(unsized)}, and so no sizes, were seen yet")
        if self._solved is None and not running:
            kinds = {says.kind for says in seen.workers.values()}
            if not kinds:
                raise NotYet("no worker is there yet")
            if unknown := sorted({v for kind in kinds for v in known.unknown(seen, kind)}):
                raise NotYet(f"{', '.join(unknown)} not measured yet")
            first = self._setting.first_workers.items()
            self._homes.wait(now, [kind for kind, n in first if n and kind not in kinds])
        since = self._settled_since + _SETTLED_S
        if self._job is not None and self._demand_changed(self._job, now) == "demand changed":
            since = math.inf  # bad requests at another demand say nothing about the plan
        ahead_s = min(min(known.starts_s.values(), default=0.0), _AHEAD_S)
        workers = sum(there.values())
        demand, factors = self._streams.demand(now, ahead_s, workers, since)
        asked = replace(known.asked(seen, self._limits, has), demand=demand)
        asked = self._homes.asked(now, asked)
        last = best(self._solved.whole) if self._solved is not None else None
        idle = frozenset(name for name in self._streams if self._streams.is_idle(name, now))
        new = frozenset(kind for kind in self._kinds if not known.knows(seen, kind))
        usable, how = frozenset(known.usable(seen)), (new, self._tuned, self._setting.plan)
        return Job(asked, there, last, usable, now, factors, idle, *how)

    def due(self, now: float, seen: Seen) -> str:
        self._look(now, seen)
        job, solved = self._job, self._solved
        if job is None or solved is None:
            return FIRST
        if job.arguments != self._tuned:
            return "arguments changed"
        if frozenset(self._known.usable(seen)) != job.usable:
            return "profiles known"
        most = {k.name: k.max_workers for k in self._setting.problem.kinds}
        limits = {k: min(n, self._limits.get(k, n)) for k, n in most.items()}
        if limits != {kind.name: kind.max_workers for kind in job.whole.kinds}:
            return "limits changed"
        if self._known.sizes_differ():
            return "sizes changed"
        if changed := self._workers_changed(job, solved, seen):
            return changed
        return self._demand_changed(job, now)

    def _workers_changed(self, job: Job, solved: Plans, seen: Seen) -> str:
        useful, present = best(solved.whole).workers, self._present(seen)
        for kind, n in present.items():
            before = job.present.get(kind, 0)
            if min(n, useful.get(kind, 0)) != min(before, useful.get(kind, 0)):
                return "worker joined" if n > before else "worker lost"
        return ""

    def _demand_changed(self, job: Job, now: float) -> str:
        for name in self._streams:
            stream, planned = self._streams[name], job.whole.demand[name].rate
            idle = self._streams.is_idle(name, now)
            if idle != (name in job.idle):
                return "idle" if idle else "first request"
            if not idle and stream.differs(now, planned / job.factors[name]):
                return "demand changed"
        since = max(self._settled_since + _SETTLED_S, job.now)
        short = self._solved is not None and self._solved.shortfall is not None
        if not short and any(self._streams[name].is_bad(since) for name in self._streams):
            return "bad rate"
        return ""

    def adopt(self, problem: Job, answer: Plans) -> Verdict:
        self._job, self._solved = problem, answer
        whole, plan, factors = problem.whole, best(answer.now), problem.factors
        self._expected = cache(lambda: expected(whole, plan, factors))  # frontends ask often
        self._now = max(self._now, problem.now)
        self._known.planned()
        self._homes.place(self._now, best(answer.whole).group_of)
        for name, factor in problem.factors.items():
            stream = self._streams[name]
            if factor > stream.factor or stream.factor > 1:
                stream.factor, stream.factor_at = factor, problem.now
        nobody = len(problem.idle) == len(problem.factors)
        for kind, workers in best(answer.whole).workers.items():
            if kind not in self._setting.scales:
                continue
            if kind not in self._targets:
                began = {} if self._follows else self._setting.first_workers
                first = problem.present.get(kind, 0) or began.get(kind, 0)
                self._targets[kind] = Target(first, *self._delays(kind))
            self._targets[kind].wants(problem.now, workers, at_once=nobody)
        why = best(answer.whole).explanation
        if answer.shortfall is not None:
            why = f"Best effort, as {answer.shortfall}. {why}"
        if answer.now is not answer.whole:
            there = sum(problem.present.values())
            why += f" With the {there} that are there: {best(answer.now).explanation}"
        return Verdict(why, answer.shortfall)

    # -- orders ----------------------------------------------------------------------

    def limit(self, kind: str, most: int) -> None:
        self._limits[kind] = most

    def target(self, kind: str) -> int | None:
        if kind not in self._kinds or kind not in self._setting.scales:
            return None
        if self._job is not None and kind in self._job.unknown:
            return None  # its first workers have not come yet; without them, it stays unknown
        if kind in self._targets:
            at = max(self._targets[kind].at(self._now), self._leaving.least.get(kind, 0))
            at = min(at, self._limits.get(kind, at))
            # A worker stays while it serves a model that is leaving the group.
            leaving = self._homes.leaving(self._setting.problem.kind[kind].group)
            return max(at, self._ready.get(kind, 0)) if leaving else at
        # Without any worker, no latency can be measured.
        waiting = any(self._streams[stream].seen for stream in self._streams)
        began_with = any(self._setting.first_workers.get(k, 1) for k in self._kinds)
        nobody = self._deserted or (not began_with and not self._workers)
        return 1 if waiting and nobody else None

    def wanted(self, now: float, seen: Seen, hopeless: bool) -> dict[str, Wanted]:
        told = self._orders(now, seen, hopeless)
        fits = partial(self._known.fit, seen)
        if self._solved is not None:
            slots = best(self._solved.whole).slots
            self._leaving.look(self._planned(now), seen.serving, slots, fits)
            told = self._leaving.also(told)
        return self._homes.send_home(told, seen, now, fits)

    @property
    def routing(self) -> Routing | None:
        return self._homes.routing

    def move(self, model: str, group: str) -> str:
        if self.routing is None:
            return super().move(model, group)
        raise ValueError(
            "the planner 'auto' leaves models in the groups that list them, and chooses one for "
            "the others; deploy again with other groups.NAME.models, or choose 'partition'"
        )

    def _orders(self, now: float, seen: Seen, hopeless: bool) -> dict[str, Wanted]:
        self._look(now, seen)
        if hopeless and self._solved is None:
            self._homes.give_up(now)
        if choosing := self._setting.choosing:
            fits = {kind: self._known.all_fit(seen, kind) for kind in choosing}
            free = {w: says for w, says in seen.workers.items() if fits.get(says.kind)}
            told = {w: Wanted((), self._all(seen, says.kind)) for w, says in free.items()}
            for kind in choosing:
                also_measure(self._known, seen, kind, told)
            rest = {w: says for w, says in seen.workers.items() if w not in free}
            return told | (self._placed(now, seen, hopeless, rest) if rest else {})
        return self._placed(now, seen, hopeless, seen.workers)

    def _placed(
        self, now: float, seen: Seen, hopeless: bool, workers: Mapping[str, WorkerSays]
    ) -> dict[str, Wanted]:
        """Return the orders for workers whose memory does not hold all variants."""
        if self._solved is None:
            if hopeless:
                runs = any(says.assigned for says in workers.values())
                idle = {w: says for w, says in workers.items() if not (runs and says.loaded)}
                return {w: Wanted((), self._all(seen, says.kind)) for w, says in idle.items()}
            return self._to_measure(seen, workers)
        serving = {w: says for w, says in seen.serving.items() if w in workers}
        stay = staying(self._planned(now), {**serving, **workers})
        whole, meanwhile = best(self._solved.whole), best(self._solved.now)
        placed = auto.place(whole, self._having(stay))
        if meanwhile is not whole:
            later = placed
            placed = auto.place(
                meanwhile, self._having({w: says for w, says in stay.items() if w in serving})
            )
            # New workers do the work that they were started for.
            placed |= {w: slot for w, slot in later.items() if w not in placed}
        fits = partial(self._known.fit, seen)
        breaks = not self._setting.make_before_break
        told = self._steps.towards(placed, workers, serving, fits, breaks)
        for worker in [w for w in told if seen.workers[w].kind in self._setting.choosing]:
            told[worker] = told[worker]._replace(assigned=())
        for kind in self._kinds:
            also_measure(self._known, seen, kind, told)
        asked = self._setting.problem
        if asked.accuracy_floor or not asked.headroom:  # with a floor, the policy chooses
            return told
        return with_reserve(self._known, seen, told, self._steps.has)

    def _planned(self, now: float) -> dict[str, int]:
        """Return the wanted number of workers, for each kind that Serve scales."""
        return {k: self._targets[k].at(now) for k in self._setting.scales & self._targets.keys()}

    def _having(self, workers: Mapping[str, WorkerSays]) -> dict[str, tuple[str, frozenset[str]]]:
        """Return each worker's kind, and the variants that it has loaded or was told to load.
        Workers with variants come first, because the others may still be starting."""
        found = {w: (says.kind, self._steps.has(says)) for w, says in workers.items()}
        return dict(sorted(found.items(), key=lambda item: not item[1][1]))

    def _all(self, seen: Seen, kind: str) -> tuple[str, ...]:
        return loadable(self._known.model_on(kind), {v for v, k in seen.avoided if k == kind})

    def _to_measure(self, seen: Seen, workers: Mapping[str, WorkerSays]) -> dict[str, Wanted]:
        """Divide the variants that must be measured among the workers of each kind."""
        answer: dict[str, Wanted] = {}
        for kind, measuring in self._measuring.items():
            turns = in_turn(self._known.unknown(seen, kind), self._known.model_of)
            avoided = {v for v, k in seen.avoided if k == kind}
            its = {w: says for w, says in workers.items() if says.kind == kind}
            expected = self._setting.first_workers.get(kind, 1)
            shares = measuring.shares(its, turns, avoided, expected)
            answer |= {w: Wanted((), variants) for w, variants in shares.items()}
        return answer

    # -- status ----------------------------------------------------------------------

    def inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        streams = {
            name: {
                "rate": 0.0 if self._streams.is_idle(name, now) else self._streams[name].rate(now),
                "dispersion": self._streams[name].dispersion,
            }
            for name in self._streams
        }
        factors, sizes = self._known.factors, self._known.sizes_seen()
        budget = self._setting.problem.budget_per_hour
        told = {"factors": factors or None, "sizes": sizes or None, "budget_per_hour": budget}
        answer = {name: value for name, value in told.items() if value is not None}
        demand = sum(one["rate"] for one in streams.values())
        return {"demand": demand, "streams": streams, **answer}

    @property
    def expected(self) -> dict[str, Expected]:
        return self._expected()

    def outcome(self) -> dict[str, Any]:
        if self._job is None or self._solved is None:
            return {}
        plan, job = best(self._solved.now), self._job
        return {
            "planned_demand": sum(one.rate for one in job.whole.demand.values()),
            "step": plan.step,
            "accuracy": plan.accuracy,
            "swaps": plan.swaps,
            "bad_rate": bad_share(job.whole, plan, job.factors),
            "served": dict(plan.served),
            "cost_per_hour": best(self._solved.whole).cost_per_hour,
            **self._homes.outcome(),
            "assignments": assignments(plan.slots, self._known.model_of),
        }

    def status(self, seen: Seen) -> dict[str, Any]:
        boosts = {n: s.factor for n in self._streams if (s := self._streams[n]).factor > 1.005}
        told = {"start_s": self._known.starts_s, "planned_over_measured": boosts}
        return {name: said for name, said in told.items() if said} | self._homes.status(seen)


def _homes(problem: Problem, model_of: Mapping[str, str]) -> Homes:
    kinds = {kind.name: kind.group for kind in problem.kinds if kind.group}
    listed, free = dict(problem.group_of), []
    for unit in units(problem) if kinds else ():
        if named := [problem.group_of[model] for model in unit if model in problem.group_of]:
            listed = dict.fromkeys(unit, named[0]) | listed
        else:
            free.append(unit)
    return Homes(kinds, listed, model_of, free, problem.allowed_groups)


def assignments(slots: tuple[Slot, ...], model_of: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what workers serve, for people and logs. Workers with the same work are one entry."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for slot in slots:
        for part in slot.parts:
            key = slot.kind, part.variant, part.batch_size
            found.setdefault(key, []).append(part.load or 0.0)
    return [
        {
            "task": model_of[variant],
            "variant": variant,
            "kind": kind,
            "batch_size": batch_size,
            "workers": len(loads),
            "load": sum(loads),
        }
        for (kind, variant, batch_size), loads in found.items()
    ]
