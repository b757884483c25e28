"""Division of the variants with an unknown latency among the workers, which measure them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest

from ray_slo.planning.brains.brain import Seen, Wanted, WorkerSays
from ray_slo.planning.brains.known import Known


class Measuring:
    """Divides variants among the workers of a kind. A worker that has measured its variants takes
    the next. When a worker is gone or could not load its variant, another worker takes it.
    """

    def __init__(self) -> None:
        self._shares: dict[str, tuple[str, ...]] = {}  # variants by worker

    def shares(
        self,
        workers: Mapping[str, WorkerSays],
        unknown: Sequence[str],
        avoided: Collection[str],
        expected: int,
    ) -> dict[str, tuple[str, ...]]:
        """Return the variants that each worker should load. Workers with an assignment, or with
        nothing to measure, are left out.

        Args:
            workers: reports of the workers of one kind.
            unknown: variants to measure, in this order.
            avoided: variants that could not be loaded lately.
            expected: initial number of workers.
        """
        shares = {
            w: tuple(v for v in variants if v not in avoided)
            for w, variants in self._shares.items()
            if w in workers
        }
        taken = {v for variants in shares.values() for v in variants}
        free = [v for v in unknown if v not in taken]
        for worker, says in workers.items():
            if says.assigned:  # by an earlier planner
                continue
            if worker not in shares and not says.loaded:
                others = max(expected, len(workers)) - len(shares)
                count = -(-len(free) // max(others, 1))
                shares[worker], free = tuple(free[:count]), free[count:]
            elif (mine := set(shares.get(worker, ()))) <= says.loaded and free:
                shares[worker] = (*sorted(says.loaded | mine), free.pop(0))
        self._shares = shares
        return {w: variants for w, variants in shares.items() if variants}


def in_turn(variants: Sequence[str], owner: Mapping[str, str]) -> list[str]:
    """Return the variants in another order: the first variant of every owner (model or task), then
    the second of each, and so on. So the first few variants serve many owners.

    >>> in_turn(["a1", "a2", "b1"], {"a1": "a", "a2": "a", "b1": "b"})
    ['a1', 'b1', 'a2']
    """
    by_owner: dict[str, list[str]] = {}
    for variant in variants:
        by_owner.setdefault(owner[variant], []).append(variant)
    rows = zip_longest(*by_owner.values())
    return [variant for row in rows for variant in row if variant is not None]


def loadable(owner: Mapping[str, str], avoided: Collection[str]) -> tuple[str, ...]:
    """Return all loadable variants. An owner without a loadable variant gets all its variants: a
    worker that cannot load them ends and reports the reason."""
    usable = {v for v in owner if v not in avoided}
    owners = {owner[v] for v in usable}
    return tuple(v for v, its in owner.items() if v in usable or its not in owners)


def also_measure(known: Known, seen: Seen, kind: str, told: dict[str, Wanted]) -> None:
    """Let one worker of a kind load a variant that was not measured on that kind, if there is
    memory. If there is an idle worker, it is this one."""
    its = [w for w in told if seen.workers[w].kind == kind]
    if its and (unknown := known.unknown(seen, kind)):
        worker = min(its, key=lambda w: (bool(told[w].assigned), w))
        keep = tuple(dict.fromkeys((*told[worker].keep, unknown[0])))
        if known.fit(seen, frozenset(keep), kind):
            told[worker] = told[worker]._replace(keep=keep)
