"""The tables of RAMSIS (given, solved and stale ones), and the choice of the current one."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ray_slo.core.cluster import Cluster, DispatchDelay, Kind, Variant
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.text import quoted

if TYPE_CHECKING:
    from ray_slo.papers.ramsis import Problem, Table, VariantProfile
    from ray_slo.papers.ramsis.arrivals import Arrivals

_OPTIONS: Mapping[str, Any] = {
    "discretization": "model_based",
    "batching": "variable",
    "late_penalty": 300.0,
}
"""The default options of tables, chosen by measurements on the paper's image and text tasks.
Batches of any part of the queue gain 0.1 to 0.5 points over batches of the whole queue. With slack
in steps of the latencies that occur, a table is solved in a tenth of the time of 100 equal steps.
With a late penalty of 100, a tenth of the requests is dropped above peak load, for the accuracy of
the others. With 300, only those that must be."""

ServedKey = tuple[str, float, Kind]
"""Model, SLO in seconds, and kind of worker."""

_SETTLE_S = 10.0
"""Seconds after tables were asked for, in which a drifting profile does not make them stale."""


MEASURED = "measured"
_BURSTIEST = 3
"""At an index of dispersion of 4, 16 and 64, tables are solved for Gamma gaps of shape 1/2, 1/4 and
1/8, and no lower. A table assumes that the arrivals of an interval do not depend on earlier ones,
which overstates bursts. At a dispersion of 16, a table for shape 1/16 loses up to 8 points of
accuracy, and one for Poisson makes up to 13 % late. One for 1/4 costs at most 3 points and 2 %."""


class Shelf:
    """Tables by arrivals (their label), number of workers and load per worker (requests/s)."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, tuple[list[float], list[Table]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def put(self, arrivals: str, workers: int, load: float, table: Table) -> None:
        """Store a table; it replaces one for the same arrivals, workers and load."""
        loads, tables = self._of.setdefault(arrivals, {}).setdefault(workers, ([], []))
        i = bisect_left(loads, load)
        if i < len(loads) and loads[i] == load:
            tables[i] = table
        else:
            loads.insert(i, load)
            tables.insert(i, table)

    def covering(self, arrivals: str, workers: int, load: float) -> Table | None:
        """The lowest load that covers `load`, for `workers` or the nearest number that has one."""
        by_count = self._of.get(arrivals, {})
        for count in sorted(by_count, key=lambda n: (abs(n - workers), n)):
            loads, tables = by_count[count]
            if (i := bisect_left(loads, load * (1 - 1e-9))) < len(loads):
                return tables[i]
        return None

    def exact(self, arrivals: str, workers: int, load: float) -> Table | None:
        """The table for exactly these arrivals, workers and load."""
        loads, tables = self._of.get(arrivals, {}).get(workers, ([], []))
        i = bisect_left(loads, load * (1 - 1e-9))
        return tables[i] if i < len(loads) and loads[i] <= load * (1 + 1e-9) else None

    def highest(self, arrivals: str) -> Table | None:
        """The table for the highest load per worker."""
        by_count = self._of.get(arrivals, {})
        best = max(by_count.values(), key=lambda pair: pair[0][-1], default=None)
        return best[1][-1] if best else None

    def labels(self) -> Iterator[str]:
        """Labels of the arrivals that there are tables for."""
        yield from self._of


