"""Any policy in any application: deadlines per task, and a choice of variants.

`Composed` is between a host and a policy that knows neither trees of tasks nor variants. It passes
on copies of the requests, and maps decisions back to the originals:

* a request gets the *deadline of its task*: the end-to-end deadline minus the time that the rest of
  its path needs (`shared.paths`). That time follows from the workers' assignments, or else from
  batches that fit into the SLO;
* every variant is a *lane*: a model of the inner policy, with the variant's name. A request goes to
  the most accurate lane that has planned share left and can be in time (`shared.choice`). A policy
  that chooses variants itself sees the models unchanged;
* a request that the inner policy drops is tried again: once on each faster variant, and once with
  all the time that the later tasks can spare.

If a planner assigns variants, the inner policy sees only the assigned ones. An arrival costs O(1)
more, and a choice of variants O(number of variants).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ray_slo.core.cluster import Cluster, Model
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason
from ray_slo.core.policy import InFlight, Policy, PolicyWrapper, wrapper
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import BatchOutcome, Request, RequestId, WorkerId
from ray_slo.core.trees import WAITING_FACTOR, Tree, tree_of_task
from ray_slo.policies.shared.choice import Choice, Lane, serving
from ray_slo.policies.shared.paths import Part, parts_of, planned_batches
from ray_slo.policies.shared.refusals import TOLERANCE_S

_ALONE = Part(0.0, 0.0, (math.inf,))  # a task that is in no tree


class _Copy(Request):
    """The inner policy's copy of a request.

    Attributes:
        latest: deadline with all the time that the later tasks can spare; `deadline` may be
            earlier.
        lane: lane where it waits; None if the inner policy chooses.
        tried: bits of the lanes that it was in.
    """

    __slots__ = ("lane", "latest", "original", "tried")

    original: Request
    latest: float
    lane: Lane | None
    tried: int


class Composed(PolicyWrapper):
    """Makes any policy serve trees of tasks with variants.

    Args:
        policy: the inner policy.
        trees: trees of the application; a model without a tree is a tree of one task.
        communication_s: time from a task to the next one, seconds.

    Raises:
        ValueError: two trees have a task of the same name.
    """

    chooses_variants = True
    serves_tasks = True

    def __init__(
        self,
        policy: Policy,
        trees: Sequence[Tree] = (),
        *,
        communication_s: float = 0.0,
    ) -> None:
        super().__init__(policy)
        self._trees = {tree.name: tree for tree in trees}
        tree_of_task(self._trees)
        self._has_classes = any(len(tree.slos_s) > 1 for tree in trees)
        self._communication_s = communication_s
        self._choice = None if getattr(policy, "chooses_variants", True) else Choice()
        self._parts: dict[str, Part] = {}
        self._held: dict[RequestId, _Copy] = {}
        self._flights: dict[WorkerId, dict[int, list[_Copy]]] = {}
        self._again: list[_Copy] = []

    # -- events --------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        if self._choice is not None:
            self._choice.look(now)
        self.policy.requests_arrived(now, [self._copy(r, now) for r in requests])

    def _copy(self, r: Request, now: float) -> _Copy:
        part = self._parts.get(r.task, _ALONE)
        deadline = part.deadline(now, r.deadline)
        copy = _Copy(r.id, r.model, r.arrival, deadline, r.size, r.task, r.upstream)
        copy.original, copy.latest, copy.tried = r, r.deadline - part.least_s, 0
        copy.lane = None
        if self._choice is not None:
            model = self._choice.models.get(r.model)
            if model is not None:
                lanes = model.lanes
                lane = lanes[0] if len(lanes) == 1 else model.choose(now, deadline - now, r.size)
                self._enter(copy, lane)
        self._held[r.id] = copy
        return copy

    @staticmethod
    def _enter(copy: _Copy, lane: Lane) -> None:
        copy.lane, copy.model = lane, lane.name
        copy.tried |= lane.bit
        lane.waiting += 1

    def _leave(self, copy: _Copy) -> None:
        del self._held[copy.id]
        if copy.lane is not None:
            copy.lane.waiting -= 1

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        gone = []
        for r in requests:
            copy = self._held.get(r.id)
            if copy is not None and copy.original is r:
                self._leave(copy)
                gone.append(copy)
        self.policy.requests_cancelled(now, gone)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        flights = self._flights.get(worker, {})
        copies = flights.pop(outcome.batch_id, None)
        if copies is not None:
            if self._choice is not None and not flights:
                self._choice.busy(worker, -1)
            if len(copies) != len(outcome.requests):
                ran = {r.id for r in outcome.requests}
                copies = [copy for copy in copies if copy.id in ran]
            outcome = replace(outcome, requests=copies)
        self.policy.batch_finished(now, worker, outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        shown = replace(cluster, workers=serving(cluster))
        self._set_parts(shown)
        flights = {w: self._flights.get(w, {}) for w in cluster.workers}
        slos_s = {m.name: self._slos_s(m) for m in cluster.models.values()}
        models: list[Model]
        if self._choice is None:
            models = [
                replace(m, latency_slo_s=of[0], slos_s=of if self._has_classes else ())
                for m, of in zip(cluster.models.values(), slos_s.values(), strict=True)
            ]
        else:
            self._choice.change(now, shown, {name: of[0] for name, of in slos_s.items()})
            for worker, running in flights.items():
                if running:
                    self._choice.busy(worker, 1)
            models = [
                Model(v.name, slos_s[m.name][0], (v,))
                for m in cluster.models.values()
                for v in m.variants
            ]
        self._flights = flights
        inner = replace(shown, models={m.name: m for m in models})
        self.policy.cluster_changed(now, inner)
        if self._choice is not None:
            self._reroute(now)

    def _reroute(self, now: float) -> None:
        """Move requests whose variant no worker runs any more to another one."""
        assert self._choice is not None
        moved = []
        for copy in self._held.values():
            model = self._choice.models.get(copy.original.model)
            lane = copy.lane
            if model is None or (lane is not None and self._choice.lanes.get(lane.name) is lane):
                stays = model is None or lane is None or lane.alone_s < math.inf
                if stays or not any(other.alone_s < math.inf for other in model.lanes):  # type: ignore[union-attr]
                    continue
            moved.append(copy)
        if moved:
            self.policy.requests_cancelled(now, moved)
            again = []
            for copy in moved:
                self._leave(copy)
                again.append(self._copy(copy.original, now))
            self.policy.requests_arrived(now, again)

    def adopt(
        self, now: float, flights: Sequence[InFlight], batch_id: int, former: Policy | None
    ) -> None:
        """Take over from another policy, before the first event."""
        taken = []
        for flight in flights:
            d = flight.dispatch
            copies = []
            for r in d.requests:
                model = r.model if self._choice is None else d.variant
                copy = _Copy(r.id, model, r.arrival, r.deadline, r.size, r.task, r.upstream)
                copy.original, copy.latest, copy.tried, copy.lane = r, r.deadline, 0, None
                copies.append(copy)
            self._flights.setdefault(d.worker, {})[d.batch_id] = copies
            taken.append(flight._replace(dispatch=replace(d, requests=copies)))
        if (composed := wrapper(former, Composed)) is not None:
            if self._choice is not None and composed._choice is not None:
                self._choice.learn(composed._choice)
            former = composed.policy
        self.policy.adopt(now, taken, batch_id, former)  # type: ignore[attr-defined]

    def expect_load(self, now: float, rates: Mapping[str, float]) -> None:
        """Items per second by model, as measured before it took over."""
        if self._choice is not None:
            self._choice.expect(now, rates)
            rates = self._choice.expected()
        if hasattr(self.policy, "expect_load"):
            self.policy.expect_load(now, rates)

    # -- plans ---------------------------------------------------------------------------------

    def _slos_s(self, model: Model) -> tuple[float, ...]:
        """How long requests have for this model: every SLO of its tasks, rising, seconds."""
        mine = {
            slo_s
            for tree in self._trees.values()
            for task in tree.tasks
            if task.model == model.name
            for slo_s in self._parts[task.name].slos_s
        }
        return tuple(sorted(mine)) or (model.latency_slo_s,)

    def _set_parts(self, cluster: Cluster) -> None:
        quickest: dict[str, LatencyProfile] = {}
        slowest: dict[str, LatencyProfile] = {}
        for model in cluster.models.values():
            for kind in {worker.kind: None for worker in cluster.workers.values()}:
                for _, profile in model.runnable(*kind):
                    for of, sign in ((quickest, 1), (slowest, -1)):
                        known = of.get(model.name)
                        if known is None or sign * (profile.latency(1) - known.latency(1)) < 0:
                            of[model.name] = profile
        delay = cluster.delay
        alone_s = {m: delay(1) + p.latency(1) for m, p in quickest.items()}
        planned_s = self._planned_s(cluster)
        self._parts = {}
        for tree in self._trees.values():
            models = {t.name: t.model for t in tree.tasks}
            used = self._used(tree, quickest, slowest)
            sizes = planned_batches(tree, used, self._communication_s)
            times = {
                task: planned_s.get(model)
                or WAITING_FACTOR * (delay(1) + used[task].latency(sizes[task]))
                for task, model in models.items()
                if task in used
            }
            alone = {task: alone_s.get(model, 0.0) for task, model in models.items()}
            self._parts |= parts_of([tree], times, alone, self._communication_s)

    def _planned_s(self, cluster: Cluster) -> dict[str, float]:
        """The longest time of a request in the assigned batches, by model, seconds."""
        model_of = {v.name: m.name for m in cluster.models.values() for v in m.variants}
        found: dict[str, float] = {}
        for worker in cluster.workers.values():
            for part in worker.assigned:
                variant = cluster.variants.get(part.variant)
                profile = variant.profiles.get(worker.hardware) if variant else None
                if profile is None or part.variant not in worker.loaded:
                    continue
                size = max(min(part.batch_size, profile.max_batch_size), 1)
                planned_s = WAITING_FACTOR * (cluster.delay(size) + profile.latency(size))
                model = model_of[part.variant]
                found[model] = max(found.get(model, 0.0), planned_s)
        return found

    def _used(
        self,
        tree: Tree,
        quickest: Mapping[str, LatencyProfile],
        slowest: Mapping[str, LatencyProfile],
    ) -> dict[str, LatencyProfile]:
        """Profiles to plan with if there is no plan: by task, the slowest one that leaves the other
        tasks of its path time for their fastest."""
        used = {t.name: quickest[t.model] for t in tree.tasks if t.model in quickest}
        for task in tree.tasks:
            if task.model not in quickest:
                continue
            below = [t.name for t in tree.tasks if task.name in tree.path(t.name)]
            least_s = max(
                sum(used[t].latency(1) for t in tree.path(last) if t in used and t != task.name)
                for last in below
            )
            slow = slowest[task.model]
            if WAITING_FACTOR * (least_s + slow.latency(1)) <= min(tree.slos_s.values()):
                used[task.name] = slow
        return used

    # -- decisions -----------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        decision = self.policy.decide(now)
        if not decision.actions:
            return decision
        actions = self._originals(decision.actions, now)
        while self._again:
            again, self._again = self._again, []
            self.policy.requests_arrived(now, again)
            decision = self.policy.decide(now)
            actions += self._originals(decision.actions, now)
        return Decision(actions, decision.wake_at)

    def _originals(self, actions: Iterable[Action], now: float) -> list[Action]:
        """The actions for the originals; requests that are tried again are left out."""
        found: list[Action] = []
        for action in actions:
            if isinstance(action, Dispatch):
                found.append(self._dispatched(action))
            elif isinstance(action, Drop):
                found += self._dropped(action, now)
            else:
                found.append(action)
        return found

    def _dispatched(self, d: Dispatch) -> Dispatch:
        copies: list[_Copy] = list(d.requests)  # type: ignore[arg-type]
        for copy in copies:
            self._leave(copy)
        flights = self._flights.setdefault(d.worker, {})
        if self._choice is not None and not flights:
            self._choice.busy(d.worker, 1)
        flights[d.batch_id] = copies
        originals = [copy.original for copy in copies]
        return Dispatch(
            *(d.batch_id, d.worker, d.variant, originals, d.start_at, d.finish_at),
            *(d.price, d.note),
        )

    def _dropped(self, drop: Drop, now: float) -> list[Action]:
        refused: list[Request] = []
        for copy in drop.requests:
            assert isinstance(copy, _Copy)
            self._leave(copy)
            if not self._tries_again(copy, now):
                refused.append(copy.original)
        if not refused:
            return []
        reason = drop.reason
        if reason is DropReason.EXPIRED:  # perhaps only the task's deadline
            late = [r for r in refused if r.deadline > now]
            if late:
                rest = [r for r in refused if r.deadline <= now]
                found: list[Action] = [Drop(late, DropReason.WOULD_MISS, drop.finish_at)]
                return found + ([Drop(rest, reason, drop.finish_at)] if rest else [])
        return [Drop(refused, reason, drop.finish_at)]

    def _tries_again(self, copy: _Copy, now: float) -> bool:
        """Try it on a faster variant, or with all the remaining time; False if neither helps."""
        before, lane = copy.lane, None
        if before is not None and self._choice is not None:
            model = self._choice.models.get(copy.original.model)
            self._choice.missed += copy.size
            lane = None if model is None else self._quicker(copy, model.lanes, now)
        if lane is None:
            if copy.deadline >= copy.latest - TOLERANCE_S or copy.latest <= now:
                return False
            copy.deadline, copy.tried, lane = copy.latest, 0, before
            if before is not None and before.alone_s > copy.latest - now + TOLERANCE_S:
                return False
        self._held[copy.id] = copy
        if lane is not None:
            self._enter(copy, lane)
        self._again.append(copy)
        return True

    @staticmethod
    def _quicker(copy: _Copy, lanes: Sequence[Lane], now: float) -> Lane | None:
        """The most accurate lane that is faster and may be in time."""
        assert copy.lane is not None
        most_s = copy.deadline - now + TOLERANCE_S
        for lane in lanes:
            quicker = not lane.bit & copy.tried and lane.alone_s < copy.lane.alone_s
            if quicker and lane.alone_s <= most_s:
                return lane
        return None
