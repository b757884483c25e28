"""Serving groups: which models and workers share a scheduler, and the steps from what is to what is
wanted. Pure.

A `Layout` says what is wanted. Where workers are (`Place`) and where frontends send requests
(`routes`) say what is. Every step is a function of the three, so whoever carries steps out may die
between any two of them, and another goes on from what it sees.

A model moves make-before-break: the workers of the new group load it beside what they have
(`orders`), then requests are routed to them (`routed`), and when the old group has none of its
requests left, its workers unload it. A worker changes its group when it has loaded what it needs
there and others hold what its old group still serves.

    >>> old, new = Layout({"m": "a"}), Layout({"m": "b"})
    >>> there = {"w": Place("a", "a", frozenset("m")), "v": Place("b", "b", frozenset())}
    >>> orders(new, {"w": "a", "v": "b"}, there, {"m": "a"}, set())["v"].models
    ('m',)
    >>> routed(new, {"w": "a", "v": "b"}, there, {"m": "a"})  # v has not loaded it yet
    {'m': 'a'}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


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
class Place:
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
class Order:
    """What a worker should do: serve in this group, with these models and no other."""

    group: str
    models: tuple[str, ...]


Draining = Collection[tuple[str, str]]  # (model, group that still has requests of it)


def members(
    layout: Layout, places: Mapping[str, Place], before: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The group that each worker should be in.

    Args:
        before: the last answer. Who is in a group stays while there is room.
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
        # Beyond all sizes, nobody who serves in a group is moved for nothing.
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
    """What every worker should do now, on the way to `layout`."""

    def held(group: str) -> set[str]:
        """Models with requests there."""
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
    """Where each model's requests should go now: a model is switched when all of its new group's
    workers have it (the first time, when one has)."""
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
    """Whether nothing is left to be done."""
    return (
        not draining
        and all(routes.get(m) == g for m, g in layout.models.items())
        and all(
            (places[w].group, set(places[w].loaded)) == (t.group, set(t.models))
            for w, t in orders(layout, member, places, routes, draining).items()
        )
    )