class Served:
    """A group on workers of one kind: the variants that they run for it, and its tables.

    Attributes:
        names: names of the variants, the least accurate first; `accuracy` in percent.
        reach: by variant, reach[b − 1] = delay(b) + ℓ(b): how long a batch takes the worker.
        most: requests/s that a worker can serve without regard to the SLO.
        speed: requests/s in batches that take at most half of the SLO; 0 if not even a batch of one
            is in time. Requests are distributed to different workers in proportion to it.
        reach_1, fastest: the shortest time in which one request can be served, seconds, and the
            index of the variant that takes it.
        given, tables, stale: given tables, solved ones, and those solved for earlier profiles.
        drifted, solved_at: whether the profiles have changed since tables were solved, and when
            they were.
        table: the table that was used last.
    """

    def __init__(
        self,
        key: ServedKey,
        variants: Sequence[Variant],
        delay: DispatchDelay,
        margin_s: float = 0.0,
    ) -> None:
        # If an accuracy is unknown, the author's order of preference replaces all accuracies.
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
        within = max(self.slo_s / 2, self.reach_1) if self.reach_1 <= self.slo_s - margin_s else 0.0
        self.speed = max(
            (b / t for r in self.reach for b, t in enumerate(r, start=1) if t <= within),
            default=0.0,
        )
        self.table: Table | None = None
        self._solved_for, self.solved_at, self.drifted = self.reach, -math.inf, False
        self.given, self.tables, self.stale = Shelf(), Shelf(), Shelf()

    def variants(self, tables: Iterable[Sequence[float]]) -> tuple[VariantProfile, ...]:
        """The variants in the form of a problem, with these latencies."""
        rows = zip(self.names, self.accuracy, tables, strict=True)
        return tuple((name, accuracy, LatencyProfile(table)) for name, accuracy, table in rows)

    def inherit(self, old: Served, drift: float) -> None:
        """Take over the tables from before the profiles changed."""
        self.given, self.tables, self.stale = old.given, old.tables, old.stale
        self.table = old.table
        self._solved_for, self.solved_at = old._solved_for, old.solved_at
        if self.names != old.names:
            self.solved_at = -math.inf
            self.drifted = True
        else:
            self.drifted = _differ(self.reach, self._solved_for, self.slo_s, drift)

    def renew(self) -> None:
        """Make all tables stale."""
        self.stale = self.given or self.tables or self.stale
        self.given, self.tables = Shelf(), Shelf()
        self._solved_for, self.drifted = self.reach, False

    @property
    def has_tables(self) -> bool:
        return bool(self.given or self.tables or self.stale)

    def offer(self, table: Table, arrivals: str) -> None:
        """Take a given table if it is for these variants and this SLO. It is a stale one if it was
        solved for other latencies (with delays or without)."""
        from ray_slo.papers.ramsis import profile_hash

        fits = 0.8 * self.slo_s <= table.slo_s <= 1.001 * self.slo_s  # less a margin
        if fits and set(table.names) <= self.index.keys():
            same = {profile_hash(self.variants(self.reach))}
            same.add(profile_hash(self.variants(p.table for p in self.profiles)))
            shelf = self.given if table.profile_hash in same else self.stale
            shelf.put(arrivals, table.num_workers, table.rate / table.num_workers, table)

    def within(self, variant: int, slack_s: float) -> int:
        """The largest batch of a variant that takes at most `slack_s`; 0 if none does."""
        return bisect_right(self.reach[variant], slack_s)

    def in_time(
        self, variant: int, size: int, waiting: int, slack_s: float, *, late: bool
    ) -> tuple[int, int]:
        """This variant and batch size, or the nearest ones that are in time, because profiles may
        differ from those of the table. If none is in time, a batch of the fastest variant.

        Args:
            late: in that case, serve all waiting requests.
        """
        if self.reach[variant][size - 1] <= slack_s:
            return variant, size
        for other in range(variant - 1, -1, -1):
            if self.within(other, slack_s) >= size:
                return other, size
        if late:
            return self.fastest, min(waiting, self.profiles[self.fastest].max_batch_size)
        return self.fastest, max(min(self.within(self.fastest, slack_s), waiting), 1)

    def rounded(self, load: float, step: float) -> float:
        """`load` per worker, rounded up to a power of `step` (1: not at all). It is at least one
        request in a hundred SLOs, and about a quarter more than any batch could serve at most."""
        least, most = 0.01 / self.slo_s, 1.25 * self.most
        load = min(max(load, least), most)
        if step == 1:
            return load
        return least * step ** math.ceil(math.log(load / least) / math.log(step) - 1e-9)

    def nearest(self, arrivals: str, workers: int, load: float) -> Table | None:
        """A substitute for a missing table; if possible, one for the same arrivals."""
        shelves = (self.tables, self.given, self.stale)
        for label in dict.fromkeys((arrivals, *(x for shelf in shelves for x in shelf.labels()))):
            for shelf in shelves:
                if table := shelf.covering(label, workers, load):
                    return table
            if table := next((t for shelf in shelves if (t := shelf.highest(label))), None):
                return table
        return None


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
    """Choose the current table, and list the problems to solve.

    Args:
        given: tables that were solved before.
        solver: solves a problem at once; None: those that are `wanted` are solved elsewhere.
        headroom, load_step, drift: arguments of the policy.
        margin_s: margin that is subtracted from every SLO, seconds.
        arrivals: what tables are solved for; None: Gamma gaps, by the measured dispersion.
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
        arrivals: Arrivals | None,
        options: Mapping[str, Any],
    ) -> None:
        self._arrivals = arrivals
        self._known: dict[int, tuple[str, Arrivals]] = {}  # by burst
        self.served: dict[ServedKey, Served] = {}
        self._before: dict[ServedKey, Served] = {}  # also of kinds that are gone
        self._given, self._solver = given, solver
        self._headroom, self._load_step = headroom, load_step
        self._drift, self._margin_s = drift, margin_s
        self._options = {**_OPTIONS, **options}
        self._wanted: dict[tuple[ServedKey, str, int, float], Problem] = {}

    def wanted(self) -> list[Problem]:
        """Problems whose tables are missing."""
        return list(self._wanted.values())

    def solved(self, tables: Iterable[Table]) -> None:
        """Take answers to `wanted`. Those that are no longer wanted are ignored."""
        asked = {_identity(problem): key for key, problem in self._wanted.items()}
        for table in tables:
            if (key := asked.get(_identity(table))) is not None:
                of, arrivals, workers, load = key
                del self._wanted[key]
                if of in self.served:
                    self.served[of].tables.put(arrivals, workers, load, table)

    def refresh(self, cluster: Cluster, groups: Sequence[tuple[str, float]]) -> None:
        """Set what the workers serve, with the cluster's current profiles.

        Args:
            groups: models and SLOs, seconds.

        Raises:
            ValueError: no given table is for any model and SLO of the cluster.
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
                served = self.served[key] = Served(key, variants, cluster.delay, self._margin_s)
                if key in before:
                    served.inherit(before[key], self._drift)
                else:
                    for table in self._given:
                        served.offer(table, self._label_of(table))
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
        self, served: Served, now: float, workers: int, load: float, burst: int, measured: bool
    ) -> Table | None:
        """The current table for a load; None if there is no table yet.

        Args:
            workers: number of equal workers to which arrivals are distributed.
            load: requests/s of one of them.
            burst: 4 to the power of this is the index of dispersion of arrivals.
            measured: whether the load was measured; it is rounded then.
        """
        served.table = self._find(served, now, workers, load, burst, measured)
        return served.table

    def _find(
        self, served: Served, now: float, workers: int, load: float, burst: int, measured: bool
    ) -> Table | None:
        label, arrivals = self._arrivals_at(burst)
        if served.drifted and now >= served.solved_at + _SETTLE_S:
            served.renew()
            self._wanted = {k: p for k, p in self._wanted.items() if k[0] != served.key}
        load = self._headroom * load
        if table := served.given.covering(label, workers, load):
            return table
        load = served.rounded(load, self._load_step if measured else 1.0)
        if table := served.tables.exact(label, workers, load):
            return table
        if served.reach_1 < served.slo_s - self._margin_s:
            served.solved_at = now
            if self._solver is not None:
                table = self._solver(self._problem(served, workers, load, arrivals))
                served.tables.put(label, workers, load, table)
                return table
            asked = (served.key, label, workers, load)
            if asked not in self._wanted:
                self._wanted[asked] = self._problem(served, workers, load, arrivals)
        return served.nearest(label, workers, load)

    def status(self) -> list[dict[str, Any]]:
        """For people: the current tables, and the predictions of each (RAMSIS §5.1)."""
        return [
            {
                "model": model,
                "slo_ms": 1e3 * slo_s,
                "kind": hardware,
                "workers": table.num_workers,
                "rate": table.rate,
                "arrivals": _label_of(table),
                "expected_accuracy": getattr(table, "expected_accuracy", None),
                "violation_rate": getattr(table, "violation_rate", None),
            }
            for (model, slo_s, (hardware, _)), served in self.served.items()
            if (table := served.table) is not None
        ]

    def _arrivals_at(self, burst: int) -> tuple[str, Arrivals]:
        """Label and distribution of arrivals that tables are solved for."""
        burst = 0 if self._arrivals is not None else min(burst, _BURSTIEST)
        if (found := self._known.get(burst)) is None:
            from ray_slo.papers.ramsis.arrivals import POISSON, Gamma, label

            of = self._arrivals or (Gamma(2.0**-burst) if burst else POISSON)
            found = self._known[burst] = label(of.to_json()), of
        return found

    def _label_of(self, table: Table) -> str:
        """Label of the arrivals of a given table. If arrivals are measured, it is the nearest label
        for which tables are solved."""
        shape = table.options["arrivals"].get("shape")
        if self._arrivals is not None or shape is None:
            return _label_of(table)
        return self._arrivals_at(max(round(-math.log2(shape)), 0))[0]

    def _problem(self, served: Served, workers: int, load: float, arrivals: Arrivals) -> Problem:
        from ray_slo.papers.ramsis import Problem

        return Problem(
            variants=served.variants(served.reach),
            slo_s=served.slo_s - self._margin_s,
            rate=load * workers,
            num_workers=workers,
            arrivals=arrivals,
            **self._options,
        )


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as a problem takes them."""
    from ray_slo.papers.ramsis import Problem

    ours = {"variants", "slo_s", "rate", "num_workers", "arrivals"}
    valid = sorted({field.name for field in fields(Problem)} - ours)
    if "arrivals" in options:
        raise ValueError("options has no arrivals; give it as the policy's argument `arrivals`")
    if unknown := sorted(set(options) - set(valid)):
        raise ValueError(f"options has no {', '.join(unknown)}; it takes {', '.join(valid)}")
    try:
        any_variant = ("any", 100.0, LatencyProfile([0.5]))
        Problem((any_variant,), slo_s=1.0, rate=1.0, num_workers=1, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"options: {error}") from None
    return dict(options)


def checked_arrivals(given: Any) -> Arrivals | None:
    """The distribution of arrivals; None if it must be measured."""
    from ray_slo.papers.ramsis.arrivals import arrivals_of

    if given == MEASURED:
        return None
    try:
        return arrivals_of(given)
    except ValueError as error:
        raise ValueError(
            f"{error}; arrivals is measured, poisson, {{kind: gamma, shape: NUMBER}} or "
            f"{{kind: empirical, file: PATH}}, got {quoted(given)}"
        ) from None


def _identity(one: Problem | Table) -> tuple[str, float, int, float, str]:
    return one.profile_hash, one.slo_s, one.num_workers, one.rate, _label_of(one)


def _label_of(one: Problem | Table) -> str:
    from ray_slo.papers.ramsis import Problem
    from ray_slo.papers.ramsis.arrivals import label

    about = one.arrivals.to_json() if isinstance(one, Problem) else one.options["arrivals"]
    return label(about)


def in_words(table: Table) -> str:
    """The arrivals, workers and load that a table is for, in words."""
    workers = f"{table.num_workers} worker{'s' * (table.num_workers > 1)}"
    return f"table for {table.rate:.4g} requests/s on {workers}, {_label_of(table)}"


def tables_of(given: Any) -> list[Table]:
    """Tables of policy sets, tables, files of either, or a sequence of these."""
    if isinstance(given, str):
        from ray_slo.papers.ramsis import PolicySet

        return list(PolicySet.load(given))
    return [given] if hasattr(given, "lookup") else [t for one in given for t in tables_of(one)]
