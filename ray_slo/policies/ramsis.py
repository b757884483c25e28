"""RAMSIS: which variant answers, chosen by tables that know how arrivals fall (RAMSIS §3, §6).

Every worker has a queue of its own; requests are dealt out round robin, or to the shortest queue
(Appendix I). When a worker is idle, the number of requests n in its queue and the slack of the
first of them (deadline − now) are looked up in a table: (n, slack) → (variant, batch size), O(1).
A table is solved for one load (`ray_slo.planning.ramsis`); in force is the one for the lowest load
that covers the anticipated one (`LoadMonitor`). So a lull is used for an accurate variant, and a
queue that fills makes the next batch a quick one, before requests are late.

Where tables come from. Given ones (`tables`) are used where they cover the load. Else a table is
solved for the anticipated load, rounded up to a grid (`load_step`): at once, by the `solver`; or,
with `solver=None`, by the host: `wanted()` says which problems, `tables_solved` brings the answers,
and until then the nearest safe table serves: the lowest load above, else the highest there is.
Without any table the fastest variant serves. When workers come or go, or a latency drifts by more
than `drift`, the tables of before serve (by the load per worker) until new ones are there.

Several models and SLOs (Appendix G): a worker serves one (model, SLO) at a time. Workers are dealt
out in proportion to the work that each of these groups brings, anew every `deal_every_s`. Where
there are fewer workers than groups, some serve several, the most urgent request first.

Worked example: variants of 20 and 60 ms per request, SLO 100 ms, one worker. At 5 requests/s the
table says "slow" for (1, 100 ms): the next request will most likely come later than in 60 ms. For
(2, 100 ms) it says "fast", for one of them, as 120 ms are too long; then "slow" for the other, (1,
80 ms). At 40 requests/s all is "fast": 60 ms each would keep up with 17 requests/s only.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from ray_slo.core.cluster import Cluster, DispatchDelay, Variant
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason
from ray_slo.core.load import Kind as MonitorKind
from ray_slo.core.load import LoadMonitor
from ray_slo.core.names import import_attr
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import BatchOutcome, Request, WorkerId
from ray_slo.policies.batching import TOLERANCE_S, non_negative

if TYPE_CHECKING:
    from ray_slo.planning.ramsis import PolicySet, Problem, Table, VariantProfile

Balancing = Literal["round_robin", "shortest_queue"]
Late = Literal["drop", "serve"]
_OPTIONS: Mapping[str, Any] = {
    "discretization": "model_based",
    "batching": "variable",
    "late_penalty": 300.0,
}
"""How tables are solved unless told otherwise. Measured on the paper's image and text tasks: any
part of the queue in a batch is worth 0.1 to 0.5 points over all of it; slack by the latencies that
occur costs a tenth of the time of 100 equal steps. At a late penalty of 100, a tenth of the
requests is given up above peak load for the accuracy of the others; at 300, what must be."""

Kind = tuple[str, frozenset[str]]
"""Hardware and loaded variants: workers alike in both serve alike."""

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


class Lane:
    """The queue of a worker for one group; or of a group that no worker serves.

    Attributes:
        filed: its key in the group's heap of shortest queues.
        drop_at: when its timer is set for.
    """

    __slots__ = ("drop_at", "filed", "group", "queue", "served", "worker")

    def __init__(self, group: Group, worker: _Worker | None, served: Served | None) -> None:
        self.group = group
        self.worker = worker
        self.served = served
        self.queue = DeadlineQueue()
        self.filed = (0, False, 0)
        self.drop_at = math.inf


class Group:
    """A model and an SLO, and the workers that serve it.

    Attributes:
        lanes: one per worker, in the order in which requests are dealt out.
        share: workers, where one that serves several groups counts as a part.
        load: anticipated, requests/s; None before the first look.
        homeless: where requests wait while no worker serves them.
    """

    def __init__(self, model: str, slo_s: float, monitor: LoadMonitor) -> None:
        self.model = model
        self.slo_s = slo_s
        self.monitor = monitor
        self.lanes: list[Lane] = []
        self.share = 0.0
        self.turn = 0
        self.shortest: list[tuple[tuple[int, bool, int], Lane]] = []
        self.homeless = Lane(self, None, None)
        self.load: float | None = None
        self.look_at = -math.inf


class _Worker:
    __slots__ = ("free_at", "id", "lanes", "running")

    def __init__(self, id: WorkerId) -> None:
        self.id = id
        self.lanes: list[Lane] = []
        self.running: int | None = None  # batch id
        self.free_at = -math.inf  # predicted


class Ramsis:
    """See the module's docstring.

    Args:
        tables: solved ones: a policy set of `ray_slo.planning.ramsis`, a table, the path of a
            file of either, or a list of these. Each serves the model, SLO and variants that it
            was solved for.
        solver: solves a problem that no given table covers, inside `decide`: a function or
            "module:attr". None: the host asks `wanted` and answers by `tables_solved`.
        load_rps: requests/s, where known: one number for every model, or one per model (with
            several SLOs, of each). Measured otherwise.
        headroom: tables are for this many times the load.
        load_step: a measured load is rounded up to a power of this (per worker).
        balancing: how requests are dealt out: "round_robin" or "shortest_queue".
        late: "drop" refuses what even the fastest variant would finish late; "serve" runs it all
            the same, as in the paper.
        slos_ms: SLOs per model, where it has several. A request belongs to the largest one that
            is not above its own.
        monitor: of the load: "mean", "ewma" or "peak".
        window_ms: of the load monitor.
        drift: share by which a latency may differ from the one that a table was solved for.
        margin_ms: kept between a batch's predicted finish and its tightest deadline.
        deal_every_s: how often workers are dealt out anew between groups.
        options: more fields of `planning.ramsis.Problem`, for the tables that are solved; by
            default model-based discretisation, variable batching, `late_penalty` 300.

    Raises:
        ValueError: an argument out of its range, or tables for none of the cluster's models.
    """

    serves_late: bool = False  # with late="serve" an object says otherwise
    serves_tasks: ClassVar[bool] = False

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """Tables take a second to solve: the host has that done elsewhere."""
        return {"solver": None}

    def __init__(
        self,
        *,
        tables: PolicySet | Table | str | Sequence[PolicySet | Table | str] = (),
        solver: Callable[[Problem], Table] | str | None = "ray_slo.planning.ramsis:solve",
        load_rps: float | Mapping[str, float] | None = None,
        headroom: float = 1.0,
        load_step: float = 1.1,
        balancing: Balancing = "round_robin",
        late: Late = "drop",
        slos_ms: Mapping[str, Sequence[float]] | None = None,
        monitor: MonitorKind = "mean",
        window_ms: float = 500.0,
        drift: float = 0.1,
        margin_ms: float = 0.0,
        deal_every_s: float = 5.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, choices in (
            ("balancing", balancing, get_args(Balancing)),
            ("late", late, get_args(Late)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if not (math.isfinite(load_step) and load_step > 1):
            raise ValueError(f"load_step must be greater than 1, got {load_step}")
        if not (math.isfinite(headroom) and headroom > 0):
            raise ValueError(f"headroom must be positive, got {headroom}")
        if not (math.isfinite(drift) and drift > 0):
            raise ValueError(f"drift must be positive, got {drift}")
        LoadMonitor(monitor, window_ms / 1e3)  # its own checks
        self.counts_requests = True
        self.serves_late = late == "serve"
        self._given = _tables_of(tables)
        self._solver: Callable[[Problem], Table] | None = (
            import_attr(solver) if isinstance(solver, str) else solver
        )
        self._load_rps = load_rps
        self._headroom = headroom
        self._load_step = load_step
        self._balancing: Balancing = balancing
        self._late: Late = late
        self._slos_ms = {model: sorted(slos) for model, slos in (slos_ms or {}).items()}
        self._monitor: MonitorKind = monitor
        self._window_s = window_ms / 1e3
        self._drift = drift
        self._margin_s = non_negative("margin_ms", margin_ms) / 1e3
        self._deal_every_s = non_negative("deal_every_s", deal_every_s)
        self._options = _checked_options(options or {})

        self._cluster = Cluster({}, {})
        self._groups: dict[str, list[Group]] = {}  # by model; SLOs rising
        self._served: dict[ServedKey, Served] = {}
        self._before: dict[ServedKey, Served] = {}  # also of kinds that are gone: they come back
        self._workers: dict[WorkerId, _Worker] = {}
        self._dealt: dict[WorkerId, tuple[Kind, list[tuple[str, float]]]] = {}
        self._deal_at = -math.inf
        self._ready: dict[
            _Worker, None
        ] = {}  # may be idle with work; a dict, as sets have no order
        self._timers: list[tuple[float, int, Lane]] = []
        self._wanted: dict[tuple[ServedKey, int, float], Problem] = {}
        self._serial = 0
        self._batch_id = 0

    # For a host that solves elsewhere ----------------------------------------------------------

    def wanted(self) -> list[Problem]:
        """Problems whose tables are missing; without a `solver` they are the host's to solve."""
        return list(self._wanted.values())

    def tables_solved(self, now: float, tables: Iterable[Table]) -> None:
        """Answers to `wanted`. Those that are not wanted any more are ignored."""
        asked = {_identity(problem): key for key, problem in self._wanted.items()}
        for table in tables:
            if (key := asked.get(_identity(table))) is not None:
                of, workers, load = key
                del self._wanted[key]
                if of in self._served:
                    self._served[of].tables.put(workers, load, table)

    # Events ------------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            group = self._group_of(request)
            group.monitor.arrived(now)
            self._enqueue(now, group, request)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            for lane in self._lanes(request.model):
                if lane.queue.remove(request):
                    self._file(lane)
                    break

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        state = self._workers.get(worker)
        if state is not None and state.running == outcome.batch_id:
            state.running, state.free_at = None, now
            self._ready[state] = None
            for lane in state.lanes:
                self._file(lane)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        slos = {
            name: [s / 1e3 for s in self._slos_ms.get(name, ())] or [model.latency_slo_s]
            for name, model in cluster.models.items()
        }
        if slos != {model: [g.slo_s for g in of] for model, of in self._groups.items()}:
            waiting: list[Request] | None = self._take_all()
            known = {(g.model, g.slo_s): g for of in self._groups.values() for g in of}
            self._groups = {
                model: [known.get((model, slo_s)) or self._group(model, slo_s) for slo_s in of]
                for model, of in slos.items()
            }
        else:
            waiting = None
        self._refresh()
        self._deal(now, waiting)

    # Decisions ---------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        if now >= self._deal_at and sum(map(len, self._groups.values())) > 1:
            self._deal(now)
        timers = self._timers
        while timers and timers[0][0] <= now:
            at, _, lane = heappop(timers)
            if lane.drop_at == at:
                lane.drop_at = math.inf
                self._refuse(lane, now, actions)
        ready, self._ready = self._ready, {}
        for worker in ready:
            if worker.running is None and self._workers.get(worker.id) is worker:
                self._send(worker, now, actions)
        while timers and timers[0][2].drop_at != timers[0][0]:
            heappop(timers)
        return Decision(actions, timers[0][0] if timers else math.inf)

    def _send(self, worker: _Worker, now: float, actions: list[Action]) -> None:
        """The most urgent queue of an idle worker gets a batch."""
        while lanes := [lane for lane in worker.lanes if lane.queue]:
            lane = min(lanes, key=lambda one: one.queue.head.deadline)
            if self._late == "drop" and self._refuse(lane, now, actions):
                continue
            served = lane.served
            assert served is not None
            variant, size = self._choose(lane, served, now)
            if variant is None and self._helps(lane.queue.head, now, actions):
                lane.queue.pop()
                self._arm(lane)
                return
            if variant is None:
                shed = lane.queue.take(size)
                actions.append(Drop(shed, DropReason.SHED, now + served.reach_1))
                self._arm(lane)
                continue
            actions.append(self._dispatch(now, worker, served, variant, lane.queue.take(size)))
            self._arm(lane)
            for one in worker.lanes:
                self._file(one)
            return

    def _dispatch(
        self, now: float, worker: _Worker, served: Served, variant: int, requests: Sequence[Request]
    ) -> Dispatch:
        self._batch_id += 1
        size = len(requests)
        start_at = now + self._cluster.delay(size)
        finish_at = start_at + served.profiles[variant].latency(size)
        worker.running, worker.free_at = self._batch_id, finish_at
        name = served.names[variant]
        return Dispatch(self._batch_id, worker.id, name, requests, start_at, finish_at)

    def _helps(self, request: Request, now: float, actions: list[Action]) -> bool:
        """Serve the only request that an idle system has, on the fastest worker, although its own
        worker is too slow or its table would not; False where it cannot be in time anywhere."""
        if any(w.running is not None for w in self._workers.values()):
            return False
        if any(r is not request for lane in self._lanes() for r in lane.queue):
            return False
        slo_s = self._group_of(request).slo_s
        able = [
            (served.reach_1, rank, worker, served)
            for rank, worker in enumerate(self._workers.values())
            if (served := self._served.get((request.model, slo_s, self._dealt[worker.id][0])))
        ]
        if not able:
            return False
        reach_1, _, worker, served = min(able)
        if now + reach_1 + self._margin_s > request.deadline + TOLERANCE_S:
            return False
        actions.append(self._dispatch(now, worker, served, served.fastest, [request]))
        return True

    def _choose(self, lane: Lane, served: Served, now: float) -> tuple[int | None, int]:
        """Index of the variant, and the batch size; without a variant, how many to give up."""
        waiting = len(lane.queue)
        slack_s = lane.queue.head.deadline - now - self._margin_s + TOLERANCE_S
        variant, size = served.fastest, waiting
        if table := self._table(lane.group, served, now):
            # The full-queue state stands for requests that are late (§4.2.3). Where those are
            # dropped, a queue that is merely long is not: its first N are looked up.
            known = waiting if self.serves_late else min(waiting, table.max_queue)
            name, size = table.lookup(known, slack_s)
            if not name and not self.serves_late:
                return None, min(size, waiting)
            variant = served.index.get(name, served.fastest)
        size = max(min(size, waiting, served.profiles[variant].max_batch_size), 1)
        if served.reach[variant][size - 1] <= slack_s:
            return variant, size
        # Profiles are not what the table was solved for, or nothing is in time: the most accurate
        # below it that is, else what the fastest can do.
        for other in range(variant - 1, -1, -1):
            if served.within(other, slack_s) >= size:
                return other, size
        fastest = served.fastest
        if self._late == "drop":
            return fastest, max(min(served.within(fastest, slack_s), waiting), 1)
        return fastest, min(waiting, served.profiles[fastest].max_batch_size)

    def _table(self, group: Group, served: Served, now: float) -> Table | None:
        """The table in force; None before there is any."""
        load, known = self._load(group, now)
        if load is None:
            return None
        if served.drifted and now >= served.solved_at + _SETTLE_S:
            served.renew()
            self._wanted = {k: p for k, p in self._wanted.items() if k[0] != served.key}
        # A worker that serves several groups has only a part of its time for this one.
        workers, load = len(group.lanes), self._headroom * load / group.share
        if table := served.given.covering(workers, load):
            return table
        load = served.rounded(load, 1.0 if known else self._load_step)
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

    def _load(self, group: Group, now: float) -> tuple[float | None, bool]:
        """Anticipated requests/s of a group, and whether it is known for sure."""
        known = self._load_rps
        if isinstance(known, Mapping):
            known = known.get(group.model)
        if known is not None:
            return known, True
        if group.look_at == -math.inf:  # the first request says nothing of a load
            group.look_at = now + 0.1 * self._window_s
        elif now >= group.look_at:
            group.load = group.monitor.rate(now)
            group.look_at = now + 0.1 * self._window_s
        return group.load, False

    def _problem(self, served: Served, workers: int, load: float) -> Problem:
        from ray_slo.planning.ramsis import Problem

        return Problem(
            variants=served.variants(served.reach),
            slo_s=served.slo_s - self._margin_s,
            rate=load * workers,
            num_workers=workers,
            **{
                "balancing": self._balancing,
                "late": self._late,
                **_OPTIONS,
                **self._options,
            },
        )

    # Queues ------------------------------------------------------------------------------------

    def _enqueue(self, now: float, group: Group, request: Request) -> None:
        if not group.lanes:
            lane = group.homeless
        elif self._balancing == "round_robin":
            lane = self._next(group, now)
        else:
            heap = group.shortest
            while heap[0][0] != heap[0][1].filed:
                heappop(heap)
            lane = heap[0][1]
        lane.queue.push(request)
        self._file(lane)
        if lane.worker is not None and lane.worker.running is None:
            self._ready[lane.worker] = None
        if lane.queue.head is request:
            self._arm(lane)

    def _next(self, group: Group, now: float) -> Lane:
        """Whose turn it is; a worker that hangs is passed over."""
        for _ in group.lanes:
            lane = group.lanes[group.turn]
            group.turn = (group.turn + 1) % len(group.lanes)
            worker = lane.worker
            assert worker is not None
            if worker.running is None or worker.free_at + group.slo_s >= now:
                break
        return lane

    def _file(self, lane: Lane) -> None:
        """Keep the heap of shortest queues: the number that waits, then idle workers, then the one
        that was touched longest ago."""
        if self._balancing == "round_robin" or lane.worker is None:
            return
        self._serial += 1
        lane.filed = (len(lane.queue), lane.worker.running is not None, self._serial)
        heap = lane.group.shortest
        if len(heap) > 4 * len(lane.group.lanes) + 64:
            heap[:] = sorted((one.filed, one) for one in lane.group.lanes)
        else:
            heappush(heap, (lane.filed, lane))

    def _arm(self, lane: Lane) -> None:
        """Wake up when the head can be served no more."""
        at = math.inf
        if lane.queue:
            deadline = lane.queue.head.deadline
            if lane.served is None:
                at = deadline
            elif self._late == "drop":
                at = deadline - lane.served.reach_1 - self._margin_s + 2 * TOLERANCE_S
        if at != lane.drop_at:
            lane.drop_at = at
            if at < math.inf:
                self._serial += 1
                heappush(self._timers, (at, self._serial, lane))

    def _refuse(self, lane: Lane, now: float, actions: list[Action]) -> bool:
        """Give up what can be served no more; whether there was any."""
        queue, served = lane.queue, lane.served
        expired = queue.take(queue.position(math.nextafter(now, math.inf)))
        if served is None:
            if expired:
                actions.append(Drop(expired, DropReason.NO_WORKER))
            late = []
        else:
            soonest = now + served.reach_1
            late = queue.take(queue.position(soonest + self._margin_s - TOLERANCE_S))
            if expired:
                actions.append(Drop(expired, DropReason.EXPIRED, soonest))
            if late and not (len(late) == 1 and self._helps(late[0], now, actions)):
                actions.append(Drop(late, DropReason.WOULD_MISS, soonest))
        if expired or late:
            self._file(lane)
        self._arm(lane)
        return bool(expired or late)

    # Groups and workers ------------------------------------------------------------------------

    def _group(self, model: str, slo_s: float) -> Group:
        return Group(model, slo_s, LoadMonitor(self._monitor, self._window_s))

    def _group_of(self, request: Request) -> Group:
        groups = self._groups.get(request.model)
        if groups is None:  # its model is gone: it waits in case that it comes back
            groups = self._groups[request.model] = [self._group(request.model, math.inf)]
        if len(groups) == 1:
            return groups[0]
        slo_s = request.deadline - request.arrival + TOLERANCE_S
        return groups[max(bisect_right(groups, slo_s, key=lambda g: g.slo_s) - 1, 0)]

    def _lanes(self, model: str | None = None) -> Iterator[Lane]:
        """Queues of a model, or all."""
        for name, groups in self._groups.items():
            if model is None or name == model:
                for group in groups:
                    yield group.homeless
                    yield from group.lanes

    def _take_all(self) -> list[Request]:
        """Every waiting request, taken out of its queue, in order of arrival."""
        taken = [r for lane in self._lanes() for r in lane.queue.take(len(lane.queue))]
        return sorted(taken, key=lambda r: (r.arrival, r.id))

    def _refresh(self) -> None:
        """What the workers serve, by the cluster's present profiles."""
        self._before |= self._served
        before, self._served = self._before, {}
        for worker in self._cluster.workers.values():
            kind = (worker.hardware, worker.loaded)
            for group in (g for of in self._groups.values() for g in of):
                model = self._cluster.models.get(group.model)
                key = (group.model, group.slo_s, kind)
                variants = [
                    v
                    for v in (model.variants if model else ())
                    if v.name in worker.loaded and worker.hardware in v.profiles
                ]
                if not variants or key in self._served:
                    continue
                served = Served(key, variants, self._cluster.delay)
                self._served[key] = served
                if key in before:
                    served.inherit(before[key], self._drift)
                else:
                    for table in self._given:
                        served.offer(table)
        if self._given and self._served and not any(s.has_tables for s in self._served.values()):
            solved = {name for t in self._given for name in t.names}
            loaded = {name for s in self._served.values() for name in s.names}
            slos = {1e3 * t.slo_s for t in self._given}
            raise ValueError(
                f"tables are for {', '.join(sorted(solved))} under SLOs of "
                f"{', '.join(f'{slo:g}' for slo in sorted(slos))} ms; the cluster has "
                f"{', '.join(sorted(loaded))} under "
                f"{', '.join(f'{1e3 * g.slo_s:g}' for of in self._groups.values() for g in of)} ms"
            )

    def _deal(self, now: float, waiting: list[Request] | None = None) -> None:
        """Deal workers out to groups; where that changes anything, requests to workers."""
        self._deal_at = now + self._deal_every_s
        dealt = self._assign(now)
        if dealt == self._dealt and waiting is None:
            for worker in self._workers.values():
                kind, _ = dealt[worker.id]
                for lane in worker.lanes:
                    lane.served = self._served[lane.group.model, lane.group.slo_s, kind]
                    self._arm(lane)
            return
        waiting = sorted([*(waiting or ()), *self._take_all()], key=lambda r: (r.arrival, r.id))
        self._dealt, self._timers = dealt, []
        by_key = {(g.model, g.slo_s): g for of in self._groups.values() for g in of}
        for group in by_key.values():
            group.lanes, group.shortest, group.turn, group.share = [], [], 0, 0.0
            group.homeless.drop_at = math.inf
        known, self._workers = self._workers, {}
        for id, (kind, keys) in dealt.items():
            worker = self._workers[id] = known.get(id) or _Worker(id)
            worker.lanes = [
                Lane(by_key[model, slo_s], worker, self._served[model, slo_s, kind])
                for model, slo_s in keys
            ]
            for lane in worker.lanes:
                lane.group.lanes.append(lane)
                lane.group.share += 1 / len(keys)
                self._file(lane)
        for group in by_key.values():  # the first turn is an idle worker's, if there is one
            idle = (
                i for i, one in enumerate(group.lanes) if one.worker and one.worker.running is None
            )
            group.turn = next(idle, 0)
        for request in waiting:
            self._enqueue(now, self._group_of(request), request)

    def _assign(self, now: float) -> dict[WorkerId, tuple[Kind, list[tuple[str, float]]]]:
        """Groups of each worker: those without a worker first, then in proportion to their work."""
        keys = list(dict.fromkeys((model, slo_s) for model, slo_s, _ in self._served))
        able = {
            worker.id: [key for key in keys if (*key, kind) in self._served]
            for worker in self._cluster.workers.values()
            for kind in [(worker.hardware, worker.loaded)]
        }
        chances = {key: sum(key in of for of in able.values()) for key in keys}
        work = dict.fromkeys(keys, 1e-9)
        for (model, slo_s, _), served in self._served.items():
            (group,) = (g for g in self._groups[model] if g.slo_s == slo_s)
            load, _ = self._load(group, now) if len(keys) > 1 else (None, False)
            work[model, slo_s] = max(work[model, slo_s], (load or 0.0) / served.most)
        count = dict.fromkeys(keys, 0)
        dealt: dict[WorkerId, tuple[Kind, list[tuple[str, float]]]] = {}
        for worker in self._cluster.workers.values():
            first = min(
                able[worker.id],
                key=lambda k: (1, (count[k] + 1) / work[k]) if count[k] else (0, chances[k]),
                default=None,
            )
            dealt[worker.id] = ((worker.hardware, worker.loaded), [first] if first else [])
            if first:
                count[first] += 1
        for key in (k for k in keys if not count[k]):
            _, theirs = dealt[
                min((w for w in able if key in able[w]), key=lambda w: len(dealt[w][1]))
            ]
            theirs.append(key)
        return dealt


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
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


def _tables_of(given: Any) -> list[Table]:
    """Tables of policy sets, tables, files of either, or a sequence of these."""
    if isinstance(given, str):
        from ray_slo.planning.ramsis import PolicySet

        return list(PolicySet.load(given))
    return [given] if hasattr(given, "lookup") else [t for one in given for t in _tables_of(one)]
