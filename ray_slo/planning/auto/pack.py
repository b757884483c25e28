"""Packing: variants are divided among workers of a kind, with few variants on each worker.

Workers are filled to the same share of their time, one variant after the other. So most workers
have one variant, and a variant has few workers. By McNaughton's wrap-around rule, n workers take V
variants in at most n + V − 1 parts. If a worker has no memory for the next variant, the variant
goes to a worker that has. Workers are then filled to at most the share `most` of their time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_EPS = 1e-9
_LEVELS = 8
"""Number of attempts with different loads, from equal loads to full workers."""

Amounts = Mapping[str, float]
"""By variant."""

Shares = dict[str, float]
"""Shares of one worker's time, by variant."""


def pack(
    busy: Amounts, workers: int, needs_mb: Amounts, memory_mb: float, most: float = 1.0
) -> list[Shares] | None:
    """Return the shares of every worker. None if no packing was found.

    Args:
        busy: mean number of workers that each variant keeps busy.
        needs_mb: memory of each variant, in MB.
        most: largest share of a worker's time that may be used.
    """
    if not workers:
        return None if busy else []
    needs_mb = {v: needs_mb.get(v, 0.0) for v in busy}
    level = max(sum(busy.values()) / workers, _EPS)
    tight = sum(needs_mb.values()) > memory_mb
    orders = [sorted(busy, key=lambda v: -busy[v])]
    if tight:
        orders.append(sorted(busy, key=lambda v: (-needs_mb[v], -busy[v])))
    for filled in np.linspace(level, max(most, level), _LEVELS).tolist():
        for order in orders:
            for fill in (_in_turn, _by_room) if tight else (_in_turn,):
                made = fill({v: busy[v] for v in order}, workers, needs_mb, memory_mb, filled)
                if made is not None:
                    return made
    return None


def _in_turn(
    busy: Amounts, workers: int, needs_mb: Amounts, memory_mb: float, level: float
) -> list[Shares] | None:
    """Fill one worker after the other."""
    made: list[Shares] = [{} for _ in range(workers)]
    at, used, used_mb = 0, 0.0, 0.0
    for variant, left in busy.items():
        first = True
        while first or left > _EPS:
            no_room = used_mb + needs_mb[variant] > memory_mb * (1 + _EPS)
            if no_room or (used >= level - _EPS and made[at]):
                at, used, used_mb = at + 1, 0.0, 0.0
                if at == workers:
                    return None
                continue
            part = min(left, max(level - used, 0.0))
            made[at][variant] = part
            left, used, first = left - part, used + part, False
            used_mb += needs_mb[variant]
            if left > _EPS and part <= _EPS:
                return None
    return made


def _by_room(
    busy: Amounts, workers: int, needs_mb: Amounts, memory_mb: float, level: float
) -> list[Shares] | None:
    """Place each variant on the worker where all of it fits and the least memory remains. If there
    is none, place a part of it on the worker with the most time left."""
    made: list[Shares] = [{} for _ in range(workers)]
    time, room_mb = [level] * workers, [memory_mb] * workers
    for variant, left in busy.items():
        need = needs_mb[variant]
        while True:
            able = [
                i
                for i in range(workers)
                if room_mb[i] >= need * (1 - _EPS) and variant not in made[i]
            ]
            if not able:
                return None
            whole = [i for i in able if time[i] >= left - _EPS]
            at = (
                min(whole, key=lambda i: (room_mb[i], time[i]))
                if whole
                else max(able, key=lambda i: time[i])
            )
            part = min(left, time[at])
            made[at][variant] = part
            time[at] -= part
            room_mb[at] -= need
            left -= part
            if left <= _EPS:
                break
            if part <= _EPS:
                return None
    return made
