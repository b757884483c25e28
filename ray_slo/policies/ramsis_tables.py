"""The tables of RAMSIS: given ones, solved ones, stale ones, and which of them is in force."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ray_slo.core.cluster import Cluster, DispatchDelay, Kind, Variant
from ray_slo.core.profiles import LatencyProfile

if TYPE_CHECKING:
    from ray_slo.planning.ramsis import Problem, Table, VariantProfile

_OPTIONS: Mapping[str, Any] = {
    "discretization": "model_based",
    "batching": "variable",
    "late_penalty": 300.0,
}
"""How tables are solved unless told otherwise. Measured on the paper's image and text tasks: any
part of the queue in a batch is worth 0.1 to 0.5 points over all of it; slack by the latencies that
occur costs a tenth of the time of 100 equal steps. At a late penalty of 100, a tenth of the
requests is given up above peak load for the accuracy of the others; at 300, what must be."""

ServedKey = tuple[str, float, Kind]
"""Model, SLO in seconds, and kind of worker."""

_SETTLE_S = 10.0
"""A drifting profile makes tables stale no sooner than so long after they were asked for."""


class Shelf:
    """Tables by number of workers and load per worker (requests/s)."""

    def __init__(self) -> None:
        self._by_count: dict[int, tuple[list[float], list[Table]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_count)

    def put(self, workers: int, load: float, table: Table) -> None:
        """Put a table down; it replaces one for the same."""
        loads, tables = self._by_count.setdefault(workers, ([], []))
        i = bisect_left(loads, load)
        if i < len(loads) and loads[i] == load:
            tables[i] = table
        else:
            loads.insert(i, load)
            tables.insert(i, table)

    def covering(self, workers: int, load: float) -> Table | None:
        """The lowest load that covers `load`, for `workers` or the nearest number that has one."""
        for count in sorted(self._by_count, key=lambda n: (abs(n - workers), n)):
            loads, tables = self._by_count[count]
            if (i := bisect_left(loads, load * (1 - 1e-9))) < len(loads):
                return tables[i]
        return None

    def exact(self, workers: int, load: float) -> Table | None:
        """The table for just this."""
        loads, tables = self._by_count.get(workers, ([], []))
        i = bisect_left(loads, load * (1 - 1e-9))
        return tables[i] if i < len(loads) and loads[i] <= load * (1 + 1e-9) else None

    def highest(self) -> Table | None:
        """The table for the highest load per worker."""
        best = max(self._by_count.values(), key=lambda pair: pair[0][-1], default=None)
        return best[1][-1] if best else None


class Served:
    """A group on workers of one kind: the variants that they run for it, and its tables.

    Attributes:
        names: of the variants, least accurate first; `accuracy` in percent.
        reach: by variant, reach[b − 1] = delay(b) + ℓ(b): how long a batch takes the worker.
        most: requests/s that a worker can serve, SLO or not.
        reach_1, fastest: the shortest time in which one request can be served, seconds, and the
            index of the variant that takes it.
        given, tables, stale: tables handed in, solved, and solved for what is no more.
        drifted, solved_at: whether the profiles are not those solved for; when that last was done.
    """

    def __init__(self, key: ServedKey, variants: Sequence[Variant], delay: DispatchDelay) -> None:
        # Where an accuracy is not known, the author's order of preference stands in for all.
        known = all(v.accuracy is not None for v in variants)
        ranked = [
            (v.accuracy if known and v.accuracy is not None else float(len(variants) - i), v)
            for i, v in enumerate(variants)
        ]
        ranked.sort(key=lambda pair: pair[0])
        self.key = key
        _, self.slo_s, (hardware, _) = key
        self.accuracy = [accuracy for accuracy, _ in ranked]
        self.names = [v.name for _, v in ranked]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.profiles = [v.profiles[hardware] for _, v in ranked]
        self.reach = [[t + delay(b) for b, t in enumerate(p.table, start=1)] for p in self.profiles]
        self.reach_1, self.fastest = min((r[0], i) for i, r in enumerate(self.reach))
        self.most = max(b / t for r in self.reach for b, t in enumerate(r, start=1))
        self._solved_for, self.solved_at, self.drifted = self.reach, -math.inf, False
        self.given, self.tables, self.stale = Shelf(), Shelf(), Shelf()

    def variants(self, tables: Iterable[Sequence[float]]) -> tuple[VariantProfile, ...]:
        """As a problem has them, with these latencies."""
        rows = zip(self.names, self.accuracy, tables, strict=True)
        return tuple((name, accuracy, LatencyProfile(table)) for name, accuracy, table in rows)

    def inherit(self, old: Served, drift: float) -> None:
        """Take over what was there before the profiles changed."""
        self.given, self.tables, self.stale = old.given, old.tables, old.stale
        self._solved_for, self.solved_at = old._solved_for, old.solved_at
        if self.names != old.names:
            self.solved_at = -math.inf
            self.drifted = True
        else:
            self.drifted = _differ(self.reach, self._solved_for, self.slo_s, drift)

    def renew(self) -> None:
        """What tables there are is stale from now on."""
        self.stale = self.given or self.tables or self.stale
        self.given, self.tables = Shelf(), Shelf()
        self._solved_for, self.drifted = self.reach, False

    @property
    def has_tables(self) -> bool:
        return bool(self.given or self.tables or self.stale)

    def offer(self, table: Table) -> None:
        """Take a table that was handed in, if it is for these variants and this SLO; as a stale
        one if it was solved for other latencies (with delays or without)."""
        from ray_slo.planning.ramsis import profile_hash

        fits = 0.8 * self.slo_s <= table.slo_s <= 1.001 * self.slo_s  # a margin may be taken off
        if fits and set(table.names) <= self.index.keys():
            same = {profile_hash(self.variants(self.reach))}
            same.add(profile_hash(self.variants(p.table for p in self.profiles)))
            shelf = self.given if table.profile_hash in same else self.stale
            shelf.put(table.num_workers, table.rate / table.num_workers, table)

    def within(self, variant: int, slack_s: float) -> int:
        """The largest batch of a variant that takes at most `slack_s`; 0 if none does."""
        return bisect_right(self.reach[variant], slack_s)

    def rounded(self, load: float, step: float) -> float:
        """`load` per worker, rounded up to a power of `step` (1: not at all), within reason: one
        request in a hundred SLOs, and a quarter more than any batch could serve."""
        least, most = 0.01 / self.slo_s, 1.25 * self.most
        load = min(max(load, least), most)
        if step == 1:
            return load
        return least * step ** math.ceil(math.log(load / least) / math.log(step) - 1e-9)

    def nearest(self, workers: int, load: float) -> Table | None:
        """What may stand in for a table that is not there yet."""
        shelves = (self.tables, self.given, self.stale)
        for shelf in shelves:
            if table := shelf.covering(workers, load):
                return table
        return next((table for shelf in shelves if (table := shelf.highest())), None)


def _differ(
    new: Sequence[Sequence[float]], old: Sequence[Sequence[float]], slo_s: float, by: float
) -> bool:
    """Whether a latency that matters under the SLO differs by more than the share `by`."""
    return any(
        abs(n - o) > by * o and min(n, o) <= slo_s
        for of_new, of_old in zip(new, old, strict=True)
        for n, o in zip(of_new, of_old, strict=False)
    )


class Tables:
    """Says which table is in force, and which problems are to be solved.

    Args:
        given: tables that were solved before.
        solver: solves a problem at once; None: those that are `wanted` are solved elsewhere.
        headroom, load_step, drift: arguments of the policy.
        margin_s: taken off every SLO.
        options: more fields of a `Problem`.

    Attributes:
        served: what workers serve, by model, SLO and kind of worker.
    """

    def __init__(
        self,
        given: Sequence[Table],
        solver: Callable[[Problem], Table] | None,
        *,
        headroom: float,
        load_step: float,
        drift: float,
        margin_s: float,
        options: Mapping[str, Any],
    ) -> None:
        self.served: dict[ServedKey, Served] = {}
        self._before: dict[ServedKey, Served] = {}  # also of kinds that are gone: they come back
        self._given, self._solver = given, solver
        self._headroom, self._load_step = headroom, load_step
        self._drift, self._margin_s = drift, margin_s
        self._options = {**_OPTIONS, **options}
        self._wanted: dict[tuple[ServedKey, int, float], Problem] = {}

    def wanted(self) -> list[Problem]:
        """Problems whose tables are missing."""
        return list(self._wanted.values())

    def solved(self, tables: Iterable[Table]) -> None:
        """Answers to `wanted`. Those that are not wanted any more are ignored."""
        asked = {_identity(problem): key for key, problem in self._wanted.items()}
        for table in tables:
            if (key := asked.get(_identity(table))) is not None:
                of, workers, load = key
                del self._wanted[key]
                if of in self.served:
                    self.served[of].tables.put(workers, load, table)

    def refresh(self, cluster: Cluster, groups: Sequence[tuple[str, float]]) -> None:
        """What the workers serve, by the cluster's present profiles.

        Args:
            groups: models and SLOs, seconds.

        Raises:
            ValueError: no table that was given is for any of it.
        """
        self._before |= self.served
        before, self.served = self._before, {}
        for worker in cluster.workers.values():
            for name, slo_s in groups:
                key = (name, slo_s, worker.kind)
                model = cluster.models.get(name)
                variants = [v for v, _ in model.runnable(*worker.kind)] if model else []
                if not variants or key in self.served:
                    continue
                served = self.served[key] = Served(key, variants, cluster.delay)
                if key in before:
                    served.inherit(before[key], self._drift)
                else:
                    for table in self._given:
                        served.offer(table)
        if self._given and self.served and not any(s.has_tables for s in self.served.values()):
            solved = {name for t in self._given for name in t.names}
            loaded = {name for s in self.served.values() for name in s.names}
            slos = {1e3 * t.slo_s for t in self._given}
            raise ValueError(
                f"tables are for {', '.join(sorted(solved))} under SLOs of "
                f"{', '.join(f'{slo:g}' for slo in sorted(slos))} ms; the cluster has "
                f"{', '.join(sorted(loaded))} under "
                f"{', '.join(f'{1e3 * slo_s:g}' for _, slo_s in groups)} ms"
            )

    def in_force(
        self, served: Served, now: float, group: tuple[int, float], load: float, measured: bool
    ) -> Table | None:
        """The table for a load, requests/s; None before there is any.

        Args:
            group: its workers, and how many these are where one that serves several groups counts
                as a part.
            measured: the load is, so that it is rounded.
        """
        workers, share = group
        if served.drifted and now >= served.solved_at + _SETTLE_S:
            served.renew()
            self._wanted = {k: p for k, p in self._wanted.items() if k[0] != served.key}
        load = self._headroom * load / share
        if table := served.given.covering(workers, load):
            return table
        load = served.rounded(load, self._load_step if measured else 1.0)
        if table := served.tables.exact(workers, load):
            return table
        if served.reach_1 < served.slo_s - self._margin_s:
            served.solved_at = now
            if self._solver is not None:
                table = self._solver(self._problem(served, workers, load))
                served.tables.put(workers, load, table)
                return table
            asked = (served.key, workers, load)
            if asked not in self._wanted:
                self._wanted[asked] = self._problem(served, workers, load)
        return served.nearest(workers, load)

    def _problem(self, served: Served, workers: int, load: float) -> Problem:
        from ray_slo.planning.ramsis import Problem

        return Problem(
            variants=served.variants(served.reach),
            slo_s=served.slo_s - self._margin_s,
            rate=load * workers,
            num_workers=workers,
            **self._options,
        )


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as a problem takes them."""
    from ray_slo.planning.ramsis import Problem
    from ray_slo.planning.ramsis.arrivals import arrivals_of

    ours = {"variants", "slo_s", "rate", "num_workers"}
    valid = sorted({field.name for field in fields(Problem)} - ours)
    if unknown := sorted(set(options) - set(valid)):
        raise ValueError(f"options has no {', '.join(unknown)}; it takes {', '.join(valid)}")
    found = dict(options)
    try:
        if "arrivals" in found:
            found["arrivals"] = arrivals_of(found["arrivals"])
        any_variant = ("any", 100.0, LatencyProfile([0.5]))
        Problem((any_variant,), slo_s=1.0, rate=1.0, num_workers=1, **found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"options: {error}") from None
    return found


def _identity(one: Problem | Table) -> tuple[str, float, int, float]:
    return one.profile_hash, one.slo_s, one.num_workers, one.rate


def tables_of(given: Any) -> list[Table]:
    """Tables of policy sets, tables, files of either, or a sequence of these."""
    if isinstance(given, str):
        from ray_slo.planning.ramsis import PolicySet

        return list(PolicySet.load(given))
    return [given] if hasattr(given, "lookup") else [t for one in given for t in tables_of(one)]
