"""Loki's load balancer (§5): routing tables, and what becomes of requests that fall behind.

A task of a pipeline is a *model* here, a request that another one made says so in `upstream`, and
deadlines are end to end: no clock starts again at a task. A planner gives workers a variant and a
batch size (`Worker.assigned`); `planning.routing.most_accurate_first` makes tables of that for the
demand at the root and the multiplicative factors, both measured here, whenever the cluster changes
and every `rebalance_s`. A request goes where the table of its upstream worker says, by a
low-discrepancy sequence in place of dice; one that finds no capacity there goes to whoever would
finish it first. Workers take what waits for them in the order of deadlines, as soon as they are
idle, in batches of at most the configured size.

The *budget* of a task. By the plan, Σ waiting_factor · ℓ(configured batch) on a path is within the
SLO: the factor, 2, is for a wait as long as an execution (§4.1). What a request spends at a task,
waiting included, is therefore held against waiting_factor · ℓ; against ℓ alone, as §4.2 may be
read, whatever waits would be late.

What becomes of a request that is late by x at a task, against its budget (§5.2, §6.3):

* `none`: nothing, it is served late;
* `last_task`: nothing, but at a last task it is dropped when less is left than an execution;
* `per_task`: it is dropped before the next task;
* `opportunistic`: where the table says a worker with execution time y, it goes to the most accurate
  worker with capacity left and an execution time of at most y − x, or else is dropped.

The last two also drop what could not meet its deadline if it were run now.

Worked example: a detector with ℓ = 20 ms makes 4 requests per frame; a large recogniser takes 20 ms
as well, a small one 10 ms. Budgets: 40, 40 and 20 ms. A frame that spent 45 ms at the detector is
late by x = 5 ms. Its requests would go to the large one, y = 20 ms; as y − x = 15 ms, they go to
the small one if it has capacity left.

Ours is `slack`, the default. Not what was spent decides, but what is left:

* a request goes where the table says if it is expected to be done there so early that the rest of
  the path has the time that the plan gives it; else to the most accurate group of which that is
  true; else to the one that is done first;
* it is dropped when a batch is made, if that would end later than the deadline less the least that
  must follow: after what waits at the tasks below already, and what the batches that run now will
  make, batches of the fastest variants there, as large as this batch and the queues will fill them.
  Frames for which the tasks below have no room leave at the root, before they cost anything; a lone
  frame needs no more than a small batch there, and goes;
* the workers of a variant share a queue (`queues="variant"`): a request does not wait for one of
  them while another is idle;
* where a plan leaves a variant with fewer workers, what waits for it is routed again.

The paper itself: `drop="opportunistic", queues="worker"`; `loki-fig7` has the measurements.

A request costs O(log n) for its queue and its table, and a look at the task's groups only where the
table's choice is full or too late.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from ray_slo.core.cluster import Cluster, Model, Worker
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason
from ray_slo.core.demand import Demand, Factors
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import (
    BatchOutcome,
    BatchStatus,
    Request,
    RequestId,
    Upstream,
    WorkerId,
)
from ray_slo.planning import routing
from ray_slo.policies.batching import non_negative
from ray_slo.policies.shared.refusals import TOLERANCE_S

DropRule = Literal["slack", "opportunistic", "per_task", "last_task", "none"]
Queues = Literal["variant", "worker"]

_GOLDEN = (math.sqrt(5) - 1) / 2
_LEAST_SHARE = 0.75
"""The head is dropped if the batch that it can still be in is smaller than this share of the batch
without it: small batches would make even more late."""


class _Flight(NamedTuple):
    """A batch that was sent and is not yet reported; times as predicted."""

    batch_id: int
    variant: str
    start_at: float
    end_at: float
    makes: Mapping[str, float]  # requests for each child task, as expected


class _Worker:
    __slots__ = ("flights", "groups", "id", "rank")

    def __init__(self, id: WorkerId) -> None:
        self.id = id
        self.rank = 0
        self.flights: list[_Flight] = []  # the running batch, then one sent ahead
        self.groups: list[_Group] = []

    @property
    def free_at(self) -> float:
        return self.flights[-1].end_at if self.flights else -math.inf


class _Group:
    """Workers of a task that are alike, and the queue that they share. Without members: where
    requests wait for a worker."""

    __slots__ = (
        "accuracy",
        "alarm",
        "batch_size",
        "busy",
        "idle",
        "latency_s",
        "listed",
        "members",
        "profile",
        "queue",
        "task",
        "variant",
    )

    def __init__(self, task: str, variant: str, batch_size: int) -> None:
        self.task, self.variant, self.batch_size = task, variant, batch_size
        self.accuracy = self.latency_s = 0.0
        self.profile: LatencyProfile
        self.queue = DeadlineQueue()
        self.alarm = math.inf  # when the head is looked at, if nothing else happens
        self.members: list[_Worker] = []
        # Heaps; what is stale in them is thrown away when it surfaces.
        self.idle: list[tuple[int, _Worker]] = []
        self.listed: set[_Worker] = set()  # in `idle`
        self.busy: list[tuple[float, int, _Worker]] = []

    def clear(self, profile: LatencyProfile, accuracy: float) -> None:
        """Forget the members."""
        self.profile, self.accuracy = profile, accuracy
        self.latency_s = profile.latency(self.batch_size)
        self.members, self.idle, self.busy, self.listed = [], [], [], set()


class _Service(NamedTuple):
    """A worker does a variant's work for a task."""

    task: str
    worker: Worker
    variant: str
    profile: LatencyProfile
    accuracy: float
    batch_size: int
    load: float | None


