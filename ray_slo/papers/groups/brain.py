"""The brain of serving groups. It decides which models are in which group. In a pool it also
decides which workers are in which group. The decision comes from the configuration, from an
operator (`move`), or from the planner `herd` or `partition`. The brain then moves models and
workers step by step (`homes`).

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
from ray_slo.papers.groups.jobs import (
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
from ray_slo.papers.groups.plans import (
    Layout,
    Measured,
    make_problem,
    to_layout,
    worth_it,
)
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
from ray_slo.planning.brains.homes import Homes

logger = logging.getLogger(__name__)

_LISTEN_S = 3.0  # the longest time to wait for all workers' first reports


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


class GroupsBrain(Brain):
    """Keeps the layout of an application's groups, plans it anew, and carries it out."""

    def __init__(self, setting: GroupsSetting) -> None:
        self._setting = setting
        model_of = {v: m for m, variants in setting.variants.items() for v in variants}
        units = [(model,) for model in setting.variants]
        self._homes = Homes(setting.homes, {}, model_of, units, pool=not setting.groups)
        self._now = -math.inf
        self._has_begun = False
        self._fell_back = False
        self._counted: Counter[str] = Counter()  # requests of this interval, by stream
        self._since: float | None = None  # start of this interval, seconds
        self._rates: dict[str, float] = {}  # requests per second in the last interval, by stream
        self._shares: dict[str, Share] = {}  # by stream

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
        return (
            bool(seen.frontends)
            and (all_here or waited_s > _LISTEN_S)
            and seen.has_returned(waited_s)
        )

    def begin(self, now: float, seen: Seen) -> str:
        self._has_begun, self._now = True, max(self._now, now)
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
        self._homes.look(now, seen)
        sizes: dict[str, int] = {}
        if not self._setting.groups:
            sizes = dict(Counter(s.group for s in seen.workers.values() if s.group is not None))
            sizes |= {g: 1 for g in self._homes.layout.values() if g not in sizes}
        models = {**listed, **self._homes.layout}
        groups = sorted(sizes) or self._group_names()
        for model, variants in self._setting.variants.items():
            has = [s.group for s in seen.workers.values() if s.loaded >= {*variants} and s.group]
            models.setdefault(model, min(has or groups))
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
            self._homes.layout or known,
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
            self._fell_back = False
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
        if (layout := self._layout) is None:
            raise NotYet("the groups are not laid out yet; try again in a moment")
        groups = sorted(self._setting.groups or layout.groups)
        if group not in groups:
            raise ValueError(f"no group {group!r}; the groups are {', '.join(groups)}")
        if (refused := self._setting.refused.get((model, group))) is not None:
            raise ValueError(f"{model!r} cannot be in {group!r}: {refused}")
        why = f"{model} was moved to {group} by hand"
        self._adopt(Layout({**layout.models, model: group}, layout.sizes), why)
        return why

    @property
    def _layout(self) -> Layout | None:
        """The wanted layout. None before there is one."""
        return Layout(dict(self._homes.layout), self._homes.sizes) if self._homes.layout else None

    def _adopt(self, layout: Layout, why: str) -> None:
        self._homes.place(self._now, layout.models, layout.sizes)
        self._fell_back = False
        logger.info("layout: %s (%s)", layout, why)

    # -- answers ----------------------------------------------------------------------

    def wanted(self, now: float, seen: Seen, hopeless: bool) -> dict[str, Wanted]:
        self._now = max(self._now, now)
        if not self._homes.layout and hopeless:
            self._fall_back(seen)
        if not self._homes.layout:
            return {}
        self._homes.look(now, seen)
        told = {
            worker: Wanted((), self._variants_in(group))
            for worker, group in self._homes.members(seen).items()
        }
        return self._homes.send_home(told, seen, now)

    def _variants_in(self, group: str) -> tuple[str, ...]:
        """Return the variants of a group's models, and of those that have requests there."""
        layout, held = self._homes.layout, self._homes.held(group)
        models = [m for m in sorted(self._setting.variants) if layout.get(m) == group or m in held]
        return tuple(v for model in models for v in self._setting.variants[model])

    def _fall_back(self, seen: Seen) -> None:
        names = self._group_names()
        listed = {m: g for g, models in self._setting.groups.items() for m in models}
        models = {model: listed.get(model, names[0]) for model in self._setting.variants}
        sizes = {} if self._setting.groups else {names[0]: self._num_workers(seen)}
        self._adopt(Layout(models, sizes), "there is no plan")
        self._fell_back = True

    @property
    def routing(self) -> Routing | None:
        return self._homes.routing if self._homes.layout else None

    def inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        measured = self._measured(now, seen)
        return {
            "demand": sum(measured.rates.values()),
            "rates": dict(measured.rates),
            "throughput": dict(measured.throughput),
            "memory_mb": dict(measured.memory_mb),
        }

    def outcome(self) -> dict[str, Any]:
        if not self._homes.layout:
            return {}
        return {**self._homes.outcome(), "sizes": dict(self._homes.sizes)}

    def status(self, seen: Seen) -> dict[str, Any]:
        fallback = {"why": "there is no plan: every model in the first group"}
        return {
            "state": "settled",
            **(fallback if self._fell_back else {}),
            "load_errors": {
                f"{variant} on {worker}": why
                for worker, says in seen.workers.items()
                for variant, (why, _) in says.errors.items()
            },
            "rates": dict(self._rates),
            **self._homes.status(seen),
        }
