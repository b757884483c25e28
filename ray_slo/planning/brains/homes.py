"""Groups of models and workers that share a scheduler: which they are, and how a model moves.

A group has its own kinds of workers. Or the workers are a *pool*, and the planner says how many of
them each group has. Some models stay in the group that lists them. The planner chooses the group of
the others (`place`). All models of a *unit* are in one group. A unit moves in three steps:

1. The workers of the new group load the unit's planned variants beside their other models.
2. The unit's requests are routed to the new group.
3. When the old group has no more requests of the unit, its workers unload it.

If the new group cannot load the unit, the unit stays in the old one. A worker of a pool changes its
group when two conditions hold. It has loaded the new group's models, and other workers have loaded
the models that its old group still serves.

A new planner takes over the routes that frontends report. Without such a report, it looks at what
workers had loaded at their first report.

    >>> homes = Homes({"cpu": "a", "gpu": "b"}, {"l": "a"}, {"l": "l", "m-1": "m"}, [("m",)])
    >>> homes.place(0.0, {"l": "a", "m": "b"})
    >>> homes.routing.routes, homes.routing.complete  # nobody has loaded anything yet
    ({'l': 'a', 'm': 'b'}, False)
    >>> cpu = WorkerSays("w", "cpu", frozenset({"l"}), group="a")
    >>> gpu = WorkerSays("v", "gpu", frozenset({"m-1"}), group="b")
    >>> homes.look(0.0, Seen({"w": cpu, "v": gpu}))
    >>> homes.routing.complete
    True
    >>> homes.send_home({"w": Wanted((), ("l",))}, Seen({"w": cpu}))["w"].group
    'a'
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray_slo.planning.auto import Problem
from ray_slo.planning.brains.brain import NotYet, Routing, Seen, Wanted, WorkerSays

logger = logging.getLogger(__name__)

_DRAIN_S = 60.0  # the longest time to drain a model's requests from a group
# After this time, one worker that has loaded a unit is enough, and a move fails with an error of a
# worker that cannot load it.
_PATIENCE_S = 60.0
_LOADS_S = 300.0  # a move that takes longer is given up
_STUCK_S = 600.0  # after this time, a group may be tried again that could not load a model
_GROUPS_S = 30.0  # the longest time that a first plan waits for workers of all groups
_REVIEW_S = 60.0  # the shortest time between two moves

Fits = Callable[[frozenset[str], str], bool]  # do these variants fit on a worker of this kind?


@dataclass
class _Drain:
    number: int  # a frontend that has applied this routing sends no more requests
    since: float  # seconds


def divided(
    workers: Mapping[str, WorkerSays],
    sizes: Mapping[str, int],
    home: Mapping[str, str],
    before: Mapping[str, str],
) -> dict[str, str]:
    """Return the group that each worker of a pool should be in. A worker stays in its group while
    the group has too few workers or just enough.

    Args:
        sizes: wanted number of workers by group.
        home: wanted group of each variant.
        before: the last answer.
    """
    now = {w: before.get(w) or says.group for w, says in workers.items()}
    chosen: dict[str, str] = {}
    free = [w for w, group in now.items() if group is None]
    for group in dict.fromkeys(g for g in now.values() if g is not None):
        mine = [w for w, g in now.items() if g == group]
        mine.sort(key=lambda w: (-sum(home.get(v) == group for v in workers[w].loaded), w))
        room = sizes.get(group, 0)
        chosen |= dict.fromkeys(mine[:room], group)
        free += mine[room:]
    for worker in sorted(free if sizes else []):
        count = Counter(chosen.values())
        filled = {g: count[g] / n if n else math.inf for g, n in sizes.items()}
        # Surplus workers stay in their groups.
        stays = now[worker] if min(filled.values()) >= 1 else None
        where = stays if filled.get(stays or "", math.inf) < math.inf else None
        chosen[worker] = where or min(filled, key=lambda g: (filled[g], g))
    return chosen


class Homes:
    """Keeps the group of each worker, and the group that serves each model.

    Args:
        kinds: group of each kind of worker. Empty without groups, and in a pool.
        listed: group of each model that the configuration lists, and that stays there.
        model_of: model of each variant.
        units: sets of models that the configuration does not list and that must share a group.
        allowed: groups that may serve a model, by model. The default is all groups.
        pool: whether the planner divides the workers among the groups.

    Attributes:
        layout: wanted group of each model.
        sizes: wanted number of workers of each group of a pool.
        stuck: pairs of a model and a group that could not load it, and when (seconds).
        moves: number of moves of units so far.
    """

    def __init__(
        self,
        kinds: Mapping[str, str],
        listed: Mapping[str, str],
        model_of: Mapping[str, str],
        units: Sequence[tuple[str, ...]] = (),
        allowed: Mapping[str, Collection[str]] | None = None,
        pool: bool = False,
    ) -> None:
        self._allowed = allowed or {}
        self._kinds, self._pool = dict(kinds), pool
        self.sizes: dict[str, int] = {}
        self._member: dict[str, str] = {}  # wanted group of each worker of a pool
        self._listed = dict(listed)
        self._model_of = dict(model_of)
        self._units = [unit for unit in units if kinds or pool]
        self.layout: dict[str, str] = dict(listed)
        self._routes: dict[str, str] = dict(listed)
        self._draining: dict[tuple[str, str], _Drain] = {}
        self._moving_since: dict[tuple[str, ...], float] = {}
        self._moved_at: float | None = None
        self._found: dict[str, tuple[str | None, set[str]]] = {}  # workers' first group and models
        self.stuck: dict[tuple[str, str], float] = {}
        self._waits_since: float | None = None
        self._number, self.moves = 1, 0
        # Once True, it stays True: a lost worker does not count, because Serve replaces it.
        self._complete = self._placed = False

    # -- the wanted layout --------------------------------------------------------------------

    @property
    def unplaced(self) -> list[str]:
        """Models that have no group yet."""
        return [model for unit in self._units for model in unit if model not in self.layout]

    def may_move(self, now: float) -> bool:
        """Return whether a plan may move units. It may not while a unit moves, nor in the minute
        after a move."""
        settled = not self._moving_since and not self._draining
        lately = self._moved_at is not None and now - self._moved_at < _REVIEW_S
        return bool(self._units) and settled and not lately

    def wait(self, now: float, missing: Sequence[str]) -> None:
        """Delay the first plan until workers of all groups have reported. Otherwise the plan could
        not choose the groups without workers.

        Args:
            missing: kinds of workers that have not reported.

        Raises:
            NotYet: workers of these kinds may still come.
        """
        if not self.unplaced or not missing:
            return
        if self._waits_since is None:
            self._waits_since = now
        if now - self._waits_since < _GROUPS_S:
            raise NotYet(f"no worker of {', '.join(missing)} is there yet")

    def asked(self, now: float, problem: Problem) -> Problem:
        """Return the problem, with the groups of models that stay, and with the allowed groups of
        the others."""
        if not self._units:
            return replace(problem, group_of=dict(self.layout)) if self._kinds else problem
        if not self.unplaced and not self.may_move(now):
            return replace(problem, group_of=dict(self.layout))
        allowed = dict(problem.allowed_groups)
        stuck = {pair for pair, since in self.stuck.items() if now - since < _STUCK_S}
        for model in {model for model, _ in stuck}:
            may = [g for g in problem.groups if (model, g) not in stuck]
            its = allowed.get(model, problem.groups)
            allowed[model] = tuple(g for g in its if g in may) or its
        now_in = {m: g for m, g in self.layout.items() if m not in self._listed}
        return replace(
            problem, group_of=dict(self._listed), group_now=now_in, allowed_groups=allowed
        )

    def give_up(self, now: float) -> None:
        """Place models that have no group in the first group that may serve them. This is for the
        time without a plan."""
        for unit in self._units:
            if unit[0] not in self.layout:
                self.place(now, dict.fromkeys(unit, self._fallback(unit)))

    def _fallback(self, unit: tuple[str, ...]) -> str:
        may = [self._allowed[model] for model in unit if model in self._allowed]
        groups = dict.fromkeys(self._kinds.values())
        return next((g for g in groups if all(g in its for its in may)), next(iter(groups)))

    def place(
        self, now: float, group_of: Mapping[str, str], sizes: Mapping[str, int] | None = None
    ) -> None:
        """Start to move units to their groups.

        Args:
            group_of: group by model. Other models stay.
            sizes: number of workers of each group of a pool. None: as before.
        """
        before, self._placed = self.groups, True
        self.sizes = dict(self.sizes if sizes is None else sizes)
        for unit in self._units:
            group = group_of.get(unit[0])
            if group is None or self.layout.get(unit[0]) == group:
                continue
            new = dict.fromkeys(unit, group)
            self.layout |= new
            if unit[0] not in self._routes:
                self._start(now, unit, group)
            elif self._routes[unit[0]] == group:  # the unit stays; its move is cancelled
                self._moving_since.pop(unit, None)
            else:
                self._moving_since[unit] = now
        self._number += self.groups != before  # frontends connect to new groups

    def _start(self, now: float, unit: tuple[str, ...], group: str) -> None:
        """Route a unit for the first time. If only workers of other groups have loaded it, under an
        earlier planner, the unit is first routed to one of these groups and moves from there.
        Otherwise it is routed to `group`."""
        having = [g for g in self.groups if self._had(unit, g)]
        at = group if group in having or not having else having[0]
        self._routes |= dict.fromkeys(unit, at)
        self._number += 1
        for other in having:
            if other != at:  # the unit was moving, so frontends may still send requests there
                self._draining |= {(m, other): _Drain(self._number, now) for m in unit}
        if at != group:
            self._moving_since[unit] = now

    def _had(self, unit: tuple[str, ...], group: str) -> bool:
        """Return whether the workers of a group had loaded the unit at their first report."""
        had = set().union(*(models for its, models in self._found.values() if its == group))
        return had >= {*unit}

    def leaving(self, group: str | None) -> bool:
        """Return whether a group serves models that are about to leave it."""
        return any(self._leaves(model, group) for unit in self._units for model in unit)

    def _leaves(self, model: str, group: str | None) -> bool:
        serves = self._routes.get(model) == group or (model, group) in self._draining
        return serves and self.layout.get(model, group) != group

    # -- reports ----------------------------------------------------------------------

    def look(self, now: float, seen: Seen) -> None:
        """Take the workers' and frontends' reports. Note which models can be served in their
        groups, and which groups have no more requests of a model that left."""
        if self.unplaced:
            for worker, says in seen.workers.items():
                models = {self._model_of.get(variant, "") for variant in says.loaded}
                self._found.setdefault(worker, (says.group, models))
            self._take_over(now, seen)
        served = {
            (self._model_of.get(variant), says.group)
            for says in seen.workers.values()
            for variant in says.loaded
        }
        known = self._placed or not self.unplaced  # a plan may leave out models that do not fit
        if not self._complete and known and served >= set(self._routes.items()):
            self._complete = True
            self._number += 1
        self._drain(now, seen)

    def _take_over(self, now: float, seen: Seen) -> None:
        """Take over the routes of an earlier planner."""
        known: dict[str, str] = {}
        for says in seen.frontends.values():
            kept = self._kinds.values() if not self._pool else says.routes.values()
            known |= {m: g for m, g in says.routes.items() if g in kept}
        for unit in self._units:
            if unit[0] in self.layout or not known.keys() >= {*unit}:
                continue
            routes = dict.fromkeys(unit, known[unit[0]])
            self.layout |= routes
            self._routes |= routes
            self._number += 1
            self._moved_at = now  # units stay until the demand has been measured
            for worker in seen.workers.values():
                for model in {self._model_of.get(v) for v in worker.loaded} & {*unit}:
                    if model and worker.group is not None and worker.group != routes[model]:
                        self._draining[model, worker.group] = _Drain(self._number, now)

    def _drain(self, now: float, seen: Seen) -> None:
        frontends = seen.frontends.values()
        for (model, group), drain in list(self._draining.items()):
            if now - drain.since > _DRAIN_S:
                logger.warning("%s still has requests of %s; draining no longer", group, model)
            elif not frontends or any(
                says.applied[1] < drain.number or says.queued.get((model, group))
                for says in frontends
            ):
                continue
            del self._draining[model, group]

    # -- orders ----------------------------------------------------------------------

    def send_home(
        self,
        wanted: Mapping[str, Wanted],
        seen: Seen,
        now: float = 0.0,
        fits: Fits = lambda variants, kind: True,
    ) -> dict[str, Wanted]:
        """Return the orders with each worker's group. Workers also keep the variants of models that
        are leaving their group. If the new group of a unit is ready, its route is switched."""
        member = self.members(seen)
        self._switch(now, wanted, seen)
        told = {}
        for worker, order in wanted.items():
            says, group = seen.workers.get(worker), member.get(worker)
            if says is None:
                told[worker] = order
            elif self._pool and says.group not in (None, group):
                told[worker] = self._leave(order, says, group, seen)
            else:
                told[worker] = self._kept(order, says, group, fits)._replace(group=group)
        return told

    def members(self, seen: Seen) -> dict[str, str]:
        """Return the group that each worker should be in."""
        if not self._pool:
            kinds = self._kinds
            return {w: kinds[s.kind] for w, s in seen.workers.items() if s.kind in kinds}
        home = {v: self.layout.get(model, "") for v, model in self._model_of.items()}
        self._member = divided(seen.workers, self.sizes, home, self._member)
        return self._member

    def held(self, group: str | None) -> set[str]:
        """Return the models that have requests in a group."""
        routed = {model for model, its in self._routes.items() if its == group}
        return routed | {model for model, its in self._draining if its == group}

    def _leave(self, order: Wanted, says: WorkerSays, group: str | None, seen: Seen) -> Wanted:
        """Return the orders for a worker of a pool that changes its group."""
        held = {v for v, m in self._model_of.items() if m in self.held(says.group)}
        staying = [
            other.loaded
            for w, other in seen.workers.items()
            if other.group == says.group == self._member.get(w)
        ]
        covered = all(any(v in loaded for loaded in staying) for v in held)
        if covered and set(order.keep) <= says.loaded:
            return order._replace(group=group)
        keep = tuple(dict.fromkeys((*order.keep, *sorted(held))))
        return order._replace(keep=keep, group=says.group)

    def _kept(self, order: Wanted, says: WorkerSays, group: str | None, fits: Fits) -> Wanted:
        held = [v for v in sorted(says.loaded) if self._leaves(self._model_of.get(v, ""), group)]
        if not held:
            return order
        keep = tuple(dict.fromkeys((*order.keep, *held)))
        parts = order.assigned
        if not fits(frozenset(keep), says.kind):  # new variants wait until there is memory
            keep = tuple(v for v in keep if v in says.loaded)
            parts = tuple(part for part in parts if part.variant in says.loaded)
        old = tuple(part for part in says.assigned if part.variant in held)
        if not says.assigned:  # the worker serves all requests, and continues to do so
            return order._replace(keep=keep, assigned=())
        return order._replace(keep=keep, assigned=(*parts, *old) if order.assigned else old)

    def _switch(self, now: float, wanted: Mapping[str, Wanted], seen: Seen) -> None:
        for unit, since in list(self._moving_since.items()):
            old, new = self._routes[unit[0]], self.layout[unit[0]]
            ready = [self._is_ready(model, new, wanted, seen) for model in unit]
            late = now - since > _PATIENCE_S
            failed = now - since > _LOADS_S or _cannot_load(unit, new, self._model_of, seen)
            if all(some and (every or late) for some, every in ready):
                self._number += 1
                self._routes |= dict.fromkeys(unit, new)
                self._moved_at, self.moves = now, self.moves + 1
                del self._moving_since[unit]
                for model in unit:
                    self._draining[model, old] = _Drain(self._number, now)
                    self._draining.pop((model, new), None)
                logger.info("%s: served by %s now, no more by %s", ", ".join(unit), new, old)
            elif late and failed:
                logger.warning("%s could not be moved to %s; it stays", ", ".join(unit), new)
                self.stuck |= {(model, new): now for model in unit}
                self.layout |= dict.fromkeys(unit, old)
                self._moved_at = now
                del self._moving_since[unit]

    def _is_ready(
        self, model: str, group: str, wanted: Mapping[str, Wanted], seen: Seen
    ) -> tuple[bool, bool]:
        """Return whether at least one worker of a group has loaded its planned variants of a model,
        and whether all of them have."""
        found = []
        for worker, order in wanted.items():
            says = seen.workers.get(worker)
            if says is None or says.group != group or not says.ready:
                continue
            if wants := {v for v in order.keep if self._model_of.get(v) == model}:
                found.append(wants <= says.loaded)
        return any(found), bool(found) and all(found)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of all groups."""
        return tuple(sorted({*self._routes.values(), *self._kinds.values(), *self.sizes}))

    @property
    def routing(self) -> Routing | None:
        """The group that serves each model. None without groups."""
        if not self._kinds and not self._pool:
            return None
        return Routing(self._number, dict(self._routes), self.groups, self._complete)

    def outcome(self) -> dict[str, Any]:
        """Return the wanted group of every model, for people and logs. It is empty if the planner
        chooses no groups."""
        return {"groups": dict(self.layout)} if self._units else {}

    def status(self, seen: Seen) -> dict[str, Any]:
        """Return the state of the groups for `ray-slo status`. It is empty if the planner chooses
        no groups."""
        if not self._units:
            return {}
        member, moves = self.members(seen), self._moving_since or self._draining or self.unplaced
        settled = not moves and all(s.group == member.get(w) for w, s in seen.workers.items())
        return {
            **({} if settled else {"state": "moving" if self.layout else "starting"}),
            "moves": self.moves,
            "groups": {
                group: {
                    "models": sorted(m for m, g in self._routes.items() if g == group),
                    "wanted_models": sorted(m for m, g in self.layout.items() if g == group),
                    "draining": sorted(m for m, g in self._draining if g == group),
                    "workers": sorted(w for w, s in seen.workers.items() if s.group == group),
                }
                for group in self.groups
            },
        }


def _cannot_load(
    unit: tuple[str, ...], group: str, model_of: Mapping[str, str], seen: Seen
) -> bool:
    """Return whether no worker of a group can load a unit: there are some, and each has reported an
    error."""
    there = [says for says in seen.workers.values() if says.group == group]
    return bool(there) and all(
        any(model_of.get(variant) in unit for variant in says.errors) for says in there
    )