class _Table(NamedTuple):
    """Groups by cumulative probability."""

    bounds: list[float]
    groups: list[_Group]

    def at(self, u: float) -> _Group | None:
        """The group at 0 ≤ u < 1; None where the table has no capacity left."""
        i = bisect_right(self.bounds, u)
        return self.groups[i] if i < len(self.groups) else None


class Pipeline:
    """Loki's load balancer.

    Args:
        parents: parent by task, the root's None; the root first, parents before children.
        factors: requests made for each child task per request, by variant, as far as known;
            1 for a child that is not named. They are learned.
        drop: what becomes of late requests: "slack" (ours), or one of the paper's rules,
            "opportunistic", "per_task", "last_task", "none".
        queues: the workers of a variant share a queue ("variant"), or each has its own ("worker").
        waiting_factor: of the planner: a task's budget is so many executions of a batch.
        rebalance_s: tables are made anew at least so often while requests arrive.
        communication_s: of the planner: delay on the way to a worker, seconds.

    Attributes:
        factors: as learned, a `planning.demand.Factors`.

    Raises:
        ValueError: an argument out of its range; `parents` is no tree in that order.
    """

    serves_late: bool = False

    def __init__(
        self,
        *,
        parents: Mapping[str, str | None],
        factors: Mapping[str, Mapping[str, float]] | None = None,
        drop: DropRule = "slack",
        queues: Queues = "variant",
        waiting_factor: float = 2.0,
        rebalance_s: float = 1.0,
        communication_s: float = 0.0,
    ) -> None:
        routing.most_accurate_first(parents, (), 0.0)
        for name, value, choices in (
            ("drop", drop, get_args(DropRule)),
            ("queues", queues, get_args(Queues)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if not (math.isfinite(waiting_factor) and waiting_factor >= 1):
            raise ValueError(f"waiting_factor must be at least 1, got {waiting_factor}")
        if not (math.isfinite(rebalance_s) and rebalance_s > 0):
            raise ValueError(f"rebalance_s must be positive, got {rebalance_s}")
        self._parents = dict(parents)
        self._root = next(iter(parents), "")
        self._children: dict[str, list[str]] = {t: [] for t in parents}
        self._depth: dict[str, int] = {}
        for task, parent in parents.items():
            self._depth[task] = 1 if parent is None else self._depth[parent] + 1
            if parent is not None:
                self._children[parent].append(task)
        self._drop, self._own_queues = drop, queues == "worker"
        self._waiting_factor = waiting_factor
        self._rebalance_s = rebalance_s
        self._communication_s = non_negative("communication_s", communication_s)
        self.counts_requests = True
        self.serves_late = drop in ("none", "last_task")
        self._prior = {v: dict(f) for v, f in (factors or {}).items()}
        self.factors = Factors({})
        self._variants: dict[str, str] = {}  # task by variant
        self._finished: dict[Hashable, int] = {}  # by variant, since the last look
        self._made: dict[Hashable, dict[str, int]] = {}
        self._demand = Demand("ewma", 1.0)
        self._workers: dict[WorkerId, _Worker] = {}
        self._groups: dict[tuple[str, str, str, str, str], _Group] = {}
        self._services: list[_Service] = []
        self._of_task: dict[str, list[_Group]] = {}
        self._frontend: _Table | None = None
        self._tables: dict[tuple[WorkerId, str], dict[str, _Table]] = {}
        self._budget: dict[tuple[WorkerId, str], float] = {}
        self._last_budget: dict[str, float] = {}  # by variant
        self._backup: dict[str, list[tuple[float, float, _Group]]] = {}
        self._rebalance_at = -math.inf
        self._coming = dict.fromkeys(parents, 0.0)  # requests that running batches will make
        self._position: dict[str, float] = dict.fromkeys(parents, 0.5)
        self._home: dict[RequestId, _Group] = {}
        self._dirty: dict[_Group, None] = {}
        self._refused: dict[DropReason, list[Request]] = {}
        self._timers: list[tuple[float, int, _Group | _Worker, int]] = []
        self._sequence = self._batch_id = 0

    def demand(self, now: float) -> float:
        """Requests per second at the root, as anticipated."""
        return self._demand.rate(now)

    # -- events --------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        if now >= self._rebalance_at:
            self._rebalance(now)
        roots = 0
        for r in requests:
            if (upstream := r.upstream) is None:
                roots += r.model == self._root
            elif (made := self._made.get(upstream.variant)) is not None and r.model in made:
                made[r.model] += 1
            self._route(now, r)
        if roots:
            self._demand.arrived(now, roots)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for r in requests:
            group = self._home.get(r.id)
            if group is not None and group.queue.remove(r):
                del self._home[r.id]
        if self._refused:  # but not yet told
            gone = {id(r) for r in requests}
            refused = self._refused
            self._refused = {}
            for reason, dropped in refused.items():
                if kept := [r for r in dropped if id(r) not in gone]:
                    self._refused[reason] = kept

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        state = self._workers.get(worker)
        if state is None:
            return
        flights = state.flights
        mine = next((i for i, f in enumerate(flights) if f.batch_id == outcome.batch_id), None)
        if mine is None:
            return
        done = flights.pop(mine)
        self._expect(done, -1)
        if flights and mine == 0:  # the one sent ahead runs now
            ahead, start_at = flights[0], max(now, flights[0].start_at)
            end_at = start_at + ahead.end_at - ahead.start_at
            flights[0] = ahead._replace(start_at=start_at, end_at=end_at)
        if outcome.status is BatchStatus.FINISHED and done.variant in self._finished:
            self._finished[done.variant] += len(outcome.requests)
        self._place(now, state)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        if unknown := sorted(set(cluster.models) - set(self._parents)):
            raise ValueError(
                f"parents names the tasks {', '.join(self._parents)}; the cluster also has "
                f"{', '.join(unknown)}"
            )
        self._delay, self._delay_s = cluster.delay, cluster.delay(1)
        self._learn_anew(cluster)
        known, self._workers = self._workers, {}
        for rank, id in enumerate(cluster.workers):
            self._workers[id] = worker = known.get(id) or _Worker(id)
            worker.rank = rank
            worker.groups = []
        for id in known.keys() - cluster.workers.keys():
            for flight in known[id].flights:
                self._expect(flight, -1)
            known[id].flights.clear()  # its timers are void
        self._services = list(self._serving(cluster))
        old, self._groups = self._groups, {}
        before = {key: len(group.members) for key, group in old.items()}
        self._of_task = {task: [] for task in self._parents}
        self._budget = {}
        for s in self._services:
            owner = s.worker.id if self._own_queues else ""
            key = s.task, s.variant, str(s.batch_size), s.worker.hardware, owner
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = old.get(key) or _Group(s.task, s.variant, s.batch_size)
                group.clear(s.profile, s.accuracy)
                self._of_task[s.task].append(group)
            worker = self._workers[s.worker.id]
            group.members.append(worker)
            worker.groups.append(group)
            budget_s = self._waiting_factor * group.latency_s
            self._budget[s.worker.id, s.variant] = self._last_budget[s.variant] = budget_s
        for task, groups in self._of_task.items():
            groups.sort(key=lambda g: (-g.accuracy, g.latency_s))
            if not groups:
                key = task, "", "", "", ""
                limbo = self._groups[key] = old.get(key) or _Group(task, "", 1)
                groups.append(limbo)
        self._plan_rest()
        self._dirty = dict.fromkeys(self._groups.values())
        for worker in self._workers.values():
            self._place(now, worker)
        self._rebalance(now)
        for key, group in old.items():
            gone = key not in self._groups
            if gone:
                group.alarm = math.inf
            if gone or (self._drop == "slack" and len(group.members) < before[key]):
                for r in group.queue.take(len(group.queue)):
                    del self._home[r.id]
                    self._route(now, r)

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        timers = self._timers
        while timers and timers[0][0] <= now:
            at, _, what, batch_id = heappop(timers)
            if isinstance(what, _Worker):
                if [f.batch_id for f in what.flights] == [batch_id]:
                    self._place(now, what)
            elif what.alarm == at:
                what.alarm = math.inf
                self._dirty[what] = None
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            groups = [g for g in dirty if g.queue]
            if len(groups) > 1:  # they may share a worker
                groups.sort(key=_head_deadline)
            for group in groups:
                self._serve(now, group, actions)
        if self._refused:
            actions += [Drop(requests, reason) for reason, requests in self._refused.items()]
            self._refused = {}
        while timers and _is_void(timers[0]):
            heappop(timers)
        return Decision(actions, timers[0][0] if timers else math.inf)

    # -- who serves what -----------------------------------------------------------------------

    def _serving(self, cluster: Cluster) -> Iterator[_Service]:
        """As assigned; a task that nobody is assigned to is served by workers without assignment,
        each by all the variants that it has."""
        by_name = {
            v.name: (m, v, -float(i) if v.accuracy is None else v.accuracy)
            for m in cluster.models.values()
            for i, v in enumerate(m.variants)
        }
        covered, free = set(), []
        for worker in cluster.workers.values():
            assigned = worker.assigned
            if assigned is not None and assigned.variant in worker.loaded:
                model, variant, accuracy = by_name[assigned.variant]
                if (profile := variant.profiles.get(worker.hardware)) is not None:
                    covered.add(model.name)
                    size = max(min(assigned.batch_size, profile.max_batch_size), 1)
                    yield _Service(
                        model.name, worker, variant.name, profile, accuracy, size, assigned.load
                    )
                    continue
            free.append(worker)
        for worker in free:
            for model, variant, accuracy in by_name.values():
                profile = variant.profiles.get(worker.hardware)
                if model.name in covered or variant.name not in worker.loaded or profile is None:
                    continue
                size = self._default_batch_size(model, profile)
                yield _Service(model.name, worker, variant.name, profile, accuracy, size, None)

    def _default_batch_size(self, model: Model, profile: LatencyProfile) -> int:
        """Without a plan, a task takes an equal part of the SLO."""
        levels = max(self._depth.values())
        share_s = model.latency_slo_s / levels - self._communication_s
        return max(profile.max_batch_within(share_s / self._waiting_factor), 1)

    def _learn_anew(self, cluster: Cluster) -> None:
        """Factors of new variants begin as given, those of the others stay as learned."""
        variants = {v.name: m.name for m in cluster.models.values() for v in m.variants}
        if variants == self._variants:
            return
        for variant, factors in self._prior.items():
            children = self._children.get(variants.get(variant, ""), [])
            if variant not in variants or set(factors) - set(children):
                raise ValueError(
                    f"factors must be by variant and child task; got {dict(factors)} for "
                    f"{variant!r}, which has the children {children}"
                )
        prior: dict[Hashable, dict[str, float]] = {}
        for variant, task in variants.items():
            known = self.factors.of(variant) if variant in self._variants else {}
            given = self._prior.get(variant, {})
            prior[variant] = {c: known.get(c, given.get(c, 1.0)) for c in self._children[task]}
        self._variants = variants
        self.factors = Factors(prior)
        self._finished = dict.fromkeys(variants, 0)
        self._made = {v: dict.fromkeys(f, 0) for v, f in prior.items()}

    def _place(self, now: float, worker: _Worker) -> None:
        """After its flights changed: list a worker where it is looked for."""
        flights = worker.flights
        if not flights or self._may_send_ahead(now, worker):
            for group in worker.groups:
                if worker not in group.listed:
                    group.listed.add(worker)
                    heappush(group.idle, (worker.rank, worker))
                self._dirty[group] = None
        elif len(flights) == 1 and self._delay_s > 0:
            at = flights[0].end_at - self._delay_s
            if at > now:
                self._set_timer(at, worker, flights[0].batch_id)
        if flights:
            for group in worker.groups:
                busy = group.busy
                while busy and busy[0][2].free_at != busy[0][0]:
                    heappop(busy)
                heappush(busy, (flights[-1].end_at, worker.rank, worker))

    def _may_send_ahead(self, now: float, worker: _Worker) -> bool:
        """Within the delay of the predicted end of its only batch."""
        flights = worker.flights
        if len(flights) != 1 or self._delay_s == 0:
            return False
        end_at = flights[0].end_at
        return end_at - self._delay_s <= now <= end_at

    def _ready(self, now: float, group: _Group) -> _Worker | None:
        """The first member that can be sent a batch."""
        idle = group.idle
        while idle:
            worker = idle[0][1]
            if not worker.flights or self._may_send_ahead(now, worker):
                return worker
            heappop(idle)
            group.listed.discard(worker)
        return None

    def _set_timer(self, at: float, what: _Group | _Worker, batch_id: int = 0) -> None:
        self._sequence += 1
        heappush(self._timers, (at, self._sequence, what, batch_id))

    # -- tables --------------------------------------------------------------------------------

    def _rebalance(self, now: float) -> None:
        """Learn factors, run MostAccurateFirst."""
        self._rebalance_at = now + self._rebalance_s
        for variant, made in self._made.items():
            if self._finished[variant] or any(made.values()):
                self.factors.observe(variant, self._finished[variant], made)
                self._finished[variant] = 0
                made.update(dict.fromkeys(made, 0))
        self._factors_of = {v: self.factors.of(v) for v in self._variants}
        tasks_of: dict[WorkerId, int] = {}
        for s in self._services:
            tasks_of[s.worker.id] = tasks_of.get(s.worker.id, 0) + 1
        workers = [
            routing.Worker(
                (s.worker.id, s.variant),
                s.task,
                s.accuracy,
                s.profile.throughput(s.batch_size) / tasks_of[s.worker.id],
                s.profile.latency(s.batch_size),
                self._factors_of[s.variant],
                s.load,
            )
            for s in self._services
        ]
        demand = self.demand(now) or self._planned_demand(workers)
        made_tables = routing.most_accurate_first(self._parents, workers, demand)
        of_worker: dict[Hashable, _Group] = {
            (w.id, g.variant): g for g in self._groups.values() for w in g.members
        }

        def table(entries: Sequence[routing.Entry]) -> _Table:
            bounds = list(accumulate(e.probability for e in entries))
            if bounds and bounds[-1] > 1 - 1e-9:
                bounds[-1] = math.inf
            return _Table(bounds, [of_worker[e.worker] for e in entries])

        self._frontend = table(made_tables.frontend)
        self._tables = {}
        for s in self._services:
            tables = made_tables.tables[s.worker.id, s.variant]
            of_children = {child: table(entries) for child, entries in tables.items()}
            self._tables[s.worker.id, s.variant] = of_children
            self._tables["", s.variant] = of_children  # of a worker that is gone
        self._backup = {
            task: [(b.accuracy, b.execution_s, of_worker[b.worker]) for b in backups]
            for task, backups in made_tables.backup.items()
        }

    def _planned_demand(self, workers: Sequence[routing.Worker]) -> float:
        """Before anything was measured."""
        return sum(
            w.capacity if w.planned is None else w.planned for w in workers if w.task == self._root
        )

    # -- requests ------------------------------------------------------------------------------

    def _route(self, now: float, r: Request) -> None:
        task, upstream = r.model, r.upstream
        table = None
        if task == self._root:
            table = self._frontend
        elif upstream is not None:
            tables = self._tables.get((upstream.worker, upstream.variant))
            if tables is None:
                tables = self._tables.get(("", upstream.variant), {})
            table = tables.get(task)
        u = self._position[task] = (self._position[task] + _GOLDEN) % 1
        group = table.at(u) if table is not None else None
        if group is None:
            group = min(self._of_task[task], key=lambda g: self._finish_at(now, g))
        group = self._keep(now, r, upstream, group)
        if group is None:
            self._refuse(now, r, DropReason.WOULD_MISS)
            return
        group.queue.push(r)
        self._home[r.id] = group
        self._dirty[group] = None

    def _keep(
        self, now: float, r: Request, upstream: Upstream | None, group: _Group
    ) -> _Group | None:
        """Where a request goes that the table sends to `group`; None if it is dropped."""
        rule = self._drop
        if not group.members or rule == "none":
            return group
        if rule == "slack":
            return self._in_time(now, r, group)
        if rule == "last_task":
            size = min(len(group.queue) + 1, group.batch_size)
            left_s = r.deadline - now + TOLERANCE_S
            late = not self._children[r.model] and left_s < group.profile.latency(size)
            return self._alone(now, r) if late else group
        if upstream is None or (late_s := self._late_by(upstream)) <= TOLERANCE_S:
            late = now + self._delay_s + group.profile.latency(1) > r.deadline + TOLERANCE_S
            return (self._alone(now, r) if late else None) or group
        if rule == "per_task":
            return None
        limit_s, best, best_at, accuracy = group.latency_s - late_s, None, math.inf, -math.inf
        for of_backup, execution_s, backup in self._backup[r.model]:
            if of_backup < accuracy:
                break
            if execution_s <= limit_s + TOLERANCE_S:
                finish_at = self._finish_at(now, backup)
                if finish_at < best_at:
                    best, best_at, accuracy = backup, finish_at, of_backup
        return best

    def _alone(self, now: float, r: Request) -> _Group | None:
        """Where the only request that an idle system has is done first; None if it is not the only
        one, or late anywhere. No rule is so strict as to refuse it."""
        if any(w.flights for w in self._workers.values()) or self._home:
            return None
        best = min(self._of_task[r.model], key=lambda g: self._finish_at(now, g))
        return best if self._finish_at(now, best) <= r.deadline + TOLERANCE_S else None

    def _late_by(self, upstream: Upstream) -> float:
        """x: what a request spent at its parent's task beyond the budget."""
        budget_s = self._budget.get((upstream.worker, upstream.variant))
        if budget_s is None:
            budget_s = self._last_budget.get(upstream.variant, math.inf)
        return upstream.spent_s - budget_s

    def _in_time(self, now: float, r: Request, group: _Group) -> _Group:
        due = r.deadline - self._planned_rest[r.model]
        if self._finish_at(now, group) <= due:
            return group
        best, best_at = group, math.inf
        for other in self._of_task[r.model]:  # the most accurate first
            finish_at = self._finish_at(now, other)
            if finish_at <= due:
                return other
            if finish_at < best_at:
                best, best_at = other, finish_at
        return best

    def _plan_rest(self) -> None:
        """Time after each task until all of its sinks are done: as planned, and at least (alone, by
        the fastest). What each task can take: requests per second, and in a batch of every worker.
        """
        self._planned_rest: dict[str, float] = {}
        self._least_rest: dict[str, float] = {}
        self._capacity: dict[str, float] = {}
        self._room: dict[str, int] = {}
        for task in reversed(self._parents):
            groups = [g for g in self._of_task[task] if g.members]
            self._capacity[task] = sum(
                len(g.members) * g.profile.throughput(g.batch_size) for g in groups
            )
            self._room[task] = sum(len(g.members) * g.batch_size for g in groups)
            planned = least = 0.0
            for child in self._children[task]:
                below = [g for g in self._of_task[child] if g.members]
                slowest = max((g.latency_s for g in below), default=0.0)
                alone = min((g.profile.latency(1) for g in below), default=0.0)
                planned_s = self._waiting_factor * slowest + self._planned_rest[child]
                planned = max(planned, self._communication_s + planned_s)
                least = max(least, self._communication_s + alone + self._least_rest[child])
            self._planned_rest[task], self._least_rest[task] = planned, least

    def _rest_s(self, task: str, ahead_s: float, variant: str, requests: float) -> float:
        """Least time after a task for what leaves it `ahead_s` from now, after all that waits for
        the tasks below by then.

        Args:
            variant, requests: what leaves it, and how many requests it is, more or less.
        """
        rest_s = 0.0
        for child, factor in self._factors_of[variant].items():
            if not (capacity := self._capacity[child]):
                continue
            waiting = sum(len(g.queue) for g in self._of_task[child]) + self._coming[child]
            made = requests * factor
            ahead = max(waiting - capacity * ahead_s, 0.0) + made  # and itself
            room = self._room[child]
            waves = math.floor(max(ahead - 1e-9, 0.0) / room)  # batches of every worker
            # Of factors that are averages, the integer part: one request more may be one too many.
            size = max(int(ahead - waves * room + 1e-9), 1)
            latency_s, fastest = min(
                (g.profile.latency(min(g.batch_size, size)), g.variant)
                for g in self._of_task[child]
                if g.members
            )
            own_s = self._communication_s + waves * room / capacity + latency_s
            rest_s = max(rest_s, own_s + self._rest_s(child, ahead_s, fastest, made))
        return rest_s

    def _expect(self, flight: _Flight, sign: int) -> None:
        for child, number in flight.makes.items():
            self._coming[child] += sign * number

    def _finish_at(self, now: float, group: _Group) -> float:
        """When one more request would be done, as far as can be told."""
        if not group.members:
            return math.inf
        waiting, size = len(group.queue), group.batch_size
        worker = self._ready(now, group)
        if worker is not None and not worker.flights:
            start_at, last = now + self._delay_s, min(waiting + 1, size)
        else:
            busy = group.busy
            while busy and busy[0][2].free_at != busy[0][0]:
                heappop(busy)
            start_at, last = max(busy[0][0] if busy else now, now + self._delay_s), size
        batches = waiting // size
        return (
            start_at + batches * group.latency_s / len(group.members) + group.profile.latency(last)
        )

    # -- batches -------------------------------------------------------------------------------

    def _serve(self, now: float, group: _Group, actions: list[Action]) -> None:
        """Send what can be sent, drop what has to be; look again when the head's time comes."""
        queue = group.queue
        while queue and (worker := self._ready(now, group)) is not None:
            self._send(now, group, worker, actions)
        while queue and now >= (at := self._give_up_at(group, queue.head)):
            r = queue.pop()
            del self._home[r.id]
            self._refuse(now, r, DropReason.WOULD_MISS if group.members else DropReason.NO_WORKER)
        if queue and at < group.alarm:
            group.alarm = at
            self._set_timer(at, group)

    def _give_up_at(self, group: _Group, r: Request) -> float:
        if not group.members:
            return r.deadline
        if self._drops_late(group.task):
            need_s = self._delay_s + group.profile.latency(1)
            if self._drop == "slack":
                need_s += self._least_rest[group.task]
            return r.deadline + TOLERANCE_S - need_s
        return math.inf

    def _drops_late(self, task: str) -> bool:
        """Whether the rule drops what cannot meet its deadline at this task."""
        if self._drop == "last_task":
            return not self._children[task]
        return self._drop != "none"

    def _send(self, now: float, group: _Group, worker: _Worker, actions: list[Action]) -> None:
        """A batch of the earliest deadlines, less those that would be late in it."""
        queue, task = group.queue, group.task
        drops, by_slack = self._drops_late(task), self._drop == "slack"
        while queue:
            size = min(len(queue), group.batch_size)
            if size == group.profile.measured_to < len(queue):
                size = self._try_larger(now, group, worker, size)
            start_at = max(worker.free_at, now + self._delay(size))
            end_at = start_at + group.profile.latency(size)
            if not drops:
                break
            due = queue.head.deadline + TOLERANCE_S
            if by_slack and self._children[task]:
                due -= self._rest_s(task, end_at - now, group.variant, size)
            if end_at <= due:
                break
            fits = group.profile.max_batch_within(due - start_at)
            if fits >= _LEAST_SHARE * size:
                size, end_at = fits, start_at + group.profile.latency(fits)
                break
            r = queue.pop()
            del self._home[r.id]
            self._refuse(now, r, DropReason.SHED)
        else:
            return
        batch = queue.take(size)
        for r in batch:
            del self._home[r.id]
        self._batch_id += 1
        actions.append(Dispatch(self._batch_id, worker.id, group.variant, batch, start_at, end_at))
        makes = {c: size * factor for c, factor in self._factors_of[group.variant].items()}
        flight = _Flight(self._batch_id, group.variant, start_at, end_at, makes)
        self._expect(flight, 1)
        worker.flights.append(flight)
        self._place(now, worker)

    def _try_larger(self, now: float, group: _Group, worker: _Worker, measured: int) -> int:
        """A batch of up to twice the largest size that was measured, where even its assumed latency
        leaves the rest of the path its planned time: nobody would ever know it otherwise, as plans
        are for measured sizes."""
        queue, profile = group.queue, group.profile
        size = min(2 * measured, len(queue), profile.max_batch_size)
        start_at = max(worker.free_at, now + self._delay(size))
        due = queue.head.deadline - self._planned_rest[group.task]
        return size if start_at + profile.latency(size) <= due else measured

    def _refuse(self, now: float, r: Request, reason: DropReason) -> None:
        if r.deadline <= now and reason is not DropReason.NO_WORKER:
            reason = DropReason.EXPIRED
        self._refused.setdefault(reason, []).append(r)


def _head_deadline(group: _Group) -> float:
    return group.queue.head.deadline


def _is_void(timer: tuple[float, int, _Group | _Worker, int]) -> bool:
    at, _, what, batch_id = timer
    if isinstance(what, _Worker):
        return [f.batch_id for f in what.flights] != [batch_id]
    return what.alarm != at
