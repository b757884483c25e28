"""A pipeline in virtual time, its planner in the loop: `simulate_pipeline(problem, workload, …)`.

The host of `simulator` with three things on top. *Requests make requests*: when a batch ends, each
of its requests makes a random number for every child task, which arrive there `communication_s`
later with the deadline of the client's request (here: a *frame*); a frame is answered when nothing
of it is left. When the policy drops one of its requests, the rest is cancelled. *The planner runs*:
every `interval_s`, and when demand has changed by more than chance, it is asked for a plan for the
measured demand and factors; its answer takes effect `solve_s` later. *Workers take time*: to start
(`start_s`) and to load a variant (`load_s`).

Demand is measured, changes are noticed and factors are learned by the code of the live planner, and
as there, while workers start, those that are up run a plan of their own (`planning.meanwhile`). A
worker that a plan has no use for ends its batch and is off; one that gets another variant serves
the old one until the new one is there (make before break), or nothing. A planner that raises
changes nothing: the last plan holds.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from ray_slo.core.cluster import Assigned, Cluster, Model, Variant, Worker
from ray_slo.core.decisions import Dispatch, Drop
from ray_slo.core.demand import Factors, Rate
from ray_slo.core.policy import Policy
from ray_slo.core.requests import BatchStatus, Request, Upstream, WorkerId
from ray_slo.planning import loki
from ray_slo.planning.meanwhile import Made, Plans, best, plan_both
from ray_slo.planning.placement import place
from ray_slo.policies.registry import make_policy
from ray_slo.record.plans import Outline, PlanLines, Planned
from ray_slo.record.rows import Lines, Recording, Start
from ray_slo.simulation.engine import Batch, Event, PolicyError, Run, Slot, noise_factors
from ray_slo.simulation.pipeline_report import PipelineReport
from ray_slo.simulation.workloads import Requests, Workload

Items = Literal["poisson", "geometric", "fixed"]
_HARDWARE = "default"
_TRIGGERS = {
    "first": "first plan",
    "period": "period",
    "change": "demand changed",
    "workers": "worker joined",
}


class Planner(Protocol):
    """What `loki.plan` is. An object that has a method `observe(now, rates)` is told before each
    call how many requests per second arrive at each task."""

    def __call__(self, problem: loki.Problem, last: loki.Plan | None) -> Made: ...


def simulate_pipeline(
    problem: loki.Problem,
    workload: Workload,
    *,
    planner: Planner = loki.plan,
    policy: str | Policy | Callable[..., Policy] = "pipeline",
    policy_kwargs: Mapping[str, Any] | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    interval_s: float = 10.0,
    check_s: float = 1.0,
    demand: Callable[[], Rate] = Rate,
    initial_demand: float | None = None,
    learn_factors: bool = True,
    solve_s: float = 0.0,
    load_s: float = 0.0,
    start_s: float = 0.0,
    make_before_break: bool = True,
    items: Items = "poisson",
    latency_noise: float = 0.0,
    truth: Sequence[loki.Task] | None = None,
    log: str | Path | None = None,
) -> PipelineReport:
    """Run a pipeline until every request has been answered.

    Args:
        problem: tasks as profiled, the largest number of workers, the SLO and what else the planner
            is to respect. `demand` and `current` are filled in for each plan, and the factors.
        workload: when clients' requests arrive.
        planner: see `Planner`. What it raises for its first plan is raised.
        policy: an object (used up by the run), or a name or class that gets the arguments parents,
            factors, communication_s and waiting_factor of the problem, then `policy_kwargs`.
        duration_s: requests arrive in [0, duration_s); by default as long as the workload lasts.
        seed: of arrivals, numbers of items and noise (independent streams).
        interval_s: between plans.
        check_s: so often demand is counted, and looked at for a significant change.
        demand: makes what measures demand, at the root and for `observe` at each task.
        initial_demand: of the first plan, which is in place at time 0, requests per second; by
            default what arrives in the first interval.
        learn_factors: plan with the factors observed so far, else with those of `problem`.
        solve_s: from the question for a plan until it takes effect.
        load_s: a worker needs to load a variant.
        start_s: a worker needs to start, before it can load.
        make_before_break: a worker serves its old variant while it loads the new one.
        items: distribution of the requests made per request around the factor: "fixed" is the
            nearest whole numbers whose running mean is the factor.
        latency_noise: as in `simulate`.
        truth: the tasks as they are, where profiles or factors differ from the problem's.
        log: folder for the decision log of the run, planner included, as of a live one: for
            `ray-slo report` and `ray-slo replay`.

    Raises:
        ValueError: bad arguments.
        PolicyError: the policy broke its contract.
    """
    if duration_s is None and (duration_s := workload.length_s) is None:
        raise ValueError("duration_s is needed: the workload's arrivals go on for ever")
    for name, value in (
        ("duration_s", duration_s),
        ("interval_s", interval_s),
        ("check_s", check_s),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive, got {value}")
    for name, value in (
        ("solve_s", solve_s),
        ("load_s", load_s),
        ("start_s", start_s),
        ("latency_noise", latency_noise),
    ):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be at least 0, got {value}")
    if items not in get_args(Items):
        raise ValueError(f"items must be one of {', '.join(get_args(Items))}, got {items!r}")
    real = tuple(truth or problem.tasks)
    if _names(real) != _names(problem.tasks):
        raise ValueError("truth must have the tasks and variants of the problem")
    arrivals_rng, noise_rng, items_rng = np.random.default_rng(seed).spawn(3)
    root = problem.order[0]
    clients = workload.generate(
        Cluster.of([_model(root, problem.slo_s)], []), duration_s, arrivals_rng
    )
    if clients.size is not None:
        raise ValueError("sizes have no meaning in a pipeline; leave them out of the workload")
    if initial_demand is None:
        first_s = min(interval_s, max(duration_s, check_s))
        initial_demand = float(np.searchsorted(clients.arrival, first_s)) / first_s
    target: Any = policy
    if isinstance(policy, str) or callable(policy):
        policy_kwargs = {
            "parents": {t.name: t.parent for t in problem.order},
            "factors": {v: f for t in problem.order for v, f in _factors(problem, t).items()},
            "communication_s": problem.communication_s,
            "waiting_factor": problem.waiting_factor,
            **(policy_kwargs or {}),
        }
    chosen = make_policy(target, policy_kwargs)
    planning = _Planning(problem, planner, demand, learn_factors, clients.arrival)
    lines: Lines | None = None
    if log is not None:
        about = {"application": root.name, "models": [t.name for t in problem.order]}
        about["clock"] = name = f"simulated-{root.name}"
        lines = Lines(log, name, Start.of(policy, policy_kwargs or {}, **about))
        chosen = Recording(chosen, lines)
        planning.lines = PlanLines(log, name, Start.of(planning.name, {}, **about))
    timing = _Timing(interval_s, check_s, solve_s, load_s, start_s, make_before_break)
    run = _PipelineRun(
        chosen,
        problem,
        real,
        planning,
        timing,
        clients,
        initial_demand,
        noise_factors(latency_noise, noise_rng),
        _samplers(problem, real, items, items_rng),
    )
    run.loop()
    if lines is not None and planning.lines is not None:
        lines.close()
        planning.lines.close()
    return run.pipeline_report({"duration_s": duration_s, "seed": seed})


def _names(tasks: Sequence[loki.Task]) -> dict[str, list[str]]:
    return {t.name: [v.name for v in t.variants] for t in tasks}


def _model(task: loki.Task, slo_s: float) -> Model:
    return Model(
        task.name,
        slo_s,
        tuple(Variant(v.name, {_HARDWARE: v.profile}, v.accuracy) for v in task.variants),
    )


def _factors(problem: loki.Problem, task: loki.Task) -> dict[str, dict[str, float]]:
    """By variant, for all child tasks."""
    children = [c.name for c in problem.children(task)]
    return {v.name: {c: v.factors.get(c, 1.0) for c in children} for v in task.variants}


Sampler = Callable[[int], list[int]]  # how many items each of n requests makes


def _samplers(
    problem: loki.Problem, tasks: Sequence[loki.Task], items: Items, rng: np.random.Generator
) -> dict[str, list[tuple[str, Sampler]]]:
    """By variant: child tasks, and what draws for them."""
    return {
        variant: [(child, _sampler(items, mean, rng)) for child, mean in factors.items()]
        for task in tasks
        for variant, factors in _factors(problem, task).items()
    }


def _sampler(items: Items, mean: float, rng: np.random.Generator) -> Sampler:
    if items == "poisson":
        return lambda n: rng.poisson(mean, n).tolist()
    if items == "geometric":
        return lambda n: (rng.geometric(1 / (1 + mean), n) - 1).tolist()

    def fixed() -> Iterator[int]:
        for i in count():
            yield math.floor((i + 1) * mean + 1e-9) - math.floor(i * mean + 1e-9)

    numbers = fixed()
    return lambda n: [next(numbers) for _ in range(n)]


@dataclass(frozen=True)
class _Timing:
    interval_s: float
    check_s: float
    solve_s: float
    load_s: float
    start_s: float
    make_before_break: bool


class _Planning:
    """What is measured, and what the planner says to it."""

    def __init__(
        self,
        problem: loki.Problem,
        planner: Planner,
        demand: Callable[[], Rate],
        learn_factors: bool,
        arrivals: Any,
    ) -> None:
        self.problem = problem
        self.planner = planner
        self.root = problem.order[0].name
        self.demands = {t.name: demand() for t in problem.order}
        prior = {v: f for t in problem.order for v, f in _factors(problem, t).items()}
        self.factors = Factors({v: f for v, f in prior.items() if f})
        self.learn_factors = learn_factors
        self.arrivals = arrivals
        self.fed = 0  # arrivals that `demands` has seen
        self.fed_at = 0.0
        self.arrived = dict.fromkeys(self.demands, 0)  # at tasks, since then
        self.planned = 0.0  # the demand of the last plan, without headroom
        self.last: loki.Plan | None = None
        self.rows: list[dict[str, Any]] = []
        self.lines: PlanLines | None = None
        self.outline = Outline()  # of the last plan that took effect

    @property
    def name(self) -> str:
        return getattr(self.planner, "__name__", type(self.planner).__name__)

    def feed(self, now: float) -> None:
        """Count what arrived since the last look."""
        if now <= self.fed_at:
            return
        end = int(np.searchsorted(self.arrivals, now, side="right"))
        self.arrived[self.root] = end - self.fed
        for task, demand in self.demands.items():
            demand.counted(now, now - self.fed_at, self.arrived[task])
            self.arrived[task] = 0
        self.fed, self.fed_at = end, now

    def plan(
        self,
        now: float,
        why: str,
        demand: float,
        current: Mapping[str, int] | None,
        present: int,
    ) -> Plans | None:
        """The plans to carry out, None where the planner failed (not for the first plan)."""
        problem = replace(self.problem, demand=demand, tasks=self._tasks())
        task_of = {v.name: t.name for t in problem.tasks for v in t.variants}
        if current is not None:
            loaded = {(task_of[v], v): n for v, n in current.items()}
            problem = replace(problem, current=loaded)
        if observe := getattr(self.planner, "observe", None):
            rates = {t: d.value(now) for t, d in self.demands.items()}
            if now == 0:  # nothing measured yet
                rates = self._expected(problem)
            observe(now, rates)
        running = sum(current.values()) if current is not None else 0
        row: dict[str, Any] = {"asked_s": now, "why": why, "demand": demand, "running": running}
        self.rows.append(row)
        try:
            plans = plan_both(problem, present, self.last, self.planner)
        except Exception as error:
            if self.last is None:
                raise
            row["error"] = f"{type(error).__name__}: {error}"
            self.note(row, None, {})
            return None
        plan = best(plans.now)
        self.last, self.planned = plan, demand
        loaded_variants: dict[str, int] = {}
        for (_, variant), n in plan.loaded.items():
            loaded_variants[variant] = loaded_variants.get(variant, 0) + n
        row |= {
            "planned_demand": plan.planned_demand,
            "step": plan.step,
            "feasible": plans.shortfall is None,
            "workers": best(plans.whole).workers,
            "accuracy": plan.accuracy,
            "shed_share": plan.shed_share,
            "swaps": plan.swaps,
            "variants": loaded_variants,
            "explanation": plans.shortfall or plans.why,
            "error": "",
        }
        return plans

    def note(
        self, row: Mapping[str, Any], plans: Plans | None, placed: Mapping[str, Assigned]
    ) -> None:
        """Log a question to the planner: as its plan takes effect, or it has none."""
        if self.lines is None:
            return
        told: dict[str, Any] = {"error": row["error"]}
        if plans is not None:
            plan = best(plans.now)
            outline = Outline.of_assignments(
                {_HARDWARE: best(plans.whole).workers},
                [(a.variant, a.batch_size, a.workers) for a in plan.assignments],
            )
            told |= {
                "targets": outline.targets,
                "plan": {
                    **{k: row[k] for k in ("planned_demand", "step", "accuracy", "shed_share")},
                    "assignments": [a.to_json() for a in plan.assignments],
                },
                "workers": {worker: a.variant for worker, a in placed.items()},
                "changes": outline.changes(self.outline),
                "why": plans.why,
                "shortfall": plans.shortfall,
                "took_s": row["applied_s"] - row["asked_s"],
            }
            self.outline = outline
        inputs = {"workers": {_HARDWARE: row["running"]}, "factors": self.factors_by_variant()}
        trigger = _TRIGGERS[row["why"]]
        self.lines(Planned(row["asked_s"], trigger, row["demand"], inputs, **told))

    def factors_by_variant(self) -> dict[str, Mapping[str, float]]:
        """As observed so far, or as the problem has them."""
        return {v.name: dict(v.factors) for t in self._tasks() for v in t.variants if v.factors}

    def _tasks(self) -> tuple[loki.Task, ...]:
        if not self.learn_factors:
            return self.problem.tasks
        known = {v for t in self.problem.tasks for v, f in _factors(self.problem, t).items() if f}
        return tuple(
            replace(
                t,
                variants=tuple(
                    replace(v, factors=self.factors.of(v.name)) if v.name in known else v
                    for v in t.variants
                ),
            )
            for t in self.problem.tasks
        )

    def _expected(self, problem: loki.Problem) -> dict[str, float]:
        """Requests per second by task, if all run the most accurate variants."""
        rates = {self.root: problem.demand}
        for task in problem.order:
            best = max(task.variants, key=lambda v: v.accuracy)
            for child in problem.children(task):
                rates[child.name] = rates[task.name] * best.factors.get(child.name, 1.0)
        return rates


@dataclass(slots=True)
class _Host:
    """A worker as the plan and its process have it."""

    target: Assigned | None = None  # None: off, or on its way there
    has: str | None = None  # the variant in memory
    loading: str | None = None
    up_at: float = math.inf  # when its process is there; inf where it is off
    token: int = 0  # of the loading that counts
    empties: bool = False  # loads when its batches are over


class _PipelineRun(Run):
    def __init__(
        self,
        policy: Policy,
        problem: loki.Problem,
        truth: tuple[loki.Task, ...],
        planning: _Planning,
        timing: _Timing,
        clients: Requests,
        initial_demand: float,
        noise: Iterator[float] | None,
        samplers: Mapping[str, list[tuple[str, Sampler]]],
    ) -> None:
        self.problem = problem
        self.planning = planning
        self.timing = timing
        self.clients = clients
        self.samplers = samplers
        self.tasks = [t.name for t in problem.order]
        self.task_by_variant = {v.name: t.name for t in problem.order for v in t.variants}
        self.end_of_plans = float(clients.deadline.max(initial=0.0))

        ids = [f"w{i}" for i in range(problem.workers)]
        self.hosts = {w: _Host() for w in ids}
        demand = max(float(initial_demand), self.least)
        plans = planning.plan(0.0, "first", demand, None, len(ids))  # they are there
        assert plans is not None
        planning.rows[-1]["applied_s"] = 0.0
        placed = place(best(plans.whole), dict.fromkeys(ids))
        planning.note(planning.rows[-1], plans, placed)
        workers = []
        for w, host in self.hosts.items():
            host.target = placed.get(w)
            if host.target is not None:
                host.has, host.up_at = host.target.variant, 0.0
                workers.append(Worker(w, _HARDWARE, frozenset({host.has}), host.target))
            else:
                workers.append(Worker(w, _HARDWARE, frozenset()))
        self.used = [(0.0, len(placed))]  # workers that are on, from when on

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

        models = [_model(t, problem.slo_s) for t in problem.order]
        real = {t.name: t for t in truth}
        super().__init__(
            policy,
            Cluster.of(models, workers),
            Cluster.of([_model(real[t], problem.slo_s) for t in self.tasks], workers),
            replace(clients, arrival=clients.arrival + problem.communication_s),
            noise,
            0.0,
            0.0,
            [],
            absent=[w for w in ids if w not in placed],
        )
        self.useful = self.planned_for = len(placed)  # workers: by plan, and there when it was made
        self.told = True  # the policy knows the cluster as it is
        self.solving = False
        self.due = 0.0
        self._next_tick()

    @property
    def least(self) -> float:
        """A pipeline is never scaled to zero: there is no one who would wait for its start."""
        return 1.0 / self.timing.interval_s

    # -- requests make requests --------------------------------------------------------------

    def end(self, slot: Slot, status: BatchStatus) -> None:
        batch = slot.current
        assert batch is not None
        super().end(slot, status)
        if status is BatchStatus.FINISHED:
            self._make(slot.worker.id, batch)
        if slot.current is None:
            self._emptied(slot.worker.id)

    def _make(self, worker: WorkerId, batch: Batch) -> None:
        requests, variant = batch.dispatch.requests, batch.dispatch.variant
        made = [(child, draw(len(requests))) for child, draw in self.samplers[variant]]
        if made:
            self.planning.factors.observe(variant, len(requests), {c: sum(k) for c, k in made})
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
                    request = Request(len(frame_of), child, at, r.deadline, 1, upstream)
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
        for task in {r.model for r in arrived}:
            number = sum(r.model == task for r in arrived)
            self.planning.arrived[task] += number
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

    def _next_tick(self) -> None:
        """Due plans, and looks at demand in between; none after the last deadline."""
        if self.now >= self.due - 1e-9:
            self.due = self.now + self.timing.interval_s
        at = min(self.due, self.now + self.timing.check_s)
        if at <= self.end_of_plans:
            self.at(at, Event.LOOK, self._tick)

    def _there(self) -> list[WorkerId]:
        """Workers that serve, or could at once."""
        if not self.timing.start_s + self.timing.load_s:
            return list(self.hosts)
        return [w for w, host in self.hosts.items() if w in self.slots and host.target is not None]

    def _tick(self) -> None:
        planning, now = self.planning, self.now
        planning.feed(now)
        there = len(self._there())
        if self.solving:
            why = ""
        elif now >= self.due - 1e-9:
            why = "period"
        elif planning.demands[planning.root].differs(now, planning.planned):
            why = "change"
        elif min(there, self.useful) != min(self.planned_for, self.useful):
            why = "workers"
        else:
            why = ""
        if why:
            self.due = now  # the period begins anew
            self.solving = True
            self.planned_for = there
            demand = max(planning.demands[planning.root].value(now), self.least)
            current: dict[str, int] = {}
            for host in self.hosts.values():
                if host.target is not None:
                    variant = host.target.variant
                    current[variant] = current.get(variant, 0) + 1
            plans = planning.plan(now, why, demand, current, there)
            self.at(now + self.timing.solve_s, Event.APPLY, self._apply, plans, planning.rows[-1])
        self._next_tick()

    def _apply(self, plans: Plans | None, row: dict[str, Any]) -> None:
        self.solving = False
        if plans is None:
            return
        row["applied_s"] = self.now
        whole, there = best(plans.whole), set(self._there())
        self.useful = whole.workers
        on = sum(host.target is not None for host in self.hosts.values())
        ranked = sorted(
            self.hosts.items(),
            key=lambda item: (item[1].target is None, item[1].up_at == math.inf),
        )[: max(whole.workers, on)]
        placed = place(whole, {w: self._variant(host) for w, host in ranked})
        kept: set[WorkerId] = set()
        if plans.now is not plans.whole:
            now = place(best(plans.now), {w: self._variant(h) for w, h in ranked if w in there})
            if {self.task_by_variant[a.variant] for a in now.values()} == set(self.tasks):
                placed = {w: a for w, a in placed.items() if w not in there} | now
                kept = there  # they will be needed
        self.planning.note(row, plans, placed)
        for worker, host in self.hosts.items():
            if (assigned := placed.get(worker)) is not None:
                self._assign(worker, host, assigned)
            elif host.target is not None and worker not in kept:
                self._retire(worker, host)
        self._count()

    @staticmethod
    def _variant(host: _Host) -> str | None:
        return host.target.variant if host.target is not None else host.has

    # -- workers -----------------------------------------------------------------------------

    def _assign(self, worker: WorkerId, host: _Host, assigned: Assigned) -> None:
        host.target = assigned
        slot, timing = self.slots.get(worker), self.timing
        if host.has == assigned.variant:
            assert slot is not None
            host.loading, host.empties = None, False
            host.token += 1
            self._show(slot, frozenset({host.has}), assigned)
        elif host.loading != assigned.variant:
            host.loading = assigned.variant
            host.token += 1
            if host.up_at == math.inf:
                host.up_at = self.now + timing.start_s
            if slot is None or timing.make_before_break:
                self._load(worker, host)
                return
            host.has, host.empties = None, True
            self._show(slot)
            if slot.current is None:
                self._emptied(worker)

    def _load(self, worker: WorkerId, host: _Host) -> None:
        ready_at = max(self.now, host.up_at) + self.timing.load_s
        self.at(ready_at, Event.READY, self._ready, worker, host, host.token)

    def _ready(self, worker: WorkerId, host: _Host, token: int) -> None:
        if host.token != token or host.target is None:
            return
        host.has, host.loading = host.target.variant, None
        if (slot := self.slots.get(worker)) is None:
            off = Worker(worker, _HARDWARE, frozenset())
            slot = self.slots[worker] = Slot(off, self.index_of[worker])
        self._show(slot, frozenset({host.has}), host.target)

    def _retire(self, worker: WorkerId, host: _Host) -> None:
        host.target = host.loading = None
        host.token += 1
        slot = self.slots.get(worker)
        if slot is not None:
            self._show(slot)
        if slot is None or slot.current is None:
            self._off(worker, host)

    def _emptied(self, worker: WorkerId) -> None:
        """A worker has ended its last batch."""
        host = self.hosts[worker]
        if host.target is None:
            self._off(worker, host)
        elif host.empties:
            host.empties = False
            self._load(worker, host)

    def _off(self, worker: WorkerId, host: _Host) -> None:
        host.has, host.up_at, host.empties = None, math.inf, False
        if self.slots.pop(worker, None) is not None:
            self._changed()
        self._count()

    def _show(
        self, slot: Slot, loaded: frozenset[str] = frozenset(), assigned: Assigned | None = None
    ) -> None:
        shown = Worker(slot.worker.id, _HARDWARE, loaded, assigned)
        if shown != slot.worker:
            slot.worker = shown
            self._changed()

    def _changed(self) -> None:
        """The policy is told once, when all that happens at this instant has."""
        if self.told:
            self.told = False
            self.at(self.now, Event.CLUSTER, self._tell_cluster)

    def _tell_cluster(self) -> None:
        self.told = True
        self.become(self.present())

    def _count(self) -> None:
        on = sum(host.up_at < math.inf for host in self.hosts.values())
        if on != self.used[-1][1]:
            self.used.append((self.now, on))

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
                "planner": self.planning.name,
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
            self.planning.rows,
            self.used,
        )

    def _accuracy(self, path: tuple[str, ...]) -> float:
        accuracy = {v.name: v.accuracy for t in self.problem.tasks for v in t.variants}
        product = 100 * math.prod(accuracy[v] / 100 for v in path)
        return self.problem.path_accuracies.get(path, product)
