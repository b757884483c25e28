"""RAMSIS: tables, solved for the pattern of arrivals, choose the variant (RAMSIS §3, §6).

Every worker has its own queue. Requests are distributed round robin (to different workers in
proportion to their speed), or to the shortest queue (Appendix I). When a worker is idle, the number
of requests n in its queue and the slack of the first of them (deadline − now) are looked up in a
table: (n, slack) → (variant, batch size), O(1). A table is solved for one load
(`ray_slo.papers.ramsis`). The current table is the one for the lowest load that covers the
predicted one (`LoadMonitor`), among those for arrivals as bursty as the measured ones
(`Dispersion`): Poisson, or Gamma gaps of shape 1/2, 1/4 or 1/8. So a quiet moment is used for an
accurate variant. When the queue grows, the next batch uses a fast variant, before requests are
late.

Origin of the tables. Given tables (`tables`) are used if they cover the load. Otherwise a table is
solved for the predicted load, rounded up to a grid (`load_step`). The `solver` does it at once.
With `solver=None`, the host does it: `wanted()` lists the problems, and `solved` brings the
answers. Until then the nearest safe table is used: that for the next higher load, or else for the
highest load. Without any table the fastest variant serves. When workers come or go, or a latency
changes by more than `drift`, the old tables are used (by the load per worker) until new ones are
there.

Several models and SLOs (Appendix G): a worker serves one (model, SLO) at a time. Workers are
distributed to these groups in proportion to their work, again every `deal_every_s`. If there are
fewer workers than groups, some workers serve several groups, the most urgent request first.

Worked example: variants of 20 and 60 ms per request, SLO 100 ms, one worker. At 5 requests/s the
table says "slow" for (1, 100 ms): the next request will most likely come later than in 60 ms. For
(2, 100 ms) it says "fast", for one of them, as 120 ms are too long; then "slow" for the other, (1,
80 ms). At 40 requests/s all is "fast": 60 ms each would keep up with 17 requests/s only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ray_slo.core.arguments import NonNegative, Positive, checked
from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason
from ray_slo.core.load import Kind as MonitorKind
from ray_slo.core.load import LoadMonitor
from ray_slo.core.names import import_attr
from ray_slo.core.policy import Abilities
from ray_slo.core.requests import BatchOutcome, Request, WorkerId
from ray_slo.policies.ramsis_lanes import Dealt, Expecting, Group, Lane, Worker, deal, settle
from ray_slo.policies.ramsis_tables import (
    MEASURED,
    Served,
    Tables,
    checked_arrivals,
    checked_options,
    in_words,
    tables_of,
)
from ray_slo.policies.shared.refusals import TOLERANCE_S
from ray_slo.policies.shared.timers import Timers

if TYPE_CHECKING:
    from ray_slo.papers.ramsis import PolicySet, Problem, Table
    from ray_slo.papers.ramsis.arrivals import Arrivals

Balancing = Literal["round_robin", "shortest_queue"]
Late = Literal["drop", "serve"]


class Ramsis(Expecting, Abilities):
    """See the module's docstring.

    Args:
        tables: solved tables: a policy set of `ray_slo.papers.ramsis`, a table, the path of a
            file of either, or a list of these. Each serves the model, SLO and variants that it was
            solved for.
        solver: solves a problem that no given table covers, inside `decide`: a function or
            "module:attr". None: the host asks `wanted` and answers by `solved`.
        load_rps: requests/s: one number for every model, or one per model (with several SLOs, of
            each). Default: measured.
        arrivals: what tables are solved for: "measured", "poisson", or as in `ray-slo solve`
            {"kind": "gamma", "shape": 0.3}, {"kind": "empirical", "file": …}; or an `Arrivals`.
        headroom: tables are solved for the load times this factor.
        load_step: a measured load is rounded up to a power of this (per worker).
        balancing: how requests are distributed: "round_robin" or "shortest_queue".
        late: "drop" refuses requests that would be late even with the fastest variant; "serve" runs
            them, as in the paper.
        slos_ms: SLOs per model, beside its classes'. A request belongs to the nearest to its own.
        monitor: kind of load monitor: "mean", "ewma" or "peak".
        window_ms: window of the load monitor.
        drift: allowed relative change of a latency since its table was solved.
        margin_ms: time kept between a batch's predicted end and its earliest deadline.
        deal_every_s: seconds between two distributions of the workers to the groups.
        options: more fields of `papers.ramsis.Problem`, for the tables that are solved; by
            default model-based discretisation, variable batching, `late_penalty` 300.

    Raises:
        ValueError: an argument out of its range, or tables for none of the cluster's models.
    """

    serves_late: bool = False  # with late="serve" an object says otherwise
    counts_requests = True
    serves_tasks = False
    plans_per_slo = True

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """A table takes a second to solve, so the host does it in another process."""
        return {"solver": None}

    @checked
    def __init__(
        self,
        *,
        tables: PolicySet | Table | str | Sequence[PolicySet | Table | str] = (),
        solver: Callable[[Problem], Table] | str | None = "ray_slo.papers.ramsis:solve",
        load_rps: float | Mapping[str, float] | None = None,
        arrivals: Arrivals | Mapping[str, Any] | str = MEASURED,
        headroom: Positive = 1.0,
        load_step: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.1,
        balancing: Balancing = "round_robin",
        late: Late = "drop",
        slos_ms: Mapping[str, Sequence[Positive]] | None = None,
        monitor: MonitorKind = "mean",
        window_ms: Positive = 500.0,
        drift: Positive = 0.1,
        margin_ms: NonNegative = 0.0,
        deal_every_s: NonNegative = 5.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.serves_late = late == "serve"
        self._tables = Tables(
            tables_of(tables),
            import_attr(solver) if isinstance(solver, str) else solver,
            headroom=headroom,
            load_step=load_step,
            drift=drift,
            margin_s=margin_ms / 1e3,
            arrivals=checked_arrivals(arrivals),
            options={"balancing": balancing, "late": late, **checked_options(options or {})},
        )
        self._load_rps = load_rps
        self._measures_bursts = arrivals == MEASURED
        self._in_turn = balancing == "round_robin"
        self._late: Late = late
        self._slos_ms = dict(slos_ms or {})
        self._monitor: MonitorKind = monitor
        self._window_s = window_ms / 1e3
        self._margin_s = margin_ms / 1e3
        self._deal_every_s = deal_every_s

        self.explain = False  # put the current table into every dispatch
        self._cluster = Cluster({}, {})
        self._groups: dict[str, list[Group]] = {}  # by model; SLOs rising
        self._workers: dict[WorkerId, Worker] = {}
        self._dealt: Dealt = {}
        self._deal_at = -math.inf
        # Workers that may be idle with work; a dict, because sets have no order.
        self._ready: dict[Worker, None] = {}
        self._timers = Timers[Lane]()
        self._batch_id = 0

    # For a host that solves elsewhere ----------------------------------------------------------

    def wanted(self) -> list[Problem]:
        """Problems whose tables are missing; without a `solver`, the host solves them."""
        return self._tables.wanted()

    def solved(self, now: float, tables: Iterable[Table]) -> None:
        """Take the answers to `wanted`. Those that are no longer wanted are ignored."""
        self._tables.solved(tables)

    def tables_in_force(self) -> list[dict[str, Any]]:
        """For people: tables by model, SLO and kind of worker, with predictions (RAMSIS §5.1)."""
        return self._tables.status()

    # Events ------------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            group = self._group_of(request)
            group.arrived(now)
            self._enqueue(now, group, request)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            for lane in self._lanes(request.model):
                if lane.queue.remove(request):
                    lane.group.file(lane)
                    break

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        state = self._workers.get(worker)
        if state is not None and state.running == outcome.batch_id:
            state.running, state.free_at = None, now
            self._ready[state] = None
            for lane in state.lanes:
                lane.group.file(lane)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        slos = {
            name: sorted({s / 1e3 for s in self._slos_ms.get(name, ())} | {*model.slos_s})
            or [model.latency_slo_s]
            for name, model in cluster.models.items()
        }
        if slos != {model: [g.slo_s for g in of] for model, of in self._groups.items()}:
            waiting: list[Request] | None = self._take_all()
            known = {(g.model, g.slo_s): g for g in self._all()}
            self._groups = {
                model: [known.get((model, slo_s)) or self._group(model, slo_s) for slo_s in of]
                for model, of in slos.items()
            }
        else:
            waiting = None
        self._tables.refresh(cluster, [(g.model, g.slo_s) for g in self._all()])
        self._deal(now, waiting)

    # Decisions ---------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        if now >= self._deal_at and sum(map(len, self._groups.values())) > 1:
            self._deal(now)
        for lane in self._timers.due(now):
            self._refuse(lane, now, actions)
        ready, self._ready = self._ready, {}
        for worker in ready:
            if worker.running is None and self._workers.get(worker.id) is worker:
                self._send(worker, now, actions)
        return Decision(actions, self._timers.next_at())

    def _send(self, worker: Worker, now: float, actions: list[Action]) -> None:
        """Send a batch of the most urgent queue of an idle worker."""
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
                one.group.file(one)
            return

    def _dispatch(
        self, now: float, worker: Worker, served: Served, variant: int, requests: Sequence[Request]
    ) -> Dispatch:
        self._batch_id += 1
        size = len(requests)
        start_at = now + self._cluster.delay(size)
        finish_at = start_at + served.profiles[variant].latency(size)
        worker.running, worker.free_at = self._batch_id, finish_at
        name = served.names[variant]
        note = in_words(served.table) if self.explain and served.table is not None else ""
        return Dispatch(self._batch_id, worker.id, name, requests, start_at, finish_at, note=note)

    def _helps(self, request: Request, now: float, actions: list[Action]) -> bool:
        """Serve the only request of an idle system on the fastest worker, if its own worker cannot.
        False if it cannot be in time anywhere."""
        if any(w.running is not None for w in self._workers.values()):
            return False
        if any(r is not request for lane in self._lanes() for r in lane.queue):
            return False
        slo_s = self._group_of(request).slo_s
        able = [
            (served.reach_1, rank, worker, served)
            for rank, worker in enumerate(self._workers.values())
            if (
                served := self._tables.served.get((request.model, slo_s, self._dealt[worker.id][0]))
            )
        ]
        if not able:
            return False
        reach_1, _, worker, served = min(able)
        if now + reach_1 + self._margin_s > request.deadline + TOLERANCE_S:
            return False
        actions.append(self._dispatch(now, worker, served, served.fastest, [request]))
        return True

    def _choose(self, lane: Lane, served: Served, now: float) -> tuple[int | None, int]:
        """Index of the variant, and the batch size; without a variant, the number of drops."""
        waiting = len(lane.queue)
        slack_s = lane.queue.head.deadline - now - self._margin_s + TOLERANCE_S
        variant, size = served.fastest, waiting
        if table := self._table(lane, served, now):
            # The full-queue state means late requests (§4.2.3). If these are dropped, the first N
            # requests of a long queue are looked up.
            known = waiting if self.serves_late else min(waiting, table.max_queue)
            name, size = table.lookup(known, slack_s)
            if not name and not self.serves_late:
                return None, min(size, waiting)
            variant = served.index.get(name, served.fastest)
        size = max(min(size, waiting, served.profiles[variant].max_batch_size), 1)
        return served.in_time(variant, size, waiting, slack_s, late=self.serves_late)

    # Queues ------------------------------------------------------------------------------------

    def _enqueue(self, now: float, group: Group, request: Request) -> None:
        lane = group.next(now)
        lane.queue.push(request)
        group.file(lane)
        if lane.worker is not None and lane.worker.running is None:
            self._ready[lane.worker] = None
        if lane.queue.head is request:
            self._arm(lane)

    def _arm(self, lane: Lane) -> None:
        """Set the timer for the time when the head can no longer be served."""
        at = math.inf
        if lane.queue:
            deadline = lane.queue.head.deadline
            if lane.served is None:
                at = deadline
            elif self._late == "drop":
                at = deadline - lane.served.reach_1 - self._margin_s + 2 * TOLERANCE_S
        self._timers.set(lane, at)

    def _refuse(self, lane: Lane, now: float, actions: list[Action]) -> bool:
        """Drop requests that can no longer be served; whether there was any."""
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
            lane.group.file(lane)
        self._arm(lane)
        return bool(expired or late)

    # Groups and workers ------------------------------------------------------------------------

    def _table(self, lane: Lane, served: Served, now: float) -> Table | None:
        """The current table; None before there is any."""
        group = lane.group
        load, measured = self._load(group, now)
        if load is None:
            return None
        if self._measures_bursts:
            group.look_for_bursts()
        of_worker = load * lane.speed / group.speed
        return self._tables.in_force(served, now, lane.equals, of_worker, group.burst, measured)

    def _load(self, group: Group, now: float) -> tuple[float | None, bool]:
        """Predicted requests/s of a group, and whether they were measured."""
        known = self._load_rps
        if isinstance(known, Mapping):
            known = known.get(group.model)
        return (group.load(now), True) if known is None else (known, False)

    def _group(self, model: str, slo_s: float) -> Group:
        monitor = LoadMonitor(self._monitor, self._window_s)
        return Group(model, slo_s, monitor, self._in_turn, 0.1 * self._window_s)

    def _all(self) -> Iterator[Group]:
        for groups in self._groups.values():
            yield from groups

    def _group_of(self, request: Request) -> Group:
        groups = self._groups.get(request.model)
        if groups is None:  # its model is gone; it waits, because the model may come back
            groups = self._groups[request.model] = [self._group(request.model, math.inf)]
        if len(groups) == 1:
            return groups[0]
        slo_s = request.deadline - request.arrival  # less what a live host keeps for the way back
        return min(groups, key=lambda g: abs(g.slo_s - slo_s))

    def _lanes(self, model: str | None = None) -> Iterator[Lane]:
        """Queues of a model, or all."""
        for name, groups in self._groups.items():
            if model is None or name == model:
                for group in groups:
                    yield group.homeless
                    yield from group.lanes

    def _take_all(self) -> list[Request]:
        """Take all waiting requests out of their queues, in order of arrival."""
        taken = [r for lane in self._lanes() for r in lane.queue.take(len(lane.queue))]
        return sorted(taken, key=lambda r: (r.arrival, r.id))

    def _deal(self, now: float, waiting: list[Request] | None = None) -> None:
        """Distribute workers to groups; if that changes anything, distribute the requests again."""
        self._deal_at = now + self._deal_every_s
        served = self._tables.served
        by_key = {(g.model, g.slo_s): g for g in self._all()}
        dealt = deal(self._cluster, served, lambda *key: self._load(by_key[key], now)[0])
        if dealt == self._dealt and waiting is None:
            for worker in self._workers.values():
                kind, _ = dealt[worker.id]
                for lane in worker.lanes:
                    lane.served = served[lane.group.model, lane.group.slo_s, kind]
                    self._arm(lane)
            for group in by_key.values():
                group.weigh_again()
            return
        waiting = sorted([*(waiting or ()), *self._take_all()], key=lambda r: (r.arrival, r.id))
        self._dealt, self._timers = dealt, Timers()
        self._workers = settle(dealt, by_key.values(), self._workers, served)
        for request in waiting:
            self._enqueue(now, self._group_of(request), request)
