"""The brain of serving groups. It decides which models are in which group. In a pool it also
decides which workers are in which group. The decision comes from the configuration, from an
operator (`move`), or from the planner `herd` or `partition`. The brain then moves models and
workers step by step (`layouts`).

The planners use the request rates of the last interval, and each worker's throughput from the known
profiles. A plan that is better than the present layout by at most the share `min_gain` changes
nothing. If the first problem has no solution, workers follow the planner's best effort. If there is
none, all models that the configuration does not list form one group. After a later failure, the
last layout stays.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray_slo.core import LatencyProfile
from ray_slo.core.trees import root_and_class
from ray_slo.planning import Infeasible
from ray_slo.planning.brains.brain import (
    Brain,
    Counts,
    NotYet,
    Routing,
    Seen,
    Verdict,
    Wanted,
)
from ray_slo.planning.brains.group_jobs import (
    Goodput,
    Job,
    Profiles,
    Share,
    Solved,
    measured_of,
    memory_of,
    profiles_of,
    solve_job,
)
from ray_slo.planning.brains.group_plans import Measured, make_problem, to_layout, worth_it
from ray_slo.planning.brains.layouts import Layout, Order, Place, members, orders, routed, settled

logger = logging.getLogger(__name__)

_LISTEN_S = 3.0  # the longest time to wait for all workers' first reports
_DRAIN_S = 60.0  # the longest time to drain a model's requests from a group


@dataclass(frozen=True)
class GroupsSetting:
    """The brain's settings for one application.

    Attributes:
        variants: names of each model's variants, as workers load them.
        slos_s: SLO of each stream (a model, or "model@class"), in seconds.
        workers: number of workers in the configuration.
        groups: initial models of each configured group. If empty, workers are a pool, and the
            planner makes the groups.
        homes: group of each kind of worker. Empty for a pool.
        planner: "herd", "partition", or None for the layout in the configuration.
        kwargs: further arguments of the planner's problem.
        rates: expected requests per second by stream, until an interval is measured. The default is
            1 for a model, and 0 for its SLO classes.
        memory_mb: configured memory of models, in MB.
        min_gain: least gain of a plan that changes the layout, as a share (see the module).
        profiles: profiles of variants from files.
        refused: the reason why a group's policy cannot serve a model, by (model, group).
        goodput: function that simulates the policy in use on one worker (`group_jobs.Goodput`).
    """

    variants: Mapping[str, tuple[str, ...]]
    slos_s: Mapping[str, float]
    workers: int
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    homes: Mapping[str, str] = field(default_factory=dict)
    planner: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    memory_mb: Mapping[str, float] = field(default_factory=dict)
    min_gain: float = 0.1
    profiles: Mapping[str, LatencyProfile] = field(default_factory=dict)
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)
    goodput: Goodput | None = None


@dataclass
class _Drain:
    number: int  # a frontend that has applied this routing sends no more requests
    since: float  # seconds


class GroupsBrain(Brain):
    """Keeps the layout of an application's groups, plans it anew, and carries it out."""

    def __init__(self, setting: GroupsSetting) -> None:
        self._setting = setting
        self._layout: Layout | None = None
        self._has_begun = False
        self._fell_back = False
        self._counted: Counter[str] = Counter()  # requests of this interval, by stream
        self._since: float | None = None  # start of this interval, seconds
        self._rates: dict[str, float] = {}  # requests per second in the last interval, by stream
        self._shares: dict[str, Share] = {}  # by stream
        self._member: dict[str, str] = {}
        self._routes: dict[str, str] = {}
        self._draining: dict[tuple[str, str], _Drain] = {}
        self._number = 0
        self._moves = 0

    @property
    def solve(self) -> Callable[[Job], Any]:
        return solve_job

    def configure(self, setting: GroupsSetting) -> None:
        self._setting = setting

    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        for stream, count in counts.requests.items():
            known = stream if stream in self._setting.slos_s else root_and_class(stream)[0]
            self._counted[known] += count

    # -- when it plans ---------------------------------------------------------------------

    def may_begin(self, seen: Seen, waited_s: float, listened_s: float) -> bool:
        # A restarted planner learns the present groups from the workers' reports.
        all_here = len(seen.workers) >= self._setting.workers
        return bool(seen.frontends) and (all_here or waited_s > _LISTEN_S)

    def begin(self, now: float, seen: Seen) -> str:
        self._has_begun = True
        setting = self._setting
        listed = {m: group for group, models in setting.groups.items() for m in models}
        if seen.planned_before:
            why = "taken over from before the planner was restarted"
            self._take_over(now, seen, listed)
        elif setting.planner is None or (
            listed.keys() == setting.variants.keys() and not setting.rates
        ):
            why = "as configured"
            self._adopt(Layout(listed), why)
        else:
            return ""
        self._since = now
        return why

    def _take_over(self, now: float, seen: Seen, listed: Mapping[str, str]) -> None:
        """Take over the state of an earlier planner."""
        for says in seen.frontends.values():
            self._routes = {**says.routes, **self._routes}
        places = self._places(seen)
        sizes: dict[str, int] = {}
        if not self._setting.groups:
            sizes = dict(Counter(p.group for p in places.values() if p.group is not None))
            sizes |= {g: 1 for g in self._routes.values() if g not in sizes}
        for place in places.values():  # other loaded models may still have requests
            for model in place.loaded:
                group = place.group
                if group is not None and self._routes.get(model, group) != group:
                    self._draining[model, group] = _Drain(self._number, now)
        models = {**listed, **self._routes}
        groups = sorted(sizes) or self._group_names()
        for model in self._setting.variants:
            having = sorted(p.group for p in places.values() if p.group and model in p.loaded)
            models.setdefault(model, (having or groups)[0])
        self._adopt(Layout(models, sizes), "taken over")

    def problem(self, now: float, seen: Seen) -> Job:
        setting = self._setting
        if not self._has_begun:
            raise NotYet("the groups are not laid out yet; try again in a moment")
        if setting.planner is None:
            raise NotYet("the application has no planner; name one, or move models by hand")
        unknown = self._unknown(seen)
        measured = self._measured(now, seen, unknown)
        known = {m: g for g, models in setting.groups.items() for m in models}
        workers = self._num_workers(seen)
        problem = make_problem(
            setting.planner,
            setting.kwargs,
            measured,
            setting.memory_mb,
            workers,
            self._group_names(),
            self._layout.models if self._layout is not None else known,
        )
        counted = dict(self._counted)
        return Job(problem, workers, now, measured, counted, setting.goodput, unknown)

    def _measured(self, now: float, seen: Seen, without: Collection[str] = ()) -> Measured:
        """Return the present measurements. For the streams `without`, the learned share of the
        throughput is out of date and not used."""
        setting, streams = self._setting, self._setting.slos_s
        rates = self._rates or {
            s: setting.rates.get(s, 1.0 if s in setting.variants else 0.0) for s in streams
        }
        if self._since is not None and self._counted and now > self._since:
            rates = {s: self._counted[s] / (now - self._since) for s in streams}
        shares = {s: share.share for s, share in self._shares.items() if s not in without}
        found = measured_of(rates, streams, self._profiles(seen), shares)
        memory_mb, room_mb = memory_of(setting.variants, seen)
        return replace(found, memory_mb=memory_mb, room_mb=room_mb)

    def _profiles(self, seen: Seen) -> dict[str, Profiles]:
        setting = self._setting
        return {m: profiles_of(of, seen, setting.profiles) for m, of in setting.variants.items()}

    def _unknown(self, seen: Seen) -> dict[str, tuple[Profiles, float]]:
        """Return the streams whose goodput under the policy is unknown, with the profiles and the
        SLO in seconds."""
        setting, unknown = self._setting, dict[str, tuple[Profiles, float]]()
        if setting.planner != "herd" or setting.goodput is None:
            return unknown
        of_model = self._profiles(seen)
        for stream, slo_s in setting.slos_s.items():
            profiles, share = of_model[root_and_class(stream)[0]], self._shares.get(stream)
            if profiles and not (share and share.fits(profiles)):
                unknown[stream] = profiles, slo_s
        return unknown

    def _num_workers(self, seen: Seen) -> int:
        # A worker that is being replaced counts: a plan must not shrink the service.
        return max(self._setting.workers, len(seen.workers))

    def _group_names(self) -> list[str]:
        parts = self._setting.kwargs.get("sub_clusters", 1)
        return list(self._setting.groups) or [f"g{i + 1}" for i in range(parts)]

    def adopt(self, problem: Job, answer: Solved) -> Verdict:
        if self._since is not None and problem.counted:
            self._rates = dict(problem.measured.rates)
        self._counted -= Counter(problem.counted)
        self._since = problem.now
        self._shares.update(answer.shares)
        before, min_gain = self._layout, self._setting.min_gain
        feasible = not isinstance(answer.answer, Infeasible)
        plan = answer.answer if feasible else answer.answer.best_effort
        why = plan.explanation
        if not feasible:
            why = f"infeasible: {answer.answer.reason}; {why}"
            if before is not None:
                logger.warning("the layout stays: %s", why)
                return Verdict(why, holds=True)
        elif (
            before is not None
            and not self._mixes(problem.measured, before)
            and not worth_it(answer.problem, before, plan, min_gain)
        ):
            return Verdict(f"kept, as moves would gain no more than {min_gain:.0%}: {why}")
        names, pool = self._group_names(), not self._setting.groups
        self._adopt(to_layout(plan, problem.workers, names, before, pool=pool), why)
        return Verdict(why, None if feasible else why)

    def _mixes(self, measured: Measured, layout: Layout) -> bool:
        """Return whether a group mixes models whose profiles differ too much. `max_affinity` is the
        limit; `min_gain` is added to it for errors of the profiles."""
        setting = self._setting
        most = setting.kwargs.get("max_affinity", math.inf) * (1 + setting.min_gain)
        return any(measured.divergence(layout.of(g)) > most for g in layout.groups)

    def move(self, model: str, group: str) -> str:
        if model not in self._setting.variants:
            raise LookupError(model)
        if self._layout is None:
            raise NotYet("the groups are not laid out yet; try again in a moment")
        groups = sorted(self._setting.groups or self._layout.groups)
        if group not in groups:
            raise ValueError(f"no group {group!r}; the groups are {', '.join(groups)}")
        if (refused := self._setting.refused.get((model, group))) is not None:
            raise ValueError(f"{model!r} cannot be in {group!r}: {refused}")
        why = f"{model} was moved to {group} by hand"
        self._adopt(Layout({**self._layout.models, model: group}, self._layout.sizes), why)
        return why

    def _adopt(self, layout: Layout, why: str) -> None:
        self._layout = layout
        self._fell_back = False
        self._number += 1  # frontends may have to connect to new groups
        logger.info("layout: %s (%s)", layout, why)

    # -- answers ----------------------------------------------------------------------

    def wanted(self, now: float, seen: Seen, hopeless: bool) -> dict[str, Wanted]:
        if self._layout is None and hopeless:
            self._fall_back(seen)
        if self._layout is None:
            return {}
        places = self._places(seen)
        self._drain(now, seen)
        self._step(now, places)
        return {
            worker: Wanted((), self._variants_of(order), group=order.group)
            for worker, order in self._orders(places).items()
        }

    def _fall_back(self, seen: Seen) -> None:
        names = self._group_names()
        listed = {m: g for g, models in self._setting.groups.items() for m in models}
        models = {model: listed.get(model, names[0]) for model in self._setting.variants}
        sizes = {} if self._setting.groups else {names[0]: self._num_workers(seen)}
        self._adopt(Layout(models, sizes), "there is no plan")
        self._fell_back = True

    def _places(self, seen: Seen) -> dict[str, Place]:
        def loaded(variants: frozenset[str]) -> frozenset[str]:
            models = self._setting.variants.items()
            return frozenset(model for model, of in models if variants.issuperset(of))

        homes = self._setting.homes
        return {
            name: Place(homes.get(says.kind), says.group, loaded(says.loaded))
            for name, says in seen.workers.items()
        }

    def _orders(self, places: Mapping[str, Place]) -> dict[str, Order]:
        assert self._layout is not None
        return orders(self._layout, self._member, places, self._routes, self._draining)

    def _variants_of(self, order: Order) -> tuple[str, ...]:
        return tuple(v for model in order.models for v in self._setting.variants[model])

    def _step(self, now: float, places: Mapping[str, Place]) -> None:
        """Take the next step towards the wanted layout."""
        assert self._layout is not None
        known = {worker: group for worker, group in self._member.items() if worker in places}
        self._member = members(self._layout, places, known)
        routes = routed(self._layout, self._member, places, self._routes)
        if routes == self._routes:
            return
        self._number += 1
        for model, old in self._routes.items():
            if (new := routes[model]) != old:
                self._moves += 1
                self._draining[model, old] = _Drain(self._number, now)
                self._draining.pop((model, new), None)
                logger.info("%s is served by %s now, no more by %s", model, new, old)
        self._routes = routes

    def _drain(self, now: float, seen: Seen) -> None:
        """Stop draining a moved model from groups that have no more requests of it."""
        frontends = seen.frontends.values()
        for (model, group), drain in list(self._draining.items()):
            if any(says.applied[1] < drain.number for says in frontends):
                continue
            if now - drain.since > _DRAIN_S:
                logger.warning("%s still has requests of %s; draining no longer", group, model)
            elif any(says.queued.get((model, group)) for says in frontends):
                continue
            del self._draining[model, group]

    @property
    def routing(self) -> Routing | None:
        if self._layout is None:
            return None
        groups = tuple(sorted({*self._routes.values(), *self._layout.groups}))
        complete = self._layout.models.keys() <= self._routes.keys()
        return Routing(self._number, dict(self._routes), groups, complete)

    def inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        measured = self._measured(now, seen)
        return {
            "demand": sum(measured.rates.values()),
            "rates": dict(measured.rates),
            "throughput": dict(measured.throughput),
            "memory_mb": dict(measured.memory_mb),
        }

    def outcome(self) -> dict[str, Any]:
        if self._layout is None:
            return {}
        return {"groups": dict(self._layout.models), "sizes": dict(self._layout.sizes)}

    def status(self, seen: Seen) -> dict[str, Any]:
        layout, places, state = self._layout, self._places(seen), "starting"
        if layout is not None:
            done = settled(layout, self._member, places, self._routes, self._draining)
            state = "settled" if done else "moving"
        fallback = {"why": "there is no plan: every model in the first group"}
        names = {*self._routes.values(), *(layout.groups if layout else ()), *self._setting.groups}
        return {
            **(fallback if self._fell_back else {}),
            "state": state,
            "load_errors": {
                f"{variant} on {worker}": why
                for worker, says in seen.workers.items()
                for variant, (why, _) in says.errors.items()
            },
            "moves": self._moves,
            "rates": dict(self._rates),
            "groups": {
                group: {
                    "models": sorted(m for m, g in self._routes.items() if g == group),
                    "wanted_models": sorted(layout.of(group)) if layout else [],
                    "draining": sorted(m for m, g in self._draining if g == group),
                    "workers": sorted(w for w, p in places.items() if p.group == group),
                }
                for group in sorted(names)
            },
        }
