"""A made-up world of users, items and interactions, the same on every machine.

No package ships interactions between users and items, so these are **synthetic**: they let the
networks be trained and loaded for real, but say nothing about real recommendation. A user likes an
item by the item's popularity, by how well hidden tastes (`TASTES` numbers each) agree, and by what
the user's age group thinks of the item's genre. Each user interacts with `PER_USER` different
items, drawn without replacement with probabilities softmax(liking): the Gumbel-top-k trick. The
last one drawn is held out: it measures a network by leave-one-out, as NCF's authors do (He et al.,
WWW 2017, §4.1).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

USERS = 1500
ITEMS = 3000
GROUPS = 7  # of users, by age
GENRES = 18  # of items
TASTES = 3
PER_USER = 24
SEED = 0

Ints = NDArray[np.int64]


class Features(NamedTuple):
    """What is known of users and items, besides who they are."""

    group: Ints  # (USERS,), in 0 … GROUPS - 1
    genre: Ints  # (ITEMS,), in 0 … GENRES - 1


class Interactions(NamedTuple):
    """Who interacted with what."""

    seen: Ints  # (USERS, PER_USER - 1): items to learn from
    held_out: Ints  # (USERS,): one item each to measure with


@cache
def features() -> Features:
    rng = np.random.default_rng(SEED)
    return Features(rng.integers(0, GROUPS, USERS), rng.integers(0, GENRES, ITEMS))


@cache
def interactions() -> Interactions:
    group, genre = features()
    rng = np.random.default_rng(SEED + 1)
    popularity = rng.normal(0, 0.8, ITEMS)
    agree = rng.normal(0, 1, (USERS, TASTES)) @ rng.normal(0, 1, (ITEMS, TASTES)).T / TASTES**0.5
    opinion = rng.normal(0, 1, (GROUPS, GENRES))
    liking = popularity + 2 * agree + opinion[group][:, genre]
    keys = liking + rng.gumbel(size=liking.shape)
    top = np.argpartition(-keys, PER_USER, axis=1)[:, :PER_USER]
    order = np.argsort(-np.take_along_axis(keys, top, axis=1), axis=1)
    drawn = np.take_along_axis(top, order, axis=1)
    return Interactions(drawn[:, :-1], drawn[:, -1])
