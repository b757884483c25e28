"""Loki's load balancer (§5): routing tables, and the treatment of late requests.

A task of a pipeline is a *model* here. A request that another one made has `upstream`. Deadlines
are end to end: no clock starts again at a task. A planner gives workers a variant and a
batch size (`Worker.assigned`); `papers.routing.most_accurate_first` makes routing tables from
these, for the demand at the root and the multiplicative factors. Both are measured here. It does so
when the cluster changes, and every `rebalance_s`. The table of the upstream worker says where a
request goes, with a low-discrepancy sequence in place of random numbers. If there is no capacity
left, the request goes to the group that would finish it first. As soon as workers are idle, they
take their waiting requests in the order of deadlines, in batches of at most the configured size.

The *budget* of a task. By the plan, Σ 2 · ℓ(configured batch) on a path is within the SLO: the
factor (`WAITING_FACTOR`) is for a wait as long as an execution (§4.1). So the time of a request at
a task, with its wait, is compared with 2 · ℓ. Compared with ℓ alone, as §4.2 may be read, every
waiting request would be late.

What happens to a request that is late by x at a task, compared with its budget (§5.2, §6.3):

* `none`: nothing; it is served late;
* `last_task`: nothing, but at a last task it is dropped if less time than one execution is left;
* `per_task`: it is dropped before the next task;
* `opportunistic`: if the table names a worker with execution time y, it goes to the most accurate
  worker with capacity left and an execution time of at most y − x, or else is dropped.

The last two also drop a request that could not meet its deadline even if it ran now.

Worked example: a detector with ℓ = 20 ms makes 4 requests per frame; a large recogniser takes 20 ms
as well, a small one 10 ms. Budgets: 40, 40 and 20 ms. A frame that spent 45 ms at the detector is
late by x = 5 ms. Its requests would go to the large one, y = 20 ms; as y − x = 15 ms, they go to
the small one if it has capacity left.

Ours is `slack`, the default. The remaining time decides, and not the time that was spent:

* a request goes where the table says, if it is expected to end there early enough for the planned
  time of the rest of the path. Otherwise it goes to the most accurate group for which this is true,
  or else to the one that ends first;
* it is dropped when a batch is formed, if the batch would end too late for the least time of the
  later tasks. That time counts the requests that already wait there, and those that running batches
  will make. It assumes the fastest variants, with batches as large as this batch and the queues
  fill them. So frames for which later tasks have no room are dropped at the root, before they cost
  anything. A single frame needs only a small batch there, and is served;
* the workers of a variant share a queue (`queues="variant"`): a request does not wait for one of
  them while another is idle;
* if a plan leaves a variant with fewer workers, its waiting requests are routed again.

The paper's own rule is `drop="opportunistic", queues="worker"`; `loki-fig7` has the measurements.

A request costs O(log n) for its queue and its table. The task's other groups are examined only if
the table's choice is full or too late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from ray_slo.core.arguments import NonNegative, Positive, checked
from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason
from ray_slo.core.policy import Abilities, InFlight, Policy
from ray_slo.core.requests import (
    BatchOutcome,
    BatchStatus,
    Request,
    RequestId,
    Upstream,
    WorkerId,
)
from ray_slo.core.trees import WAITING_FACTOR
from ray_slo.papers import routing
from ray_slo.policies.pipeline_groups import Group, Key, Member, Rest, Tree, regroup, serving
from ray_slo.policies.pipeline_routes import Routes
from ray_slo.policies.shared.refusals import TOLERANCE_S
from ray_slo.policies.shared.timers import Timers
from ray_slo.policies.shared.workers import Sent, sent_before, take

DropRule = Literal["slack", "opportunistic", "per_task", "last_task", "none"]
Queues = Literal["variant", "worker"]

_LEAST_SHARE = 0.75
"""The head is dropped if its batch could only be smaller than this share of the batch without it:
small batches would make even more requests late."""


class Pipeline(Abilities):
    """Loki's load balancer.

    Args:
        parents: parent by task, the root's None; the root first, parents before children.
        factors: requests made for each child task per request, by variant, if known; 1 for a
            missing child. They are learned.
        drop: what happens to late requests: "slack" (ours), or one of the paper's rules,
            "opportunistic", "per_task", "last_task", "none".
        queues: the workers of a variant share a queue ("variant"), or each has its own ("worker").
        rebalance_s: the longest time between new tables while requests arrive.
        communication_s: as in the planner: delay on the way to a worker, seconds.

    Raises:
        ValueError: an argument out of its range; `parents` is not a tree in that order.
    """

    serves_late: bool = False
    counts_requests = True
    for_pipelines = True

    @checked
    def __init__(
        self,
        *,
        parents: Mapping[str, str | None],
        factors: Mapping[str, Mapping[str, float]] | None = None,
        drop: DropRule = "slack",
        queues: Queues = "variant",
        rebalance_s: Positive = 1.0,
        communication_s: NonNegative = 0.0,
    ) -> None:
        routing.most_accurate_first(parents, (), 0.0)
        self._tree = Tree(parents)
        self._drop, self._own_queues = drop, queues == "worker"
        self._rebalance_s = rebalance_s
        self._communication_s = communication_s
        self.serves_late = drop in ("none", "last_task")
        self._routes = Routes(self._tree, factors or {})
        self._workers: dict[WorkerId, Member] = {}
        self._groups: dict[Key, Group] = {}
        self._of_task: dict[str, list[Group]] = {}
        self._budget: dict[tuple[WorkerId, str], float] = {}
        self._last_budget: dict[str, float] = {}  # by variant
        self._rebalance_at = -math.inf
        # Requests for each child task that a running batch will make, as expected; and all of them.
        self._makes: dict[int, Mapping[str, float]] = {}
        self._coming = dict.fromkeys(parents, 0.0)
        self._home: dict[RequestId, Group] = {}
        self._dirty: dict[Group, None] = {}
        self._refused: dict[DropReason, list[Request]] = {}
        self._timers = Timers[Group | Member]()
        self._batch_id = 0

    # -- events --------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        if now >= self._rebalance_at:
            self._rebalance(now)
        for r in requests:
            self._routes.made(r)
            self._route(now, r)
        self._routes.arrived(
            now, sum(r.upstream is None and r.model == self._tree.root for r in requests)
        )

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for r in requests:
            group = self._home.get(r.id)
            if group is not None and group.queue.remove(r):
                del self._home[r.id]
        if self._refused:  # but not yet in a decision
            gone = {id(r) for r in requests}
            refused = self._refused
            self._refused = {}
            for reason, dropped in refused.items():
                if kept := [r for r in dropped if id(r) not in gone]:
                    self._refused[reason] = kept

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        state = self._workers.get(worker)
        if state is None or (done := take(state.flights, outcome.batch_id, now)) is None:
            return
        self._expect(done, 0)
        if outcome.status is BatchStatus.FINISHED:
            self._routes.finished(done.variant, len(outcome.requests))
        self._place(now, state)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        if unknown := ", ".join(sorted(set(cluster.models) - set(self._tree.parents))):
            tasks = ", ".join(self._tree.parents)
            raise ValueError(f"parents names the tasks {tasks}; the cluster also has {unknown}")
        self._delay, self._delay_s = cluster.delay, cluster.delay(1)
        self._routes.learn_anew(cluster)
        known, self._workers = self._workers, {}
        for rank, id in enumerate(cluster.workers):
            self._workers[id] = worker = known.get(id) or Member(id)
            worker.rank = rank
            worker.groups = []
        for id in known.keys() - cluster.workers.keys():
            for flight in known[id].flights:
                self._expect(flight, 0)
            known[id].flights.clear()
            self._timers.set(known[id], math.inf)
        self._services = list(serving(cluster, self._tree.levels, self._communication_s))
        before = {key: len(group.members) for key, group in self._groups.items()}
        old = self._groups
        self._groups, self._of_task = regroup(
            self._tree, self._services, self._workers, old, self._own_queues
        )
        self._budget = {}
        for s in self._services:
            budget_s = WAITING_FACTOR * s.profile.latency(s.batch_size)
            self._budget[s.worker.id, s.variant] = self._last_budget[s.variant] = budget_s
        self._rest = Rest(self._tree, self._of_task, self._communication_s)
        self._dirty = dict.fromkeys(self._groups.values())
        for worker in self._workers.values():
            self._place(now, worker)
        self._rebalance(now)
        for key, group in old.items():
            gone = key not in self._groups
            if gone:
                self._timers.set(group, math.inf)
            if gone or (self._drop == "slack" and len(group.members) < before[key]):
                for r in group.queue.take(len(group.queue)):
                    del self._home[r.id]
                    self._route(now, r)

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over from another policy, before the first event."""
        self._batch_id = batch_id
        for d, sent in ((flight.dispatch, sent_before(flight)) for flight in flights):
            self._workers.setdefault(d.worker, Member(d.worker)).flights.append(sent)
            self._expect(sent, len(d.requests))

    def _rebalance(self, now: float) -> None:
        self._rebalance_at = now + self._rebalance_s
        self._routes.rebalance(now, self._services, self._groups.values())

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        for what in self._timers.due(now):
            if isinstance(what, Member):
                self._place(now, what)
            else:
                self._dirty[what] = None
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            groups = [g for g in dirty if g.queue]
            if len(groups) > 1:  # the groups may share a worker
                groups.sort(key=_head_deadline)
            for group in groups:
                self._serve(now, group, actions)
        if self._refused:
            actions += [Drop(requests, reason) for reason, requests in self._refused.items()]
            self._refused = {}
        return Decision(actions, self._timers.next_at())

    def _place(self, now: float, worker: Member) -> None:
        """After its flights changed: enter a worker in the lists of its groups."""
        flights, at = worker.flights, math.inf
        if not flights or worker.may_send_ahead(now, self._delay_s):
            for group in worker.groups:
                group.list_idle(worker)
                self._dirty[group] = None
        elif len(flights) == 1 and self._delay_s > 0:
            at = flights[0].end_at - self._delay_s
        self._timers.set(worker, at if at > now else math.inf)
        if flights:
            for group in worker.groups:
                group.list_busy(worker)

    # -- requests ------------------------------------------------------------------------------

    def _route(self, now: float, r: Request) -> None:
        group = self._routes.group(r)
        if group is None:
            group = self._soonest(now, r.model)
        group = self._keep(now, r, r.upstream, group)
        if group is None:
            self._refuse(now, r, DropReason.WOULD_MISS)
            return
        group.queue.push(r)
        self._home[r.id] = group
        self._dirty[group] = None

    def _keep(
        self, now: float, r: Request, upstream: Upstream | None, group: Group
    ) -> Group | None:
        """The group for a request that the table sends to `group`; None if it is dropped."""
        rule = self._drop
        if not group.members or rule == "none":
            return group
        if rule == "slack":
            return self._in_time(now, r, group)
        if rule == "last_task":
            size = min(len(group.queue) + 1, group.batch_size)
            left_s = r.deadline - now + TOLERANCE_S
            late = not self._tree.children[r.model] and left_s < group.profile.latency(size)
            return self._alone(now, r) if late else group
        if upstream is None or (late_s := self._late_by(upstream)) <= TOLERANCE_S:
            late = now + self._delay_s + group.profile.latency(1) > r.deadline + TOLERANCE_S
            return (self._alone(now, r) if late else None) or group
        if rule == "per_task":
            return None
        limit_s, best, best_at, accuracy = group.latency_s - late_s, None, math.inf, -math.inf
        for of_backup, execution_s, backup in self._routes.backup[r.model]:
            if of_backup < accuracy:
                break
            if execution_s <= limit_s + TOLERANCE_S:
                finish_at = backup.finish_at(now, self._delay_s)
                if finish_at < best_at:
                    best, best_at, accuracy = backup, finish_at, of_backup
        return best

    def _alone(self, now: float, r: Request) -> Group | None:
        """The group that ends first, for the only request of an idle system. None if it is not the
        only one, or late everywhere. No drop rule refuses such a request."""
        if any(w.flights for w in self._workers.values()) or self._home:
            return None
        best = self._soonest(now, r.model)
        return best if best.finish_at(now, self._delay_s) <= r.deadline + TOLERANCE_S else None

    def _late_by(self, upstream: Upstream) -> float:
        """x: the time beyond the budget that a request spent at its parent's task, seconds."""
        budget_s = self._budget.get((upstream.worker, upstream.variant))
        if budget_s is None:
            budget_s = self._last_budget.get(upstream.variant, math.inf)
        return upstream.spent_s - budget_s

    def _in_time(self, now: float, r: Request, group: Group) -> Group:
        due = r.deadline - self._rest.planned[r.model]
        if group.finish_at(now, self._delay_s) <= due:
            return group
        best, best_at = group, math.inf
        for other in self._of_task[r.model]:  # the most accurate first
            finish_at = other.finish_at(now, self._delay_s)
            if finish_at <= due:
                return other
            if finish_at < best_at:
                best, best_at = other, finish_at
        return best

    def _soonest(self, now: float, task: str) -> Group:
        """The group that would end first."""
        return min(self._of_task[task], key=lambda g: g.finish_at(now, self._delay_s))

    def _expect(self, flight: Sent, size: int) -> None:
        """Note the requests that a running batch of `size` will make; 0: the batch is over."""
        if size:
            factors = self._routes.factors_of.get(flight.variant, {})
            made = self._makes[flight.batch_id] = {c: size * f for c, f in factors.items()}
        else:
            made = {child: -number for child, number in self._makes.pop(flight.batch_id).items()}
        for child, number in made.items():
            self._coming[child] += number

    # -- batches -------------------------------------------------------------------------------

    def _serve(self, now: float, group: Group, actions: list[Action]) -> None:
        """Send what can be sent, drop what is late, and set the timer of the head."""
        queue = group.queue
        while queue and (worker := group.ready(now, self._delay_s)) is not None:
            self._send(now, group, worker, actions)
        while queue and now >= (at := self._give_up_at(group, queue.head)):
            r = queue.pop()
            del self._home[r.id]
            self._refuse(now, r, DropReason.WOULD_MISS if group.members else DropReason.NO_WORKER)
        if queue and at < group.timer_at:
            self._timers.set(group, at)

    def _give_up_at(self, group: Group, r: Request) -> float:
        if not group.members:
            return r.deadline
        if self._drops_late(group.task):
            need_s = self._delay_s + group.profile.latency(1)
            if self._drop == "slack":
                need_s += self._rest.least[group.task]
            return r.deadline + TOLERANCE_S - need_s
        return math.inf

    def _drops_late(self, task: str) -> bool:
        """Whether the rule drops requests at this task that cannot meet their deadlines."""
        if self._drop == "last_task":
            return not self._tree.children[task]
        return self._drop != "none"

    def _send(self, now: float, group: Group, worker: Member, actions: list[Action]) -> None:
        """Send a batch of the earliest deadlines, without those that would be late in it."""
        queue, task = group.queue, group.task
        drops, by_slack = self._drops_late(task), self._drop == "slack"
        while queue:
            size = min(len(queue), group.batch_size)
            if size == group.profile.measured_to < len(queue):
                size = group.try_larger(worker, now, self._delay, self._rest.planned[task])
            start_at = max(worker.free_at, now + self._delay(size))
            end_at = start_at + group.profile.latency(size)
            if not drops:
                break
            due = queue.head.deadline + TOLERANCE_S
            if by_slack and self._tree.children[task]:
                due -= self._rest.after(
                    self._routes.factors_of, self._coming, end_at - now, group.variant, size
                )
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
        flight = Sent(self._batch_id, group.variant, start_at, end_at)
        self._expect(flight, size)
        worker.flights.append(flight)
        self._place(now, worker)

    def _refuse(self, now: float, r: Request, reason: DropReason) -> None:
        if r.deadline <= now and reason is not DropReason.NO_WORKER:
            reason = DropReason.EXPIRED
        self._refused.setdefault(reason, []).append(r)


def _head_deadline(group: Group) -> float:
    return group.queue.head.deadline
