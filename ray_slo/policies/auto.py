"""One policy for every application: it rehearses the others, and runs the best.

`Auto` holds one *inner* policy at a time, made from a *setting*: a policy's name and arguments.
The best setting depends on profiles, SLOs, popularity, burstiness and load, so it cannot be known
beforehand for every application. So the simulator plays the last seconds of real traffic with each
of a few settings (`wanted`, `solved`; `simulation.rehearsal`). The best one is used if it gains
more than chance explains (`auto_choice`). Rehearsals are frequent at first and when the load
changes, and rare otherwise.

The first guess, before the first rehearsal, suits most applications: `price` if models have
variants, else `deferred`. It stays unless another setting gains more than chance explains.

A swap loses no request and changes no order. The new policy adopts the batches in flight, and gets
the waiting requests in order of arrival. Batch numbers continue.

Compared with the inner policy, a request costs one more reference in a list and one in a dict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from ray_slo.core.arguments import NonNegative, Positive, checked
from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Decision, Dispatch, Drop, DropReason, Preempt
from ray_slo.core.policy import Abilities, Expected, InFlight, Policy
from ray_slo.core.rehearsal import Rehearsal, Rehearsed, Setting, Traffic
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, RequestId, WorkerId
from ray_slo.core.text import quoted
from ray_slo.core.trees import Tree
from ray_slo.policies import registry
from ray_slo.policies.auto_choice import Choice, Evidence
from ray_slo.policies.auto_floor import Floor
from ray_slo.policies.auto_notes import Notes
from ray_slo.policies.auto_settings import Shape, candidates, collapses, make
from ray_slo.policies.auto_traffic import Made, Pace, Recent, Story

_ALL, _EVERY = 1000, 4
"""The time of each of the first batches is measured, then that of one in a few."""

Fairness = Annotated[float, Field(ge=0, le=1)]


class Auto(Abilities):
    """Runs the setting that did best on the last seconds of traffic.

    Args:
        candidates: the settings to choose from, the first one to begin with: names of policies, or
            {"policy": name, "kwargs": arguments}. Default: what fits the application.
        fairness: share of the mean share of requests in time that the worst model must keep, 0 to
            1. A setting that keeps less is not chosen if another keeps it, and models that do
            better give up requests (`auto_floor`). In a pipeline, only the choice counts.
        preempt: running batches may be stopped.
        trees: trees of the application, as JSON; models without a tree are trees of one task.
        planned: a planner assigns variants to workers.
        communication_s: as in `policies.composed.Composed`.
        live_slo_ms: the shortest SLO, milliseconds. A live host sets it, because its clock and
            batch times are not exact.

    Raises:
        ValueError: an argument out of its range, or a candidate that cannot take over.
    """

    serves_late: ClassVar[bool] = False
    composes = True

    @staticmethod
    def live_arguments(shortest_slo_ms: float) -> dict[str, Any]:
        """The live arguments of settings depend on their policies."""
        return {"live_slo_ms": shortest_slo_ms}

    @checked
    def __init__(
        self,
        *,
        candidates: Sequence[str | Mapping[str, Any]] | None = None,
        fairness: Fairness = 0.0,
        preempt: bool = False,
        trees: Sequence[Mapping[str, Any]] = (),
        planned: bool = False,
        communication_s: NonNegative = 0.0,
        live_slo_ms: Positive | None = None,
    ) -> None:
        self.preempts = preempt
        self._own = None if candidates is None else _settings(candidates, preempt)
        self._live_slo_ms = live_slo_ms
        self.told_of(
            [Tree.from_json(tree) for tree in trees],
            planned=planned,
            communication_s=communication_s,
        )
        self._explain = False
        self._cluster = Cluster({}, {})
        self._shape = Shape()
        self._sizes = False
        self._settings: dict[str, Setting] = {}
        self._label = ""
        self._inner: Policy | None = None
        self._batch_id = 0
        self._now = -math.inf
        self._held: set[Request] = set()  # by identity: the requests that the inner policy has
        self._flights: dict[WorkerId, list[InFlight]] = {}
        self._recent, self._pace, self._notes = Recent(), Pace(), Notes()
        self._evidence, self._story = Evidence(fairness), Story()
        self._floor = Floor(fairness) if fairness else None
        self._rehearsed: Rehearsed | None = None
        self._number = 0

    def told_of(
        self,
        trees: Sequence[Tree],
        *,
        planned: bool = False,
        communication_s: float = 0.0,
    ) -> None:
        """The application's shape, before the first event; arguments as in the class."""
        self._trees, self._planned = list(trees), planned
        self._composing = {"communication_s": communication_s}
        self._tree_of = {tree.root: tree.name for tree in trees}
        # A plan keeps a part of a pipeline's SLO for every task; a choice per batch does not.
        self.follows_assignments = any(len(tree.tasks) > 1 for tree in trees)
        self._made = Made(trees) if any(len(tree.tasks) > 1 for tree in trees) else None

    # -- events --------------------------------------------------------------------------------

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        if self._floor is not None:
            requests = self._floor.admitted(now, requests)
        self._recent.add(now, requests)
        if self._made is not None:
            self._made.arrived(requests)
        if not self._sizes:
            for r in requests:
                if r.size != 1:
                    self._sizes = True
            if self._sizes:
                self._reshape(now)
        self._held.update(requests)
        self._inner.requests_arrived(now, requests)  # type: ignore[union-attr]

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        if self._floor is not None:
            requests = self._floor.cancelled(requests)
        self._held.difference_update(requests)
        self._inner.requests_cancelled(now, requests)  # type: ignore[union-attr]

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        if self._floor is not None:
            if outcome.status is BatchStatus.FINISHED:
                self._floor.ran(outcome)
            elif outcome.status is BatchStatus.FAILED:
                self._floor.ended(outcome.requests)
        flights = self._flights.get(worker, ())
        for i, flight in enumerate(flights):
            if flight.dispatch.batch_id == outcome.batch_id:
                del self._flights[worker][i]
                if i == 0 and flights:  # the batch sent ahead starts now
                    rest = flights[0]
                    start_at = max(outcome.finished_at, rest.here_at)
                    self._flights[worker][0] = rest._replace(end_at=start_at + rest.latency_s)
                if self._explain and not flights:
                    self._notes.idle(now, worker)
                if outcome.status is BatchStatus.FINISHED:
                    self._measure(worker, flight.dispatch, outcome)
                break
        self._inner.batch_finished(now, worker, outcome)  # type: ignore[union-attr]

    def preempt_failed(self, now: float, worker: WorkerId, batch_id: int) -> None:
        """A preempted batch does not stop."""
        flights = self._flights.get(worker, [])
        for i, flight in enumerate(flights):
            if flight.dispatch.batch_id == batch_id:
                flights[i] = flight._replace(stops=False)
        if self._inner is not None and hasattr(self._inner, "preempt_failed"):
            self._inner.preempt_failed(now, worker, batch_id)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._now = now
        self._cluster = cluster
        self._flights = {w: self._flights.get(w, []) for w in cluster.workers}
        slos_s = [m.latency_slo_s for m in cluster.models.values()]
        slos_s += [slo_s for tree in self._trees for slo_s in tree.slos_s.values()]
        self._recent.slo_s = max(slos_s, default=0.0)
        if self._floor is not None:
            self._floor.covers(slos_s)
        self._evidence.planned = any(worker.assigned for worker in cluster.workers.values())
        if self._inner is None or Shape.of(cluster, self._sizes) != self._shape:
            self._reshape(now)
        else:
            self._inner.cluster_changed(now, cluster)

    def solved(self, now: float, answers: Sequence[Any]) -> None:
        """A rehearsal is done: use the best setting."""
        for found in answers:
            if not isinstance(found, Rehearsed) or found.number <= self._number:
                continue
            self._number, calm = found.number, self._story.is_calm()
            moved = self._evidence.add(found)
            choice = self._evidence.choose(self._label, self._recent.lag_s)
            news = moved or choice.label != self._label
            self._story.add(now, found, self._label, choice)
            self._rehearsed = found
            if choice.label != self._label and choice.label in self._settings:
                self._swap(now, choice)
            self._recent.rehearsed(now, found, news, calm)

    def decide(self, now: float) -> Decision:
        decision = self._decided(now)
        if self._floor is None or not (refused := self._floor.refused()):
            return decision
        return Decision([*decision.actions, Drop(refused, DropReason.SHED)], decision.wake_at)

    def _decided(self, now: float) -> Decision:
        """What the inner policy decides."""
        self._now = now
        decision = self._inner.decide(now)  # type: ignore[union-attr]
        if not (actions := decision.actions):
            return decision
        held = self._held
        for i, action in enumerate(actions):
            if type(action) is Dispatch:
                held.difference_update(action.requests)
                here_at = now + self._cluster.delay(len(action.requests))
                flights = self._flights[action.worker]
                if self._explain:
                    idle = not flights
                    note = self._notes.of(now, action, self._cluster, idle=idle)
                    note = "; ".join(filter(None, (action.note, note)))
                    action = actions[i] = replace(action, note=note)
                flights.append(InFlight(action, here_at, action.finish_at))
                self._batch_id = action.batch_id
            elif type(action) is Drop:
                held.difference_update(action.requests)
                self._story.bad += len(action.requests)
                if self._floor is not None:
                    self._floor.ended(action.requests)
            elif type(action) is Preempt:
                flights = self._flights[action.worker]
                if flights:
                    flights[0] = flights[0]._replace(stops=True)
        return decision

    # -- settings ------------------------------------------------------------------------------

    def _reshape(self, now: float) -> None:
        """The shape of the application changed: begin with the best guess for it."""
        self._shape = Shape.of(self._cluster, self._sizes)
        fit = self._own or candidates(self._shape, self._trees, self.preempts)
        if self._planned:
            fit = [s for s in fit if not s.quickest]
        if self._live_slo_ms is not None:
            fit = [
                s._replace(
                    kwargs={**registry.live_arguments(s.policy, self._live_slo_ms), **s.kwargs}
                )
                for s in fit
            ]
        if self._sizes:
            fit = [s for s in fit if not getattr(self._make(s), "counts_requests", False)]
            if not fit:
                raise ValueError("candidates: none of them can serve requests with sizes")
        self._settings = {setting.label: setting for setting in fit}
        self._evidence.begin(fit[0].label, (s.label for s in fit if collapses(s)))
        self._recent.begin(now)
        label = self._label if self._label in self._settings else fit[0].label
        self._swap(now, Choice(label, "first guess for this application"))

    def _make(self, setting: Setting) -> Policy:
        return make(setting, self._cluster, self._trees, self._planned, self._composing)

    def _swap(self, now: float, choice: Choice) -> None:
        """Another policy takes over."""
        former, self._inner = self._inner, self._make(self._settings[choice.label])
        self._label = choice.label
        self._story.in_force(now, choice)
        self.explain = self._explain
        flights = [flight for of_worker in self._flights.values() for flight in of_worker]
        self._inner.adopt(now, flights, self._batch_id, former)  # type: ignore[attr-defined]
        self._inner.cluster_changed(now, self._cluster)
        if hasattr(self._inner, "expect_load"):
            self._inner.expect_load(now, self._recent.rates(now))
        if self._held:
            waiting = sorted(self._held, key=_arrival)
            self._inner.requests_arrived(now, waiting)

    @property
    def explain(self) -> bool:
        """Set by a host: dispatches must contain reasons."""
        return self._explain

    @explain.setter
    def explain(self, value: bool) -> None:
        self._explain = value
        if hasattr(self._inner, "explain"):
            self._inner.explain = value  # type: ignore[union-attr]

    # -- rehearsals ----------------------------------------------------------------------------

    def wanted(self) -> list[Rehearsal]:
        """A rehearsal, if it is time for one."""
        if len(self._settings) < 2 or not self._cluster.workers:
            return []
        surprise = self._story.surprise()
        recent, before, news = self._recent.due(self._now, surprise)
        if not recent:
            return []
        tried = self._settings.keys() if news else self._evidence.worth(self._settings)
        in_order = [self._settings[self._label]]
        in_order += [self._settings[label] for label in tried if label != self._label]
        return [
            Rehearsal(
                self._number + 1,
                self._cluster,
                _traffic(recent, before),
                in_order,
                [tree.to_json() for tree in self._trees],
                self._composing,
                self._planned,
                *self._pace.measured(),
                {} if self._made is None else self._made.factors(),
                seed=self._number + 1,
                calm=self._story.is_calm(),
            )
        ]

    def _measure(self, worker: WorkerId, d: Dispatch, outcome: BatchOutcome) -> None:
        if self._made is not None:
            self._made.finished(d.variant, outcome.requests)
        late = 0
        for r in outcome.requests:
            if r.deadline < outcome.finished_at:
                late += 1
        self._story.bad += late
        self._story.good += len(outcome.requests) - late
        if d.batch_id > _ALL and d.batch_id % _EVERY:
            return
        predicted_s = d.finish_at - d.start_at
        took_s = outcome.finished_at - outcome.started_at
        if predicted_s > 0 and took_s > 0:
            hardware = self._cluster.workers[worker].hardware
            self._pace.add((d.variant, hardware), took_s / predicted_s)

    # -- its own state -------------------------------------------------------------------------

    def expected(self) -> Mapping[str, Expected]:
        """Predictions from the last rehearsal of the current setting, by model or pipeline."""
        found = self._rehearsed
        score = None if found is None else found.scores.get(self._label)
        if found is None or score is None or not score.good:
            return {}
        known = all(v.accuracy is not None for v in self._cluster.variants.values())
        accuracies = score.accuracy if known else [None] * len(found.roots)
        rows = zip(found.roots, found.arrived, score.good, accuracies, strict=True)
        return {
            self._tree_of.get(root, root): Expected(accuracy, 1 - good / arrived)
            for root, arrived, good, accuracy in rows
            if arrived
        }

    def in_force(self) -> dict[str, Any]:
        """The current setting, its reason, and its start, seconds in the host's clock; plain
        data."""
        return self._story.now()

    def story(self) -> list[dict[str, Any]]:
        """The settings used and the last rehearsals: what was tried, predicted and measured; plain
        data."""
        return self._story.told()


