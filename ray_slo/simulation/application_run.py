"""A run of an application: requests make further requests, and a planner's brain gives orders to
the workers."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ray_slo.core.cluster import Cluster, Worker
from ray_slo.core.decisions import Dispatch, Drop
from ray_slo.core.policy import Policy
from ray_slo.core.requests import BatchStatus, Request, Upstream
from ray_slo.core.trees import Tree, root_and_class
from ray_slo.planning.brains.asking import Asking, Question
from ray_slo.planning.brains.brain import FIRST, Brain, Key, NotYet, Seen, Verdict
from ray_slo.record.rows import Recording
from ray_slo.simulation.books import PolicyError
from ray_slo.simulation.engine import Batch, Event, Run, Slot
from ray_slo.simulation.fleet import Fleet, Timing
from ray_slo.simulation.grouped import Grouped
from ray_slo.simulation.samplers import Sampler
from ray_slo.simulation.tally import Tally
from ray_slo.simulation.workloads import Requests


@dataclass(frozen=True)
class Shape:
    """An application: what its policy knows of it, and what it really is.

    Attributes:
        trees: the models and pipelines that clients may ask for.
        told: the models as the policy knows them. It has workers only if there is no planner; these
            run all the time.
        real: the models as they really are.
        kinds: the largest number of workers, by kind. Empty if `told` has workers.
        communication_s: delay of a request on the way to a task, in seconds.
        samplers: child tasks by task and variant, with functions that draw the numbers of their
            requests.
        noise: factors of the execution time. None: always 1.
        fits: variants that a worker of a kind may have loaded.
        preempt_delay_s: time from a `Preempt` until the batch stops, in seconds.
        first: number of workers that the first plan is for, by kind. None: the largest number.
    """

    trees: tuple[Tree, ...]
    told: Cluster
    real: Cluster
    kinds: Mapping[str, int]
    communication_s: float
    samplers: Mapping[tuple[str, str], list[tuple[str, Sampler]]]
    noise: Iterator[float] | None = None
    fits: Mapping[str, Collection[str]] = field(default_factory=dict)
    preempt_delay_s: float = 0.0
    first: Mapping[str, int] | None = None


class ApplicationRun(Run):
    """A run of one policy, and of a brain if there is a planner. It lasts until no request is left.

    Args:
        clients: requests of clients. Each of its `models` is a stream.
        asking: asks a brain for plans. None: all workers run, with all variants that they can run.
        duration_s: requests arrive before this time. Later the brain plans only for open frames.
        profiles: measured profiles that the brain gets, by variant and kind.
        tells_sizes: whether the policy and the brain know the sizes of requests.
    """

    def __init__(
        self,
        policy: Policy,
        shape: Shape,
        clients: Requests,
        timing: Timing,
        asking: Asking | None = None,
        duration_s: float = math.inf,
        profiles: Mapping[Key, Any] | None = None,
        tells_sizes: bool = True,
    ) -> None:
        self._sizes = None if tells_sizes or clients.size is None else clients.size.tolist()
        if not tells_sizes:
            clients = replace(clients, size=None)
        self.shape, self.asking, self.clients, self.timing = shape, asking, clients, timing
        self._solving = False
        self._profiles = profiles or {}
        self._grouped = policy if isinstance(policy, Grouped) else None
        nodes = [task for tree in shape.trees for task in tree.order]
        self.tasks = [task.name for task in nodes]
        self.model_of_task = [task.model for task in nodes]
        self._code = {task: code for code, task in enumerate(self.tasks)}
        trees = {tree.name: i for i, tree in enumerate(shape.trees)}
        self._tree_of = [trees[root_and_class(stream)[0]] for stream in clients.models]
        self._root_of = [self._code[shape.trees[i].root] for i in self._tree_of]
        self._last_deadline, self._duration_s = clients.deadline.max(initial=0.0), duration_s
        self.rows: list[dict[str, Any]] = []  # rows of the report, one per question to the planner
        models = [self.model_of_task[code] for code in self._root_of]
        self.tally = Tally(clients, models)

        # Columns of requests by id; clients' come first. `live`: those in flight, by frame.
        n = len(clients)
        self.frame_of = array("q", range(n))
        self.task_of = array("q", np.array(self._root_of, dtype=np.int64)[clients.model].tolist())
        self.path_of = array("q", [0]) * n  # path before the request's own variant
        self.parent_of = array("q", [-1]) * n
        self.arrival_of = array("d", (clients.arrival + shape.communication_s).tolist())
        self.live: dict[int, dict[int, Request]] = {}
        self.dying: list[int] = []
        self.paths: dict[tuple[str, ...], int] = {(): 0}
        self.longer: dict[tuple[int, str], int] = {}
        # Columns of frames.
        self.ended, self.dead = np.full(n, np.nan), bytearray(n)
        self.leaf_frame, self.leaf_path = array("q"), array("q")

        self.fleet = Fleet(shape.kinds, timing)
        if asking is not None:
            workers = self._first_plan(asking)
        else:
            workers = [*shape.told.workers.values()] or self.fleet.all_on(shape.fits)
        super().__init__(
            policy,
            replace(shape.told, workers={w.id: w for w in workers}),
            replace(shape.real, workers={w.id: w for w in workers}),
            self._submitted(),
            shape.noise,
            0.0,
            shape.preempt_delay_s,
            [],
            absent=self.fleet.off,
        )
        self.fleet.attach(self, self._follow)
        if asking is not None:
            self._next_look()

    def _submitted(self) -> Requests:
        """Return the clients' requests for the policy, with models and tasks instead of streams."""
        clients = self.clients
        code = np.array(self._root_of, dtype=np.int64)[clients.model]
        models = list(dict.fromkeys(self.model_of_task))
        model = np.array([models.index(m) for m in self.model_of_task])
        arrival = clients.arrival + self.shape.communication_s
        return Requests(
            models, model[code], arrival, clients.deadline, clients.size, code, self.tasks
        )

    def items(self, requests: Sequence[Request]) -> int:
        if self._sizes is None:
            return super().items(requests)
        n = len(self._sizes)
        return sum([self._sizes[r.id] if r.id < n else 1 for r in requests])

    # -- requests make requests --------------------------------------------------------------

    def end(self, slot: Slot, status: BatchStatus) -> None:
        batch = slot.current
        assert batch is not None
        super().end(slot, status)
        if status is BatchStatus.FINISHED:
            self._make(slot.worker.id, batch)
        if slot.current is None and self.asking is not None:
            self.fleet.emptied(slot.worker.id)

    def returned(self, requests: Sequence[Request]) -> Sequence[Request]:
        return [r for r in requests if not self.dead[self.frame_of[r.id]]]

    def _make(self, worker: str, batch: Batch) -> None:
        of_task: dict[int, list[Request]] = {}
        for r in batch.dispatch.requests:
            of_task.setdefault(self.task_of[r.id], []).append(r)
        born: list[Request] = []
        for code, requests in of_task.items():
            self._make_of(code, requests, worker, batch.dispatch.variant, born)
        if born:
            at = self.now + self.shape.communication_s
            self.at(at, Event.MADE, self._arrive, born)

    def _make_of(
        self, code: int, requests: list[Request], worker: str, variant: str, born: list[Request]
    ) -> None:
        """Add the requests that the requests of one task make to `born`."""
        samplers = self.shape.samplers[self.tasks[code], variant]
        made = [(self._code[child], child, draw(len(requests))) for child, draw in samplers]
        if self.asking is not None:
            self.tally.made(variant, len(requests), {c: sum(n) for _, c, n in made})
        at = self.now + self.shape.communication_s
        frame_of, task_of, path_of = self.frame_of, self.task_of, self.path_of
        parent_of, arrival_of = self.parent_of, self.arrival_of
        for i, r in enumerate(requests):
            frame = frame_of[r.id]
            if self.dead[frame]:
                continue
            path = self._longer(path_of[r.id], variant)
            live = self.live.get(frame)
            if live is None:  # a request at the root
                live = self.live[frame] = {}
            else:
                live.pop(r.id, None)
            before = len(born)
            upstream = Upstream(worker, variant, self.now - r.arrival)
            for child_code, child, counts in made:
                model = self.model_of_task[child_code]
                for _ in range(counts[i]):
                    request = Request(len(frame_of), model, at, r.deadline, 1, child, upstream)
                    frame_of.append(frame)
                    task_of.append(child_code)
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
                    self.tally.close(frame)

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
        self.policy.requests_arrived(self.now, arrived)

    def drop(self, drop: Drop) -> None:
        super().drop(drop)
        for r in drop.requests:
            frame = self.frame_of[r.id]
            self.live.get(frame, {}).pop(r.id, None)
            if not self.dead[frame]:
                self.dead[frame] = 1
                self.ended[frame] = self.now
                self.tally.close(frame)
                if not self.dying:  # cancel after all actions of the present decision
                    self.at(self.now, Event.CANCEL, self._cancel)
                self.dying.append(frame)

    def _cancel(self) -> None:
        left = [r for frame in self.dying for r in self.live.pop(frame, {}).values()]
        self.dying = []
        if left:
            self.policy.requests_cancelled(self.now, left)

    def dispatch(self, d: Dispatch) -> None:
        for r in d.requests:
            frame = self.frame_of[r.id]
            if self.dead[frame] and frame not in self.dying:
                raise PolicyError(f"batch {d.batch_id} has request {r.id}, which was cancelled")
        super().dispatch(d)

    # -- the planner -------------------------------------------------------------------------

    def _first_plan(self, asking: Asking) -> list[Worker]:
        """Make the plan that is in force at time 0, for the workers `first`. Return the workers."""
        seen = self._told(self.fleet.at_first(self.shape.first))
        asked = self._ask(0.0, FIRST, seen)
        if asked.error:
            raise ValueError(asked.error)
        verdict = asking.adopt(asked, asking.brain.solve(asked.problem))
        workers = self.fleet.begin(asking.brain.wanted(0.0, seen, hopeless=False))
        self._route()
        self._note(0.0, asked, verdict, self.rows[-1])
        return workers

    def _told(self, seen: Seen) -> Seen:
        """Return the reports with profiles, and with the frontend's report about groups."""
        if self._profiles:
            seen = replace(seen, profiles=self._profiles)
        if self._grouped is None:
            return seen
        return replace(seen, frontends={"clients": self._grouped.says})

    def _next_look(self) -> None:
        """Schedule the next plan or look at the demand, while a request may need it."""
        assert self.asking is not None and self.asking.asked_at is not None
        at = self.now + self.timing.check_s
        due_at = self.asking.asked_at + self.asking.interval_s
        if due_at > self.now + 1e-9:  # otherwise it is due when the last plan is solved
            at = min(at, due_at)
        if at <= self._last_deadline and (self.tally.open or at <= self._duration_s):
            self.at(at, Event.LOOK, self._look)

    def _look(self) -> None:
        assert self.asking is not None
        over_s, counts = self.tally.take(self.now, self.ended, self.dead)
        self.asking.brain.counted(self.now, over_s, counts)
        seen = self._told(self.fleet.seen(to_plan=True))
        if not self._solving and (trigger := self.asking.due(self.now, seen)):
            with suppress(NotYet):
                self._plan(self._ask(self.now, trigger, seen))
        elif self._grouped is not None:  # a group may have no more requests of a moved model
            self._follow()
        self._next_look()

    def _ask(self, now: float, trigger: str, seen: Seen) -> Question:
        assert self.asking is not None
        there = Counter(says.kind for says in seen.workers.values() if says.assigned)
        running = {kind: there[kind] for kind in self.shape.kinds}
        error = self.asking.error
        asked = self.asking.ask(now, trigger, seen, running)
        if asked.error and asked.error == error:  # it may happen every second
            return asked
        row = {"asked_s": now, "why": trigger, "error": asked.error, "running": there.total()}
        self.rows.append({**row, "demand": asked.inputs["demand"]})
        return asked

    def _plan(self, asked: Question) -> None:
        """Solve a question's problem now. The answer takes effect `solve_s` later."""
        assert self.asking is not None
        if asked.error:
            return
        try:
            answer = self.asking.brain.solve(asked.problem)
        except Exception as error:
            self.asking.failed(asked, error)
            self.rows[-1]["error"] = self.asking.error
            return
        self._solving = True
        applied_at = self.now + self.timing.solve_s
        self.at(applied_at, Event.APPLY, self._apply, asked, answer, self.rows[-1])

    def _apply(self, asked: Question, answer: Any, row: dict[str, Any]) -> None:
        assert self.asking is not None
        self._solving = False
        verdict = self.asking.adopt(asked, answer)
        self._follow()
        self._note(self.now, asked, verdict, row)

    def _note(self, now: float, asked: Question, verdict: Verdict, row: dict[str, Any]) -> None:
        assert self.asking is not None
        row |= {"applied_s": now, **_told(self.asking.brain, self.shape.kinds, verdict)}
        self.asking.note(asked, verdict, self.fleet.variants, now - asked.at)

    def _follow(self) -> None:
        """Give workers the brain's orders for the present state, until nothing changes."""
        if self.asking is None:
            return
        brain = self.asking.brain
        for kind, most in self.shape.kinds.items():
            target = brain.target(kind)
            self.fleet.grow(kind, most if target is None else target)
        for _ in self.tasks:  # a step of one worker may allow a step of another
            seen = self._told(self.fleet.seen())
            news = self.fleet.follow(brain.wanted(self.now, seen, hopeless=False))
            self._route()
            if not news:
                break
        for kind, most in self.shape.kinds.items():  # these steps may allow workers to stop
            target = brain.target(kind)
            self.fleet.shrink(kind, most if target is None else target)

    def _route(self) -> None:
        assert self.asking is not None
        routing = self.asking.brain.routing
        if self._grouped is not None and routing is not None:
            self._grouped.route(routing.number, routing.routes)

    # -- results -----------------------------------------------------------------------------

    def results(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a report. Raises PolicyError if a request was answered twice."""
        policy = self.policy.policy if isinstance(self.policy, Recording) else self.policy
        leaf = np.array([self._accuracies(i) for i in range(len(self.shape.trees))])
        frames = np.array(self.leaf_frame, dtype=np.int64)
        tree = np.array(self._tree_of, dtype=np.int64)[self.clients.model[frames]]
        return {
            "meta": {
                **meta,
                **self.names(),
                "policy": type(policy).__name__,
                "tasks": self.tasks,
                "streams": list(self.clients.models),
            },
            "frames": {
                "arrival_s": self.clients.arrival,
                "deadline_s": self.clients.deadline,
                "end_s": self.ended,
                "dropped": np.frombuffer(bytes(self.dead), dtype=np.uint8).astype(bool),
                "stream": self.clients.model,
            },
            "requests": {
                "frame": np.array(self.frame_of, dtype=np.int64),
                "task": np.array(self.task_of, dtype=np.int64),
                "parent": np.array(self.parent_of, dtype=np.int64),
                "arrival_s": np.array(self.arrival_of),
                **self.answers(len(self.frame_of)),
            },
            "batches": self.batches(),
            "leaves": {
                "frame": frames,
                "accuracy": leaf[tree, np.array(self.leaf_path, dtype=np.int64)],
            },
            "plans": self.rows,
            "used": self.fleet.used,
        }

    def _accuracies(self, tree: int) -> list[float]:
        """Return the end-to-end accuracy of every path in a tree, in percent."""
        known = self.shape.trees[tree].path_accuracies
        of = {v.name: v.accuracy or 0.0 for v in self.shape.told.variants.values()}
        return [known.get(p, 100 * math.prod(of[v] / 100 for v in p)) for p in self.paths]


def _told(brain: Brain, kinds: Iterable[str], verdict: Verdict) -> dict[str, Any]:
    """Return the part of a report's row that says what was planned."""
    targets, outcome = [brain.target(kind) for kind in kinds], brain.outcome()
    variants = Counter[str]()
    for part in outcome.get("assignments", ()):
        variants[part["variant"]] += part["workers"]
    return {
        "workers": None if None in targets else sum(filter(None, targets)),
        **{name: outcome.get(name) for name in ("step", "planned_demand", "accuracy", "swaps")},
        "variants": dict(variants),
        "expected_bad": outcome.get("bad_rate"),
        "shortfall": verdict.shortfall,
        "explanation": verdict.why,
    }
