"""A run of a pipeline: requests make requests, and a planner's brain says what workers do."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ray_slo.core.cluster import Cluster, Model, Variant, Worker
from ray_slo.core.decisions import Dispatch, Drop
from ray_slo.core.policy import Policy
from ray_slo.core.requests import BatchStatus, Request, Upstream, WorkerId
from ray_slo.planning import loki
from ray_slo.planning.brains.brain import Counts, Seen, Verdict, WorkerSays
from ray_slo.planning.meanwhile import Plans, best
from ray_slo.record.rows import Recording
from ray_slo.simulation.engine import Batch, Event, PolicyError, Run, Slot
from ray_slo.simulation.fleet import KIND, Fleet, Timing
from ray_slo.simulation.pipeline_report import PipelineReport
from ray_slo.simulation.planner_host import PlannerHost, Question
from ray_slo.simulation.workloads import Requests

Sampler = Callable[[int], list[int]]  # how many items each of n requests makes
Listener = Callable[[float, float, Mapping[str, int]], None]


@dataclass(frozen=True)
class Truth:
    """A pipeline as it is.

    Attributes:
        tasks: with real profiles.
        samplers: by variant: child tasks, and what draws the number of their requests.
        noise: factors on the execution time; None for exactly 1.
    """

    tasks: tuple[loki.Task, ...]
    samplers: Mapping[str, list[tuple[str, Sampler]]]
    noise: Iterator[float] | None = None


def model_of(task: loki.Task, slo_s: float) -> Model:
    """A task as policies know it."""
    variants = (Variant(v.name, {KIND: v.profile}, v.accuracy) for v in task.variants)
    return Model(task.name, slo_s, tuple(variants))


class PipelineRun(Run):
    """One policy and one brain, from the first request until nothing is left.

    Args:
        problem: the pipeline as the policy is told of it.
        host: of the brain.
        clients: their requests.
        learns: the brain hears how many requests are made.
        listener: told (now, over_s, requests by task) of what arrived at each task.
    """

    def __init__(
        self,
        policy: Policy,
        problem: loki.Problem,
        host: PlannerHost,
        clients: Requests,
        timing: Timing,
        truth: Truth,
        learns: bool = True,
        listener: Listener | None = None,
    ) -> None:
        self.problem, self.host, self.clients = problem, host, clients
        self.timing, self.samplers, self._learns = timing, truth.samplers, learns
        self._listener = listener
        self.tasks = [t.name for t in problem.order]
        self.end_of_plans = float(clients.deadline.max(initial=0.0))
        self.rows: list[dict[str, Any]] = []  # of the report, one per question
        # What arrived at tasks and was finished since the brain heard of it.
        self.heard_at, self.heard = 0.0, 0
        self.arrived = dict.fromkeys(self.tasks, 0)
        self.finished: dict[str, int] = {}
        self.made: dict[str, dict[str, int]] = {}

        # Of requests, by id: clients' first, then those made. What is in flight, by frame.
        n = len(clients)
        self.frame_of = array("q", range(n))
        self.task_of = array("q", [0]) * n
        self.path_of = array("q", [0]) * n  # before its own variant
        self.parent_of = array("q", [-1]) * n
        self.arrival_of = array("d", (clients.arrival + problem.communication_s).tolist())
        self.live: dict[int, dict[int, Request]] = {}
        self.dying: list[int] = []
        self.paths: dict[tuple[str, ...], int] = {(): 0}
        self.longer: dict[tuple[int, str], int] = {}
        # Of frames.
        self.ended = np.full(n, np.nan)
        self.dead = bytearray(n)
        self.leaf_frame, self.leaf_path = array("q"), array("q")

        self.fleet = Fleet([f"w{i}" for i in range(problem.workers)], timing)
        workers = self._first_plan()
        real = {t.name: t for t in truth.tasks}
        super().__init__(
            policy,
            Cluster.of([model_of(t, problem.slo_s) for t in problem.order], workers),
            Cluster.of([model_of(real[t], problem.slo_s) for t in self.tasks], workers),
            replace(clients, arrival=clients.arrival + problem.communication_s),
            truth.noise,
            0.0,
            0.0,
            [],
            absent=self.fleet.off,
        )
        self.fleet.attach(self, self._follow)
        self._next_look()

    # -- requests make requests --------------------------------------------------------------

    def end(self, slot: Slot, status: BatchStatus) -> None:
        batch = slot.current
        assert batch is not None
        super().end(slot, status)
        if status is BatchStatus.FINISHED:
            self._make(slot.worker.id, batch)
        if slot.current is None:
            self.fleet.emptied(slot.worker.id)

    def _make(self, worker: WorkerId, batch: Batch) -> None:
        requests, variant = batch.dispatch.requests, batch.dispatch.variant
        made = [(child, draw(len(requests))) for child, draw in self.samplers[variant]]
        if self._learns:
            self.finished[variant] = self.finished.get(variant, 0) + len(requests)
            counted = self.made.setdefault(variant, {})
            for child, counts in made:
                counted[child] = counted.get(child, 0) + sum(counts)
        at = self.now + self.problem.communication_s
        frame_of, task_of, path_of = self.frame_of, self.task_of, self.path_of
        parent_of, arrival_of = self.parent_of, self.arrival_of
        codes = {child: self.tasks.index(child) for child, _ in made}
        born: list[Request] = []
        for i, r in enumerate(requests):
            frame = frame_of[r.id]
            if self.dead[frame]:
                continue
            path = self._longer(path_of[r.id], variant)
            live = self.live.get(frame)
            if live is None:  # the root
                live = self.live[frame] = {}
            else:
                live.pop(r.id, None)
            before = len(born)
            upstream = Upstream(worker, variant, self.now - r.arrival)
            for child, counts in made:
                code = codes[child]
                for _ in range(counts[i]):
                    request = Request(len(frame_of), child, at, r.deadline, upstream=upstream)
                    frame_of.append(frame)
                    task_of.append(code)
                    path_of.append(path)
                    parent_of.append(r.id)
                    arrival_of.append(at)
                    live[request.id] = request
                    born.append(request)
            if len(born) == before:
                self.leaf_frame.append(frame)
                self.leaf_path.append(path)
                if not live:
                    del self.live[frame]
                    self.ended[frame] = self.now
        if born:
            self.at(at, Event.MADE, self._arrive, born)

    def _longer(self, path: int, variant: str) -> int:
        found = self.longer.get((path, variant))
        if found is None:
            names = (*list(self.paths)[path], variant)
            found = self.longer[path, variant] = self.paths.setdefault(names, len(self.paths))
        return found

    def _arrive(self, born: list[Request]) -> None:
        arrived = [r for r in born if not self.dead[self.frame_of[r.id]]]
        if not arrived:
            return
        for r in arrived:
            self.arrived[r.model] += 1
        self.policy.requests_arrived(self.now, arrived)

    def drop(self, drop: Drop) -> None:
        super().drop(drop)
        for r in drop.requests:
            frame = self.frame_of[r.id]
            self.live.get(frame, {}).pop(r.id, None)
            if not self.dead[frame]:
                self.dead[frame] = 1
                self.ended[frame] = self.now
                if not self.dying:  # after all that the policy has decided now
                    self.at(self.now, Event.CANCEL, self._cancel)
                self.dying.append(frame)

    def _cancel(self) -> None:
        left = [r for frame in self.dying for r in self.live.pop(frame, {}).values()]
        self.dying = []
        if left:
            self.policy.requests_cancelled(self.now, left)

    # -- the planner -------------------------------------------------------------------------

    def _first_plan(self) -> list[Worker]:
        """Ask for a plan that is in place at time 0, while all workers are there; what they are."""
        seen = Seen({w: WorkerSays(w, KIND) for w in self.fleet.off})
        asked = self._ask(0.0, self.host.due(0.0, seen), seen)
        verdict = self.host.adopt(asked)
        assert verdict is not None
        workers = self.fleet.begin(self.host.brain.wanted(0.0, seen, hopeless=False))
        self._note(0.0, asked, verdict, self.rows[-1])
        return workers

    def _next_look(self) -> None:
        """Due plans, and looks at demand in between; none after the last deadline."""
        at = self.now + self.timing.check_s
        if self.host.due_at > self.now + 1e-9:  # else it is due when the last one is solved
            at = min(at, self.host.due_at)
        if at <= self.end_of_plans:
            self.at(at, Event.LOOK, self._look)

    def _look(self) -> None:
        self._tell_brain()
        seen = self.fleet.seen(to_plan=True)
        if trigger := self.host.due(self.now, seen):
            asked = self._ask(self.now, trigger, seen)
            applied_at = self.now + self.timing.solve_s
            self.at(applied_at, Event.APPLY, self._apply, asked, self.rows[-1])
        self._next_look()

    def _tell_brain(self) -> None:
        """What was counted since the last look."""
        over_s = self.now - self.heard_at
        if over_s <= 0:
            return
        arrived = int(np.searchsorted(self.clients.arrival, self.now, side="right"))
        root = self.tasks[0]
        self.arrived[root] = arrived - self.heard
        counts = Counts({root: self.arrived[root]}, self.finished, self.made)
        self.host.hear(self.now, over_s, counts)
        if self._listener is not None:
            self._listener(self.now, over_s, self.arrived)
        self.heard, self.heard_at = arrived, self.now
        self.arrived = dict.fromkeys(self.tasks, 0)
        self.finished, self.made = {}, {}

    def _ask(self, now: float, trigger: str, seen: Seen) -> Question:
        asked = self.host.ask(now, trigger, seen)
        row: dict[str, Any] = {"asked_s": now, "why": trigger, "error": asked.error}
        row |= {"demand": asked.inputs["demand"], "running": asked.running}
        if asked.answer is not None:
            row |= _row_of(asked.answer)
        self.rows.append(row)
        return asked

    def _apply(self, asked: Question, row: dict[str, Any]) -> None:
        if (verdict := self.host.adopt(asked)) is not None:
            self._follow()
            self._note(self.now, asked, verdict, row)

    def _note(self, now: float, asked: Question, verdict: Verdict, row: dict[str, Any]) -> None:
        row |= {"applied_s": now, "workers": self.host.brain.target(KIND)}
        self.host.note(now, asked, verdict, self.fleet.variants)

    def _follow(self) -> None:
        """Workers do what the brain wants of them as they are now."""
        brain = self.host.brain
        target = brain.target(KIND)
        if target is None:
            target = self.problem.workers
        self.fleet.grow(target)
        for _ in self.tasks:  # what one does lets another go on
            if not self.fleet.follow(brain.wanted(self.now, self.fleet.seen(), hopeless=False)):
                break
        self.fleet.shrink(target)

    def dispatch(self, d: Dispatch) -> None:
        for r in d.requests:
            frame = self.frame_of[r.id]
            if self.dead[frame] and frame not in self.dying:
                raise PolicyError(f"batch {d.batch_id} has request {r.id}, which was cancelled")
        super().dispatch(d)

    # -- results -----------------------------------------------------------------------------

    def pipeline_report(self, meta: dict[str, Any]) -> PipelineReport:
        """The columns as a `PipelineReport`. Raises PolicyError as `report` does."""
        n = len(self.frame_of)
        policy = self.policy.policy if isinstance(self.policy, Recording) else self.policy
        return PipelineReport(
            {
                **meta,
                **self.names(),
                "policy": type(policy).__name__,
                "tasks": self.tasks,
                "slo_s": self.problem.slo_s,
            },
            {
                "arrival_s": self.clients.arrival,
                "deadline_s": self.clients.deadline,
                "end_s": self.ended,
                "dropped": np.frombuffer(bytes(self.dead), dtype=np.uint8).astype(bool),
            },
            {
                "frame": np.array(self.frame_of, dtype=np.int64),
                "task": np.array(self.task_of, dtype=np.int64),
                "parent": np.array(self.parent_of, dtype=np.int64),
                "arrival_s": np.array(self.arrival_of),
                **self.answers(n),
            },
            self.batches(),
            {
                "frame": np.array(self.leaf_frame, dtype=np.int64),
                "accuracy": np.array([self._accuracy(p) for p in self.paths])[
                    np.array(self.leaf_path, dtype=np.int64)
                ],
            },
            self.rows,
            self.fleet.used,
        )

    def _accuracy(self, path: tuple[str, ...]) -> float:
        accuracy = {v.name: v.accuracy for t in self.problem.tasks for v in t.variants}
        product = 100 * math.prod(accuracy[v] / 100 for v in path)
        return self.problem.path_accuracies.get(path, product)


def _row_of(plans: Plans) -> dict[str, Any]:
    """What a report says of both plans."""
    plan = best(plans.now)
    variants: dict[str, int] = {}
    for (_, variant), n in plan.loaded.items():
        variants[variant] = variants.get(variant, 0) + n
    return {
        "planned_demand": plan.planned_demand,
        "step": plan.step,
        "feasible": plans.shortfall is None,
        "accuracy": plan.accuracy,
        "shed_share": plan.shed_share,
        "swaps": plan.swaps,
        "variants": variants,
        "explanation": plans.shortfall or plans.why,
    }