def _settings(given: Sequence[str | Mapping[str, Any]], preempt: bool) -> list[Setting]:
    """The settings for a user's candidates. Raises ValueError for invalid ones."""
    if not given:
        raise ValueError("candidates must name at least one policy, got none")
    found = []
    for i, one in enumerate(given):
        if isinstance(one, str):
            one = {"policy": one}
        if unknown := sorted(set(one) - {"policy", "kwargs"}):
            raise ValueError(
                f"candidates[{i}] has no field {unknown[0]!r}; it has policy and kwargs"
            )
        if not isinstance(name := one.get("policy"), str):
            raise ValueError(f"candidates[{i}].policy must be a policy's name, got {quoted(name)}")
        setting = Setting(name, dict(one.get("kwargs") or {}))
        try:
            made = registry.make_policy(setting.policy, setting.kwargs)
        except ValueError as error:
            raise ValueError(f"candidates[{i}]: {error}") from error
        if not hasattr(made, "adopt") or isinstance(made, Auto):
            raise ValueError(
                f"candidates[{i}]: policy {name!r} cannot take over from another one: it has no "
                "method adopt"
            )
        if made.serves_late:
            raise ValueError(f"candidates[{i}]: policy {name!r} serves late requests")
        if getattr(made, "preempts", False) and not preempt:
            raise ValueError(f"candidates[{i}]: policy {name!r} preempts; set preempt to true")
        found.append(setting)
    return found


def _traffic(requests: Sequence[Request], before: int) -> Traffic:
    roots = list(dict.fromkeys([(r.model, r.task) for r in requests]))
    index = {root: i for i, root in enumerate(roots)}
    sizes = np.array([r.size for r in requests], dtype=np.int64)
    return Traffic(
        tuple(roots),
        np.array([index[r.model, r.task] for r in requests], dtype=np.int64),
        np.array([r.arrival for r in requests]),
        np.array([r.deadline for r in requests]),
        sizes if (sizes != 1).any() else None,
        before,
    )


def _arrival(r: Request) -> tuple[float, RequestId]:
    return r.arrival, r.id
