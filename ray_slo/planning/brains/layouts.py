"""The layout of serving groups, and the steps from the present to the wanted layout. A group is a
set of models and workers that share a scheduler. Pure.

A `Layout` is the wanted state. The present state is the places of the workers (`Place`) and the
routes of the frontends (`routes`). Every step is a function of these three. So the planner may die
between two steps, and its successor continues.

A model moves in three steps:

1. The workers of the new group load the model beside their other models (`orders`).
2. Its requests are routed to the new group (`routed`).
3. When the old group has no more requests of the model, its workers unload it.

A worker changes its group when two conditions hold. It has loaded the new group's models, and other
workers have loaded the models that its old group still serves.

    >>> old, new = Layout({"m": "a"}), Layout({"m": "b"})
    >>> there = {"w": Place("a", "a", frozenset("m")), "v": Place("b", "b", frozenset())}
    >>> orders(new, {"w": "a", "v": "b"}, there, {"m": "a"}, set())["v"].models
    ('m',)
    >>> routed(new, {"w": "a", "v": "b"}, there, {"m": "a"})  # v has not loaded m yet
    {'m': 'a'}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """The wanted state.

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
class Place:
    """The place of a worker, from its last report.

    Attributes:
        home: the group of the worker's kind. None in a pool.
        group: the worker's present group. None before it has one.
        loaded: the models that the worker has loaded and its group's scheduler knows.
    """

    home: str | None
    group: str | None
    loaded: frozenset[str]


@dataclass(frozen=True)
class Order:
    """A worker's orders: serve in this group, with exactly these models."""

    group: str
    models: tuple[str, ...]


Draining = Collection[tuple[str, str]]  # pairs of a model and a group that still has its requests


def members(
    layout: Layout, places: Mapping[str, Place], before: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the group that each worker should be in.

    Args:
        before: the last answer. A worker stays in its group while the group has too few workers or
            just enough.
    """
    if not layout.sizes:
        return {w: s.home for w, s in places.items() if s.home is not None}
    now = {w: (before or {}).get(w) or s.group for w, s in places.items()}
    chosen: dict[str, str] = {}
    free: list[str] = []
    for group in {*now.values()} - {None}:
        assert group is not None
        mine = sorted(
            (w for w, g in now.items() if g == group),
            key=lambda w: (-len(places[w].loaded & layout.of(group)), w),
        )
        room = layout.sizes.get(group, 0)
        chosen |= dict.fromkeys(mine[:room], group)
        free += mine[room:]
    free += [w for w, g in now.items() if g is None]
    for worker in sorted(free):
        count = {g: sum(c == g for c in chosen.values()) for g in layout.sizes}
        filled = {g: count[g] / size if size else math.inf for g, size in layout.sizes.items()}
        # Surplus workers stay in their groups.
        stays = now[worker] if min(filled.values()) >= 1 else None
        where = stays if filled.get(stays or "", math.inf) < math.inf else None
        chosen[worker] = where or min(filled, key=lambda g: (filled[g], g))
    return chosen


def orders(
    layout: Layout,
    member: Mapping[str, str],
    places: Mapping[str, Place],
    routes: Mapping[str, str],
    draining: Draining,
) -> dict[str, Order]:
    """Return the present orders for every worker, on the way to `layout`."""

    def held(group: str) -> set[str]:
        """Return the models that have requests in a group."""
        return {m for m, g in routes.items() if g == group} | {m for m, g in draining if g == group}

    answer = {}
    for worker, target in member.items():
        now = places[worker].group
        need = layout.of(target) | held(target)
        if now is None or now == target:
            answer[worker] = Order(target, tuple(sorted(need)))
            continue
        kept = held(now)
        staying = [s.loaded for w, s in places.items() if s.group == now == member.get(w)]
        covered = all(any(m in loaded for loaded in staying) for m in kept)
        if covered and need <= places[worker].loaded:
            answer[worker] = Order(target, tuple(sorted(need)))
        else:
            answer[worker] = Order(now, tuple(sorted(need | kept)))
    return answer


def routed(
    layout: Layout,
    member: Mapping[str, str],
    places: Mapping[str, Place],
    routes: Mapping[str, str],
) -> dict[str, str]:
    """Return the group to which each model's requests go now. A model is switched to its new group
    when all workers of the group have loaded it. Its first group needs only one such worker."""
    answer = dict(routes)
    for model, group in layout.models.items():
        there = [
            model in s.loaded
            for w, s in places.items()
            if s.group == group and member.get(w) == group
        ]
        if any(there) and (all(there) or model not in routes):
            answer[model] = group
    return answer


def settled(
    layout: Layout,
    member: Mapping[str, str],
    places: Mapping[str, Place],
    routes: Mapping[str, str],
    draining: Draining,
) -> bool:
    """Return whether the present state is the wanted one, so that no step is left."""
    return (
        not draining
        and all(routes.get(m) == g for m, g in layout.models.items())
        and all(
            (places[w].group, set(places[w].loaded)) == (t.group, set(t.models))
            for w, t in orders(layout, member, places, routes, draining).items()
        )
    )
