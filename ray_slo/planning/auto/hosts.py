"""Choice of the variants of each worker of a kind, and of their shares of its time.

If a worker has several variants, even an urgent request may have to wait for the end of another
variant's batch, because batches are not stopped. So variants share a worker only if each of them
may wait (`Use.wait_s`) as long as the batches of the others take. Other variants get separate
workers. If there are too few workers for that, such variants may share some of their workers, if
the rest of their workers is enough to be in time (`may_wait`). Otherwise `Blocked` asks for a plan
with shorter batches, or with one more worker.

Loaded variants stay where they are, if they can serve the new shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ray_slo.core.cluster import Assigned
from ray_slo.planning.auto.pack import Shares, pack
from ray_slo.planning.auto.plan import Slot
from ray_slo.planning.auto.problem import Hosted, Kind
from ray_slo.planning.auto.program import EPS, Program
from ray_slo.planning.auto.uses import Use


class Unpacked(Exception):
    """The variants do not fit into the time and memory of the planned workers of `kind`."""

    def __init__(self, kind: str, workers: int) -> None:
        super().__init__(kind)
        self.kind, self.workers = kind, workers


class Blocked(Exception):
    """On the planned workers of `kind`, some requests cannot wait for batches that take longer than
    `longest_s`."""

    def __init__(self, kind: str, longest_s: float, workers: int) -> None:
        super().__init__(kind)
        self.kind, self.longest_s, self.workers = kind, longest_s, workers


def least_workers(program: Program, kind: Kind) -> int:
    """Return the number of workers of a kind that run in any case, even without a use."""
    present = program.problem.present
    return kind.min_workers if present is None else present.get(kind.name, 0)


def shared(program: Program, kind: Kind, uses: Sequence[Use], most: int) -> list[Slot]:
    """Return the slots of the fewest workers on which the variants can be packed. A worker may have
    several variants.

    Args:
        most: largest number of workers of this kind.

    Raises:
        Unpacked: the variants do not fit into the time and memory of the workers.
        Blocked: some requests cannot wait for batches that take so long.
    """
    if not uses:
        return []
    by_name = {use.config.variant: use for use in uses}
    if kept := _as_it_is(program, kind, uses, most):
        current = [h for h in program.problem.current if h.kind == kind.name]
        return [
            _slot(kind, by_name, shares, hosted)
            for shares, hosted in zip(kept, current, strict=True)
        ]
    classes = waiting_classes(uses)
    if kind.name in program.limits.mixed:
        classes = [list(uses)]
    fewest = _fewest(program, kind, uses)
    for workers in range(min(fewest, most), most + 1):
        made = _packed(program, kind, classes, workers)
        if made is None and len(classes) > 1 and workers >= program.most[kind.name]:
            made = _packed(program, kind, [list(uses)], workers)
            made = made if made is not None and may_wait(uses, made) else None
        if made is not None:
            return [_slot(kind, by_name, shares) for shares in made if shares]
    if len(classes) > 1:
        raise Blocked(kind.name, min(use.wait_s for use in uses), most)
    raise Unpacked(kind.name, most)


def apart(
    program: Program,
    kind: Kind,
    uses: Sequence[Use],
    most: int,
    least: Mapping[tuple[str, str], int] | None = None,
) -> list[Slot]:
    """Return slots with one variant each. Surplus workers go to the variants whose workers have the
    highest load.

    Args:
        least: least number of workers by variant and kind.
    """
    if not uses:
        return []
    least = least or {}
    hosts = [max(program.room(*u.pair).workers(u.busy), least.get(u.pair, 0)) for u in uses]
    spare = min(most, least_workers(program, kind)) - sum(hosts)
    for _ in range(spare):
        i = max(range(len(uses)), key=lambda i: uses[i].busy / hosts[i])
        hosts[i] += 1
    by_name = {use.config.variant: use for use in uses}
    return [
        _slot(kind, by_name, {use.config.variant: use.busy / n})
        for use, n in zip(uses, hosts, strict=True)
        for _ in range(n)
    ]


def _fewest(program: Program, kind: Kind, uses: Sequence[Use]) -> int:
    busy = sum(use.busy for use in uses)
    return max(program.room("", kind.name).workers(busy), least_workers(program, kind))


def _packed(
    program: Program, kind: Kind, classes: Sequence[Sequence[Use]], workers: int
) -> list[Shares] | None:
    """Return the shares on this number of workers, with separate workers for each class. None if
    there are too few."""
    counts = _divided(program, kind, classes, workers)
    if counts is None:
        return None
    most = program.room("", kind.name).busy(workers) / workers + EPS
    made: list[Shares] = []
    for of_class, count in zip(classes, counts, strict=True):
        busy = {use.config.variant: use.busy for use in of_class}
        needs = {use.config.variant: program.needs_mb(use.pair) for use in of_class}
        found = pack(busy, count, needs, kind.memory_mb, most)
        if found is None:
            return None
        made += found
    return made


def waiting_classes(uses: Sequence[Use]) -> list[list[Use]]:
    """Return classes of uses that may share a worker. The class that may wait least comes first."""
    left = sorted(uses, key=lambda use: (use.wait_s, use.config.latency_s))
    classes = []
    while left:
        longest_s = left[0].wait_s * (1 + EPS)
        together = [u for i, u in enumerate(left) if not i or u.config.latency_s <= longest_s]
        left = [use for use in left if use not in together]
        classes.append(together)
    return classes


def may_wait(uses: Sequence[Use], made: Sequence[Shares]) -> bool:
    """Return whether no request is late because it waits for the batch of another variant.

    A variant does not count the workers on which another variant's batch takes longer than its
    requests may wait. While such a batch runs, the variant's backlog grows by the work that its
    other workers have no time for. These other workers must finish the backlog before it is late.
    """
    latency_s = {use.config.variant: use.config.latency_s for use in uses}
    for use in uses:
        name, free, longest_s = use.config.variant, 0.0, 0.0
        for shares in made:
            if name not in shares:
                continue
            behind_s = max((latency_s[v] for v in shares if v != name), default=0.0)
            if behind_s <= use.wait_s * (1 + EPS):
                free += 1 - sum(share for v, share in shares.items() if v != name)
            else:
                longest_s = max(longest_s, behind_s)
        if longest_s and (use.busy - free) * longest_s > use.wait_s * free * (1 + EPS):
            return False
    return True


def _divided(
    program: Program, kind: Kind, classes: Sequence[Sequence[Use]], workers: int
) -> list[int] | None:
    """Return the number of workers for each class: as many as it needs. Surplus workers go to the
    classes with the highest load per worker. None if there are too few workers."""
    busy = [sum(use.busy for use in of_class) for of_class in classes]
    most = program.room("", kind.name).busy(workers) / workers
    counts = [max(math.ceil(b / max(most, EPS) - EPS), 1) for b in busy]
    if len(counts) == 1:
        return [workers]
    if sum(counts) > workers:
        return None
    for _ in range(workers - sum(counts)):
        i = max(range(len(counts)), key=lambda i: busy[i] / counts[i])
        counts[i] += 1
    return counts


def _as_it_is(program: Program, kind: Kind, uses: Sequence[Use], most: int) -> list[Shares] | None:
    """Return the shares for the variants that the workers have loaded now. None if these variants
    are not enough, or if the number of workers changes."""
    current = [h for h in program.problem.current if h.kind == kind.name]
    if len(current) != most or most != max(_fewest(program, kind, uses), 1):
        return None
    level = program.room("", kind.name).busy(most) / most
    spread = spread_over(uses, [hosted.variants for hosted in current], level)
    if spread is None or kind.name in program.limits.mixed:
        return spread
    by_name = {use.config.variant: use for use in uses}
    apart = all(len(waiting_classes([by_name[v] for v in shares])) <= 1 for shares in spread)
    all_there = most >= program.most[kind.name]
    return spread if apart or (all_there and may_wait(uses, spread)) else None


def spread_over(
    uses: Sequence[Use], loaded: Sequence[frozenset[str]], most: float
) -> list[Shares] | None:
    """Return the shares of each worker's time for its loaded variants, with the least possible load
    of the busiest worker. None if a load would be above `most`."""
    from scipy.optimize import linprog

    names = [use.config.variant for use in uses]
    cells = [(v, i) for v, name in enumerate(names) for i, has in enumerate(loaded) if name in has]
    if {v for v, _ in cells} != set(range(len(names))):
        return None
    count = len(cells)
    served = np.zeros((len(names), count + 1))
    filled = np.zeros((len(loaded), count + 1))
    for column, (v, i) in enumerate(cells):
        served[v, column] = filled[i, column] = 1.0
    filled[:, count] = -1.0
    found = linprog(
        np.append(np.zeros(count), 1.0),
        A_ub=filled,
        b_ub=np.zeros(len(loaded)),
        A_eq=served,
        b_eq=np.array([use.busy for use in uses]),
        bounds=[(0, None)] * count + [(0, most + EPS)],
        method="highs",
    )
    if found.status != 0 or found.x is None:
        return None
    shares: list[Shares] = [{} for _ in loaded]
    for (v, i), share in zip(cells, found.x.tolist(), strict=False):
        if share > EPS:
            shares[i][names[v]] = share
    return shares


def _slot(
    kind: Kind, uses: Mapping[str, Use], shares: Shares, hosted: Hosted | None = None
) -> Slot:
    """Return the slot of a worker. Its other loaded variants stay loaded."""
    parts = tuple(
        Assigned(name, uses[name].config.batch_size, share * uses[name].config.throughput)
        for name, share in shares.items()
    )
    others = () if hosted is None else tuple(sorted(hosted.variants - set(shares)))
    return Slot(kind.name, parts, (*shares, *others))
