"""Kairos' query distribution (§5.1): requests of different sizes, instances of different speed.

At every event that frees a worker or brings a request, the waiting requests are matched to the
workers one to one, with the least total cost (scipy's Jonker–Volgenant). Request i on worker j
costs

    C_j · L_ij,    L_ij = what is left of j's running batch + ℓ_j(size_i)           (Eq. 2, 4)

where C_j is the *heterogeneity coefficient*: ℓ of the largest request on the fastest kind, divided
by that on j (Definition 1). So a second of a slow worker is cheap, and the requests that gain most
from a fast worker get it. A pair that would finish after ξ times the SLO costs 10 SLOs instead (Eq.
5, 8). Pairs with an idle worker are carried out. The others are only plans, made again at the next
event.

We differ from the paper in three points. The penalty is not weighted by C_j: with the weight, a
late request goes to the cheapest worker and displaces requests that can be in time. Requests that
no worker can serve in time, as predicted, are not matched. With more requests than workers, the
paper takes the cheapest, small ones, and large ones wait until they are late; `pick="urgent"`
matches the most urgent instead. The programs `kairos-matching` and `kairos-fig14` have the
measurements.

Worker latencies are those of the cluster's profiles, or (`learn=True`) learned from the batches
that finish: first a straight line, then a table that fills by size (§5.1, Remarks).

Worked example (Figure 5; units are seconds): a strong worker with ℓ(s) = s / 2, a weak one with
ℓ(s) = s, SLO 8, so that C = 1 and 0.5. Requests of sizes 4 and 10 wait. First come, first served
puts the 4 on the strong worker, and the 10 on the weak one, where it is late and blocks until 10.
In the matching, the 4 costs 2 and 2, but the 10 costs 5 and (late) 80. So the 4 goes to the weak
worker. At 4, requests of sizes 8 and 4 come and are in time as well. Of the four, first come, first
served answers three in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import linear_sum_assignment

from ray_slo.core.arguments import Share, checked
from ray_slo.core.cluster import Cluster, Kind
from ray_slo.core.decisions import Action, Decision, Dispatch
from ray_slo.core.policy import Abilities, InFlight, Policy
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, WorkerId
from ray_slo.policies.kairos_latencies import Floats, Latencies, Waiting
from ray_slo.policies.shared.refusals import TOLERANCE_S, by_reason, reason
from ray_slo.policies.shared.workers import Sent, sent_before, take

_OVERRUN = 0.05
"""A batch past its predicted end is expected to last longer by this share of its length, or by the
time that it is already late."""


class _Worker:
    __slots__ = ("flights", "hardware", "id", "index", "kind")

    def __init__(self, id: WorkerId) -> None:
        self.id = id
        self.index = self.kind = 0
        self.hardware = ""
        self.flights: list[Sent] = []


class Kairos(Abilities):
    """Matches waiting requests to workers of different speed, with the least weighted time.

    Args:
        xi: ξ: an answer is planned within this share of its SLO. A request that is alone may use
            all of it.
        late: what happens to a late request: "drop", or "serve" it on a worker that no other
            request needs.
        pick: with more requests than workers, match the "cheapest" (the paper), the most "urgent",
            or the "scarce" ones, for which only one kind of hardware is fast enough, and then the
            most urgent. The scarce ones survive an overload by other requests, for example after
            the loss of all other kinds of workers.
        batch: waiting requests may join one that is sent, if all stay in time and the added
            weighted time is less than they would take alone anywhere. The paper never batches: a
            request is a batch already.
        learn: learn latencies from the batches that finish, beginning with a straight line through
            the cluster's profiles. Otherwise the profiles are used unchanged; a live scheduler
            learns them itself.
        penalty: cost of a pair that would be late, in SLOs.

    Raises:
        ValueError: an argument out of its range.
    """

    serves_late: bool = False
    chooses_variants = False
    serves_tasks = False

    @checked
    def __init__(
        self,
        *,
        xi: Share = 0.98,
        late: Literal["drop", "serve"] = "drop",
        pick: Literal["cheapest", "urgent", "scarce"] = "urgent",
        batch: bool = False,
        learn: bool = False,
        penalty: Annotated[float, Field(gt=1)] = 10.0,
    ) -> None:
        self.serves_late = late == "serve"
        self._xi = xi
        self._pick = pick
        self._penalty = penalty
        self._batch = batch
        self._tables = Latencies(xi, learn)
        self._waiting = Waiting()
        self._workers: dict[WorkerId, _Worker] = {}
        self._order: list[_Worker] = []
        self._batch_id = 0
        self._changed = True
        self._drop_at = self._wake_at = math.inf

    # -- events --------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        alone = len(requests) == 1 and self._is_idle()
        for r in requests:
            model = self._tables.models.get(r.model, -1)
            row = min(r.size, self._tables.max_size + 1)
            # A small tolerance for rounding, but never beyond the deadline.
            due = r.arrival + self._xi * (r.deadline - r.arrival) + TOLERANCE_S
            shortest = float(self._tables.shortest[model, row])
            if alone and due < now + self._delay_s + shortest + 2 * TOLERANCE_S:
                due = r.deadline + TOLERANCE_S  # no other request needs the time that ξ reserves
            self._waiting.add(r, model, row, due)
            give_up = r.deadline if shortest == math.inf else due - shortest - self._delay_s
            self._drop_at = min(self._drop_at, give_up)
        self._changed = True

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        gone = {id(r) for r in requests}
        if found := [i for i, r in enumerate(self._waiting.requests) if id(r) in gone]:
            self._waiting.remove(found)
            self._changed = True

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        state = self._workers.get(worker)
        if state is None or (done := take(state.flights, outcome.batch_id, now)) is None:
            return
        self._place(state)
        self._changed = True
        if outcome.status is BatchStatus.FINISHED:
            self._tables.measured(done.variant, state.hardware, outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._delay, self._delay_s = cluster.delay, cluster.delay(1)
        known, self._workers = self._workers, {}
        kinds: dict[Kind, int] = {}
        for index, worker in enumerate(cluster.workers.values()):
            state = self._workers[worker.id] = known.get(worker.id) or _Worker(worker.id)
            state.index, state.hardware = index, worker.hardware
            state.kind = kinds.setdefault(worker.kind, len(kinds))
        self._order = list(self._workers.values())
        self._kind = np.array([w.kind for w in self._order], dtype=np.int64)
        self._free_at = np.zeros(len(self._order))
        self._ready_from = np.zeros(len(self._order))
        for state in self._order:
            self._place(state)
        self._tables.set(cluster, kinds)
        requests, self._waiting = self._waiting.requests, Waiting()
        self._drop_at = math.inf
        self.requests_arrived(now, requests)

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over from another policy, before the first event."""
        self._batch_id = batch_id
        for flight in flights:
            worker = flight.dispatch.worker
            state = self._workers.setdefault(worker, _Worker(worker))
            state.flights.append(sent_before(flight))

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        if now >= self._drop_at:
            self._give_up(now, actions)
        if self._changed or now >= self._wake_at:
            self._changed = False
            self._wake_at = math.inf
            if self._waiting.requests and self._order:
                self._match(now, actions)
            if not self._waiting.requests:
                self._drop_at = math.inf
        return Decision(actions, min(self._drop_at, self._wake_at))

    def _is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._waiting.requests and not any(w.flights for w in self._order)

    # -- what workers take ---------------------------------------------------------------------

    def _place(self, state: _Worker) -> None:
        """Set when a worker is free, and when it can be sent a batch (`inf`: not before an
        event)."""
        i = state.index
        if not state.flights:
            self._free_at[i] = self._ready_from[i] = -math.inf
        else:
            self._free_at[i] = end = state.flights[-1].end_at
            ahead = len(state.flights) == 1 and self._delay_s > 0
            self._ready_from[i] = end - self._delay_s if ahead else math.inf

    # -- decisions -----------------------------------------------------------------------------

    def _give_up(self, now: float, actions: list[Action]) -> None:
        """Drop requests that not even an idle worker could serve in time; set the next check."""
        w, n = self._waiting, len(self._waiting.requests)
        shortest = self._tables.shortest[w.model[:n], w.size[:n]]
        served = np.isfinite(shortest)
        deadline = np.array([r.deadline for r in w.requests])
        give_up = np.where(served, w.due[:n] - shortest - self._delay_s, deadline)
        if self.serves_late:
            give_up[served] = np.inf
        gone = np.flatnonzero(now >= give_up)
        refused = ((w.requests[i], math.inf if served[i] else None) for i in gone.tolist())
        actions += by_reason((r, reason(r, now, soonest)) for r, soonest in refused)
        if len(gone):
            w.remove(gone.tolist())
        self._drop_at = float(give_up[now < give_up].min(initial=np.inf))

    def _match(self, now: float, actions: list[Action]) -> None:
        """Match waiting requests to workers, and send those that are matched to a ready worker."""
        ready = (self._ready_from <= now) & ((self._free_at >= now) | (self._free_at == -np.inf))
        if not ready.any():
            # Nothing can be sent, so no plan is needed. Events and the delay's lead time wake us.
            self._wake_at = self._next_ready(now)
            return
        w, n, t = self._waiting, len(self._waiting.requests), self._tables
        wait = self._wait(now)
        latency = t.latency[w.model[:n], w.size[:n]]  # (requests, kinds)
        total = latency[:, self._kind] + wait  # L: (requests, workers)
        in_time = total <= (w.due[:n] - now)[:, None]
        rows = np.flatnonzero(in_time.any(axis=1))
        pairs = self._pairs(rows, total, in_time) if len(rows) else []
        sent = [(i, j) for i, j in pairs if ready[j] and in_time[i, j]]
        if self.serves_late and len(rows) < n:
            idle = np.setdiff1d(np.flatnonzero(ready), [j for _, j in pairs])
            if len(idle):
                sent += self._serve_late(now, np.setdiff1d(np.arange(n), rows), idle, total)
        groups = [[i] for i, _ in sent]
        if self._batch and sent and len(sent) < n:
            self._join(now, sent, groups, wait)
        for (_, j), group in zip(sent, groups, strict=True):
            self._send(now, group, j, float(wait[j]), actions)
        if sent:
            w.remove([i for group in groups for i in group])
        if w.requests:
            self._wake_at = min(self._next_ready(now), self._next_surprise(now))

    def _wait(self, now: float) -> Floats:
        """Time from now until each worker could start: the rest of its batch."""
        wait = self._free_at - now
        late = (wait < 0) & ~np.isneginf(wait)
        if late.any():  # overdue: the later it is, the longer it may still take
            for j in np.flatnonzero(late).tolist():
                _, _, start, finish = self._order[j].flights[-1]
                wait[j] = max(now - finish, _OVERRUN * (finish - start))
        return np.asarray(np.maximum(wait, self._delay_s, out=wait))

    def _pairs(
        self, rows: NDArray[np.int64], total: Floats, in_time: NDArray[np.bool_]
    ) -> list[tuple[int, int]]:
        """Pairs of requests and workers with the least total cost.

        Args:
            rows: the requests that can be in time.
        """
        w, t = self._waiting, self._tables
        if self._pick != "cheapest" and len(rows) > len(self._order):
            # The least slack on the fastest worker first.
            slack = w.due[rows] - t.shortest[w.model[rows], w.size[rows]]
            if self._pick == "scarce":
                first = np.lexsort((slack, ~t.scarce[w.model[rows], w.size[rows]]))
            else:
                first = np.argpartition(slack, len(self._order))
            rows = rows[first[: len(self._order)]]
            rows.sort()
        every = len(rows) == len(total)
        cost = total if every else total[rows]
        cost = cost * t.weight[w.model[rows]][:, self._kind]
        penalty = self._penalty * w.slo[rows]
        if self._pick == "scarce":  # of two that need the same worker, it goes to the scarcer
            penalty *= 1 + t.scarce[w.model[rows], w.size[rows]]
        cost = np.where(in_time if every else in_time[rows], cost, penalty[:, None])
        if len(rows) == 1:
            return [(int(rows[0]), int(cost[0].argmin()))]
        chosen, columns = linear_sum_assignment(cost)
        return list(zip(rows[chosen].tolist(), columns.tolist(), strict=True))

    def _serve_late(
        self, now: float, rows: NDArray[np.int64], idle: NDArray[np.int64], total: Floats
    ) -> list[tuple[int, int]]:
        """Serve late requests on idle workers that no other request needs."""
        w = self._waiting
        hopeless = (
            w.due[rows] - self._tables.shortest[w.model[rows], w.size[rows]] <= now + self._delay_s
        )
        rows = rows[hopeless]
        weight = self._tables.weight[w.model[rows]][:, self._kind[idle]]
        cost = np.nan_to_num(total[np.ix_(rows, idle)] * weight, posinf=1e12)
        i, j = linear_sum_assignment(cost)
        columns = idle[j]
        fine = np.isfinite(total[rows[i], columns])
        return list(zip(rows[i][fine].tolist(), columns[fine].tolist(), strict=True))

    def _next_ready(self, now: float) -> float:
        """Time from which a busy worker may be sent a batch ahead."""
        ready = self._ready_from
        return float(ready[(ready > now) & (ready < np.inf)].min(initial=np.inf))

    def _next_surprise(self, now: float) -> float:
        """Time when a batch should have ended: plans that use its worker are then out of date."""
        at = math.inf
        for state in self._order:
            if state.flights:
                _, _, start, finish = state.flights[-1]
                if finish <= now:
                    finish = now + max(now - finish, _OVERRUN * (finish - start))
                at = min(at, finish)
        return at if at > now else math.nextafter(now, math.inf)

    def _join(
        self, now: float, sent: list[tuple[int, int]], groups: list[list[int]], wait: Floats
    ) -> None:
        """Add waiting requests to `groups`, the batches that are `sent`, most urgent first."""
        w, n, t = self._waiting, len(self._waiting.requests), self._tables
        size, due, model = w.size[:n].tolist(), w.due[:n].tolist(), w.model[:n].tolist()
        alone = (t.latency[w.model[:n], w.size[:n]] * t.weight[w.model[:n]]).min(axis=1)
        taken = {i for i, _ in sent}
        total = [size[i] for i, _ in sent]
        tightest = [due[i] for i, _ in sent]
        for i in sorted(set(range(n)) - taken, key=due.__getitem__):
            best, least = -1, float(alone[i])
            for g, (first, j) in enumerate(sent):
                items, kind = total[g] + size[i], self._order[j].kind
                if model[first] != model[i] or items > t.max_size:
                    continue
                latency = float(t.latency[model[i], items, kind])
                start = now + max(float(wait[j]), self._delay(len(groups[g]) + 1))
                if start + latency > min(tightest[g], due[i]):
                    continue
                more = latency - float(t.latency[model[i], total[g], kind])
                if more * t.weight[model[i], kind] < least:
                    best, least = g, more * float(t.weight[model[i], kind])
            if best >= 0:
                groups[best].append(i)
                total[best] += size[i]
                tightest[best] = min(tightest[best], due[i])

    def _send(
        self, now: float, group: list[int], j: int, wait_s: float, actions: list[Action]
    ) -> None:
        w, state = self._waiting, self._order[j]
        model = int(w.model[group[0]])
        items = sum([int(w.size[i]) for i in group])  # few: numpy's own sum takes longer
        start_at = now + max(wait_s, self._delay(len(group)))
        finish_at = start_at + float(self._tables.latency[model, items, state.kind])
        self._batch_id += 1
        variant, requests = self._tables.variant[model, state.kind], [w.requests[i] for i in group]
        actions.append(Dispatch(self._batch_id, state.id, variant, requests, start_at, finish_at))
        state.flights.append(Sent(self._batch_id, variant, start_at, finish_at))
        self._place(state)
