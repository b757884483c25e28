"""Groups of workers in one run, each with its own scheduler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Action, Decision, Drop
from ray_slo.core.policy import Abilities, Policy
from ray_slo.core.requests import BatchOutcome, Request, RequestId, WorkerId
from ray_slo.planning.brains.brain import Counts, FrontendSays


class Grouped(Abilities):
    """A policy made of one policy per group. Each sees only the workers of its group.

    Args:
        make: function that returns a new policy for a group.
        group_of_kind: group of each kind of worker.
        group_of_model: initial group of each model. `route` changes it.
    """

    serves_late: ClassVar[bool] = False  # an instance has the value of its policies

    def __init__(
        self,
        make: Callable[[str], Policy],
        group_of_kind: Mapping[str, str],
        group_of_model: Mapping[str, str],
    ) -> None:
        groups = dict.fromkeys([*group_of_kind.values(), *group_of_model.values()])
        self.policies = {group: make(group) for group in groups}
        late = any(policy.serves_late for policy in self.policies.values())
        self.serves_late = late  # type: ignore[misc]
        self._of_kind, self._of_model = group_of_kind, dict(group_of_model)
        self._at: dict[RequestId, tuple[str, str]] = {}  # model and group of unanswered requests
        self._number = 0
        self._of_worker: dict[WorkerId, str] = {}
        self._clusters: dict[str, Cluster] = {}

    def route(self, number: int, routes: Mapping[str, str]) -> None:
        """Send each model's requests to its group in `routes` from now on. `number` is the number
        of the planner's routing."""
        self._number = number
        self._of_model |= routes

    @property
    def says(self) -> FrontendSays:
        """Return a frontend's report to a planner: the number of the routing that it follows, and
        its unanswered requests by (model, group)."""
        queued = Counter(self._at.values())
        return FrontendSays("clients", Counts(), "", applied=("", self._number), queued=queued)

    def _split(self, requests: Sequence[Request]) -> dict[str, list[Request]]:
        found: dict[str, list[Request]] = {}
        for r in requests:
            _, group = self._at.setdefault(r.id, (r.model, self._of_model[r.model]))
            found.setdefault(group, []).append(r)
        return found

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        for group, its in self._split(requests).items():
            self.policies[group].requests_arrived(now, its)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for group, its in self._split(requests).items():
            self.policies[group].requests_cancelled(now, its)
        self._forget(requests)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self.policies[self._of_worker[worker]].batch_finished(now, worker, outcome)
        self._forget(outcome.requests)  # a request that must run again arrives again

    def _forget(self, requests: Sequence[Request]) -> None:
        for r in requests:
            self._at.pop(r.id, None)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._of_worker |= {w.id: self._of_kind[w.hardware] for w in cluster.workers.values()}
        for group, policy in self.policies.items():
            workers = {w: x for w, x in cluster.workers.items() if self._of_worker[w] == group}
            its = replace(cluster, workers=workers)
            if its != self._clusters.get(group):
                self._clusters[group] = its
                policy.cluster_changed(now, its)

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        wake_at = math.inf
        for policy in self.policies.values():
            decision = policy.decide(now)
            actions += decision.actions
            for action in decision.actions:
                if isinstance(action, Drop):
                    self._forget(action.requests)
            wake_at = min(wake_at, decision.wake_at)
        return Decision(actions, wake_at)
